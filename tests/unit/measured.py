# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The measured models of tests/unit/data/memory: header as read from the file, and every run of llama.cpp on it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._gguf import Header, Tensor
from ansible_collections.llamafleet.rpc.plugins.module_utils._memory import ContextParams
from ansible_collections.llamafleet.rpc.plugins.module_utils._model import Model, model_from_header

DATA = Path(__file__).parent / "data" / "memory"
NAMES = sorted(path.stem for path in DATA.glob("*.json"))
FAMILY_DATA = Path(__file__).parent / "data" / "families"
FAMILIES = sorted(path.stem for path in FAMILY_DATA.glob("*.json"))

_NUMBERS = {"-c": "n_ctx", "-ub": "n_ubatch", "-b": "n_batch", "-np": "n_parallel"}
_TEXTS = {"-ctk": "type_k", "-ctv": "type_v", "-fa": "flash_attn"}


@dataclass(frozen=True)
class Device:
    """Measured bytes of one device, and the layers it held."""

    model_bytes: int
    context_bytes: int
    compute_bytes: int
    compute_real_bytes: int | None  # None where the real server was not started
    layers: tuple[int, ...]
    output: bool


@dataclass(frozen=True)
class Run:
    """One run: parameters, devices in order, the primary."""

    name: str
    kind: str
    params: ContextParams
    devices: tuple[Device, ...]
    host: Device
    pipelining: bool
    draft_mtp: bool
    kv_on_host: bool
    experts_on_host: bool
    layers_on_host: tuple[int, ...]


def read(name: str) -> dict[str, Any]:
    """The file as it is."""
    directory = DATA if name in NAMES else FAMILY_DATA
    data: dict[str, Any] = json.loads((directory / f"{name}.json").read_text())
    return data


@cache
def header(name: str) -> Header:
    """The header that was measured."""
    data = read(name)
    metadata = {key: tuple(value) if isinstance(value, list) else value for key, value in data["metadata"].items()}
    metadata["general.architecture"] = data["arch"]
    tensors = tuple(Tensor(label, tuple(dims), kind, size) for label, dims, kind, size in data["tensors"])
    return Header(name, 3, metadata, {}, tensors, sum(tensor.nbytes for tensor in tensors), (name,))


@cache
def model(name: str) -> Model:
    """The model as accounted for."""
    return model_from_header(header(name))


@cache
def runs(name: str) -> tuple[Run, ...]:
    """Every run of the file."""
    n_layer = model(name).n_layer
    return tuple(_run(case, n_layer) for case in read(name)["cases"])


@dataclass(frozen=True)
class Estimate:
    """One run of llama-fit-params: per device its layers and (model, context, compute) in MiB, rounded down."""

    params: ContextParams
    devices: tuple[tuple[tuple[int, ...], tuple[int, int, int]], ...]
    host: tuple[int, int, int]


@cache
def estimates(name: str) -> tuple[Estimate, ...]:
    """Every run of a file of FAMILIES."""
    n_layer = model(name).n_layer
    found = []
    for case in read(name)["cases"]:
        ends = [sum(case["units"][: number + 1]) for number in range(len(case["units"]))]
        held = [
            tuple(index for index in range(end - count, end) if index < n_layer)
            for end, count in zip(ends, case["units"])
        ]
        *devices, host = [tuple(row) for row in case["mib"]]
        found.append(Estimate(_params(case["args"], 1), tuple(zip(held, devices)), host))
    return tuple(found)


def _params(args: str, slots: int) -> ContextParams:
    """The parameters that ``args`` mean to a program that has ``slots`` unified slots unless -np says otherwise."""
    words = shlex.split(args)
    values = dict(zip(words, words[1:]))
    options: dict[str, Any] = {"n_parallel": slots}
    options.update((field, int(values[word])) for word, field in _NUMBERS.items() if word in values)
    options.update((field, values[word]) for word, field in _TEXTS.items() if word in values)
    unified = "--kv-unified" in words or ("-np" not in values and "--no-kv-unified" not in words)
    options["kv_unified"] = unified or ("--no-kv-unified" not in words and options["n_parallel"] == 1)
    options["swa_full"] = "--swa-full" in words
    return ContextParams(**options)


def _run(case: dict[str, Any], n_layer: int) -> Run:
    words = shlex.split(case["args"])
    values = dict(zip(words, words[1:]))
    offloaded = n_layer + 1 if values["-ngl"] == "all" else int(values["-ngl"])
    start = n_layer + 1 - offloaded
    devices = []
    for number, device in enumerate(case["devices"]):
        # A unit goes to the first device whose cumulated share is above its own (llama-model.cpp, load_tensors).
        held = [
            unit
            for unit in range(start, n_layer + 1)
            if sum(case["units"][:number]) * offloaded <= (unit - start) * sum(case["units"])
            and (unit - start) * sum(case["units"]) < sum(case["units"][: number + 1]) * offloaded
        ]
        devices.append(_device(device, tuple(unit for unit in held if unit < n_layer), n_layer in held))
    return Run(
        name=case["id"],
        kind=case["kind"],
        params=_params(case["args"], 4 if case["kind"] == "server" else 1),
        devices=tuple(devices),
        host=_device(case["host"], (), False),
        pipelining=case["pipeline"],
        draft_mtp=values.get("--spec-type") == "draft-mtp",
        kv_on_host="-nkvo" in words,
        experts_on_host="--cpu-moe" in words or "--n-cpu-moe" in values,
        layers_on_host=tuple(range(start)),
    )


def _device(data: dict[str, Any], layers: tuple[int, ...], output: bool) -> Device:
    return Device(
        data["model_bytes"],
        data["context_bytes"],
        data["compute_bytes"],
        data.get("compute_real_bytes"),
        layers,
        output,
    )
