# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A Mac made of recordings, for ansible-playbook on Linux: a root directory and a network namespace of its own, where
the programs of macOS are stand-ins (mac/tools.py) that fail on whatever was not recorded. Needs root.

What is real there: Python, the shell, files and their owners, and the processes that the stand-in of launchctl starts.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from ansible_collections.llamafleet.rpc.tests.unit import netns
from ansible_collections.llamafleet.rpc.tests.unit.recorded import text

HERE = Path(__file__).parent
ADDRESS = "10.9.0.4"  # of utun4 in the recording of ifconfig
KEEPERS = (
    "launchctl dscl dseditgroup brew sysctl pfctl pmset defaults ps lsof plutil socketfilterfw sudo softwareupdate "
    "xcode-select xcrun ifconfig route codesign"
)
ANSWERS = {
    "sysctl": text("macos/sysctl_m4_max_128g"),
    "vm_stat": text("macos/vm_stat_idle_128g"),
    "sw_vers": "15.6\n",
    "system_profiler": text("macos/system_profiler_m4_max.json"),
    "ioreg": text("macos/ioreg"),
    "ps": text("macos/ps"),
    "ifconfig": text("macos/ifconfig_studio"),
    "networksetup": text("macos/networksetup_hardwareports"),
    "route": "   route to: default\n  interface: en0\n",
    "netstat": text("macos/netstat_studio"),
    "netstat.an": text("macos/netstat_an_studio"),
    "uname": "Darwin\n",
    "xattr": "com.apple.provenance\n",
}
# Programs of Linux that a Mac does not have: to ask for one is a mistake.
# Programs of Linux that take the place of Homebrew's, and that the Mac finds only when they are "installed".
LENT = ("wg", "wg-quick", "wireguard-go")
FOREIGN = ("ip", "nft", "systemctl", "useradd", "userdel", "groupadd", "usermod", "modprobe", "apt-get", "journalctl")


