# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Recorded output of tools and recorded trees of /sys and /proc, as hosts for tests of detection."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_cpu import Memory
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import GIB, reserve_bytes, usable_bytes
from ansible_collections.llamafleet.rpc.plugins.module_utils._hosts import Identity
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Result
from ansible_collections.llamafleet.rpc.tests.unit.fakes import FakeRunner

RECORDINGS = Path(__file__).parent / "recordings"
MACHINE = "0123456789abcdef0123456789abcdef"
NVIDIA_CORE = "index,uuid,name,pci.bus_id,driver_version,memory.total,memory.used,memory.free"


def text(name: str) -> str:
    """A recording by its path below recordings/."""
    return (RECORDINGS / name).read_text()


def tree(name: str) -> tuple[dict[str, str], dict[str, str]]:
    """(files, links) of a recorded tree: `PATH = one line`, `PATH -> target`, or `PATH <<` and lines up to `.`."""
    files: dict[str, str] = {}
    links: dict[str, str] = {}
    lines = iter(text(name).splitlines())
    for line in lines:
        if not line or line.startswith("#"):
            continue
        if line.endswith(" <<"):
            block = []
            for inner in lines:
                if inner == ".":
                    break
                block.append(inner)
            files[line[:-3]] = "\n".join(block) + "\n"
        elif " -> " in line:
            path, target = line.split(" -> ", 1)
            links[path] = target
        else:
            path, _equals, value = line.partition(" = ")
            files[path] = value.replace("\\0", "\0") + "\n"
    return files, links


def memory(total: int, available: int | None = None, limit: int | None = None) -> Memory:
    """RAM of a made-up host, by the rules."""
    free = total if available is None else available
    capacity = total if limit is None else limit
    usable = usable_bytes(capacity, reserve_bytes("system_ram", capacity), free)
    return Memory(total=total, available=free, limit=limit, usable=usable)


def identity(system: str = "Linux", arch: str = "x86_64", libc: str = "glibc2.36", name: str = "box") -> Identity:
    """Who a recorded host is."""
    return Identity(
        system=system,
        arch=arch,
        libc=libc,
        hostname=name,
        user={"name": "deploy", "uid": 1000, "home": "/home/deploy"},
        addresses={"eth0": "10.0.0.2"},
        collected_at="2026-11-29T19:30:00Z",
    )


def meminfo(total: int, available: int) -> str:
    """/proc/meminfo of so many bytes."""
    return f"MemTotal: {total // 1024} kB\nMemAvailable: {available // 1024} kB\n"


def linux(
    *trees: str, commands: Mapping[str, Result | str] | None = None, ram: int = 64 * GIB, free: int | None = None
) -> FakeRunner:
    """A Linux host with a processor, RAM, the recorded trees, and tools that answer."""
    files = {
        "/etc/machine-id": MACHINE + "\n",
        "/proc/sys/kernel/random/boot_id": "1c9e3c1e-0000-4000-8000-000000000000\n",
        "/proc/sys/kernel/osrelease": "6.14.0-37-generic\n",
        "/proc/meminfo": meminfo(ram, ram - 2 * GIB if free is None else free),
        "/proc/cpuinfo": text("proc/cpuinfo_sapphire_rapids_vm"),
        "/etc/os-release": text("os_release/ubuntu_24.04"),
    }
    links: dict[str, str] = {}
    for name in trees:
        more_files, more_links = tree(name)
        files.update(more_files)
        links.update(more_links)
    results = {
        key: value if isinstance(value, Result) else Result(0, value, "") for key, value in (commands or {}).items()
    }
    return FakeRunner(files, results, links)


def smi(core: str, caps: str | None = None, listed: str | None = None) -> dict[str, Result | str]:
    """Commands of an nvidia-smi that answers with recordings."""
    return {
        f"nvidia-smi --query-gpu={NVIDIA_CORE}": text(f"nvidia_smi/{core}"),
        "nvidia-smi --query-gpu=uuid,compute_cap": text(f"nvidia_smi/{caps}") if caps else Result(2, "", ""),
        "nvidia-smi -L": text(f"nvidia_smi/{listed}") if listed else "",
    }


def mac(name: str, pages: str = "vm_stat_idle_128g", macos: str = "15.6", **more: Result | str) -> FakeRunner:
    """A Mac whose tools answer with recordings of macos/."""
    commands: dict[str, Result | str] = {
        "sysctl": Result(1, text(f"macos/{name}"), "sysctl: unknown oid 'debug.iogpu.wired_limit'\n"),
        "vm_stat": text(f"macos/{pages}"),
        "sw_vers": macos + "\n",
        "system_profiler": text("macos/system_profiler_m4_max.json"),
        "ioreg": text("macos/ioreg"),
        "ps": text("macos/ps"),
        "ifconfig": text("macos/ifconfig_studio"),
        "networksetup": text("macos/networksetup_hardwareports"),
    }
    commands.update(more)
    return FakeRunner({}, {key: v if isinstance(v, Result) else Result(0, v, "") for key, v in commands.items()})
