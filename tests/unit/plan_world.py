# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Small models and devices for tests of the planner, and llama.cpp's own rule for --tensor-split."""

from __future__ import annotations

from typing import Any

import numpy as np

MIB = 1 << 20
GIB = 1 << 30


def layer(weights: int, **changed: Any) -> dict[str, Any]:
    """A repeating layer with one attention cache; only keys of the public contract."""
    values = {
        "weights": weights,
        "active": weights,
        "caches": [{"k_width": 128, "v_width": 128, "window": None, "ratio": 1, "per_sequence": False}],
        "state_per_sequence": 0,
        "borrows_from": None,
        "mtp": False,
    }
    return {**values, **changed}


def model(layers: list[dict[str, Any]] | None = None, **changed: Any) -> dict[str, Any]:
    """What gguf_info returns, only keys of the public contract. Small enough that compute buffers hardly matter."""
    held = [layer(100 * MIB) for _number in range(10)] if layers is None else layers
    values: dict[str, Any] = {
        "path": "/srv/m.gguf",
        "architecture": "llama",
        "name": "m",
        "n_layer": len(held),
        "n_embd": 64,
        "n_vocab": 1000,
        "n_ctx_train": 131072,
        "n_expert": 0,
        "n_expert_used": 0,
        "file_bytes": sum(each["weights"] for each in held),
        "input_bytes": 10 * MIB,
        "output_bytes": 10 * MIB,
        "per_device_bytes": 0,
        "tied": False,
        "layers": held,
        "quantization": "Q4_0",
        "shards": ["/srv/m.gguf"],
    }
    return {**values, **changed}


def device(host: str, usable: int, endpoint: str | None = None, name: str = "CUDA0", **changed: Any) -> dict[str, Any]:
    """A plan device as fleet_devices makes it."""
    values: dict[str, Any] = {
        "host": host,
        "endpoint": endpoint,
        "index": 0,
        "n_endpoint_devices": 1,
        "device": name,
        "pool": f"{host}/{name}",
        "usable": usable,
        "pool_usable": usable,
        "bandwidth": 100e9,
        "rtt_ms": 0.5 if endpoint else None,
        "overhead_ms": 0.5 if endpoint else None,
        "priority": None,
        "min_units": None,
        "max_units": None,
    }
    return {**values, **changed}


def workers(count: int, usable: int, **changed: Any) -> list[dict[str, Any]]:
    """``count`` workers with one device each."""
    return [device(f"w{k}", usable, f"10.0.0.{k + 1}:18711", **changed) for k in range(count)]


def assigned(split: list[int], n_layer: int, n_gpu_layers: int) -> list[int | None]:
    """Device number of every unit (None: CPU) by the float32 rule of b11434, src/llama-model.cpp load_tensors."""
    sums = np.cumsum(np.array(split, dtype=np.float32), dtype=np.float32)
    shares = sums / sums[-1]
    start = max(n_layer + 1 - n_gpu_layers, 0)
    active = np.float32(min(n_gpu_layers, n_layer + 1))
    places = (np.arange(n_layer + 1 - start, dtype=np.float32)) / active
    return [None] * start + [int(number) for number in np.searchsorted(shares, places, side="right")]
