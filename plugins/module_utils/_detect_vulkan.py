# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Vulkan devices from the text of vulkaninfo, numbered and sized as llama.cpp b11434 does (ggml-vulkan.cpp).

Sizes are the device's heaps: of a card those in its own memory, of an integrated GPU all of them, which may be more
than is safe (RADV shows a third of them as host memory, B3-12) and more than the RAM. Processors that play GPU
(llvmpipe) are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_cpu import Memory
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import (
    Device,
    Finding,
    card_size,
    clamp_free,
    gpu_pool,
    lend_card,
    lend_ram,
    mib_text,
    number,
    ram_pool,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._pci import without_integrated
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import TIMED_OUT, Result

# Of two drivers for one card llama.cpp takes the one with the lower number (ggml_vk_instance_init).
DRIVERS = {
    "DRIVER_ID_MESA_RADV": 1,
    "DRIVER_ID_AMD_OPEN_SOURCE": 2,
    "DRIVER_ID_AMD_PROPRIETARY": 3,
    "DRIVER_ID_INTEL_OPEN_SOURCE_MESA": 1,
    "DRIVER_ID_INTEL_PROPRIETARY_WINDOWS": 2,
    "DRIVER_ID_NVIDIA_PROPRIETARY": 1,
    "DRIVER_ID_MESA_NVK": 2,
    "DRIVER_ID_MESA_DOZEN": 100,
}


class Heap(NamedTuple):
    """One heap: its size, what is free of it (None: the driver does not say), and whether it is local."""

    size: int
    free: int | None
    local: bool


@dataclass(frozen=True)
class Gpu:
    """One GPU of vulkaninfo; `kind` is the end of its deviceType (DISCRETE_GPU, INTEGRATED_GPU, VIRTUAL_GPU, CPU)."""

    name: str
    kind: str
    vendor: int = 0
    device: int = 0
    driver: str = ""
    uuid: str = ""
    slot: str | None = None
    heaps: tuple[Heap, ...] = ()


_VALUE = re.compile(r"\s*(\w+(?:\[\d+\])?)\s*[=:]\s*(.*?)\s*\Z")


def parse_vulkaninfo(text: str) -> list[Gpu]:
    """GPUs of `vulkaninfo` or `vulkaninfo --summary` (which has no heaps), in the loader's order.

    Loader messages before and between are no trouble; a GPU without a type is left out.
    """
    found: list[dict[str, str]] = []
    heaps: list[list[dict[str, str]]] = []
    for line in text.splitlines():
        if re.match(r"GPU\d+:?\s*\Z", line):
            found.append({})
            heaps.append([])
            continue
        match = _VALUE.match(line)
        if not match or not found:
            if found and heaps[-1] and "HEAP_DEVICE_LOCAL" in line:
                heaps[-1][-1]["local"] = "1"
            continue
        key, value = match.groups()
        if re.match(r"memoryHeaps\[\d+\]\Z", key):
            heaps[-1].append({})
        elif key in ("size", "budget", "usage") and heaps[-1]:
            heaps[-1][-1].setdefault(key, value)
        elif heaps[-1] and "HEAP_DEVICE_LOCAL" in value:
            heaps[-1][-1]["local"] = "1"
        elif not (key == "deviceUUID" and set(value) <= set("0-")):
            found[-1].setdefault(key, value)
    return [_gpu(values, parts) for values, parts in zip(found, heaps) if values.get("deviceType")]


def _gpu(values: Mapping[str, str], parts: Sequence[Mapping[str, str]]) -> Gpu:
    def whole(text: str | None) -> int | None:
        return number((text or "").split(" ")[0])

    def hexadecimal(text: str | None) -> int:
        match = re.match(r"0x([0-9a-f]{1,8})\b", (text or "").lower())
        return int(match.group(1), 16) if match else 0

    places = [whole(values.get(key)) for key in ("pciDomain", "pciBus", "pciDevice", "pciFunction")]
    slot = None
    if all(place is not None and place < 65536 for place in places):
        domain, bus, device, function = (place or 0 for place in places)
        slot = f"{domain:04x}:{bus & 255:02x}:{device & 31:02x}.{function & 7}"
    heaps = []
    for part in parts:
        size, budget, usage = (whole(part.get(key)) for key in ("size", "budget", "usage"))
        if size is None or size > 1 << 42:
            continue
        free = None if budget is None else max(0, min(size, budget) - (usage or 0))
        heaps.append(Heap(size, free, "local" in part))
    return Gpu(
        name=values.get("deviceName", "GPU"),
        kind=re.sub(r"\A(VK_)?PHYSICAL_DEVICE_TYPE_", "", values["deviceType"].split(" ")[0]),
        vendor=hexadecimal(values.get("vendorID")),
        device=hexadecimal(values.get("deviceID")),
        driver=values.get("driverID", "").split(" ")[0],
        uuid=values.get("deviceUUID", "").lower(),
        slot=slot,
        heaps=tuple(heaps),
    )


def numbered(gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that llama.cpp calls Vulkan0, Vulkan1, ...: cards and integrated ones, each once; else a virtual one."""
    listed: list[Gpu] = []
    for gpu in gpus:
        if gpu.kind not in ("DISCRETE_GPU", "INTEGRATED_GPU"):
            continue
        twin = next((other for other in listed if gpu.uuid and other.uuid == gpu.uuid), None)
        if twin is None:
            listed.append(gpu)
        elif DRIVERS.get(gpu.driver, 1 << 30) < DRIVERS.get(twin.driver, 1 << 30):
            listed.remove(twin)
            listed.append(gpu)
    return listed or [gpu for gpu in gpus if gpu.kind != "CPU"][:1]


def located(gpus: Sequence[Gpu], known: Sequence[Device], ids: Mapping[str, tuple[int, int]]) -> list[Gpu]:
    """The GPUs with their PCI address: their own word, else the card of that UUID, else the next one of those ids."""
    free = sorted(ids)
    found = []
    for gpu in gpus:
        slot = gpu.slot if gpu.slot in ids or not ids else None
        if slot is None:
            by_uuid = (device.pci_bus_id for device in known if gpu.uuid and device.uuid == f"GPU-{gpu.uuid}")
            by_ids = (place for place in free if ids[place] == (gpu.vendor, gpu.device))
            slot = next(by_uuid, None) or next(by_ids, gpu.slot)
        if slot in free:
            free.remove(slot)
        found.append(replace(gpu, slot=slot))
    return found


def vulkan_finding(
    result: Result | None,
    known: Sequence[Device],
    ids: Mapping[str, tuple[int, int]],
    machine_id: str,
    memory: Memory,
    glslc: bool,
) -> Finding:
    """Vulkan's devices. `result`: of vulkaninfo (None: there is none); `known`: what the makers' rooms found.

    `ids`: (vendor, device) of the host's cards by PCI address. A part that a maker's room knows has the kind and the
    pool, and at most the memory, that were found there.
    """
    if result is None:
        note = "no vulkaninfo; install vulkan-tools to have the cards looked at" if ids else "no graphics card"
        return Finding("vulkan", note=note, ready=glslc)
    if result.rc == TIMED_OUT:
        text = "vulkaninfo did not answer in time; a hung driver needs a reboot"
        return Finding("vulkan", note=text, warnings=(text,), ready=glslc)
    gpus = parse_vulkaninfo(result.stdout)
    listed = located(numbered(gpus), known, ids)
    devices = [_device(gpu, position, known, machine_id, memory) for position, gpu in enumerate(listed)]
    kept, beside = without_integrated(devices)
    note = ""
    if not gpus:
        said = next((line.strip() for line in (result.stderr + result.stdout).splitlines() if line.strip()), "no text")
        note = f"vulkaninfo names no GPU (status {result.rc}, {said[:200]})"
    elif not listed:
        note = "Vulkan has the processor only (llvmpipe)"
    if ids and not listed:
        note += "; install the card's Vulkan driver (mesa-vulkan-drivers), and put the account into group render"
        return Finding("vulkan", note=note, warnings=(note,), ready=glslc)
    if beside:
        note = f"left out beside a card: {', '.join(device.description for device in beside)}"
    return Finding("vulkan", kept, note=note, ready=glslc)


def _device(gpu: Gpu, position: int, known: Sequence[Device], machine_id: str, memory: Memory) -> Device:
    integrated = gpu.kind == "INTEGRATED_GPU"
    same = next((device for device in known if gpu.slot and device.pci_bus_id == gpu.slot), None)
    local = [heap for heap in gpu.heaps if heap.local]
    counted = gpu.heaps if integrated else local
    offered = sum(heap.size for heap in counted) or None
    frees = [heap.free for heap in counted]
    free = sum(size for size in frees if size is not None) if frees and None not in frees else None
    safe = sum(heap.size for heap in local) or offered
    warnings: tuple[str, ...] = ()
    total: int | None
    usable: int | None
    kind = same.kind if same else ("shared_system" if integrated else "dedicated")
    if kind in ("unified", "shared_system"):
        pool = ram_pool(machine_id)
        total, _free, usable = lend_ram(kind, offered, memory.ram)
        if same is not None and same.usable is not None:
            usable = max(usable, min(total, same.usable))  # there our own services' share was added back
        free = clamp_free(total, free)
        if safe is not None and offered is not None and safe < offered:
            usable = min(usable, safe)
            warnings = (
                f"{gpu.name}: Vulkan offers {mib_text(offered)}, of which {mib_text(safe)} are device memory; only "
                "these are lent",
            )
    else:
        pool = same.pool if same else gpu_pool(machine_id, gpu.slot or gpu.uuid or str(position))
        total = card_size(offered)
        if same is not None and same.total is not None:
            total = same.total if total is None else min(total, same.total)  # NVIDIA's BAR is a heap, too
        free = clamp_free(total, free)
        usable = lend_card(kind, total, free)
        if same is not None and same.usable is not None and total is not None:
            usable = min(same.usable, lend_card(kind, total, None) or 0)
    return Device(
        name=f"Vulkan{position}",
        backend="vulkan",
        description=gpu.name,
        kind=kind,
        pool=pool,
        total=total,
        free=free,
        usable=usable,
        pci_bus_id=gpu.slot,
        uuid=gpu.uuid or None,
        source="vulkaninfo",
        warnings=warnings,
    )
