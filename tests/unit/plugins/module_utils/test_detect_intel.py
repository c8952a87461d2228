# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Intel GPUs from recorded sysfs trees and tool output."""

from __future__ import annotations

from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_cpu import detect_memory
from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_intel import (
    detect_intel,
    parse_discovery,
    parse_discovery_size,
    parse_sycl_ls,
    toolkit,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import GIB, MIB, Device, Finding
from ansible_collections.llamafleet.rpc.plugins.module_utils._pci import Held, drm_held
from ansible_collections.llamafleet.rpc.plugins.module_utils._reconcile import listing, reconcile
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import TIMED_OUT, Result
from ansible_collections.llamafleet.rpc.tests.unit.fakes import FakeRunner
from ansible_collections.llamafleet.rpc.tests.unit.recorded import linux, memory, text, tree

RAM = memory(31829 * MIB, 20000 * MIB)


def find(name: str, **commands: Result | str) -> Finding:
    runner = linux(
        f"sysfs/{name}", commands={key.replace("__", " ").replace("_", "-"): v for key, v in commands.items()}
    )
    return detect_intel(runner, "m1", RAM)


def only(finding: Finding) -> Device:
    (device,) = finding.devices
    return device


def test_a_card_under_xe_and_one_of_two_tiles() -> None:
    device = only(find("intel_arc_b580_xe"))
    assert (device.name, device.kind, device.total, device.free) == ("SYCL0", "dedicated", 12 * GIB, None)
    assert device.environment["ZES_ENABLE_SYSMAN"] == "1"
    assert only(find("intel_max_1550_xe_two_tiles")).total == 128 * GIB


def test_a_card_under_i915_beside_the_processors_graphics() -> None:
    finding = find("intel_arc_a770_i915", sycl_ls=text("intel/sycl_ls_2025.3.txt"), icpx=text("intel/icpx_2025.3.txt"))
    device = only(finding)
    assert (device.total, device.free, device.pci_bus_id) == (17041457152, 16700000000, "0000:03:00.0")
    assert device.description == "Intel(R) Arc(TM) A770 Graphics"
    assert device.environment["ONEAPI_DEVICE_SELECTOR"] == "level_zero:0"
    assert "UHD Graphics 770" in finding.note
    assert (finding.toolkit, finding.ready) == ("2025.3", True)


def test_graphics_of_a_processor_borrow_ram_and_lend_little() -> None:
    """B3-22: 29469 MiB offered of 31829 MiB, 20000 MiB available: at most 18000 MiB, and free is unknown."""
    device = only(find("intel_meteor_lake_igpu"))
    assert (device.kind, device.pool) == ("shared_system", "m1/ram")
    listed = (listing(text("intel/list_devices_arc_igpu.txt")) or {})["sycl0"]
    assert listed.total == 29469 * MIB
    verdict = reconcile(device, listed.total, listed.free)
    assert verdict.free is None
    assert 12000 * MIB < (verdict.usable or 0) <= 18000 * MIB


def test_graphics_of_a_processor_from_the_meminfo_of_its_host() -> None:
    """B3-22 again, from /proc/meminfo."""
    runner = linux("sysfs/intel_meteor_lake_igpu")
    runner.files["/proc/meminfo"] = text("proc/meminfo_arc_igpu_32g")
    device = only(detect_intel(runner, "m1", detect_memory(runner)))
    assert device.total == 31829 * MIB
    assert (device.usable or 0) <= 18000 * MIB


def test_a_card_whose_report_says_free_is_total_has_unknown_free_memory() -> None:
    """B3-22, the card: 15473 of 15473 MiB."""
    device = only(find("intel_arc_a770_i915"))
    listed = (listing(text("intel/list_devices_a770.txt")) or {})["sycl0"]
    verdict = reconcile(device, listed.total, listed.free)
    assert (verdict.free, verdict.usable) == (None, min(device.usable or 0, 15473 * MIB))


def test_a_kernel_that_does_not_tell_the_size() -> None:
    device = only(find("intel_arc_a380_i915_without_size"))
    assert (device.total, device.usable) == (None, None)
    assert "xpu-smi" in device.warnings[0]
    told = find(
        "intel_arc_a380_i915_without_size",
        xpu_smi__discovery__=text("intel/xpu_smi_error.json"),
    )
    assert only(told).total is None
    runner = linux(
        "sysfs/intel_arc_a380_i915_without_size",
        commands={
            "xpu-smi discovery -j": text("intel/xpu_smi_discovery_1.2.json"),
            "xpu-smi discovery -d 0 -j": text("intel/xpu_smi_discovery_device_1.2.json"),
        },
    )
    device = only(detect_intel(runner, "m1", RAM))
    assert (device.total, device.description) == (6367019008, "Intel(R) Arc(TM) A380 Graphics")


def test_a_card_of_a_virtual_machine_is_not_ours() -> None:
    finding = find("intel_vfio")
    assert finding.devices == ()
    assert "vfio-pci" in finding.note


def test_a_hanging_tool_is_a_warning() -> None:
    finding = find("intel_arc_b580_xe", sycl_ls=Result(TIMED_OUT, "", ""))
    assert only(finding).total == 12 * GIB
    assert "sycl-ls did not answer in time" in finding.warnings[0]


def test_our_own_memory_of_a_card_counts_as_free() -> None:
    files, links = tree("sysfs/intel_arc_a770_i915")
    before = only(detect_intel(FakeRunner(files, links=links), "m1", RAM)).usable
    files["/sys/bus/pci/devices/0000:03:00.0/drm/card1/lmem_avail_bytes"] = str(16700000000 - 9 * GIB)
    files["/proc/7/fdinfo/4"] = text("intel/fdinfo_xe")
    runner = FakeRunner(files, links=links)
    assert drm_held(runner, [7]) == {"0000:03:00.0": Held(9 * GIB, 4096)}
    assert only(detect_intel(runner, "m1", RAM, (7,))).usable == before


def test_what_the_tools_print() -> None:
    assert parse_sycl_ls(text("intel/sycl_ls_2025.3.txt")) == [
        "Intel(R) Arc(TM) A770 Graphics",
        "Intel(R) UHD Graphics 770",
    ]
    assert parse_discovery(text("intel/xpu_smi_discovery_1.2.json")) == [
        (0, "Intel(R) Arc(TM) A380 Graphics", "0000:03:00.0")
    ]
    assert parse_discovery(text("intel/xpu_smi_error.json")) == []
    assert parse_discovery_size(text("intel/xpu_smi_discovery_device_1.2.json")) == 6367019008
    assert toolkit("bash: icpx: command not found") is None
