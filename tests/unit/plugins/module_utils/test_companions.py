# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Draft models, MTP layers and projectors: where they live, what they take, and what llama-server says they took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils import _server_log
from ansible_collections.llamafleet.rpc.plugins.module_utils._advice import advise
from ansible_collections.llamafleet.rpc.plugins.module_utils._companions import CompanionError, plan_with
from ansible_collections.llamafleet.rpc.plugins.module_utils._gguf import read_model
from ansible_collections.llamafleet.rpc.plugins.module_utils._model import model_from_header
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan import plan_split
from ansible_collections.llamafleet.rpc.plugins.module_utils._projector import ProjectorError, projector_from_header
from ansible_collections.llamafleet.rpc.plugins.module_utils._report import plan_lines
from ansible_collections.llamafleet.rpc.plugins.module_utils._server_args import server_args
from ansible_collections.llamafleet.rpc.tests.unit import made_up, servers
from ansible_collections.llamafleet.rpc.tests.unit.plan_world import GIB, MIB, device, layer, model, workers

PROJECTOR = {
    "path": "/srv/mmproj.gguf",
    "kind": "idefics3",
    "weights": 100 * MIB,
    "compute": 50 * MIB,
    "picture": 3 * MIB,
    "width": None,
    "measured": True,
}
SMALL = model([layer(20 * MIB) for _number in range(4)], path="/srv/draft.gguf")
HEAD = [device("head", 4 * GIB, name="CPU", max_units=0), *workers(1, 4 * GIB), device("head", 4 * GIB)]


def entry(plan: dict[str, Any], host: str) -> dict[str, Any]:
    return next(found for found in plan["devices"] if found["host"] == host)


def test_without_companions_the_plan_is_the_split() -> None:
    plan = plan_with(model(), HEAD, n_ctx=2048)
    assert plan == {**plan_split(model(), HEAD, n_ctx=2048), "companions": [], "drafted": 0}


def test_a_draft_and_a_projector_live_on_the_primarys_gpu_and_are_paid_there() -> None:
    plan = plan_with(model(), HEAD, n_ctx=2048, draft=SMALL, projector=PROJECTOR)
    alone = plan_split(model(), HEAD, n_ctx=2048)
    assert [(item["what"], item["device"]) for item in plan["companions"]] == [
        ("draft model", "CUDA0"),
        ("projector", "CUDA0"),
    ]
    taken = sum(item["total"] for item in plan["companions"])
    assert taken > (80 + 100 + 50) * MIB
    assert entry(plan, "head")["usable"] == 4 * GIB
    logits = 2 * 3 * 1000 * 4
    assert entry(plan, "head")["headroom"] == entry(alone, "head")["headroom"] - taken - logits
    text = "\n".join(plan_lines(plan))
    assert "draft model /srv/draft.gguf on the primary's CUDA0: weights 90.0 MiB" in text
    assert "projector /srv/mmproj.gguf on the primary's CUDA0: weights 100.0 MiB" in text
    args = server_args(plan, model())
    assert args[args.index("-md") : args.index("-md") + 6] == [
        "-md",
        "/srv/draft.gguf",
        "-devd",
        "CUDA0",
        "-ngld",
        "all",
    ]
    assert args[args.index("--spec-type") + 1] == "draft-simple"
    assert args[args.index("--mmproj") : args.index("--mmproj") + 4] == [
        "--mmproj",
        "/srv/mmproj.gguf",
        "-mmdev",
        "CUDA0",
    ]
    assert not {"-md", "--mmproj"} & set(server_args(plan, model(), tool="llama-bench"))


def test_a_named_device_is_taken_and_the_cpu_is_told_as_none() -> None:
    plan = plan_with(model(), HEAD, n_ctx=2048, draft=SMALL, draft_device="CPU", drafted=8)
    args = server_args(plan, model())
    assert args[args.index("-devd") + 1] == "none"
    assert args[args.index("--spec-draft-n-max") + 1] == "8"
    assert plan["primary_host"]["companions"] == plan["companions"][0]["total"]
    assert [warning["code"] for warning in plan["warnings"]] == ["draft_on_cpu"]


