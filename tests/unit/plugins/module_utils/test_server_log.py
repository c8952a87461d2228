# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The log reader on recorded logs, and on a log that a real fleet of two workers writes during the test."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._server_log import compare, diagnose, parse
from ansible_collections.llamafleet.rpc.tests.unit import servers

RECORDINGS = Path(__file__).parents[2] / "recordings" / "llama-server"
MIB = 1 << 20
A, B = "127.0.0.1:24311", "127.0.0.1:24312"
# SmolLM2-135M-Instruct Q4_1 (facts: bytes per block, of the token embedding, which is also the output, of the norm).
BLOCK, EMBEDDING, NORM, KV_2048 = 2216448, 30081024, 2304, 2048 * 192 * 2 * 2


def lines(name: str) -> list[str]:
    return (RECORDINGS / name).read_text().splitlines()


def device(endpoint: str | None, index: int, name: str, units: int, first: int, **changed: Any) -> dict[str, Any]:
    blocks = units - (1 if first + units == 31 else 0)
    output = EMBEDDING + NORM if first + units == 31 else 0
    promised = {"weights": blocks * BLOCK + output, "kv": blocks * KV_2048, "compute": 40 * MIB}
    record: dict[str, Any] = {
        "host": "w",
        "endpoint": endpoint,
        "index": index,
        "device": "CPU",
        "rpc_name": name,
        "units": units,
        "first_layer": first,
        "last_layer": first + blocks - 1,
        "output": bool(output),
        "usable": 200 * MIB,
        **promised,
    }
    record.update(changed)
    return record


def plan(*devices: dict[str, Any], host_weights: int = EMBEDDING) -> dict[str, Any]:
    """As plan_split makes it: primary_host includes the blocks on the primary's CPU."""
    own = [device for device in devices if (device["endpoint"], device["device"]) == (None, "CPU")]
    host = {
        "weights": host_weights + sum(device["weights"] for device in own),
        "kv": sum(device["kv"] for device in own),
        "compute": 40 * MIB,
        "cache_ram": 256 * MIB,
        "usable": 1000 * MIB,
    }
    return {"devices": list(devices), "primary_host": host}


TWO_WORKERS = plan(device(A, 0, "RPC0", 20, 0), device(B, 1, "RPC2", 11, 20))


def test_promised_equals_measured_to_the_printed_digit() -> None:
    """RPC2 is the second device of the second endpoint: the log calls its buffers RPC1[endpoint]."""
    rows, problems = compare(TWO_WORKERS, parse(lines("two-workers.log")))
    assert problems == []
    assert [(row["device"], row["endpoint"], row["layers"], row["equal_to_printed_digit"]) for row in rows] == [
        ("RPC0", A, "0-19", True),
        ("RPC2", B, "20-29", True),
        ("host", None, "", True),
    ]
    first, _second, host = rows
    assert first["weights_measured"] == round(42.28 * MIB)
    assert first["kv_measured"] == 30 * MIB
    assert first["compute_measured"] == round(35.05 * MIB)
    assert first["total_measured"] == first["weights_measured"] + first["kv_measured"] + first["compute_measured"]
    assert first["headroom"] == 200 * MIB - first["total_measured"]
    assert host["compute_measured"] == round(19.32 * MIB) + round(0.19 * MIB)
    assert host["total_promised"] == EMBEDDING + (40 + 256) * MIB
    assert host["headroom"] == (1000 - 256) * MIB - host["total_measured"]


def test_a_digit_that_differs_is_seen() -> None:
    wrong = copy.deepcopy(TWO_WORKERS)
    wrong["devices"][0]["kv"] += MIB // 50
    rows, problems = compare(wrong, parse(lines("two-workers.log")))
    assert rows[0]["equal_to_printed_digit"] is False
    assert [(problem["severity"], problem["code"]) for problem in problems] == [("warning", "kv_differ")]


def test_a_split_that_went_elsewhere_is_an_error() -> None:
    swapped = plan(device(A, 0, "RPC0", 11, 0), device(B, 1, "RPC2", 20, 11))
    _rows, problems = compare(swapped, parse(lines("two-workers.log")))
    assert {problem["code"] for problem in problems if problem["severity"] == "error"} == {
        "weights_differ",
        "kv_differ",
    }


def test_a_device_outside_the_plan_and_one_that_got_nothing_are_errors() -> None:
    """The plan says the first device of the second endpoint, the server used its second one."""
    other = plan(device(A, 0, "RPC0", 20, 0), device(B, 0, "RPC1", 11, 20))
    _rows, problems = compare(other, parse(lines("two-workers.log")))
    assert {problem["code"] for problem in problems} == {"device_without_memory", "device_not_planned"}
    assert any(f"{B}#1" in problem["text"] for problem in problems)


