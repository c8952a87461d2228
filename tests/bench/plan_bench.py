# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How good plans are, and how long planning takes. Prints figures; a timed test would fail on a busy machine.

A plan that is not the optimum, or a bound that does not hold, is an error.

Processor time of this process, the best of several runs, so that other work on the machine disturbs little.
Run it as ``make bench`` does, or with the collection on PYTHONPATH: ``python tests/bench/plan_bench.py``.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils import _memory, _plan
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan import plan_split
from ansible_collections.llamafleet.rpc.plugins.module_utils._records import fleet_devices
from ansible_collections.llamafleet.rpc.tests.unit import judge, measured, random_fleets
from ansible_collections.llamafleet.rpc.tests.unit.plan_world import GIB, MIB, device, layer, model

OBJECTIVES = ("latency", "memory", "prefill")
MARGIN = 64 * MIB
COLLECTIONS = Path(_plan.__file__).parents[5]


def a_model(layers: int) -> dict[str, Any]:
    """Uneven layers, as a mixed quantisation gives them; about 15 GiB, and 4 GiB of caches, whatever their number."""
    held = [layer(130 * 120 * MIB // layers + (number * 7 % 5) * 3 * MIB) for number in range(layers)]
    width = 130 * 1024 // layers
    for each in held:
        each["caches"] = [{"k_width": width, "v_width": width, "window": None, "ratio": 1, "per_sequence": False}]
    return model(held, n_embd=4096, n_vocab=128256, input_bytes=500 * MIB, output_bytes=500 * MIB, head_bytes=500 * MIB)


def some_devices(count: int, pools: int) -> list[dict[str, Any]]:
    """Unlike devices; with ``pools``, so many neighbours share a memory that is too small for both."""
    found = [device("head", 8 * GIB, None, "CPU", bandwidth=40e9)]
    for number in range(count):
        usable = int((1.2 + 0.11 * (number * 7 % 11)) * GIB)
        changed: dict[str, Any] = {"bandwidth": 100e9 + (number * 5 % 13) * 30e9}
        if number // 2 < pools:
            changed.update(pool=f"box{number // 2}/ram", pool_usable=int(3.2 * GIB))
        found.append(device(f"w{number}", usable, f"10.0.0.{number + 1}:18711", **changed))
    return found


def best(
    given: dict[str, Any], devices: list[dict[str, Any]], objective: str, runs: int
) -> tuple[float, dict[str, Any]]:
    times = []
    for _run in range(runs):
        before = time.process_time()
        plan = plan_split(given, devices, n_ctx=8192, objective=objective)
        times.append(time.process_time() - before)
    return min(times) * 1000, plan


def optimum(fleets: int) -> None:
    """Random fleets of 2 to 8 devices for real models: the plan against a judge that shares no code with it."""
    dice = random.Random(20261129)
    models = {name: measured.model(name).to_dict() for name in random_fleets.profiles()}
    equal = proved = possible = pooled = 0
    worst, times = 0.0, []
    architectures = set()
    for number in range(fleets):
        given = models[dice.choice(list(models))]
        devices = random_fleets.fleet(dice, given, dice.randint(2, 8))
        objective = OBJECTIVES[number % 3]
        before = time.process_time()
        made = plan_split(given, devices, n_ctx=random_fleets.N_CTX, objective=objective, margin=MARGIN, cache_ram=0)
        times.append((time.process_time() - before) * 1000)
        known = judge.best(given, devices, _memory.ContextParams(n_ctx=random_fleets.N_CTX), MARGIN, objective)
        if (known is None) == made["feasible"]:
            raise AssertionError(f"fleet {number}: feasible is {made['feasible']}, the judge says {known}")
        if known is None:
            equal += 1
            continue
        architectures.add(given["architecture"])
        possible += 1
        pooled += any(item["pool"] == "shared" for item in devices)
        gap = made["certificate"]["value"] / known - 1
        worst = max(worst, gap)
        # The certificate has six digits behind the point.
        equal += abs(made["certificate"]["value"] - known) <= 1e-6 + known * 1e-8
        proved += made["certificate"]["proved"]
        if made["certificate"]["lower_bound"] > known * (1 + 1e-8) + 1e-6:
            raise AssertionError(f"fleet {number}: the bound {made['certificate']['lower_bound']} is above {known}")
    times.sort()
    print(
        f"{fleets} random fleets of 2 to 8 devices, {len(models)} models of {len(architectures)} architectures, "
        f"{possible} feasible, {pooled} with shared pools: {equal} equal to the judge's optimum, {proved} of "
        f"{possible} proved by the planner, worst gap {worst:.4%}; planning took {times[len(times) // 2]:.1f} ms in "
        f"the middle, {times[int(len(times) * 0.99)]:.0f} ms in 99 of 100, {times[-1]:.0f} ms at most"
    )


def gaps() -> None:
    """Larger fleets, where nobody knows the optimum: how far the plan is from its lower bound at most."""
    models = [measured.model(name).to_dict() for name in measured.NAMES]
    for count in (9, 12, 15):
        dice = random.Random(count)
        found: dict[str, list[float]] = {objective: [] for objective in OBJECTIVES}
        for number in range(30):
            given = models[number % len(models)]
            objective = OBJECTIVES[number % 3]
            made = plan_split(
                given, random_fleets.fleet(dice, given, count), n_ctx=random_fleets.N_CTX, objective=objective
            )
            if made["feasible"]:
                found[objective].append(made["certificate"]["gap"])
        shown = ", ".join(
            f"{objective} {sum(each) / len(each):.1%} on average, {max(each):.1%} at most"
            for objective, each in found.items()
            if each
        )
        print(f"random fleets of {count} devices, gap to the lower bound: {shown}")


def planning() -> None:
    given = a_model(130)
    base: dict[str, float] = {}
    for pools in (0, 2, 7):
        for objective in OBJECTIVES:
            spent, plan = best(given, some_devices(15, pools), objective, runs=5)
            base.setdefault(objective, spent)
            split = plan["tensor_split"] or plan["reason"][:60]
            print(
                f"15 devices + CPU x 130 layers, {pools} shared pools, {objective:8}: {spent:7.1f} ms "
                f"({spent / base[objective]:4.1f} x without pools), gap {plan['certificate']['gap']:.1%}  {split}"
            )
    for layers in (32, 64, 130, 260):
        spent, plan = best(a_model(layers), some_devices(15, 0), "latency", runs=3)
        print(f"15 devices + CPU x {layers:3} layers, latency: {spent:6.1f} ms, feasible: {plan['feasible']}")
    for count in (4, 8, 15):
        before = time.process_time()
        plan_split(given, some_devices(count, 0), n_ctx=1024, alternatives=True)
        spent = (time.process_time() - before) * 1000
        print(f"{count} devices + CPU x 130 layers with alternatives and the loss of each worker: {spent:.0f} ms")


def some_records(hosts: int) -> list[dict[str, Any]]:
    return [
        {
            "schema": 1,
            "host": f"host{number}",
            "machine_id": f"machine{number}",
            "boot_id": "boot",
            "collected_at": "2026-01-01T00:00:00Z",
            "cluster": f"cluster{number // 10}",
            "build": "b11434",
            "manifest_id": "0" * 64,
            "mesh": {"address": f"10.1.{number // 250}.{number % 250 + 1}", "public_key": None},
            "instances": [
                {
                    "name": "default",
                    "endpoint": f"10.1.{number // 250}.{number % 250 + 1}:18711",
                    "started_at": 1,
                    "protocol": "7.0.0",
                    "rtt_ms": 0.4,
                    "devices": [
                        {
                            "index": index,
                            "device": f"CUDA{index}",
                            "backend": "cuda",
                            "pool": f"machine{number}/gpu/{index}",
                            "usable": 24 * GIB,
                            "budget": 23 * GIB,
                            "bandwidth": 900e9,
                            "overhead_ms": 0.5,
                        }
                        for index in range(2)
                    ],
                }
            ],
        }
        for number in range(hosts)
    ]


def records() -> None:
    """1,000 hosts' records through the filter: alone, and in a real ansible-playbook run."""
    given = some_records(1000)
    before = time.process_time()
    found = [len(fleet_devices(given, f"cluster{number}")) for number in range(100)]
    print(f"fleet_devices, 1,000 records, 100 clusters in turn: {(time.process_time() - before) * 1000:.0f} ms")
    assert found == [20] * 100
    same = [{**record, "cluster": "default"} for record in given]
    play = [
        {
            "hosts": "localhost",
            "gather_facts": False,
            "vars": {"ansible_python_interpreter": sys.executable},
            "vars_files": ["records.json"],
            "tasks": [
                {"ansible.builtin.debug": {"msg": "start"}},
                {"ansible.builtin.debug": {"msg": "{{ records | llamafleet.rpc.fleet_devices | length }} devices"}},
            ],
        }
    ]
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "records.json").write_text(json.dumps({"records": same}))
        (place / "play.yml").write_text(json.dumps(play))
        (place / "empty.json").write_text(json.dumps({"records": []}))
        spent = [playbook(place)]
        (place / "empty.json").replace(place / "records.json")
        spent.append(playbook(place))
    print(
        f"ansible-playbook with 1,000 records: {spent[0]:.2f} s, with none: {spent[1]:.2f} s, "
        f"so the filter and its data take {spent[0] - spent[1]:.2f} s"
    )


def playbook(place: Path) -> float:
    before = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "ansible", "playbook", "-i", "localhost,", "-c", "local", "play.yml"],
        cwd=place,
        check=True,
        capture_output=True,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(COLLECTIONS)},
    )
    return time.monotonic() - before


if __name__ == "__main__":
    optimum(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
    gaps()
    planning()
    records()
