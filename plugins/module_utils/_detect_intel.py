# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Intel GPUs: from sysfs of the xe and i915 drivers, and names and sizes from xpu-smi and sycl-ls.

Only a card of its own memory has a size in sysfs; the graphics of a processor (always 0000:00:02.0) borrow RAM. Level
Zero reports free = total where it does not know (B3-22), so free memory is taken from the kernel or is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_cpu import Memory
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import (
    Device,
    Finding,
    card_size,
    clamp_free,
    crowded,
    gpu_pool,
    lend_card,
    lend_ram,
    number,
    ram_pool,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._pci import (
    DEVICES,
    INTEL,
    Held,
    bus_id,
    device_id,
    driver_of,
    drm_held,
    json_values,
    pci_cards,
    without_integrated,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import TIMED_OUT, Result, Runner

INTEGRATED_SLOT = "0000:00:02.0"
# oneAPI is not in PATH until its setvars.sh was read; that is the unit's business, too (docs/backend/SYCL.md).
SETVARS = "/opt/intel/oneapi/setvars.sh"


@dataclass(frozen=True)
class Card:
    """An Intel GPU; sizes in bytes, unknown None."""

    slot: str
    name: str
    driver: str | None
    total: int | None
    free: int | None
    source: str = "sysfs"

    @property
    def integrated(self) -> bool:
        """Whether it is part of a processor: Intel puts that at one address."""
        return self.slot == INTEGRATED_SLOT


def sysfs_cards(runner: Runner) -> list[Card]:
    """Intel GPUs of the PCI bus. xe has a size for each tile, i915 one for all (lmem_total_bytes)."""
    cards = []
    for slot in pci_cards(runner, INTEL):
        root = f"{DEVICES}/{slot}"
        tiles = [name for name in runner.listdir(root) if re.match(r"tile\d+\Z", name)]
        sizes = [number(runner.read(f"{root}/{tile}/physical_vram_size_bytes")) or 0 for tile in tiles]
        total, free = sum(sizes), None
        if not total:
            for name in runner.listdir(f"{root}/drm"):
                total = total or number(runner.read(f"{root}/drm/{name}/lmem_total_bytes")) or 0
                free = free or number(runner.read(f"{root}/drm/{name}/lmem_avail_bytes"))
        name = f"Intel graphics {device_id(runner, slot):04x}"
        cards.append(Card(slot, name, driver_of(runner, slot), card_size(total), clamp_free(card_size(total), free)))
    return cards


def parse_discovery(text: str) -> list[tuple[int, str, str | None]]:
    """(device id, name, PCI address) of each GPU in `xpu-smi discovery -j`; [] for an error object or other text."""
    found = []
    for value in json_values(text):
        listed = value.get("device_list") if isinstance(value, Mapping) else None
        for entry in listed if isinstance(listed, list) else []:
            index = entry.get("device_id") if isinstance(entry, Mapping) else None
            if isinstance(index, int) and not isinstance(index, bool) and 0 <= index < 1000:
                address = bus_id(str(entry.get("pci_bdf_address")))
                found.append((index, str(entry.get("device_name") or "Intel GPU"), address))
    return found


def parse_discovery_size(text: str) -> int | None:
    """memory_physical_size_byte of `xpu-smi discovery -d N -j`."""
    for value in json_values(text):
        size: Any = value.get("memory_physical_size_byte") if isinstance(value, Mapping) else None
        if isinstance(size, (int, str)) and not isinstance(size, bool):
            return card_size(number(str(size)))
    return None


def parse_sycl_ls(text: str) -> list[str]:
    """Names of the Level Zero GPUs of `sycl-ls`, in the order in which llama.cpp numbers them."""
    pattern = r"\[level_zero:gpu\]\[level_zero:\d+\].*?, (Intel\(R\) .+?)(?: \d+\.\d+\.\d+)?(?: \[[^\]]*\])?\s*$"
    return re.findall(pattern, text, re.MULTILINE)


def sycl_finding(
    cards: Sequence[Card],
    machine_id: str,
    memory: Memory,
    held: Mapping[str, Held],
    listed: Sequence[str] = (),
) -> Finding:
    """SYCL's devices among the cards. `listed`: names of sycl-ls, when it answered."""
    if not cards:
        return Finding("sycl", note="no Intel GPU")
    usable_cards = [card for card in cards if card.driver in ("xe", "i915")]
    # Level Zero lists cards of their own memory first.
    ordered = sorted(usable_cards, key=lambda card: card.integrated)
    if len(listed) == len(ordered):
        ordered = [replace(card, name=name) for card, name in zip(ordered, listed)]
    devices = [_device(card, position, machine_id, memory, held) for position, card in enumerate(ordered)]
    kept, beside = without_integrated(devices)
    numbers = ",".join(device.name[4:] for device in kept)
    environment = {"ONEAPI_DEVICE_SELECTOR": f"level_zero:{numbers}", "ZES_ENABLE_SYSMAN": "1"}
    kept = tuple(
        replace(device, name=f"SYCL{position}", environment=environment) for position, device in enumerate(kept)
    )
    note = f"left out beside a card: {', '.join(device.description for device in beside)}" if beside else ""
    if not devices:
        drivers = ", ".join(f"{card.slot} ({card.driver or 'no driver'})" for card in cards)
        note = f"Intel GPU at {drivers}, but neither xe nor i915 has it; load one of them"
    return Finding("sycl", kept, note=note, seen=tuple(devices))


def _device(card: Card, position: int, machine_id: str, memory: Memory, held: Mapping[str, Held]) -> Device:
    own = held.get(card.slot, Held(0, 0))
    warnings: tuple[str, ...] = ()
    total, free = card.total, card.free
    usable: int | None
    if card.integrated:
        kind, pool, source = "shared_system", ram_pool(machine_id), "/proc/meminfo"
        total, free, usable = lend_ram(kind, None, memory.ram)
    else:
        kind, pool, source = "dedicated", gpu_pool(machine_id, card.slot), card.source
        usable = lend_card(kind, total, free, own.card)
        if total is None:
            warnings = (
                f"{card.name} at {card.slot}: this kernel does not say how much memory it has; install xpu-smi, or "
                "vulkan-tools for the vulkan backend",
            )
        else:
            warnings = crowded(total, free, own.card, card.name)
    return Device(
        name=f"SYCL{position}",
        backend="sycl",
        description=card.name,
        kind=kind,
        pool=pool,
        total=total,
        free=free,
        usable=usable,
        pci_bus_id=card.slot,
        source=source,
        warnings=warnings,
    )


def toolkit(text: str) -> str | None:
    """oneAPI compiler release in `icpx --version`: '... Compiler 2025.3.0 (2025.3.0.20251010)' -> '2025.3'."""
    match = re.search(r"Compiler (\d{4}\.\d+)", text)
    return match.group(1) if match else None


def detect_intel(
    runner: Runner, machine_id: str, memory: Memory, own_pids: Sequence[int] = (), timeout: float = 30.0
) -> Finding:
    """All Intel GPUs of this host.

    `own_pids`: our own services, whose memory counts as free. `memory`: the host's RAM, in whose `own` theirs is.
    """
    cards = sysfs_cards(runner)
    if not cards:
        return Finding("sycl", note="no Intel GPU")
    programs = {name: runner.which(name) for name in ("sycl-ls", "xpu-smi", "icpx")}
    commands = {
        "sycl-ls": [programs["sycl-ls"] or ""],
        "xpu-smi": [programs["xpu-smi"] or "", "discovery", "-j"],
        "icpx": [programs["icpx"] or "", "--version"],
    }
    with ThreadPoolExecutor(max_workers=3) as pool:
        jobs = {name: pool.submit(runner.run, commands[name], timeout) for name, path in programs.items() if path}
        answers = {name: job.result() for name, job in jobs.items()}
    empty = Result(0, "", "")
    discovered = parse_discovery(answers.get("xpu-smi", empty).stdout)
    names = {slot: name for _index, name, slot in discovered if slot}
    cards = [replace(card, name=names.get(card.slot, card.name)) for card in cards]
    for index, _name, slot in discovered:
        for position, card in enumerate(cards):
            if card.slot == slot and card.total is None and not card.integrated:
                told = runner.run([programs["xpu-smi"] or "", "discovery", "-d", str(index), "-j"], timeout)
                cards[position] = replace(card, total=parse_discovery_size(told.stdout), source="xpu-smi")
    held = drm_held(runner, own_pids) if own_pids else {}
    finding = sycl_finding(cards, machine_id, memory, held, parse_sycl_ls(answers.get("sycl-ls", empty).stdout))
    complaints = tuple(
        f"{name} did not answer in time; a hung driver needs a reboot"
        for name, result in answers.items()
        if result.rc == TIMED_OUT
    )
    release = toolkit(answers.get("icpx", empty).stdout)
    ready = release is not None or runner.exists(SETVARS)
    return replace(finding, warnings=(*finding.warnings, *complaints), toolkit=release, ready=ready)