def test_blocks_on_the_primarys_cpu_count_to_the_host_and_layers_are_compared() -> None:
    own = device(None, 0, "CPU", 10, 0, usable=1000 * MIB, compute=0)
    partial = plan(own, device(A, 0, "RPC0", 12, 10), device(B, 1, "RPC2", 9, 22))
    rows, problems = compare(partial, parse(lines("partial-offload.log")))
    assert problems == []
    host = rows[-1]
    assert (host["units"], host["units_measured"], host["kv_measured"]) == (10, 10, 15 * MIB)
    # 92.10 MiB is the mapped range of the file, not what the ten blocks and the embedding take.
    assert host["equal_to_printed_digit"] is None
    assert host["headroom"] == (1000 - 256) * MIB - (
        host["total_measured"] - round(92.10 * MIB) + EMBEDDING + 10 * BLOCK
    )
    assert (host["weights_promised"], host["kv_promised"]) == (EMBEDDING + 10 * BLOCK, 15 * MIB)
    assert [row["units_measured"] for row in rows[:2]] == [12, 9]
    shifted = plan(own, device(A, 0, "RPC0", 12, 10), device(B, 1, "RPC2", 9, 22))
    shifted["devices"][1]["units"], shifted["devices"][2]["units"] = 11, 10
    assert "units_differ" in {problem["code"] for problem in compare(shifted, parse(lines("partial-offload.log")))[1]}


def test_nothing_offloaded_is_an_error() -> None:
    """B8-08: the workers connect but never compute; 0/31 layers offloaded."""
    _rows, problems = compare(TWO_WORKERS, parse(lines("nothing-offloaded.log")))
    texts = {problem["code"]: problem["text"] for problem in problems if problem["severity"] == "error"}
    assert "offloaded 0/31 layers, the plan has 31" in texts["offload_differs"]
    assert "device_without_memory" in texts


def test_the_text_of_the_report_is_found_whatever_stands_before_it() -> None:
    """B8-08, the text as reported, below the prefix of a journal."""
    log = parse(["Nov 29 19:22:01 host llama-server[42]: load_tensors: offloaded 0/23 layers to GPU"])
    assert log.offloaded == (0, 23)


def test_only_the_last_start_counts() -> None:
    both = lines("nothing-offloaded.log") + lines("refused.log") + lines("two-workers.log")
    log = parse(both)
    assert log.offloaded == (31, 31)
    assert log.findings == []
    assert compare(TWO_WORKERS, log)[1] == []
    assert (log.build, log.commit, log.url) == ("11434", "sdist", "http://127.0.0.1:24313")


def test_caches_of_two_kinds_are_summed_and_a_second_reservation_replaces_the_first() -> None:
    text = [
        "srv  llama_server: initializing ...",
        "load_tensors:      CUDA0 model buffer size =   100.00 MiB",
        "load_tensors:  CUDA_Host model buffer size =    10.00 MiB",
        "load_tensors: CPU_REPACK model buffer size =     5.00 MiB",
        "llama_context: constructing llama_context",
        "llama_context:  CUDA_Host  output buffer size =     1.00 MiB",
        "llama_kv_cache:      CUDA0 KV buffer size =    16.00 MiB",
        "llama_kv_cache:      CUDA0 KV buffer size =     4.00 MiB",
        "llama_memory_recurrent:      CUDA0 RS buffer size =     2.00 MiB",
        "llama_kv_cache_dsv4:      CUDA0 DSV4 csa state buffer size =     1.00 MiB",
        "sched_reserve:      CUDA0 compute buffer size =    90.00 MiB",
        "sched_reserve:      CUDA0 compute buffer size =    70.00 MiB",
        "llama_context: constructing llama_context",
        "sched_reserve:      CUDA0 compute buffer size =     7.00 MiB",
    ]
    log = parse(text)
    assert log.amount("CUDA0", "kv").bytes == 23 * MIB
    assert log.amount("CUDA0", "compute").bytes == 77 * MIB
    assert log.amount("host", "weights").bytes == 15 * MIB
    local = device(None, 0, "CUDA0", 31, 0, device="CUDA0", weights=100 * MIB, kv=23 * MIB, compute=80 * MIB)
    rows, problems = compare(plan(local, host_weights=15 * MIB), log)
    assert problems == []
    assert [row["equal_to_printed_digit"] for row in rows] == [True, True]


def test_more_than_promised_is_reported() -> None:
    tight = copy.deepcopy(TWO_WORKERS)
    tight["devices"][0].update(compute=30 * MIB, usable=100 * MIB)
    _rows, problems = compare(tight, parse(lines("two-workers.log")))
    assert [(problem["severity"], problem["code"]) for problem in problems] == [
        ("warning", "compute_over_plan"),
        ("error", "over_budget"),
    ]


