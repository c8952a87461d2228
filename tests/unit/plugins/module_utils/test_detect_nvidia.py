# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""NVIDIA devices from recorded nvidia-smi output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_cpu import detect_memory
from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_nvidia import (
    CORE,
    capability,
    detect_nvidia,
    own_bytes,
    parse_gpu_list,
    parse_mig_memory,
    parse_rows,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import GIB, MIB, Device, Finding
from ansible_collections.llamafleet.rpc.plugins.module_utils._pci import bus_id
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import TIMED_OUT, Result
from ansible_collections.llamafleet.rpc.plugins.module_utils._toolchains import switches
from ansible_collections.llamafleet.rpc.tests.unit import recorded
from ansible_collections.llamafleet.rpc.tests.unit.fakes import FakeRunner
from hypothesis import given
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Sequence

RECORDINGS = Path(__file__).parents[2] / "recordings"
RAM = recorded.memory(64 * GIB, 60 * GIB)
FIRST, SECOND = "GPU-aaaaaaaa-0000-0000-0000-000000000001", "GPU-aaaaaaaa-0000-0000-0000-000000000002"
CARD = {"/sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n", "/sys/bus/pci/devices/0000:01:00.0/class": "0x030000\n"}


def smi(name: str) -> str:
    return (RECORDINGS / "nvidia_smi" / name).read_text()


def host(
    core: str | Result,
    caps: str | Result = "",
    listed: str = "",
    files: dict[str, str] | None = None,
) -> FakeRunner:
    """A host whose nvidia-smi answers the three questions."""

    def result(answer: str | Result) -> Result:
        return answer if isinstance(answer, Result) else Result(0, answer, "")

    commands = {
        f"nvidia-smi --query-gpu={','.join(CORE)}": result(core),
        "nvidia-smi --query-gpu=uuid,compute_cap": result(caps),
        "nvidia-smi -L": result(listed),
    }
    return FakeRunner(files or {}, commands)


def find(runner: FakeRunner, **options: object) -> Finding:
    return detect_nvidia(runner, "m1", RAM, **options)  # type: ignore[arg-type]  # the options are those of the test


def cmake_flags(devices: Sequence[Device]) -> tuple[str, ...]:
    return switches("cuda", devices, "Linux")


def two_cards() -> FakeRunner:
    return host(smi("core_two_cards_570.csv"), smi("compute_cap_two_cards_570.csv"), smi("list_two_cards_570.txt"))


def test_two_cards_are_named_and_measured() -> None:
    runner = two_cards()
    runner.commands["nvcc --version"] = Result(0, smi("nvcc_12.4.txt"), "")
    found = find(runner)
    first, second = found.devices
    assert (first.name, first.arch, first.pci_bus_id, first.uuid) == ("CUDA0", "sm_89", "0000:01:00.0", FIRST)
    assert (first.total, first.free) == (24564 * MIB, 23773 * MIB)
    # What the driver and others hold, and the reserve, are not lent: total is not used + free.
    assert first.usable == 23773 * MIB - 512 * MIB
    assert first.pool == "m1/gpu/0000:01:00.0"
    assert second.name == "CUDA1"
    assert found.toolkit == "12.4"
    assert found.warnings == ()
    assert cmake_flags(found.devices) == ("-DGGML_CUDA=ON", "-DGGML_CUDA_NCCL=OFF", "-DCMAKE_CUDA_ARCHITECTURES=86;89")


def test_the_order_is_that_of_the_pci_bus() -> None:
    """B3-19: nvidia-smi counts by PCI address, CUDA fastest first unless its environment says otherwise."""
    rows = (
        "0, GPU-e1, NVIDIA GeForce GTX 1660 SUPER, 00000000:01:00.0, 570.1, 6144, 0, 6000\n"
        "1, GPU-e2, NVIDIA GeForce RTX 3090, 00000000:02:00.0, 570.1, 24576, 0, 24000\n"
    )
    devices = find(host(rows, "GPU-e1, 7.5\nGPU-e2, 8.6\n")).devices
    assert [(device.name, device.uuid) for device in devices] == [("CUDA0", "GPU-e1"), ("CUDA1", "GPU-e2")]
    assert devices[1].total == 24576 * MIB
    assert all(device.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" for device in devices)


def test_a_driver_that_does_not_know_compute_cap() -> None:
    found = find(host(smi("core_470.csv"), Result(2, smi("compute_cap_470_rc2.txt"), "")))
    assert [(device.name, device.arch) for device in found.devices] == [("CUDA0", "sm_61")]


def test_a_card_nobody_knows_leaves_the_architectures_to_cmake() -> None:
    rows = "0, GPU-f, NVIDIA Mystery 9000, 00000000:01:00.0, 470.1, 8000, 0, 8000\n"
    found = find(host(rows, Result(2, smi("compute_cap_470_rc2.txt"), "")))
    assert found.devices[0].arch is None
    assert "compute capability unknown (driver 470.1)" in found.devices[0].warnings[0]
    assert cmake_flags(found.devices) == ("-DGGML_CUDA=ON", "-DGGML_CUDA_NCCL=OFF")


def test_gb10_has_the_ram_of_the_host() -> None:
    """B3-01: [N/A] for memory means that it is the host's."""
    ram = detect_memory(FakeRunner({"/proc/meminfo": (RECORDINGS / "proc" / "meminfo_gb10").read_text()}))
    runner = host(smi("core_gb10_580.csv"), smi("compute_cap_gb10_580.csv"))
    device = detect_nvidia(runner, "m1", ram).devices[0]
    assert (device.backend, device.kind, device.pool) == ("cuda", "unified", "m1/ram")
    assert device.total is not None
    assert device.total // MIB == 124610
    assert device.free == 118566368 * 1024
    assert device.usable == ram.usable
    assert device.pci_bus_id == "000f:01:00.0"
    assert "-DCMAKE_CUDA_ARCHITECTURES=121a" in cmake_flags([device])


@pytest.mark.parametrize("name", ["core_orin.csv", "core_n1x_bogus.csv"])
def test_the_name_decides_that_memory_is_shared_not_the_figure(name: str) -> None:
    device = find(host(smi(name)), traits=("tegra",)).devices[0]
    assert (device.kind, device.total, device.usable) == ("unified", RAM.total, RAM.usable)


def test_a_discrete_card_without_memory_is_not_taken_for_a_shared_one() -> None:
    rows = "0, GPU-a, NVIDIA GeForce RTX 4090, 00000000:01:00.0, 570.1, [N/A], [N/A], [Unknown Error]\n"
    found = find(host(rows, "GPU-a, 8.9\n"))
    device = found.devices[0]
    assert (device.kind, device.total, device.usable) == ("dedicated", None, None)
    assert "does not say how much memory" in device.warnings[0]
    assert not found.works


def test_mig_slices_are_devices_of_their_own() -> None:
    """B3-07: the parent's 80 GB cannot be had by any process; a process sees one slice, as CUDA0."""
    runner = host(smi("core_mig.csv"), listed=smi("list_mig.txt"))
    runner.commands["nvidia-smi -q -x"] = Result(0, smi("query_mig.xml"), "")
    found = find(runner)
    large, small, parent = found.devices
    assert (large.name, small.name) == ("CUDA0", "CUDA0")
    assert any("an instance of its own" in text and "MIG-cccc" in text for text in found.warnings)
    assert (large.total, small.total) == (40192 * MIB, 19968 * MIB)
    assert large.usable is not None
    assert large.usable < 40154 * MIB
    assert large.environment["CUDA_VISIBLE_DEVICES"] == "MIG-bbbb"
    assert len({large.pool, small.pool, parent.pool}) == 3
    assert parent.usable is None


def test_mig_slices_without_the_long_report_take_the_size_of_their_profile() -> None:
    """B3-07: 40 and 20 GB class, never more than the slice really has."""
    large, small, _parent = find(host(smi("core_mig.csv"), listed=smi("list_mig.txt"))).devices
    assert (large.total, small.total) == (40 * 10**9, 20 * 10**9)
    assert large.usable is not None
    assert large.usable < 36 * 10**9
    assert "profile's name" in large.warnings[0]


def test_a_slice_is_never_more_than_its_card_nor_free_more_than_the_slice() -> None:
    runner = host(smi("core_mig.csv"), listed=smi("list_mig.txt"))
    said = smi("query_mig.xml").replace("40192 MiB", "401920 MiB").replace("<total>19968 MiB</total>", "")
    runner.commands["nvidia-smi -q -x"] = Result(0, said, "")
    large, small, _parent = find(runner).devices
    assert large.total == 81920 * MIB
    assert (small.total, small.free) == (20 * 10**9, 20 * 10**9)


def test_a_vgpu_guest_keeps_its_device() -> None:
    """B3-08: columns that are [N/A] in a guest do not drop the device."""
    device = find(host(smi("core_vgpu_guest.csv"))).devices[0]
    assert (device.total, device.free, device.uuid) == (12288 * MIB, None, "GPU-dddd")
    assert device.usable == 12288 * MIB - 512 * MIB
    assert "-DGGML_CUDA_NO_VMM=ON" in cmake_flags([device])


def test_wsl_has_its_tool_in_a_place_of_its_own() -> None:
    """B3-17: and libcuda lies there too."""
    runner = two_cards()
    runner.programs["nvidia-smi"] = "/usr/lib/wsl/lib/nvidia-smi"
    device = find(runner, traits=("wsl",)).devices[0]
    assert runner.ran[0][0] == "/usr/lib/wsl/lib/nvidia-smi"
    assert device.environment["LD_LIBRARY_PATH"] == "/usr/lib/wsl/lib"


def test_jetson_without_nvidia_smi() -> None:
    """B3-05: the device tree tells, whatever files the release leaves in /etc."""
    files = {"/proc/device-tree/compatible": "nvidia,p3737-0000+p3701-0005\0nvidia,tegra234\0"}
    device = find(FakeRunner(files), traits=("tegra",)).devices[0]
    assert (device.name, device.arch, device.kind, device.total) == ("CUDA0", "sm_87", "unified", RAM.total)


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (Result(9, smi("driver_not_loaded_rc9.txt"), ""), "status 9 (NVIDIA-SMI has failed because"),
        (Result(18, smi("version_mismatch_rc18.txt"), ""), "reboot"),
        (Result(17, "Failed to initialize NVML: Unknown Error\n", ""), "container's device rules"),
        (Result(TIMED_OUT, "", ""), "did not answer in time"),
        (Result(255, "", ""), "status 255 (no text)"),
    ],
)
def test_a_failing_driver_is_a_warning_with_its_cure(result: Result, says: str) -> None:
    found = find(host(result, files=CARD))
    assert found.devices == ()
    assert says in found.warnings[0]


