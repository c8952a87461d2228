# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""primary_proof as a task sees it, on fake servers and on a real fleet of two workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.modules import primary_proof
from ansible_collections.llamafleet.rpc.tests.unit import servers

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

RECORDINGS = Path(__file__).parents[2] / "recordings" / "llama-server"
MIB = 1 << 20
BLOCK, EMBEDDING, NORM, KV = 2216448, 30081024, 2304, 1536 * 1024


def call(port: int, check_mode: bool = False, **options: Any) -> dict[str, Any]:
    given = dict({"url": f"http://127.0.0.1:{port}", "timeout": 30}, **options)
    return servers.run_module(primary_proof.main, given, check_mode)


def two_workers(first: str, second: str) -> dict[str, Any]:
    """The plan of 20 blocks on the first worker, 10 and the output on the second device of the second."""
    common = {"host": "w", "device": "CPU", "compute": 40 * MIB, "usable": 300 * MIB}
    devices = [
        dict(common, endpoint=first, index=0, rpc_name="RPC0", units=20, weights=20 * BLOCK, kv=20 * KV, output=False),
        dict(common, endpoint=second, index=1, rpc_name="RPC2", units=11, kv=10 * KV, output=True),
    ]
    devices[1]["weights"] = 10 * BLOCK + EMBEDDING + NORM
    return {
        "n_ctx": 2048,
        "n_gpu_layers": 31,
        "rpc": f"{first},{second}",
        "tensor_split": "20,11",
        "device_order": ["RPC0", "RPC2"],
        "devices": devices,
        "primary_host": {"weights": EMBEDDING, "kv": 0, "compute": 40 * MIB, "usable": 1000 * MIB},
    }


def test_a_new_answer_is_recorded_once_and_compared_ever_after(tmp_path: Path) -> None:
    record = tmp_path / "proof.json"
    with servers.serve(servers.api()) as port:
        planned = call(port, check_mode=True, record_path=str(record))
        assert not record.exists()
        first = call(port, record_path=str(record), model="m")
        second = call(port, record_path=str(record), model="m")
    assert (planned["changed"], first["changed"], second["changed"]) == (True, True, False)
    assert first["diff"]["after"] == " Paris.\n\nThe United States\n"
    assert (first["proof"]["known"], second["proof"]["known"]) == (False, True)
    assert second["proof"]["tokens_per_s"] == 50.5
    with servers.serve(servers.api(text=" Lyon.")) as port:
        third = call(port, record_path=str(record), model="m")
        other = call(port, record_path=str(record), model="n")
    assert (third["failed"], third["code"]) == (True, "changed")
    assert "' Lyon.' instead of ' Paris." in third["msg"]
    assert (other["failed"], other["changed"]) == (False, True)
    assert len(json.loads(record.read_text())["answers"]) == 2


def test_an_empty_answer_is_a_failure_and_is_never_recorded(tmp_path: Path) -> None:
    with servers.serve(servers.api(text="", tokens=())) as port:
        result = call(port, record_path=str(tmp_path / "proof.json"))
    assert (result["failed"], result["code"]) == (True, "empty")
    assert not (tmp_path / "proof.json").exists()


