# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Random fleets of 2 to 15 devices for the measured models, some of them with memories that several devices share."""

from __future__ import annotations

import random
from typing import Any

from ansible_collections.llamafleet.rpc.tests.unit import measured
from ansible_collections.llamafleet.rpc.tests.unit.plan_world import MIB, device

N_CTX = 4096


def profiles() -> list[str]:
    """Models with all their layers as published; the families beside them are cut to a few layers."""
    return [*measured.NAMES, *measured.FAMILIES]


def fleet(dice: random.Random, model: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """``count`` unlike devices, together around one to three times as large as the model.

    One in three fleets has a memory that two or three of them share, one in three a GPU in the primary, and most have
    the primary's CPU, which may hold layers in half of them.
    """
    total = sum(each["weights"] for each in model["layers"]) + model["output_bytes"] + 2000 * MIB
    scale = dice.uniform(1.0, 3.0) * total / count
    devices = []
    local = dice.random() < 1 / 3
    pooled = dice.sample(range(count), min(count, dice.choice([2, 2, 3]))) if dice.random() < 1 / 3 else []
    shared = int(scale * len(pooled) * dice.uniform(0.5, 0.9)) + 300 * MIB
    for number in range(count):
        usable = int(scale * dice.uniform(0.5, 1.5)) + 300 * MIB
        changed: dict[str, Any] = {"bandwidth": dice.choice([40, 80, 120, 250, 400, 600, 900, 1800]) * 1e9}
        if number in pooled:
            changed.update(pool="shared", pool_usable=shared)
        at_home = local and number == count - 1
        if not at_home:
            changed.update(rtt_ms=dice.choice([0.2, 0.5, 1.0, 4.0]), overhead_ms=dice.choice([0.0, 0.3, 1.0]))
            changed["link_mbps"] = dice.choice([None, 100, 1000, 1000, 10000])
        devices.append(device(f"w{number}", usable, None if at_home else f"10.0.0.{number + 1}:18711", **changed))
    if dice.random() < 0.8:
        most = dice.choice([0, None])
        usable = int(scale * dice.uniform(0.2, 1.0)) + model["input_bytes"] + 1500 * MIB
        devices.insert(
            0, device("head", usable, None, "CPU", bandwidth=dice.choice([20, 40, 80]) * 1e9, max_units=most)
        )
    return devices