@pytest.mark.parametrize(
    ("text", "code"), [([], "no_start_in_log"), (["x llama_server: initializing ..."], "no_buffers_in_log")]
)
def test_a_log_that_says_nothing_is_a_warning_and_every_figure_unknown(text: list[str], code: str) -> None:
    rows, problems = compare(TWO_WORKERS, parse(text))
    assert [(problem["severity"], problem["code"]) for problem in problems] == [("warning", code)]
    assert all(row["total_measured"] is None and row["headroom"] is None for row in rows)
    assert all(row["equal_to_printed_digit"] is None for row in rows)


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("refused.log", ["connect_failed"]),
        ("version-mismatch.log", ["version_mismatch", "handshake_failed"]),
        ("worker-died.log", ["worker_gone"]),
        ("worker-out-of-memory.log", ["worker_gone"]),
        ("worker-out-of-memory.worker.log", ["out_of_memory"]),
        ("truncated-model.log", ["model_truncated", "model_not_loaded"]),
        ("not-a-model.log", ["not_a_model", "model_not_loaded"]),
        ("port-taken.log", ["api_port_taken"]),
        ("two-workers.log", []),
        ("partial-offload.log", []),
    ],
)
def test_recorded_crashes_are_explained(name: str, codes: list[str]) -> None:
    found = diagnose(lines(name))
    assert list(dict.fromkeys(finding.code for finding in found)) == codes
    assert all(finding.advice and finding.line for finding in found)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("ggml_backend_cuda_graph_compute: op not supported ffn_moe_probs-9 (MAP_BINARY)", "unsupported_op"),
        ("ggml_metal_op_encode_impl: error: unsupported op 'TOP_K'", "unsupported_op"),
        ("allocating 9000.00 MiB on device 0: cudaMalloc failed: out of memory", "out_of_memory"),
        ("error loading model: unable to allocate RPC0[10.0.0.2:18711] buffer", "out_of_memory"),
        ("error loading model: illegal split file idx: 1 (file: m-00002-of-00003.gguf), ...", "wrong_shard"),
        ("HELLO request size mismatch (0 vs 24)", "version_mismatch"),
        (
            "ggml/src/ggml-backend.cpp:2012: GGML_ASSERT(n_backends <= GGML_SCHED_MAX_BACKENDS) failed",
            "too_many_devices",
        ),
        ("ggml-rpc.cpp:539: Failed to parse endpoint: [::1]:18711", "bad_endpoint"),
        ("ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected", "no_gpu"),
        ("ggml_cuda_init: failed to initialize ROCm: no ROCm-capable device is detected", "no_gpu"),
        ("Unsupported KV type combination for head_size 128.", "cache_types"),
        ("error: invalid argument: --rpc", "unknown_option"),
        ("D alloc: failed to allocate 12.00 MiB of pinned memory: no error", None),
    ],
)
def test_texts_of_crashes_of_other_backends_are_explained(line: str, code: str | None) -> None:
    """B8-06, with the text as reported; B8-04, B8-11, B4-01, B7-13, B2-15 as an old or wrong build says them."""
    assert [finding.code for finding in diagnose([line])] == ([] if code is None else [code])


@pytest.mark.real
def test_a_live_server_is_measured_as_promised(llama_bin: Path, demo_model: Path, tmp_path: Path) -> None:
    ports = [servers.free_port() for _number in range(3)]
    first, second, api = ports
    log = tmp_path / "server.log"
    worker = [llama_bin / "ggml-rpc-server", "-t", 1, "-d"]
    with servers.program([*worker, "CPU", "-p", first]), servers.program([*worker, "CPU,CPU", "-p", second]):
        servers.wait_for_port(first)
        servers.wait_for_port(second)
        endpoints = f"127.0.0.1:{first},127.0.0.1:{second}"
        argv = [llama_bin / "llama-server", "-m", demo_model, "--rpc", endpoints, "-dev", "RPC0,RPC2", "-ts", "16,15"]
        argv += ["-sm", "layer", "-ngl", "all", "-fit", "off", "-c", 2048, "-np", 1, "-t", 1, "-lv", 5]
        argv += ["--host", "127.0.0.1", "--port", api, "--log-file", log]
        with servers.program(argv):
            servers.wait_until_healthy(api)
            measured = parse(log.read_text(errors="replace").splitlines())
    promised = plan(device(f"127.0.0.1:{first}", 0, "RPC0", 16, 0), device(f"127.0.0.1:{second}", 1, "RPC2", 15, 16))
    rows, problems = compare(promised, measured)
    assert problems == []
    assert [row["equal_to_printed_digit"] for row in rows] == [True, True, True]
    assert [row["units_measured"] for row in rows[:2]] == [16, 15]
