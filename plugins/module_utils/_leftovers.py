# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a removed host still has of us: files, processes, listeners."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Runner
from ansible_collections.llamafleet.rpc.plugins.module_utils._sockets import port_owners


def leftovers(runner: Runner, directories: Sequence[str], ports: Sequence[int]) -> list[str]:
    """One sentence for each directory that is there, process that runs out of one, and listener on one of the ports."""
    found = [f"{directory} still exists" for directory in directories if os.path.lexists(directory)]
    roots = [directory.rstrip("/") + "/" for directory in directories]
    for entry in runner.listdir("/proc"):
        program = runner.readlink(f"/proc/{entry}/exe") if entry.isdigit() else None
        if program and program.startswith(tuple(roots)):
            found.append(f"process {entry} still runs {program}")
    for owner in port_owners(runner, ports) if ports else []:
        if owner["kind"] == "listener":
            found.append(f"port {owner['port']} is held by {owner['exe'] or 'a program'} (pid {owner['pid']})")
    return found
