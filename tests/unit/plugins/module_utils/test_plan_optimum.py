# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan is the optimum: judged by trying every split in every order. Nothing of the planner is used to judge it."""

from __future__ import annotations

import random
from operator import attrgetter
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils import _memory
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan import plan_split
from ansible_collections.llamafleet.rpc.tests.unit import judge, measured, plan_world, random_fleets
from ansible_collections.llamafleet.rpc.tests.unit.plan_world import MIB, device, layer
from hypothesis import given, settings
from hypothesis import strategies as st

MARGIN = 3 * MIB


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A random model of few uneven layers and a few random devices, pools shared at random."""
    whole = st.integers
    layers: list[dict[str, Any]] = []
    for _number in range(draw(whole(1, 6))):
        size = draw(whole(0, 40)) * MIB + draw(whole(0, MIB))
        window = draw(st.sampled_from([None, None, 256]))
        width = draw(st.sampled_from([0, 32, 1024]))
        caches = [{"k_width": width, "v_width": width, "window": window, "ratio": 1, "per_sequence": False}]
        kept = layer(size, active=draw(whole(0, size)), caches=caches)
        lenders = [k for k, each in enumerate(layers) if each["caches"]]
        if lenders and draw(whole(0, 5)) == 0:
            kept = {**kept, "caches": [], "borrows_from": draw(st.sampled_from(lenders))}
        layers.append(kept)
    output = draw(whole(0, 30)) * MIB
    model = plan_world.model(
        layers,
        output_bytes=output,
        head_bytes=draw(st.sampled_from([None, output, max(0, output - 1000)])),
        input_bytes=draw(whole(0, 10)) * MIB,
        per_device_bytes=draw(st.sampled_from([0, 0, 5 * MIB])),
        n_vocab=draw(st.sampled_from([1000, 200000])),
    )
    count = draw(whole(1, 4))
    # Sizes near what the model needs, so that budgets and pools bind without ruling everything out.
    total = sum(each["weights"] for each in layers) + model["output_bytes"] + 8 * MIB
    pools = [f"pool{k}" for k in range(draw(whole(1, 3)))]
    sizes = {pool: total * draw(whole(30, 130)) // 100 + draw(whole(0, 4)) * MIB for pool in pools}
    shared = draw(whole(0, 3)) > 0
    devices = []
    for number in range(count):
        usable = total * draw(whole(15, 140)) // 100
        changed: dict[str, Any] = {
            "bandwidth": draw(whole(1, 50)) * 1e9,
            "priority": draw(st.sampled_from([None, None, None, 1, 90])),
            "min_units": draw(st.sampled_from([None, None, None, None, 1, 2])),
            "max_units": draw(st.sampled_from([None, None, None, 2, 4])),
        }
        if shared and draw(whole(0, 3)):
            pool = draw(st.sampled_from(pools))
            changed.update(pool=pool, pool_usable=sizes[pool])
        local = number == count - 1 and draw(st.booleans())
        if not local:
            changed.update(rtt_ms=draw(whole(0, 40)) / 10, overhead_ms=draw(whole(0, 10)) / 10)
            if draw(whole(0, 4)) == 0:
                changed["link_mbps"] = draw(st.sampled_from([10, 1000]))
        devices.append(device(f"h{number}", usable, None if local else f"10.0.0.{number + 1}:1024", **changed))
    if draw(st.booleans()):
        changed = {"bandwidth": draw(whole(1, 50)) * 1e9, "max_units": draw(st.sampled_from([None, None, 0, 3]))}
        if shared and draw(whole(0, 3)):
            changed.update(pool=pools[0], pool_usable=sizes[pools[0]])
        devices.insert(0, device("head", total * draw(whole(20, 140)) // 100 + 10 * MIB, None, "CPU", **changed))
    return model, devices


def planned(model: dict[str, Any], devices: list[dict[str, Any]], objective: str, n_ctx: int) -> dict[str, Any]:
    return plan_split(model, devices, n_ctx=n_ctx, n_ubatch=64, objective=objective, margin=MARGIN, cache_ram=0)


def held_by(plan: dict[str, Any], devices: list[dict[str, Any]]) -> tuple[tuple[int, int], ...]:
    numbers = {(item["host"], item["device"]): k for k, item in enumerate(devices)}
    return tuple((numbers[entry["host"], entry["device"]], entry["units"]) for entry in plan["devices"])


def check(model: dict[str, Any], devices: list[dict[str, Any]], objective: str, n_ctx: int) -> None:
    params = _memory.ContextParams(n_ctx=n_ctx, n_ubatch=64)
    splits = judge.every_split(model, devices, params, MARGIN)
    plan = planned(model, devices, objective, n_ctx)
    assert plan["feasible"] == bool(splits), plan["reason"]
    if not splits:
        assert plan["reason"]
        assert plan["devices"] == []
        return
    held, head = held_by(plan, devices), plan["output_on_primary"] is not None
    chosen = next((split for split in splits if (split.held, split.head) == (held, head)), None)
    assert chosen is not None, "the plan breaks a budget or a limit"
    value = attrgetter({"latency": "sum_ms", "memory": "fullest", "prefill": "slowest_ms"}[objective])
    best = min(value(split) for split in splits)
    found = judge.best(model, devices, params, MARGIN, objective)
    assert found is not None
    assert abs(found - best) <= best * 1e-9, "the judges disagree"
    assert value(chosen) <= best * (1 + 1e-8) + 1e-9
    assert abs(plan["predicted"]["ms_per_token"] - chosen.sum_ms) <= 1e-4
    equals = [split for split in splits if value(split) <= best * (1 + 1e-12)]
    assert chosen.sum_ms <= min(split.sum_ms for split in equals) * (1 + 1e-6) + 1e-6, "a quicker plan is as good"
    check_certificate(plan, best, min(split.sum_ms for split in splits))
    check_split(plan, model)


def check_certificate(plan: dict[str, Any], best: float, quickest: float) -> None:
    """The bounds hold for every split there is; at this size nothing stays unproved."""
    certificate = plan["certificate"]
    assert certificate["proved"]
    assert certificate["gap"] == plan["predicted"]["gap"] == 0
    assert certificate["lower_bound"] == certificate["value"]
    assert abs(certificate["value"] - best) <= 1e-5 + best * 1e-8
    assert plan["predicted"]["lower_bound_ms"] <= quickest + 1e-5


def check_split(plan: dict[str, Any], model: dict[str, Any]) -> None:
    """Law 1: llama.cpp's float32 rule puts every unit where the plan says."""
    listed = [entry for entry in plan["devices"] if entry["rpc_name"] in plan["device_order"]]
    split = [int(part) for part in plan["tensor_split"].split(",")] if listed else []
    assert split == [entry["units"] for entry in listed]
    assert sum(split) == plan["n_gpu_layers"]
    expected: list[int | None] = [None] * (model["n_layer"] + 1 - sum(split))
    for number, units in enumerate(split):
        expected += [number] * units
    if split:
        assert plan_world.assigned(split, model["n_layer"], plan["n_gpu_layers"]) == expected


