# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A bound from below that holds for every order of the stages: each may be used again and again, but pays a rent.

Left out is that a stage takes one run only and that common limits hold; instead a stage pays a rent for every run, and
a limit has a price for every byte (Lagrange multipliers). Then the best chain of runs is a dynamic programme over
boundaries alone, and its cost less all rents and all limits at their prices is a bound, whatever rents and prices are:
every real placement pays each rent at most once, and no more than each limit at its price. Rents are moved towards the
largest bound by steps along the subgradient (uses - 1).

What the chain says for a single run is kept as well: how much dearer than the bound any placement with it must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ansible_collections.llamafleet.rpc.plugins.module_utils._stages import (
    INF,
    Cost,
    Fits,
    Limit,
    Placement,
    Problem,
    Run,
    Start,
    priced,
    where_begins,
)

_SLACK = 30  # bits: what is dearer by less than a part in 2^30 counts as equal


class Chain(NamedTuple):
    """The relaxed problem, solved. ``costs``: with rents and prices. ``total``: cost of the best chain.

    ``later[p][i]``: least cost of the units from i on, behind a stage, with stages of phase p and above. ``first[i]``:
    the same if nothing stands before but a start. ``reach[d][j]``: cost up to boundary j on stage d, and from there on.
    """

    costs: Sequence[Cost]
    total: float
    start: Start | None
    later: Sequence[Sequence[float]]
    first: dict[int, float]
    reach: Sequence[Sequence[float]]


class Bound(NamedTuple):
    """``value``: no placement costs less. ``prices``: of the limits. ``chain``: what it was read from."""

    value: float
    prices: tuple[int, ...]
    chain: Chain


class Arc(NamedTuple):
    """A run on ``stage`` up to ``end``, and by how much any placement with it is dearer than the bound, at least."""

    excess: float
    stage: int
    end: int


def slack_of(value: float) -> float:
    """What is too small a difference to be one."""
    return int(value) >> _SLACK


def twins(problem: Problem, limits: Sequence[Limit]) -> list[int | None]:
    """For each stage the one before it that is the same in every way, or None: of twins the first is used first."""
    seen: dict[object, int] = {}
    found: list[int | None] = []
    for number, stage in enumerate(problem.stages):
        bound = tuple(number in limit.members for limit in limits)
        hops = (stage.hop_first, stage.hop_later, stage.hop_output)
        key = (stage.room, stage.scale, id(stage.time), hops, stage.least, stage.most, stage.phase, bound)
        found.append(seen.get(key))
        seen[key] = number
    return found


def best_bound(
    problem: Problem,
    fits: Fits,
    plain: Sequence[Cost],
    limits: Sequence[Limit],
    before: Sequence[int | None],
    seed: Placement | None,
    rounds: int,
) -> Bound:
    """The best bound that ``rounds`` steps find. ``seed``: a placement within all limits, if one is known."""
    stages, top = problem.stages, seed.cost if seed else None
    family = list(range(len(stages)))  # twins pay one rent
    for number, twin in enumerate(before):
        if twin is not None:
            family[number] = family[twin]
    heads = sorted(set(family))
    members = {head: family.count(head) for head in heads}
    rents = _first_rents(problem, fits, plain, seed)
    values = [0.0] * len(limits)  # a limit's price times its size
    best: Bound | None = None
    factor, idle = 1.0, 0
    for _round in range(rounds):
        prices = tuple(int(value / max(1, limit.size)) for value, limit in zip(values, limits))
        costs = [
            Cost(cost.prefix, _raised(cost.fixed, int(rents[family[number]])), cost.shared)
            for number, cost in enumerate(priced(problem, plain, limits, prices) if any(prices) else plain)
        ]
        chain = relax(problem, fits, costs, limits, prices, before)
        if chain.start is None:
            return Bound(INF, prices, chain)
        paid = sum(int(rents[head]) * members[head] for head in heads)
        value = chain.total - paid - sum(price * limit.size for price, limit in zip(prices, limits))
        idle += 1
        if best is None or value > best.value:
            best, idle = Bound(value, prices, chain), 0
        if top is not None and top - best.value <= slack_of(top):
            break
        if idle > 2:
            factor, idle = factor / 2, 0
        runs = _chain_runs(problem, fits, chain, before)
        used = [family[run.stage] for run in runs]
        pull = {head: float(used.count(head) - members[head]) for head in heads}
        pull = {
            head: 0.0 if step < 0 >= rents[head] and not stages[head].least else step for head, step in pull.items()
        }
        drag = []
        for limit, price in zip(limits, prices):
            use = limit.start_use(chain.start) + sum(limit.run_use(problem, run, k == 0) for k, run in enumerate(runs))
            over = (use - limit.size) / max(1, limit.size)
            drag.append(0.0 if over < 0 and not price else over)
        norm = sum(step * step for step in pull.values()) + sum(step * step for step in drag)
        if not norm:
            break
        aim = value + abs(value) / 16 + 1 if top is None else max(top - value, 0) + value
        step = factor * (aim - value) / norm
        for head in heads:
            rents[head] += step * pull[head]
            if not stages[head].least:
                rents[head] = max(0.0, rents[head])
        values = [max(0.0, value + step * over) for value, over in zip(values, drag)]
    if best is None:
        raise ValueError("a bound needs at least one round")
    return best


def _raised(fixed: Sequence[float], rent: int) -> tuple[float, float, float, float]:
    first, later, first_out, later_out = fixed
    return first + rent, later + rent, first_out + rent, later_out + rent


