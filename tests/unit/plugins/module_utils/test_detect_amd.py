# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""AMD devices from recorded sysfs trees and tool output."""

from __future__ import annotations

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._amd_tools import Card, parse_amd_smi, parse_rocm_smi
from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_amd import (
    Place,
    detect_amd,
    gtt_complaints,
    kernel_release,
    physical_device,
    sysfs_cards,
    target_name,
    toolkit,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import GIB, MIB, Device, Finding
from ansible_collections.llamafleet.rpc.plugins.module_utils._pci import Held, drm_held, parse_fdinfo
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import TIMED_OUT, Result
from ansible_collections.llamafleet.rpc.tests.unit.fakes import FakeRunner
from ansible_collections.llamafleet.rpc.tests.unit.recorded import linux, memory, text, tree

RAM = memory(125 * GIB, 123 * GIB)


def find(name: str, pids: tuple[int, ...] = (), **commands: Result | str) -> Finding:
    runner = linux(f"sysfs/{name}", commands={key.replace("_", "-"): value for key, value in commands.items()})
    return detect_amd(runner, "m1", RAM, pids)


def only(finding: Finding) -> Device:
    (device,) = finding.devices
    return device


def test_a_card_lends_its_own_memory_and_not_its_gtt() -> None:
    """B3-09, the second half: GTT of a card is RAM, and no capacity."""
    device = only(find("amd_rx_7900_xtx_gfx1100", hipconfig=text("hip/hipconfig_6.4.txt")))
    assert (device.name, device.kind, device.arch) == ("ROCm0", "dedicated", "gfx1100")
    assert (device.total, device.pool) == (25753026560, "m1/gpu/0000:03:00.0")
    assert device.usable == 25753026560 - 27856896 - 512 * MIB
    assert device.description == "Radeon RX 7900 XTX"


def test_an_apu_is_sized_by_gtt_and_not_by_its_cut_out() -> None:
    """B3-09: cut-out 1 GiB, GTT 108 GiB, and a KFD that says it has no CPU cores: 109 GiB unified."""
    device = only(find("amd_strix_halo_1g_gtt_108g_gfx1151"))
    assert (device.kind, device.pool, device.arch) == ("unified", "m1/ram", "gfx1151")
    assert device.total == 109 * GIB
    assert device.usable == 108 * GIB


def test_an_apu_never_lends_more_than_the_ram_can_give() -> None:
    runner = linux("sysfs/amd_strix_halo_1g_gtt_108g_gfx1151")
    device = only(detect_amd(runner, "m1", memory(64 * GIB, 40 * GIB)))
    assert (device.total, device.usable) == (64 * GIB, 40 * GIB - 64 * GIB // 20)


def test_gtt_of_the_kernel_parameter_is_what_hip_reports() -> None:
    """ttm.pages_limit=25165824 pages of 4096 bytes; llama.cpp over HIP reported 98304 MiB."""
    device = only(find("amd_strix_halo_512m_gtt_96g_gfx1151"))
    assert device.usable == 98304 * MIB
    assert find("amd_strix_halo_512m_gtt_96g_gfx1151").warnings == ()


def test_a_large_cut_out_is_a_memory_of_its_own() -> None:
    device = only(find("amd_strix_halo_96g_gfx1151"))
    assert (device.kind, device.pool, device.total) == ("carveout", "m1/gpu/0000:c5:00.0", 96 * GIB)


def test_an_old_kernel_gives_rocm_the_cut_out_only() -> None:
    """llama.cpp issue 19818: ROCm saw 6368 MiB, Vulkan 53281 MiB."""
    finding = find("amd_rembrandt_kernel_6.8_gfx1035")
    assert (only(finding).kind, only(finding).total) == ("carveout", 6368 * MIB)
    assert "before Linux 6.10" in only(finding).warnings[0]
    assert (finding.seen[0].kind, finding.seen[0].total) == ("unified", 6677331968 + 55868129280)


def test_the_graphics_of_a_processor_beside_a_card_are_left_out_and_hidden() -> None:
    finding = find("amd_raphael_beside_7900_gfx1036")
    device = only(finding)
    assert (device.name, device.arch, dict(device.environment)) == ("ROCm0", "gfx1100", {"HIP_VISIBLE_DEVICES": "0"})
    assert "gfx1036" in finding.note


def test_kfd_nodes_are_found_by_address_not_by_number() -> None:
    devices = find("amd_mi250x_gfx90a").devices
    assert [(d.name, d.arch, d.pci_bus_id) for d in devices] == [
        ("ROCm0", "gfx90a", "0000:c1:00.0"),
        ("ROCm1", "gfx90a", "0000:c6:00.0"),
    ]


def test_an_mi300a_has_the_memory_of_its_host() -> None:
    device = only(find("amd_mi300a_gfx942"))
    assert (device.kind, device.pool, device.total) == ("unified", "m1/ram", RAM.total)


def test_no_kfd_means_no_rocm_but_the_card_is_seen() -> None:
    finding = find("amd_no_kfd")
    assert finding.devices == ()
    assert "no /dev/kfd" in finding.note
    assert finding.seen[0].kind == "unified"


def test_a_card_that_compute_does_not_know_is_left_to_vulkan() -> None:
    """B4-05: /dev/kfd opens, and reading it says "Invalid argument"; what it means stands in the kernel's log."""
    finding = find("amd_pitcairn_not_in_kfd", dmesg=text("hip/dmesg_not_supported_in_kfd.txt"))
    assert finding.devices == () and finding.seen[0].total == 2 * GIB
    assert "ROCm does not know it; the vulkan backend may" in finding.note
    assert "PITCAIRN not supported in kfd" in finding.note
    assert "does not know it" in find("amd_pitcairn_not_in_kfd").note, "also where the log may not be read"


def test_a_misspelt_kernel_parameter_is_named_with_the_right_one() -> None:
    """B3-11: 62.2 GiB there, 120 GiB asked for."""
    finding = find("amd_strix_halo_misspelt_gtt", dmesg=text("hip/dmesg_gtt_size_ignored.txt"))
    assert "asks for 122880 MiB" in finding.warnings[0]
    assert "ignored gtt_size" in finding.warnings[0]
    # Never so many pages that nothing is left for the system.
    assert "ttm.pages_limit=30720000 " in finding.warnings[0]
    assert gtt_complaints("ttm.pages_limit=29491200", "", 112 * GIB + GIB // 2, 125 * GIB) == []
    assert gtt_complaints("quiet splash", "", 62 * GIB, 125 * GIB) == []


def test_the_log_may_be_closed_to_us() -> None:
    finding = find("amd_strix_halo_misspelt_gtt", dmesg=Result(1, "", "dmesg: read kernel buffer failed"))
    assert "asks for 122880 MiB" in finding.warnings[0]


@pytest.mark.parametrize(
    ("name", "total", "used"),
    [
        ("5.6_low_power_warning.txt", 16368 * MIB, 1200000000),
        ("group_warning.txt", 16368 * MIB, 1200000000),
        ("5.6_7900xt.json", 21458059264, 27856896),
        ("6.0_7900xt.json", 21458059264, 27856896),
    ],
)
def test_rocm_smi_with_warnings_before_its_json(name: str, total: int, used: int) -> None:
    """B3-14: cut from the first brace on; a bracket in a warning is no JSON."""
    (card,) = parse_rocm_smi(text(f"rocm_smi/{name}"))
    assert (card.vram, card.vram_used) == (total, used)


def test_two_releases_of_rocm_smi_give_the_same_facts() -> None:
    """B3-16: key names differ between releases."""
    old, new = (parse_rocm_smi(text(f"rocm_smi/{name}_7900xt.json"))[0] for name in ("5.6", "6.0"))
    assert (old.name, old.slot, old.vram, old.gtt) == (new.name, new.slot, new.vram, new.gtt)
    assert (old.name, old.slot) == ("Radeon RX 7900 XT", "0000:03:00.0")
    assert (old.target, new.target) == (None, "gfx1100")


@pytest.mark.parametrize("generation", ["rocm6.4_list", "rocm7.0_gpu_data"])
def test_both_generations_of_amd_smi(generation: str) -> None:
    """B3-16: a list up to ROCm 6, an object with gpu_data from 7 on; the market name is generic, the product is not."""
    (card,) = parse_amd_smi(text(f"amd_smi/static_{generation}.json"), text(f"amd_smi/metric_{generation}.json"))
    assert card == Card(
        slot="0000:03:00.0",
        name="Radeon RX 7900 XTX",
        target="gfx1100",
        vram=24560 * MIB,
        vram_used=26 * MIB,
        gtt=32000 * MIB,
        gtt_used=18 * MIB,
        device=0x744C,
        source="amd-smi",
    )


def test_several_arrays_in_one_output() -> None:
    cards = parse_amd_smi(text("amd_smi/static_25.5.1_two_arrays.json"), "")
    assert [(card.slot, card.vram) for card in cards] == [
        ("0000:03:00.0", 24560 * MIB),
        ("0000:83:00.0", 24560 * MIB),
    ]


@pytest.mark.parametrize(
    "said", ["amd_smi/not_initialized.txt", "rocm_smi/no_json_data.txt", "rocm_smi/driver_not_initialized.stderr"]
)
def test_output_without_json_names_no_card(said: str) -> None:
    assert parse_rocm_smi(text(said)) == []
    assert parse_amd_smi(text(said), text(said)) == []


def test_placeholders_are_unknown() -> None:
    (card,) = parse_amd_smi(text("amd_smi/static_placeholders.json"), "")
    assert (card.name, card.slot, card.target, card.vram) == ("AMD GPU", None, None, None)


def test_tools_fill_in_what_a_container_hides() -> None:
    finding = find("amd_container_without_driver_files", rocm_smi=text("rocm_smi/6.0_7900xt.json"))
    device = only(finding)
    assert (device.name, device.total, device.arch) == ("ROCm0", 21458059264, "gfx1100")
    assert device.source == "rocm-smi"


def test_tools_that_fail_or_hang_are_warnings_with_a_remedy() -> None:
    failing = find(
        "amd_container_without_driver_files",
        rocm_smi=Result(0, text("rocm_smi/no_json_data.txt"), text("rocm_smi/driver_not_initialized.stderr")),
        amd_smi=Result(TIMED_OUT, "", ""),
    )
    assert any("Driver not initialized" in warning and "load amdgpu" in warning for warning in failing.warnings)
    assert any("did not answer in time" in warning for warning in failing.warnings)
    assert failing.devices == ()


def test_tools_are_not_asked_where_sysfs_tells() -> None:
    runner = linux("sysfs/amd_rx_7900_xtx_gfx1100", commands={"amd-smi": "", "rocm-smi": ""})
    detect_amd(runner, "m1", RAM)
    assert runner.ran == []


def test_our_own_services_hold_nothing_that_is_not_ours() -> None:
    """Law 18: VRAM by the KFD's count for each process, GTT by the DRM's."""
    files, links = tree("sysfs/amd_rx_7900_xtx_gfx1100")
    before = only(detect_amd(FakeRunner(files, links=links), "m1", RAM)).usable
    root = "/sys/bus/pci/devices/0000:03:00.0"
    files[f"{root}/mem_info_vram_used"] = str(27856896 + 20 * GIB)
    files["/sys/class/kfd/kfd/proc/4242/vram_51234"] = str(20 * GIB)
    runner = FakeRunner(files, links=links)
    assert only(detect_amd(runner, "m1", RAM, (4242,))).usable == before
    assert only(detect_amd(runner, "m1", RAM)).usable == (before or 0) - 20 * GIB


def test_gtt_held_through_the_driver_counts_by_process_once() -> None:
    entry = text("hip/fdinfo_kernel_6.14")
    assert parse_fdinfo(entry) == ("0000:c5:00.0", "52", Held(20 * MIB, 60 * GIB))
    runner = FakeRunner({"/proc/7/fdinfo/5": entry, "/proc/7/fdinfo/6": entry, "/proc/7/fdinfo/1": "pos: 0\n"})
    assert drm_held(runner, [7, 8]) == {"0000:c5:00.0": Held(20 * MIB, 60 * GIB)}


def test_targets_kernels_and_releases() -> None:
    numbers = {110501: "gfx1151", 90010: "gfx90a", 90402: "gfx942", 120001: "gfx1201", 110000: "gfx1100"}
    assert {number: target_name(number) for number in numbers} == numbers
    assert target_name(0) is None
    assert kernel_release("6.14.0-37-generic\n") == (6, 14)
    assert kernel_release(None) is None
    assert [toolkit(text(f"hip/hipconfig_{name}.txt")) for name in ("6.4", "5.2", "7.1")] == ["6.4", "5.2", "7.1"]


def test_without_target_and_id_a_gtt_of_eight_times_the_vram_makes_an_apu() -> None:
    small = Card(slot=None, vram=512 * MIB, gtt=8 * GIB)
    assert small.integrated
    assert not Card(slot=None, vram=8 * GIB, gtt=16 * GIB).integrated
    assert not Card(slot=None, vram=GIB, gtt=64 * GIB, target="gfx1100").integrated
    assert physical_device(small, Place("m1", RAM)).kind == "unified"


def test_every_card_of_the_bus_is_seen() -> None:
    cards = sysfs_cards(linux("sysfs/amd_raphael_beside_7900_gfx1036"))
    assert [(card.slot, card.driver, card.simds) for card in cards] == [
        ("0000:03:00.0", "amdgpu", 192),
        ("0000:11:00.0", "amdgpu", 4),
    ]
