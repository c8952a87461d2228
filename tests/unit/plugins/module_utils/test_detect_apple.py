# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Macs from the recorded output of their tools."""

from __future__ import annotations

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_apple import (
    Mac,
    mac_memory,
    metal_finding,
    parse_displays,
    parse_ifconfig,
    parse_sysctl,
    parse_vm_stat,
    parse_working_set,
    working_set,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_cpu import DetectError
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import GIB, MIB
from ansible_collections.llamafleet.rpc.plugins.module_utils._hosts import Own, collect
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import TIMED_OUT, Result
from ansible_collections.llamafleet.rpc.tests.unit.recorded import identity, mac, text

MAC = identity("Darwin", "arm64", "macos15", "studio")


def metal(name: str, vm_stat: str = "vm_stat_idle_16g", macos: int | None = 15, log: str = "") -> Mac:
    return Mac(parse_sysctl(text(f"macos/{name}")), parse_vm_stat(text(f"macos/{vm_stat}")), ("GPU",), macos)


@pytest.mark.parametrize(
    ("gib", "macos", "mib"),
    [
        (8, 15, 5461),
        (16, None, 10922),
        (16, 15, 10922),
        (24, 15, 16384),
        (32, 15, 21845),
        (36, 15, 24576),
        (64, 15, 49152),
        (128, 15, 98304),
        (192, 15, 147456),
        (16, 26, 12124),
        (24, 26, 18186),
        (32, 26, 25559),
        (36, 26, 28753),
        (48, 26, 38338),
        (64, 26, 53084),
        (128, 26, 110100),
        (192, 26, 165150),
    ],
)
def test_the_share_of_ram_that_metal_allows(gib: int, macos: int | None, mib: int) -> None:
    """B3-25 and the table of the fact sheet, seen in logs."""
    assert working_set(gib * GIB, macos) // MIB == mib


def test_a_measured_figure_comes_before_the_operators_and_that_before_a_share() -> None:
    """B3-25: 16 GiB, no limit: 12124 MiB by the log, 10922 MiB without it."""
    log = text("macos/metal_log_new_m3_16g.txt")
    without, measured = (metal_finding(metal("sysctl_m3_16g"), "arm64", "m1", 0, part).devices[0] for part in ("", log))
    assert ((without.total or 0) // MIB, (measured.total or 0) // MIB) == (10922, 12124)
    assert (without.ceiling is None, measured.ceiling) == (False, None)
    limited = metal("sysctl_m4_max_128g_wired_limit", "vm_stat_idle_128g", 26)
    device = metal_finding(limited, "arm64", "m1").devices[0]
    assert (device.total, device.source, device.ceiling) == (112 * GIB, "iogpu.wired_limit_mb", None)
    old = metal_finding(metal("sysctl_m1_16g_macos13", macos=13), "arm64", "m1").devices[0]
    assert old.total == 12 * GIB
    assert "leaves macOS 4096 MiB" not in " ".join(old.warnings)


@pytest.mark.parametrize(
    ("name", "mib"),
    [("metal_log_old_m2_max_32g", 21845), ("metal_log_new_28672", 28672), ("metal_log_new_m3_16g", 12124)],
)
def test_logs_of_two_ages_use_two_units_under_one_name(name: str, mib: int) -> None:
    """B3-26: 21845.34 'MB' were MiB; 30064.77 MB are decimal."""
    assert round((parse_working_set(text(f"macos/{name}.txt")) or 0) / MIB) == mib


def test_the_mac_that_aborted_at_23985_of_21845_mib_gets_no_more_than_it_has() -> None:
    """B3-26: M2 Max, 32 GiB; macOS fails the command buffer, not the allocation."""
    device = metal_finding(metal("sysctl_m2_max_32g", macos=14), "arm64", "m1").devices[0]
    assert ((device.total or 0) // MIB, (device.usable or 0) // MIB) == (21845, 21845)


def test_memory_that_others_wired_bounds_the_gpu() -> None:
    """B1-14: the working set does not know what is wired."""
    device = metal_finding(metal("sysctl_m3_16g", "vm_stat_wired_16g"), "arm64", "m1").devices[0]
    assert device.usable == 3 * GIB
    assert "wired memory: others hold" in device.warnings[0]


def test_an_intel_mac_computes_on_its_processor() -> None:
    """B3-27."""
    runner = mac("sysctl_intel_i7", "vm_stat_intel_4k", system_profiler=text("macos/system_profiler_intel_radeon.json"))
    host = collect(runner, identity("Darwin", "x86_64", "macos15", "imac")).to_dict()
    assert (host["backend"], host["cmake_flags"]) == ("cpu", ["-DGGML_METAL=OFF"])
    assert "AMD Radeon Pro 5500 XT" in host["candidates"][0]["note"]
    assert (host["cpu"]["isa"], host["cpu"]["physical_cores"], host["cpu"]["logical_cores"]) == ("x86-64-v3", 6, 12)


def test_rosetta_is_named() -> None:
    """B3-27: an Intel Python on an Apple processor would build everything for Intel."""
    host = collect(mac("sysctl_rosetta"), identity("Darwin", "x86_64", "macos15", "mini")).to_dict()
    assert host["traits"] == ["rosetta"]
    assert any("Rosetta; use a native one" in warning for warning in host["warnings"])


def test_a_virtual_machine_gets_no_metal() -> None:
    runner = mac("sysctl_vm_github_runner", system_profiler=text("macos/system_profiler_paravirtual.json"))
    host = collect(runner, MAC).to_dict()
    assert (host["backend"], host["traits"]) == ("cpu", ["vm"])
    assert "paravirtual" in host["candidates"][0]["note"]


def test_a_mac_studio_as_facts() -> None:
    host = collect(mac("sysctl_m4_max_128g"), MAC).to_dict()
    assert (host["system"], host["init"], host["backend"]) == ("Darwin", "launchd", "metal")
    assert host["machine_id"] == "0b0b0b0b000050008000" + "0000000000bb"
    assert host["boot_id"] == "0A0A0A0A-0000-4000-8000-0000000000AA"
    assert host["class_id"] == "darwin-arm64-macos15-metal-armv8.6-a"
    assert host["cpu"]["performance_cores"] == 12
    device, cpu = host["devices"]
    assert (device["name"], device["usable"], device["pool"]) == ("MTL0", 96 * GIB, cpu["pool"])
    assert host["memory"]["available"] == (100 + 9 + 1) * GIB + GIB // 2
    assert host["links"] == [
        {"interface": "en0", "address": "10.0.0.4", "speed_mbps": 10000, "mtu": 1500, "medium": "wired"},
        {"interface": "en1", "address": "10.0.1.4", "speed_mbps": None, "mtu": 1500, "medium": "wireless"},
        {"interface": "utun4", "address": "10.9.0.4", "speed_mbps": None, "mtu": 1420, "medium": "virtual"},
    ]


def test_our_own_worker_on_a_mac_does_not_lower_the_capacity() -> None:
    host = collect(mac("sysctl_m3_16g", "vm_stat_wired_16g"), MAC, own=Own(prefixes=("/opt/llamafleet",))).to_dict()
    foreign = collect(mac("sysctl_m3_16g", "vm_stat_wired_16g"), MAC).to_dict()
    assert host["devices"][0]["usable"] == min(working_set(16 * GIB, 15), 11 * GIB)
    assert host["devices"][0]["usable"] > foreign["devices"][0]["usable"]


def test_tools_that_hang_are_named_and_the_rest_is_told() -> None:
    hung = Result(TIMED_OUT, "", "")
    host = collect(mac("sysctl_m4_max_128g", system_profiler=hung, vm_stat=hung, ioreg=hung), MAC).to_dict()
    assert host["backend"] == "metal"
    assert any("system_profiler did not answer in time" in text for text in host["warnings"])
    assert any("vm_stat tells nothing" in text for text in host["warnings"])
    assert any("ioreg does not tell" in text for text in host["warnings"])
    with pytest.raises(DetectError, match=r"hw\.memsize"):
        collect(mac("sysctl_m4_max_128g", sysctl=hung), MAC)


def test_what_is_not_there_is_not_made_up() -> None:
    assert parse_vm_stat("vm_stat: command not found") == {}
    assert parse_displays("not json") == []
    assert parse_displays('{"SPDisplaysDataType": 5}') == []
    assert parse_ifconfig("") == []
    with pytest.raises(DetectError):
        mac_memory({}, {})
