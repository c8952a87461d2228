# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long it takes to place models on 1,000 hosts, and how near the outcome is to what no placement can exceed.

Prints figures and judges nothing. Hosts are unlike (nothing is planned twice) or of eight kinds, with records as
worker_record keeps them. The times are processor time of this process, and those of real ansible-playbook runs.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils import _place_models
from ansible_collections.llamafleet.rpc.plugins.module_utils._place_models import place_models
from ansible_collections.llamafleet.rpc.tests.unit.plan_world import GIB

COLLECTIONS = Path(_place_models.__file__).parents[5]
MODELS = Path(_place_models.__file__).parents[2] / "inventories" / "models"
HOSTS = 1000


def some_record(number: int, pick: Callable[[Any], Any]) -> dict[str, Any]:
    """One to four GPUs of a kind, and a CPU on every second host, which may be primary for sure."""
    kind = pick([(11, 360), (15, 450), (23, 936), (23, 1008), (31, 1792), (47, 768), (79, 1935), (90, 210)])
    gpus = [
        {
            "index": index,
            "device": f"CUDA{index}",
            "pool": f"machine{number}/gpu/{index}",
            "usable": kind[0] * GIB,
            "budget": kind[0] * GIB,
            "bandwidth": kind[1] * 1e9,
        }
        for index in range(pick([1, 1, 2, 4]))
    ]
    ram = pick([28, 56, 112]) * GIB
    cpu = {"index": len(gpus), "device": "CPU", "pool": f"machine{number}/ram", "usable": ram, "bandwidth": 60e9}
    leads = number % 2 == 0
    address = f"10.1.{number // 250}.{number % 250 + 1}"
    instance = {
        "name": "default",
        "endpoint": None if leads else f"{address}:50052",
        "rtt_ms": None if leads else pick([0.2, 0.4, 0.8]),
        "devices": [*gpus, cpu] if leads else gpus,
    }
    return {
        "schema": 1,
        "host": f"host{number:04}",
        "machine_id": f"machine{number}",
        "cluster": "default",
        "mesh": {"address": address},
        "instances": [instance],
    }


def fleet(alike: bool) -> list[dict[str, Any]]:
    rng = random.Random(5)
    found = [some_record(number, rng.choice) for number in range(HOSTS)]
    for record in [] if alike else found:
        for device in record["instances"][0]["devices"]:
            device["bandwidth"] *= rng.uniform(0.9, 1.1)
    return found


def wishes(large: int, small: int) -> list[dict[str, Any]]:
    given = {size: json.loads((MODELS / f"llama-{size}-q4.json").read_text()) for size in ("70b", "8b")}
    return [
        {"name": "large", "model": given["70b"], "n_ctx": 32768, "replicas": large},
        {"name": "small", "model": given["8b"], "n_ctx": 16384, "n_parallel": 4, "replicas": small},
    ]


def placing() -> None:
    for alike in (True, False):
        records = fleet(alike)
        for large, small in ((10, 20), (100, 200), (500, 500)):
            before = time.process_time()
            found = place_models(records, wishes(large, small))
            spent, bound = time.process_time() - before, found["bound"]
            print(
                f"{HOSTS} {'hosts of few kinds' if alike else 'unlike hosts':18}, {large:3} + {small:3} copies: "
                f"{spent:5.2f} s; placed {bound['placed']:4} of at most {bound['replicas']:4} "
                f"({bound['placed'] / bound['replicas']:.3f}), {bound['predicted_tokens_per_s']:8.0f} of at most "
                f"{bound['tokens_per_s']:8.0f} tokens/s "
                f"({bound['predicted_tokens_per_s'] / bound['tokens_per_s']:.3f})",
                flush=True,
            )


def in_a_playbook() -> None:
    """The filter in a real ansible-playbook run, and all of place.yml over an inventory of declared machines."""
    play = [
        {
            "hosts": "localhost",
            "gather_facts": False,
            "vars_files": ["input.json"],
            "tasks": [
                {
                    "ansible.builtin.debug": {
                        "msg": "{{ (records | llamafleet.rpc.place_models(models)).bound.placed if records else 0 }}"
                    }
                },
            ],
        }
    ]
    models = wishes(100, 200)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "play.yml").write_text(json.dumps(play))
        spent = []
        for records in (fleet(False), []):
            (place / "input.json").write_text(json.dumps({"records": records, "models": models}))
            spent.append(playbook(place, "localhost,", "play.yml"))
        print(
            f"ansible-playbook with {HOSTS} records, 100 + 200 copies: {spent[0]:.2f} s, with none: {spent[1]:.2f} s, "
            f"so the filter and its data take {spent[0] - spent[1]:.2f} s"
        )
        hosts = {record["host"]: declared(record) for record in fleet(False)}
        (place / "hosts.json").write_text(json.dumps({"all": {"hosts": hosts}}))
        files = [{**each, "model": str(MODELS / f"llama-{size}-q4.json")} for size, each in zip(("70b", "8b"), models)]
        (place / "models.json").write_text(json.dumps({"models": files}))
        whole = playbook(place, "hosts.json", str(MODELS.parents[1] / "playbooks" / "place.yml"), "-e", "@models.json")
        print(f"place.yml over an inventory of {HOSTS} declared machines: {whole:.2f} s")


def declared(record: dict[str, Any]) -> dict[str, Any]:
    """The inventory variables of a machine that is not there yet."""
    held = record["instances"][0]
    devices = [{key: device[key] for key in ("device", "usable", "bandwidth")} for device in held["devices"]]
    if held["endpoint"] is None:
        return {"llama_primary_instances": [{"name": "own", "devices": devices}]}
    return {"llama_worker_address": record["mesh"]["address"], "llama_worker_devices_declared": devices}


def playbook(place: Path, inventory: str, *arguments: str) -> float:
    before = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-m", "ansible", "playbook", "-i", inventory, "-c", "local", *arguments],
        cwd=place,
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(COLLECTIONS)},
    )
    if ran.returncode:
        raise SystemExit(ran.stdout[-2000:] + ran.stderr[-2000:])
    return time.monotonic() - before


if __name__ == "__main__":
    placing()
    in_a_playbook()