def test_what_a_companion_takes_layers_cannot_have() -> None:
    """A model that fills the GPU alone goes to the worker in part; where that is not enough, there is no plan."""
    devices = [device("head", GIB, name="CPU", max_units=0), *workers(1, 500 * MIB), device("head", 1200 * MIB)]
    assert [found["host"] for found in plan_split(model(), devices, n_ctx=2048)["devices"]] == ["head"]
    plan = plan_with(model(), devices, n_ctx=2048, projector=PROJECTOR)
    assert [found["host"] for found in plan["devices"]] == ["w0", "head"]
    short = plan_with(model(), devices, n_ctx=2048, projector={**PROJECTOR, "weights": 900 * MIB})
    assert not short["feasible"]
    assert short["companions"][0]["weights"] == 900 * MIB


def test_the_largest_context_leaves_room_for_the_drafts_cache() -> None:
    cache = {"k_width": 512, "v_width": 512, "window": None, "ratio": 1, "per_sequence": False}
    wide = model([layer(20 * MIB, caches=[cache]) for _number in range(4)], path="/srv/draft.gguf")
    devices = [device("head", 4 * GIB, name="CPU", max_units=0), device("head", 1600 * MIB)]
    asked = {"n_ctx": 2048, "n_ubatch": 64}
    alone = advise(model(), devices, **asked)["largest_ctx"]
    together = advise(model(), devices, **asked, draft=wide)["largest_ctx"]
    assert together < alone
    assert plan_with(model(), devices, **{**asked, "n_ctx": together}, draft=wide)["feasible"]
    assert not plan_with(model(), devices, **{**asked, "n_ctx": together + 256}, draft=wide)["feasible"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": {**SMALL, "n_vocab": 7}}, "has a vocabulary of 7 tokens"),
        ({"draft": SMALL, "draft_device": "CUDA3"}, "draft_device is 'CUDA3', but the primary itself has CPU, CUDA0"),
        ({"draft": SMALL, "mtp": True}, "choose one"),
        ({"mtp": True}, "has no MTP"),
        ({"draft": SMALL, "drafted": 0}, "drafted is 0"),
        ({"projector": {**PROJECTOR, "width": 7}}, "makes embeddings of 7 elements"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CompanionError, match=message):
        plan_with(model(), HEAD, n_ctx=2048, **options)


@pytest.mark.real
def test_a_file_that_is_no_projector_is_named(demo_model: Path) -> None:
    with pytest.raises(ProjectorError, match="is a model of architecture 'llama' and no projector"):
        projector_from_header(read_model(str(demo_model)))


# --- Against the real server -----------------------------------------------------------------------------------------


def served(llama_bin: Path, plan: dict[str, Any], known: dict[str, Any], log: Path, threads: int = 1) -> Any:
    """The log of a llama-server that was started by ``plan``, and has answered its health check."""
    api = servers.free_port()
    port = plan["rpc"].rpartition(":")[2]
    own = plan["devices"][0]
    names = ",".join(["CPU"] * 2)
    worker = [llama_bin / "ggml-rpc-server", "-H", "127.0.0.1", "-p", port, "-t", 1, "-d", names]
    argv = [llama_bin / "llama-server", *server_args(plan, known), "--port", api, "-t", threads, "-lv", 4]
    assert own["endpoint"]
    with log.open("wb") as stream, servers.program(worker):
        servers.wait_for_port(int(port))  # llama-server aborts without it
        with servers.program(argv, stdout=stream, stderr=stream):
            servers.wait_until_healthy(api)
    return _server_log.parse(log.read_text().splitlines())


def two_workers(usable: int = 8 * GIB) -> list[dict[str, Any]]:
    """The primary's CPU without layers, and one endpoint of two CPU devices with at least a layer each."""
    endpoint = f"127.0.0.1:{servers.free_port()}"
    shared: dict[str, Any] = {"n_endpoint_devices": 2, "min_units": 1, "name": "CPU"}
    return [
        device("head", 8 * GIB, name="CPU", max_units=0),
        *(device("box", usable, endpoint, index=number, pool=f"m{number}", **shared) for number in range(2)),
    ]


def known_model(path: Path) -> dict[str, Any]:
    return model_from_header(read_model(str(path))).to_dict()


def not_more_than_promised(plan: dict[str, Any], log: Any) -> None:
    """No problem is reported, weights and caches of every device are as planned, and no buffer is larger."""
    rows, problems = _server_log.compare(plan, log)
    assert problems == []
    for row in rows:
        assert row["total_measured"] is not None
        assert row["compute_measured"] <= row["compute_promised"] <= row["compute_measured"] * 1.15 + 64 * MIB
        if row["endpoint"]:
            assert row["equal_to_printed_digit"]


@pytest.mark.real
@pytest.mark.parametrize("slots", [1, 4])
def test_a_draft_model_takes_what_was_planned(llama_bin: Path, demo_model: Path, tmp_path: Path, slots: int) -> None:
    known = known_model(demo_model)
    options = {"n_ctx": 4096, "n_parallel": slots, "cache_ram": 0, "type_k": "q8_0", "type_v": "q8_0"}
    plan = plan_with(known, two_workers(), **options, draft=known, drafted=4)
    log = served(llama_bin, plan, known, tmp_path / "log")
    assert "adding speculative implementation 'draft-simple'" in (tmp_path / "log").read_text()
    not_more_than_promised(plan, log)
    planned = plan["companions"][0]
    measured = log.amount("host", "kv").bytes
    assert abs(measured - planned["kv"]) < 0.01 * MIB
    assert log.amount("host", "weights").bytes <= planned["weights"] + plan["primary_host"]["weights"]


@pytest.mark.real
def test_mtp_layers_take_what_was_planned(llama_bin: Path, demo_model: Path, tmp_path: Path) -> None:
    known = known_model(made_up.with_mtp(tmp_path / "mtp.gguf", demo_model))
    plan = plan_with(known, two_workers(), n_ctx=4096, cache_ram=0, mtp=True)
    log = served(llama_bin, plan, known, tmp_path / "log")
    assert "adding speculative implementation 'draft-mtp'" in (tmp_path / "log").read_text()
    not_more_than_promised(plan, log)


@pytest.mark.real
@pytest.mark.parametrize("size", [128, 512])
def test_a_projector_takes_what_was_planned(llama_bin: Path, demo_model: Path, tmp_path: Path, size: int) -> None:
    known = known_model(demo_model)
    found = projector_from_header(read_model(str(made_up.projector(tmp_path / "mmproj.gguf", size=size))))
    plan = plan_with(known, two_workers(), n_ctx=2048, cache_ram=0, projector=found.to_dict())
    log = served(llama_bin, plan, known, tmp_path / "log")
    assert "loaded multimodal model" in (tmp_path / "log").read_text()
    not_more_than_promised(plan, log)
    assert log.projector is not None
    assert abs(log.projector * MIB - found.weights) < 0.01 * MIB
    lines = (tmp_path / "log").read_text().splitlines()
    buffers = [float(line.split()[-2]) for line in lines if "CPU compute buffer size" in line]
    own = next(float(line.split()[-2]) for line in lines if "reserve_compute_meta" in line)
    scores = 3 * (size // 16) ** 4 * 4  # what is counted on top for devices without flash attention
    assert abs(found.compute - scores - own * MIB) < 0.01 * MIB
    assert abs(log.memory["host", "compute"].mib - sum(buffers)) < 0.01
