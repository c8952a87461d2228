# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""AMD devices: from sysfs and the KFD topology of amdgpu, and from amd-smi or rocm-smi where those say nothing.

An APU has a cut-out of RAM (VRAM, set in the firmware) and borrows more through GTT. Since Linux 6.10 the driver
serves an APU from GTT when that is the larger of the two, and llama.cpp over HIP reports GTT as its total (a 512 MiB
cut-out and ttm.pages_limit=25165824 gave 98304 MiB); before, ROCm sees the cut-out only. GTT of a card is no capacity.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

from ansible_collections.llamafleet.rpc.plugins.module_utils._amd_tools import Card, ask_tools, completed
from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_cpu import Memory
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import (
    MIB,
    Device,
    Finding,
    card_size,
    clamp_free,
    crowded,
    gpu_pool,
    lend_card,
    lend_ram,
    mib_text,
    number,
    ram_pool,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._pci import (
    AMD,
    DEVICES,
    Held,
    device_id,
    driver_of,
    drm_held,
    pci_cards,
    render_node,
    without_integrated,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Runner

KFD = "/sys/class/kfd/kfd/topology/nodes"

# MI300A: the processor's RAM is the GPU's HBM, and amdgpu calls all of it VRAM.
MI300A = 0x74A0
# Two compute units have four SIMDs: the desktop graphics of a Ryzen, slower than the processor beside it.
SMALL_SIMDS = 4


class Node(NamedTuple):
    """A GPU of the KFD topology, in HIP's order of devices."""

    gpu_id: int
    target: str
    slot: str
    simds: int
    render: int | None


def parse_properties(text: str) -> dict[str, int]:
    """`key value` lines of a KFD node."""
    found = {}
    for line in text.splitlines():
        key, _blank, value = line.partition(" ")
        size = number(value)
        if size is not None:
            found[key] = size
    return found


def target_name(version: int) -> str | None:
    """gfx_target_version as compilers write it: major * 10000 + minor * 100 + step, the step in hex."""
    if not 0 < version < 1000000:
        return None
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def kfd_nodes(runner: Runner) -> list[Node]:
    """The GPUs that ROCm sees, in its order; none without the KFD driver."""
    nodes = []
    for name in sorted(runner.listdir(KFD), key=lambda text: number(text) or 0):
        values = parse_properties(runner.read(f"{KFD}/{name}/properties") or "")
        target = target_name(values.get("gfx_target_version", 0))
        if not values.get("simd_count") or target is None:
            continue
        where = values.get("location_id", 0)
        slot = f"{values.get('domain', 0) & 0xFFFFFFFF:04x}:{where >> 8 & 0xFF:02x}:{where >> 3 & 0x1F:02x}.{where & 7}"
        gpu_id = number(runner.read(f"{KFD}/{name}/gpu_id")) or 0
        nodes.append(Node(gpu_id, target, slot, values["simd_count"], values.get("drm_render_minor")))
    return nodes


def sysfs_cards(runner: Runner) -> list[Card]:
    """AMD GPUs of the PCI bus, with what amdgpu and the KFD say of each."""
    nodes = kfd_nodes(runner)
    cards = []
    for slot in pci_cards(runner, AMD):
        root = f"{DEVICES}/{slot}"
        render = render_node(runner, slot)
        position = next(
            (n for n, node in enumerate(nodes) if node.slot == slot or (render and node.render == render)), None
        )
        node = nodes[position] if position is not None else None
        product = (runner.read(f"{root}/product_name", 256) or "").strip()
        code = device_id(runner, slot)
        cards.append(
            Card(
                slot=slot,
                name=product or f"AMD GPU {code:04x}" + (f" ({node.target})" if node else ""),
                target=node.target if node else None,
                vram=card_size(number(runner.read(f"{root}/mem_info_vram_total"))),
                vram_used=number(runner.read(f"{root}/mem_info_vram_used")),
                gtt=number(runner.read(f"{root}/mem_info_gtt_total")),
                gtt_used=number(runner.read(f"{root}/mem_info_gtt_used")),
                device=code,
                simds=node.simds if node else 0,
                node=position,
                gpu_id=node.gpu_id if node else 0,
                driver=driver_of(runner, slot),
            )
        )
    return cards


# --- memory -----------------------------------------------------------------------------------------------------------


def kernel_release(text: str | None) -> tuple[int, int] | None:
    """(6, 11) of '6.11.0-29-generic'."""
    match = re.match(r"(\d{1,3})\.(\d{1,3})", text or "")
    return (int(match.group(1)), int(match.group(2))) if match else None


_GTT_REQUEST = re.compile(r"(?:^|\s)(amdgpu\.gttsize|amdgpu\.gtt_size|ttm\.pages_limit|amdttm\.pages_limit)=(\d{1,12})")


def gtt_complaints(command_line: str, log: str, gtt: int, ram: int) -> list[str]:
    """Warnings when a kernel parameter asks for more GTT than there is: a misspelt one is ignored (B3-11)."""
    wanted = 0
    for name, value in _GTT_REQUEST.findall(command_line):
        wanted = max(wanted, int(value) * (4096 if name.endswith("pages_limit") else MIB))
    ignored = re.search(r"unknown parameter '?(gtt\w*)'? ignored", log)
    if not ignored and wanted <= gtt + gtt // 16:
        return []
    pages = min(wanted or gtt, ram - ram // 16) // 4096
    why = f"the kernel ignored {ignored.group(1)}" if ignored else "the parameter is not one of the loaded module"
    return [
        f"the kernel command line asks for {mib_text(wanted or None)} of GTT, but there are {mib_text(gtt)} ({why}); "
        f"write ttm.pages_limit={pages} (amdttm.pages_limit with amdgpu-dkms) and reboot"
    ]


@dataclass(frozen=True)
class Place:
    """What the devices of a host have in common: its identity, RAM, kernel, and what our services hold by address."""

    machine_id: str
    memory: Memory
    kernel: tuple[int, int] | None = None
    held: Mapping[str, Held] | None = None

    def own(self, slot: str | None) -> Held:
        """What our services hold through this card's driver."""
        return (self.held or {}).get(slot or "", Held(0, 0))


def physical_device(card: Card, place: Place) -> Device:
    """A card as physical memory, whatever backend uses it; the name is ROCm's only where the KFD has it."""
    own = place.own(card.slot)
    gtt = card.gtt or 0
    if card.device == MI300A:
        card = replace(card, gtt=card.vram, vram=0)
        gtt = card.gtt or 0
    gtt_first = (card.integrated or card.device == MI300A) and gtt > (card.vram or 0)
    warnings: tuple[str, ...] = ()
    total: int | None
    free: int | None
    usable: int | None
    if gtt_first:
        kind, pool = "unified", ram_pool(place.machine_id)
        total, free, usable = lend_ram(kind, (card.vram or 0) + gtt, place.memory.ram)
        # The cut-out stays with the display: the driver serves everything else from GTT.
        usable = min(usable or 0, gtt)
    else:
        kind = "carveout" if card.integrated else "dedicated"
        pool = gpu_pool(place.machine_id, card.slot or f"amd{card.node or 0}")
        total = card.vram
        free = None if total is None or card.vram_used is None else max(0, total - card.vram_used)
        free = clamp_free(total, free)
        usable = lend_card(kind, total, free, own.card)
        if total is None:
            said = "no driver has it" if card.driver is None else f"its driver is {card.driver}"
            warnings = (f"{card.name}: how much memory it has is unknown ({said}); load amdgpu",)
        else:
            warnings = crowded(total, free, own.card, card.name)
    return Device(
        name=f"ROCm{card.node or 0}",
        backend="rocm",
        description=card.name,
        kind=kind,
        pool=pool,
        total=total,
        free=free,
        usable=usable,
        arch=card.target,
        pci_bus_id=card.slot,
        source=card.source,
        warnings=warnings,
    )


def rocm_device(card: Card, place: Place) -> Device:
    """The card as ROCm sees it: before Linux 6.10 an APU has its cut-out only (llama.cpp issue 19818)."""
    device = physical_device(card, place)
    if device.kind == "unified" and place.kernel is not None and place.kernel < (6, 10):
        device = physical_device(replace(card, gtt=0), place)
        text = (
            f"{card.name}: before Linux 6.10 ROCm uses only the cut-out memory ({mib_text(card.vram)}); update the "
            "kernel, raise the cut-out in the firmware, or use the vulkan backend"
        )
        device = replace(device, warnings=(*device.warnings, text))
    return device


def rocm_finding(cards: Sequence[Card], place: Place, kfd: bool) -> Finding:
    """ROCm's devices among the cards, named as HIP will under their environment; the others are only seen."""
    physical = [physical_device(card, place) for card in cards]
    if not cards:
        return Finding("rocm", note="no AMD card")
    slots = ", ".join(card.slot or card.name for card in cards)
    if not kfd:
        note = (
            f"AMD card at {slots}, but no /dev/kfd: load amdgpu with compute support, or give the container it; "
            "the vulkan backend does without"
        )
        return Finding("rocm", note=note, seen=tuple(physical))
    known = sorted((card for card in cards if card.node is not None), key=lambda card: card.node or 0)
    small = [card for card in known if card.integrated and 0 < card.simds <= SMALL_SIMDS]
    devices = [rocm_device(card, place) for card in known if card not in small]
    kept, beside = without_integrated(devices)
    if len(kept) < len(known):
        # HIP numbers what is visible, so that the left-out part is in nobody's way.
        visible = ",".join(device.name[4:] for device in kept)
        kept = tuple(
            replace(device, name=f"ROCm{position}", environment={"HIP_VISIBLE_DEVICES": visible})
            for position, device in enumerate(kept)
        )
    left = [*(card.name for card in small), *(device.description for device in beside)]
    note = f"left out, too small or beside a card: {', '.join(left)}" if left else ""
    if not kept and not left:
        note = f"AMD card at {slots}, but ROCm does not know it; the vulkan backend may"
    return Finding("rocm", kept, note=note, seen=tuple(physical))


def kfd_own(runner: Runner, pids: Iterable[int], cards: Sequence[Card]) -> dict[str, int]:
    """VRAM that processes hold through ROCm (/sys/class/kfd/kfd/proc/PID/vram_GPUID), by PCI address."""
    by_id = {f"vram_{card.gpu_id}": card.slot for card in cards if card.gpu_id and card.slot}
    held: dict[str, int] = {}
    for pid in pids:
        for name, slot in by_id.items():
            size = number(runner.read(f"/sys/class/kfd/kfd/proc/{pid}/{name}"))
            if size and slot:
                held[slot] = held.get(slot, 0) + size
    return held


def own_memory(runner: Runner, pids: Sequence[int], cards: Sequence[Card]) -> dict[str, Held]:
    """What our services hold, by PCI address: the larger of what DRM and the KFD count."""
    held = drm_held(runner, pids)
    for slot, size in kfd_own(runner, pids, cards).items():
        before = held.get(slot, Held(0, 0))
        held[slot] = Held(max(before.card, size), before.ram)
    return held


def toolkit(text: str) -> str | None:
    """ROCm release in `hipconfig --version`: '6.4.43483-a187df25c' -> '6.4'."""
    match = re.match(r"\s*(\d{1,2}\.\d{1,2})\.", text)
    return match.group(1) if match else None


def detect_amd(
    runner: Runner, machine_id: str, memory: Memory, own_pids: Sequence[int] = (), timeout: float = 30.0
) -> Finding:
    """All AMD devices of this host.

    `own_pids`: our own services, whose memory counts as free. `memory`: the host's RAM, in whose `own` their GTT is.
    """
    cards = sysfs_cards(runner)
    kfd = runner.exists("/dev/kfd")
    if not cards and not kfd:
        return Finding("rocm", note="no AMD card")
    hipconfig = runner.which("hipconfig")
    with ThreadPoolExecutor(max_workers=3) as pool:
        hip_job = pool.submit(runner.run, [hipconfig, "--version"], timeout) if hipconfig else None
        incomplete = not cards or any(card.vram is None for card in cards)
        tool_job = pool.submit(ask_tools, runner, timeout) if incomplete else None
        apu = next((card for card in cards if card.integrated and card.gtt), None)
        # A topology without any of the cards: compute does not know them. Without a topology at all it is hidden.
        unknown = kfd and bool(cards) and not kfd_nodes(runner) and bool(runner.listdir(KFD))
        dmesg = runner.which("dmesg") if apu or unknown else None
        log_job = pool.submit(runner.run, [dmesg], timeout) if dmesg else None
    complaints: list[str] = []
    if tool_job:
        told, complaints = tool_job.result()
        cards = completed(cards, told)
    log = log_job.result().stdout if log_job else ""
    if not any(card.node is not None for card in cards) and not kfd_nodes(runner) and not unknown:
        # A container may hide the topology of the /dev/kfd that it has; the tools then know the cards.
        cards = [replace(card, node=position if card.vram else None) for position, card in enumerate(cards)]
    held = own_memory(runner, own_pids, cards) if own_pids else {}
    place = Place(machine_id, memory, kernel_release(runner.read("/proc/sys/kernel/osrelease")), held)
    finding = rocm_finding(cards, place, kfd)
    refused = re.search(r"kfd: (?:amdgpu: )?(\S+)\s+not supported in kfd", log) if unknown else None
    if refused:
        finding = replace(finding, note=f"{finding.note} (the kernel: {refused.group(1)} not supported in kfd)")
    if apu and apu.gtt:
        complaints += gtt_complaints(runner.read("/proc/cmdline") or "", log, apu.gtt, memory.total)
    release = toolkit(hip_job.result().stdout) if hip_job else None
    return replace(finding, warnings=(*finding.warnings, *complaints), toolkit=release, ready=release is not None)