@dataclass
class Mac:
    """The recorded Mac below ``directory``; ``play`` runs tasks on it."""

    directory: Path
    namespace: str
    variables: dict[str, Any] = field(default_factory=dict)
    #: Variables of a primary that is a host of Linux; it then takes part in each play. Without them it is not there.
    head: dict[str, Any] = field(default_factory=dict)
    output: str = ""

    @property
    def root(self) -> Path:
        return self.directory / "root"

    def path(self, inside: str) -> Path:
        """Where a file of the Mac lies outside of it."""
        return self.root / inside.lstrip("/")

    def state(self) -> dict[str, Any]:
        """What the stand-ins keep."""
        found = json.loads(self.path("/recorded/state.json").read_text())
        assert isinstance(found, dict)
        return found

    def unrecorded(self) -> str:
        """What was asked for and not recorded."""
        path = self.path("/recorded/unrecorded")
        return path.read_text() if path.exists() else ""

    def make(self) -> None:
        """Directories, stand-ins and answers."""
        for name in (
            "Library/LaunchDaemons",
            "System/Library/CoreServices",
            "etc/newsyslog.d",
            "tmp",
            "var/run/wireguard",
            "var/log",
        ):
            self.path(name).mkdir(parents=True)
        for name in ("dev", "usr", "recorded/bin", "recorded/answers", "recorded/proc", "opt/homebrew/bin", "root"):
            self.path(name).mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            if Path("/" + name).is_symlink():
                self.path(name).symlink_to("usr/" + name)
            elif Path("/" + name).exists():
                self.path(name).mkdir()
        for name in ("ld.so.cache", "ld.so.conf"):
            if Path("/etc", name).exists():
                shutil.copy(Path("/etc", name), self.path("etc"))
        self.path("etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nmacuser:x:501:20::/tmp:/bin/sh\n")
        self.path("etc/group").write_text("wheel:x:0:\nstaff:x:20:\nnogroup:x:65534:\n")
        self.path("System/Library/CoreServices/SystemVersion.plist").write_text("")
        self.path("opt/homebrew/bin/bash").symlink_to("/bin/sh")
        self.path("var/run/wireguard/wg-llama.name").write_text("utun4\n")
        for name in {*KEEPERS.split(), *FOREIGN, *(key for key in ANSWERS if "." not in key)}:
            self._stand_in("recorded/bin/" + name)
        self._stand_in("opt/homebrew/bin/brew")
        for name, real in (("cc", "gcc"), ("c++", "g++")):  # of the command line tools
            (self.path("recorded/bin") / name).write_text(f'#!/bin/sh\nexec /usr/bin/{real} "$@"\n')
            (self.path("recorded/bin") / name).chmod(0o755)
        os.chown(self.path("opt/homebrew/bin/brew"), 501, 20)
        for key, answer in ANSWERS.items():
            self.path("recorded/answers/" + key).write_text(answer)
        inside = {"PATH": "/recorded/bin:/usr/bin:/bin", "PYTHONPATH": "/recorded/site", "LC_ALL": "C.UTF-8"}
        lines = ["#!/bin/sh", f'exec ip netns exec {self.namespace} unshare -m /bin/sh {self.directory}/enter "$@"']
        (self.directory / "sh").write_text("\n".join(lines) + "\n")
        (self.directory / "sh").chmod(0o755)
        binds = [(name, name) for name in ("/usr", "/dev") if Path(name).is_dir()]
        binds += [
            ("/" + name, name)
            for name in ("bin", "sbin", "lib", "lib64")
            if self.path(name).is_dir() and not self.path(name).is_symlink()
        ]
        binds += [
            (str(path), str(path))
            for path in {sys.prefix, sys.base_prefix, str(self.directory / "remote"), *self.shared()}
        ]
        binds += [
            ("/proc", "/recorded/proc"),
            (str(HERE / "mac" / "site"), "/recorded/site"),
            (str(HERE / "mac"), "/recorded/tools"),
        ]
        (self.directory / "remote").mkdir()
        script = []
        for outside, within in binds:
            self.path(within).mkdir(parents=True, exist_ok=True)
            script.append(f"mount --rbind {shlex.quote(outside)} {shlex.quote(str(self.path(within)))}")
        for name in LENT:
            lent = shutil.which(name)
            if lent is not None:
                self.path("recorded/real").mkdir(exist_ok=True)
                self.path(f"recorded/real/{name}").touch()
                script.append(f"mount --bind {lent} {shlex.quote(str(self.path(f'recorded/real/{name}')))}")
                script.append(f"mount --bind /dev/null {shlex.quote(str(self.root))}{os.path.realpath(lent)}")
        words = " ".join(f"{key}={value}" for key, value in inside.items())
        script.append(f'exec chroot {shlex.quote(str(self.root))} /usr/bin/env -i HOME=/root {words} /bin/sh "$@"')
        # Who asks for the same shell from inside gets the plain one.
        shell = self.path(str(self.directory / "sh"))
        shell.parent.mkdir(parents=True, exist_ok=True)
        shell.symlink_to("/bin/sh")
        (self.directory / "enter").write_text("set -e\n" + "\n".join(script) + "\n")

    def shared(self) -> list[str]:
        """Directories of this machine that the Mac has, too."""
        binary, model = os.environ.get("LLAMAFLEET_TEST_BIN"), os.environ.get("LLAMAFLEET_TEST_MODEL")
        return [
            str(path) for path in (binary and Path(binary).resolve(), model and Path(model).resolve().parent) if path
        ]

    def _stand_in(self, name: str) -> None:
        path = self.path(name)
        path.write_text(f'#!/bin/sh\nSTAND_IN={path.name} exec {sys.executable} -S -E /recorded/tools/tools.py "$@"\n')
        path.chmod(0o755)

    def play(self, tasks: list[dict[str, Any]] | Path, *arguments: str, ok: bool = True) -> dict[str, int]:
        """Run tasks, or a playbook, on the Mac; the counts of its recap."""
        hosts = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "ansible_shell_executable": str(self.directory / "sh"),
            "ansible_remote_tmp": str(self.directory / "remote"),
            "llamafleet_topology": {"default": {"primary": "head", "workers": ["studio"]}},
            "llama_mesh_mode": "existing",
            **self.variables,
        }
        groups = {
            "llama_primary": {"hosts": {"head": self.head or {"llama_mesh_address": "10.9.0.1"}}},
            "llama_workers": {"hosts": {"studio": {}}},
        }
        (self.directory / "hosts.yml").write_text(
            yaml.safe_dump({"all": {"children": {"llama_fleet": {"children": groups, "vars": hosts}}}})
        )
        playbook = self.directory / "play.yml"
        if isinstance(tasks, Path):
            playbook = tasks
        else:
            members = "llama_fleet" if self.head else "studio"
            play = [{"name": "Play", "hosts": members, "gather_facts": False, "tasks": tasks}]
            playbook.write_text(yaml.safe_dump(play))
        program = Path(sys.executable).parent / "ansible-playbook"
        argv = [str(program), "-i", str(self.directory / "hosts.yml"), str(playbook), *arguments]
        environment = {
            **os.environ,
            "ANSIBLE_COLLECTIONS_PATH": str(netns.COLLECTIONS),
            "ANSIBLE_CONFIG": str(netns.COLLECTIONS.parent / "ansible.cfg"),
            "ANSIBLE_LOCAL_TEMP": str(self.directory / "tmp"),
            # What the local connection starts everything with: raw takes no notice of ansible_shell_executable.
            "ANSIBLE_EXECUTABLE": str(self.directory / "sh"),
        }
        if self.head:
            del environment["ANSIBLE_EXECUTABLE"]
        done = subprocess.run(
            argv, capture_output=True, text=True, env=environment, timeout=300, stdin=subprocess.DEVNULL, check=False
        )
        self.output = done.stdout + done.stderr
        assert (done.returncode == 0) == ok, self.output[-6000:]
        counts = re.search(r"^studio +: (ok=.*)$", done.stdout.rpartition("PLAY RECAP")[2], re.MULTILINE)
        return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", counts.group(1) if counts else "")}
