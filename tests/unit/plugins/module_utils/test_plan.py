# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a plan says: shape, names, budgets, reasons and warnings. Cases B1 to B8 are reports of users."""

from __future__ import annotations

import copy
import random
import re
import time
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils import _memory, _optimise, _plan_input
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._model import Model
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan import plan_split
from ansible_collections.llamafleet.rpc.tests.unit import measured
from ansible_collections.llamafleet.rpc.tests.unit.plan_world import (
    GIB,
    MIB,
    assigned,
    device,
    layer,
    model,
    workers,
)

PLAN_KEYS = {
    "feasible",
    "reason",
    "objective",
    "n_gpu_layers",
    "devices",
    "rpc",
    "tensor_split",
    "device_order",
    "n_ctx",
    "params",
    "primary_host",
    "output_on_primary",
    "predicted",
    "certificate",
    "devices_compared",
    "second_best",
    "without",
    "dropped",
    "warnings",
}
DEVICE_KEYS = {
    "host",
    "endpoint",
    "index",
    "device",
    "rpc_name",
    "units",
    "first_layer",
    "last_layer",
    "output",
    "weights",
    "kv",
    "compute",
    "total",
    "usable",
    "headroom",
    "ms",
}


def plan(made: dict[str, Any], devices: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    return plan_split(made, devices, **{"n_ctx": 2048, "n_ubatch": 64, **options})


def units(made: dict[str, Any]) -> dict[str, int]:
    return {f"{entry['host']}/{entry['device']}": entry["units"] for entry in made["devices"]}


def codes(made: dict[str, Any]) -> set[str]:
    return {warning["code"] for warning in made["warnings"]}


# --- Shape -----------------------------------------------------------------------------------------------------------


def test_every_key_of_a_plan() -> None:
    made = plan(model(), [device("head", 4 * GIB, None, "CPU", max_units=0), *workers(2, GIB)])
    assert set(made) == PLAN_KEYS
    assert made["feasible"] is True
    assert made["reason"] is None
    assert all(set(entry) == DEVICE_KEYS for entry in made["devices"])
    assert set(made["primary_host"]) == {"weights", "kv", "compute", "cache_ram", "total", "usable"}
    assert set(made["predicted"]) == {
        "ms_per_token",
        "tokens_per_s",
        "lower_bound_ms",
        "gap",
        "hardware_ms",
        "wire_bytes_per_token",
        "round_trips",
    }


def test_every_key_of_a_plan_that_does_not_fit() -> None:
    """An infeasible plan is data: all keys, numbers in the reason, and what would fit."""
    made = plan(model(), workers(2, 400 * MIB), n_ctx=4096)
    assert set(made) == PLAN_KEYS
    assert (made["feasible"], made["devices"], made["rpc"], made["tensor_split"]) == (False, [], "", "")
    assert re.search(
        r"needs at least [\d .]+ MiB .* the 2 devices have [\d .]+ MiB .* short by [\d .]+ MiB", made["reason"]
    )
    assert re.search(r"w\d CUDA0 \(10\.0\.0\.\d:18711\) needs [\d .]+ MiB for \d+ of 11 units", made["reason"])
    assert "No shorter context fits" in made["reason"]


def test_the_largest_context_that_fits_is_named_and_true() -> None:
    devices = workers(2, 800 * MIB)
    made = plan(model(), devices, n_ctx=131072)
    found = re.search(r"n_ctx (\d+) would fit", made["reason"])
    assert found is not None
    largest = int(found.group(1))
    assert plan(model(), devices, n_ctx=largest)["feasible"]
    assert not plan(model(), devices, n_ctx=largest + 256)["feasible"]


def test_a_smaller_cache_type_is_offered_and_true() -> None:
    devices = workers(2, 900 * MIB)
    made = plan(model(), devices, n_ctx=120000)
    assert "n_ctx 120000 with type_k and type_v q8_0 would fit" in made["reason"]
    assert plan(model(), devices, n_ctx=120000, type_k="q8_0", type_v="q8_0")["feasible"]


def test_a_plan_with_only_the_keys_of_the_contract() -> None:
    """Optional keys of a device may be absent, extras of a model too."""
    bare = {"host": "w", "endpoint": "10.0.0.2:1024", "device": "CUDA0", "usable": 4 * GIB}
    made = plan(model(), [bare])
    assert made["device_order"] == ["RPC0"]
    assert made["devices"][0]["usable"] == 4 * GIB


def test_inputs_are_not_changed() -> None:
    given, devices = model(), workers(2, GIB)
    before = copy.deepcopy((given, devices))
    plan(given, devices)
    assert (given, devices) == before


# --- Laws ------------------------------------------------------------------------------------------------------------


def test_names_count_all_devices_of_the_listed_endpoints() -> None:
    """Law 2: A with 2 devices, B with 1, A's second unused: RPC0 and RPC2."""
    devices = [
        device("a", 700 * MIB, "10.0.0.1:18711", "CUDA0", n_endpoint_devices=2),
        device("a", 20 * MIB, "10.0.0.1:18711", "CUDA1", index=1, n_endpoint_devices=2),
        device("b", 700 * MIB, "10.0.0.2:18711"),
    ]
    made = plan(model(), devices)
    assert made["device_order"] == ["RPC0", "RPC2"]
    assert made["rpc"] == "10.0.0.1:18711,10.0.0.2:18711"
    assert made["dropped"][0]["device"] == "CUDA1"
    assert "too small" in made["dropped"][0]["why"]


def test_the_second_device_of_an_endpoint_keeps_its_number() -> None:
    devices = [
        device("a", 700 * MIB, "10.0.0.1:18711", "CUDA0", n_endpoint_devices=2, max_units=0),
        device("a", 4 * GIB, "10.0.0.1:18711", "CUDA1", index=1, n_endpoint_devices=2),
    ]
    assert plan(model(), devices)["device_order"] == ["RPC1"]


def test_endpoints_without_a_used_device_are_not_listed_and_not_counted() -> None:
    devices = [device("a", 20 * MIB, "10.0.0.1:18711"), *workers(3, 2 * GIB)[1:]]
    made = plan(model(), devices)
    assert made["rpc"] == "10.0.0.2:18711"
    assert made["device_order"] == ["RPC0"]


def test_the_float32_rule_of_llama_cpp_keeps_whole_numbers() -> None:
    """Law 1: 20000 random splits, up to 15 devices and 300 layers, also with the first blocks on the CPU."""
    dice = random.Random(1)
    for _case in range(20000):
        count = dice.randint(1, 15)
        split = [dice.randint(1, 20) for _device in range(count)]
        n_gpu = sum(split)
        on_cpu = dice.choice([0, 0, dice.randint(0, 60)])
        expected: list[int | None] = [None] * on_cpu
        for number, held in enumerate(split):
            expected += [number] * held
        assert assigned(split, n_gpu - 1 + on_cpu, n_gpu) == expected


def test_fractions_would_not_be_kept() -> None:
    """The same rule reads 3,1 as shares: 24 and 7 of 31 units (case B1-02)."""
    places = assigned([3, 1], 30, 31)
    assert (places.count(0), places.count(1)) == (24, 7)


def test_every_budget_and_pool_holds_with_its_margin() -> None:
    """Law 3, and B1-03: weights + KV + compute + margin stay within every device, and within the pool together."""
    devices = [
        device("a", 700 * MIB, "10.0.0.1:18711", "CUDA0", n_endpoint_devices=2, pool="p", pool_usable=900 * MIB),
        device(
            "a", 700 * MIB, "10.0.0.1:18711", "CUDA1", index=1, n_endpoint_devices=2, pool="p", pool_usable=900 * MIB
        ),
        device("b", 900 * MIB, "10.0.0.2:18711", bandwidth=1e9),
    ]
    made = plan(model(), devices)
    assert made["feasible"]
    for entry in made["devices"]:
        assert entry["total"] == entry["weights"] + entry["kv"] + entry["compute"]
        assert entry["headroom"] == entry["usable"] - entry["total"] >= max(64 * MIB, entry["usable"] // 50)
    together = sum(entry["total"] for entry in made["devices"] if entry["host"] == "a")
    assert together + 64 * MIB <= 900 * MIB
    assert units(made)["b/CUDA0"] > 0


def test_the_primarys_own_buffers_count_in_its_pool() -> None:
    """A Mac as primary: the GPU cannot have the memory that embedding and compute buffers take."""
    ram = {"pool": "m/ram", "pool_usable": 1300 * MIB}
    devices = [
        device("mac", 1300 * MIB, None, "CPU", max_units=0, **ram),
        *workers(1, GIB),
        device("mac", 1300 * MIB, None, "MTL0", **ram),
    ]
    small = plan(model(input_bytes=MIB), devices)
    assert set(units(small)) == {"mac/MTL0"}
    large = plan(model(input_bytes=400 * MIB), devices)
    assert set(units(large)) == {"mac/MTL0", "w0/CUDA0"}
    host, gpu = large["primary_host"], large["devices"][1]
    assert host["total"] + gpu["total"] + 64 * MIB <= 1300 * MIB


def test_first_layers_on_the_cpu_switch_off_full_offload() -> None:
    devices = [device("head", 3 * GIB, None, "CPU", bandwidth=1e9), device("head", 600 * MIB)]
    made = plan(model(), devices)
    cpu, gpu = made["devices"]
    assert (cpu["rpc_name"], cpu["first_layer"], gpu["rpc_name"]) == ("CPU", 0, "CUDA0")
    assert made["device_order"] == ["CUDA0"]
    assert made["n_gpu_layers"] == gpu["units"] == int(made["tensor_split"])
    assert cpu["units"] + gpu["units"] == 11
    assert gpu["output"]
    assert not cpu["output"]
    host = made["primary_host"]
    assert host["weights"] == cpu["weights"] + 10 * MIB
    assert host["kv"] == cpu["kv"]
    assert cpu["headroom"] == cpu["usable"] - host["total"]
    assert "partial_offload" in codes(made)


def test_a_cpu_given_last_still_comes_first() -> None:
    devices = [device("head", 600 * MIB), device("head", 3 * GIB, None, "CPU", bandwidth=1e9)]
    assert [entry["rpc_name"] for entry in plan(model(), devices)["devices"]] == ["CPU", "CUDA0"]


def test_everything_on_the_primarys_cpu() -> None:
    made = plan(model(), [device("head", 8 * GIB, None, "CPU"), *workers(1, 8 * GIB, bandwidth=1e9)])
    assert (made["n_gpu_layers"], made["device_order"], made["tensor_split"], made["rpc"]) == (0, [], "", "")
    assert made["devices"][0]["units"] == 11
    assert made["predicted"]["round_trips"] == 0


def test_one_device_alone_needs_less_compute_than_one_of_several() -> None:
    """Pipelining copies inputs only where several devices are listed (memory.md, surprise 5)."""
    alone = plan(model(n_embd=4096), workers(1, 4 * GIB), n_ubatch=512)
    several = plan(model(n_embd=4096), workers(2, 1200 * MIB), n_ubatch=512)
    assert several["devices"][0]["compute"] > alone["devices"][0]["compute"]


def test_fifteen_devices_are_chosen_out_of_more() -> None:
    """Law 5: 40 workers that hold a layer each would need 16; with larger ones 15 of 20 do."""
    made = plan(model([layer(100 * MIB)] * 14), workers(20, 250 * MIB), objective="memory")
    assert made["feasible"]
    assert len(made["device_order"]) == 15
    assert len(made["dropped"]) == 5


def test_sixteen_needed_devices_are_refused() -> None:
    """Case B8-04: 16 devices that each hold one layer; the reason names the limit."""
    made = plan(model([layer(100 * MIB)] * 15, output_bytes=100 * MIB), workers(16, 200 * MIB))
    assert not made["feasible"]
    assert "At least 16 devices are needed, but llama.cpp takes at most 15" in made["reason"]


def test_sixteen_devices_with_a_minimum_are_refused() -> None:
    made = plan(model([layer(MIB)] * 40), workers(16, GIB, min_units=1))
    assert "16 devices have min_units above 0, but llama.cpp takes at most 15" in made["reason"]


@pytest.mark.parametrize(("limit", "expected"), [(0, {"w1/CUDA0": 11}), (3, {"w0/CUDA0": 3, "w1/CUDA0": 8})])
def test_max_units(limit: int, expected: dict[str, int]) -> None:
    first, second = workers(2, 2 * GIB, bandwidth=50e9)
    made = plan(model(), [{**first, "max_units": limit, "bandwidth": 1e12}, second])
    assert units(made) == expected


def test_min_units_are_held_even_where_it_is_slower() -> None:
    first, second = workers(2, 2 * GIB)
    assert units(plan(model(), [{**first, "min_units": 4, "bandwidth": 1e9}, second])) == {"w0/CUDA0": 4, "w1/CUDA0": 7}


@pytest.mark.parametrize(
    ("changed", "text"),
    [({"min_units": 12}, "at least 12 units by min_units"), ({"max_units": 3}, "may hold 6 units by max_units")],
)
def test_impossible_unit_limits_are_named(changed: dict[str, int], text: str) -> None:
    given = workers(2, 8 * GIB, **changed)
    assert text in plan(model(), given if "max_units" in changed else given[:1])["reason"]


def test_a_worse_priority_is_used_only_when_needed() -> None:
    """Even where the better devices are far slower."""
    slow, quick = workers(2, 2 * GIB)
    devices = [{**slow, "priority": 1, "bandwidth": 1e9}, {**quick, "priority": 2, "bandwidth": 1e12}]
    made = plan(model(), devices)
    assert units(made) == {"w0/CUDA0": 11}
    assert "priority" in made["dropped"][0]["why"]
    devices[0]["usable"] = devices[0]["pool_usable"] = 600 * MIB
    assert "w1/CUDA0" in units(plan(model(), devices))


# --- Reports of users ------------------------------------------------------------------------------------------------


def test_shares_are_not_gigabytes() -> None:
    """Case B1-02: the planner counts bytes, with the output layer on the last device, and only then whole layers."""
    smol = measured.model("smol-header-only").to_dict()
    devices = workers(2, GIB)
    devices[0]["min_units"] = devices[0]["max_units"] = 24
    made = plan(smol, devices, n_ctx=2048, n_ubatch=512)
    assert made["tensor_split"] == "24,7"
    first, last = made["devices"]
    assert (first["weights"], last["weights"]) == (53194752, 43382016)  # 50.73 and 41.37 MiB in the log of b11434
    assert first["kv"] == 4 * last["kv"]


def test_budget_is_weights_and_cache_and_compute() -> None:
    """Case B1-03: 30500 MiB of weights, 80 layers, 2560 MiB of cache on 24100 + 12000 + 12000 MiB."""
    per_layer = 30500 * MIB // 80
    cache = [{"k_width": 1024, "v_width": 1024, "window": None, "ratio": 1, "per_sequence": False}]
    made = plan(
        model([layer(per_layer, caches=cache)] * 80, n_embd=8192),
        [device("a", 24100 * MIB, "10.0.0.1:1024"), device("a", 12000 * MIB, "10.0.0.1:1025", "CUDA1"),
         device("b", 12000 * MIB, "10.0.0.2:1024")],
        n_ctx=8192,
        n_ubatch=512,
    )  # fmt: skip
    assert made["feasible"]
    assert sum(entry["kv"] for entry in made["devices"]) == 2560 * MIB
    for entry in made["devices"]:
        assert entry["total"] + max(64 * MIB, entry["usable"] // 50) <= entry["usable"]


def test_no_rpc_where_it_fits_locally() -> None:
    """Case B1-05: two local cards of 23600 MiB hold 39034 MiB; the remote card is not used and not listed."""
    devices = [
        device("r", 47817 * MIB, "10.0.0.2:1024"),
        device("head", 23604 * MIB, None, "CUDA0"),
        device("head", 23612 * MIB, None, "CUDA1"),
    ]
    made = plan(model([layer(1000 * MIB)] * 38, output_bytes=900 * MIB), devices)
    assert made["rpc"] == ""
    assert made["device_order"] == ["CUDA0", "CUDA1"]
    assert made["dropped"][0]["endpoint"] == "10.0.0.2:1024"
    assert "not needed" in made["dropped"][0]["why"]


def test_shares_stand_in_the_order_of_llama_cpp() -> None:
    """Case B1-07: 51 layers to the remote device, 24 to the local one."""
    devices = [
        device("r", 48 * GIB, "10.9.0.2:50052", min_units=51),
        device("head", 48 * GIB, None, "CUDA0", min_units=24),
    ]
    made = plan(model([layer(100 * MIB)] * 74), devices)
    assert made["tensor_split"] == "51,24"
    assert made["device_order"] == ["RPC0", "CUDA0"]


def test_shares_are_never_sorted() -> None:
    """Case B1-15: the small card comes first and gets the small share."""
    made = plan(
        model([layer(1000 * MIB)] * 25),
        [device("h", 8192 * MIB, None, "CUDA0"), device("h", 24576 * MIB, None, "CUDA1")],
    )
    small, large = (int(part) for part in made["tensor_split"].split(","))
    assert small < large
    assert [entry["device"] for entry in made["devices"]] == ["CUDA0", "CUDA1"]


@pytest.mark.parametrize(("need", "expected"), [(20000, {"gpu"}), (30000, {"gpu", "cpu"})])
def test_quick_devices_first(need: int, expected: set[str]) -> None:
    """Case B1-11: 20000 MiB stay on the quick device; of 30000 it takes what it can hold."""
    devices = [
        device("cpu", 28000 * MIB, "10.0.0.2:1024", "CPU", bandwidth=100e9),
        device("gpu", 22000 * MIB, None, "CUDA0", bandwidth=1000e9),
    ]
    made = plan(model([layer(need * MIB // 100)] * 100, output_bytes=0), devices)
    assert {entry["host"] for entry in made["devices"]} == expected
    if need == 30000:
        gpu = made["devices"][1]
        assert gpu["headroom"] - gpu["usable"] // 50 < 301 * MIB  # not one more layer would fit


@pytest.mark.parametrize(("cap", "fits"), [(108000, True), (99000, False)])
def test_which_node_is_short_and_by_how_much(cap: int, fits: bool) -> None:
    """Case B1-12: 385200 MiB of weights on four equal nodes, caches and compute buffers counted before the start."""
    cache = [{"k_width": 4608, "v_width": 4608, "window": None, "ratio": 1, "per_sequence": False}]
    given = model([layer(385200 * MIB // 61, caches=cache)] * 61, n_embd=7168, n_vocab=129280)
    made = plan(given, workers(4, cap * MIB), n_ctx=4096, n_ubatch=512)
    assert made["feasible"] is fits
    if fits:
        assert all(entry["compute"] > 0 and entry["headroom"] >= entry["usable"] // 50 for entry in made["devices"])
    else:
        assert re.search(r"w\d CUDA0 \(10\.0\.0\.\d:18711\) needs .* has .* short by [\d .]+ MiB", made["reason"])


def test_a_small_budget_is_obeyed() -> None:
    """Case B1-14: a Mac with much wired memory offers little, and gets no more than that."""
    made = plan(
        model([layer(50 * MIB)] * 14),
        [device("m1", 500 * MIB, "10.0.0.1:1024", "MTL0", pool="m1/ram", pool_usable=10 * GIB),
         device("m2", 500 * MIB, "10.0.0.2:1024", "MTL0", pool="m2/ram", pool_usable=10 * GIB)],
    )  # fmt: skip
    assert made["feasible"]
    assert all(entry["total"] <= 436 * MIB for entry in made["devices"])


def test_a_multimodal_moe_with_a_cpu_worker_is_warned_of() -> None:
    """Case B7-12."""
    devices = [*workers(3, 500 * MIB), device("c", GIB, "10.0.0.9:1024", "CPU", min_units=1)]
    for architecture in ("qwen3vlmoe", "llama4", "deepseek2-ocr"):
        given = model(architecture=architecture, n_expert=128, n_expert_used=8)
        assert "moe_vision_cpu_worker" in codes(plan(given, devices))
    assert "moe_vision_cpu_worker" not in codes(plan(model(), devices))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"type_k": "q4_0"}, "set type_v to 'q4_0'"),
        ({"type_v": "q8_0"}, "set type_v to 'f16'"),
        ({"type_k": "q8_0", "type_v": "q8_0", "flash_attn": "off"}, "requires flash attention"),
        ({"type_k": "q8_0", "type_v": "q8_0", "flash_attn": False}, "requires flash attention"),
        ({"type_k": "q9"}, "expected one of"),
    ],
)
def test_cache_types_that_crash_are_refused(options: dict[str, Any], text: str) -> None:
    """Case B7-13: -ctk q4_0 alone crashes GPU workers; a quantised V cache needs flash attention."""
    with pytest.raises(FleetError, match=re.escape(text)):
        plan(model(), workers(2, 8 * GIB), **options)


def test_mixed_cache_types_on_cpu_workers_are_only_warned_of() -> None:
    made = plan(model(), workers(1, 8 * GIB, name="CPU"), type_k="q8_0")
    assert "mixed_cache_types" in codes(made)


@pytest.mark.parametrize(("mbps", "expected"), [(100, True), (10000, False), (None, False)])
def test_a_slow_link_is_warned_of(mbps: int | None, expected: bool) -> None:
    """Case B8-12: 20 GB over 100 Mbit/s take about 1600 s."""
    made = plan(
        model([layer(2 * 10**9)] * 10, output_bytes=0),
        [{**device("r", 30 * GIB, "10.0.0.2:1024"), "link_mbps": mbps}],
    )
    assert ("slow_load" in codes(made)) is expected
    if expected:
        assert "about 1600 s" in next(each["text"] for each in made["warnings"] if each["code"] == "slow_load")


def test_the_mode_is_always_layer() -> None:
    """Case B1-16: no plan asks for tensor mode, whose split points drift."""
    with pytest.raises(TypeError):
        plan(model(), workers(1, GIB), split_mode="tensor")


# --- Other warnings and numbers --------------------------------------------------------------------------------------


def test_a_remote_output_layer_is_warned_of() -> None:
    made = plan(model(), workers(1, 4 * GIB))
    assert "remote_output" in codes(made)
    assert made["predicted"]["wire_bytes_per_token"] > 4 * 1000
    local = plan(model(), [device("head", 4 * GIB)])
    assert "remote_output" not in codes(local)


def test_wire_bytes_are_those_that_were_measured() -> None:
    """SmolLM2 over two workers at 256 cells: 10298 + 2312 bytes for the first, 5058 + 196616 for the last."""
    smol = measured.model("smol-header-only").to_dict()
    made = plan(smol, workers(2, 250 * MIB), n_ctx=256, objective="memory")
    assert len(made["devices"]) == 2
    assert abs(made["predicted"]["wire_bytes_per_token"] - (10298 + 2312 + 5058 + 196616)) <= 4


def test_a_slow_link_makes_the_output_layer_expensive() -> None:
    """Two equal workers; the second one's link is slow, so the first one holds the output."""
    first, second = workers(2, 4 * GIB)
    made = plan(model(n_vocab=150000), [first, {**second, "link_mbps": 10}])
    assert units(made) == {"w0/CUDA0": 11}


def test_time_is_the_sum_of_its_parts() -> None:
    made = plan(model(), [device("w", 4 * GIB, "10.0.0.2:1024", rtt_ms=3.0, overhead_ms=0.25, bandwidth=1e9)])
    (entry,) = made["devices"]
    read = entry["weights"] + entry["kv"]
    assert entry["ms"] == pytest.approx(read / 1e9 * 1000 + 3.25, abs=1e-4)
    assert made["predicted"]["ms_per_token"] == entry["ms"]
    assert made["predicted"]["hardware_ms"] == pytest.approx(read / 1e9 * 1000 + 3, abs=1e-4)
    assert made["predicted"]["lower_bound_ms"] == made["predicted"]["ms_per_token"]


def test_only_active_experts_are_read() -> None:
    dense = plan(model([layer(100 * MIB)] * 10), workers(1, 4 * GIB))
    sparse = plan(model([layer(100 * MIB, active=10 * MIB)] * 10), workers(1, 4 * GIB))
    assert sparse["predicted"]["ms_per_token"] < dense["predicted"]["ms_per_token"] / 3


def test_unknown_speeds_get_defaults_and_say_so() -> None:
    bare = device("w", 4 * GIB, "10.0.0.2:1024", bandwidth=None, rtt_ms=None, overhead_ms=None)
    made = plan(model(), [bare])
    assert "default_bandwidth" in codes(made)
    assert made["devices"][0]["ms"] > _plan_input.DEFAULT_RTT_MS
    assert _plan_input.default_bandwidth("CPU") < _plan_input.default_bandwidth("CUDA12")


@pytest.mark.parametrize(("usable", "step"), [(20 * GIB, 8192), (5 * GIB, 4096), (1200 * MIB, 1024), (300 * MIB, 0)])
def test_the_prompt_cache_takes_the_largest_step_that_fits(usable: int, step: int) -> None:
    made = plan(model(), [device("head", usable, None, "CPU", max_units=0), *workers(1, 4 * GIB)])
    assert made["primary_host"]["cache_ram"] == step * MIB
    assert made["primary_host"]["total"] <= usable


def test_the_prompt_cache_leaves_the_pool_to_the_layers() -> None:
    """A GPU that shares the primary's RAM has its layers there."""
    ram = {"pool": "mac/ram", "pool_usable": 6 * GIB}
    devices = [device("mac", 6 * GIB, None, "CPU", max_units=0, **ram), device("mac", 6 * GIB, None, "MTL0", **ram)]
    made = plan(model([layer(300 * MIB)] * 10), devices)
    assert made["primary_host"]["cache_ram"] == 2048 * MIB
    assert made["primary_host"]["total"] + made["devices"][0]["total"] <= 6 * GIB


def test_a_jitter_of_memory_does_not_move_the_prompt_cache() -> None:
    """Law 4: decisions do not follow readings."""
    sizes = {
        plan(model(), [device("head", 6 * GIB + jitter * MIB, None, "CPU", max_units=0), *workers(1, 4 * GIB)])[
            "primary_host"
        ]["cache_ram"]
        for jitter in range(-200, 200, 40)
    }
    assert sizes == {4096 * MIB}


def test_a_given_prompt_cache_is_reserved() -> None:
    devices = [device("head", 2 * GIB, None, "CPU", bandwidth=900e9), *workers(1, 4 * GIB, bandwidth=1e9)]
    assert units(plan(model(), devices, cache_ram=0)) == {"head/CPU": 11}
    assert units(plan(model(), devices, cache_ram=1024 * MIB)) != {"head/CPU": 11}


def test_a_primary_too_small_for_its_own_buffers_is_named() -> None:
    devices = [device("head", 300 * MIB, None, "CPU", max_units=0), *workers(1, 8 * GIB)]
    reason = plan(model(input_bytes=400 * MIB), devices)["reason"]
    assert reason.startswith("The primary is too small for its own buffers")
    assert "head CPU has" in reason


def test_a_pool_that_is_short_is_named() -> None:
    pool = {"pool": "box/ram", "pool_usable": 900 * MIB}
    devices = [
        device("box", 900 * MIB, "10.0.0.1:1024", "CUDA0", **pool),
        device("box", 900 * MIB, "10.0.0.1:1025", "Vulkan0", **pool),
    ]
    reason = plan(model(), devices)["reason"]
    assert re.search(
        r"The devices of pool box/ram share one memory: they need [\d .]+ MiB .* short by [\d .]+ MiB", reason
    )


def test_devices_of_a_pool_need_not_say_how_large_it_is() -> None:
    """Optional keys may be absent; the pool is then as large as its largest device, or as another device says."""
    pair = [device("a", 500 * MIB, pool="p"), device("a", 900 * MIB, None, "CUDA1", pool="p")]
    bare = [{key: value for key, value in each.items() if key != "pool_usable"} for each in pair]
    small = [device("a", 500 * MIB, pool="p", pool_usable=900 * MIB), {**pair[1], "pool_usable": None}]
    assert not plan(model(), bare)["feasible"]  # 1,000 MiB of layers, 1,400 MiB of devices, 900 MiB of memory
    assert plan(model([layer(100 * MIB) for _number in range(7)]), bare)["feasible"]
    assert plan(model(), bare)["reason"] == plan(model(), small)["reason"]


def test_a_reason_offers_only_what_would_help() -> None:
    """Contradictory limits are no matter of context, and a device may have less than its margin."""
    reason = plan(model(), workers(1, GIB, max_units=3))["reason"]
    assert reason == "The devices may hold 3 units by max_units, but the model has 11; raise max_units."
    reason = plan(model(), workers(1, 0))["reason"]
    assert "the only device has 0.0 MiB after the margin, short by" in reason
    assert "of 11 units, has less than its margin, short by" in reason
    reason = plan(model(), [*workers(1, 4 * GIB), device("p", GIB, name="CPU")], cache_ram=3 * GIB)["reason"]
    assert "(cache_ram is 3 072.0 MiB of it)" in reason


def test_memory_that_devices_share_is_counted_once_in_the_reason() -> None:
    shared = [device("a", 700 * MIB, f"10.0.0.2:{port}", pool="p") for port in (1, 2, 3)]
    reason = plan(model(), shared)["reason"]
    assert "the 3 devices have 636.0 MiB after the margins, memory that they share counted once, short by" in reason


def test_a_device_that_cannot_hold_its_min_units_is_named_at_once() -> None:
    """Such a plan was searched for through all orders of the other devices, for minutes."""
    tangled = [
        device(f"w{k}", (600 + 9 * n) * MIB, f"10.0.{k}.{n}:1", pool=f"w{k}", pool_usable=900 * MIB)
        for k in range(5)
        for n in range(3)
    ]
    begun = time.process_time()
    made = plan(model(), [*tangled, device("tiny", 62 * MIB, "10.0.9.1:1", min_units=1)])
    assert "tiny CUDA0 (10.0.9.1:1) needs" in made["reason"]
    assert "(its min_units is 1; lower it)" in made["reason"]
    assert time.process_time() - begun < 5


def test_cache_sharing_layers_stay_together_unless_nothing_else_fits() -> None:
    """gemma3n: borrowed caches would cross the network for every token."""
    layers = [layer(100 * MIB) for _number in range(6)]
    layers += [layer(100 * MIB, caches=[], borrows_from=5) for _number in range(4)]
    first, second = workers(2, 900 * MIB)
    made = plan(model(layers), [first, second])
    assert made["tensor_split"] in {"3,8", "4,7", "5,6"}
    assert "shared_cache_split" not in codes(made)
    tight = plan(model(layers), workers(4, 450 * MIB))
    assert "shared_cache_split" in codes(tight)
    borrowing = [entry for entry in tight["devices"] if entry["first_layer"] > 5]
    assert max(entry["compute"] for entry in borrowing) > made["devices"][1]["compute"]


@pytest.mark.parametrize("name", ["gemma3n", "gemma4e4b"])
@pytest.mark.parametrize("objective", ["latency", "memory", "prefill"])
def test_real_models_are_not_split_behind_the_shared_cache(name: str, objective: str) -> None:
    """Surprise 4 of the memory rules: 581 MiB of compute become 2346 where borrowed caches cross the network."""
    given = measured.model(name)
    devices = [*workers(3, 8 * GIB, link_mbps=1000), device("head", 8 * GIB)]
    made = plan(given.to_dict(), devices, objective=objective)
    assert made["feasible"]
    assert "shared_cache_split" not in codes(made)
    place = [number for number, entry in enumerate(made["devices"]) for _unit in range(entry["units"])]
    borrowing = [(index, each.borrows_from) for index, each in enumerate(given.layers) if each.borrows_from is not None]
    assert borrowing
    assert all(place[index] == place[lender] for index, lender in borrowing)


def test_a_search_that_was_cut_short_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tangled pools do not hang a playbook; the plan keeps every limit and says that it may not be the best."""
    monkeypatch.setattr(_plan_input, "EFFORT", 300)
    for name in ("_THOROUGH", "_MIDDLE"):
        monkeypatch.setattr(_optimise, name, _optimise._QUICK)
    devices = workers(6, 500 * MIB)
    for number, item in enumerate(devices):
        item.update(pool=f"p{number % 2}", pool_usable=650 * MIB, bandwidth=1e9 * (number + 1))
    made = plan(model(), devices)
    assert "not_proved" in codes(made)
    assert not made["certificate"]["proved"]
    assert made["predicted"]["lower_bound_ms"] < made["predicted"]["ms_per_token"]
    for pool in (0, 1):
        held = [entry["total"] for entry in made["devices"] if int(entry["host"][1:]) % 2 == pool]
        assert sum(held) + 64 * MIB <= 650 * MIB
    monkeypatch.undo()
    best = plan(model(), devices)
    assert "not_proved" not in codes(best)
    assert best["certificate"]["gap"] == 0
    assert made["predicted"]["lower_bound_ms"] <= best["predicted"]["ms_per_token"]


def test_context_beyond_training_is_warned_of() -> None:
    assert "context_beyond_training" in codes(plan(model(n_ctx_train=1024), workers(1, 4 * GIB)))


# --- Measured models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", measured.NAMES)
def test_the_plan_promises_what_llama_cpp_took(name: str) -> None:
    """Weights and context of every device to the byte, compute not less, for the splits that were measured."""
    given = measured.model(name).to_dict()
    checked = 0
    for run in measured.runs(name):
        sizes = [len(item.layers) + item.output for item in run.devices]
        if run.kind == "extra" or run.draft_mtp or 0 in sizes:
            continue
        devices = workers(len(sizes), 1 << 50)
        for item, count in zip(devices, sizes):
            item["min_units"] = item["max_units"] = count
            item["device"] = "CPU"
        params = run.params
        made = plan_split(
            given,
            devices,
            n_ctx=params.n_ctx,
            n_parallel=params.n_parallel,
            type_k=params.type_k,
            type_v=params.type_v,
            n_batch=params.n_batch,
            n_ubatch=params.n_ubatch,
            flash_attn=params.flash_attn,
            kv_unified=params.kv_unified,
        )
        assert [entry["weights"] for entry in made["devices"]] == [item.model_bytes for item in run.devices], run.name
        assert [entry["kv"] for entry in made["devices"]] == [item.context_bytes for item in run.devices], run.name
        for entry, held in zip(made["devices"], run.devices):
            # llama-fit-params reserves logits for the whole micro batch, llama-server for its slots only.
            if run.kind == "server" or not held.output:
                assert entry["compute"] >= (held.compute_real_bytes or 0), run.name
        checked += 1
    assert checked >= 30


@pytest.mark.parametrize("name", [*measured.NAMES, *measured.FAMILIES])
def test_one_layer_of_each_kind_needs_the_same_buffers(name: str) -> None:
    """The planner asks the compute rules about a shortened model; they must not notice."""
    whole = measured.model(name)
    short = _plan_input._one_of_each_kind(whole)
    params = measured.runs(name)[0].params if name in measured.NAMES else measured.estimates(name)[0].params
    for pipelining in (True, False):
        for first in (True, False):
            for output in (True, False):
                sizes = [
                    _memory.compute_bytes(
                        each,
                        params,
                        n_devices_listed=2,
                        is_first=first,
                        is_last_with_output=output,
                        pipelining=pipelining,
                    )
                    for each in (whole, short)
                ]
                assert sizes[0] == sizes[1]
        host = [_memory.host_compute_bytes(each, params, pipelining) for each in (whole, short)]
        assert host[0] == host[1]
    held = [_memory.host_compute_bytes(each, params, False, range(len(each.layers))) for each in (whole, short)]
    assert held[0] == held[1]


# --- Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"n_ctx": 0}, "n_ctx is 0"),
        ({"n_ctx": "8192"}, "n_ctx is '8192', a str"),
        ({"n_ctx": True}, "n_ctx is True"),
        ({"n_parallel": -1}, "n_parallel is -1"),
        ({"kv_unified": "yes"}, "kv_unified is 'yes'"),
        ({"flash_attn": "maybe"}, "flash_attn is 'maybe'"),
        ({"objective": "speed"}, "objective is 'speed'; it must be one of latency, memory, prefill"),
        ({"margin": -1}, "margin is -1"),
        ({"margin": 0.02}, "margin is 0.02"),
        ({"cache_ram": 2048}, "less than 1 MiB"),
        ({"n_ctx": 1 << 31}, "n_ctx is 2147483648, and llama.cpp takes at most 2147483647"),
        ({"type_k": ["f16"]}, "type_k is ['f16'], a list; it must be text such as f16"),
        ({"type_v": None}, "type_v is None"),
        ({"flash_attn": 1}, "flash_attn is 1, a int; it must be text such as auto"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(FleetError, match=re.escape(text)):
        plan(model(), workers(1, GIB), **options)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"n_embd": 0}, "model.n_embd is 0"),
        ({"n_embd": 10**400}, "model.n_embd is 2^63 or more"),
        ({"layers": [layer(MIB, active=10**400)], "n_layer": 1}, "model.layers[0].active is 2^63 or more"),
        ({"layers": [layer(MIB), layer(MIB, borrows_from=1)], "n_layer": 2}, "model.layers[1].borrows_from is 1"),
    ],
)
def test_models_that_cannot_be_are_named(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(FleetError, match=re.escape(text)):
        plan(model(**changed), workers(1, GIB))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"endpoint": "[fd00::2]:50052"}, "IPv6"),
        ({"endpoint": "node.lan:50052"}, "names are not resolved"),
        ({"endpoint": "10.0.0.2:65536"}, "outside 1 to 65535"),
        ({"endpoint": "10.0.0.2:1:2"}, "more than one colon"),
        ({"device": "CUDA0,CUDA1"}, "letters and a number"),
        ({"host": None}, "host is None"),
        ({"usable": None}, "usable is None"),
        ({"usable": "8 GiB"}, "usable is '8 GiB'"),
        ({"usable": -1}, "usable is -1"),
        ({"index": 1}, "index is 1, but the endpoint has 1 devices"),
        ({"bandwidth": 0}, "bandwidth is 0"),
        ({"rtt_ms": "1"}, "rtt_ms is '1'"),
        ({"priority": True}, "priority is True"),
        ({"min_units": 3, "max_units": 2}, "min_units is 3, above max_units 2"),
        ({"pool": 5}, "pool is 5"),
    ],
)
def test_bad_devices_are_named(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(FleetError, match=re.escape(text)):
        plan(model(), [{**device("w", GIB, "10.0.0.2:18711"), **changed}])


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        ([], "no devices"),
        ("CUDA0", "devices are a str"),
        ([7], "device 0 is 7"),
        (
            [device("a", GIB, "10.0.0.2:1"), device("b", GIB, "10.0.0.2:1")],
            "a CUDA0 (10.0.0.2:1) and b CUDA0 (10.0.0.2:1)",
        ),
        ([device("a", GIB), device("a", GIB)], "a CUDA0 and a CUDA0 are the same device"),
        ([device("a", GIB, None, "CPU"), device("b", GIB, None, "CPU0")], "both the primary's CPU"),
        (
            [device("a", GIB, pool="p"), device("a", GIB, None, "CUDA1", pool="p", pool_usable=2 * GIB)],
            "pool_usable must be the same",
        ),
    ],
)
def test_bad_lists_are_named(devices: Any, text: str) -> None:
    with pytest.raises(FleetError, match=re.escape(text)):
        plan(model(), devices)


@pytest.mark.parametrize("given", [None, [], "m.gguf", {}, {**model(), "n_layer": 3}, {**model(), "layers": "many"}])
def test_bad_models_are_named(given: Any) -> None:
    with pytest.raises(FleetError, match="gguf_info"):
        plan(given, workers(1, GIB))


def test_the_model_may_be_what_gguf_info_returned() -> None:
    assert Model.from_dict(model()).n_layer == 10


def test_a_hybrid_is_not_cut_between_attention_on_the_cpu_and_recurrence_behind_it() -> None:
    """llama.cpp would give up flash attention on all devices there: lfm2 then takes 556 MiB in place of 69."""
    given = measured.model("lfm2").to_dict()  # its layers: R R A R A R
    possible = [
        units
        for units in range(1, len(given["layers"]) + 1)
        for own in [device("head", 30 * GIB, None, "CPU", min_units=units, max_units=units)]
        if plan_split(given, [own, *workers(1, 30 * GIB)], n_ctx=4096)["feasible"]
    ]
    assert possible == [1, 2, 4, 6]
