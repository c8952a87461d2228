# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The recordings that are worth having, each with its right answer in a line; what follows from them is tested in the
rooms of their vendors.
"""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils import _amd_tools, _detect_cpu, _detect_nvidia
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import GIB, MIB, Device, parse_list_devices
from ansible_collections.llamafleet.rpc.plugins.module_utils._hosts import collect
from ansible_collections.llamafleet.rpc.plugins.module_utils._launchd import Launchctl, LaunchdError, parse_print
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Result
from ansible_collections.llamafleet.rpc.tests.unit.fakes import FakeRunner
from ansible_collections.llamafleet.rpc.tests.unit.recorded import identity, linux, mac, smi, text

NO_CAP = {"nvidia-smi --query-gpu=uuid,compute_cap": Result(2, text("nvidia_smi/compute_cap_470_rc2.txt"), "")}
HIP = {"hipconfig": text("hip/hipconfig_7.1.txt")}


def failing(rc: int, name: str) -> dict[str, Any]:
    """An nvidia-smi that fails with text on stdout."""
    return {"nvidia-smi": Result(rc, text(f"nvidia_smi/{name}"), "")}


def said(found: list[Device]) -> list[tuple[str, str, int | None, str | None]]:
    """(name, kind, total in MiB, architecture) of each device but the processor."""
    return [
        (one.name, one.kind, None if one.total is None else one.total // MIB, one.arch)
        for one in found
        if one.backend != "cpu"
    ]


@pytest.mark.parametrize(
    ("tree", "commands", "expected"),
    [
        (  # two cards
            "nvidia_two_cards",
            smi("core_two_cards_570.csv", "compute_cap_two_cards_570.csv"),
            [("CUDA0", "dedicated", 24564, "sm_89"), ("CUDA1", "dedicated", 24576, "sm_86")],
        ),
        # driver 470 without compute_cap: status 2 and a text on stdout; the architecture follows from the name
        ("nvidia_two_cards", {**smi("core_470.csv"), **NO_CAP}, [("CUDA0", "dedicated", 22919, "sm_61")]),
        ("nvidia_two_cards", failing(9, "driver_not_loaded_rc9.txt"), []),
        ("nvidia_two_cards", failing(18, "version_mismatch_rc18.txt"), []),
        # GB10: N/A everywhere, all RAM
        ("nvidia_gb10", smi("core_gb10_580.csv", "compute_cap_gb10_580.csv"), [("CUDA0", "unified", 131072, "sm_121")]),
        ("jetson_orin_l4t_r39", smi("core_orin.csv"), [("CUDA0", "unified", 131072, "sm_87")]),
        # N1X: 8128 MiB that parse well and are wrong
        ("nvidia_gb10", smi("core_n1x_bogus.csv"), [("CUDA0", "unified", 131072, None)]),
        ("amd_rx_7900_xtx_gfx1100", HIP, [("ROCm0", "dedicated", 24560, "gfx1100")]),
        ("amd_mi250x_gfx90a", HIP, [("ROCm0", "dedicated", 65520, "gfx90a"), ("ROCm1", "dedicated", 65520, "gfx90a")]),
        # cut-outs of 512 MB and of 96 GB
        ("amd_strix_halo_512m_gtt_96g_gfx1151", HIP, [("ROCm0", "unified", 98816, "gfx1151")]),
        ("amd_strix_halo_96g_gfx1151", HIP, [("ROCm0", "carveout", 98304, "gfx1151")]),
        ("intel_arc_b580_xe", {}, [("SYCL0", "dedicated", 12288, None)]),
        ("intel_max_1550_xe_two_tiles", {}, [("SYCL0", "dedicated", 131072, None)]),
        (  # llvmpipe is no device
            "nvidia_uvm_missing",
            {"vulkaninfo": text("vulkaninfo/llvmpipe_only.txt"), "glslc": ""},
            [],
        ),
    ],
)
def test_linux(tree: str, commands: dict[str, Any], expected: list[Any]) -> None:
    host = collect(linux(f"sysfs/{tree}", commands=commands, ram=128 * GIB), identity())
    assert said(list(host.devices)) == expected, [*host.warnings]


@pytest.mark.parametrize(
    ("sysctl", "arch", "devices"),
    [
        ("sysctl_m3_16g", "arm64", [("MTL0", "unified", 10922, None)]),
        ("sysctl_m2_max_32g", "arm64", [("MTL0", "unified", 21845, None)]),
        ("sysctl_m4_max_128g", "arm64", [("MTL0", "unified", 98304, None)]),
        ("sysctl_vm_github_runner", "arm64", []),
        ("sysctl_intel_i7", "x86_64", []),
    ],
)
def test_macs(sysctl: str, arch: str, devices: list[Any]) -> None:
    """An old macOS, whose shares are two thirds and three quarters; machines without Metal lend their processor."""
    host = collect(mac(sysctl), identity("Darwin", arch, "macos15", "mac"))
    assert said(list(host.devices)) == devices
    assert host.backend == ("metal" if devices else "cpu")


def test_amd_tools_with_words_before_the_json_and_in_both_generations() -> None:
    """5.6 with its warning, 6.0; the list of amd-smi before ROCm 7 and the object since."""
    cards = [
        _amd_tools.parse_rocm_smi(text(f"rocm_smi/{name}")) for name in ("5.6_low_power_warning.txt", "6.0_7900xt.json")
    ]
    assert [card.vram // MIB for (card,) in cards if card.vram] == [16368, 20464]
    generations = [
        _amd_tools.parse_amd_smi(text(f"amd_smi/static_{name}.json"), text(f"amd_smi/metric_{name}.json"))
        for name in ("rocm6.4_list", "rocm7.0_gpu_data")
    ]
    assert generations[0] == generations[1] != []


def test_ram() -> None:
    assert _detect_cpu.parse_meminfo(text("proc/meminfo_hugepages"))["HugePages_Total"] > 0
    assert _detect_cpu.arc_reclaimable(text("proc/arcstats")) > 0
    pi = collect(linux("sysfs/raspberry_pi_5"), identity(arch="aarch64"))
    assert any("cgroup_enable=memory" in warning for warning in pi.warnings)
    limits = {
        name: collect(linux(f"sysfs/{name}"), identity()).memory["limit"]
        for name in ("cgroup_v1_sentinel", "cgroup_v1_limited", "cgroup_v2_nested")
    }
    assert limits == {"cgroup_v1_sentinel": None, "cgroup_v1_limited": 1 << 30, "cgroup_v2_nested": 48 << 30}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama_server/list_devices_metal.txt", [("MTL0", 38338, 38338), ("BLAS", None, None)]),
        ("llama_server/list_devices_metal_m4_max_128g.txt", [("MTL0", 110100, 110100), ("BLAS", None, None)]),
        ("llama_server/list_devices_cuda.txt", [("CUDA0", 24105, 23600)]),
        ("llama_server/list_devices_rpc.txt", [("RPC0", 122880, 122880), ("ROCm0", 122880, 122880)]),
        ("llama_server/list_devices_none.txt", []),
        ("hip/list_devices_strix_halo.txt", [("ROCm0", 98304, 98304)]),  # free above total
    ],
)
def test_what_llama_cpp_lists(name: str, expected: list[Any]) -> None:
    found = [
        (one.name, one.total and one.total // MIB, None if one.free is None else one.free // MIB)
        for one in parse_list_devices(text(name))
    ]
    assert found == expected


def test_jobs_of_launchd() -> None:
    running, ending = (parse_print(text(f"macos/launchctl_print_{name}")) for name in ("job", "sigtermed"))
    assert (running.state, running.pid, running.last_exit) == ("running", 4711, "0")
    assert running.arguments and running.arguments[-3:] == (
        "/opt/llamafleet/builds/b11434-0123456789ab/bin/ggml-rpc-server",
        "-H",
        "10.98.0.4",
    )
    assert ending.state == "SIGTERMed" and ending.arguments, "it still has the label"
    assert Launchctl(FakeRunner(commands={"launchctl": Result(113, "", "Could not find service")})).look("x") is None


@pytest.mark.parametrize(
    ("status", "says"),
    [(5, "loaded, disabled or damaged"), (36, "status 36"), (37, "status 37"), (125, "run as root")],
)
def test_statuses_of_launchctl_that_stay(status: int, says: str) -> None:
    """5, 36 and 37 pass by themselves or by a second try (test_launchd); one that stays is told."""
    runner = FakeRunner(commands={"launchctl": Result(status, "", "said"), "launchctl print": Result(113, "", "")})
    with pytest.raises(LaunchdError, match=says):
        Launchctl(runner, 0.0, lambda _seconds: None).bootstrap("x", "/x.plist")


def test_what_stands_in_the_long_report_of_mig() -> None:
    found = _detect_nvidia.parse_mig_memory(text("nvidia_smi/query_mig.xml"))
    assert [total // MIB for total, _free in found.values() if total] == [40192, 19968]
