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
from ansible_collections.llamafleet.rpc.plugins.module_utils._model import Layer
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan_input import MAX_DEVICES, Device, Request

_FS_PER_MS = 10**12
_EQUAL = 2**-29  # relative differences below this are rounding
_TIE = 64  # costs are femtoseconds * 64 + devices used: of equally fast plans the one with fewer devices wins

# Wire traffic per generated token, measured on b11434 (protocol 7.0.0) to the byte with one, two and three workers,
# with and without layers on the primary's CPU. Up: GET_TENSOR (321 bytes) and GRAPH_RECOMPUTE (13), and a SET_TENSOR
# (314) for each input: hidden state, position and two cache indices (20 bytes together), one mask for each kind of
# cache. The first device takes the hidden state three times, behind the CPU twice; the one with the output takes the
# ids of outputs (4).
_SET, _UP, _DOWN = 314, 321 + 13 + 20, 8
_UP_OUTPUT = _SET + 4
_ROTATION = 64  # side of the matrix that rotates V before a quantised cache; for K, the largest that fits its head


@dataclass(frozen=True)
class Solved:
    """The best placement, and what it is one of: the problem, the stages' devices, how llama.cpp runs it.

    ``cost_bound``: no way of running these devices costs less; ``bound``: the same for what was asked for.
    """

    problem: _optimise.Problem
    devices: tuple[Device, ...]
    placement: _optimise.Placement
    way: Way
    priority: int
    value: float
    bound: float
    cost_bound: float

    @property
    def proved(self) -> bool:
        """Whether nothing better exists in the cost model."""
        return self.gap == 0

    @property
    def gap(self) -> float:
        """How much better, as a share, another plan could be at most; 0 if it is proved that none is."""
        gap = (self.value - self.bound) / self.value if self.value else 0.0
        return gap if gap > _EQUAL else 0.0


class Way(NamedTuple):
    """How llama.cpp runs a model, which decides its compute buffers.

    ``places``: how many devices it may use; ``on_cpu``: the first layers are on the primary's CPU; ``head``: the output
    matrix is on the primary's CPU, away from the output layer's norm, so that no logits cross the network.
    """

    pipelining: bool
    places: int
    on_cpu: bool
    head: bool


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
    stages = tuple(stage_devices(allowed))
    best: tuple[Any, _optimise.Problem, _optimise.Placement, Way] | None = None
    bound: float = _optimise.INF
    tried = list(problems(request, allowed, lend))
    for problem, way in tried:
        known = best[0][0] if best else _optimise.INF
        for answer in _optima(request.objective, problem, way, known):
            bound = min(bound, answer.bound)
            if answer.placement is not None:
                key = _key(request.objective, problem, answer.placement, way)
                if best is None or key < best[0]:
                    best = (key, problem, answer.placement, way)
    if best is None:
        return None
    key, chosen, placement, way = best
    least = bound
    if request.objective != "latency":
        least = min(_optimise.cost_bound(problem, placement) for problem, _way in tried)
    return Solved(chosen, stages, placement, way, level, key[0], min(bound, key[0]), min(least, placement.cost))


def stage_devices(allowed: Sequence[Device]) -> list[Device]:
    """Devices that take layers from llama.cpp, remote ones first: the primary's own GPU keeps the logits at home."""
    listed = [device for device in allowed if not device.is_cpu]
    return sorted(listed, key=lambda device: device.endpoint is None)


def _optima(objective: str, problem: _optimise.Problem, way: Way, known: float) -> Iterable[_optimise.Answer]:
    """The best placements of one way of running. ``known``: the value of the best one so far."""
    if way.places == 1:
        for placement in _optimise.alone(problem):
            yield _optimise.Answer(placement, _key(objective, problem, placement, way)[0])
    elif objective == "memory":
        yield _optimise.most_even(problem, below=known)
    elif objective == "prefill" and way.pipelining:
        yield _optimise.shortest_stage(problem, below=known)
    else:
        yield _optimise.cheapest(problem, below=known)


def _key(objective: str, problem: _optimise.Problem, placement: _optimise.Placement, way: Way) -> Any:
    if objective == "memory":
        return _optimise.fullest(problem, placement), placement.cost
    if objective == "prefill" and way.pipelining:
        return _optimise.slowest(problem, placement), placement.cost
    return placement.cost, placement.cost


