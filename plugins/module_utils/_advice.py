# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What would it take? The largest context that fits, and the cheapest changes that cure a model that does not fit.

Cheapest first: a smaller type of the KV cache (costs a little quality), a smaller context (costs use), more memory
(costs money). Nothing is estimated: each change is found by planning with it, and is the least of its kind, so one step
less (the next larger type, 256 tokens more, 64 MiB less) does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils import _memory, _plan
from ansible_collections.llamafleet.rpc.plugins.module_utils._explain import mib
from ansible_collections.llamafleet.rpc.plugins.module_utils._placement import solve
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan_input import Device, Request, make_request
from ansible_collections.llamafleet.rpc.plugins.module_utils._records import is_primary_cpu

CTX_STEP = 256  # tokens; llama.cpp pads the context to this many cells
MEMORY_STEP = 64 << 20  # bytes; the least margin of a plan
CACHE_STEPS = ("f16", "q8_0", "q4_0")  # largest first
_MOST_STEPS = 1 << 20  # 64 TiB: no machine has more

# A worker to be bought: at an address that is nobody's (RFC 5737), as quick as a CPU is assumed to be.
NEW_WORKER: dict[str, Any] = {
    "host": "a new worker",
    "endpoint": "192.0.2.1:1",
    "device": "CPU",
    "pool": "a new worker",
    "usable": 0,
    "pool_usable": 0,
}


def advise(model: object, devices: object, **options: object) -> dict[str, Any]:
    """``{feasible, largest_ctx, changes}`` for what ``plan_split`` takes (same names and units, same errors).

    ``largest_ctx``: tokens, at most what the model was trained for (or what was asked for); None when no context fits.
    ``changes``: empty when feasible, else the cures, cheapest first, each ``{change: cache_type|context|memory, n_ctx,
    type_k, type_v, types_changed, memory: [{host, device, more, usable}], tokens_per_s}`` with all that is to be set.
    ``more`` and ``usable`` are bytes (by how much, to what).
    """
    plan = _plan.plan_split(model, devices, **options)
    request = _request(model, devices, options)
    largest = _largest_context(request)
    return {
        "feasible": plan["feasible"],
        "largest_ctx": largest,
        "changes": [] if plan["feasible"] else _changes(model, devices, options, request, largest),
    }


def _request(model: object, devices: object, options: Mapping[str, object]) -> Request:
    """The question, checked. Whether it fits does not depend on the objective."""
    others = ("objective", "margin", "cache_ram")
    context = {name: value for name, value in options.items() if name not in others}
    return make_request(model, devices, context, "latency", options.get("margin"), options.get("cache_ram"))


def _changes(
    model: object, devices: object, options: Mapping[str, object], request: Request, largest: int | None
) -> list[dict[str, Any]]:
    found = []
    for params in filter(None, (_smaller_cache(request), _smaller_context(request, largest))):
        kind = "context" if params.n_ctx != request.params.n_ctx else "cache_type"
        found.append(_change(model, devices, options, kind, params, []))
    for offered in (_listed(devices), _with_new_worker(devices)):
        wider = _request(model, offered, options)
        new = len(offered) > len(_listed(devices))
        more = _more_memory(wider, [NEW_WORKER["pool"]] if new else _pools(wider))
        if more:
            enlarged, rows = _with_more(offered, wider, more)
            found.append(_change(model, enlarged, options, "memory", request.params, rows))
    return found


def _change(
    model: object,
    devices: object,
    options: Mapping[str, object],
    kind: str,
    params: _memory.ContextParams,
    memory: list[dict[str, Any]],
) -> dict[str, Any]:
    """One cure, planned as a user would plan it."""
    changed = {"n_ctx": params.n_ctx, "type_k": params.type_k, "type_v": params.type_v}
    plan = _plan.plan_split(model, devices, **{**options, **changed})
    return {
        "change": kind,
        **changed,
        "types_changed": params.type_k != options.get("type_k", "f16"),
        "memory": memory,
        "tokens_per_s": plan["predicted"]["tokens_per_s"],
    }


# --- The searches ----------------------------------------------------------------------------------------------------


def _fits(request: Request | None) -> bool:
    return request is not None and solve(request) is not None


def _least(good: Callable[[int], bool], most: int) -> int | None:
    """The ``n`` of 1..``most`` with good(n) and not good(n - 1), where good(0) is false. None: not even good(most)."""
    low, high = 0, 1
    while not good(high):
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if good(middle):
            high = middle
        else:
            low = middle
    return high


def _changed(request: Request, **changed: Any) -> Request | None:
    """The same question with other parameters; None if llama.cpp would refuse those."""
    try:
        return request.with_params(replace(request.params, **changed))
    except _memory.MemoryParamsError:
        return None


def _largest_context(request: Request) -> int | None:
    """The most tokens that fit with these types, in whole steps: at most what was trained for, or was asked."""
    asked = request.params.n_ctx
    most = max(asked, request.model.n_ctx_train)
    if _fits(_changed(request, n_ctx=most)):
        return most
    known = asked if asked < most and _fits(_changed(request, n_ctx=asked)) else 0
    low, high = known // CTX_STEP, -(-(most if known else asked) // CTX_STEP)
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(_changed(request, n_ctx=middle * CTX_STEP)):
            low = middle
        else:
            high = middle
    return max(low * CTX_STEP, known) or None


def _smaller_types(request: Request) -> list[str]:
    """Cache types that take less than the present ones, largest first."""
    params = request.params
    present = sum(_per_element(name) for name in (params.type_k, params.type_v))
    return [name for name in CACHE_STEPS if 2 * _per_element(name) < present]


