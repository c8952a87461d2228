# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""CPU and RAM of a Linux host, from the text of /proc and /sys: cores, instruction set, memory and what bounds it.

llama.cpp's CPU device reports free = total = sysinfo(2), whatever cgroups and containers say (read in ggml-cpu
of b11434), so everything that limits a CPU worker has to be found here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import (
    Device,
    Ram,
    crowded,
    mib_text,
    number,
    ram_pool,
    reserve_bytes,
    usable_bytes,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Runner

CPUS = "/sys/devices/system/cpu"
NODES = "/sys/devices/system/node"


class DetectError(FleetError):
    """A host that does not show what every Linux shows."""


# --- processor ------------------------------------------------------------------------------------------------------

# What each level adds (x86-64 psABI). /proc/cpuinfo says pni for SSE3, abm for LZCNT, and xsave stands for OSXSAVE.
X86_LEVELS = (
    ("x86-64-v2", frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"})),
    ("x86-64-v3", frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"})),
    ("x86-64-v4", frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})),
)
ARM_LEVELS = (
    ("armv8.2-a", frozenset({"atomics", "asimddp", "fphp", "asimdhp"})),
    ("armv8.6-a", frozenset({"i8mm", "bf16"})),
    ("armv9-a", frozenset({"sve2"})),
)
# The flags that ggml's CPU kernels ask for (ggml/src/ggml-cpu of b11434), as /proc/cpuinfo spells them.
GGML_FEATURES = frozenset(
    {
        "ssse3",
        "sse4_2",
        "avx",
        "avx2",
        "fma",
        "f16c",
        "bmi2",
        "avx_vnni",
        "avx512f",
        "avx512vbmi",
        "avx512_vnni",
        "avx512_bf16",
        "amx_tile",
        "amx_int8",
        "amx_bf16",
        "asimd",
        "asimddp",
        "asimdhp",
        "i8mm",
        "bf16",
        "sve",
        "sve2",
        "sme",
    }
)


@dataclass(frozen=True)
class Cpu:
    """Cores are those this process may use: affinity and CPU quota of its cgroup applied.

    `performance_cores` is None when all cores are alike; `isa` is the level every core has.
    """

    model: str
    physical_cores: int
    logical_cores: int
    performance_cores: int | None
    isa: str
    features: tuple[str, ...]
    numa_nodes: int

    def to_dict(self) -> dict[str, Any]:
        """The processor as plain JSON types."""
        return {**self.__dict__, "features": list(self.features)}


def parse_cpuinfo(text: str) -> list[dict[str, str]]:
    """Blocks of /proc/cpuinfo. ARM ends with a block that belongs to no processor; it is kept as a block of its own."""
    blocks: list[dict[str, str]] = []
    for part in text.split("\n\n"):
        block = {}
        for line in part.splitlines():
            key, colon, value = line.partition(":")
            if colon:
                block[key.strip()] = value.strip()
        if block:
            blocks.append(block)
    return blocks


def parse_cpu_list(text: str | None) -> frozenset[int]:
    """'0-3,8' as a set of CPU numbers; empty for anything unreadable.

    Linux knows at most 8192 CPUs (CONFIG_NR_CPUS).
    """
    cpus: set[int] = set()
    for part in (text or "").strip().split(","):
        first, dash, last = part.partition("-")
        if not (number(first) is not None and (not dash or number(last) is not None)):
            return frozenset()
        low, high = int(first), int(last) if dash else int(first)
        if not low <= high < 8192:
            return frozenset()
        cpus.update(range(low, high + 1))
    return frozenset(cpus)


def isa_level(arch: str, flags: Iterable[str]) -> str:
    """The highest level of which every flag is there: 'x86-64-v1'..'x86-64-v4', 'armv8-a'..'armv9-a', else `arch`."""
    have = set(flags)
    if arch in ("x86_64", "amd64"):
        level, levels = "x86-64-v1", X86_LEVELS
    elif arch in ("aarch64", "arm64"):
        level, levels = "armv8-a", ARM_LEVELS
    else:
        return arch
    for name, needs in levels:
        if not needs <= have:
            break
        level = name
    return level


def detect_cpu(runner: Runner, arch: str) -> Cpu:
    """The processor of this host (`arch` as uname -m says). DetectError when /proc/cpuinfo cannot be read."""
    text = runner.read("/proc/cpuinfo", 1 << 23)
    if text is None:
        raise DetectError("/proc/cpuinfo cannot be read; host detection needs a mounted /proc")
    blocks = parse_cpuinfo(text)
    cpus = _allowed_cpus(runner) or frozenset(range(sum("processor" in block for block in blocks) or 1))
    flag_sets = [set((block.get("flags") or block.get("Features") or "").split()) for block in blocks]
    flags: set[str] = set.intersection(*[found for found in flag_sets if found]) if any(flag_sets) else set()
    physical = _physical_cores(runner, cpus, blocks)
    fast = _fast_cpus(runner, cpus)
    quota = cpu_quota(runner)
    bound = math.ceil(quota) if quota else len(cpus)
    # A quota of 2.5 CPUs runs three threads, but only two of them all the time.
    full = max(1, math.floor(quota)) if quota else physical
    return Cpu(
        model=_model(runner, blocks),
        physical_cores=min(physical, full),
        logical_cores=max(1, min(len(cpus), bound)),
        performance_cores=min(_physical_cores(runner, fast, []), full) if fast else None,
        isa=isa_level(arch, flags),
        features=tuple(sorted(flags & GGML_FEATURES)),
        numa_nodes=max(
            1,
            sum(name[:4] == "node" and number(name[4:]) is not None for name in runner.listdir(NODES)),
        ),
    )


def _allowed_cpus(runner: Runner) -> frozenset[int]:
    """CPUs this process may run on (sched_getaffinity, as /proc tells it)."""
    for line in (runner.read("/proc/self/status") or "").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return parse_cpu_list(line.partition(":")[2])
    return frozenset()


def _physical_cores(runner: Runner, cpus: frozenset[int], blocks: list[dict[str, str]]) -> int:
    cores: set[tuple[str, str, str]] = set()
    for cpu in cpus:
        where = f"{CPUS}/cpu{cpu}/topology"
        package, core = runner.read(f"{where}/physical_package_id"), runner.read(f"{where}/core_id")
        # Some ARM boards say core_id 0 for every core of a cluster: siblings tell them apart.
        siblings = runner.read(f"{where}/thread_siblings_list")
        if package is None or core is None:
            cores.clear()
            break
        cores.add((package.strip(), core.strip(), (siblings or "").strip()))
    if not cores:
        cores = {(b["physical id"], b["core id"], "") for b in blocks if "physical id" in b and "core id" in b}
    return min(len(cores), len(cpus)) if cores else max(1, len(cpus))


def _fast_cpus(runner: Runner, cpus: frozenset[int]) -> frozenset[int]:
    """Performance cores of a hybrid part; empty when all cores are alike."""
    intel = parse_cpu_list(runner.read("/sys/devices/cpu_core/cpus")) & cpus
    if intel and intel != cpus:
        return intel
    capacity = {cpu: number(runner.read(f"{CPUS}/cpu{cpu}/cpu_capacity")) or 0 for cpu in cpus}
    # big.LITTLE: the kernel scales the fastest core to 1024; little cores are below half of it.
    fast = frozenset(cpu for cpu, value in capacity.items() if value * 2 > max(capacity.values()))
    return fast if fast != cpus else frozenset()


def _model(runner: Runner, blocks: list[dict[str, str]]) -> str:
    for block in blocks:
        for key in ("model name", "cpu model", "Model", "Hardware"):
            if block.get(key):
                return block[key]
    board = runner.read("/proc/device-tree/model") or ""
    return board.replace("\0", "").strip() or "CPU"


# --- cgroups --------------------------------------------------------------------------------------------------------


class Room(NamedTuple):
    """One level of the cgroup tree that bounds memory: its limit, and what counts as used of it (no page cache)."""

    path: str
    limit: int
    used: int


# v1 says "no limit" with the greatest multiple of the page size that fits (9223372036854771712 for 4 KiB pages, less
# for 64 KiB ones); nothing real comes near.
NO_LIMIT = 1 << 62


def cgroup_dirs(runner: Runner, controller: str) -> list[tuple[str, int]]:
    """(directory, version) of this process's cgroup for `controller` and of all its parents, own first.

    v2, v1 and the hybrid of both. A path that a container cannot see (no cgroup namespace) yields directories that are
    absent, which reads as "no limit"; the mount's own root, which is then the container's cgroup, is always the last.
    """
    dirs: list[tuple[str, int]] = []
    for line in (runner.read("/proc/self/cgroup") or "").splitlines():
        number, _colon, rest = line.partition(":")
        controllers, _colon, path = rest.partition(":")
        parts = [part for part in path.split("/") if part not in ("", "..")]
        if number == "0" and not controllers:
            roots, version = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"], 2
        elif controller in controllers.split(","):
            roots, version = [f"/sys/fs/cgroup/{controllers}", f"/sys/fs/cgroup/{controller}"], 1
        else:
            continue
        for root in dict.fromkeys(roots):
            dirs.extend(("/".join([root, *parts[:depth]]), version) for depth in range(len(parts), -1, -1))
    return dirs


def memory_rooms(runner: Runner) -> list[Room]:
    """Every level of the cgroup tree, own first, that limits memory (v1 sentinel and v2 "max" are none)."""
    rooms = []
    for where, version in cgroup_dirs(runner, "memory"):
        names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
        limits = [size for size in (number(runner.read(f"{where}/{name}")) for name in names) if size is not None]
        limit = min(limits, default=NO_LIMIT)
        if limit >= NO_LIMIT:
            continue
        current = number(runner.read(f"{where}/{'memory.current' if version == 2 else 'memory.usage_in_bytes'}")) or 0
        rooms.append(Room(where, limit, max(0, current - _reclaimable(runner.read(f"{where}/memory.stat"), version))))
    return rooms


def _reclaimable(stat: str | None, version: int) -> int:
    """Page cache and slab that the kernel gives back at need (LXCFS counts the same); tmpfs is in neither figure."""
    keys = (
        ("inactive_file", "active_file", "slab_reclaimable")
        if version == 2
        else ("total_inactive_file", "total_active_file")
    )
    total = 0
    for line in (stat or "").splitlines():
        key, _blank, value = line.partition(" ")
        if key in keys:
            total += number(value) or 0
    return total


def cpu_quota(runner: Runner) -> float | None:
    """CPUs' worth of time the cgroups allow, the least up the tree; None when nothing limits it."""
    quotas = []
    for where, version in cgroup_dirs(runner, "cpu"):
        if version == 2:
            words = (runner.read(f"{where}/cpu.max") or "").split()
            quota, period = (number(words[0]), number(words[1])) if len(words) == 2 else (None, None)
        else:
            quota = number(runner.read(f"{where}/cpu.cfs_quota_us"))
            period = number(runner.read(f"{where}/cpu.cfs_period_us"))
        if quota and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


# --- memory ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """RAM of the host in bytes. `limit` is the least cgroup limit below the total, None when there is none."""

    total: int
    available: int
    limit: int | None
    usable: int
    hugepages: int = 0
    hugepages_free: int = 0
    warnings: tuple[str, ...] = ()
    own: int = 0

    @property
    def ram(self) -> Ram:
        """What the rules for devices that use the RAM need of it."""
        return Ram(self.total, self.total if self.limit is None else self.limit, self.available, self.own)

    def to_dict(self) -> dict[str, int | None]:
        """The four figures of the contract."""
        return {"total": self.total, "available": self.available, "limit": self.limit, "usable": self.usable}


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo in bytes; HugePages_* stay counts. Lines that are not `Name: number [kB]` are left out."""
    found = {}
    for line in text.splitlines():
        key, _colon, rest = line.partition(":")
        words = rest.split()
        if words and number(words[0]) is not None and words[1:] in ([], ["kB"]):
            found[key.strip()] = int(words[0]) * (1024 if len(words) == 2 else 1)
    return found


def arc_reclaimable(text: str | None) -> int:
    """Bytes of the ZFS cache that the kernel gives back at need but leaves out of MemAvailable: size - c_min."""
    values = {}
    for line in (text or "").splitlines():
        words = line.split()
        if len(words) == 3 and words[0] in ("size", "c_min"):
            values[words[0]] = number(words[2]) or 0
    return max(0, values.get("size", 0) - values.get("c_min", 0)) if "size" in values else 0


def detect_memory(runner: Runner, own: int = 0, physical: int | None = None, lxc: bool = False) -> Memory:
    """RAM that this host can lend.

    `own`: bytes our own services hold, added back. `physical`: what sysinfo(2) says, where known. `lxc`:
    /proc/meminfo is LXCFS's, and the ZFS cache seen is the outer host's. DetectError when /proc/meminfo has no
    MemTotal.
    """
    info = parse_meminfo(runner.read("/proc/meminfo") or "")
    total = info.get("MemTotal", 0)
    if total <= 0:
        raise DetectError("/proc/meminfo has no MemTotal; host detection needs a mounted /proc")
    warnings = []
    if physical is not None and physical > total + total // 8:
        warnings.append(
            f"this container shows {mib_text(total)}, but a CPU worker reports {mib_text(physical)}, the outer host's: "
            "its report is not believed, and a worker that is given more than it has is killed"
        )
    total = min(total, physical or total)
    available = info.get("MemAvailable")
    if available is None:  # before Linux 3.14
        available = info.get("MemFree", 0) + info.get("Buffers", 0) + info.get("Cached", 0)
    if not lxc:
        available += arc_reclaimable(runner.read("/proc/spl/kstat/zfs/arcstats"))
    rooms = [room for room in memory_rooms(runner) if room.limit < total]
    limit = min((room.limit for room in rooms), default=None)
    available = min([available, total, *(max(0, room.limit - room.used) for room in rooms)])
    capacity = total if limit is None else limit
    hugepage = info.get("Hugepagesize", 0)
    hugepages = min(info.get("HugePages_Total", 0) * hugepage, total)
    if hugepages * 20 > total:
        warnings.append(
            f"{mib_text(hugepages)} are set aside as huge pages, which llama.cpp does not use (vm.nr_hugepages)"
        )
    if limit is not None:
        warnings.append(
            f"memory is limited to {mib_text(limit)} of {mib_text(total)} by the control group this login runs in"
        )
    warnings.extend(crowded(capacity, available, own, "RAM"))
    return Memory(
        total=total,
        available=available,
        limit=limit,
        usable=usable_bytes(capacity, reserve_bytes("system_ram", capacity), available, own),
        hugepages=hugepages,
        hugepages_free=min(info.get("HugePages_Free", 0) * hugepage, total),
        warnings=tuple(warnings),
        own=own,
    )


def memory_control_off(runner: Runner) -> bool:
    """Whether the kernel was told to ignore memory limits of units: the firmware of a Raspberry Pi does so."""
    for line in (runner.read("/proc/cgroups") or "").splitlines():
        words = line.split()
        if words[:1] == ["memory"] and len(words) == 4:
            return words[3] == "0"
    return False


def numa_note(cpu: Cpu) -> str:
    """What to do about several NUMA nodes; empty for one."""
    if cpu.numa_nodes < 2:
        return ""
    return (
        f"{cpu.numa_nodes} NUMA nodes, and the worker does not know of them: run an instance for each (numa_node), "
        "or one under numactl --interleave=all"
    )


def cpu_device(cpu: Cpu, memory: Memory, machine_id: str, source: str = "/proc/meminfo") -> Device:
    """The CPU as the device llama.cpp calls CPU."""
    return Device(
        name="CPU",
        backend="cpu",
        description=cpu.model,
        kind="system_ram",
        pool=ram_pool(machine_id),
        total=memory.total,
        free=memory.available,
        usable=memory.usable,
        arch=cpu.isa,
        source=source,
    )


def anonymous_bytes(runner: Runner, pids: Iterable[int]) -> int:
    """Memory that only the end of these processes gives back (RssAnon).

    Mapped files are page cache: never used memory.
    """
    total = 0
    for pid in pids:
        status: Mapping[str, int] = parse_meminfo(runner.read(f"/proc/{pid}/status") or "")
        total += status.get("RssAnon", 0)
    return total
