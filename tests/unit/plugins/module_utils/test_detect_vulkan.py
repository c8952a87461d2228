# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Vulkan devices from recorded vulkaninfo output."""

from __future__ import annotations

from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_vulkan import (
    Gpu,
    numbered,
    parse_vulkaninfo,
    vulkan_finding,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import (
    GIB,
    MIB,
    Device,
    Finding,
    parse_list_devices,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import TIMED_OUT, Result
from ansible_collections.llamafleet.rpc.tests.unit.recorded import memory, text

RAM = memory(125 * GIB, 123 * GIB)
STRIX = {"0000:c5:00.0": (0x1002, 0x1586)}
KNOWN = Device(
    name="ROCm0",
    backend="rocm",
    description="x",
    kind="unified",
    pool="m1/ram",
    total=109 * GIB,
    free=None,
    usable=108 * GIB,
    pci_bus_id="0000:c5:00.0",
)


def find(
    name: str, known: tuple[Device, ...] = (), ids: dict[str, tuple[int, int]] | None = None, stderr: str = ""
) -> Finding:
    return vulkan_finding(
        Result(0, text(f"vulkaninfo/{name}") if name else "", stderr), known, ids or {}, "m1", RAM, True
    )


def test_two_heaps_of_radv_are_not_taken_for_one() -> None:
    """B3-12: 72341 MiB device-local, 36170 MiB host. llama.cpp b11434 reports the sum; only the first is lent."""
    (device,) = find("radv_strix_halo_two_heaps.txt", (KNOWN,), STRIX).devices
    assert (device.name, device.kind, device.pool) == ("Vulkan0", "unified", "m1/ram")
    assert (device.usable or 0) // MIB == 72341
    assert (device.total or 0) // MIB == 72341 + 36170 + 1
    assert "only these are lent" in device.warnings[0]
    assert device.total == 113783078912
    (listed,) = parse_list_devices(text("llama_server/list_devices_vulkan.txt"))
    assert abs((device.total or 0) - (listed.total or 0)) < 2 * MIB


def test_heaps_beyond_the_ram_are_cut() -> None:
    """memtest_vulkan issue 66: 135 GB offered on a box of 128 GB."""
    ram = memory(64 * GIB, 60 * GIB)
    result = Result(0, text("vulkaninfo/radv_strix_halo_two_heaps.txt"), "")
    (device,) = vulkan_finding(result, (), STRIX, "m1", ram, True).devices
    assert device.total == 64 * GIB
    assert (device.usable or 0) < 60 * GIB


def test_a_processor_that_plays_gpu_is_dropped() -> None:
    devices = find("nvidia_and_llvmpipe.txt").devices
    assert [device.name for device in devices] == ["Vulkan0", "Vulkan1"]
    assert devices[0].total == 25757220864 + 257949696
    finding = find("llvmpipe_only.txt")
    assert (finding.devices, finding.note) == ((), "Vulkan has the processor only (llvmpipe)")


def test_llvmpipe_only_though_there_is_a_card_is_a_warning() -> None:
    finding = find("llvmpipe_only.txt", ids=STRIX)
    assert "mesa-vulkan-drivers" in finding.warnings[0]
    assert "group render" in finding.warnings[0]


def test_two_drivers_for_one_card_are_one_device() -> None:
    """llama.cpp keeps RADV of RADV and AMDVLK."""
    gpus = parse_vulkaninfo(text("vulkaninfo/radv_and_amdvlk_one_card.txt"))
    assert len(gpus) == 2
    (device,) = find("radv_and_amdvlk_one_card.txt").devices
    assert (device.name, device.description) == ("Vulkan0", "AMD Radeon RX 7900 XTX (RADV NAVI31)")
    assert (device.pci_bus_id, device.total) == ("0000:03:00.0", 25753026560)


def test_an_integrated_gpu_of_unknown_make_borrows_ram() -> None:
    (device,) = find("anv_meteor_lake_igpu.txt").devices
    assert (device.kind, device.pool) == ("shared_system", "m1/ram")
    (pi,) = find("v3d_raspberry_pi_5.txt").devices
    assert (pi.kind, pi.total) == ("shared_system", 4 * GIB)


def test_a_virtual_gpu_is_taken_only_when_there_is_no_other() -> None:
    (device,) = find("virtio_venus_guest.txt").devices
    assert device.name == "Vulkan0"
    real = Gpu("card", "DISCRETE_GPU")
    assert numbered([Gpu("v", "VIRTUAL_GPU"), real, Gpu("llvmpipe", "CPU")]) == [real]
    assert numbered([Gpu("llvmpipe", "CPU")]) == []


def test_a_summary_has_no_heaps_and_takes_the_size_of_the_makers_room() -> None:
    (device,) = find("summary_1.3.txt").devices
    assert (device.total, device.usable) == (None, None)
    card = Device(
        "ROCm0", "rocm", "x", "dedicated", "m1/gpu/0000:03:00.0", 24 * GIB, None, 23 * GIB, None, "0000:03:00.0"
    )
    (device,) = find("summary_1.3.txt", (card,), {"0000:03:00.0": (0x1002, 0x744C)}).devices
    assert (device.total, device.usable, device.pool) == (24 * GIB, 23 * GIB, "m1/gpu/0000:03:00.0")


def test_failures_say_what_to_do() -> None:
    finding = find("", ids=STRIX, stderr=text("vulkaninfo/no_driver.stderr"))
    assert "Found no drivers" in finding.warnings[0]
    assert "mesa-vulkan-drivers" in finding.warnings[0]
    hung = vulkan_finding(Result(TIMED_OUT, "", ""), (), STRIX, "m1", RAM, False)
    assert "did not answer in time" in hung.warnings[0]
    missing = vulkan_finding(None, (), STRIX, "m1", RAM, False)
    assert (missing.warnings, missing.ready) == ((), False)
    assert "install vulkan-tools" in missing.note