def _first_rents(problem: Problem, fits: Fits, plain: Sequence[Cost], seed: Placement | None) -> list[float]:
    """Rents to begin with: what a stage saves on its best run against the dearest part of ``seed``."""
    if seed is None or not problem.stages:
        return [0.0] * len(problem.stages)
    scale = plain[0].prefix
    rates = [plain[run.stage].of(problem, run, k == 0) / max(1, scale[run.end] - scale[run.begin])
             for k, run in enumerate(seed.runs)]  # fmt: skip
    if seed.start.units:
        rates.append(seed.start.cost / max(1, scale[seed.start.units]))
    rate, units = max(rates), problem.units
    worth = [rate * size for size in scale]
    rents = []
    for cost, (ends, closes), stage in zip(plain, fits[1], problem.stages):
        gain = [here - there for here, there in zip(worth, cost.prefix)]
        saved = [gain[end] - gain[begin] - cost.fixed[1] for begin, end in enumerate(ends) if end > begin > 0]
        saved += [gain[units] - gain[k] - cost.fixed[3] for k, closing in enumerate(closes) if closing and k]
        rent = max(saved, default=0.0)
        rents.append(rent if stage.least else max(0.0, rent))
    return rents


def relax(
    problem: Problem,
    fits: Fits,
    costs: Sequence[Cost],
    limits: Sequence[Limit],
    prices: Sequence[int],
    before: Sequence[int | None],
) -> Chain:
    """The best chain of runs; of twins only the first is looked at."""
    units, trunk_end, cuts = problem.units, problem.trunk_end, problem.cuts
    reach: list[list[float]] = [[INF] * (units + 1) for _stage in problem.stages]
    later: list[list[float]] = []
    for phase in sorted({stage.phase for stage in problem.stages}, reverse=True):
        row: list[float] = list(later[-1]) if later else [*([INF] * units), 0]
        data = [
            (reach[k], costs[k].prefix, fits[1][k].ends, fits[1][k].closes, costs[k].fixed[1],
             costs[k].fixed[3] + costs[k].prefix[units], max(1, stage.least), costs[k].shared)
            for k, stage in enumerate(problem.stages)
            if stage.phase == phase and before[k] is None
        ]  # fmt: skip
        for begin in range(units - 1, 0, -1):
            best = row[begin]
            for here, prefix, ends, closes, inner, outer, least, shared in data:
                low, high = begin + least, ends[begin] + 1
                value: float = INF
                if low < high:
                    value = min(here[low:high])
                    if value < INF:
                        value += inner
                if closes[begin] and low <= units and outer < value:
                    value = outer
                if value < INF:
                    value -= prefix[begin] - (shared if begin < trunk_end else 0)
                    if value < best:
                        best = value
            row[begin] = best
            if best < INF and (cuts is None or cuts[begin]):
                for item in data:
                    item[0][begin] = item[1][begin] + best
        later.append(row)
    later.reverse()
    first: dict[int, float] = dict.fromkeys(where_begins(problem), INF)
    chain = Chain(costs, INF, None, later, first, reach)
    for begin in first:
        first[begin] = min((arc.excess for arc in arcs(problem, fits, chain, before, begin, None)), default=INF)
    first[units] = 0
    total: float = INF
    chosen = None
    for start in problem.starts:
        whole = start.cost + first[start.units] + sum(p * limit.start_use(start) for p, limit in zip(prices, limits))
        if whole < total:
            total, chosen = whole, start
    return chain._replace(total=total, start=chosen)


def arcs(
    problem: Problem, fits: Fits, chain: Chain, before: Sequence[int | None], at: int, phase: int | None
) -> list[Arc]:
    """The runs that may begin at ``at``, behind a stage of ``phase`` or (None) as the first one.

    ``excess`` is against the best chain from there; before ``chain.first`` is known it is the whole cost.
    """
    units = problem.units
    kind = 0 if phase is None else 1
    lowest = min(stage.phase for stage in problem.stages)
    known = chain.first[at] if phase is None else chain.later[phase - lowest if len(chain.later) > 1 else 0][at]
    base = known if known < INF else 0
    found = []
    for number, stage in enumerate(problem.stages):
        if phase is not None and stage.phase < phase:
            continue
        source, twin = number, before[number]
        while twin is not None:  # rents and rooms are those of the first twin
            source, twin = twin, before[twin]
        cost, reach, (ends, closes) = chain.costs[source], chain.reach[source], fits[kind][source]
        off = (cost.shared if at < problem.trunk_end else 0) - cost.prefix[at] - base
        low = at + max(1, stage.least)
        off_inner = off + cost.fixed[kind]
        found += [
            Arc(there + off_inner, number, low + k) for k, there in enumerate(reach[low : ends[at] + 1]) if there < INF
        ]
        if closes[at] and low <= units:
            found.append(Arc(cost.prefix[units] + cost.fixed[kind + 2] + off, number, units))
    return found


def _chain_runs(problem: Problem, fits: Fits, chain: Chain, before: Sequence[int | None]) -> list[Run]:
    """The runs of the best chain."""
    at = chain.start.units if chain.start else problem.units
    phase: int | None = None
    runs: list[Run] = []
    while at < problem.units:
        arc = min(arcs(problem, fits, chain, before, at, phase))
        runs.append(Run(arc.stage, at, arc.end))
        at, phase = arc.end, problem.stages[arc.stage].phase
    return runs
