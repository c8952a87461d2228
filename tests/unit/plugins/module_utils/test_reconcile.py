# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What llama.cpp says of a device against what was detected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import GIB, MIB, Device, DeviceError
from ansible_collections.llamafleet.rpc.plugins.module_utils._hosts import collect
from ansible_collections.llamafleet.rpc.plugins.module_utils._reconcile import listing, reconcile
from ansible_collections.llamafleet.rpc.plugins.module_utils._worker_record import (
    Inputs,
    WorkerRecordError,
    build_record,
)
from ansible_collections.llamafleet.rpc.tests.unit.recorded import identity, linux, mac, smi, text
from hypothesis import given
from hypothesis import strategies as st

CARD = Device("CUDA0", "cuda", "NVIDIA GeForce RTX 4090", "dedicated", "m/gpu/x", 24564 * MIB, None, 23261 * MIB)
SIZES = st.integers(0, 1 << 41)


def facts(name: str, **commands: Any) -> dict[str, Any]:
    return collect(linux(f"sysfs/{name}", commands=commands), identity()).to_dict()


def record(host: dict[str, Any], **more: Any) -> tuple[dict[str, Any], list[str]]:
    options: dict[str, Any] = {
        "host": "box",
        "cluster": "default",
        "facts": host,
        "instances": [{"name": "a", "port": 1}],
    }
    options["mesh"] = {"address": "10.0.0.2"}
    inputs = Inputs(**{**options, **more})
    return build_record(inputs)["instances"][0]["devices"][0], inputs.warnings


def test_a_report_within_five_percent_is_no_gap_and_the_smaller_figure_holds() -> None:
    verdict = reconcile(CARD, 24105 * MIB, 23600 * MIB)
    assert verdict == (23261 * MIB, 23600 * MIB, ())
    assert reconcile(CARD, 23000 * MIB, None).usable == 23000 * MIB
    assert reconcile(CARD, None, None) == (CARD.usable, None, ())


@pytest.mark.parametrize("total", [22000 * MIB, 26000 * MIB])
def test_a_gap_is_a_warning_with_both_numbers(total: int) -> None:
    verdict = reconcile(CARD, total, total)
    assert verdict.usable == min(total, 23261 * MIB)
    (warning,) = verdict.warnings
    assert f"{total // MIB} MiB" in warning
    assert "24564 MiB (23261 MiB to lend" in warning


def test_a_processor_is_never_believed() -> None:
    cpu = replace(CARD, name="CPU", backend="cpu")
    assert reconcile(cpu, GIB, GIB) == (cpu.usable, None, ())