@settings(max_examples=700, deadline=None)
@given(worlds())
def test_latency_is_the_least_of_all_splits(world: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    check(*world, "latency", 256)


@settings(max_examples=500, deadline=None)
@given(worlds())
def test_memory_leaves_the_largest_least_headroom(world: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    check(*world, "memory", 2048)


@settings(max_examples=500, deadline=None)
@given(worlds())
def test_prefill_has_the_quickest_slowest_device(world: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    check(*world, "prefill", 256)


@pytest.mark.parametrize("objective", ["latency", "memory", "prefill"])
def test_real_models_on_random_fleets(objective: str) -> None:
    """Up to 8 devices and all layers of the measured models; ``make bench`` does the same with 1,000 fleets."""
    dice = random.Random(objective)
    for _fleet in range(12):
        given_model = measured.model(dice.choice(measured.NAMES)).to_dict()
        devices = random_fleets.fleet(dice, given_model, dice.randint(2, 8))
        n_ctx = random_fleets.N_CTX
        plan = plan_split(given_model, devices, n_ctx=n_ctx, objective=objective, margin=MARGIN, cache_ram=0)
        best = judge.best(given_model, devices, _memory.ContextParams(n_ctx=n_ctx), MARGIN, objective)
        assert plan["feasible"] == (best is not None)
        if best is not None:
            assert plan["certificate"]["value"] == pytest.approx(best, rel=1e-5)
            assert plan["certificate"]["proved"]
            check_split(plan, given_model)


@pytest.mark.parametrize("objective", ["latency", "memory", "prefill"])
def test_the_bound_of_a_large_fleet_is_below_every_plan(objective: str) -> None:
    """Nine devices get no proof, but the bound holds: the optimum is not below it, and the plan not far above."""
    dice = random.Random(objective)
    for _fleet in range(2):
        given_model = measured.model(dice.choice(["llama-1b-tied", "qwen2-0.5b-tied", "deepseek2-lite"])).to_dict()
        devices = random_fleets.fleet(dice, given_model, 9)
        n_ctx = random_fleets.N_CTX
        plan = plan_split(given_model, devices, n_ctx=n_ctx, objective=objective, margin=MARGIN, cache_ram=0)
        best = judge.best(given_model, devices, _memory.ContextParams(n_ctx=n_ctx), MARGIN, objective)
        assert best is not None
        certificate = plan["certificate"]
        assert certificate["lower_bound"] <= best * (1 + 1e-6) <= certificate["value"] * (1 + 1e-5)
        assert certificate["value"] <= best * 1.1


def test_what_each_device_saves_is_the_plan_without_it() -> None:
    """Option alternatives: the same question asked again with the device barred, or made to hold a unit."""
    given_model = measured.model("llama-8b-q4km").to_dict()
    devices = random_fleets.fleet(random.Random(4), given_model, 5)
    options = {"n_ctx": 4096, "margin": MARGIN, "cache_ram": 0}
    plan = plan_split(given_model, devices, alternatives=True, **options)
    params = _memory.ContextParams(n_ctx=4096)
    found = []
    for number, entry in enumerate(plan["devices_compared"]):
        item = next(each for each in devices if (each["host"], each["device"]) == (entry["host"], entry["device"]))
        changed = {"max_units": 0} if entry["used"] else {"min_units": 1}
        others = [{**each, **changed} if each is item else each for each in devices]
        best = judge.best(given_model, others, params, MARGIN, "latency")
        shown = entry["without_it" if entry["used"] else "with_it"]
        assert (shown is None) == (best is None), number
        if best is not None:
            assert shown == pytest.approx(best, rel=1e-5)
            assert entry["saves"] >= 0 if entry["used"] else entry["saves"] <= 0
            found.append(best)
    assert plan["second_best"]["ms_per_token"] == pytest.approx(min(found), rel=1e-5)
    assert plan["second_best"]["slower_by"] >= 0
    for loss in plan["without"]:
        left = [{**each, "max_units": 0} if each["host"] == loss["host"] else each for each in devices]
        best = judge.best(given_model, left, params, MARGIN, "latency")
        assert loss["feasible"] == (best is not None)
        if best is not None:
            assert loss["ms_per_token"] == pytest.approx(best, rel=1e-5)
            lost = sum(each["units"] for each in plan["devices"] if each["host"] == loss["host"])
            assert loss["units_moved"] >= lost
            assert loss["bytes_moved"] > 0
    assert {loss["host"] for loss in plan["without"]} == {
        entry["host"] for entry in plan["devices"] if entry["endpoint"] is not None
    }
