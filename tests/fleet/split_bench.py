# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Our split against llama.cpp's default, its --fit, and an even one, on a fleet of unequal hosts; and promised speed.

w2 has a seventh of a processor and the way to w3 takes 10 ms; no host holds the model alone. site.yml plans with
defaults, calibrate.yml measures, and what the plan then promises is compared with what llama-bench finds. All splits
run one after the other, twice, on the same workers. Judges nothing.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._server_args import server_args
from ansible_collections.llamafleet.rpc.tests.fleet.lab import (
    HOSTS,
    PORT,
    WORKERS,
    Inventory,
    endpoint,
    fleet,
    hosts,
    kept,
    play,
    sh,
)

_BENCH = "/opt/llamafleet/current/bin/llama-bench"
_TOKENS = 32
_ROUNDS = 2


def token_ms(arguments: Sequence[object]) -> float:
    """Milliseconds for a token; the median of some repetitions."""
    argv = (_BENCH, *arguments, "-p", "0", "-n", _TOKENS, "-r", "3", "-o", "json")
    (row,) = json.loads(fleet("exec", "p1", *argv, seconds=900))
    return float(statistics.median(row["samples_ns"])) / _TOKENS / 1e6


def skewed(inventory: Inventory) -> None:
    """Little room everywhere, so that two hosts at least are needed, and a short context, so that weights count."""
    instance = {"name": "cpu", "port": PORT, "backend": "cpu", "memory_limit": "170MiB", "threads": 1}
    own = [{"name": "own", "devices": ["CPU"], "max_units": 4}]
    primary: dict[str, Any] = {
        "llama_primary_n_ctx": 256,
        "llama_primary_n_parallel": 1,
        "llama_primary_instances": own,
    }
    primary["llama_primary_objective"] = "latency"
    primary["llama_primary_extra_args"] = ["-t", "1"]
    inventory.change(hosts={"p1": primary, **{host: {"llama_worker_instances": [instance]} for host in WORKERS}})


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, hosts(Path(directory) / "seed", HOSTS):
        inventory = Inventory(Path(directory) / "inventory")
        skewed(inventory)
        play(inventory, "site", seconds=900)
        fleet("limit", "w2", "cpu=0.15")
        fleet("link", "w3", "delay=5")
        before = kept("p1", "plan")
        print(
            "\n".join(line for line in play(inventory, "calibrate", seconds=900).output.splitlines() if "GB/s" in line)
        )
        plan = kept("p1", "plan")
        (model,) = sh("p1", "ls /opt/llamafleet/models/*.gguf").split()
        sh("p1", "systemctl stop llama-server-default")
        every = ",".join(endpoint(host) for host in WORKERS)
        common = ("-m", model, "-t", "1", "--rpc", every)
        all_devices = ("-dev", "/".join(f"RPC{number}" for number in range(len(WORKERS))))
        ways: dict[str, tuple[object, ...]] = {
            "our split": (*server_args(plan, model, tool="llama-bench"), "-t", "1"),
            "the default": (*common, "-ngl", "99"),
            "--fit": (*common, "-fitt", "64"),
            "even": (*common, *all_devices, "-ngl", "99", "-ts", "/".join("1" for _host in WORKERS)),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _round in range(_ROUNDS):
            for name, arguments in ways.items():
                found[name].append(token_ms(arguments))
    best = {name: min(values) for name, values in found.items()}
    ours = best["our split"]
    print(f"planned with defaults {before['tensor_split']}, when measured {plan['tensor_split']} on {plan['rpc']}")
    for name, value in best.items():
        print(f"{name}: {value:.1f} ms a token, {1000 / value:.1f} tokens/s; ours is {value / ours:.2f} times as fast")
    promised = plan["predicted"]["ms_per_token"]
    print(f"promised {promised:.1f} ms a token, measured {ours:.1f}: {100 * (promised / ours - 1):+.0f} %")


if __name__ == "__main__":
    main()
