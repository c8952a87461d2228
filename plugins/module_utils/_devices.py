# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Devices and hosts as values, and the one place of the rules that say how much of a device's memory may be lent.

All sizes are integer bytes; unknown is None. `usable` is a capacity, not a reading:
min(total, limits) - reserve - what others hold; what our own services hold is added back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError

MIB = 1 << 20
GIB = 1 << 30

# dedicated: a card's own memory. carveout: RAM cut out by the firmware for an integrated GPU. unified: GPU and CPU
# share all RAM (Apple, GB10, Tegra). shared_system: an integrated GPU that borrows RAM. system_ram: the CPU's.
KINDS = ("dedicated", "unified", "carveout", "shared_system", "system_ram")
BACKENDS = ("cpu", "cuda", "rocm", "metal", "vulkan", "sycl")

# Stem of the names llama.cpp gives its devices (ggml-cuda.h, ggml-metal, ggml-vulkan, ggml-sycl of b11434).
BACKEND_OF_NAME = {
    "CPU": "cpu",
    "CUDA": "cuda",
    "ROCm": "rocm",
    "MTL": "metal",
    "Metal": "metal",
    "Vulkan": "vulkan",
    "SYCL": "sycl",
}

DEVICE_NAME = re.compile(r"[A-Za-z]+[0-9]*\Z")


class DeviceError(FleetError):
    """A size, a limit or a device that cannot be."""


@dataclass(frozen=True)
class Device:
    """One thing llama.cpp can compute on. `environment` is what a process needs to see it under `name`.

    `ceiling` is None where `usable` follows from measurements. Where it follows from an estimate of what the driver
    allows, it is the most that may be lent if llama.cpp itself reports more than that estimate.
    """

    name: str
    backend: str
    description: str
    kind: str
    pool: str
    total: int | None
    free: int | None
    usable: int | None
    arch: str | None = None
    pci_bus_id: str | None = None
    uuid: str | None = None
    source: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    ceiling: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The device as plain JSON types."""
        data = asdict(self)
        data["environment"] = dict(self.environment)
        data["warnings"] = list(self.warnings)
        return data


@dataclass(frozen=True)
class Finding:
    """What one vendor's room found on a host: its devices, or why there are none (`note`), and warnings.

    `toolkit` is the release of the vendor's compiler, `ready` whether there is one to build with. `seen` are parts
    that are there but not for this backend (no kernel driver for it, or too small), so that Vulkan may take them.
    """

    backend: str
    devices: tuple[Device, ...] = ()
    note: str = ""
    warnings: tuple[str, ...] = ()
    toolkit: str | None = None
    ready: bool = True
    seen: tuple[Device, ...] = ()
    driver: str | None = None

    @property
    def works(self) -> bool:
        """Whether at least one device has memory that may be lent."""
        return any(device.usable for device in self.devices)


class Reserve(NamedTuple):
    """max(floor, share of the total), at most `ceiling`; and never more than a quarter of the total."""

    floor: int
    percent: int
    ceiling: int
    why: str


# Estimates, chosen and not measured, except where a source is named. RAM on Linux: 512 MiB for the system, sshd and
# a run of Ansible that reaches a host which lends all it has; 5 % so that page tables, slab and the page cache of a
# big machine live; from 80 GiB on more idle memory helps nobody. macOS: 16 GB Macs freeze when wired memory comes
# near the limit (exo PR 1672), and people who raise the limit keep 4 to 8 GiB (scripts of exo and gpustack). A
# card: its driver context and library work space; no card was at hand. An integrated GPU that borrows RAM pins it,
# and the desktop that it draws lives in the same RAM: 29469 MiB offered with 20000 MiB available must give less
# than 18000 (B3-22). The quarter keeps small machines usable: 1 GiB lends 768 MiB.
RESERVES = {
    "ram": Reserve(512 * MIB, 5, 4 * GIB, "Linux: the system, sshd and a run of Ansible"),
    "ram_darwin": Reserve(2 * GIB, 10, 8 * GIB, "macOS: window server, indexer, compressor"),
    "borrowed": Reserve(1 * GIB, 10, 8 * GIB, "RAM that an integrated GPU borrows and pins"),
    "card": Reserve(512 * MIB, 2, 1 * GIB, "a card: driver context and library work space"),
}


def reserve_rule(kind: str, system: str = "Linux") -> str:
    """Key of RESERVES for a device kind and an operating system ('Linux', 'Darwin')."""
    if kind not in KINDS:
        raise DeviceError(f"device kind {kind!r} is unknown; one of {', '.join(KINDS)}")
    if kind in ("dedicated", "carveout"):
        return "card"
    if kind == "shared_system":
        return "borrowed"
    return "ram_darwin" if system == "Darwin" else "ram"


def reserve_bytes(kind: str, total: int, system: str = "Linux") -> int:
    """Bytes of `total` that are never lent."""
    rule = RESERVES[reserve_rule(kind, system)]
    return min(max(rule.floor, total * rule.percent // 100), rule.ceiling, total // 4)


def reserve_table() -> str:
    """The reserve rules as a Markdown table, for the docs."""
    sizes = [1, 2, 4, 8, 16, 32, 64, 128]
    lines = ["| memory | " + " | ".join(f"{size} GiB" for size in sizes) + " |", "| --- |" + " ---: |" * len(sizes)]
    for rule, kind, system in (
        ("ram", "system_ram", "Linux"),
        ("ram_darwin", "unified", "Darwin"),
        ("borrowed", "shared_system", "Linux"),
        ("card", "dedicated", "Linux"),
    ):
        cells = [f"{reserve_bytes(kind, size * GIB, system) // MIB} MiB" for size in sizes]
        lines.append(f"| {RESERVES[rule].why} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


class KindRule(NamedTuple):
    """How the memory of one kind of device is counted, for people."""

    kind: str
    where: str
    total: str
    lent: str
    pool: str


KIND_RULES = (
    KindRule(
        "dedicated",
        "cards of NVIDIA, AMD and Intel, MIG slices, vGPU guests",
        "the card's own memory; GTT is not capacity",
        "min(total - reserve, free + ours - reserve)",
        "`gpu/<PCI address>`",
    ),
    KindRule(
        "carveout",
        "AMD APU whose firmware cut out at least as much as GTT has, or with a kernel before 6.10",
        "the cut-out memory, which RAM does not count",
        "as dedicated",
        "`gpu/<PCI address>`",
    ),
    KindRule(
        "unified",
        "Apple Silicon, GB10, Jetson, AMD APU that uses GTT",
        "RAM; Apple: the working set Metal allows; APU: cut-out + GTT, at most RAM",
        "min(what the driver allows, RAM available + ours - reserve)",
        "`ram`",
    ),
    KindRule(
        "shared_system",
        "Intel graphics, small AMD graphics, other integrated GPUs in Vulkan",
        "what the driver offers, at most RAM",
        "min(device-local heaps, RAM available + ours - reserve)",
        "`ram`",
    ),
    KindRule(
        "system_ram",
        "the processor",
        "RAM, or the least control group limit",
        "min(limit, available + ours) - reserve",
        "`ram`",
    ),
)


def kind_table() -> str:
    """The rules of KIND_RULES as a Markdown table, for the docs."""
    lines = ["| kind | where | total | lent | pool |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| `{rule.kind}` | {rule.where} | {rule.total} | {rule.lent} | {rule.pool} |" for rule in KIND_RULES]
    return "\n".join(lines) + "\n"


# No card of 2026 has more than 288 GB; a driver that says more than this says nothing.
LARGEST_CARD = 1 << 40


class Ram(NamedTuple):
    """RAM as the rules need it: `capacity` is the total or the limit below it, `own` what our own services hold."""

    total: int
    capacity: int
    available: int
    own: int


def lend_card(kind: str, total: int | None, free: int | None, own: int = 0) -> int | None:
    """Usable bytes of memory that is the device's own (dedicated, carveout); None when its size is unknown."""
    return None if total is None else usable_bytes(total, reserve_bytes(kind, total), free, own)


