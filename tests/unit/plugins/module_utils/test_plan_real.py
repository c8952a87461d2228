# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The real thing: two workers and a server started with the arguments of a plan, and its log against the promise."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._gguf import read_model
from ansible_collections.llamafleet.rpc.plugins.module_utils._model import model_from_header
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan import plan_split
from ansible_collections.llamafleet.rpc.plugins.module_utils._records import fleet_devices
from ansible_collections.llamafleet.rpc.plugins.module_utils._server_args import server_args
from ansible_collections.llamafleet.rpc.tests.unit.plan_world import GIB, MIB
from ansible_collections.llamafleet.rpc.tests.unit.servers import free_port

pytestmark = pytest.mark.real


@contextmanager
def running(argv: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the test, whatever happens."""
    with log.open("wb") as into:
        process = subprocess.Popen(argv, stdout=into, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def ask(port: int, method: str, path: str, body: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            if ask(port, "GET", "/health")[0] == 200:
                return
        except OSError:
            pass  # not listening yet
        time.sleep(0.2)
    pytest.fail("llama-server did not become ready: " + log.read_text(errors="replace")[-3000:])


def complete(port: int) -> str:
    body = json.dumps({"prompt": "The capital of France is", "n_predict": 8, "temperature": 0})
    return str(json.loads(ask(port, "POST", "/completion", body)[1])["content"])


def logged(text: str, kind: str) -> dict[str, str]:
    """The last size that the log has for each buffer: name -> MiB as printed."""
    return dict(re.findall(rf"(\S+)\s+{kind} buffer size\s*=\s*([0-9.]+) MiB", text))


def shown(size: int) -> str:
    return f"{size / MIB:.2f}"


@pytest.mark.parametrize(
    ("devices", "changed", "options", "expected"),
    [
        # one device each, the most even headroom
        ((1, 1), {}, {"objective": "memory"}, ["RPC0", "RPC1"]),
        # the first worker's second device stays unused, and is numbered all the same (law 2)
        ((2, 1), {"max_units": 0}, {"objective": "memory", "type_k": "q8_0", "type_v": "q8_0"}, ["RPC0", "RPC2"]),
        # the first layers on the primary's CPU
        ((1, 1), {"cpu": True}, {"objective": "memory", "n_parallel": 2, "kv_unified": False}, ["RPC0", "RPC1"]),
    ],
)
def test_promised_is_what_the_server_logs(
    tmp_path: Path,
    llama_bin: Path,
    demo_model: Path,
    devices: tuple[int, int],
    changed: dict[str, Any],
    options: dict[str, Any],
    expected: list[str],
) -> None:
    """Weights and caches to the last printed digit, compute not above the promise, every layer where it should be."""
    ports = [free_port(), free_port(), free_port()]
    cpu = {"index": 0, "device": "CPU", "usable": 2 * GIB, "min_units": 4 if "cpu" in changed else None}
    records: list[dict[str, Any]] = [
        {
            "host": "head",
            "instances": [{"endpoint": None, "devices": [{**cpu, "max_units": 4 if "cpu" in changed else 0}]}],
        }
    ]
    for number, count in enumerate(devices):
        offered = [{"index": k, "device": "CPU", "usable": (300 + 100 * number) * MIB} for k in range(count)]
        if count > 1:
            offered[1]["max_units"] = changed["max_units"]
        records.append(
            {"host": f"w{number}", "instances": [{"endpoint": f"127.0.0.1:{ports[number]}", "devices": offered}]}
        )
    model = model_from_header(read_model(str(demo_model))).to_dict()
    plan = plan_split(model, fleet_devices(records), n_ctx=2048, **options)
    assert sorted(plan["device_order"]) == expected

    with ExitStack() as stack:
        for number, count in enumerate(devices):
            worker = ["-H", "127.0.0.1", "-p", str(ports[number]), "-d", ",".join(["CPU"] * count), "-t", "1"]
            stack.enter_context(
                running([str(llama_bin / "ggml-rpc-server"), *worker], tmp_path / f"worker{number}.log")
            )
        time.sleep(1)
        log = tmp_path / "server.log"
        argv = [str(llama_bin / "llama-server"), *server_args(plan, model)]
        argv += ["--host", "127.0.0.1", "--port", str(ports[2]), "-lv", "5", "-t", "1", "--no-warmup"]
        server = stack.enter_context(running(argv, log))
        wait_for(ports[2], server, log)
        assert "Paris" in complete(ports[2])
        text = log.read_text(errors="replace")

    weights, caches, compute = logged(text, "model"), logged(text, "KV"), logged(text, "compute")
    for entry in plan["devices"]:
        name = "CPU" if entry["endpoint"] is None else f"RPC{entry['index']}[{entry['endpoint']}]"
        assert caches[name] == shown(entry["kv"])
        if entry["endpoint"] is not None:
            assert weights[name] == shown(entry["weights"])
            assert 0 < float(compute[name]) <= entry["compute"] / MIB
    assert 0 < float(compute["CPU"]) <= plan["primary_host"]["compute"] / MIB
    assert f"offloaded {plan['n_gpu_layers']}/31 layers to GPU" in text
    assigned = dict(re.findall(r"layer\s+(\d+) assigned to device (\w+)", text))
    unit = 0
    for entry in plan["devices"]:
        for _unit in range(entry["units"]):
            assert assigned[str(unit)] == entry["rpc_name"]
            unit += 1
    assert unit == 31
