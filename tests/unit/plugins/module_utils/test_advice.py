# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What it would take, judged by planning every smaller change as well."""

from __future__ import annotations

import random
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._advice import (
    CTX_STEP,
    MEMORY_STEP,
    NEW_WORKER,
    advice_lines,
    advise,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan import plan_split
from ansible_collections.llamafleet.rpc.tests.unit.plan_world import GIB, MIB, device, layer, model, workers

TYPES = ("f16", "q8_0", "q4_0")


def fits(known: dict[str, Any], devices: list[dict[str, Any]], n_ctx: int, **options: Any) -> bool:
    return bool(plan_split(known, devices, n_ctx=n_ctx, **options)["feasible"])


def grown(devices: list[dict[str, Any]], pool: str, size: int) -> list[dict[str, Any]]:
    return [
        {**each, "usable": each["usable"] + size, "pool_usable": each["pool_usable"] + size}
        if each["pool"] == pool
        else each
        for each in devices
    ]


def least_more(known: dict[str, Any], devices: list[dict[str, Any]], **options: Any) -> int | None:
    """The fewest steps of memory in a single pool that cure it, by trying them all from 1 on."""
    pools = {each["pool"] for each in devices}
    for steps in range(1, 60):
        if any(fits(known, grown(devices, pool, steps * MEMORY_STEP), **options) for pool in pools):
            return steps
    return None


def world(seed: int) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """A small model that nearly fits a small fleet, sometimes with a shared memory and without a CPU."""
    rng = random.Random(seed)
    width = rng.choice((256, 512, 1024))
    cache = {"k_width": width, "v_width": width, "window": None, "ratio": 1, "per_sequence": False}
    layers = [layer(rng.randint(20, 160) * MIB, caches=[cache]) for _number in range(rng.randint(3, 8))]
    known = model(layers, n_ctx_train=rng.choice((4096, 16384)))
    devices = workers(rng.randint(1, 3), rng.randint(200, 500) * MIB)
    if rng.random() < 0.7:
        devices.insert(0, device("head", rng.randint(100, 600) * MIB, name="CPU"))
    if rng.random() < 0.4:
        devices.append(device("head", rng.randint(100, 400) * MIB))
    if rng.random() < 0.3 and len(devices) > 1:
        for each in devices[:2]:
            each.update(pool="shared", pool_usable=max(other["usable"] for other in devices[:2]))
    options = {"n_ctx": rng.choice((1000, 2048, 8192, 20000)), "n_ubatch": 64, "type_k": "f16", "type_v": "f16"}
    return known, devices, options


@pytest.mark.parametrize("seed", range(60))
def test_every_cure_works_and_one_step_less_does_not(seed: int) -> None:
    known, devices, options = world(seed)
    advice = advise(known, devices, **options)
    assert advice["feasible"] == fits(known, devices, **options)

    most = max(options["n_ctx"], known["n_ctx_train"])
    sizes = [*range(CTX_STEP, most + 1, CTX_STEP), options["n_ctx"], most]
    fitting = [size for size in sizes if fits(known, devices, **{**options, "n_ctx": size})]
    assert advice["largest_ctx"] == (max(fitting) if fitting else None)

    if advice["feasible"]:
        assert not advice["changes"]
        return
    changes = {change["change"]: change for change in reversed(advice["changes"])}
    order = [change["change"] for change in advice["changes"]]
    assert order == sorted(order, key=("cache_type", "context", "memory").index)
    types = next((name for name in TYPES if fits(known, devices, **{**options, "type_k": name, "type_v": name})), None)
    assert changes.get("cache_type", {}).get("type_k") == types
    if fitting:
        assert changes["context"]["n_ctx"] == max(fitting)
        assert changes["context"]["type_k"] == "f16"
    steps = least_more(known, devices, **options)
    rows = changes["memory"]["memory"]
    if steps is not None:
        assert [row["more"] for row in rows] == [steps * MEMORY_STEP]


def test_the_new_worker_is_as_small_as_it_may_be() -> None:
    known, devices, options = model(), workers(1, 800 * MIB), {"n_ctx": 2048, "n_ubatch": 64}
    row = advise(known, devices, **options)["changes"][-1]["memory"][0]
    assert row["host"] == NEW_WORKER["host"]
    assert fits(known, [*devices, {**NEW_WORKER, "usable": row["usable"], "pool": None}], **options)
    less = {**NEW_WORKER, "usable": row["usable"] - MEMORY_STEP, "pool": None}
    assert not fits(known, [*devices, less], **options)


def test_of_two_equal_cures_the_first_host_is_named() -> None:
    changes = advise(model(), workers(3, 300 * MIB), n_ctx=2048, n_ubatch=64)["changes"]
    assert [change["memory"][0]["host"] for change in changes] == ["w0", NEW_WORKER["host"]]


def test_a_primary_too_small_for_its_own_buffers_needs_memory_as_well() -> None:
    """The model fits nowhere and the primary's CPU cannot hold the embedding: both are told, and together they do."""
    known = model(input_bytes=200 * MIB)
    devices = [device("head", 100 * MIB, name="CPU", max_units=0), *workers(1, 300 * MIB)]
    options = {"n_ctx": 1024, "n_ubatch": 64}
    change = next(change for change in advise(known, devices, **options)["changes"] if change["change"] == "memory")
    assert [row["host"] for row in change["memory"]] == ["head", "w0"]
    sizes = {"head": change["memory"][0]["more"], "w0": change["memory"][1]["more"]}

    def with_more(**less: int) -> bool:
        changed = devices
        for each in devices:
            changed = grown(changed, each["pool"], sizes[each["host"]] - less.get(each["host"], 0))
        return fits(known, changed, **options)

    assert with_more()
    assert not with_more(head=MEMORY_STEP)
    assert not with_more(w0=MEMORY_STEP)


def test_a_model_that_caches_keys_only_gets_both_types() -> None:
    cache = {"k_width": 4096, "v_width": 0, "window": None, "ratio": 1, "per_sequence": False}
    known = model([layer(10 * MIB, caches=[cache]) for _number in range(4)])
    first = advise(known, workers(1, 500 * MIB), n_ctx=16384, n_ubatch=64)["changes"][0]
    assert (first["change"], first["type_k"], first["type_v"]) == ("cache_type", "q8_0", "q8_0")


def test_flash_attention_off_rules_quantised_caches_out() -> None:
    cache = {"k_width": 4096, "v_width": 4096, "window": None, "ratio": 1, "per_sequence": False}
    known = model([layer(10 * MIB, caches=[cache]) for _number in range(4)])
    changes = advise(known, workers(1, 1024 * MIB), n_ctx=16384, n_ubatch=16, flash_attn="off")["changes"]
    assert [change["change"] for change in changes] == ["context", "memory", "memory"]
    assert not any(change["types_changed"] for change in changes)


def test_lines_for_people() -> None:
    known = model(n_ctx_train=8192)
    assert advice_lines(advise(known, workers(1, 8 * GIB), n_ctx=2048), 8192) == [
        "largest context that fits: 8192 tokens, all that the model was trained for"
    ]
    lines = advice_lines(advise(known, workers(1, 800 * MIB), n_ctx=2048, n_ubatch=64))
    assert lines[0] == "largest context that fits: none"
    assert lines[1].startswith("cheapest change that would make it fit: 320.0 MiB more for w0 CUDA0 (then 1 120.0 MiB")
    assert lines[2].startswith("or: a new worker that lends ")
    assert lines[2].endswith(" tokens/s")


def test_no_single_change_helps_where_units_are_limited() -> None:
    known = model()
    advice = advise(known, [device("head", 8 * GIB, name="CPU", max_units=0), *workers(1, GIB, max_units=2)], n_ctx=512)
    assert [change["memory"][0]["host"] for change in advice["changes"]] == [NEW_WORKER["host"]]
