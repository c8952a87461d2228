# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The programs of a recorded Mac: one script under many names. It runs inside of that Mac, without the collection.

What only answers, answers from /recorded/answers; launchctl, dscl, pfctl, pmset, sysctl and brew keep state in
/recorded/state.json. Whatever was not recorded ends with status 99 and is written to /recorded/unrecorded.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import plistlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOME = Path("/recorded")
STATE: dict[str, Any] = {}
ONE_SHOTS: list[subprocess.Popen[bytes]] = []


def say(text: str, status: int = 0) -> int:
    sys.stdout.write(text)
    return status


def complain(text: str, status: int) -> int:
    sys.stderr.write(text + "\n")
    return status


def unrecorded(name: str, words: list[str]) -> int:
    with (HOME / "unrecorded").open("a") as into:
        into.write(" ".join([name, *words]) + "\n")
    return complain(f"{name} {' '.join(words)}: not recorded", 99)


# ----------------------------------------------------------------------------------------------------- launchd


def alive(pid: int | None) -> bool:
    """The recorded Mac has no /proc, as no Mac has; its programs look through a hole in the wall."""
    try:
        return (HOME / "proc" / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def launchctl(words: list[str]) -> int:
    jobs, disabled = STATE.setdefault("jobs", {}), STATE.setdefault("disabled", [])
    STATE.setdefault("launchctl", []).append(words)
    label = words[-1].rpartition("/")[2].removesuffix(".plist")
    if words[0] == "print-disabled":
        return say("disabled services = {\n" + "".join(f'\t\t"{one}" => disabled\n' for one in disabled) + "\t}\n")
    if words == ["print", "system"]:
        lines = "".join(f"\t\t  {job['pid'] if alive(job['pid']) else 0}  -  \t{one}\n" for one, job in jobs.items())
        return say(f"system = {{\n\tservices = {{\n{lines}\t}}\n}}\n")
    if words[0] == "print":
        if label not in jobs:
            return complain("Could not find service", 113)
        job = jobs[label]
        lines = "".join(f"\t\t{word}\n" for word in job["plist"]["ProgramArguments"])
        pid = f"\tpid = {job['pid']}\n" if alive(job["pid"]) else ""
        state = "running" if pid else "not running"
        return say(
            f"system/{label} = {{\n\tpath = {job['path']}\n\tstate = {state}\n\targuments = {{\n{lines}\t}}\n{pid}}}\n"
        )
    if words[0] in ("enable", "disable"):
        STATE["disabled"] = [one for one in disabled if one != label] + ([label] if words[0] == "disable" else [])
        return 0
    if words[:2] == ["bootstrap", "system"] and label in disabled:
        return complain("Bootstrap failed: 5: Input/output error", 5)
    if words[:2] == ["bootstrap", "system"]:
        found = os.lstat(words[2])
        if (found.st_mode, found.st_uid, found.st_gid) != (0o100644, 0, 0):
            return complain(f"Bootstrap failed: 5: {oct(found.st_mode)}", 5)
        if label in jobs:
            return complain("Bootstrap failed: 37: Operation already in progress", 37)
        plist = plistlib.loads(Path(words[2]).read_bytes())
        jobs[label] = {"path": words[2], "plist": plist, "pid": start(plist)}
        return 0
    if words[0] == "bootout":
        if label not in jobs:
            return complain("Boot-out failed: 3: No such process", 3)
        stop(jobs.pop(label)["pid"])
        return 0
    if words[:2] == ["kickstart", "-k"] and label in jobs:
        stop(jobs[label]["pid"])
        jobs[label]["pid"] = start(jobs[label]["plist"])
        return 0
    return unrecorded("launchctl", words)


def start(plist: dict[str, Any]) -> int:
    log = plist.get("StandardOutPath") or plist.get("StandardErrorPath", "/dev/null")
    with open(log, "ab") as into:
        process = subprocess.Popen(
            plist["ProgramArguments"],
            env={"PATH": "/recorded/bin:/usr/bin:/bin:/usr/sbin:/sbin", **plist.get("EnvironmentVariables", {})},
            cwd=plist.get("WorkingDirectory", "/"),
            stdin=subprocess.DEVNULL,
            stdout=into,
            stderr=into,
            start_new_session=True,
        )
    if not plist.get("KeepAlive"):
        ONE_SHOTS.append(process)
    return process.pid


def stop(pid: int | None) -> None:
    if alive(pid):
        os.killpg(pid or 0, signal.SIGTERM)
    end = time.monotonic() + 5
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)


