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
  then to fewer devices, then to the order given.

Layers keep their order. The primary's CPU comes first and its GPUs last; remote devices stand in the best order there
is. The output matrix may stay on the primary's CPU where that pays. docs/cost-model.md has units and sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils import _alternatives, _explain
from ansible_collections.llamafleet.rpc.plugins.module_utils._placement import (
    Part,
    Solved,
    head_cost,
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
    alternatives: object = False,
) -> dict[str, Any]:
    """The plan (design: plan_split) for ``model`` (of gguf_info) on ``devices`` (of fleet_devices).

    Sizes are bytes, ``margin`` and ``cache_ram`` too; ``cache_ram`` None takes the largest prompt cache of 8192, 4096,
    .. 256, 0 MiB that fits beside the plan. ``alternatives`` adds what each device costs or saves, the second-best
    choice of devices and the plans for the loss of each worker, which takes as many solutions more. Too little memory
    gives a plan with ``feasible: false`` and the numbers in ``reason``. Raises PlanError, RecordError, ModelError or
    MemoryParamsError for values that make no sense.
    """
    if not isinstance(alternatives, bool):
        raise PlanError(f"alternatives is {alternatives!r}; it must be true or false")
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
    if alternatives:
        plan.update(_alternatives.choices(request, solved))
    return plan


def _build(request: Request, solved: Solved) -> dict[str, Any]:
    held = parts(request, solved)
    listed = [part for part in held if not part.device.is_cpu]
    used = {part.device.endpoint for part in listed}
    given = dict.fromkeys(device.endpoint for device in request.devices if device.endpoint in used)
    endpoints = [endpoint for endpoint in given if endpoint is not None]
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
        entries.append(_entry(request, solved, part, name, host))
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
        "output_on_primary": _output_on_primary(request, solved),
        "predicted": _predicted(request, solved, held),
        "certificate": _alternatives.certificate(request, solved),
    }


def _entry(request: Request, solved: Solved, part: Part, name: str, host: Mapping[str, Any]) -> dict[str, Any]:
    device, sizes = part.device, request.sizes
    weights = sum(sizes.weights[part.begin : part.end])
    if part.begin < sizes.trunk_end:
        weights += request.model.per_device_bytes
    has_output = part.end == request.model.n_layer + 1
    if has_output and solved.way.head:
        weights -= request.head_bytes
    context = sum(sizes.context[part.begin : part.end])
    total = weights + context + part.compute
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
    listed = [part for part in held if not part.device.is_cpu]
    pipelining = solved is not None and solved.way.pipelining and len(listed) > 1
    head = solved is not None and solved.way.head
    weights = model.input_bytes + (request.head_bytes if head else 0)
    context = 0
    buffers = request.buffers
    compute = (buffers.host_pipelined if pipelining else buffers.host_plain) + buffers.output
    if head:
        compute += buffers.cpu_head
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


def _output_on_primary(request: Request, solved: Solved) -> dict[str, Any] | None:
    """The output matrix on the primary's CPU: the override that puts it there, and what it takes. None if it is not.

    The pattern is searched for in tensor names (llama-model-loader.cpp), so it must not match attn_output.weight.
    """
    if not solved.way.head or request.cpu is None:
        return None
    return {
        "override": f"^{'token_embd' if request.model.tied else 'output'}.weight=CPU",
        "weights": request.head_bytes,
        "ms": milliseconds(head_cost(request, request.cpu)),
        "wire_bytes_saved": wire_bytes(request).logits,
    }


def _predicted(request: Request, solved: Solved, held: Sequence[Part]) -> dict[str, Any]:
    """Speed by the cost model, the least that any plan could take, and this plan on ideal hardware.

    ``hardware_ms`` leaves out every overhead that is no physics: full bandwidth, one round trip, the bytes on the wire.
    """
    sizes = request.sizes
    hardware, wire, trips = 0.0, 0, 0
    for part in held:
        device = part.device
        read = sum(sizes.active[part.begin : part.end]) + sum(sizes.context[part.begin : part.end])
        if part.end == request.model.n_layer + 1 and solved.way.head and request.cpu is not None:
            read -= request.head_bytes
            hardware += request.head_bytes / request.cpu.bandwidth * 1000
        hardware += read / device.bandwidth * 1000
        if device.endpoint is not None:
            wire += part.wire
            trips += 1
            hardware += device.rtt_ms + (part.wire * 8 / (device.link_mbps * 1000) if device.link_mbps else 0)
    total = milliseconds(solved.placement.cost)
    proved = solved.proved and request.objective == "latency"
    # Whoever reads them, all bytes are read once, and nobody is quicker than the quickest.
    fastest = max(device.bandwidth for device in request.devices)
    floor = round((sum(sizes.active) + sum(sizes.context)) / fastest * 1000, 6)
    return {
        "ms_per_token": total,
        "tokens_per_s": round(1000 / total, 3) if total else None,
        "lower_bound_ms": total if proved else min(total, max(floor, milliseconds(solved.cost_bound))),
        "gap": round(solved.gap, 6),
        "hardware_ms": round(hardware, 6),
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
        "output_on_primary": None,
        "predicted": {
            "ms_per_token": None,
            "tokens_per_s": None,
            "lower_bound_ms": None,
            "gap": None,
            "hardware_ms": None,
            "wire_bytes_per_token": None,
            "round_trips": None,
        },
        "certificate": None,
        "devices_compared": [],
        "second_best": None,
        "without": [],
        "dropped": [],
        "warnings": [],
    }


def _infeasible(request: Request, reason: str) -> dict[str, Any]:
    return {**_empty(request), "reason": reason, "primary_host": _primary_host(request, None, ())}