def problems(
    request: Request, allowed: Sequence[Device], lend: bool = False
) -> Iterable[tuple[_optimise.Problem, Way]]:
    """The ways llama.cpp runs a model, each with its own compute buffers.

    One device without the CPU; several devices without the CPU, pipelined (four copies of the inputs on b11434); the
    CPU with or without devices behind it; and without pipelining, which any override of a tensor switches off, the
    output matrix on the CPU while the devices hold the last layers. ``lend``: a device may read caches that another one
    holds.
    """
    cpu = next((device for device in allowed if device.is_cpu), None)
    devices = stage_devices(allowed)
    nothing = cpu is None or not cpu.least
    ways: list[Way] = []
    if devices and nothing:
        ways.append(Way(False, 1, False, False))
        if len(devices) > 1:
            ways.append(Way(True, MAX_DEVICES, False, False))
    if cpu is not None:
        ways.append(Way(False, MAX_DEVICES, True, False))
        # A GPU of the primary comes last, so with one of them no logits cross the network.
        remote = [device for device in devices if device.endpoint is not None]
        if request.model.head_bytes and remote:
            ways += [Way(False, MAX_DEVICES, on_cpu, True) for on_cpu in (False, True) if on_cpu or nothing]
    for way in ways:
        problem = _problem(request, devices, cpu if way.on_cpu or way.head else None, way)
        if problem is not None:
            yield _with_borrowing(request, problem, way.pipelining, lend), way


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


def _problem(request: Request, devices: Sequence[Device], cpu: Device | None, way: Way) -> _optimise.Problem | None:
    """One way of running. None if the primary cannot even hold its own buffers then."""
    sizes, host = request.sizes, request.cpu
    weights, active = list(sizes.weights), list(sizes.active)
    if way.head:
        weights[-1] -= request.head_bytes
        active[-1] -= request.head_bytes
    need = _prefix(weights_ + context for weights_, context in zip(weights, sizes.context))
    read = _prefix(active_ + context for active_, context in zip(active, sizes.context))
    own = request.host_bytes(way.pipelining, way.head)
    names = list(dict.fromkeys(device.pool for device in devices))
    pools = []
    for name in names:
        size = next(device.pool_usable for device in devices if device.pool == name)
        pools.append(request.budget(size) - (own if host is not None and host.pool == name else 0))
    if host is not None and own > min(request.budget(host.usable), request.budget(host.pool_usable)):
        return None
    wire = wire_bytes(request)
    first = wire.behind_cpu if way.on_cpu else wire.first
    logits = wire.output - (wire.logits if way.head else 0)
    known: dict[float, list[int]] = {}
    for device in devices:
        if device.bandwidth not in known:
            known[device.bandwidth] = _times(read, device.bandwidth)
    stages = [
        _optimise.Stage(
            room=request.budget(device.usable),
            scale=device.usable,
            time=known[device.bandwidth],
            hop_first=_hop(device, wire.any + first),
            hop_later=_hop(device, wire.any),
            hop_output=_link_fs(device, logits) * _TIE,
            least=device.least,
            most=len(need) if device.most is None else device.most,
            pool=names.index(device.pool),
            phase=0 if device.endpoint is not None else 1,
        )
        for device in devices
    ]
    problem = _optimise.Problem(
        need=need,
        trunk_end=sizes.trunk_end,
        shared=request.model.per_device_bytes,
        work=_work(request, way),
        stages=stages,
        starts=[_optimise.Start(0, 0, 0.0, (0,) * len(names))],
        pools=pools,
        places=way.places,
        effort=request.effort,
    )
    if cpu is None:
        return problem
    return replace(problem, starts=_cpu_starts(request, problem, cpu, own, names, _times(read, cpu.bandwidth), way))


def _work(request: Request, way: Way) -> tuple[int, int, int, int]:
    """Compute buffers of a device that is (first, later, first with the output, later with the output)."""
    if way.pipelining:
        return request.buffers.work_pipelined
    first, later, first_output, later_output = (
        request.buffers.work_alone if way.places == 1 else request.buffers.work_plain
    )
    return (first, later, first, later) if way.head else (first, later, first_output, later_output)


def head_cost(request: Request, cpu: Device) -> int:
    """What the output matrix costs per token on the primary's CPU."""
    return _times([request.head_bytes], cpu.bandwidth)[0] + round(cpu.overhead_ms * _FS_PER_MS) * _TIE


