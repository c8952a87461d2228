# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cost model as it is written down (docs/cost-model.md), and two judges of a plan without the planner's code.

``Rules`` says what a run of units on a device takes in bytes and milliseconds. ``every_split`` lists all there is for a
few layers. ``best`` finds the optimum for real models by a dynamic programme over sets of devices: with numpy where no
pool binds, which also bounds what is left to do in a best-first search where one does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from ansible_collections.llamafleet.rpc.plugins.module_utils import _memory
from ansible_collections.llamafleet.rpc.plugins.module_utils._model import Model

Held = tuple[tuple[int, int], ...]  # (device, units) in order


class Way(NamedTuple):
    """How llama.cpp runs a model: several devices listed or one, pipelined, layers or the output matrix on the CPU."""

    several: bool
    pipelined: bool
    on_cpu: bool
    head: bool


WAYS = (
    Way(False, False, False, False),
    Way(True, True, False, False),
    Way(True, False, True, False),
    Way(True, False, False, True),
    Way(True, False, True, True),
)


class Split(NamedTuple):
    """One way to place all units, and what the cost model says of it."""

    held: Held
    head: bool
    sum_ms: float
    slowest_ms: float
    fullest: float


@dataclass(frozen=True)
class Rules:
    """Bytes and milliseconds of a model on devices. ``lend``: a device may read caches that another one holds."""

    model: Model
    devices: Sequence[dict[str, Any]]
    params: _memory.ContextParams
    margin: int
    lend: bool = False

    @cached_property
    def context(self) -> list[int]:
        return [_memory.layer_context_bytes(self.model, k, self.params) for k in range(len(self.model.layers))]

    @cached_property
    def units(self) -> int:
        return len(self.model.layers) + 1

    @cached_property
    def _spans(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """For every [begin, end): bytes held, bytes read, bytes of caches borrowed from before, and whether any are."""
        layers = self.model.layers
        held = [each.weights + context for each, context in zip(layers, self.context)]
        read = [(0 if each.mtp else each.active) + context for each, context in zip(layers, self.context)]
        sums = [np.concatenate(([0], np.cumsum([*sizes, self.model.output_bytes]))) for sizes in (held, read)]
        bytes_, reads = (each[None, :] - each[:, None] for each in sums)
        trunk_end = max((k + 1 for k, each in enumerate(layers) if not each.mtp), default=0)
        bytes_ = bytes_ + np.where(np.arange(self.units + 1) < trunk_end, self.model.per_device_bytes, 0)[:, None]
        borrowed, barred = np.zeros_like(bytes_), np.zeros(bytes_.shape, dtype=bool)
        for k, each in enumerate(layers):
            if each.borrows_from is not None:
                borrowed[each.borrows_from + 1 : k + 1, k + 1 :] += self.context[each.borrows_from]
                barred[each.borrows_from + 1 : k + 1, k + 1 :] = True
        return bytes_, reads, borrowed, barred

    @cached_property
    def has_cpu(self) -> bool:
        return self.devices[0]["endpoint"] is None and self.devices[0]["device"] == "CPU"

    def place(self, k: int) -> int:
        """The primary's CPU comes first, its GPUs last, the workers in any order."""
        if k == 0 and self.has_cpu:
            return 0
        return 2 if self.devices[k]["endpoint"] is None else 1

    def open_to(self, way: Way, allowed: Sequence[bool]) -> bool:
        """Whether these devices can be run that way."""
        cpu = self.has_cpu and allowed[0] and self.devices[0]["max_units"] != 0
        listed = [
            k for k in range(len(self.devices)) if self.place(k) and allowed[k] and self.devices[k]["max_units"] != 0
        ]
        remote = any(self.place(k) == 1 for k in listed)
        forced = self.has_cpu and bool(self.devices[0]["min_units"])
        if way.head and not (cpu and self.model.head_bytes and remote):
            return False
        return cpu if way.on_cpu else not forced

    @cached_property
    def _compute(self) -> dict[tuple[bool, bool, bool, bool], int]:
        return {
            (several, pipelined, first, output): _memory.compute_bytes(
                self.model,
                self.params,
                n_devices_listed=2 if several else 1,
                is_first=first,
                is_last_with_output=output,
                pipelining=pipelined,
            )
            for several, pipelined in ((False, False), (True, False), (True, True))
            for first in (False, True)
            for output in (False, True)
        }

    @cached_property
    def _host(self) -> dict[bool, int]:
        return {way: _memory.host_compute_bytes(self.model, self.params, way) for way in (False, True)}

    @cached_property
    def cpu_compute(self) -> tuple[int, int]:
        """What layers on the primary's CPU add to its compute buffer: some of them, or all units."""
        held = _memory.host_compute_bytes(self.model, self.params, False, range(len(self.model.layers)))
        grown = held - self._host[False]
        return grown, max(grown, self._compute[False, False, True, True])

    def own(self, way: Way) -> int:
        """What the primary takes itself."""
        model = self.model
        size = model.input_bytes + _memory.output_buffer_bytes(model, self.params) + self._host[way.pipelined]
        if way.head:
            size += (model.head_bytes or 0) + _memory.head_compute_bytes(model, self.params)
        return size

    def sizes(self, way: Way, k: int, first: bool) -> np.ndarray:
        """Bytes of the units [begin, end) on device k, for all of them; inf where it must not hold them."""
        bytes_, _reads, borrowed, barred = self._spans
        size = bytes_ + borrowed * (4 if way.pipelined else 1)
        size = size.astype(float) if self.lend else np.where(barred, np.inf, size)
        if self.place(k) == 0:
            inner, outer = self.cpu_compute
        else:
            inner, outer = (self._compute[way.several, way.pipelined, first, output] for output in (False, True))
            outer = inner if way.head else outer
        outer -= (self.model.head_bytes or 0) if way.head else 0
        size[:, :-1] += inner
        size[:, -1] += outer
        return size

    def times(self, way: Way, k: int, first: bool) -> np.ndarray:
        """Milliseconds of the units [begin, end) on device k for one token, for all of them."""
        item = self.devices[k]
        reads = self._spans[1].astype(float)
        if way.head:
            reads[:, -1] -= self.model.head_bytes or 0
        ms = reads / item["bandwidth"] * 1000 + (item["overhead_ms"] or 0)
        if item["endpoint"] is not None:
            ms[:, :-1] += item["rtt_ms"] + self._wire_ms(item, way, first, False)
            ms[:, -1] += item["rtt_ms"] + self._wire_ms(item, way, first, True)
        return np.asarray(ms)

    def head_ms(self) -> float:
        """Time of the output matrix on the primary's CPU."""
        host = self.devices[0]
        return float((self.model.head_bytes or 0) / host["bandwidth"] * 1000 + (host["overhead_ms"] or 0))

    def _wire_ms(self, item: dict[str, Any], way: Way, first: bool, output: bool) -> float:
        """Bytes of b11434 as they were counted, e.g. 4740 up for SmolLM2 in the middle of three workers."""
        if not item.get("link_mbps"):
            return 0
        n_embd, n_vocab = self.model.n_embd, self.model.n_vocab
        cells = {
            (cache.window, cache.ratio): _memory.cache_cells(cache, self.params)
            for each in self.model.layers
            for cache in each.caches
        }
        wire = 334 + 4 * 314 + 20 + 4 * n_embd + max(1, len(cells)) * 314 + 2 * sum(cells.values())
        if first:
            wire += 314 + 4 * n_embd if way.on_cpu else 3 * 314 + 8 * n_embd + 8
        if output:
            wire += 318
        wire += 4 * (n_vocab if output and not way.head else n_embd) + 8
        return float(wire * 8 / (item["link_mbps"] * 1000))


# --- Every split -----------------------------------------------------------------------------------------------------


def allowed_at(devices: Sequence[dict[str, Any]], level: int) -> list[bool]:
    return [_priority(item) <= level or bool(item["min_units"]) for item in devices]


def levels(devices: Sequence[dict[str, Any]]) -> list[int]:
    """The priorities there are; of a device that may hold nothing it does not count."""
    return sorted({_priority(item) for item in devices if item["max_units"] != 0})


def _priority(item: dict[str, Any]) -> int:
    return 50 if item["priority"] is None else int(item["priority"])


def every_split(
    model: dict[str, Any], devices: list[dict[str, Any]], params: _memory.ContextParams, margin: int
) -> list[Split]:
    """All splits that may be chosen from: the first priority level that has any, borrowing only if there is none."""
    for lend in (False, True):
        rules = Rules(Model.from_dict(model), devices, params, margin, lend)
        for level in levels(devices):
            allowed = allowed_at(devices, level)
            found = [
                split
                for held in _orders(rules, 0, (), allowed)
                for head in (False, True)
                for split in [_weigh(rules, held, head, allowed)]
                if split is not None
            ]
            if found:
                return found
    return []


def _orders(rules: Rules, at: int, held: Held, allowed: Sequence[bool]) -> Iterator[Held]:
    used = [k for k, _count in held]
    if at == rules.units:
        if not any(item["min_units"] and k not in used for k, item in enumerate(rules.devices)):
            yield held
        return
    for k, item in enumerate(rules.devices):
        late = bool(used) and (rules.place(k) < rules.place(used[-1]) or rules.place(k) == 0)
        if k in used or not allowed[k] or late:
            continue
        left = rules.units - at
        most = left if item["max_units"] is None else min(left, item["max_units"])
        for units in range(max(1, item["min_units"] or 0), most + 1):
            yield from _orders(rules, at + units, (*held, (k, units)), allowed)


def _weigh(rules: Rules, held: Held, head: bool, allowed: Sequence[bool]) -> Split | None:
    """What the cost model says of one split, None if it breaks a limit."""
    devices, on_cpu = rules.devices, rules.place(held[0][0]) == 0
    listed = [k for k, _units in held[1 if on_cpu else 0 :]]
    way = Way(len(listed) > 1 or on_cpu or head, len(listed) > 1 and not on_cpu and not head, on_cpu, head)
    if not rules.open_to(way, allowed) or (head and not listed):
        return None
    own = rules.own(way)
    taken: dict[str, float] = {}
    loads: list[float] = []
    times: list[float] = []
    begin = 0
    for k, units in held:
        end = begin + units
        size = rules.sizes(way, k, bool(listed) and k == listed[0])[begin, end]
        beside = own if rules.place(k) == 0 else 0
        if size + beside + rules.margin > devices[k]["usable"]:
            return None
        taken[devices[k]["pool"]] = taken.get(devices[k]["pool"], 0) + size
        loads.append((size + beside) / max(1, devices[k]["usable"]))
        times.append(rules.times(way, k, bool(listed) and k == listed[0])[begin, end])
        begin = end
    if rules.has_cpu:
        host = devices[0]
        taken[host["pool"]] = taken.get(host["pool"], 0) + own
        if own + rules.margin > host["usable"]:
            return None
        if head:
            times.append(rules.head_ms())
            loads.append(own / max(1, host["usable"]))
    if any(
        taken.get(item["pool"], 0) + rules.margin > item["pool_usable"] for item in devices if item["pool"] in taken
    ):
        return None
    return Split(held, head, sum(times), max(times) if way.pipelined else sum(times), max(loads))


# --- The optimum of real models --------------------------------------------------------------------------------------


def best(
    model: dict[str, Any], devices: list[dict[str, Any]], params: _memory.ContextParams, margin: int, objective: str
) -> float | None:
    """The value of the best split: ms per token, ms of the slowest device, or share of the fullest. None: none fits."""
    for lend in (False, True):
        rules = Rules(Model.from_dict(model), devices, params, margin, lend)
        for level in levels(devices):
            allowed = allowed_at(devices, level)
            found = [_best_way(rules, way, allowed, objective) for way in WAYS if rules.open_to(way, allowed)]
            if min(found) < np.inf:
                return float(min(found))
        if all(each.borrows_from is None for each in rules.model.layers):
            break
    return None


def _best_way(rules: Rules, way: Way, allowed: Sequence[bool], objective: str) -> float:
    """The best value of one way to run, inf if it does not fit."""
    devices, units, own = rules.devices, rules.units, rules.own(way)
    if rules.has_cpu and own + rules.margin > min(devices[0]["usable"], devices[0]["pool_usable"]):
        return np.inf
    listed = [k for k in range(len(devices)) if rules.place(k) and allowed[k] and devices[k]["max_units"] != 0]
    worst = objective == "memory" or (objective == "prefill" and way.pipelined)
    value, size = {}, {}
    for k in listed:
        for first in (False, True):
            value[k, first], size[k, first] = _runs(rules, way, k, first, objective)
    whole = (1 << len(listed)) - 1
    forced = sum(1 << n for n, k in enumerate(listed) if devices[k]["min_units"])
    togo = np.full(
        (whole + 1, units + 1), np.inf
    )  # the best completion from each boundary with the stages not in a set
    for mask in range(whole, -1, -1):
        if mask & forced == forced and (way.several or bin(mask).count("1") <= 1):
            togo[mask, units] = 0
        for n, k in enumerate(listed):
            if mask >> n & 1 or _late(rules, listed, mask, k) or (mask and not way.several):
                continue
            beyond = togo[mask | 1 << n]
            costs = value[k, mask == 0]
            through = np.maximum(costs, beyond) if worst else costs + beyond
            togo[mask, :units] = np.minimum(togo[mask, :units], through.min(axis=1)[:units])
    starts = _starts(rules, way, own, objective)
    pools = _pools(rules, listed, own, starts)
    if not pools:
        return min(
            (max(cost, togo[0, at]) if worst else cost + togo[0, at] for at, cost, _size in starts), default=np.inf
        )
    return _search(rules, way, listed, value, size, togo, starts, pools, worst)


def _late(rules: Rules, listed: Sequence[int], mask: int, k: int) -> bool:
    """Whether a GPU of the primary already stands, and k is a worker."""
    return rules.place(k) == 1 and any(mask >> n & 1 and rules.place(other) == 2 for n, other in enumerate(listed))


def _runs(rules: Rules, way: Way, k: int, first: bool, objective: str) -> tuple[np.ndarray, np.ndarray]:
    """Value and bytes of every run [begin, end) on device k; the value is inf where it does not fit."""
    item = rules.devices[k]
    size = rules.sizes(way, k, first)
    boundary = np.arange(rules.units + 1)
    length = boundary[None, :] - boundary[:, None]
    most = rules.units if item["max_units"] is None else item["max_units"]
    fits = (length >= max(1, item["min_units"] or 0)) & (length <= most) & (size + rules.margin <= item["usable"])
    value = size / max(1, item["usable"]) if objective == "memory" else rules.times(way, k, first)
    return np.where(fits, value, np.inf), size


def _starts(rules: Rules, way: Way, own: int, objective: str) -> list[tuple[int, float, float]]:
    """What the primary's CPU may hold: (units, value, bytes)."""
    beside = rules.head_ms() if way.head else 0.0
    if not way.on_cpu:
        load = own / max(1, rules.devices[0]["usable"]) if way.head else 0.0
        return [(0, load if objective == "memory" else beside, 0.0)]
    host = rules.devices[0]
    least = max(1, host["min_units"] or 0)
    most = rules.units - way.head if host["max_units"] is None else min(rules.units - way.head, host["max_units"])
    # The norm of the output layer is not the CPU's, so its constants are those of any other layer's end.
    plain = way._replace(head=False)
    sizes, times = rules.sizes(plain, 0, True)[0], rules.times(plain, 0, True)[0]
    room = min(host["usable"], host["pool_usable"])
    # Never between attention on the CPU and recurrence behind it, where flash attention would end for all.
    recurrent = [layer.state_per_sequence > 0 for layer in rules.model.layers] + [False]
    attends = [bool(layer.caches) and not layer.state_per_sequence for layer in rules.model.layers]
    fits = [
        k
        for k in range(least, most + 1)
        if sizes[k] + own + rules.margin <= room and not (k <= len(attends) and attends[k - 1] and recurrent[k])
    ]
    if objective == "memory":
        return [(k, (sizes[k] + own) / max(1, host["usable"]), sizes[k]) for k in fits]
    return [(k, times[k] + beside, sizes[k]) for k in fits]


class _Pool(NamedTuple):
    """A memory that several devices share and might use up: its bytes, its devices, and the CPU's part of it."""

    size: float
    members: frozenset[int]
    cpu: bool


def _pools(rules: Rules, listed: Sequence[int], own: int, starts: Sequence[tuple[int, float, float]]) -> list[_Pool]:
    found = []
    host = rules.devices[0]["pool"] if rules.has_cpu else None
    for name in dict.fromkeys(rules.devices[k]["pool"] for k in listed):
        members = frozenset(k for k in listed if rules.devices[k]["pool"] == name)
        size = next(item["pool_usable"] for item in rules.devices if item["pool"] == name) - rules.margin
        size -= own if name == host else 0
        most = sum(rules.devices[k]["usable"] - rules.margin for k in members)
        most += max((each[2] for each in starts), default=0) if name == host else 0
        if most > size:
            found.append(_Pool(size, members, name == host))
    return found


def _search(
    rules: Rules,
    way: Way,
    listed: Sequence[int],
    value: dict[tuple[int, bool], np.ndarray],
    size: dict[tuple[int, bool], np.ndarray],
    togo: np.ndarray,
    starts: Sequence[tuple[int, float, float]],
    pools: Sequence[_Pool],
    worst: bool,
) -> float:
    """Best first: what is reached at the least promise, a bound without pools, is the optimum."""
    number = count()
    heap: list[tuple[float, int, float, int, int, tuple[float, ...]]] = []
    for at, cost, bytes_ in starts:
        used = tuple(bytes_ if pool.cpu else 0.0 for pool in pools)
        promise = max(cost, togo[0, at]) if worst else cost + togo[0, at]
        if promise < np.inf and all(use <= pool.size for use, pool in zip(used, pools)):
            heappush(heap, (promise, next(number), cost, 0, at, used))
    seen: dict[tuple[int, int], list[tuple[float, tuple[float, ...]]]] = {}
    while heap:
        promise, _order, cost, mask, at, used = heappop(heap)
        if at == rules.units:
            return promise
        known = seen.setdefault((mask, at), [])
        if any(other <= cost and all(a <= b for a, b in zip(uses, used)) for other, uses in known):
            continue
        known.append((cost, used))
        for n, k in enumerate(listed):
            if mask >> n & 1 or _late(rules, listed, mask, k) or (mask and not way.several):
                continue
            row = value[k, mask == 0][at]
            beyond = togo[mask | 1 << n]
            costs = np.maximum(cost, row) if worst else cost + row
            promises = np.maximum(costs, beyond) if worst else costs + beyond
            for end in np.flatnonzero(np.isfinite(promises)):
                taken = tuple(
                    use + (size[k, mask == 0][at, end] if k in pool.members else 0) for use, pool in zip(used, pools)
                )
                if all(use <= pool.size for use, pool in zip(taken, pools)):
                    heappush(
                        heap, (float(promises[end]), next(number), float(costs[end]), mask | 1 << n, int(end), taken)
                    )
    return np.inf