# --------------------------------------------------------------------------------------------------- accounts


def dscl(words: list[str]) -> int:
    users = STATE.setdefault("users", {})
    verb, name = words[1], words[2].rpartition("/")[2]
    if verb == "-list":
        return say("".join(f"{user}  {users[user].get('UniqueID', '1')}\n" for user in users) + "daemon  1\n_www  70\n")
    if verb == "-create":
        user = users.setdefault(name, {})
        if len(words) > 4:
            user[words[3]] = words[4]
        account = Path("/etc/passwd")
        others = [line for line in account.read_text().splitlines() if not line.startswith(name + ":")]
        uid = user.get("UniqueID")
        mine = [f"{name}:x:{uid}:{user.get('PrimaryGroupID', 20)}::/:/usr/bin/false"] if uid else []
        account.write_text("\n".join([*others, *mine, ""]))
        return 0
    if verb == "-read" and name in users and len(words) > 3:
        value = users[name].get(words[3])
        return complain("No such key", 181) if value is None else say(f"{words[3]}: {value}\n")
    if verb == "-read":
        return complain("<dscl_cmd> DS Error: -14136 (eDSRecordNotFound)", 56)
    return say("") if verb == "-search" else unrecorded("dscl", words)


def dseditgroup(words: list[str]) -> int:
    if words[:2] != ["-o", "create"]:
        return unrecorded("dseditgroup", words)
    with open("/etc/group", "a") as into:
        into.write(f"{words[-1]}:x:401:\n")
    return 0


def sudo(words: list[str]) -> int:
    user = words[words.index("-u") + 1]
    command = words[words.index("-u") + 2 :]
    return subprocess.run(command, env={**os.environ, "RUNS_AS": user}, check=False).returncode


# ---------------------------------------------------------------------------------------------------- settings


REAL_IP = ["/usr/sbin/ip", "-4", "-j"]
WIREGUARD_GO = """#!/bin/sh
[ "$*" = "-f utun" ] || exit 99
echo utun7 > "$WG_TUN_NAME_FILE"
exec /recorded/real/wireguard-go -f utun7
"""


def real_ip(*words: str) -> Any:
    """What the Linux below says of the interfaces that wireguard-go really made."""
    shown = subprocess.run([*REAL_IP, *words], capture_output=True, text=True, check=False).stdout
    return [entry for entry in json.loads(shown or "[]") if entry]


def ifconfig(words: list[str]) -> int:
    """The recorded interfaces, and each real utun in the words of macOS."""
    shown = {block.partition(":")[0]: block for block in re.split(r"^(?=\S)", recorded("ifconfig"), flags=re.MULTILINE)}
    for entry in real_ip("addr", "show"):
        if str(entry["ifname"]).startswith("utun"):
            lines = [f"{entry['ifname']}: flags=8051<UP,POINTOPOINT,RUNNING,MULTICAST> mtu {entry['mtu']}\n"]
            for one in entry["addr_info"]:
                mask = (0xFFFFFFFF << (32 - one["prefixlen"])) & 0xFFFFFFFF
                lines.append(f"\tinet {one['local']} --> {one['local']} netmask {mask:#x}\n")
            shown[str(entry["ifname"])] = "".join(lines)
    if not words:
        return say("".join(shown.values()))
    name, rest = words[0], words[1:]
    if not rest:
        return say(shown[name]) if name in shown else complain(f"ifconfig: interface {name} does not exist", 1)
    if rest[0] == "inet" and rest[3:] == ["alias"] and rest[1].startswith(rest[2] + "/"):
        # On Linux a prefix would make a route as well, which macOS leaves to route(8).
        return linux("addr", "add", rest[1], "dev", name, "noprefixroute")
    if rest[0] == "mtu" and rest[2:] in ([], ["up"]):
        return linux("link", "set", name, "mtu", rest[1], "up")
    return unrecorded("ifconfig", words)


