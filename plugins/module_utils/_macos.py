# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What only a Mac needs: the limit of memory that Metal may wire, the packet filter, and a look at what slows services.

Sources: sysctl(8), pfctl(8) and pf.conf(5) of macOS, socketfilterfw's own help, and reports gathered in the project's
notes on detection. None of this has run on a Mac yet; the tests answer with re-typed output.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._files import read_text, write_atomic
from ansible_collections.llamafleet.rpc.plugins.module_utils._firewall import Door
from ansible_collections.llamafleet.rpc.plugins.module_utils._launchd import Launchctl, Outcome, Place
from ansible_collections.llamafleet.rpc.plugins.module_utils._launchd import converge as converge_job
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Result, Runner
from ansible_collections.llamafleet.rpc.plugins.module_utils._units import MANAGED

MIB = 1 << 20
GIB = 1 << 30


class MacError(FleetError):
    """Something of this Mac cannot be set as asked; the message says what and why."""


def _said(result: Result) -> str:
    return (result.stderr.strip() or result.stdout.strip() or f"status {result.rc}")[-400:]


# ------------------------------------------------------------------------------------------------- wired limit

WIRED_LIMIT = "iogpu.wired_limit_mb"
WIRED_LABEL = "llamafleet.wired-limit"


def wired_ceiling(ram: int) -> int:
    """The most bytes that may be wired of ``ram`` bytes: 85 %, or all but 5 GiB, whichever is more.

    Beyond that macOS itself freezes or panics (the bounds that exo and GPUStack took, and reports of 16 GB Macs).
    """
    return max(ram * 85 // 100, ram - 5 * GIB)


def wired_limit_mb(ram: int, wanted: int, need: int | None = None) -> int:
    """``wanted`` bytes as the MiB that the sysctl takes; not more than ``need`` bytes and 2 % or 64 MiB of margin.

    MacError beyond the ceiling.
    """
    ceiling = wired_ceiling(ram)
    if not 0 < wanted <= ceiling:
        raise MacError(
            f"a wired limit of {wanted // MIB} MiB: this Mac has {ram // MIB} MiB, of which at most {ceiling // MIB} "
            "MiB may be wired; lower llama_worker_wired_limit"
        )
    if need is not None:
        wanted = min(wanted, need + max(64 * MIB, need // 50))
    return wanted // MIB


def wired_job(limit_mb: int) -> dict[str, Any]:
    """The job that sets the limit at boot: it does not outlive one, and /etc/sysctl.conf is not read since 10.15."""
    return {"ProgramArguments": ["/usr/sbin/sysctl", f"{WIRED_LIMIT}={limit_mb}"], "RunAtLoad": True}


def _sysctl(runner: Runner, name: str) -> int:
    result = runner.run([runner.which("sysctl") or "/usr/sbin/sysctl", "-n", name])
    value = result.stdout.strip()
    if result.rc != 0 or not re.fullmatch(r"\d{1,15}", value, re.ASCII):
        raise MacError(f"sysctl {name} is not known here ({_said(result)}); only Apple Silicon outside of a VM has it")
    return int(value)


def ram_bytes(runner: Runner) -> int:
    """All RAM of this Mac."""
    return _sysctl(runner, "hw.memsize")


def converge_wired(
    runner: Runner, launchctl: Launchctl, place: Place, limit_mb: int | None, check: bool
) -> tuple[Outcome, int]:
    """Set the limit now and for every boot; None: give it back to macOS. Returns what was done and the limit before."""
    live = _sysctl(runner, WIRED_LIMIT)
    state, target = ("absent", 0) if limit_mb is None else ("started", limit_mb)
    # Without a job of ours a limit is somebody else's, and stays.
    ours = limit_mb is not None or os.path.exists(place.path(WIRED_LABEL))
    done = converge_job(launchctl, place, WIRED_LABEL, wired_job(target), state, check)
    if live == target or not ours:
        return done, live
    if not check:
        result = runner.run([runner.which("sysctl") or "/usr/sbin/sysctl", f"{WIRED_LIMIT}={target}"])
        if result.rc != 0:
            raise MacError(f"{WIRED_LIMIT} cannot be set to {target}: {_said(result)}")
    return Outcome(True, done.before, done.after, [*done.actions, "set"], None), live


# --------------------------------------------------------------------------------------------- packet filter

# The rules of macOS look into com.apple/*, in the order of the names, so no file of Apple's has to be edited.
ANCHOR = "com.apple/100.llamafleet"
ANCHOR_PATH = "/etc/pf.anchors/llamafleet"
PF_LABEL = "llamafleet.pf"
TUNNELS = "/var/run/wireguard"

# Run at boot, and whenever wg-quick makes or removes a tunnel: the kernel numbers them anew each time. Without the
# tunnel the door is on lo0, that is, closed to others. -E asks that pf be on, and counts who asks.
_LOAD = (
    f'i=$(cat "{TUNNELS}/$2.name" 2>/dev/null); '
    '[ -n "$i" ] || ! /sbin/ifconfig "$2" >/dev/null 2>&1 || i=$2; '
    f'/sbin/pfctl -q -a "$3" -D "mesh=${{i:-lo0}}" -f "$1" && exec /sbin/pfctl -q -E'
)


def pf_rules(doors: Sequence[Door], by_interface: bool) -> str:
    """The anchor before the worker ports: each open to one address, if ``by_interface`` on $mesh only (law 11).

    "" without doors. Each rule is labelled with a hash of itself, for pf prints rules in its own words.
    """
    ports = sorted({door.port for door in doors})
    if not ports:
        return ""
    listed = "{ " + ", ".join(map(str, ports)) + " }"
    rules = [f"pass in quick on lo0 proto tcp from any to any port {listed}"]
    arrival = "on $mesh " if by_interface else ""
    rules += [
        f"pass in quick {arrival}inet proto tcp from {door.source} to any port {door.port}"
        for door in sorted(doors, key=lambda one: one.port)
        if door.source is not None
    ]
    rules.append(f"block drop in quick proto tcp from any to any port {listed}")
    return "\n".join([f"# {MANAGED}", *(f'{rule} label "{_label(rule)}"' for rule in rules), ""])


def _label(rule: str) -> str:
    return "llamafleet " + hashlib.sha256(rule.encode()).hexdigest()[:12]


def wanted_labels(text: str, tunnel: str) -> set[tuple[str, str]]:
    """(interface, label) of each rule of ``pf_rules``; "" for any interface."""
    return _pairs(text.replace("$mesh", tunnel))


def loaded_labels(listing: str) -> set[tuple[str, str]]:
    """The same of ``pfctl -s rules``, which prints one rule for each port of a list."""
    return _pairs(listing)


def _pairs(text: str) -> set[tuple[str, str]]:
    found = set()
    for line in text.splitlines():
        label = re.search(r'label "([^"]*)"', line)
        interface = re.search(r"\bon (\S+)", line)
        if line.strip() and not line.startswith("#"):
            found.add((interface.group(1) if interface else "", label.group(1) if label else line.strip()))
    return found


def tunnel_of(runner: Runner, name: str) -> str | None:
    """utunN of the WireGuard interface ``name``, or ``name`` where that is an interface itself; None while down."""
    text = (runner.read(f"{TUNNELS}/{name}.name") or "").strip()
    if re.fullmatch(r"utun\d{1,4}", text, re.ASCII):
        return text
    return name if runner.run(["ifconfig", name]).rc == 0 else None


def pf_job(interface: str, path: str = ANCHOR_PATH) -> dict[str, Any]:
    """The job that loads the anchor."""
    return {
        "ProgramArguments": ["/bin/sh", "-c", _LOAD, "sh", path, interface, ANCHOR],
        "RunAtLoad": True,
        "WatchPaths": [TUNNELS, path],
    }


@dataclass(frozen=True)
class Wall:
    """Where the parts of the packet filter lie."""

    path: str = ANCHOR_PATH
    place: Place = field(default_factory=Place)


def converge_pf(
    runner: Runner, launchctl: Launchctl, wall: Wall, doors: Sequence[Door], interface: str, check: bool
) -> Outcome:
    """Load and keep the anchor, or take it away where there is nothing to protect. ``interface``: WireGuard's name of
    the mesh, or "" for doors by address alone."""
    pfctl = runner.which("pfctl") or "/sbin/pfctl"
    text = pf_rules(doors, bool(interface))
    before = read_text(wall.path) or ""
    if before and MANAGED not in before:
        raise MacError(f"{wall.path} is not ours; move it away")
    actions = ["write"] if before != text else []
    tunnel = (tunnel_of(runner, interface) if interface else None) or "lo0"
    listing = runner.run([pfctl, "-a", ANCHOR, "-s", "rules"])
    if listing.rc != 0:
        raise MacError(f"pf does not answer: {_said(listing)}; run as root")
    stands = loaded_labels(listing.stdout) == wanted_labels(text, tunnel)
    on = "Status: Enabled" in runner.run([pfctl, "-s", "info"]).stdout
    if not stands or (text and not on):
        actions.append("load" if text else "remove")
    if actions and not check:
        if "write" in actions and text:
            _write_checked(runner, pfctl, wall.path, text, tunnel)
        if text:
            _must(runner, pfctl, "-q", "-a", ANCHOR, "-D", f"mesh={tunnel}", "-f", wall.path)
            if not on:
                _must(runner, pfctl, "-q", "-E")
        else:
            _must(runner, pfctl, "-q", "-a", ANCHOR, "-F", "all")
            if before:
                os.unlink(wall.path)
    job = converge_job(
        launchctl, wall.place, PF_LABEL, pf_job(interface, wall.path), "started" if text else "absent", check
    )
    actions += ["job"] if job.changed else []
    return Outcome(bool(actions), before + job.before, text + job.after, actions, None)


def _write_checked(runner: Runner, pfctl: str, path: str, text: str, tunnel: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    write_atomic(path + ".new", text)
    try:
        _must(runner, pfctl, "-n", "-a", ANCHOR, "-D", f"mesh={tunnel}", "-f", path + ".new")
    except MacError:
        os.unlink(path + ".new")
        raise
    os.replace(path + ".new", path)


def _must(runner: Runner, *argv: str) -> None:
    result = runner.run(list(argv), timeout=60.0)
    if result.rc != 0:
        raise MacError(f"{' '.join(argv)} failed: {_said(result)}")


# -------------------------------------------------------------------------------------- application firewall

SOCKETFILTER = "/usr/libexec/ApplicationFirewall/socketfilterfw"


def parse_apps(text: str) -> dict[str, bool]:
    """Program -> whether it may take connections, of ``socketfilterfw --listapps``."""
    found: dict[str, bool] = {}
    program = None
    for line in text.splitlines():
        entry = re.match(r"\s*\d+ : +(/.*?)\s*$", line)
        if entry:
            program = entry.group(1)
        elif program and "incoming connections" in line:
            found[program] = "Allow" in line
            program = None
    return found


def converge_apps(runner: Runner, programs: Sequence[str], check: bool) -> list[str]:
    """Let the application firewall, where it is on, hand connections to ``programs``; the programs it had to be told.

    It knows a program by path and signature, so a new build is told again. A daemon it does not know is cut off
    without a word.
    """
    tool = runner.which("socketfilterfw") or SOCKETFILTER
    if "enabled" not in runner.run([tool, "--getglobalstate"]).stdout:
        return []
    known = parse_apps(runner.run([tool, "--listapps"]).stdout)
    told = [program for program in programs if not known.get(program)]
    if not check:
        for program in told:
            _must(runner, tool, "--add", program)
            _must(runner, tool, "--unblockapp", program)
    return told


# ------------------------------------------------------------------------------------------------------- health


#: How a program ends that macOS does not let start, as itself and by way of a shell.
KILLED = (-9, 137)
QUARANTINE = "com.apple.quarantine"


def slowed(text: str) -> list[int]:
    """Processes that launchd holds back, of ``ps -o pid=,pri=``: 31 is a process of its own right, below is not.

    A job without ProcessType shows 20, a Background one 4 (B4-11).
    """
    pairs = re.findall(r"^\s*(\d{1,9})\s+(\d{1,3})\s*$", text, re.MULTILINE | re.ASCII)
    return [int(pid) for pid, priority in pairs if int(priority) < 31]


def killed_by_macos(status: int, attributes: str) -> str | None:
    """Why a program that was killed as it started was (B4-14); None for any other end. ``attributes``: of ``xattr``."""
    if status not in KILLED:
        return None
    if QUARANTINE in attributes:
        return "gatekeeper: it is in quarantine as a download; run: xattr -d com.apple.quarantine"
    return "gatekeeper: its signature does not fit its content; sign it again: codesign --force --sign -"


def freed(runner: Runner, start: Callable[[], int], program: str) -> bool:
    """Whether a new program was killed as it started and runs now, out of quarantine and signed anew (B4-14).

    ``start`` starts it and gives its status. False where nothing had to be done; MacError when it is killed still.
    """
    if start() not in KILLED:
        return False
    attributes = runner.run(["xattr", program]).stdout
    if QUARANTINE in attributes:
        _must(runner, "xattr", "-d", QUARANTINE, program)
    _must(runner, "codesign", "--force", "--sign", "-", program)
    why = killed_by_macos(start(), runner.run(["xattr", program]).stdout)
    if why is not None:
        raise MacError(
            f"macOS kills {program} as it starts, also out of quarantine and signed anew ({why} {program}). "
            "See `log show --last 2m --predicate 'process == \"syspolicyd\"'`, or a policy of this Mac's management"
        )
    return True


def local_network_privacy(error: int, milliseconds: float, ping: bool, gateway: bool) -> str | None:
    """Why a connection to a host of the own network fails at once although the host is there (B4-13); else None.

    ``error``: errno of the connection (0: it came about); ``ping``: whether the host answers one; ``gateway``: whether
    a connection to the gateway gets any answer. macOS 15 and later deny agents what they let daemons, root and Apple's
    own programs do, and say "No route to host" without asking the network.
    """
    # 65 on a Mac, and another number elsewhere: by name.
    if error != errno.EHOSTUNREACH or milliseconds > 100 or not (ping and gateway):
        return None
    return (
        "local_network_privacy: macOS keeps this program from the local network (it answers pings, and connections get "
        "'No route to host' at once). Run it as a daemon of launchd and not as an agent or from an app, allow it in "
        "System Settings, Privacy & Security, Local Network, or reach the host through the mesh"
    )


def network_problem(runner: Runner, endpoint: str, connect: Callable[[str, int], tuple[int, float]]) -> str | None:
    """One sentence on why ``endpoint`` (IPv4:port) cannot be connected to from here; None when it can.

    ``connect`` gives (errno or 0, milliseconds) of a connection attempt. A worker is never asked anything.
    """
    address, _colon, port = endpoint.rpartition(":")
    error, milliseconds = connect(address, int(port))
    if error == 0:
        return None
    ping = runner.run(["ping", "-c", "1", "-t", "2", address]).rc == 0
    shown = runner.run(["route", "-n", "get", "default"]).stdout
    gateway = re.search(r"^\s*gateway: (\d[\d.]*)", shown, re.MULTILINE)
    # Refused is an answer.
    heard = gateway is not None and connect(gateway.group(1), 53)[0] in (0, errno.ECONNREFUSED)
    why = local_network_privacy(error, milliseconds, ping, heard)
    return f"{endpoint}: {why or f'{os.strerror(error)} after {milliseconds:.0f} ms'}"


def health(runner: Runner, pids: Sequence[int], programs: Sequence[str]) -> list[str]:
    """One sentence for each process that is slowed down, and each program that macOS does not let start."""
    problems = []
    if pids:
        shown = runner.run(["ps", "-o", "pid=,pri=", "-p", ",".join(map(str, pids))])
        problems += [
            f"process {pid} runs with less than the priority of an interactive one: its launchd job lacks ProcessType "
            "Interactive, which makes Metal many times slower"
            for pid in slowed(shown.stdout)
        ]
    for program in programs:
        status = runner.run([program, "--version"]).rc
        why = killed_by_macos(status, runner.run(["xattr", program]).stdout if status in KILLED else "")
        problems += [f"{program} was killed as it started: {why} {program}"] if why else []
    return problems


def converge_power(runner: Runner, wanted: Mapping[str, int], check: bool) -> dict[str, int]:
    """Set what ``pmset -g custom`` shows otherwise in any of its power sources; what that was.

    A setting that this Mac does not show does not exist on it, and is left alone.
    """
    shown = re.findall(r"^\s+([a-z]+)\s+(\d+)", runner.run(["pmset", "-g", "custom"]).stdout, re.MULTILINE | re.ASCII)
    differs = {
        name: value for name, value in wanted.items() if any(key == name and int(now) != value for key, now in shown)
    }
    if differs and not check:
        _must(runner, "pmset", "-a", *(str(word) for pair in sorted(differs.items()) for word in pair))
    return differs
