# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ways llama.cpp can run a model on a list of devices, as problems for the optimiser; and the best of them.

The cost model is stated in _plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ansible_collections.llamafleet.rpc.plugins.module_utils import _memory, _optimise
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan_input import MAX_DEVICES, Device, Request

_FS_PER_MS = 10**12
_TIE = 64  # costs are femtoseconds * 64 + devices used: of equally fast plans the one with fewer devices wins

# Wire traffic per generated token, measured on b11434 (protocol 7.0.0), exact for the last of two devices and 4 bytes
# off for the first: 6 SET_TENSOR of 314, GET_TENSOR 321 and GRAPH_RECOMPUTE 13 bytes, 24 bytes of positions and ids,
# hidden state and mask; the first device takes 2 more tensors of hidden size.
_WIRE_UP, _WIRE_UP_FIRST, _WIRE_DOWN = 6 * 314 + 321 + 13 + 24, 2 * 314, 8


@dataclass(frozen=True)
class Solved:
    """An optimum: the problem it is one of, the stages' devices, the placement, and whether llama.cpp pipelines."""

    problem: _optimise.Problem
    devices: tuple[Device, ...]
    placement: _optimise.Placement
    pipelining: bool
    priority: int


# --- The optimum -----------------------------------------------------------------------------------------------------


def solve(request: Request) -> Solved | None:
    """The optimum; devices of a worse priority are used only if the better ones cannot hold the model. None: no plan.

    A device is kept from reading caches that another one holds (gemma3n, gemma4: they would cross the network for every
    token) unless the model fits in no other way.
    """
    wanted = [device for device in request.devices if device.most != 0]
    borrows = any(layer.borrows_from is not None for layer in request.model.layers)
    for lend in (False, True) if borrows else (False,):
        for level in sorted({device.priority for device in wanted}):
            allowed = [device for device in wanted if device.priority <= level or device.least]
            found = _solve_with(request, allowed, level, lend)
            if found is not None:
                return found
    return None


def _solve_with(request: Request, allowed: Sequence[Device], level: int, lend: bool) -> Solved | None:
    stages = tuple(device for device in allowed if not device.is_cpu)
    best: tuple[Any, Solved] | None = None
    for problem, pipelining in problems(request, allowed, lend):
        for placement in _optima(request.objective, problem, pipelining, best[0][0] if best else _optimise.INF):
            key = _key(request.objective, problem, placement, pipelining)
            if best is None or key < best[0]:
                best = (key, Solved(problem, stages, placement, pipelining, level))
    return best[1] if best else None


def _optima(
    objective: str, problem: _optimise.Problem, pipelining: bool, known: float
) -> Iterable[_optimise.Placement]:
    """The best placements of one way of running. ``known``: the value of the best one so far."""
    if problem.places == 1:
        return _optimise.alone(problem)
    if objective == "memory":
        found = _optimise.most_even(problem)
    elif objective == "prefill" and pipelining:
        found = _optimise.shortest_stage(problem)
    else:
        found = _optimise.cheapest(problem, below=known)
    return [] if found is None else [found]


def _key(objective: str, problem: _optimise.Problem, placement: _optimise.Placement, pipelining: bool) -> Any:
    if objective == "memory":
        return _optimise.fullest(problem, placement), placement.cost
    if objective == "prefill" and pipelining:
        return _optimise.slowest(problem, placement), placement.cost
    return placement.cost, placement.cost


def problems(
    request: Request, allowed: Sequence[Device], lend: bool = False
) -> Iterable[tuple[_optimise.Problem, bool]]:
    """The three ways llama.cpp runs a model, each with its own compute buffers: (problem, whether it pipelines).

    One device without the CPU; several devices without the CPU, pipelined (four copies of the inputs on b11434); the
    CPU with or without devices behind it. ``lend``: a device may read caches that another one holds.
    """
    cpu = next((device for device in allowed if device.is_cpu), None)
    devices = [device for device in allowed if not device.is_cpu]
    nothing = cpu is None or not cpu.least
    kinds: list[tuple[bool, int, bool]] = []
    if devices and nothing:
        kinds.append((False, 1, False))
        if len(devices) > 1:
            kinds.append((True, MAX_DEVICES, False))
    if cpu is not None:
        kinds.append((False, MAX_DEVICES, True))
    for pipelining, places, on_cpu in kinds:
        problem = _problem(request, devices, cpu if on_cpu else None, pipelining, places)
        if problem is not None:
            yield _with_borrowing(request, problem, pipelining, lend), pipelining


def _with_borrowing(request: Request, problem: _optimise.Problem, pipelining: bool, lend: bool) -> _optimise.Problem:
    """Rules for layers that read another layer's cache: on one device with it, or at the price of copies (``lend``)."""
    copies = _memory.COPIES if pipelining else 1
    borrowed = {
        index: (layer.borrows_from, copies * request.sizes.context[layer.borrows_from])
        for index, layer in enumerate(request.model.layers)
        if layer.borrows_from is not None
    }
    if not borrowed:
        return problem
    if lend:
        return replace(problem, borrowed=borrowed)
    cuts = [
        not any(source < boundary <= index for index, (source, _size) in borrowed.items())
        for boundary in range(problem.units + 1)
    ]
    starts = [start for start in problem.starts if cuts[start.units]]
    return replace(problem, cuts=cuts, starts=starts)


