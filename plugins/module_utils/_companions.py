# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What runs beside the planned model in the same llama-server: a draft model, the model's own MTP layers, a projector.

Draft model and projector live on one device of the primary itself. Left alone they would not: llama-server spreads a
draft over the workers as it does the model, and puts a projector on the first device of ``-dev``, which is a worker. So
both get a device, their bytes are taken off it before the split is planned, and the plan says so. Measured on b11434:

* a draft model on a device of its own takes what a plan for that device alone would give it; on the CPU its whole file,
  mapped, and one cache and compute buffer. Without ``--spec-type`` it is loaded and never used.
* MTP layers are loaded where the split puts them, with a second context there: a cache of n_ctx cells for them, and a
  compute buffer as large as that of a first device; and one more set of inputs and logits on the primary.
* either makes the model itself compute (drafted + 1) logits for each slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils import _memory, _plan
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._explain import mib
from ansible_collections.llamafleet.rpc.plugins.module_utils._model import Layer, Model
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan_input import Request, make_request
from ansible_collections.llamafleet.rpc.plugins.module_utils._projector import Projector
from ansible_collections.llamafleet.rpc.plugins.module_utils._records import is_primary_cpu

_F32 = 4
DRAFTED = 3  # tokens drafted at a time, llama-server's default


class CompanionError(FleetError):
    """A companion that cannot run as it was asked for; the message says what to change."""


@dataclass(frozen=True)
class Companions:
    """What is to run beside the model. Devices are names of the primary's own; "" takes its first GPU, or its CPU.

    ``drafted``: tokens that are drafted at a time, by the draft model or (``mtp``) by the model's own layers.
    """

    draft: Model | None = None
    draft_device: str = ""
    mtp: bool = False
    drafted: int = DRAFTED
    projector: Projector | None = None
    projector_device: str = ""

    @property
    def speculative(self) -> bool:
        """Whether tokens are drafted."""
        return self.draft is not None or self.mtp

    def __bool__(self) -> bool:
        return self.speculative or self.projector is not None


@dataclass(frozen=True)
class Need:
    """Bytes of one companion: on its device, and ``beside`` in the primary's own memory if that is another one."""

    what: str
    path: str
    device: str
    weights: int
    kv: int
    compute: int
    beside: int

    @property
    def total(self) -> int:
        """On its device."""
        return self.weights + self.kv + self.compute


OPTIONS = ("draft", "draft_device", "mtp", "drafted", "projector", "projector_device")


def companions_of(options: Mapping[str, object]) -> tuple[Companions, dict[str, object]]:
    """The companions among ``options``, and the other options (those of plan_split).

    ``draft`` and ``projector`` are what gguf_info returned, or absent; ``draft_device``, ``projector_device``, ``mtp``,
    ``drafted`` as in Companions.
    """
    others = {name: value for name, value in options.items() if name not in OPTIONS}
    drafted = options.get("drafted", DRAFTED)
    if isinstance(drafted, bool) or not isinstance(drafted, int) or not 1 <= drafted <= 64:
        raise CompanionError(f"drafted is {drafted!r}; it must be a whole number from 1 to 64")
    draft, projector = options.get("draft"), options.get("projector")
    found = Companions(
        draft=Model.from_dict(draft) if draft else None,
        draft_device=str(options.get("draft_device") or ""),
        mtp=bool(options.get("mtp")),
        drafted=int(drafted),
        projector=Projector.from_dict(projector) if projector else None,
        projector_device=str(options.get("projector_device") or ""),
    )
    if found.draft is not None and found.mtp:
        raise CompanionError("a draft model and the model's own MTP layers are both asked for; choose one")
    return found, others


def check_options(options: Mapping[str, object]) -> None:
    """Refuse named options of a plan that there are not, and a plan for no number of tokens."""
    known = set(signature(_plan.plan_split).parameters) - {"model", "devices"} | set(OPTIONS)
    unknown = sorted(set(options) - known)
    if unknown or "n_ctx" not in options:
        problem = f"unknown option {', '.join(unknown)}" if unknown else "n_ctx is missing"
        raise CompanionError(f"{problem}; there are {', '.join(sorted(known))}")


def plan_with(model: object, devices: object, **options: object) -> dict[str, Any]:
    """``plan_split`` for a model and its companions; takes its options and those of ``companions_of``.

    The plan has two keys more. ``companions``: what, path, device, weights, kv, compute, total and beside (of the
    primary's own memory) of each, in bytes. ``drafted``: as asked, 0 without speculative decoding. ``usable`` of a
    device is what it lends in all, ``headroom`` what is left after companions.
    """
    companions, others = companions_of(options)
    plan = _plan.plan_split(model, devices, **others)
    found: list[Need] = []
    if companions:
        params = request_of(model, devices, others).params
        prepared, reduced, found = prepare(companions, model, devices, params)
        plan = _finished(_plan.plan_split(prepared, reduced, **others), devices, found)
        if companions.mtp:
            _show_mtp(plan, Model.from_dict(model), params)
        plan["warnings"] = [*plan["warnings"], *_warnings(companions, found)]
    return {
        **plan,
        "companions": [{**need.__dict__, "total": need.total} for need in found],
        "drafted": companions.drafted if companions.speculative else 0,
    }


