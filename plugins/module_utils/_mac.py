# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Asks a Mac what it is: sysctl, vm_stat, sw_vers, system_profiler, ioreg, ps, ifconfig, networksetup, side by side."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_apple import (
    SYSCTLS,
    Mac,
    mac_cpu,
    mac_memory,
    macos_major,
    parse_displays,
    parse_ifconfig,
    parse_sysctl,
    parse_vm_stat,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_cpu import Cpu, Memory
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import TIMED_OUT, Result, Runner

COMMANDS: Mapping[str, Sequence[str]] = {
    "sysctl": SYSCTLS,
    "vm_stat": (),
    "sw_vers": ("-productVersion",),
    "system_profiler": ("-json", "SPDisplaysDataType"),
    "ioreg": ("-rd1", "-c", "IOPlatformExpertDevice"),
    "ps": ("-axo", "pid=,rss=,comm="),
    "ifconfig": (),
    "networksetup": ("-listallhardwareports",),
}


def parse_machine_id(text: str) -> str | None:
    """IOPlatformUUID of `ioreg`, as 32 lower case hex digits like a Linux machine-id."""
    match = re.search(r'"IOPlatformUUID" = "([0-9A-F-]{36})"', text)
    return match.group(1).replace("-", "").lower() if match else None


def parse_ps(text: str) -> list[tuple[int, int, str]]:
    """(pid, resident bytes, program) of `ps -axo pid=,rss=,comm=`, which prints KiB and the program's full path."""
    found = re.findall(r"^\s*(\d{1,9})\s+(\d{1,12})\s+(\S.*)$", text, re.MULTILINE)
    return [(int(pid), int(size) * 1024, program.strip()) for pid, size, program in found]


@dataclass(frozen=True)
class MacTools:
    """What the tools answered."""

    mac: Mac
    machine_id: str | None
    processes: tuple[tuple[int, int, str], ...]
    links: tuple[Mapping[str, Any], ...]
    warnings: tuple[str, ...] = ()

    def own_bytes(self, pids: Sequence[int], prefixes: Sequence[str]) -> int:
        """Memory that our own services hold, by number or by where their program lies; Metal's is resident, too."""
        below = tuple(prefix.rstrip("/") + "/" for prefix in prefixes if prefix.strip("/"))
        return sum(
            size for pid, size, program in self.processes if pid in pids or (below and program.startswith(below))
        )

    def memory(self, own: int) -> Memory:
        """RAM of this Mac."""
        return mac_memory(self.mac.values, self.mac.pages, own)

    def cpu(self, arch: str) -> Cpu:
        """Processor of this Mac."""
        return mac_cpu(self.mac.values, arch)


def ask_mac(runner: Runner, timeout: float) -> MacTools:
    """Run the tools. What one of them does not tell is unknown; only sysctl has to answer (mac_memory says so)."""
    with ThreadPoolExecutor(max_workers=len(COMMANDS)) as pool:
        jobs = {
            name: pool.submit(runner.run, [runner.which(name) or name, *options], timeout)
            for name, options in COMMANDS.items()
        }
        answers: dict[str, Result] = {name: job.result() for name, job in jobs.items()}
    text = {name: result.stdout for name, result in answers.items()}
    mac = Mac(
        values=parse_sysctl(text["sysctl"]),
        pages=parse_vm_stat(text["vm_stat"]),
        displays=tuple(parse_displays(text["system_profiler"])),
        macos=macos_major(text["sw_vers"]),
    )
    return MacTools(
        mac=mac,
        machine_id=parse_machine_id(text["ioreg"]),
        processes=tuple(parse_ps(text["ps"])),
        links=tuple(parse_ifconfig(text["ifconfig"], text["networksetup"])),
        warnings=tuple(f"{name} did not answer in time" for name, result in answers.items() if result.rc == TIMED_OUT),
    )
