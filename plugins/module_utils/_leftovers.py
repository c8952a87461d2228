# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a removed host still has of us: files, processes, listeners, and on a Mac jobs of launchd."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._launchd import DAEMONS, Launchctl
from ansible_collections.llamafleet.rpc.plugins.module_utils._mac import COMMANDS, parse_ps
from ansible_collections.llamafleet.rpc.plugins.module_utils._mac_network import is_mac
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Result, Runner
from ansible_collections.llamafleet.rpc.plugins.module_utils._sockets import port_owners
from ansible_collections.llamafleet.rpc.plugins.module_utils._units import launchd_label


class LeftoversError(FleetError):
    """This host does not tell what runs on it, so nothing can be said of what is left."""


def leftovers(runner: Runner, directories: Sequence[str], ports: Sequence[int]) -> list[str]:
    """One sentence for each directory that is there, process that runs out of one, and listener on one of the ports.

    On a Mac also for each job of ours whose program lies in one of the directories, loaded or to be loaded at boot.
    """
    found = [f"{directory} still exists" for directory in directories if os.path.lexists(directory)]
    roots = tuple(directory.rstrip("/") + "/" for directory in directories)
    mac = is_mac(runner)
    for pid, program in _mac_programs(runner) if mac else _linux_programs(runner):
        if program.startswith(roots):
            found.append(f"process {pid} still runs {program}")
    found += _jobs(runner, roots) if mac else []
    for owner in port_owners(runner, ports) if ports else []:
        if owner["kind"] == "listener":
            found.append(f"port {owner['port']} is held by {owner['exe'] or 'a program'} (pid {owner['pid']})")
    return found


def _linux_programs(runner: Runner) -> list[tuple[int, str]]:
    pids = [entry for entry in runner.listdir("/proc") if entry.isdigit()]
    return [(int(pid), runner.readlink(f"/proc/{pid}/exe") or "") for pid in pids]


def _mac_programs(runner: Runner) -> list[tuple[int, str]]:
    shown = _must(runner.run(["ps", *COMMANDS["ps"]]), "ps")
    return [(pid, program) for pid, _size, program in parse_ps(shown)]


def _jobs(runner: Runner, roots: tuple[str, ...]) -> list[str]:
    """Loaded jobs (a line of the block "services" each) and files of jobs that launchd would load at boot."""
    listed = _must(runner.run(["launchctl", "print", "system"]), "launchctl print system")
    labels = set(re.findall(rf"^\s+\d+\s+\S+\s+({re.escape(launchd_label(''))}\S+)\s*$", listed, re.MULTILINE))
    launchctl, found = Launchctl(runner), []
    for label in sorted(labels):
        job = launchctl.look(label)
        if job is not None and any(word.startswith(roots) for word in job.arguments or ()):
            found.append(f"launchd still has the job {label}; remove it: launchctl bootout system/{label}")
    for name in runner.listdir(DAEMONS):
        ours = name.startswith(launchd_label("")) and name.endswith(".plist")
        if ours and any(root in (runner.read(os.path.join(DAEMONS, name)) or "") for root in roots):
            found.append(f"{os.path.join(DAEMONS, name)} still exists")
    return found


def _must(result: Result, what: str) -> str:
    if result.rc != 0:
        said = (result.stderr.strip() or result.stdout.strip() or "no message")[-200:]
        raise LeftoversError(f"cannot see what is left on this Mac: {what} ended with status {result.rc}: {said}")
    return result.stdout
