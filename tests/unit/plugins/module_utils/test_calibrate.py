# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Speeds of devices: stand-ins that llama.cpp takes for models, what is made of its figures, and what is kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._calibrate import (
    CalibrationError,
    Target,
    bench_argv,
    layer_counts,
    measure,
    merge,
    settled,
    threads,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._gguf import read_model
from ansible_collections.llamafleet.rpc.plugins.module_utils._model import model_from_header
from ansible_collections.llamafleet.rpc.plugins.module_utils._records import fleet_devices
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Result, SystemRunner
from ansible_collections.llamafleet.rpc.plugins.module_utils._twin import Shape, shape_of, write_twin
from ansible_collections.llamafleet.rpc.plugins.module_utils._worker_record import Inputs, build_record

Q4_K, Q4_1 = 12, 3
LARGE = Shape(8192, 64, 8, 28672, Q4_K)  # a layer of a 70B model, 459 MiB


@pytest.mark.real
def test_a_stand_in_has_the_layers_of_the_model(demo_model: Path, tmp_path: Path) -> None:
    header = read_model(str(demo_model))
    model = model_from_header(header)
    shape = shape_of(model, header)
    assert (shape.width, shape.heads, shape.kv_heads, shape.feed_forward, shape.kind) == (576, 9, 3, 1536, Q4_1)
    size = write_twin(str(tmp_path / "twin.gguf"), shape, 5)
    twin = model_from_header(read_model(str(tmp_path / "twin.gguf")))
    assert (twin.n_layer, twin.layers[0].active, twin.file_bytes) == (5, model.layers[0].active, size)
    assert twin.layers[0].caches[0].k_width == model.layers[0].caches[0].k_width


def test_a_stand_in_costs_no_disk(tmp_path: Path) -> None:
    path = tmp_path / "twin.gguf"
    assert write_twin(str(path), LARGE, 4) == path.stat().st_size > 4 * LARGE.layer_bytes > 1.7e9
    assert path.stat().st_blocks * 512 < 1 << 20


@pytest.mark.real
def test_llama_bench_computes_with_it(llama_bin: Path, tmp_path: Path) -> None:
    """Four times the layers take more time, and what comes out is the speed of this machine's memory and kernels."""
    shape = Shape(576, 9, 3, 1536, Q4_1)
    stand_ins = {
        layers: (str(tmp_path / f"{layers}.gguf"), write_twin(str(tmp_path / f"{layers}.gguf"), shape, layers))
        for layers in (4, 40)
    }
    program = tmp_path / "llama-bench"  # with one thread: two that share busy processors wait for each other
    program.write_text(f'#!/bin/sh\nexec {llama_bin / "llama-bench"} -t 1 "$@"\n')
    program.chmod(0o755)
    found = measure(SystemRunner(), str(program), Target("", None), shape, stand_ins, None, 120)
    assert found["bandwidth"] is not None and 1e8 < found["bandwidth"] < 1e12
    assert found["rtt_ms"] is None and found["link_mbps"] is None


class Bench(SystemRunner):
    """llama-bench that takes 2 ms for a layer and 5 ms for all else, and loads at 1 Gbit/s, but for no real time."""

    def run(self, argv: Sequence[str], timeout: float = 30.0) -> Result:
        layers = int(Path(argv[2]).stem)
        rows = [{"n_gen": 32, "samples_ns": [int((5 + 2 * layers) * 32e6)] * 5}]
        return Result(0, json.dumps(rows), "")


def test_what_more_layers_take_is_layers_and_the_rest_is_overhead() -> None:
    stand_ins = {layers: (f"/x/{layers}", layers * LARGE.layer_bytes) for layers in (2, 8)}
    found = measure(Bench(), "/b", Target("RPC1", "10.0.0.2:50052"), LARGE, stand_ins, 0.5, 60)
    assert found["bandwidth"] == pytest.approx(LARGE.layer_bytes / 0.002)
    assert found["overhead_ms"] == pytest.approx(4.5)
    assert found["rtt_ms"] == 0.5