@pytest.mark.parametrize(
    ("core", "files", "warned"),
    [
        (Result(6, smi("no_devices_rc6.txt"), ""), {}, False),
        (Result(0, "", ""), {}, False),
        (Result(9, smi("driver_not_loaded_rc9.txt"), ""), {}, False),
        (Result(0, "", ""), CARD, True),
    ],
)
def test_a_driver_without_a_card_is_no_device_and_no_alarm(core: Result, files: dict[str, str], warned: bool) -> None:
    found = find(host(core, files=files))
    assert (found.devices, bool(found.warnings)) == ((), warned)
    assert found.note


def test_a_card_without_a_driver_is_named() -> None:
    assert find(FakeRunner()).note == "no NVIDIA card"
    found = find(FakeRunner(CARD))
    assert "0000:01:00.0" in found.warnings[0]
    assert "no driver is loaded" in found.warnings[0]


def test_memory_of_our_own_processes_counts_as_free() -> None:
    """Law 18: the second run finds the capacity of the first, though a worker holds 20 GiB of the card."""
    before = find(two_cards()).devices[0].usable
    busy = smi("core_two_cards_570.csv").replace("410, 23773", f"{410 + 20480}, {23773 - 20480}")
    runner = host(busy, smi("compute_cap_two_cards_570.csv"))
    apps = f"{FIRST}, 4242, 20480\n{FIRST}, 77, 300\n{SECOND}, 4243, [N/A]\n"
    runner.commands["nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory"] = Result(0, apps, "")
    assert find(runner, own_pids=(4242,)).devices[0].usable == before
    held = find(runner).devices[0]
    assert held.usable != before
    assert "others hold" in held.warnings[0]
    assert own_bytes(apps, [4242, 4243]) == {FIRST: 20480 * MIB}


