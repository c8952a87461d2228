# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Model and devices in, plan out: which device holds which layers, why, and what that costs.

The plan is the exact optimum of this cost model (proved by an independent brute force in the tests):

* a device needs its layers' weights and caches, its compute buffer, and what every device with a layer gets a copy of;
  that plus a margin must fit its ``usable`` bytes, and the sum over the devices of a pool must fit the pool, where the
  primary's own buffers count too;
* a device takes (active weight bytes + cache bytes at full context) / bandwidth per token, plus ``rtt_ms`` and
  ``overhead_ms`` if it is reached over RPC (``overhead_ms`` alone if not), plus wire bytes / ``link_mbps`` if known;
* objective ``latency``: the smallest sum over the devices; ``memory``: the largest smallest headroom / usable over the
  devices used (for the primary's CPU, its other buffers count); ``prefill``: the smallest time of the slowest device
  where llama.cpp pipelines (several devices, nothing on the primary's CPU), else the sum. Ties go to the smaller sum,
  then to fewer devices.

Layers keep their order, and devices are used in the order given (llama.cpp's: primary's CPU, RPC devices, local GPUs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils import _explain
from ansible_collections.llamafleet.rpc.plugins.module_utils._placement import (
    Part,
    Solved,
    milliseconds,
    parts,
    solve,
    wire_bytes,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan_input import (
    CACHE_RAM_STEPS,
    MIB,
    PlanError,
    Request,
    make_request,
)

__all__ = ["PlanError", "plan_split"]


def plan_split(
    model: object,
    devices: object,
    *,
    n_ctx: object,
    n_parallel: object = 1,
    type_k: object = "f16",
    type_v: object = "f16",
    n_batch: object = 2048,
    n_ubatch: object = 512,
    flash_attn: object = "auto",
    kv_unified: object = True,
    swa_full: object = False,
    objective: object = "latency",
    margin: object = None,
    cache_ram: object = None,
) -> dict[str, Any]:
    """The plan (design: plan_split) for ``model`` (of gguf_info) on ``devices`` (of fleet_devices).

    Sizes are bytes, ``margin`` and ``cache_ram`` too; ``cache_ram`` None takes the largest prompt cache of 8192, 4096,
    .. 256, 0 MiB that fits beside the plan. Too little memory gives a plan with ``feasible: false`` and the numbers in
    ``reason``. Raises PlanError, RecordError, ModelError or MemoryParamsError for values that make no sense.
    """
    request = make_request(
        model,
        devices,
        {
            "n_ctx": n_ctx,
            "n_parallel": n_parallel,
            "type_k": type_k,
            "type_v": type_v,
            "n_batch": n_batch,
            "n_ubatch": n_ubatch,
            "flash_attn": flash_attn,
            "kv_unified": kv_unified,
            "swa_full": swa_full,
        },
        objective,
        margin,
        cache_ram,
    )
    solved = solve(request)
    if solved is None:
        return _infeasible(request, _explain.reason(request))
    plan = _build(request, solved)
    plan["dropped"] = _explain.dropped(request, solved)
    plan["warnings"] = _explain.warnings(request, solved, plan)
    return plan


def _build(request: Request, solved: Solved) -> dict[str, Any]:
    held = parts(request, solved)
    listed = [part for part in held if not part.device.is_cpu]
    endpoints = list(dict.fromkeys(part.device.endpoint for part in listed if part.device.endpoint is not None))
    first_number: dict[str | None, int] = {}
    count = 0
    for endpoint in endpoints:  # law 2: all devices of the listed endpoints are numbered, used or not
        first_number[endpoint] = count
        count += max(device.n_endpoint_devices for device in request.devices if device.endpoint == endpoint)
    host = _primary_host(request, solved, held)
    entries = []
    for part in held:
        remote = part.device.endpoint is not None
        name = f"RPC{first_number[part.device.endpoint] + part.device.index}" if remote else part.device.device
        entries.append(_entry(request, part, name, host))
    cpu_units = solved.placement.start.units
    return {
        **_empty(request),
        "feasible": True,
        "n_gpu_layers": solved.problem.units - cpu_units,
        "devices": entries,
        "rpc": ",".join(endpoints),
        "tensor_split": ",".join(str(part.end - part.begin) for part in listed),
        "device_order": [entry["rpc_name"] for part, entry in zip(held, entries) if not part.device.is_cpu],
        "primary_host": host,
        "predicted": _predicted(request, held),
    }


def _entry(request: Request, part: Part, name: str, host: Mapping[str, Any]) -> dict[str, Any]:
    device, sizes = part.device, request.sizes
    weights = sum(sizes.weights[part.begin : part.end])
    if part.begin < sizes.trunk_end:
        weights += request.model.per_device_bytes
    context = sum(sizes.context[part.begin : part.end])
    total = weights + context + part.compute
    has_output = part.end == request.model.n_layer + 1
    has_layer = part.begin < request.model.n_layer
    return {
        "host": device.host,
        "endpoint": device.endpoint,
        "index": device.index,
        "device": device.device,
        "rpc_name": name,
        "units": part.end - part.begin,
        "first_layer": part.begin if has_layer else None,
        "last_layer": part.end - 1 - has_output if has_layer else None,
        "output": has_output,
        "weights": weights,
        "kv": context,
        "compute": part.compute,
        "total": total,
        "usable": device.usable,
        # The primary's other buffers stand in the memory of its CPU, so they are taken off there.
        "headroom": device.usable - (host["total"] if device.is_cpu else total),
        "ms": milliseconds(part.cost),
    }


def _primary_host(request: Request, solved: Solved | None, held: Sequence[Part]) -> dict[str, Any]:
    """What the primary's own process needs in RAM, the layers on its CPU included."""
    host, model = request.cpu, request.model
    pipelining = len([part for part in held if not part.device.is_cpu]) > 1 and not any(p.device.is_cpu for p in held)
    weights = model.input_bytes
    context = 0
    buffers = request.buffers
    compute = (buffers.host_pipelined if pipelining else buffers.host_plain) + buffers.output
    for part in held:
        if part.device.is_cpu:
            weights += sum(request.sizes.weights[: part.end]) + (
                model.per_device_bytes if request.sizes.trunk_end else 0
            )
            context += sum(request.sizes.context[: part.end])
            compute += part.compute
    taken = weights + context + compute
    cache = request.cache_ram
    if cache is None:
        cache = _largest_cache(request, solved, taken)
    return {
        "weights": weights,
        "kv": context,
        "compute": compute,
        "cache_ram": cache,
        "total": taken + cache,
        "usable": None if host is None else host.usable,
    }


def _largest_cache(request: Request, solved: Solved | None, taken: int) -> int:
    """The largest step of the prompt cache, in bytes, that fits the primary's memory beside everything else."""
    host = request.cpu
    if host is None:
        return CACHE_RAM_STEPS[0] * MIB  # nothing is known about the primary's memory: llama-server's own default
    beside = 0
    if solved is not None:
        for number, run in enumerate(solved.placement.runs):
            if solved.devices[run.stage].pool == host.pool:
                beside += solved.problem.run_bytes(run.begin, run.end, number == 0)
    left = min(request.budget(host.usable), request.budget(host.pool_usable) - beside) - taken
    return next((step * MIB for step in CACHE_RAM_STEPS if step * MIB <= left), 0)


def _predicted(request: Request, held: Sequence[Part]) -> dict[str, Any]:
    """Speed by the cost model; the lower bound leaves out every overhead that is no physics."""
    up, down = wire_bytes(request)
    total, bound, wire, trips = 0.0, 0.0, 0, 0
    first = True
    for part in held:
        device = part.device
        read = sum(request.sizes.active[part.begin : part.end]) + sum(request.sizes.context[part.begin : part.end])
        total += milliseconds(part.cost)
        bound += read / device.bandwidth * 1000
        if device.endpoint is not None:
            sent = (up[0] if first else up[1]) + down[1 if part.end == request.model.n_layer + 1 else 0]
            wire += sent
            trips += 1
            bound += device.rtt_ms + (sent * 8 / (device.link_mbps * 1000) if device.link_mbps else 0)
        first = first and device.is_cpu
    return {
        "ms_per_token": round(total, 6),
        "tokens_per_s": round(1000 / total, 3) if total else None,
        "lower_bound_ms": round(bound, 6),
        "wire_bytes_per_token": wire,
        "round_trips": trips,
    }


def _empty(request: Request) -> dict[str, Any]:
    """A plan with every key and nothing in it. ``params`` is what the server is to be started with."""
    params = request.params
    return {
        "feasible": False,
        "reason": None,
        "objective": request.objective,
        "n_gpu_layers": 0,
        "devices": [],
        "rpc": "",
        "tensor_split": "",
        "device_order": [],
        "n_ctx": params.n_ctx,
        "params": {
            "n_parallel": params.n_parallel,
            "type_k": params.type_k,
            "type_v": params.type_v,
            "n_batch": params.n_batch,
            "n_ubatch": params.n_ubatch,
            "flash_attn": params.flash_attn,
            "kv_unified": params.kv_unified,
            "swa_full": params.swa_full,
        },
        "primary_host": {},
        "predicted": {
            "ms_per_token": None,
            "tokens_per_s": None,
            "lower_bound_ms": None,
            "wire_bytes_per_token": None,
            "round_trips": None,
        },
        "dropped": [],
        "warnings": [],
    }


def _infeasible(request: Request, reason: str) -> dict[str, Any]:
    return {**_empty(request), "reason": reason, "primary_host": _primary_host(request, None, ())}