def _per_element(name: str) -> float:
    block, size = _memory.CACHE_TYPES[name]
    return size / block


def _smaller_cache(request: Request) -> _memory.ContextParams | None:
    """The largest cache type that cures it at the context that was asked for."""
    for name in _smaller_types(request):
        other = _changed(request, type_k=name, type_v=name)
        if other is not None and _fits(other):
            return other.params
    return None


def _smaller_context(request: Request, largest: int | None) -> _memory.ContextParams | None:
    """The largest context with the types that were asked for; else with the largest types that leave any."""
    if largest is not None:
        return replace(request.params, n_ctx=largest)
    for name in _smaller_types(request):
        other = _changed(request, type_k=name, type_v=name)
        size = None if other is None else _largest_context(other)
        if other is not None and size is not None:
            return replace(other.params, n_ctx=size)
    return None


# --- More memory -----------------------------------------------------------------------------------------------------


def _pools(request: Request) -> list[str]:
    """Memories that could grow, those of devices that may hold something."""
    return list(dict.fromkeys(device.pool for device in request.devices if device.most != 0))


def _grown(request: Request, more: Mapping[str, int]) -> Request:
    """The same question with ``more`` bytes in each of the pools named there."""

    def grow(device: Device) -> Device:
        size = more.get(device.pool, 0)
        return replace(device, usable=device.usable + size, pool_usable=device.pool_usable + size)

    return replace(request, devices=tuple(grow(device) for device in request.devices))


def _more_memory(request: Request, pools: Sequence[str]) -> dict[str, int]:
    """The least bytes that cure it: in one of ``pools``, else in one and the primary's own. Empty: nothing does."""
    best = _least_of(request, pools, {})
    if best or request.cpu is None:
        return best
    own = request.cpu.pool  # its buffers are short, and somebody's layers as well
    for pool in pools:
        first = _least_of(request, [own], {pool: _MOST_STEPS * MEMORY_STEP}) if pool != own else {}
        both = {**first, **_least_of(request, [pool], first)} if first else {}
        if both and (not best or sum(both.values()) < sum(best.values())):
            best = both
    return best


def _least_of(request: Request, pools: Sequence[str], beside: Mapping[str, int]) -> dict[str, int]:
    """``{pool: bytes}`` of the pool that needs least, with what the others get ``beside``; empty if none is enough."""
    best: dict[str, int] = {}
    most = _MOST_STEPS
    for pool in pools:

        def cured(steps: int, pool: str = pool) -> bool:
            return _fits(_grown(request, {**beside, pool: steps * MEMORY_STEP}))

        found = _least(cured, most) if most and cured(most) else None  # cheap for a pool that needs more than the best
        if found is not None:
            best, most = {pool: found * MEMORY_STEP}, found - 1
    return best


def _listed(devices: object) -> list[Any]:
    return list(devices) if isinstance(devices, Sequence) else []


def _with_new_worker(devices: object) -> list[Any]:
    """The devices and one more worker, in llama.cpp's order: before the primary's GPUs."""
    listed = _listed(devices)
    own = [is_primary_cpu(item.get("endpoint"), item["device"]) or item.get("endpoint") for item in listed]
    place = next((number for number, other in enumerate(own) if not other), len(listed))
    return [*listed[:place], NEW_WORKER, *listed[place:]]


def _with_more(
    devices: object, request: Request, more: Mapping[str, int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The devices as given with more memory in those pools, and a row for each of the pools."""
    enlarged: list[dict[str, Any]] = []
    rows: dict[str, dict[str, Any]] = {}
    known = {(device.endpoint, device.index, device.device): device for device in request.devices}
    for item in _listed(devices):
        device = known[item.get("endpoint"), item.get("index") or 0, item["device"]]
        size = more.get(device.pool, 0)
        changed = {"usable": device.usable + size, "pool": device.pool, "pool_usable": device.pool_usable + size}
        enlarged.append({**item, **changed} if size else dict(item))
        if size:
            row = rows.setdefault(device.pool, {"host": device.host, "device": device.device, "more": size})
            row["usable"] = max(row.get("usable", 0), device.usable + size)
    return enlarged, list(rows.values())


# --- For people ------------------------------------------------------------------------------------------------------


def advice_lines(advice: Mapping[str, Any], n_ctx_train: int | None = None) -> list[str]:
    """What ``advise`` found, as lines; ``n_ctx_train``: what the model was trained for."""
    largest = advice["largest_ctx"]
    if largest is None:
        lines = ["largest context that fits: none"]
    else:
        trained = ", all that the model was trained for" if largest == n_ctx_train else ""
        lines = [f"largest context that fits: {largest} tokens{trained}"]
    if advice["feasible"]:
        return lines
    cures = [_cure(change) for change in advice["changes"]]
    if not cures:
        return [*lines, "nothing of one kind would make it fit: see min_units and max_units, or take a smaller model"]
    lines.append(f"cheapest change that would make it fit: {cures[0]}")
    return lines + [f"or: {cure}" for cure in cures[1:]]


def _cure(change: Mapping[str, Any]) -> str:
    types = f"type_k and type_v {change['type_k']}"
    if change["change"] == "cache_type":
        text = types
    elif change["change"] == "context":
        text = f"n_ctx {change['n_ctx']}" + (f" with {types}" if change["types_changed"] else "")
    else:
        text = " and ".join(
            f"{row['host']} that lends {mib(row['usable'])}"
            if row["host"] == NEW_WORKER["host"]
            else f"{mib(row['more'])} more for {row['host']} {row['device']} (then {mib(row['usable'])} usable)"
            for row in change["memory"]
        )
    speed = change["tokens_per_s"]
    return text + (f", predicted {speed:.1f} tokens/s" if speed else "")