def test_a_host_without_toolkit_is_not_ready_to_build() -> None:
    found = find(two_cards())
    assert (found.ready, found.toolkit, found.driver) == (False, None, "570.133.07")


def test_bus_ids_are_written_as_the_kernel_does() -> None:
    assert bus_id("00000000:3B:00.0") == "0000:3b:00.0"
    assert bus_id("0000:01:00.0") == "0000:01:00.0"
    assert bus_id("[N/A]") is None
    assert bus_id(None) is None


def test_capabilities_by_name() -> None:
    names = [
        "Tesla P40",
        "Tesla V100-SXM2-32GB",
        "NVIDIA A100 80GB PCIe",
        "GeForce GTX 1080 Ti",
        "Tesla T4",
        "RTX A6000",
        "?",
        "NVIDIA RTX 2000 Ada Generation",
        "NVIDIA GeForce RTX 4060 Laptop GPU",
    ]
    assert [capability(None, name) for name in names] == ["6.1", "7.0", "8.0", "6.1", "7.5", "8.6", None, "8.9", "8.9"]
    assert capability("8.9", "Tesla P40") == "8.9"
    assert capability("[N/A]", "Tesla P40") == "6.1"


def test_lines_that_are_not_understood_are_named_and_skipped() -> None:
    rows, complaints = parse_rows("WARNING: infoROM is corrupted\n0, GPU-a\n\n", ("index", "uuid"))
    assert rows == [{"index": "0", "uuid": "GPU-a"}]
    assert "WARNING: infoROM" in complaints[0]


