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
from dataclasses import dataclass, replace
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils import _memory
from ansible_collections.llamafleet.rpc.plugins.module_utils._companions import (
    Companions,
    companions_of,
    plan_with,
    prepare,
    request_of,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._explain import mib
from ansible_collections.llamafleet.rpc.plugins.module_utils._placement import solve
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan_input import Request
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


@dataclass(frozen=True)
class _Question:
    """What is planned: every device with its pool named, the options of plan_split, and what runs beside the model."""

    model: object
    devices: tuple[Mapping[str, Any], ...]
    options: Mapping[str, object]
    companions: Companions

    def request(self) -> Request:
        """The question as the planner takes it, companions off."""
        asked = request_of(self.model, self.devices, self.options)
        if not self.companions:
            return asked
        model, devices, _needs = prepare(self.companions, self.model, self.devices, asked.params)
        return request_of(model, devices, self.options)

    def fits(self) -> bool:
        """Whether there is a plan. What llama.cpp would refuse does not fit."""
        try:
            return solve(self.request()) is not None
        except _memory.MemoryParamsError:
            return False

    def asking(self, **options: object) -> _Question:
        """The same with other options."""
        return replace(self, options={**self.options, **options})

    def grown(self, more: Mapping[str, int]) -> _Question:
        """The same with ``more`` bytes in each of the pools named there."""
        return replace(
            self,
            devices=tuple(
                {
                    **item,
                    "usable": item["usable"] + more.get(item["pool"], 0),
                    "pool_usable": item["pool_usable"] + more.get(item["pool"], 0),
                }
                for item in self.devices
            ),
        )


def advise(model: object, devices: object, **options: object) -> dict[str, Any]:
    """``{feasible, largest_ctx, changes}`` for what ``plan_with`` takes (same names and units, same errors).

    ``largest_ctx``: tokens, at most what the model was trained for (or what was asked for); None when no context fits.
    ``changes``: empty when feasible, else the cures, cheapest first, each ``{change: cache_type|context|memory, n_ctx,
    type_k, type_v, types_changed, memory: [{host, device, more, usable}], tokens_per_s}`` with all that is to be set.
    ``more`` and ``usable`` are bytes (by how much, to what).
    """
    plan = plan_with(model, devices, **options)
    companions, others = companions_of(options)
    question = _Question(model, tuple(_pooled(devices)), others, companions)
    params = request_of(model, devices, others).params
    largest = _largest_context(question, params)
    return {
        "feasible": plan["feasible"],
        "largest_ctx": largest,
        "changes": [] if plan["feasible"] else _changes(question, params, largest, options),
    }


def _pooled(devices: object) -> list[dict[str, Any]]:
    """The devices, checked by the planner before, each with a pool."""
    return [
        {
            **item,
            "pool": item.get("pool") or f"{item['host']}/{item.get('endpoint')}/{item['device']}",
            "pool_usable": item["usable"] if item.get("pool_usable") is None else item["pool_usable"],
        }
        for item in (devices if isinstance(devices, Sequence) else ())
    ]


def _changes(
    question: _Question, params: _memory.ContextParams, largest: int | None, options: Mapping[str, object]
) -> list[dict[str, Any]]:
    found = []
    for changed in (_smaller_cache(question, params), _smaller_context(question, params, largest)):
        if changed:
            kind = "context" if "n_ctx" in changed else "cache_type"
            found.append(_change(question.asking(**changed), options, params, kind, []))
    offered = replace(question, devices=_with_new_worker(question.devices))
    for wider, pools in ((question, _pools(question)), (offered, [NEW_WORKER["pool"]])):
        more = _more_memory(wider, pools)
        if more:
            grown = wider.grown(more)
            found.append(_change(grown, options, params, "memory", _rows(grown, more)))
    return found


def _change(
    question: _Question,
    options: Mapping[str, object],
    params: _memory.ContextParams,
    kind: str,
    memory: list[dict[str, Any]],
) -> dict[str, Any]:
    """One cure, planned as a user would plan it."""
    plan = plan_with(question.model, list(question.devices), **{**options, **question.options})
    type_k, type_v = plan["params"]["type_k"], plan["params"]["type_v"]
    return {
        "change": kind,
        "n_ctx": plan["n_ctx"],
        "type_k": type_k,
        "type_v": type_v,
        "types_changed": (type_k, type_v) != (params.type_k, params.type_v),
        "memory": memory,
        "tokens_per_s": plan["predicted"]["tokens_per_s"],
    }


# --- The searches ----------------------------------------------------------------------------------------------------


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


def _largest_context(question: _Question, params: _memory.ContextParams) -> int | None:
    """The most tokens that fit with these types, in whole steps: at most what was trained for, or was asked."""
    asked = params.n_ctx
    most = max(asked, question.request().model.n_ctx_train)
    if question.asking(n_ctx=most).fits():
        return most
    known = asked if asked < most and question.fits() else 0
    low, high = known // CTX_STEP, -(-(most if known else asked) // CTX_STEP)
    while high - low > 1:
        middle = (low + high) // 2
        if question.asking(n_ctx=middle * CTX_STEP).fits():
            low = middle
        else:
            high = middle
    return max(low * CTX_STEP, known) or None


def _smaller_types(params: _memory.ContextParams) -> list[str]:
    """Cache types that take less than the present ones, largest first."""
    present = sum(_per_element(name) for name in (params.type_k, params.type_v))
    return [name for name in CACHE_STEPS if 2 * _per_element(name) < present]


def _per_element(name: str) -> float:
    block, size = _memory.CACHE_TYPES[name]
    return size / block


def _smaller_cache(question: _Question, params: _memory.ContextParams) -> dict[str, object]:
    """The largest cache type that cures it at the context that was asked for; empty if none does."""
    for name in _smaller_types(params):
        changed: dict[str, object] = {"type_k": name, "type_v": name}
        if question.asking(**changed).fits():
            return changed
    return {}


def _smaller_context(question: _Question, params: _memory.ContextParams, largest: int | None) -> dict[str, object]:
    """The largest context with the types that were asked for; else with the largest types that leave any."""
    if largest is not None:
        return {"n_ctx": largest}
    for name in _smaller_types(params):
        changed: dict[str, object] = {"type_k": name, "type_v": name}
        size = _largest_context(question.asking(**changed), params)
        if size is not None:
            return {**changed, "n_ctx": size}
    return {}


# --- More memory -----------------------------------------------------------------------------------------------------


def _pools(question: _Question) -> list[str]:
    """Memories that could grow, those of devices that may hold something, and the primary's own."""
    return list(
        dict.fromkeys(
            item["pool"]
            for item in question.devices
            if item.get("max_units") != 0 or is_primary_cpu(item.get("endpoint"), item["device"])
        )
    )


def _more_memory(question: _Question, pools: Sequence[str]) -> dict[str, int]:
    """The least bytes that cure it: in one of ``pools``, else in one and the primary's own. Empty: nothing does."""
    best = _least_of(question, pools, {})
    cpus = [item["pool"] for item in question.devices if is_primary_cpu(item.get("endpoint"), item["device"])]
    if best or not cpus:
        return best
    own = cpus[0]  # its buffers are short, and somebody's layers as well
    for pool in pools:
        first = _least_of(question, [own], {pool: _MOST_STEPS * MEMORY_STEP}) if pool != own else {}
        both = {**first, **_least_of(question, [pool], first)} if first else {}
        if len(both) == 2 and (not best or sum(both.values()) < sum(best.values())):
            best = both
    return best


def _least_of(question: _Question, pools: Sequence[str], beside: Mapping[str, int]) -> dict[str, int]:
    """``{pool: bytes}`` of the pool that needs least, with what the others get ``beside``; empty if none is enough."""
    best: dict[str, int] = {}
    most = _MOST_STEPS
    for pool in pools:

        def cured(steps: int, pool: str = pool) -> bool:
            return question.grown({**beside, pool: steps * MEMORY_STEP}).fits()

        found = _least(cured, most) if most and cured(most) else None  # cheap for a pool that needs more than the best
        if found is not None:
            best, most = {pool: found * MEMORY_STEP}, found - 1
    return best


def _with_new_worker(devices: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """The devices and one more worker, in llama.cpp's order: before the primary's GPUs."""
    own = [is_primary_cpu(item.get("endpoint"), item["device"]) or item.get("endpoint") for item in devices]
    place = next((number for number, other in enumerate(own) if not other), len(devices))
    return (*devices[:place], NEW_WORKER, *devices[place:])


def _rows(question: _Question, more: Mapping[str, int]) -> list[dict[str, Any]]:
    """A row for each pool that grew, named after its first device."""
    rows: dict[str, dict[str, Any]] = {}
    for item in question.devices:
        if item["pool"] in more:
            named = {
                "host": item["host"],
                "device": item["device"],
                "more": more[item["pool"]],
                "usable": item["usable"],
            }
            rows.setdefault(item["pool"], named)
    return [rows[pool] for pool in more if pool in rows]


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