def lend_ram(kind: str, offered: int | None, ram: Ram, own: int = 0) -> tuple[int, int, int]:
    """(total, free, usable) of a GPU that uses the RAM of a Linux host (unified, shared_system).

    `offered`: what its driver lets it use (None: all); `own`: what our services hold through the driver, which is in
    no process's own memory.
    """
    total = ram.total if offered is None else min(offered, ram.total)
    reserve = reserve_bytes(kind, ram.capacity)
    usable = min(total, usable_bytes(ram.capacity, reserve, ram.available, ram.own + own))
    return total, min(total, ram.available), usable


def usable_bytes(capacity: int, reserve: int, free: int | None = None, own: int = 0) -> int:
    """What may be lent of `capacity` (total, or a limit below it).

    `free` is what nobody holds (None: unknown, then others are taken to hold nothing); `own` what our own services
    hold.
    """
    room = capacity if free is None else min(capacity, max(0, free) + max(0, own))
    return max(0, room - reserve)


def crowded(capacity: int, free: int | None, own: int, what: str) -> tuple[str, ...]:
    """A warning when others hold more than half of a memory (B1-14: such machines freeze when the rest is filled)."""
    others = 0 if free is None else capacity - free - own
    if others * 2 <= capacity:
        return ()
    return (f"{what}: others hold {mib_text(others)} of {mib_text(capacity)}; close them, or expect little to be lent",)


def metal_usable(ram_total: int, working_set: int, wired: int, own: int = 0) -> tuple[int, tuple[str, ...]]:
    """(usable bytes, warnings) of an Apple GPU.

    Metal allows `working_set` (recommendedMaxWorkingSetSize) without looking at what other processes wired, so the
    memory that is really there bounds it as well.
    """
    free = max(0, ram_total - wired)
    room = usable_bytes(ram_total, reserve_bytes("unified", ram_total, "Darwin"), free, own)
    return min(working_set, room), crowded(ram_total, free, own, "wired memory")


def card_size(size: int | None) -> int | None:
    """A card's memory as its driver says it; None for 0 and for what no card has."""
    return size if size and 0 < size <= LARGEST_CARD else None