def request_of(model: object, devices: object, options: Mapping[str, object]) -> Request:
    """The question that plan_split would answer, checked. Whether it fits does not depend on the objective."""
    known = {field.name for field in fields(_memory.ContextParams)}
    context = {name: value for name, value in options.items() if name in known}
    return make_request(model, devices, context, "latency", options.get("margin"), options.get("cache_ram"))


def prepare(
    companions: Companions, model: object, devices: object, params: _memory.ContextParams
) -> tuple[object, object, list[Need]]:
    """Model and devices to plan with, and what the companions take: their bytes are off the devices then."""
    if not companions:
        return model, devices, []
    if not isinstance(devices, Sequence) or isinstance(devices, (str, bytes)):
        return model, devices, []  # the planner says what is wrong with them
    known = Model.from_dict(model)
    wanted = needs(companions, known, devices, params)
    off: dict[str, int] = {}
    for need in wanted:
        off[need.device] = off.get(need.device, 0) + need.total
        off["CPU"] = off.get("CPU", 0) + need.beside
    if companions.mtp:
        known = _with_mtp(known, params)
    return known.to_dict(), _reduced(devices, off, _logits(companions, known, params)), wanted


def needs(companions: Companions, model: Model, devices: Sequence[Any], params: _memory.ContextParams) -> list[Need]:
    """What each companion takes under ``params`` (those of the model: a draft has as many cells, slots and batches)."""
    found = []
    if companions.draft is not None:
        device = _own_device(companions.draft_device, devices, "draft_device")
        found.append(_draft_need(companions.draft, model, device, params))
    if companions.mtp:
        found.append(_mtp_need(model, params))
    if companions.projector is not None:
        device = _own_device(companions.projector_device, devices, "projector_device")
        projector = companions.projector
        if projector.width not in (None, model.n_embd):
            raise CompanionError(
                f"{projector.path}: makes embeddings of {projector.width} elements, {model.path} takes {model.n_embd}; "
                "take the projector that belongs to the model"
            )
        beside = 0 if device == "CPU" else projector.picture
        compute = projector.compute + projector.picture - beside
        found.append(Need("projector", projector.path, device, projector.weights, 0, compute, beside))
    return found


def _own_device(name: str, devices: Sequence[Any], option: str) -> str:
    """The device of the primary that ``name`` means."""
    own = [str(item["device"]) for item in devices if isinstance(item, Mapping) and item.get("endpoint") is None]
    if name and name not in [*own, "CPU"]:
        raise CompanionError(f"{option} is {name!r}, but the primary itself has {', '.join(own) or 'no device'}")
    return name or next((device for device in own if not is_primary_cpu(None, device)), "CPU")


def _draft_need(draft: Model, model: Model, device: str, params: _memory.ContextParams) -> Need:
    """A draft model with a device of its own (measured on the CPU and on one worker)."""
    if draft.n_vocab != model.n_vocab:
        raise CompanionError(
            f"{draft.path}: has a vocabulary of {draft.n_vocab} tokens, {model.path} one of {model.n_vocab}; a draft "
            "must use the tokens of the model it drafts for"
        )
    layers = range(draft.n_layer)
    weights = sum(layer.weights for layer in draft.layers) + draft.per_device_bytes + draft.output_bytes
    kv = sum(_memory.layer_context_bytes(draft, index, params) for index in layers)
    alone = _memory.compute_bytes(
        draft, params, n_devices_listed=1, is_first=True, is_last_with_output=True, pipelining=False
    )
    logits = _memory.output_buffer_bytes(draft, params)
    if device != "CPU":
        beside = draft.input_bytes + _memory.host_compute_bytes(draft, params, pipelining=False) + logits
        return Need("draft model", draft.path, device, weights, kv, alone, beside)
    # Its file is mapped as a whole; a tied embedding is there once.
    weights = min(weights + draft.input_bytes, draft.file_bytes)
    held = _memory.host_compute_bytes(draft, params, pipelining=False, layers=layers)
    return Need("draft model", draft.path, device, weights, kv, max(held, alone) + logits, 0)


def _mtp_layers(model: Model) -> list[int]:
    return [index for index, layer in enumerate(model.layers) if layer.mtp]


def _mtp_need(model: Model, params: _memory.ContextParams) -> Need:
    """The second context on the primary; the layers themselves are part of the split."""
    if not _mtp_layers(model):
        raise CompanionError(f"{model.path} has no MTP (NextN) layers; use a draft model instead")
    beside = _memory.host_compute_bytes(model, params, pipelining=True) + _memory.output_buffer_bytes(model, params)
    return Need("MTP context", model.path, "CPU", 0, 0, beside, 0)


