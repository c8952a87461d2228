# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Recordings with pieces changed, lost and repeated: typed errors at most, and no memory that is not there."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils import (
    _amd_tools,
    _detect_amd,
    _detect_apple,
    _detect_cpu,
    _detect_intel,
    _detect_nvidia,
    _detect_vulkan,
    _launchd,
    _mac,
    _mac_network,
    _macos,
    _pci,
    _sockets,
    _toolchains,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import (
    LARGEST_CARD,
    Host,
    parse_list_devices,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._hosts import Own, collect
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Result
from ansible_collections.llamafleet.rpc.tests.unit.fakes import FakeRunner
from ansible_collections.llamafleet.rpc.tests.unit.recorded import RECORDINGS, identity, linux, mac, smi, text
from hypothesis import given, settings
from hypothesis import strategies as st

NUMBERS = ("0", "-1", "1", "9" * 30, "18446744073709551615", "1e309", "٣", "0x", "", "[N/A]", "nan", "7.5", "true")


def mutated(said: str, chance: random.Random) -> str:
    """A text with one to four pieces changed, as broken tools and other releases change them."""
    for _number in range(chance.randint(1, 4)):
        numbers = list(re.finditer(r"\d+", said))
        lines = said.splitlines(keepends=True)
        way = chance.randrange(7)
        if way == 0 and numbers:
            found = chance.choice(numbers)
            said = said[: found.start()] + chance.choice(NUMBERS) + said[found.end() :]
        elif way == 1 and lines:
            del lines[chance.randrange(len(lines))]
            said = "".join(lines)
        elif way == 2 and lines:
            lines.insert(chance.randrange(len(lines)), chance.choice(lines))
            said = "".join(lines)
        elif way == 3:
            said = said[: chance.randrange(len(said) + 1)]
        elif way == 4 and said:
            place = chance.randrange(len(said))
            said = said[:place] + chance.choice('{}[]",:=\0\n\t é') + said[place + 1 :]
        elif way == 5:
            said = "WARNING: something [new] {is} wrong\n" + said
        elif way == 6 and numbers:
            found = chance.choice(numbers)
            said = said[: found.end()] + chance.choice("0123456789") * chance.randint(1, 9) + said[found.end() :]
    return said


PARSERS: dict[str, Sequence[Callable[[str], object]]] = {
    "nvidia_smi": (
        lambda said: _detect_nvidia.parse_rows(said, _detect_nvidia.CORE),
        _detect_nvidia.parse_gpu_list,
        _detect_nvidia.parse_mig_memory,
        lambda said: _detect_nvidia.own_bytes(said, [4242]),
        _detect_nvidia.toolkit,
    ),
    "rocm_smi": (_amd_tools.parse_rocm_smi,),
    "amd_smi": (lambda said: _amd_tools.parse_amd_smi(said, said),),
    "hip": (
        _detect_amd.toolkit,
        _pci.parse_fdinfo,
        parse_list_devices,
        lambda said: _detect_amd.gtt_complaints(said, said, 1 << 36, 1 << 37),
        _detect_amd.kernel_release,
    ),
    "intel": (
        _detect_intel.parse_discovery,
        _detect_intel.parse_discovery_size,
        _detect_intel.parse_sycl_ls,
        _detect_intel.toolkit,
        _pci.parse_fdinfo,
        parse_list_devices,
    ),
    "vulkaninfo": (_detect_vulkan.parse_vulkaninfo,),
    "macos": (
        _detect_apple.parse_sysctl,
        _detect_apple.parse_vm_stat,
        _detect_apple.parse_displays,
        _detect_apple.parse_working_set,
        _detect_apple.parse_ifconfig,
        lambda said: _detect_apple.parse_ifconfig(said, said),
        _mac.parse_ps,
        _mac.parse_machine_id,
        _mac_network.parse_routes,
        _mac_network.prefixes,
        _launchd.parse_print,
        _macos.parse_apps,
    ),
    "proc": (_detect_cpu.parse_meminfo, _detect_cpu.parse_cpuinfo, _detect_cpu.arc_reclaimable),
    "sysfs": (_detect_amd.parse_properties, _detect_cpu.parse_cpu_list),
    "llama_server": (parse_list_devices,),
    "sockets": (_sockets.parse_lsof, _sockets.parse_proc_net),
    "toolchain": (_detect_nvidia.toolkit, _toolchains.gcc_major, _toolchains.release_of),
    "os_release": (_toolchains.parse_os_release, lambda said: _toolchains.family("Linux", said)),
}


@pytest.mark.parametrize("tool", sorted(PARSERS))
@settings(max_examples=150, deadline=None)
@given(chance=st.randoms(use_true_random=False))
def test_every_parser_on_mutated_recordings_raises_nothing_but_its_own_error(tool: str, chance: random.Random) -> None:
    files = sorted(path for path in (RECORDINGS / tool).iterdir() if path.is_file() and path.name != "README.md")
    said = mutated(chance.choice(files).read_text(), chance)
    for parser in PARSERS[tool]:
        with contextlib.suppress(FleetError):
            parser(said)


def test_every_recording_belongs_to_a_parser() -> None:
    kept_elsewhere = {"llama-server"}  # logs have a room and tests of their own
    assert {path.name for path in RECORDINGS.iterdir() if path.is_dir()} == {*PARSERS, *kept_elsewhere}


def test_every_parser_is_among_them() -> None:
    told = Path(__file__).read_text()
    for room in (
        *(_amd_tools, _detect_amd, _detect_apple, _detect_cpu, _detect_intel, _detect_nvidia, _detect_vulkan),
        *(_launchd, _mac, _mac_network, _macos, _pci, _sockets, _toolchains),
    ):
        short = room.__name__.rpartition(".")[2]
        for name, value in vars(room).items():
            if name.startswith("parse_") and getattr(value, "__module__", "") == room.__name__:
                assert f"{short}.{name}" in told, f"{short}.{name} is not fuzzed"


def _vulkan(name: str) -> dict[str, Result | str]:
    return {"vulkaninfo": text(f"vulkaninfo/{name}.txt"), "glslc": ""}


def hosts() -> list[tuple[str, FakeRunner]]:
    """Whole recorded hosts, each a little city of files and tools."""
    cards = {
        **smi("core_two_cards_570.csv", "compute_cap_two_cards_570.csv", "list_two_cards_570.txt"),
        **_vulkan("nvidia_and_llvmpipe"),
        "nvcc": text("nvidia_smi/nvcc_12.4.txt"),
    }
    mig = {**smi("core_mig.csv", None, "list_mig.txt"), "nvidia-smi -q -x": text("nvidia_smi/query_mig.xml")}
    gb10 = {
        **smi("core_gb10_580.csv", "compute_cap_gb10_580.csv"),
        "nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory": text("nvidia_smi/compute_apps_gb10.csv"),
    }
    hidden: dict[str, Result | str] = {
        "amd-smi static": text("amd_smi/static_rocm7.0_gpu_data.json"),
        "amd-smi metric": text("amd_smi/metric_rocm7.0_gpu_data.json"),
        "rocm-smi": text("rocm_smi/6.0_7900xt.json"),
    }
    arc: dict[str, Result | str] = {
        "xpu-smi discovery -j": text("intel/xpu_smi_discovery_1.2.json"),
        "xpu-smi discovery -d": text("intel/xpu_smi_discovery_device_1.2.json"),
        "sycl-ls": text("intel/sycl_ls_2025.3.txt"),
        **_vulkan("anv_a380"),
    }
    strix = linux("sysfs/amd_strix_halo_512m_gtt_96g_gfx1151", commands=_vulkan("radv_strix_halo_two_heaps"))
    strix.files["/proc/meminfo"] = text("proc/meminfo_strix_halo_128g")
    strix.files["/proc/4242/fdinfo/5"] = text("hip/fdinfo_kernel_6.14")
    return [
        ("Linux", linux("sysfs/nvidia_two_cards", commands=cards)),
        ("Linux", linux("sysfs/nvidia_two_cards", commands=mig)),
        ("Linux", linux("sysfs/nvidia_gb10", commands=gb10)),
        ("Linux", linux("sysfs/jetson_orin_l4t_r39", commands=smi("core_orin.csv"))),
        ("Linux", strix),
        ("Linux", linux("sysfs/amd_raphael_beside_7900_gfx1036")),
        ("Linux", linux("sysfs/amd_mi300a_gfx942")),
        ("Linux", linux("sysfs/amd_container_without_driver_files", commands=hidden)),
        ("Linux", linux("sysfs/intel_arc_a380_i915_without_size", commands=arc)),
        ("Linux", linux("sysfs/intel_meteor_lake_igpu", commands=_vulkan("anv_meteor_lake_igpu"))),
        ("Linux", linux("sysfs/lxc_guest")),
        ("Linux", linux("sysfs/cgroup_v2_nested")),
        ("Darwin", mac("sysctl_m4_max_128g")),
        ("Darwin", mac("sysctl_m3_16g", "vm_stat_wired_16g")),
    ]


def check_memory(host: Host) -> None:
    """usable <= total <= physical: RAM for what shares it, and what no card exceeds for the rest."""
    ram = host.memory["total"]
    assert ram is not None
    for name in ("available", "usable"):
        assert 0 <= (host.memory[name] or 0) <= ram
    for device in host.devices:
        physical = ram if device.pool == f"{host.machine_id}/ram" else LARGEST_CARD
        assert device.total is None or 0 <= device.total <= physical
        if device.usable is not None:
            assert device.total is not None
            assert 0 <= device.usable <= device.total
        assert device.free is None or device.total is None or 0 <= device.free <= device.total
        assert device.ceiling is None or 0 <= device.ceiling <= ram
    makers: dict[str, set[str]] = {}
    for device in host.devices:
        if device.pci_bus_id:
            makers.setdefault(device.pci_bus_id, set()).add(device.backend)
    assert all(len(backends) == 1 for backends in makers.values()), "one physical device is one device"


@pytest.mark.parametrize("number", range(14))
def test_recorded_hosts_never_invent_memory(number: int) -> None:
    system, runner = hosts()[number]
    check_memory(collect(runner, identity(system, "arm64" if system == "Darwin" else "x86_64"), own=Own(pids=(4242,))))


@pytest.mark.parametrize("number", range(14))
@settings(max_examples=80, deadline=None)
@given(chance=st.randoms(use_true_random=False))
def test_mutated_hosts_never_invent_memory(number: int, chance: random.Random) -> None:
    system, runner = hosts()[number]
    pieces = [("file", path) for path in sorted(runner.files)] + [("tool", name) for name in sorted(runner.commands)]
    for kind, name in chance.sample(pieces, min(len(pieces), chance.randint(1, 5))):
        if kind == "file":
            runner.files[name] = mutated(runner.files[name], chance)
        else:
            result = runner.commands[name]
            runner.commands[name] = replace_result(result, chance)
    who = replace(identity(system, "arm64" if system == "Darwin" else "x86_64"), physical_bytes=None)
    with contextlib.suppress(FleetError):
        check_memory(collect(runner, who, own=Own(pids=(4242,))))


def replace_result(result: Result, chance: random.Random) -> Result:
    """A tool that fails, hangs, talks on the other stream, or says something else."""
    way = chance.randrange(5)
    if way == 0:
        return Result(124, "", "timed out")
    if way == 1:
        return Result(chance.choice((1, 2, 9, 127, 255)), result.stderr, result.stdout)
    return Result(result.rc, mutated(result.stdout, chance), result.stderr)