def number(text: str | None) -> int | None:
    """A non-negative decimal that a kernel file or a tool holds; None for 'max', -1, an empty or an absent file."""
    text = (text or "").strip()
    return int(text) if 0 < len(text) < 20 and text.isascii() and text.isdigit() else None


def clamp_free(total: int | None, free: int | None) -> int | None:
    """Free memory as reported, never above the total (B1-09: drivers take the two from different sources)."""
    return free if total is None or free is None else min(free, total)


def mib_text(size: int | None) -> str:
    """Bytes for people: '1536 MiB', or 'unknown'."""
    return "unknown" if size is None else f"{size // MIB} MiB"


_SIZE = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([A-Za-z%]*)\s*\Z")
# K/M/G/T count by 1024, as systemd and Docker do; KB/MB/GB/TB are decimal, as on the box of a disk or a card.
_UNITS = {"": 1, "b": 1}
_UNITS.update({letter + tail: 1 << (10 * n) for n, letter in enumerate("kmgt", 1) for tail in ("", "i", "ib")})
_UNITS.update({letter + "b": 1000**n for n, letter in enumerate("kmgt", 1)})

_SIZE_HELP = "write bytes (214748364), a size ('200MiB', '4G', '24GB') or a share ('80%')"


def parse_size(value: object, whole: int | None = None, what: str = "memory_limit") -> int:
    """Bytes of an operator's size: an integer, '200MiB', '4G', '1.5GiB', '24GB', '80%' of `whole`.

    Never above `whole` when that is known. DeviceError for anything else, and for less than 1 MiB, which is a lost
    unit.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise DeviceError(f"{what}: {value!r} is no size; {_SIZE_HELP}")
    match = _SIZE.match(str(value))
    if not match:
        raise DeviceError(f"{what}: {value!r} is no size; {_SIZE_HELP}")
    number, unit = Fraction(match.group(1)), match.group(2).lower()
    if unit == "%":
        if number > 100:
            raise DeviceError(f"{what}: {value!r} is more than there is; at most '100%'")
        if whole is None:
            raise DeviceError(f"{what}: {value!r} is a share of a memory whose size is unknown; give a size instead")
        size = int(number * whole / 100)
        if size == 0:
            raise DeviceError(f"{what}: {value!r} of {mib_text(whole)} lends nothing; leave the device out instead")
        return size
    if unit not in _UNITS:
        raise DeviceError(f"{what}: {value!r} has no known unit; {_SIZE_HELP}")
    size = int(number * _UNITS[unit])
    if size < MIB:
        raise DeviceError(f"{what}: {value!r} is {size} bytes; a unit is missing? {_SIZE_HELP}")
    return size if whole is None else min(size, whole)


def ram_pool(machine_id: str) -> str:
    """Name of a machine's RAM as a pool."""
    return f"{machine_id}/ram"


def gpu_pool(machine_id: str, bus_id_or_uuid: str) -> str:
    """Name of a card's own memory as a pool."""
    return f"{machine_id}/gpu/{bus_id_or_uuid}"


def backend_of(name: str) -> str | None:
    """Backend of a llama.cpp device name ('CUDA0' -> 'cuda'); None when the stem is unknown."""
    return BACKEND_OF_NAME.get(name.rstrip("0123456789"))


class Listed(NamedTuple):
    """One line of `llama-server --list-devices`, in bytes; sizes of 0 (BLAS, a GPU that did not come up) are None."""

    name: str
    description: str
    total: int | None
    free: int | None


_LISTED = re.compile(r"\s*([A-Za-z]+[0-9]*): (.*) \(([0-9]{1,12}) MiB, ([0-9]{1,12}) MiB free\)\s*\Z")


def parse_list_devices(text: str) -> list[Listed]:
    """Devices in the output of `llama-server --list-devices`; other lines, and '(none)', give nothing."""
    found = []
    for line in text.splitlines():
        match = _LISTED.match(line)
        if match:
            total = int(match.group(3)) * MIB or None
            found.append(
                Listed(
                    match.group(1),
                    match.group(2),
                    total,
                    clamp_free(total, int(match.group(4)) * MIB) if total else None,
                )
            )
    return found


@dataclass(frozen=True)
class Host:
    """What host_facts knows of a machine; `to_dict` is ansible_facts.llamafleet, schema 1."""

    machine_id: str
    boot_id: str | None
    collected_at: str
    system: str
    arch: str
    init: str
    traits: tuple[str, ...]
    cpu: Mapping[str, Any]
    memory: Mapping[str, int | None]
    devices: tuple[Device, ...]
    backend: str
    candidates: tuple[Mapping[str, Any], ...]
    class_id: str
    cmake_flags: tuple[str, ...]
    links: tuple[Mapping[str, Any], ...]
    user: Mapping[str, Any]
    psutil: bool
    warnings: tuple[str, ...] = ()
    schema: int = 1

    def to_dict(self) -> dict[str, Any]:
        """The host as plain JSON types."""
        data: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("traits", "candidates", "cmake_flags", "links", "warnings"):
            data[name] = list(data[name])
        data["devices"] = [device.to_dict() for device in self.devices]
        return data