def _problem(
    request: Request, devices: Sequence[Device], cpu: Device | None, pipelining: bool, places: int
) -> _optimise.Problem | None:
    """One way of running. None if the primary cannot even hold its own buffers then."""
    sizes, host = request.sizes, request.cpu
    need = _prefix(weights + context for weights, context in zip(sizes.weights, sizes.context))
    read = _prefix(active + context for active, context in zip(sizes.active, sizes.context))
    own = request.host_bytes(pipelining)
    names = list(dict.fromkeys(device.pool for device in devices))
    pools = []
    for name in names:
        size = next(device.pool_usable for device in devices if device.pool == name)
        pools.append(request.budget(size) - (own if host is not None and host.pool == name else 0))
    if host is not None and own > min(request.budget(host.usable), request.budget(host.pool_usable)):
        return None
    up, down = wire_bytes(request)
    if pipelining:
        work = request.buffers.work_pipelined
    else:
        work = request.buffers.work_alone if places == 1 else request.buffers.work_plain
    stages = [
        _optimise.Stage(
            room=request.budget(device.usable),
            scale=device.usable,
            time=_times(read, device.bandwidth),
            hop_first=_hop(device, up[0] + down[0]),
            hop_later=_hop(device, up[1] + down[0]),
            hop_output=(_link_fs(device, down[1]) - _link_fs(device, down[0])) * _TIE,
            least=device.least,
            most=len(need) if device.most is None else device.most,
            pool=names.index(device.pool),
        )
        for device in devices
    ]
    problem = _optimise.Problem(
        need=need,
        trunk_end=sizes.trunk_end,
        shared=request.model.per_device_bytes,
        work=work,
        stages=stages,
        starts=[_optimise.Start(0, 0, 0.0, (0,) * len(names))],
        pools=pools,
        places=places,
        effort=request.effort,
    )
    if cpu is not None:
        problem = replace(problem, starts=_cpu_starts(request, problem, cpu, own, names, _times(read, cpu.bandwidth)))
    return problem


def _cpu_starts(
    request: Request, problem: _optimise.Problem, cpu: Device, own: int, names: Sequence[str], times: Sequence[int]
) -> list[_optimise.Start]:
    """The first units on the primary's CPU: at least one of them, at most all."""
    room = min(request.budget(cpu.usable), request.budget(cpu.pool_usable)) - own
    most = problem.units if cpu.most is None else min(cpu.most, problem.units)
    hop = round(cpu.overhead_ms * _FS_PER_MS) * _TIE + 1
    compute = [request.buffers.cpu_layers, request.buffers.cpu_all]
    starts = []
    for units in range(max(1, cpu.least), most + 1):
        size = problem.need[units] + compute[units == problem.units]
        size += problem.shared if problem.trunk_end else 0
        if size <= room:
            used = tuple(size if name == cpu.pool else 0 for name in names)
            load = (own + size) / max(1, cpu.usable)
            starts.append(_optimise.Start(units, times[units] + hop, load, used))
    return starts


def _prefix(sizes: Iterable[int]) -> list[int]:
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    return sums


def _times(read: Sequence[int], bandwidth: float) -> list[int]:
    """Cost of reading the units [0, j): femtoseconds * 64, as whole numbers."""
    fs_per_byte = int(_FS_PER_MS * 1000 * (1 << 32) / bandwidth)  # 32 binary digits behind the point
    return [(size * fs_per_byte >> 32) * _TIE for size in read]


def _hop(device: Device, wire: int) -> int:
    """Fixed cost of a device that is used, the tie-breaker included."""
    return (round((device.rtt_ms + device.overhead_ms) * _FS_PER_MS) + _link_fs(device, wire)) * _TIE + 1


def _link_fs(device: Device, wire: int) -> int:
    if device.link_mbps is None:
        return 0
    return round(wire * 8 * _FS_PER_MS / (device.link_mbps * 1000))


def wire_bytes(request: Request) -> tuple[tuple[int, int], tuple[int, int]]:
    """Bytes per token to a device (first, later), and from it (hidden state, or logits if it holds the output)."""
    model, params = request.model, request.params
    kinds = {
        (cache.window, cache.ratio): _memory.cache_cells(cache, params)
        for layer in model.layers
        for cache in layer.caches
    }
    up = _WIRE_UP + 4 * model.n_embd + 2 * sum(kinds.values())
    return (up + _WIRE_UP_FIRST + 8 * model.n_embd, up), (4 * model.n_embd + _WIRE_DOWN, 4 * model.n_vocab + _WIRE_DOWN)


class Part(NamedTuple):
    """One device of the optimum: units [begin, end), the cost of them, and the bytes that go beside its layers."""

    device: Device
    begin: int
    end: int
    cost: int
    compute: int


def parts(request: Request, solved: Solved) -> list[Part]:
    """The devices that hold something, in order."""
    problem, placement = solved.problem, solved.placement
    found = []
    units = placement.start.units
    if units and request.cpu is not None:
        compute = request.buffers.cpu_all if units == problem.units else request.buffers.cpu_layers
        found.append(Part(request.cpu, 0, units, placement.start.cost, compute))
    for number, run in enumerate(placement.runs):
        kind = (0 if number == 0 else 1) + (2 if run.end == problem.units else 0)
        compute = problem.work[kind] + problem.borrowed_bytes(run.begin, run.end)
        cost = _optimise.run_cost(problem, run, number == 0)
        found.append(Part(solved.devices[run.stage], run.begin, run.end, cost, compute))
    return found


def milliseconds(cost: int) -> float:
    return round(cost // _TIE / _FS_PER_MS, 6)