def test_the_key_comes_from_a_file_and_is_never_shown(tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_text("canary-4711\nanother\n")
    with servers.serve(servers.api(key="canary-4711")) as port:
        good = call(port, api_key_file=str(secret))
        secret.write_text("canary-4712\n")
        bad = call(port, api_key_file=str(secret))
        absent = call(port, api_key_file=str(tmp_path / "none"))
        secret.write_text("canary-4713\x01x\n")
        odd = call(port, api_key_file=str(secret))
    assert not good["failed"]
    assert (bad["failed"], bad["code"]) == (True, "refused")
    assert (absent["failed"], absent["code"]) == (True, "wrong_input")
    assert (odd["failed"], odd["code"]) == (True, "wrong_input")
    assert "canary" not in json.dumps([good, bad, absent, odd])


def test_the_log_is_compared_with_the_plan(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text((RECORDINGS / "two-workers.log").read_text())
    plan = two_workers("127.0.0.1:24311", "127.0.0.1:24312")
    with servers.serve(servers.api()) as port:
        good = call(port, plan=plan, log_paths=[str(log)])
        log.write_text((RECORDINGS / "nothing-offloaded.log").read_text())
        bad = call(port, plan=plan, log_paths=[str(log)])
        log.unlink()
        none = call(port, plan=plan, log_paths=[str(log)])
    assert (good["failed"], good["problems"]) == (False, [])
    assert [row["equal_to_printed_digit"] for row in good["table"]] == [True, True, True]
    assert (bad["failed"], bad["code"]) == (True, "not_as_planned")
    assert "offloaded 0/31 layers" in bad["msg"]
    assert [problem["code"] for problem in none["problems"]] == ["no_start_in_log"]
    assert not none["failed"]


def test_a_rotated_log_is_read_first(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    (tmp_path / "server.log.1").write_text((RECORDINGS / "two-workers.log").read_text())
    log.write_text("0.00.731.534 I srv  update_slots: all slots are idle\n")
    plan = two_workers("127.0.0.1:24311", "127.0.0.1:24312")
    with servers.serve(servers.api()) as port:
        result = call(port, plan=plan, log_paths=[str(log)])
    assert (result["failed"], result["problems"]) == (False, [])


def test_a_failure_is_explained_by_the_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text((RECORDINGS / "version-mismatch.log").read_text())
    result = call(servers.free_port(), timeout=0.2, log_paths=[str(log)])
    assert (result["failed"], result["code"]) == (True, "not_ready")
    assert [problem["code"] for problem in result["problems"]] == ["version_mismatch", "handshake_failed"]
    assert "Its log says" in result["msg"]


class Fleet:
    """Two real workers, the second with two devices, and a real primary."""

    def __init__(self, directory: Path, binaries: Path, model: Path, stack: contextlib.ExitStack) -> None:
        self.port, *workers = (servers.free_port() for _number in range(3))
        self.endpoints = [f"127.0.0.1:{port}" for port in workers]
        self.log = directory / "server.log"
        self.workers: list[subprocess.Popen[bytes]] = []
        for port, devices in zip(workers, ("CPU", "CPU,CPU")):
            argv = [binaries / "ggml-rpc-server", "-p", port, "-d", devices, "-t", 1]
            self.workers.append(stack.enter_context(servers.program(argv)))
            servers.wait_for_port(port)
        argv = [binaries / "llama-server", "-m", model, "--rpc", ",".join(self.endpoints), "-dev", "RPC0,RPC2"]
        argv += ["-ts", "20,11", "-sm", "layer", "-ngl", "all", "-fit", "off", "-c", 2048, "-np", 1, "-t", 1, "-lv", 4]
        argv += ["--host", "127.0.0.1", "--port", self.port]
        stack.callback(os.close, handle := os.open(self.log, os.O_WRONLY | os.O_CREAT, 0o644))
        environment = dict(os.environ, GGML_NO_BACKTRACE="1")
        self.primary = stack.enter_context(servers.program(argv, stdout=handle, stderr=handle, env=environment))

    def prove(self, **options: Any) -> dict[str, Any]:
        plan = two_workers(*self.endpoints)
        return call(self.port, plan=plan, log_paths=[str(self.log)], answer_timeout=5, **options)


@pytest.fixture
def fleet(llama_bin: Path, demo_model: Path, tmp_path: Path) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        yield Fleet(tmp_path, llama_bin, demo_model, stack)


@pytest.mark.real
def test_a_real_fleet_is_proved_and_its_memory_is_as_promised(fleet: Fleet, tmp_path: Path) -> None:
    record = str(tmp_path / "proof.json")
    first = fleet.prove(record_path=record)
    second = fleet.prove(record_path=record)
    assert (first["failed"], first["changed"], first["problems"]) == (False, True, [])
    assert "Paris" in first["proof"]["text"]
    assert first["proof"]["tokens_per_s"] > 0
    assert [row["equal_to_printed_digit"] for row in first["table"]] == [True, True, True]
    assert (second["failed"], second["changed"]) == (False, False)
    assert second["proof"]["text"] == first["proof"]["text"]


@pytest.mark.real
def test_a_worker_that_died_while_idle_is_noticed_before_a_user_does(fleet: Fleet) -> None:
    """B8-03: /health is 200 as before, the proof fails and the log says why."""
    assert not fleet.prove()["failed"]
    fleet.workers[1].kill()
    fleet.workers[1].wait()
    time.sleep(0.3)
    servers.wait_until_healthy(fleet.port, 2)
    result = fleet.prove(timeout=5)
    assert (result["failed"], result["code"]) == (True, "died")
    assert "worker_gone" in [problem["code"] for problem in result["problems"]]


@pytest.mark.real
def test_a_frozen_worker_is_a_failure_in_time(fleet: Fleet) -> None:
    """B8-03, law 10: a frozen worker leaves the primary hanging with /health 200."""
    assert not fleet.prove()["failed"]
    os.kill(fleet.workers[0].pid, signal.SIGSTOP)
    try:
        servers.wait_until_healthy(fleet.port, 2)
        start = time.monotonic()
        result = fleet.prove()
        assert time.monotonic() - start < 8
    finally:
        os.kill(fleet.workers[0].pid, signal.SIGCONT)
    assert (result["failed"], result["code"]) == (True, "no_answer")
    assert "a worker is frozen" in result["msg"]