def mtp_compute(model: Model, params: _memory.ContextParams) -> int:
    """Compute buffer of the second context on the device that holds the MTP layers, in bytes: an upper bound."""
    layers = [replace(layer, mtp=False) for layer in model.layers if layer.mtp]
    alone = replace(model, layers=tuple(layers), n_layer=len(layers))
    return _memory.compute_bytes(
        alone, params, n_devices_listed=2, is_first=True, is_last_with_output=True, pipelining=True
    )


def _with_mtp(model: Model, params: _memory.ContextParams) -> Model:
    """The model with its MTP layers loaded: they weigh, have a cache, and bring the buffer of their context along."""
    extra = mtp_compute(_cached(model), params)
    last = _mtp_layers(model)[-1]

    def loaded(index: int, layer: Layer) -> Layer:
        weights = layer.mtp_weights + (extra if index == last else 0)
        return replace(layer, mtp=False, weights=weights, active=layer.mtp_weights)

    layers = tuple(loaded(i, layer) if layer.mtp else layer for i, layer in enumerate(_cached(model).layers))
    return replace(model, layers=layers)


def _cached(model: Model) -> Model:
    """The model with caches for MTP layers, which are attention as in the last such layer before them."""
    usual = next((layer.caches for layer in reversed(model.layers) if layer.caches and not layer.mtp), ())
    return replace(model, layers=tuple(replace(layer, caches=usual) if layer.mtp else layer for layer in model.layers))


def _logits(companions: Companions, model: Model, params: _memory.ContextParams) -> int:
    """Bytes of the logits of drafted tokens, where the output is computed: they are in no plan of the model alone."""
    if not companions.speculative:
        return 0
    return 2 * companions.drafted * params.n_parallel * model.n_vocab * _F32


def _finished(plan: dict[str, Any], devices: object, found: Sequence[Need]) -> dict[str, Any]:
    """The plan with what the devices lend in all, as given."""
    given = {
        (item.get("endpoint"), item.get("index") or 0, item["device"]): item["usable"]
        for item in (devices if isinstance(devices, Sequence) else ())
    }
    entries = [
        {**entry, "usable": given[entry["endpoint"], entry["index"], entry["device"]]} for entry in plan["devices"]
    ]
    host = dict(plan["primary_host"])
    if host.get("usable") is not None:
        own = [size for (endpoint, _index, device), size in given.items() if is_primary_cpu(endpoint, device)]
        taken = sum((need.total if need.device == "CPU" else 0) + need.beside for need in found)
        host.update(usable=own[0], companions=taken)
    return {**plan, "devices": entries, "primary_host": host}


def _show_mtp(plan: dict[str, Any], model: Model, params: _memory.ContextParams) -> None:
    """The compute buffer of the MTP layers' context was planned as weight of the last of them; it is compute memory."""
    extra, last = mtp_compute(_cached(model), params), _mtp_layers(model)[-1]
    for entry in plan["devices"]:
        if entry["first_layer"] is not None and entry["first_layer"] <= last <= entry["last_layer"]:
            entry.update(weights=entry["weights"] - extra, compute=entry["compute"] + extra)


def _warnings(companions: Companions, found: Sequence[Need]) -> list[dict[str, str]]:
    warned = []
    projector = companions.projector
    if projector is not None and not projector.measured:
        text = (
            f"{projector.path}: the memory of a projector of kind {projector.kind} was not measured: "
            f"{mib(projector.compute)} are kept for its buffers; compare with the log after the start"
        )
        warned.append({"code": "projector_not_measured", "text": text})
    for need in found:
        if need.what == "draft model" and need.device == "CPU":
            text = "the draft model runs on the primary's CPU, which is often slower than not to draft; measure both"
            warned.append({"code": "draft_on_cpu", "text": text})
    return warned


def companion_lines(plan: Mapping[str, Any]) -> list[str]:
    """What runs beside the model, as lines for people."""
    return [
        f"{need['what']} {need['path']} on the primary's {need['device']}: weights {mib(need['weights'])}, KV "
        f"{mib(need['kv'])}, compute {mib(need['compute'])}"
        + (f", and {mib(need['beside'])} of its own memory" if need["beside"] else "")
        for need in plan.get("companions") or []
    ]


def _reduced(devices: Sequence[Any], off: Mapping[str, int], logits: int) -> list[dict[str, Any]]:
    """The devices with less to lend: ``off`` by name of the primary's own, ``logits`` of every one (any may hold the
    output), and a pool by all that its devices lost."""
    lost = [(off.get(str(item["device"]), 0) if item.get("endpoint") is None else 0) + logits for item in devices]
    by_pool: dict[object, int] = {}
    for item, size in zip(devices, lost):
        if item.get("pool"):
            by_pool[item["pool"]] = by_pool.get(item["pool"], 0) + size - logits
    reduced = []
    for item, size in zip(devices, lost):
        changed = {**item, "usable": max(0, item["usable"] - size)}
        if item.get("pool"):
            pool_usable = item.get("pool_usable")
            changed["pool_usable"] = max(
                0, (item["usable"] if pool_usable is None else pool_usable) - by_pool[item["pool"]] - logits
            )
            changed["usable"] = min(changed["usable"], changed["pool_usable"])
        reduced.append(changed)
    return reduced