def route(words: list[str]) -> int:
    if words[:2] == ["-n", "get"] and words[2] != "default":
        found = real_ip("route", "get", words[2])
        return say(f"   route to: {words[2]}\n  interface: {found[0]['dev']}\n") if found else 1
    if words[:4] == ["-q", "-n", "add", "-inet"] and words[5] == "-interface":
        return linux("route", "add", words[4], "dev", words[6])
    return answer("route", words)


def linux(*words: str) -> int:
    return subprocess.run([REAL_IP[0], *words], check=False).returncode


def brew(words: list[str]) -> int:
    cellar = STATE.setdefault("cellar", ["bash"])
    if os.environ.get("RUNS_AS", "root") == "root":
        return complain("Error: Running Homebrew as root is extremely dangerous and no longer supported.", 1)
    if words[:2] == ["list", "--versions"]:
        return say(f"{words[2]} 1.0\n") if words[2] in cellar else 1
    if words[:2] == ["install", "--quiet"]:
        cellar.append(words[2])
        if words[2] == "wireguard-tools":
            script = Path("/opt/homebrew/bin/wg-quick")
            script.write_text("echo utun4 > /var/run/wireguard/wg-llama.name\nexec sleep 600\n")
            Path("/opt/homebrew/bin/wg").symlink_to("/recorded/real/wg")
        if words[2] == "wireguard-go":
            program = Path("/opt/homebrew/bin/wireguard-go")
            program.write_text(WIREGUARD_GO)
            program.chmod(0o755)
        return 0
    return unrecorded("brew", words)


def sysctl(words: list[str]) -> int:
    wired = STATE.setdefault("wired", 0)
    if words == ["-n", "iogpu.wired_limit_mb"]:
        return say(f"{wired}\n")
    if words[0].startswith("iogpu.wired_limit_mb="):
        STATE["wired"] = int(words[0].partition("=")[2])
        return say(f"iogpu.wired_limit_mb: {wired} -> {STATE['wired']}\n")
    if words[0] == "-n":
        listed = (HOME / "answers" / "sysctl").read_text()
        value = re.search(rf"^{re.escape(words[1])}: (.*)$", listed, re.MULTILINE)
        return say(value.group(1) + "\n") if value else complain(f"sysctl: unknown oid '{words[1]}'", 1)
    return answer("sysctl", words)


def pfctl(words: list[str]) -> int:
    words = [word for word in words if word != "-q"]
    if words == ["-s", "info"]:
        return say(f"Status: {'Enabled' if STATE.get('pf') else 'Disabled'}\n")
    if words == ["-E"]:
        STATE["pf"] = True
        return 0
    if words[-2:] == ["-s", "rules"]:
        return say("".join(line + "\n" for line in STATE.get("rules", [])))
    if words[-2:] == ["-F", "all"]:
        STATE["rules"] = []
        return 0
    if "-f" in words and "-D" in words:
        if "-n" not in words:
            mesh = words[words.index("-D") + 1].removeprefix("mesh=")
            lines = Path(words[-1]).read_text().splitlines()
            STATE["rules"] = [line.replace("$mesh", mesh) for line in lines if not line.startswith("#")]
        return 0
    return unrecorded("pfctl", words)


def pmset(words: list[str]) -> int:
    power = STATE.setdefault("power", {"sleep": "1", "womp": "1", "disksleep": "10"})
    if words == ["-g", "custom"]:
        return say("AC Power:\n" + "".join(f" {name}  {value}\n" for name, value in power.items()))
    if words[0] == "-a":
        power.update(zip(words[1::2], words[2::2]))
        return 0
    return unrecorded("pmset", words)


def socketfilterfw(words: list[str]) -> int:
    apps = STATE.setdefault("apps", [])
    if words == ["--getglobalstate"]:
        return say("Firewall is enabled. (State = 1)\n")
    if words == ["--listapps"]:
        lines = [f"{number} : {app}\n\t ( Allow incoming connections )\n" for number, app in enumerate(apps, 1)]
        return say("".join(lines))
    if words[0] == "--add":
        apps.append(words[1])
        return 0
    return 0 if words[0] == "--unblockapp" else unrecorded("socketfilterfw", words)


def defaults(words: list[str]) -> int:
    hidden = STATE.setdefault("hidden", [])
    if words[0] == "read" and words[-1] == "HiddenUsersList":
        return say("(\n" + "".join(f'    "{name}",\n' for name in hidden) + ")\n")
    if words[0] == "write" and words[2:4] == ["HiddenUsersList", "-array-add"]:
        hidden.append(words[-1])
        return 0
    return unrecorded("defaults", words)


