# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The tables that a person reads say what was promised, what was measured, and what is wrong."""

from __future__ import annotations

from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._report import plan_lines, proof_lines, worker_lines

MIB = 1 << 20
PLAN: dict[str, Any] = {
    "feasible": True,
    "reason": None,
    "objective": "latency",
    "n_ctx": 2048,
    "devices": [
        {
            "host": "a",
            "device": "CPU",
            "rpc_name": "RPC0",
            "endpoint": "127.0.0.1:5",
            "units": 16,
            "first_layer": 0,
            "last_layer": 15,
            "output": False,
            "weights": 35463168,
            "kv": 24 * MIB,
            "compute": 36 * MIB,
            "total": 95 * MIB,
            "usable": 200 * MIB,
            "headroom": 105 * MIB,
            "ms": 1.0,
        },
    ],
    "primary_host": {"weights": 1, "kv": 0, "compute": 2, "cache_ram": 0, "total": 3 * MIB, "usable": None},
    "predicted": {},
    "rpc": "127.0.0.1:5",
    "device_order": ["RPC0"],
    "tensor_split": "31",
    "dropped": [{"endpoint": "127.0.0.1:6", "device": "CPU", "why": "costs 2 ms per token"}],
    "warnings": [{"code": "x", "text": "the output layer is remote"}],
}


def test_plan_shows_layers_sizes_reasons_and_warnings() -> None:
    text = "\n".join(plan_lines(PLAN))
    assert "a CPU (RPC0, 127.0.0.1:5)" in text and "0-15" in text
    assert "33.82" in text and "24.00" in text and "105.00" in text
    assert "left out: CPU of 127.0.0.1:6: costs 2 ms per token" in text
    assert "warning: the output layer is remote" in text


def test_options_are_shown_that_there_are_and_one_round_trip_is_one() -> None:
    """Without a worker no --rpc is printed, on the CPU alone neither -dev nor --tensor-split."""
    assert "--rpc 127.0.0.1:5  -dev RPC0  --tensor-split 31" in plan_lines(PLAN)
    own = {**PLAN, "rpc": "", "device_order": ["CUDA0"]}
    assert "no worker is used: -dev CUDA0  --tensor-split 31" in plan_lines(own)
    cpu = "\n".join(plan_lines({**own, "device_order": [], "tensor_split": ""}))
    assert "no worker is used, nor a GPU: all layers are on the primary's CPU" in cpu
    assert "--" not in cpu and "-dev" not in cpu
    speed = {"tokens_per_s": 10.0, "ms_per_token": 100.0, "lower_bound_ms": 90.0, "wire_bytes_per_token": 5}
    for trips, said in ((0, " 0 round trips and"), (1, " 1 round trip and"), (2, " 2 round trips and")):
        assert said in "\n".join(plan_lines({**PLAN, "predicted": {**speed, "round_trips": trips}}))


def test_an_infeasible_plan_says_why() -> None:
    assert plan_lines({"feasible": False, "reason": "needs 3, has 2"}) == ["no plan: needs 3, has 2"]


def test_proof_shows_both_sides_the_answer_and_the_way_in() -> None:
    row = {
        "device": "RPC0",
        "endpoint": "127.0.0.1:5",
        "layers": "0-15",
        "weights_promised": MIB,
        "weights_measured": MIB,
        "kv_promised": 2 * MIB,
        "kv_measured": None,
        "compute_promised": 3 * MIB,
        "compute_measured": 2 * MIB,
        "headroom": MIB,
    }
    proof = {
        "table": [row],
        "problems": [{"severity": "error", "code": "kv", "text": "KV is missing"}],
        "proof": {"text": " Paris.", "tokens_per_s": 40.0},
    }
    text = "\n".join(proof_lines(proof, "http://127.0.0.1:8080"))
    assert "RPC0 (127.0.0.1:5)" in text and "-" in text and "error: KV is missing" in text
    assert " Paris." in text and "40.0 tokens/s" in text and "curl http://127.0.0.1:8080/v1/chat/completions" in text


def test_workers_are_shown_with_what_is_wrong() -> None:
    lines = worker_lines(
        [
            {"endpoint": "127.0.0.1:5", "status": "busy_ours", "client": "127.0.0.1:4000"},
            {"endpoint": "127.0.0.1:6", "status": "refused", "hint": "It does not run."},
            {
                "endpoint": "127.0.0.1:7",
                "status": "ok",
                "protocol": "7.0.0",
                "devices": [{"index": 0, "free": MIB, "total": 2 * MIB}],
            },
        ]
    )
    assert lines[0] == "127.0.0.1:5 busy_ours, serves 127.0.0.1:4000"
    assert lines[1] == "127.0.0.1:6 refused, It does not run."
    assert "protocol 7.0.0" in lines[2] and "1.00 of 2.00 MiB free" in lines[2]