def test_an_estimate_is_replaced_by_the_measured_figure_up_to_its_ceiling() -> None:
    """B3-25: llama.cpp's own figure comes first."""
    host = collect(mac("sysctl_m3_16g", "vm_stat_idle_16g"), identity("Darwin", "arm64", "macos15", "mini")).to_dict()
    assert host["devices"][0]["usable"] // MIB == 10922
    entry, warnings = record(host, listed=text("llama_server/list_devices_metal_16g.txt"))
    assert (entry["usable"] // MIB, entry["reported"] // MIB) == (12124, 12124)
    assert "12124 MiB, detected were 10922 MiB" in warnings[0]
    estimate = replace(CARD, ceiling=24000 * MIB)
    assert reconcile(estimate, 30000 * MIB, None).usable == 24000 * MIB


def test_what_the_driver_gives_comes_before_what_sysfs_shows() -> None:
    """B3-13: a cut-out of 16 GB of which HIP gives 7882 MiB."""
    host = facts("amd_780m_16g_gfx1103", hipconfig=text("hip/hipconfig_6.4.txt"))
    entry, warnings = record(host, listed=text("hip/list_devices_780m.txt").splitlines())
    assert (entry["usable"], entry["budget"]) == (7882 * MIB, 7882 * MIB)
    assert "reports 7882 MiB, detected were 16384 MiB" in warnings[0]


def test_free_above_total_and_a_report_like_the_detected_one() -> None:
    host = facts("amd_strix_halo_512m_gtt_96g_gfx1151", hipconfig=text("hip/hipconfig_6.4.txt"))
    host["devices"][0]["usable"] = min(host["devices"][0]["usable"], 98304 * MIB)
    entry, warnings = record(host, listed=text("hip/list_devices_strix_halo.txt"))
    assert entry["budget"] <= 98304 * MIB
    assert all("reports 98304" not in warning or "detected" in warning for warning in warnings)


def test_the_report_is_kept_while_nobody_asks_again() -> None:
    """A busy worker is not asked (law 7), and a listing may be left out: the plan stays."""
    host = facts("amd_780m_16g_gfx1103", hipconfig=text("hip/hipconfig_6.4.txt"))
    base: dict[str, Any] = {"host": "box", "cluster": "default", "facts": host, "mesh": {"address": "10.0.0.2"}}
    inputs = Inputs(**base, instances=[{"name": "a", "port": 1}], listed=text("hip/list_devices_780m.txt"))
    first = build_record(inputs)
    second = build_record(Inputs(**base, instances=[{"name": "a", "port": 1}], previous=first))
    assert second["instances"][0]["devices"] == first["instances"][0]["devices"]
    fresh = build_record(Inputs(**base, instances=[{"name": "a", "port": 1}], previous=first, remeasure=True))
    assert fresh["instances"][0]["devices"][0]["usable"] > 15 * GIB


def test_the_wire_probe_of_an_idle_worker_counts_as_well() -> None:
    host = collect(linux(commands=smi("core_4090_570.csv", "compute_cap_4090_570.csv")), identity()).to_dict()
    probe = {
        "endpoint": "10.0.0.2:1",
        "status": "ok",
        "protocol": "7.0.0",
        "devices": [{"index": 0, "total": 24105 * MIB, "free": 20000 * MIB}],
    }
    entry, warnings = record(host, listed=text("llama_server/list_devices_cuda.txt"), probes=[probe])
    assert (entry["budget"], warnings) == (20000 * MIB, [])
    probe["devices"] = [{"index": 0, "total": 12000 * MIB, "free": 12000 * MIB}]
    entry, warnings = record(host, probes=[probe])
    assert (entry["usable"], len(warnings)) == (12000 * MIB, 1)
    assert "the worker reports 12000 MiB" in warnings[0]


def test_a_device_that_llama_cpp_does_not_list_stops_the_run() -> None:
    host = collect(linux(commands=smi("core_4090_570.csv", "compute_cap_4090_570.csv")), identity()).to_dict()
    with pytest.raises(WorkerRecordError, match=r"CUDA0: llama-server does not list it.*\(it lists none\)"):
        record(host, listed=text("llama_server/list_devices_none.txt"))
    with pytest.raises(DeviceError, match="is not the output of llama-server --list-devices"):
        record(host, listed="error while loading shared libraries: libcudart.so.12")
    with pytest.raises(DeviceError, match="neither text nor lines"):
        record(host, listed=5)
    # The CPU is in no list, and needs none.
    entry, _warnings = record(
        host, listed=text("llama_server/list_devices_none.txt"), instances=[{"port": 1, "devices": ["CPU"]}]
    )
    assert entry["device"] == "CPU"


def test_an_instance_that_chooses_its_devices_has_a_list_of_its_own() -> None:
    host = collect(linux(commands=smi("core_two_cards_570.csv", "compute_cap_two_cards_570.csv")), identity()).to_dict()
    only = {"port": 1, "devices": ["CUDA0"], "env": {"CUDA_VISIBLE_DEVICES": "1"}}
    host_list = "Available devices:\n  CUDA0: NVIDIA GeForce RTX 4090 (10 MiB, 10 MiB free)\n"
    entry, _warnings = record(host, instances=[only], listed=host_list)
    assert entry["usable"] > 20 * GIB
    own_list = "Available devices:\n  CUDA0: NVIDIA GeForce RTX 3090 (24124 MiB, 23800 MiB free)\n"
    entry, _warnings = record(host, instances=[{**only, "listed_devices": own_list}], listed=host_list)
    assert entry["reported"] == 24124 * MIB


def test_each_instance_is_held_against_its_own_list() -> None:
    """B3-07: two slices, both CUDA0, with budgets of their own; a slice that llama.cpp does not list is an error."""
    commands = smi("core_mig.csv", listed="list_mig.txt")
    host = collect(linux(commands=commands), identity()).to_dict()
    slices = [device for device in host["devices"] if device["name"] == "CUDA0"]
    given_ = [
        {"name": name, "port": port, "devices": ["CUDA0"], "env": device["environment"]}
        for name, port, device in zip(("large", "small"), (1, 2), slices)
    ]
    says = "Available devices:\n  CUDA0: NVIDIA A100 80GB PCIe MIG (%d MIB, 9000 MIB free)\n".replace("MIB", "MiB")
    inputs = Inputs("box", "default", given_, host, mesh={"address": "10.0.0.2"})
    listed = {"large": says % 30000, "small": (says % 15000).splitlines()}
    made = build_record(replace(inputs, listed=listed))["instances"]
    assert [one["devices"][0]["usable"] // MIB for one in made] == [30000, 15000]
    assert len({one["devices"][0]["pool"] for one in made}) == 2
    with pytest.raises(WorkerRecordError, match="small, CUDA0: llama-server does not list it"):
        build_record(replace(inputs, listed={**listed, "small": text("llama_server/list_devices_none.txt")}))


@given(SIZES, SIZES, SIZES, SIZES, st.booleans())
def test_a_report_never_makes_more_than_both_say(total: int, usable: int, said: int, free: int, guess: bool) -> None:
    device = replace(CARD, total=total, usable=min(usable, total), ceiling=total if guess else None)
    verdict = reconcile(device, said, free)
    assert verdict.usable is not None
    assert 0 <= verdict.usable <= min(said, total)
    assert verdict.free is None or verdict.free <= said


@given(st.text())
def test_any_text_is_a_listing_or_a_named_error(said: str) -> None:
    if "Available devices" in said:
        assert listing(said) is not None
    else:
        with pytest.raises(DeviceError, match="listed_devices"):
            listing(said)
