# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pages of docs/ that say what the code does, and the plan over the recorded homelab."""

from __future__ import annotations

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import kind_table, reserve_table
from ansible_collections.llamafleet.rpc.tests.unit import pages


@pytest.mark.parametrize("name", sorted(pages.PAGES))
def test_the_page_is_what_the_code_says(name: str) -> None:
    said = (pages.DOCS / name).read_text()
    assert said == pages.PAGES[name](), f"write docs/{name} anew: python -m {pages.__name__}"


def test_the_memory_rules_show_both_tables() -> None:
    said = (pages.DOCS / "memory-rules.md").read_text()
    assert reserve_table() in said
    assert kind_table() in said


def test_the_homelab_is_four_machines_of_four_backends() -> None:
    records, rows = pages.homelab()
    budgets = {
        (record["host"], device["device"]): device["budget"]
        for record in records
        for device in record["instances"][0]["devices"]
    }
    gib = 1 << 30
    assert budgets["strix", "ROCm0"] == 96 * gib
    assert 107 * gib < budgets["studio", "MTL0"] < 108 * gib
    assert 22 * gib < budgets["gaming", "CUDA0"] < 23 * gib
    assert 90 * gib < budgets["server", "CPU"] < 96 * gib
    assert len(rows) == 2 + 5


@pytest.mark.parametrize("objective", ["latency", "memory"])
def test_the_plan_over_the_homelab_fits_every_device_and_pool(objective: str) -> None:
    plan = pages.homelab_plans()[objective]
    assert plan["feasible"]
    assert sum(device["units"] for device in plan["devices"]) == 81
    for device in plan["devices"]:
        assert device["total"] <= device["usable"]
        assert device["headroom"] >= max(64 << 20, device["usable"] // 50) or device["headroom"] >= 64 << 20
    shares = [int(part) for part in plan["tensor_split"].split(",")]
    assert sum(shares) == plan["n_gpu_layers"]
    assert len(shares) == len(plan["device_order"])