@given(st.text(), st.text(), st.text(), st.text(), st.integers(0, 255))
def test_any_output_gives_devices_within_their_memory(core: str, caps: str, listed: str, xml: str, rc: int) -> None:
    head = "0, GPU-aaaa, NVIDIA A100, 00000000:17:00.0, 550, 81920, 48, 99999\n"
    runner = host(Result(rc % 2, head + core, ""), caps, smi("list_mig.txt")[:80] + listed)
    runner.commands["nvidia-smi -q -x"] = Result(0, xml, "")
    for device in find(runner).devices:
        assert device.total is None or device.usable is None or 0 <= device.usable <= device.total
        assert device.total is None or device.free is None or device.free <= device.total
    parse_gpu_list(core)
    parse_mig_memory(xml)
    own_bytes(core, [1])


@given(
    st.lists(
        st.sampled_from(["0", "GPU-a", "[N/A]", "24564", "x", "-5", "8.9", "00000000:01:00.0", "٣"]),
        min_size=8,
        max_size=8,
    )
)
def test_any_row_gives_devices_within_their_memory(cells: list[str]) -> None:
    for device in find(host(", ".join(cells), f"{cells[1]}, {cells[0]}")).devices:
        assert device.total is None or device.usable is None or 0 <= device.usable <= device.total