def test_a_host_that_is_too_busy_is_an_error_and_no_speed() -> None:
    class Busy(Bench):
        def run(self, argv: Sequence[str], timeout: float = 30.0) -> Result:
            return super().run([*argv[:2], "/x/3.gguf"], timeout)

    with pytest.raises(CalibrationError, match="too busy"):
        measure(Busy(), "/b", Target("", None), LARGE, {1: ("/x/1", 1), 4: ("/x/4", 4)}, None, 60)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (Target("RPC1", "10.0.0.2:50052"), "-ngl 99 --rpc 10.0.0.2:50052 -dev RPC1"),
        (Target("CUDA0", None), "-ngl 99 -dev CUDA0"),
        (Target("", None), "-ngl 0 -dev none"),
    ],
)
def test_one_device_at_a_time(target: Target, words: str) -> None:
    assert " ".join(bench_argv("/b", "/m", target)).endswith(words)


def test_the_threads_of_the_server_are_measured_with() -> None:
    assert threads(["--metrics", "--threads", 4, "-t", "6"]) == ["-t", "6"]
    assert threads(["--metrics"]) == threads(["-t"]) == []


def test_as_many_layers_as_a_third_of_the_device_takes() -> None:
    few, many = layer_counts(Shape(576, 9, 3, 1536, Q4_1), 300 << 20)
    assert (few, many) == (11, 47) and many * 2211840 <= 100 << 20
    assert layer_counts(Shape(576, 9, 3, 1536, Q4_1), 80 << 30) == (12, 48)
    with pytest.raises(CalibrationError, match="nothing to measure with"):
        layer_counts(LARGE, 1 << 30)


def test_jitter_moves_no_figure_and_a_real_change_does() -> None:
    old = {"bandwidth": 100e9, "overhead_ms": 1.0, "rtt_ms": None, "link_mbps": 940.0}
    new = {"bandwidth": 93e9, "overhead_ms": 1.3, "rtt_ms": 0.2123, "link_mbps": None}
    assert settled(new, old) == {"bandwidth": 100e9, "overhead_ms": 1.3, "rtt_ms": 0.212, "link_mbps": None}
    one = {"host": "a", "endpoint": "10.0.0.2:1", "index": 0, "device": "CPU"}
    assert merge([{**one, **new, "usable": 5}], [{**one, **old}]) == [{**one, **settled(new, old)}]
    other = {**one, "device": "CUDA0"}
    assert merge([{**other, **new}], [{**one, **old}])[0]["bandwidth"] == 93e9


CPU = {"name": "CPU", "backend": "cpu", "description": "x", "kind": "system_ram", "total": 9 << 30, "free": 9 << 30}
FACTS = {"machine_id": "m", "devices": [{**CPU, "usable": 8 << 30, "pool": "m/ram"}]}


def records(build: str = "b11434", **own: Any) -> list[dict[str, Any]]:
    entry = {"bandwidth": 7e9, "overhead_ms": 2.0, "rtt_ms": 0.3, "link_mbps": 100.0}
    measured = {
        "build": build,
        "at": "2026-11-29T00:00:00Z",
        "devices": [{"host": "w", "endpoint": "10.0.0.2:50052", "index": 0, "device": "CPU", **entry}],
    }
    devices = [{"device": "CPU", "usable": 4 << 30, **own}]
    worker = Inputs("w", "default", [{"endpoint": "10.0.0.2:50052", "devices": devices}], None, {"build": "b11434"})
    inputs = Inputs("p", "default", [{"name": "own"}], FACTS, {"build": "b11434"}, primary=True, measured=measured)
    return [build_record(inputs), build_record(worker)]


def test_what_was_measured_is_planned_with_and_what_is_declared_counts_more() -> None:
    (_cpu, worker) = fleet_devices(records())
    assert (worker["bandwidth"], worker["overhead_ms"], worker["rtt_ms"], worker["link_mbps"]) == (7e9, 2.0, 0.3, 100.0)
    (_cpu, worker) = fleet_devices(records(bandwidth=9e9))
    assert (worker["bandwidth"], worker["overhead_ms"]) == (9e9, 2.0)


def test_figures_of_another_build_are_not_used_and_that_is_said() -> None:
    listed = records("b11000")
    assert "measured" not in listed[0] and fleet_devices(listed)[1]["bandwidth"] is None
    kept = records()[0]
    same = Inputs("p", "default", [{"name": "own"}], FACTS, {"build": "b11434"}, primary=True, previous=kept)
    assert build_record(same)["measured"] == kept["measured"]
    other = Inputs("p", "default", [{"name": "own"}], FACTS, {"build": "b11500"}, primary=True, previous=kept)
    assert "measured" not in build_record(other)
    assert any("calibrate.yml again" in text for text in other.warnings)
