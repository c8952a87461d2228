# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Graphics cards of a Linux host as its kernel shows them: PCI addresses and ids, and memory that processes hold there.

Needs no driver's tool and no pci.ids. Sizes are bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import Device, number
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Runner

DEVICES = "/sys/bus/pci/devices"
NVIDIA, AMD, INTEL = "0x10de", "0x1002", "0x8086"


def bus_id(text: str | None) -> str | None:
    """PCI address as the kernel and llama.cpp write it: '00000000:01:00.0' -> '0000:01:00.0', lower case."""
    match = re.match(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])\Z", (text or "").strip().lower())
    return f"{int(match.group(1), 16):04x}:{match.group(2)}:{match.group(3)}.{match.group(4)}" if match else None


def pci_cards(runner: Runner, vendor: str) -> list[str]:
    """PCI addresses of display (0x03) and accelerator (0x12) devices of a vendor ('0x10de'); needs no driver."""
    return [
        slot
        for slot in runner.listdir(DEVICES)
        if (runner.read(f"{DEVICES}/{slot}/vendor") or "").strip() == vendor
        and (runner.read(f"{DEVICES}/{slot}/class") or "")[:4] in ("0x03", "0x12")
    ]


def pci_ids(runner: Runner) -> dict[str, tuple[int, int]]:
    """(vendor, device) id of every graphics card and accelerator of the three makers, by PCI address."""
    return {
        slot: (int(vendor, 16), device_id(runner, slot))
        for vendor in (NVIDIA, AMD, INTEL)
        for slot in pci_cards(runner, vendor)
    }


def device_id(runner: Runner, slot: str) -> int:
    """The PCI device id of a card; 0 when it cannot be read."""
    text = (runner.read(f"{DEVICES}/{slot}/device") or "").strip()
    return int(text, 16) if re.match(r"0x[0-9a-f]{1,4}\Z", text) else 0


def driver_of(runner: Runner, slot: str) -> str | None:
    """Name of the kernel driver that has the card (amdgpu, xe, i915, vfio-pci); None when none has."""
    target = runner.readlink(f"{DEVICES}/{slot}/driver")
    return target.rpartition("/")[2] if target else None


def render_node(runner: Runner, slot: str) -> int | None:
    """Minor number of the card's render node (128 for /dev/dri/renderD128)."""
    for name in runner.listdir(f"{DEVICES}/{slot}/drm"):
        if name.startswith("renderD"):
            return number(name[7:])
    return None


class Held(NamedTuple):
    """Bytes that processes hold through a card's driver: in the card's own memory, and in RAM."""

    card: int
    ram: int


_FDINFO = re.compile(r"drm-(memory|resident)-([a-z]+)\d*\Z")
_SCALE = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}


def parse_fdinfo(text: str) -> tuple[str | None, str, Held]:
    """(PCI address, client, Held) of one /proc/PID/fdinfo entry of a DRM driver (drm-usage-stats of the kernel's docs).

    amdgpu says drm-memory-vram and drm-memory-gtt, newer kernels drm-resident-*; xe vram0 and system, i915 local0.
    """
    slot, client = None, ""
    sizes: dict[str, int] = {}
    for line in text.splitlines():
        key, _colon, value = line.partition(":")
        if key == "drm-pdev":
            slot = bus_id(value)
        elif key == "drm-client-id":
            client = value.strip()
        match = _FDINFO.match(key)
        words = value.split()
        if match and words and words[1:2] in ([], ["KiB"], ["MiB"]):
            size = (number(words[0]) or 0) * _SCALE["".join(words[1:2])]
            sizes[match.group(2)] = max(sizes.get(match.group(2), 0), size)
    card = sizes.get("vram", 0) + sizes.get("local", 0)
    return slot, client, Held(card, max(sizes.get("gtt", 0), sizes.get("system", 0)))


def drm_held(runner: Runner, pids: Iterable[int]) -> dict[str, Held]:
    """What processes hold through DRM drivers, by PCI address. A client that several descriptors share counts once."""
    seen: set[tuple[str, str]] = set()
    held: dict[str, Held] = {}
    for pid in pids:
        for name in runner.listdir(f"/proc/{pid}/fdinfo"):
            text = runner.read(f"/proc/{pid}/fdinfo/{name}", 8192) or ""
            if "drm-pdev" not in text:
                continue
            slot, client, size = parse_fdinfo(text)
            if slot is None or (slot, client) in seen:
                continue
            seen.add((slot, client))
            before = held.get(slot, Held(0, 0))
            held[slot] = Held(before.card + size.card, before.ram + size.ram)
    return held


def without_integrated(devices: Sequence[Device]) -> tuple[tuple[Device, ...], tuple[Device, ...]]:
    """(kept, left out): llama.cpp leaves an integrated GPU alone where a card is beside it (law 2)."""
    if not any(device.kind == "dedicated" for device in devices):
        return tuple(devices), ()
    kept = tuple(device for device in devices if device.kind == "dedicated")
    return kept, tuple(device for device in devices if device.kind != "dedicated")


def json_values(text: str) -> Iterator[Any]:
    """Every JSON object or array in a tool's output, whatever stands before, between and behind (B3-14).

    ROCm's tools print warnings before it, and some releases several arrays one after the other.
    """
    decoder = json.JSONDecoder()
    position, tries = 0, 0
    while tries < 200:  # a warning has a few brackets; a stream of garbage is not worth more
        found = re.compile(r"[{\[]").search(text, position)
        if not found:
            return
        try:
            value, position = decoder.raw_decode(text, found.start())
        except (ValueError, RecursionError):
            position, tries = found.start() + 1, tries + 1
            continue
        yield value
