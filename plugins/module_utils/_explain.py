# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Words for a plan: why nothing fits and what would, why a device is left out, what to watch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils import _chain, _optimise
from ansible_collections.llamafleet.rpc.plugins.module_utils._placement import (
    Part,
    Solved,
    parts,
    problems,
    solve,
    stage_devices,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan_input import MAX_DEVICES, Device, Request

_MIB = 1 << 20
_CTX_STEP = 256  # llama.cpp pads the context to this many cells
_SLOW_LOAD_S = 300  # a load longer than this deserves a word; every start sends the weights again
_GAP = 0.01  # a plan that could be better by more than this share deserves a word
_HINT_EFFORT = 10_000  # a hint need not be the last word
_VISION = ("vl", "vision", "llava", "mllama", "llama4", "omni", "ocr", "pixtral")


def mib(size: float) -> str:
    """Bytes for people."""
    return f"{size / _MIB:,.1f} MiB".replace(",", " ")


def _after_margin(room: int) -> str:
    return f"{mib(room)} after the margin" if room >= 0 else "less than its margin"


# --- Why nothing fits ------------------------------------------------------------------------------------------------


def reason(request: Request) -> str:
    """Why no plan exists, with the numbers, and what would fit."""
    wanted = [device for device in request.devices if device.most != 0]
    primary = _primary_short(request)
    units = _units_short(request, wanted)
    if units and not primary:
        return f"{units}."  # no context is short enough for contradictory limits
    return f"{primary or _memory_short(request, wanted)}. {_what_fits(request)}"


def _primary_short(request: Request) -> str | None:
    """The primary cannot hold its own buffers."""
    host = request.cpu
    if host is None:
        return None
    own = request.host_bytes(pipelining=False)
    for name, usable in ((host.label, host.usable), (f"pool {host.pool}", host.pool_usable)):
        has = request.budget(usable)
        if own > has:
            return (
                f"The primary is too small for its own buffers (input embedding {mib(request.model.input_bytes)}, "
                f"compute, logits and prompt cache {mib(own - request.model.input_bytes)}): it needs {mib(own)}, "
                f"{name} has {_after_margin(has)}, short by {mib(own - has)}"
                + (f" (cache_ram is {mib(request.cache_ram)} of it)" if request.cache_ram else "")
            )
    return None


def _units_short(request: Request, wanted: Sequence[Device]) -> str | None:
    """min_units, max_units and the number of devices contradict each other, whatever the memory."""
    units = request.model.n_layer + 1
    least = sum(device.least for device in wanted)
    if least > units:
        return f"The devices must hold at least {least} units by min_units, but the model has {units}; lower min_units"
    if all(device.most is not None for device in wanted):
        most = sum(device.most or 0 for device in wanted)
        if most < units:
            return f"The devices may hold {most} units by max_units, but the model has {units}; raise max_units"
    forced = [device for device in wanted if device.least and not device.is_cpu]
    if len(forced) > MAX_DEVICES:
        return (
            f"{len(forced)} devices have min_units above 0, but llama.cpp takes at most {MAX_DEVICES} devices (16 "
            "backends, the CPU is one); give min_units to fewer devices, or make several clusters"
        )
    return None


def _memory_short(request: Request, wanted: Sequence[Device]) -> str:
    """The split that misses by least, and who is short in it; else the pool or the number of devices that stops it."""
    best: tuple[int, _optimise.Problem, _optimise.Placement] | None = None
    tried = list(problems(request, wanted, lend=True))
    for problem, _way in tried:
        found = _chain.worst_shortage(problem)
        if found is not None and (best is None or found[0] < best[0]):
            best = (found[0], problem, found[1])
    needs = _total_need(request)
    has = _room(request, wanted)
    apart = sum(max(0, request.budget(device.usable)) for device in wanted)
    once = "" if has == apart else ", memory that they share counted once"
    head = (
        f"The model needs at least {mib(needs)} (weights {mib(sum(request.sizes.weights))}, context of "
        f"{request.params.n_ctx} tokens {mib(sum(request.sizes.context))}, compute buffers), "
        + (f"the {len(wanted)} devices have" if len(wanted) > 1 else "the only device has")
        + f" {mib(has)} after the margin{'s' if len(wanted) > 1 else ''}{once}"
    )
    if needs > has:
        head += f", short by {mib(needs - has)}"
    if best is None:
        return f"{head}; min_units and max_units leave no split"
    short, problem, placement = best
    devices = stage_devices(wanted)
    if short > 0:
        return f"{head}. {_worst_run(request, problem, placement, devices, short)}"
    return f"{head}. {_limit_short([problem for problem, _way in tried], devices)}"


def _room(request: Request, wanted: Sequence[Device]) -> int:
    """What the devices may hold together: of each pool no more than there is of it."""
    pools: dict[str, int] = {}
    for device in wanted:
        whole = max(0, request.budget(device.pool_usable))
        pools[device.pool] = min(whole, pools.get(device.pool, 0) + max(0, request.budget(device.usable)))
    return sum(pools.values())


def _total_need(request: Request) -> int:
    """Weights, context and the compute buffer of a single device: what any split needs at the very least."""
    fixed = request.buffers.work_alone[2] + request.model.per_device_bytes
    return sum(request.sizes.weights) + sum(request.sizes.context) + fixed


def _worst_run(
    request: Request,
    problem: _optimise.Problem,
    placement: _optimise.Placement,
    devices: Sequence[Device],
    short: int,
) -> str:
    lines = []
    for number, run in enumerate(placement.runs):
        needs, device = problem.run_bytes(run.begin, run.end, number == 0), devices[run.stage]
        if needs - request.budget(device.usable) == short:
            lines.append(
                f"In the split that misses by least, {device.label} needs {mib(needs)} for {run.end - run.begin} of "
                f"{problem.units} units, has {_after_margin(request.budget(device.usable))}, short by {mib(short)}"
                + (f" (its min_units is {device.least}; lower it)" if device.least else "")
            )
    return lines[0] if lines else f"The best split is short by {mib(short)} on a device"


def _limit_short(tried: Iterable[_optimise.Problem], devices: Sequence[Device]) -> str:
    """Every device alone has room, so a pool or the number of devices is what stops the plan."""
    best: tuple[int, str] | None = None
    for problem in tried:
        names = list(dict.fromkeys(device.pool for device in devices))
        for number, size in enumerate(problem.pools):
            needs = _chain.least_use(problem, number)
            if needs is not None and needs > size and (best is None or needs - size < best[0]):
                text = (
                    f"The devices of pool {names[number]} share one memory: they need {mib(needs)} of it together, "
                    f"it has {mib(size)} left, short by {mib(needs - size)}"
                )
                best = (needs - size, text)
        places = _chain.least_use(problem, None)
        if places is not None and places > MAX_DEVICES and best is None:
            text = (
                f"At least {places} devices are needed, but llama.cpp takes at most {MAX_DEVICES} in one cluster (16 "
                "backends, the CPU is one); use devices with more memory"
            )
            best = (0, text)
    return best[1] if best else "Each device and each pool has room alone, but no split keeps all limits at once"


def _what_fits(request: Request) -> str:
    """The largest context that fits, or a smaller cache type; found by planning again."""

    def fits(**changed: Any) -> bool:
        other = request.with_params(replace(request.params, **changed))
        return solve(replace(other, objective="latency", effort=_HINT_EFFORT)) is not None

    hints = []
    low, high = 0, (request.params.n_ctx - 1) // _CTX_STEP  # in steps; low fits (or is 0), high + 1 does not
    while low < high:
        middle = (low + high + 1) // 2
        if fits(n_ctx=middle * _CTX_STEP):
            low = middle
        else:
            high = middle - 1
    if low:
        hints.append(f"n_ctx {low * _CTX_STEP} would fit")
    params = request.params
    could_shrink = params.type_k == params.type_v == "f16" and params.flash_attn != "off" and _has_blocks(request)
    if could_shrink and fits(type_k="q8_0", type_v="q8_0"):
        hints.append(f"n_ctx {params.n_ctx} with type_k and type_v q8_0 would fit")
    if hints:
        return "; ".join(hints)
    return "No shorter context fits; add memory or devices, or take a smaller quantisation of the model"


def _has_blocks(request: Request) -> bool:
    """Whether every cached row is whole blocks of q8_0."""
    caches = [cache for layer in request.model.layers for cache in layer.caches]
    return bool(caches) and all(cache.k_width % 32 == 0 and cache.v_width % 32 == 0 for cache in caches)


# --- Why a device is left out ----------------------------------------------------------------------------------------


def dropped(request: Request, solved: Solved) -> list[dict[str, Any]]:
    """Every device without a unit, and why."""
    held = [part.device for part in parts(request, solved)]
    problem = solved.problem
    smallest = min(problem.run_bytes(begin, begin + 1, False) for begin in range(problem.units))
    return [
        {"host": device.host, "endpoint": device.endpoint, "device": device.device, "why": why}
        for device in request.devices
        if device not in held
        for why in [_why(request, solved, device, len(held), smallest)]
    ]


def _why(request: Request, solved: Solved, device: Device, used: int, smallest: int) -> str:
    if device.most == 0:
        return "max_units is 0"
    if device.priority > solved.priority:
        return f"not needed: devices of priority {solved.priority} hold the model, this one has {device.priority}"
    room = request.budget(device.usable)
    if room < smallest and not device.is_cpu:
        return (
            f"too small: {mib(max(0, room))} after the margin, one layer with its compute buffer takes {mib(smallest)}"
        )
    if used >= MAX_DEVICES and not device.is_cpu:
        return f"llama.cpp takes at most {MAX_DEVICES} devices, the others do better"
    if request.objective == "memory":
        return "layers on it would not raise the smallest headroom"
    if request.objective == "prefill":
        return "layers on it would not shorten the slowest stage"
    if device.endpoint is not None:
        return "not needed: the plan without its round trip is faster"
    return "not needed: the other devices are faster"


# --- What to watch ---------------------------------------------------------------------------------------------------


def warnings(request: Request, solved: Solved, plan: Mapping[str, Any]) -> list[dict[str, str]]:
    """Things that work but cost, or may not work on this hardware, as ``{code, text}``."""
    held = parts(request, solved)
    entries = plan["devices"]
    found = [
        *_speed_warnings(request, held, entries, solved.way.head),
        *_hardware_warnings(request, [part.device for part in held]),
    ]
    params, model = request.params, request.model
    if params.n_ctx > model.n_ctx_train > 0:
        text = f"n_ctx {params.n_ctx} is above the {model.n_ctx_train} tokens the model was trained with"
        found.append(("context_beyond_training", text))
    if params.type_k != params.type_v:
        text = f"K cache {params.type_k} and V cache {params.type_v} differ: GPU workers may have no kernel for that"
        found.append(("mixed_cache_types", text))
    if solved.gap > _GAP:
        text = (
            "the search among so many splits was cut short: this plan fits, and another one could be better by at "
            f"most {solved.gap:.1%}"
        )
        found.append(("not_proved", text))
    if request.cpu is None:
        text = "the list has no CPU of the primary: its own buffers are not checked against its memory"
        found.append(("primary_memory_unknown", text))
    return [{"code": code, "text": text} for code, text in found]


def _speed_warnings(
    request: Request, held: Sequence[Part], entries: Sequence[Mapping[str, Any]], head: bool
) -> Iterable[tuple[str, str]]:
    for part, entry in zip(held, entries):
        device = part.device
        if device.link_mbps is not None:
            seconds = entry["weights"] * 8 / (device.link_mbps * 1e6)
            if seconds > _SLOW_LOAD_S:
                text = (
                    f"{device.label}: {mib(entry['weights'])} go over {device.link_mbps:g} Mbit/s at every start, "
                    f"about {seconds:.0f} s; use a wired or faster link, the worker's cache, or fewer layers there"
                )
                yield "slow_load", text
        if device.endpoint is not None and entry["output"] and not head:
            text = (
                f"{device.label} holds the output layer: it sends {4 * request.model.n_vocab} bytes of logits back for "
                "every token; a GPU in the primary would take it"
            )
            yield "remote_output", text
        if device.is_cpu and len(held) > 1:
            text = f"{entry['units']} layers run on the primary's CPU, which switches pipelining of prompts off"
            yield "partial_offload", text
        if solved_borrowing(request, part):
            text = f"{device.label} reads caches that another device holds: they cross the network for every token"
            yield "shared_cache_split", text
    if head:
        text = (
            f"the output matrix stays on the primary's CPU, so that {4 * request.model.n_vocab} bytes of logits need "
            "not cross the network for every token; this switches pipelining of prompts off"
        )
        yield "output_on_primary", text
    guessed = [part.device.label for part in held if part.device.assumed]
    if guessed and request.objective != "memory":
        yield "default_bandwidth", f"no measured memory bandwidth for {', '.join(guessed)}: a default was used"


def solved_borrowing(request: Request, part: Part) -> bool:
    """Whether a layer of this device reads the cache of a layer elsewhere."""
    layers = request.model.layers[part.begin : part.end]
    return any(layer.borrows_from is not None and layer.borrows_from < part.begin for layer in layers)


def _hardware_warnings(request: Request, held: Sequence[Device]) -> Iterable[tuple[str, str]]:
    model = request.model
    cpu_workers = [device for device in held if device.endpoint is not None and device.device.startswith("CPU")]
    if cpu_workers and model.n_expert > 0 and any(word in model.architecture.lower() for word in _VISION):
        text = (
            f"{model.architecture} is a multimodal MoE and {cpu_workers[0].label} is a CPU worker, which does not "
            "report operations it lacks: such a mix has crashed at warm-up; leave the CPU out (max_units 0), or test it"
        )
        yield "moe_vision_cpu_worker", text
    for cpu in cpu_workers:
        others = [device for device in held if device.endpoint == cpu.endpoint and device is not cpu]
        if others:
            text = (
                f"endpoint {cpu.endpoint} of {cpu.host} offers CPU and {others[0].device}: one process serves both, "
                "and a crash of one takes the other along; give each its own instance"
            )
            yield "mixed_endpoint", text