def _cpu_starts(
    request: Request,
    problem: _optimise.Problem,
    cpu: Device,
    own: int,
    names: Sequence[str],
    times: Sequence[int],
    way: Way,
) -> list[_optimise.Start]:
    """What the primary's CPU takes: the first units, at least one of them, at most all; and the output matrix."""
    head = head_cost(request, cpu) if way.head else 0
    if not way.on_cpu:
        return [_optimise.Start(0, head + 1, own / max(1, cpu.usable), (0,) * len(names))]
    room = min(request.budget(cpu.usable), request.budget(cpu.pool_usable)) - own
    # With the output matrix on the CPU, the output layer's norm is not: all units there are no other way to run.
    most = problem.units - (1 if way.head else 0)
    most = most if cpu.most is None else min(cpu.most, most)
    hop = round(cpu.overhead_ms * _FS_PER_MS) * _TIE + 1
    compute = [request.buffers.cpu_layers, request.buffers.cpu_all]
    starts = []
    for units in range(max(1, cpu.least), most + 1):
        if _attends_behind_its_device(request.model.layers, units):
            continue
        size = problem.need[units] + compute[units == problem.units]
        size += problem.shared if problem.trunk_end else 0
        if size <= room:
            used = tuple(size if name == cpu.pool else 0 for name in names)
            load = (own + size) / max(1, cpu.usable)
            starts.append(_optimise.Start(units, times[units] + hop + head, load, used))
    return starts


def _attends_behind_its_device(layers: Sequence[Layer], units: int) -> bool:
    """Whether llama.cpp would compute the attention of the CPU's last layer on the device behind it.

    Its scheduler (b11434) does so in hybrid models whose next layer is recurrent. ``-fa auto`` then switches flash
    attention off for all devices, and ``-fa on`` copies the layer's whole cache: lfm2 with 8,192 tokens took 556 MiB of
    compute buffers, 69 with a cut one layer later. Seen with lfm2, nemotron_h and jamba, not with every hybrid; a start
    one layer away costs less than a wrong promise.
    """
    if not 0 < units < len(layers):
        return False
    last, following = layers[units - 1], layers[units]
    return bool(last.caches) and not last.state_per_sequence and following.state_per_sequence > 0


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


class Wire(NamedTuple):
    """Bytes per token over one device's link: ``any`` device; more for the ``first``, or the first ``behind_cpu``.

    ``output``: more for the one with the output, of which ``logits`` are sent only if the output matrix is there too.
    """

    any: int
    first: int
    behind_cpu: int
    output: int
    logits: int


def wire_bytes(request: Request) -> Wire:
    """What a token costs on the wire, both directions together."""
    model, params = request.model, request.params
    caches = {
        (cache.window, cache.ratio): _memory.cache_cells(cache, params)
        for layer in model.layers
        for cache in layer.caches
    }
    inputs = sum(2 * cells for cells in caches.values()) + max(1, len(caches)) * _SET
    rotated = len({window for window, ratio in caches if ratio == 1})
    for quantised, side in zip(_memory.quantised(params), (_k_rotation(model.k_head), _ROTATION)):
        inputs += rotated * (_SET + 4 * side * side) if quantised and side else 0
    hidden = 4 * model.n_embd
    logits = 4 * model.n_vocab - hidden
    return Wire(
        any=_UP + 4 * _SET + hidden + inputs + hidden + _DOWN,
        first=3 * _SET + 2 * hidden + 8,
        behind_cpu=_SET + hidden,
        output=_UP_OUTPUT + logits,
        logits=logits,
    )


def _k_rotation(head: int | None) -> int:
    """Side of the matrix that rotates K before a quantised cache: the largest 64 * 2^n that divides a head, or none."""
    if head is None:
        return _ROTATION
    return 0 if head % _ROTATION or not head else head & -head


class Part(NamedTuple):
    """One device of the optimum: units [begin, end), the cost of them, and the bytes that go beside its layers.

    ``wire``: bytes per token over its link.
    """

    device: Device
    begin: int
    end: int
    cost: int
    compute: int
    wire: int


def parts(request: Request, solved: Solved) -> list[Part]:
    """The devices that hold something, in order."""
    problem, placement, way = solved.problem, solved.placement, solved.way
    wire = wire_bytes(request)
    found = []
    units = placement.start.units
    if units and request.cpu is not None:
        compute = request.buffers.cpu_all if units == problem.units else request.buffers.cpu_layers
        cost = placement.start.cost - (head_cost(request, request.cpu) if way.head else 0)
        found.append(Part(request.cpu, 0, units, cost, compute, 0))
    for number, run in enumerate(placement.runs):
        last = run.end == problem.units
        kind = (0 if number == 0 else 1) + (2 if last else 0)
        compute = problem.work[kind] + problem.borrowed_bytes(run.begin, run.end)
        cost = _optimise.run_cost(problem, run, number == 0)
        device, sent = solved.devices[run.stage], 0
        if device.endpoint is not None:
            sent = wire.any + (wire.output - (wire.logits if way.head else 0) if last else 0)
            if number == 0:
                sent += wire.behind_cpu if way.on_cpu else wire.first
        found.append(Part(device, run.begin, run.end, cost, compute, sent))
    return found


def milliseconds(cost: float) -> float:
    """A cost for people; the tie-breaker falls off."""
    return round(cost // _TIE / _FS_PER_MS, 6)