def programs() -> Iterator[tuple[str, str]]:
    """(pid, program) of what runs on the recorded Mac: the processes of its network namespace."""
    here = os.readlink(HOME / "proc" / "self" / "ns" / "net")
    for pid in filter(str.isdigit, os.listdir(HOME / "proc")):
        with contextlib.suppress(OSError):
            directory = HOME / "proc" / pid
            if os.readlink(directory / "ns" / "net") == here and alive(int(pid)):
                yield pid, os.readlink(directory / "exe")


def ps(words: list[str]) -> int:
    if words == ["-axo", "pid=,rss=,comm="]:
        return say("    1   12000 /sbin/launchd\n" + "".join(f"{pid} 4000 {program}\n" for pid, program in programs()))
    if words[:2] == ["-o", "pid=,pri="]:
        return say("".join(f"{pid} 31\n" for pid in words[-1].split(",")))
    if words[:3] == ["-ww", "-p", words[2]] and alive(int(words[2])):
        program = os.readlink(HOME / "proc" / words[2] / "exe")
        if words[-1] == "args=":
            return say(program + "\n")
        return say(f"root Sun Nov 29 20:00:00 2026 {program}\n")
    return answer("ps", words)


def codesign(words: list[str]) -> int:
    """What it signs starts from then on, and has other bytes."""
    if words[:3] != ["--force", "--sign", "-"]:
        return unrecorded("codesign", words)
    with open(words[3], "ab") as program:
        program.write(b"signed")
    (HOME / "signed").touch()
    return 0


def lsof(words: list[str]) -> int:
    """No client is attached, and nobody else holds our ports."""
    return 1


def tools(words: list[str]) -> int:
    """xcode-select and xcrun, which are stubs until softwareupdate has installed the tools."""
    if STATE.get("bare"):
        return complain("xcode-select: note: no developer tools were found, requesting install.", 1)
    return say("/Library/Developer/CommandLineTools\n")


def softwareupdate(words: list[str]) -> int:
    label = "Command Line Tools for Xcode 16.4-16.4"
    if words == ["-l"]:
        seen = Path("/tmp/.com.apple.dt.CommandLineTools.installondemand.in-progress").exists()
        return say("Software Update found the following:\n" + (f"* Label: {label}\n\tTitle: CLT\n" if seen else ""))
    if words == ["-i", label] and os.environ.get("RUNS_AS", "root") == "root":
        STATE["bare"] = False
        return 0
    return unrecorded("softwareupdate", words)


def plutil(words: list[str]) -> int:
    plistlib.loads(Path(words[-1]).read_bytes())
    return say(f"{words[-1]}: OK\n")


def recorded(name: str) -> str:
    return (HOME / "answers" / name).read_text()


def answer(name: str, words: list[str]) -> int:
    """From the recordings: /recorded/NAME is the answer to all words, /recorded/NAME.FIRST-WORD to some."""
    for key in (f"{name}.{re.sub('[^A-Za-z0-9]', '', words[0]) if words else ''}", name):
        path = HOME / "answers" / key
        if path.exists():
            status = HOME / "answers" / (key + ".rc")
            return say(path.read_text(), int(status.read_text()) if status.exists() else 0)
    return unrecorded(name, words)


def main() -> int:
    name, words = os.environ.pop("STAND_IN"), sys.argv[1:]
    if name == "sudo":  # runs others of us
        return sudo(words)
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = HOME / "state.json"
        STATE.update(json.loads(path.read_text()) if path.exists() else {})
        tool = globals().get({"xcode-select": "tools", "xcrun": "tools"}.get(name, name))
        status = int(tool(words)) if callable(tool) and name in KEEPERS else answer(name, words)
        path.write_text(json.dumps(STATE))
    for process in ONE_SHOTS:  # which may ask us in turn, so not before the lock is free
        process.wait(30)
    return status


KEEPERS = (
    *("brew", "defaults", "dscl", "dseditgroup", "launchctl", "lsof", "pfctl", "plutil", "pmset", "ps", "sysctl"),
    *("codesign", "ifconfig", "route", "socketfilterfw", "softwareupdate", "xcode-select", "xcrun"),
)

if __name__ == "__main__":
    sys.exit(main())
