# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Macs from the text of sysctl, vm_stat, sw_vers and system_profiler: processor, RAM, and what Metal lets a GPU use.

Metal's limit is recommendedMaxWorkingSetSize: what iogpu.wired_limit_mb says, else a share of the RAM that differs by
RAM and macOS generation. llama.cpp reports the exact figure once it is built (B3-25), so the share is an estimate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_cpu import Cpu, DetectError, Memory
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import (
    GIB,
    MIB,
    Device,
    Finding,
    crowded,
    metal_usable,
    mib_text,
    number,
    ram_pool,
    reserve_bytes,
    usable_bytes,
)

SYSCTLS = (
    "hw.memsize",
    "hw.optional.arm64",
    "hw.physicalcpu",
    "hw.logicalcpu",
    "hw.perflevel0.physicalcpu",
    "hw.perflevel1.physicalcpu",
    "machdep.cpu.brand_string",
    "machdep.cpu.features",
    "machdep.cpu.leaf7_features",
    "hw.optional.arm.FEAT_DotProd",
    "hw.optional.arm.FEAT_FP16",
    "hw.optional.arm.FEAT_I8MM",
    "hw.optional.arm.FEAT_BF16",
    "hw.optional.arm.FEAT_SME",
    "kern.hv_vmm_present",
    "kern.bootsessionuuid",
    "sysctl.proc_translated",
    "iogpu.wired_limit_mb",
    "debug.iogpu.wired_limit",
)

# Shares of the RAM that Metal allows. Up to macOS 15: two thirds up to 36 GB, three quarters above (seen from 8 to
# 192 GB). From macOS 26: 74 % up to 24 GB, 78 % from 32, 81 % from 64, 84 % from 128 (seen from 16 to 192 GB).
OLD_SHARES = ((0, 2, 3), (37, 3, 4))
NEW_SHARES = ((0, 74, 100), (32, 78, 100), (64, 81, 100), (128, 84, 100))
NEW_SINCE = 26


def parse_sysctl(text: str) -> dict[str, str]:
    """`name: value` lines of sysctl; names that a Mac does not know are on standard error and not here."""
    found = {}
    for line in text.splitlines():
        name, colon, value = line.partition(": ")
        if colon and re.match(r"[a-z][\w.]*\Z", name):
            found[name] = value.strip()
    return found


def parse_vm_stat(text: str) -> dict[str, int]:
    """Bytes by name of `vm_stat` ('free', 'inactive', 'wired down', ...); {} when it names no page size."""
    size = re.search(r"page size of (\d{3,6}) bytes", text)
    if not size:
        return {}
    found = {}
    for name, pages in re.findall(r"^Pages ([a-z -]+):\s+(\d{1,15})\.?$", text, re.MULTILINE):
        found[name] = int(pages) * int(size.group(1))
    return found


def parse_displays(text: str) -> list[str]:
    """Names of the GPUs in `system_profiler -json SPDisplaysDataType`; [] for anything else."""
    try:
        listed = json.loads(text).get("SPDisplaysDataType")
    except (ValueError, AttributeError, RecursionError):
        return []
    entries = listed if isinstance(listed, list) else []
    return [str(e.get("sppci_model") or e.get("_name") or "GPU") for e in entries if isinstance(e, Mapping)]


def parse_working_set(text: str) -> int | None:
    """Bytes of 'recommendedMaxWorkingSetSize' in a log of llama.cpp.

    Old logs write MiB under the name MB with one blank before the '=', new ones decimal MB with two (B3-26).
    """
    match = re.search(r"recommendedMaxWorkingSetSize( +)= *(\d{1,9})\.(\d{2}) MB", text)
    if not match:
        return None
    unit = MIB if len(match.group(1)) == 1 else 10**6
    return int(match.group(2)) * unit + int(match.group(3)) * unit // 100


def macos_major(version: str | None) -> int | None:
    """26 of '26.1'; None for anything else."""
    return number((version or "").strip().partition(".")[0])


def working_set(ram: int, macos: int | None) -> int:
    """Estimate of what Metal allows without a limit of the operator's; unknown macOS counts as an old one."""
    shares = NEW_SHARES if macos is not None and macos >= NEW_SINCE else OLD_SHARES
    _size, part, whole = [share for share in shares if ram >= share[0] * GIB][-1]
    return ram * part // whole


def wired_limit(values: Mapping[str, str], ram: int) -> int | None:
    """What the operator set (MiB today, bytes on macOS 13), at most the RAM; None for the default."""
    limit = (number(values.get("iogpu.wired_limit_mb")) or 0) * MIB or number(values.get("debug.iogpu.wired_limit"))
    return min(limit, ram) if limit else None


def mac_traits(values: Mapping[str, str]) -> tuple[str, ...]:
    """'vm' in a virtual machine, 'rosetta' when this Python is one for Intel on an Apple processor (B3-27)."""
    traits = set()
    if values.get("kern.hv_vmm_present") == "1":
        traits.add("vm")
    if values.get("sysctl.proc_translated") == "1":
        traits.add("rosetta")
    return tuple(sorted(traits))


def mac_memory(values: Mapping[str, str], pages: Mapping[str, int], own: int = 0) -> Memory:
    """RAM of a Mac. Available is what is free, or holds files and unused pages (as Activity Monitor counts)."""
    total = number(values.get("hw.memsize"))
    if not total:
        raise DetectError("sysctl does not tell hw.memsize; is /usr/sbin in the PATH, and this a Mac?")
    known = [pages[name] for name in ("free", "inactive", "speculative", "purgeable") if name in pages]
    available = min(total, sum(known)) if known else total
    reserve = reserve_bytes("unified", total, "Darwin")
    warnings = () if known else ("vm_stat tells nothing, so all RAM counts as available",)
    return Memory(
        total=total,
        available=available,
        limit=None,
        usable=usable_bytes(total, reserve, available, own),
        warnings=warnings + crowded(total, available, own, "RAM"),
        own=own,
    )


