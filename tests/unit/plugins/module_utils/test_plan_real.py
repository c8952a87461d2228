# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The real thing: two workers and a server started with the arguments of a plan, and its log against the promise."""

from __future__ import annotations

import http.client
import json
import re
import select
import socket
import subprocess
import threading
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


def complete(port: int, tokens: int = 8) -> str:
    asked = {"prompt": "The capital of France is", "n_predict": tokens, "temperature": 0}
    body = json.dumps({**asked, "ignore_eos": True, "cache_prompt": False})
    return str(json.loads(ask(port, "POST", "/completion", body)[1])["content"])


class Relay:
    """Stands between the primary and a worker, and counts the bytes of both directions."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.up = self.down = 0
        self.socket = socket.create_server(("127.0.0.1", free_port()))
        self.port: int = self.socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _address = self.socket.accept()
            except OSError:
                return  # closed at the end of the test
            worker = socket.create_connection(("127.0.0.1", self.target))
            for each in (client, worker):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._pump, args=(client, worker), daemon=True).start()

    def _pump(self, client: socket.socket, worker: socket.socket) -> None:
        with client, worker:
            while True:
                for ready in select.select([client, worker], [], [])[0]:
                    data = ready.recv(1 << 20)
                    if not data:
                        return
                    if ready is client:
                        self.up += len(data)
                        worker.sendall(data)
                    else:
                        self.down += len(data)
                        client.sendall(data)


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


@pytest.mark.parametrize(
    ("link_mbps", "options", "layers_on_cpu", "kept"),
    [
        (None, {}, 0, False),  # nothing is known of the links, so nothing is gained by sending less
        (10, {}, 0, True),
        (10, {}, 6, True),
        (10, {"type_k": "q8_0", "type_v": "q8_0", "n_parallel": 2}, 0, True),
    ],
)
def test_bytes_on_the_wire_and_the_output_matrix_on_the_primary(
    tmp_path: Path,
    llama_bin: Path,
    demo_model: Path,
    link_mbps: int | None,
    options: dict[str, Any],
    layers_on_cpu: int,
    kept: bool,
) -> None:
    """-ot keeps the logits off the wire: one round trip as before, buffers and bytes as planned."""
    relays = []
    with ExitStack() as stack:
        for number in range(2):
            port = free_port()
            worker = ["-H", "127.0.0.1", "-p", str(port), "-d", "CPU", "-t", "1"]
            stack.enter_context(
                running([str(llama_bin / "ggml-rpc-server"), *worker], tmp_path / f"worker{number}.log")
            )
            relays.append(Relay(port))
            stack.callback(relays[-1].socket.close)
        time.sleep(1)
        per_worker = (30 - layers_on_cpu) // 2
        devices = [
            {"host": "head", "endpoint": None, "device": "CPU", "usable": 2 * GIB, "bandwidth": 20e9,
             "min_units": layers_on_cpu or None, "max_units": layers_on_cpu or None},
            *({"host": f"w{k}", "endpoint": f"127.0.0.1:{relay.port}", "device": "CPU", "usable": GIB,
               "bandwidth": 20e9, "link_mbps": link_mbps, "min_units": per_worker + k}
              for k, relay in enumerate(relays)),
        ]  # fmt: skip
        model = model_from_header(read_model(str(demo_model))).to_dict()
        # With a prompt cache the primary would fetch the caches of finished requests from the workers.
        plan = plan_split(model, devices, n_ctx=2048, cache_ram=0, **options)
        assert (plan["output_on_primary"] is not None) is kept
        argv = [str(llama_bin / "llama-server"), *server_args(plan, model)]
        assert ("-ot" in argv) is kept
        log, port = tmp_path / "server.log", free_port()
        argv += ["--host", "127.0.0.1", "--port", str(port), "-lv", "5", "-t", "1", "--no-warmup"]
        server = stack.enter_context(running(argv, log))
        wait_for(port, server, log)
        assert "Paris" in complete(port)
        counted = []
        for tokens in (32, 64):
            before = sum(relay.up + relay.down for relay in relays)
            complete(port, tokens)
            counted.append(sum(relay.up + relay.down for relay in relays) - before)
        text = log.read_text(errors="replace")

    # The first 256 cells of the cache are in use, and the mask has 2 bytes for each of them, not for all 2048.
    spared = 2 * 2 * (2048 - 256)
    assert (counted[1] - counted[0]) / 32 == plan["predicted"]["wire_bytes_per_token"] - spared
    weights, caches, compute = logged(text, "model"), logged(text, "KV"), logged(text, "compute")
    for entry in plan["devices"]:
        if entry["endpoint"] is not None:
            name = f"RPC{entry['index']}[{entry['endpoint']}]"
            assert weights[name] == shown(entry["weights"])
            assert caches[name] == shown(entry["kv"])
            assert 0 < float(compute[name]) <= entry["compute"] / MIB
    assert 0 < float(compute["CPU"]) <= plan["primary_host"]["compute"] / MIB
    if kept:
        assert text.count("token_embd.weight (28 MiB q8_0) buffer type overridden to CPU") == 2
        assert "attn_output.weight" not in re.findall(r"tensor (\S+) .*buffer type overridden", text)
