# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan and llama-fit-params: what agrees, what is known to differ, and what is worse than promised."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils import _oracle
from ansible_collections.llamafleet.rpc.plugins.module_utils._gguf import copy_headers, read_model
from ansible_collections.llamafleet.rpc.plugins.module_utils._model import Model, model_from_header
from ansible_collections.llamafleet.rpc.plugins.module_utils._oracle import Figures
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan import plan_split
from ansible_collections.llamafleet.rpc.plugins.modules import plan_oracle
from ansible_collections.llamafleet.rpc.tests.unit import servers
from ansible_collections.llamafleet.rpc.tests.unit.plan_world import GIB, MIB, device, layer, model, workers

PLAN = plan_split(model(), [device("head", 4 * GIB, name="CPU", max_units=0), *workers(1, 4 * GIB)], n_ctx=2048)
KNOWN = Model.from_dict(model())


def figures(plan: dict[str, Any], **more: int) -> dict[str, Figures]:
    """What llama-fit-params would say of a plan that is right, and ``more`` MiB of some kinds."""
    said = {
        name: Figures(*(size[kind] // MIB + more.get(kind, 0) for kind in ("weights", "kv", "compute")))
        for name, size in ((entry["rpc_name"], entry) for entry in plan["devices"])
    }
    host = plan["primary_host"]
    return {**said, "Host": Figures(*(host[kind] // MIB for kind in ("weights", "kv", "compute")))}


def test_a_plan_that_is_right_has_no_problem() -> None:
    rows, problems = _oracle.compare(PLAN, KNOWN, figures(PLAN))
    assert problems == []
    assert [row["device"] for row in rows] == ["RPC0", "Host"]
    assert rows[0]["weights_said"] == PLAN["devices"][0]["weights"] // MIB * MIB


@pytest.mark.parametrize("kind", ["weights", "kv"])
def test_more_than_promised_is_a_warning_with_both_numbers(kind: str) -> None:
    _rows, problems = _oracle.compare(PLAN, KNOWN, figures(PLAN, **{kind: 7}))
    promised = PLAN["devices"][0][kind]
    assert [(problem["severity"], problem["code"]) for problem in problems] == [("warning", f"oracle_{kind}")]
    assert (
        f"at least {promised // MIB + 7} MiB for {kind}, the plan promised {promised / MIB:.1f} MiB"
        in problems[0]["text"]
    )


def test_known_excess_of_compute_is_allowed_and_more_is_not() -> None:
    """The output device is told the logits of a whole micro batch: 512 x 1000 x 4 bytes are 1.95 MiB here."""
    assert _oracle.compare(PLAN, KNOWN, figures(PLAN, compute=1))[1] == []
    problems = _oracle.compare(PLAN, KNOWN, figures(PLAN, compute=9))[1]
    assert [problem["code"] for problem in problems] == ["oracle_compute"]
    assert "are known excess" in problems[0]["text"]


def test_contexts_of_unified_slots_with_a_window_are_not_compared() -> None:
    cache = {"k_width": 128, "v_width": 128, "window": 512, "ratio": 1, "per_sequence": False}
    windowed = model([layer(100 * MIB, caches=[cache]) for _number in range(10)])
    for slots, count in ((1, 1), (4, 0)):
        plan = plan_split(windowed, workers(1, 4 * GIB), n_ctx=8192, n_parallel=slots)
        problems = _oracle.compare(plan, Model.from_dict(windowed), figures(plan, kv=100))[1]
        assert len(problems) == count


def test_a_device_that_it_does_not_see_is_named() -> None:
    problems = _oracle.compare(PLAN, KNOWN, {"Host": figures(PLAN)["Host"]})[1]
    assert problems[0]["text"] == "llama-fit-params says nothing of RPC0: it does not see that device"


# --- The real program ------------------------------------------------------------------------------------------------


@pytest.mark.real
def test_a_copy_of_headers_reads_as_the_model_and_takes_no_room(demo_model: Path, tmp_path: Path) -> None:
    copy = copy_headers(str(demo_model), str(tmp_path))
    real, read = read_model(str(demo_model)), read_model(copy)
    assert (read.metadata, read.tensors, read.file_bytes) == (real.metadata, real.tensors, real.file_bytes)
    assert os.stat(copy).st_blocks * 512 < real.file_bytes / 20
    with open(copy, "rb") as file:
        file.seek(real.data_start)
        assert not any(file.read(1 << 16))


@pytest.fixture
def two_devices(llama_bin: Path) -> Iterator[list[dict[str, Any]]]:
    """The primary's CPU, and a real worker with two devices that must hold a layer each."""
    port = servers.free_port()
    endpoint = f"127.0.0.1:{port}"
    worker = [llama_bin / "ggml-rpc-server", "-H", "127.0.0.1", "-p", port, "-t", 1, "-d", "CPU,CPU"]
    shared: dict[str, Any] = {"n_endpoint_devices": 2, "min_units": 5, "name": "CPU"}
    with servers.program(worker):
        servers.wait_for_port(port)
        yield [
            device("head", 8 * GIB, name="CPU", max_units=0),
            *(device("box", 8 * GIB, endpoint, index=number, pool=f"m{number}", **shared) for number in range(2)),
        ]


def consult(llama_bin: Path, model_path: Path, plan: dict[str, Any], check_mode: bool = False) -> dict[str, Any]:
    options = {"program": str(llama_bin / "llama-fit-params"), "path": str(model_path), "plan": plan}
    return servers.run_module(plan_oracle.main, options, check_mode)


@pytest.mark.real
@pytest.mark.parametrize("slots", [1, 2])
def test_llama_cpp_is_of_the_same_mind(
    llama_bin: Path, demo_model: Path, two_devices: list[dict[str, Any]], slots: int
) -> None:
    known = model_from_header(read_model(str(demo_model))).to_dict()
    plan = plan_split(known, two_devices, n_ctx=4096, n_parallel=slots, type_k="q8_0", type_v="q8_0")
    result = consult(llama_bin, demo_model, plan)
    assert (result["asked"], result["changed"], result["problems"]) == (True, False, [])
    assert [row["device"] for row in result["rows"]] == ["RPC0", "RPC1", "Host"]
    for row in result["rows"]:
        for kind in ("weights", "kv"):
            assert row[f"{kind}_said"] == row[f"{kind}_promised"] // MIB * MIB
    again = consult(llama_bin, demo_model, plan)  # the worker is free again
    assert again["rows"] == result["rows"]


@pytest.mark.real
def test_a_plan_that_promises_less_is_found_out(
    llama_bin: Path, demo_model: Path, two_devices: list[dict[str, Any]]
) -> None:
    """The planner forgets a cache: llama.cpp does not."""
    known = model_from_header(read_model(str(demo_model))).to_dict()
    wrong = {**known, "layers": [{**each, "caches": []} for each in known["layers"]]}
    result = consult(llama_bin, demo_model, plan_split(wrong, two_devices, n_ctx=4096))
    assert {problem["code"] for problem in result["problems"]} >= {"oracle_kv"}
    assert any("for kv, the plan promised 0.0 MiB" in line for line in result["lines"])
    assert not result["failed"]


@pytest.mark.real
def test_it_never_stops_a_start(llama_bin: Path, demo_model: Path, tmp_path: Path) -> None:
    """No program, a worker that is not there, check mode: a clear line, and no failure."""
    known = model_from_header(read_model(str(demo_model))).to_dict()
    nobody = [device("box", 8 * GIB, f"127.0.0.1:{servers.free_port()}", name="CPU")]
    plan = plan_split(known, nobody, n_ctx=2048)
    gone = consult(tmp_path, demo_model, plan)
    assert "this build has no" in gone["lines"][0] and "llama_build_targets" in gone["lines"][0]
    failed = consult(llama_bin, demo_model, plan)
    assert [problem["code"] for problem in failed["problems"]] == ["oracle_failed"]
    assert "could not be checked before the start" in failed["lines"][0]
    assert consult(llama_bin, demo_model, plan, check_mode=True)["lines"] == [
        "llama-fit-params is not asked in check mode: workers may be busy"
    ]
    assert not any(result["failed"] or result["asked"] for result in (gone, failed))