_FEATURES = (
    ("hw.optional.arm.FEAT_DotProd", "asimddp"),
    ("hw.optional.arm.FEAT_FP16", "asimdhp"),
    ("hw.optional.arm.FEAT_I8MM", "i8mm"),
    ("hw.optional.arm.FEAT_BF16", "bf16"),
    ("hw.optional.arm.FEAT_SME", "sme"),
)


def mac_cpu(values: Mapping[str, str], arch: str) -> Cpu:
    """The processor of a Mac. Efficiency cores slow the others down, so they are told apart."""
    physical = number(values.get("hw.physicalcpu")) or 1
    fast = number(values.get("hw.perflevel0.physicalcpu"))
    if arch == "arm64":
        flags = {"asimd"} | {flag for name, flag in _FEATURES if values.get(name) == "1"}
        isa = "armv8.6-a" if {"i8mm", "bf16"} <= flags else "armv8.2-a"
    else:
        words = f"{values.get('machdep.cpu.features', '')} {values.get('machdep.cpu.leaf7_features', '')}".lower()
        flags = {word.replace("avx1.0", "avx").replace("sse4.2", "sse4_2") for word in words.split()}
        flags &= {"avx", "avx2", "fma", "f16c", "bmi2", "avx512f", "sse4_2", "ssse3"}
        isa = "x86-64-v3" if {"avx2", "fma", "bmi2", "f16c"} <= flags else "x86-64-v2"
    return Cpu(
        model=values.get("machdep.cpu.brand_string") or "CPU",
        physical_cores=physical,
        logical_cores=number(values.get("hw.logicalcpu")) or physical,
        performance_cores=fast if fast and fast < physical else None,
        isa=isa,
        features=tuple(sorted(flags)),
        numa_nodes=1,
    )


@dataclass(frozen=True)
class Mac:
    """What the tools of a Mac say, parsed; `displays` are the names of its GPUs."""

    values: Mapping[str, str]
    pages: Mapping[str, int]
    displays: tuple[str, ...] = ()
    macos: int | None = None


def metal_finding(mac: Mac, arch: str, machine_id: str, own: int = 0, metal_log: str = "") -> Finding:
    """The Metal device of a Mac, or why there is none. `metal_log`: a log of llama.cpp, which measures."""
    if "rosetta" in mac_traits(mac.values):
        note = "this Python runs under Rosetta; use a native one (arm64), or everything is built for Intel"
        return Finding("metal", note=note, warnings=(note,))
    if arch != "arm64":
        names = ", ".join(mac.displays) or "no GPU named"
        return Finding("metal", note=f"llama.cpp's Metal backend does not work on Intel Macs ({names})")
    if "vm" in mac_traits(mac.values):
        return Finding("metal", note="a virtual machine: its paravirtual GPU gives wrong answers or none")
    ram = number(mac.values.get("hw.memsize")) or 0
    limit, measured = wired_limit(mac.values, ram), parse_working_set(metal_log)
    wired = min(ram, mac.pages.get("wired down", 0))
    allowed = min(measured or limit or working_set(ram, mac.macos), ram)
    usable, warnings = metal_usable(ram, allowed, wired, own)
    source = "llama.cpp" if measured else "iogpu.wired_limit_mb" if limit else "share of hw.memsize"
    ceiling = None if measured or limit else metal_usable(ram, ram, wired, own)[0]
    if limit and limit > ram - 4 * GIB:
        warnings += (f"iogpu.wired_limit_mb leaves macOS {mib_text(ram - limit)}; keep 4096 MiB, or it may freeze",)
    device = Device(
        name="MTL0",
        backend="metal",
        description=next(iter(mac.displays), None) or mac.values.get("machdep.cpu.brand_string") or "Apple GPU",
        kind="unified",
        pool=ram_pool(machine_id),
        total=allowed,
        free=min(allowed, max(0, ram - wired)),
        usable=usable,
        source=source,
        warnings=warnings,
        ceiling=ceiling,
    )
    return Finding("metal", (device,))


def parse_ifconfig(text: str, hardware_ports: str = "") -> list[dict[str, Any]]:
    """Links of `ifconfig`, as host_facts lists them; `hardware_ports` of `networksetup -listallhardwareports`."""
    wireless = re.findall(r"Hardware Port: (?:Wi-Fi|AirPort)\s*\nDevice: (\w+)", hardware_ports)
    wired = re.findall(r"Hardware Port: [^\n]*\nDevice: (\w+)", hardware_ports)
    found = []
    for block in re.split(r"^(?=\S)", text, flags=re.MULTILINE):
        head = re.match(r"([a-z]+\d+): flags=\S+.*?\bmtu (\d{2,6})", block)
        if not head:
            continue
        name = head.group(1)
        address = re.search(r"^\s+inet (\d{1,3}(?:\.\d{1,3}){3})\b", block, re.MULTILINE)
        if name.startswith("lo") or not (address or (name in wired and "status: active" in block)):
            continue
        speed = re.search(r"media: .*?\((\d+(?:\.\d)?)(G?)base", block, re.IGNORECASE)
        mbps = int(float(speed.group(1)) * (1000 if speed.group(2) else 1)) if speed else None
        medium = "wireless" if name in wireless else "wired" if name in wired else "virtual"
        found.append(
            {
                "interface": name,
                "address": address.group(1) if address else None,
                "speed_mbps": mbps or None,
                "mtu": int(head.group(2)),
                "medium": medium,
            }
        )
    return found
