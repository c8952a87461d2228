# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What would move against a kept plan, how many bytes, and what that gains."""

from __future__ import annotations

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._companions import plan_with
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan_changes import (
    PlanChangesError,
    change_lines,
    plan_changes,
)
from ansible_collections.llamafleet.rpc.tests.unit.plan_world import MIB, device, layer, model, workers

MODEL = model()
OPTIONS = {"n_ctx": 2048, "n_ubatch": 64}
HEAD = device("head", 4096 * MIB, name="CPU", max_units=0)


def test_the_same_plan_moves_nothing() -> None:
    devices = [HEAD, *workers(2, 800 * MIB)]
    plan = plan_with(MODEL, devices, **OPTIONS)
    changes = plan_changes(MODEL, devices, plan, plan, **OPTIONS)
    assert (changes["moves"], changes["bytes"], changes["settings"]) == ([], 0, {})
    assert changes["ms_kept"] == changes["ms_new"]
    assert change_lines(changes) == ["no layer would move: the split is the one that the primary was started with"]


def test_a_new_device_takes_layers_and_the_gain_is_that_of_today() -> None:
    """The kept plan promised another speed (the disk was slow that day): only the devices of today count."""
    before = [HEAD, *workers(2, 800 * MIB)]
    kept = plan_with(MODEL, before, **OPTIONS)
    kept["predicted"]["ms_per_token"] = 1e6
    fast = device("fast", 800 * MIB, "10.0.0.9:18711", bandwidth=400e9)
    devices = [*before, fast]
    plan = plan_with(MODEL, devices, **OPTIONS)
    changes = plan_changes(MODEL, devices, kept, plan, **OPTIONS)
    held = next(entry for entry in plan["devices"] if entry["host"] == "fast")
    to_fast = [move for move in changes["moves"] if move["target"] == "fast CUDA0"]
    assert sum(move["bytes"] for move in to_fast) == held["weights"]
    assert changes["ms_new"] < changes["ms_kept"] < 1000
    assert changes["bytes"] == sum(move["bytes"] for move in changes["moves"])
    lines = change_lines(changes)
    assert any("would move from w" in line and "to fast CUDA0: " in line for line in lines)
    assert "ms per token predicted, a gain of" in lines[-1]


def test_the_output_and_settings_are_named() -> None:
    kept = plan_with(MODEL, [HEAD, device("old", 4096 * MIB, "10.0.0.8:18711")], **OPTIONS)
    devices = [HEAD, device("new", 4096 * MIB, "10.0.0.9:18711")]
    options = {**OPTIONS, "n_ctx": 4096, "type_k": "q8_0", "type_v": "q8_0"}
    changes = plan_changes(MODEL, devices, kept, plan_with(MODEL, devices, **options), **options)
    assert changes["settings"] == {"n_ctx": [2048, 4096], "type_k": ["f16", "q8_0"], "type_v": ["f16", "q8_0"]}
    assert not changes["kept_fits"]
    assert change_lines(changes)[-2:] == [
        "layers 0-9 and the output would move from old CUDA0 to new CUDA0: 1 010.0 MiB",
        "1 010.0 MiB would move; the kept split does not fit any more",
    ]


def test_runs_are_kept_apart_by_where_they_go() -> None:
    kept = plan_with(MODEL, [HEAD, *workers(1, 4096 * MIB)], **OPTIONS)
    devices = [HEAD, *workers(3, 480 * MIB)]
    changes = plan_changes(MODEL, devices, kept, plan_with(MODEL, devices, **OPTIONS), **OPTIONS)
    assert [(move["source"], move["target"]) for move in changes["moves"]] == [
        ("w0 CUDA0", "w1 CUDA0"),
        ("w0 CUDA0", "w2 CUDA0"),
    ]
    first, second = changes["moves"]
    assert first["last"] + 1 == second["first"]
    assert second["output"] and second["last"] == 9


def test_the_output_matrix_that_goes_to_the_primary_is_a_move_of_its_own() -> None:
    devices = [HEAD, *workers(2, 4096 * MIB, min_units=1)]
    plan = {**plan_with(MODEL, devices, **OPTIONS), "output_on_primary": None}
    there = {**plan, "output_on_primary": {"weights": 9 * MIB, "ms": 0.1, "override": "^output.weight=CPU"}}
    holder = next(entry["host"] for entry in plan["devices"] if entry["output"])
    lines = {
        name: change_lines(plan_changes(MODEL, devices, kept, new, **OPTIONS))[0]
        for name, kept, new in (("away", plan, there), ("back", there, plan), ("stays", there, there))
    }
    assert lines == {
        "away": f"the output would move from {holder} CUDA0 to the primary's CPU: 9.0 MiB",
        "back": f"the output would move from the primary's CPU to {holder} CUDA0: 9.0 MiB",
        "stays": "no layer would move: the split is the one that the primary was started with",
    }


def test_a_plan_of_another_model_is_not_compared() -> None:
    devices = [HEAD, *workers(1, 4096 * MIB)]
    kept = plan_with(model([layer(MIB) for _number in range(3)]), devices, **OPTIONS)
    with pytest.raises(PlanChangesError, match=r"spreads 4 units and /srv/m\.gguf has 11: it is"):
        plan_changes(MODEL, devices, kept, plan_with(MODEL, devices, **OPTIONS), **OPTIONS)
    with pytest.raises(PlanChangesError, match="the kept plan is none"):
        plan_changes(MODEL, devices, None, plan_with(MODEL, devices, **OPTIONS), **OPTIONS)
