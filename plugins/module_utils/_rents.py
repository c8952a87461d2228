# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A bound from below that holds for every order of the stages: each may be used again and again, but pays a rent.

Left out is that a stage takes one run only and that common limits hold; instead a stage pays a rent for every run, and
a limit has a price for every byte (Lagrange multipliers), and no stage follows itself. Then the best chain of runs is a
dynamic programme over boundaries alone, and its cost less all rents and all limits at their prices is a bound, whatever
rents and prices are: every real placement pays each rent at most once, and no more than each limit at its price. Rents
are moved towards the largest bound by steps along the subgradient (uses - 1).

What the chain says of every single run is kept as well: what a placement costs at least that goes on with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nsmallest
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
)

_SLACK = 30  # bits: what is dearer by less than a part in 2^30 counts as equal
_RATES = 3  # prices of a unit that are tried for the first rents


class Family(NamedTuple):
    """Stages that are the same in every way. ``head``: the first of them, by which they go here."""

    head: Sequence[int]
    before: Sequence[int | None]
    size: Sequence[int]


class Chain(NamedTuple):
    """The relaxed problem, solved. ``costs``: with rents and prices. ``total``: cost of the best chain, with its start.

    ``reach[d][j]``: cost of reading up to boundary j on stage d, and of the units from there on, on other stages.
    ``firsts[j]``, ``nexts[p][j]``: the stage that takes the units from j on at best, if there is none before, or one of
    phase p; ``others[p][j]``: the best one besides that.
    """

    costs: Sequence[Cost]
    total: float
    start: Start | None
    reach: Sequence[list[float]]
    nexts: dict[int, Sequence[int]]
    others: dict[int, Sequence[int]]


class Bound(NamedTuple):
    """``value``: no placement costs less. ``prices``: of the limits. ``chain``: what it was read from."""

    value: float
    prices: tuple[int, ...]
    chain: Chain


class Arc(NamedTuple):
    """A run on ``stage`` up to ``end``: what it costs with the best chain behind it."""

    cost: float
    stage: int
    end: int


def slack_of(value: float) -> float:
    """What is too small a difference to be one."""
    return int(value) >> _SLACK


def families(problem: Problem, limits: Sequence[Limit]) -> Family:
    """Which stages are the same; of those, the first is used first."""
    seen: dict[object, int] = {}
    head: list[int] = []
    before: list[int | None] = []
    for number, stage in enumerate(problem.stages):
        bound = tuple(number in limit.members for limit in limits)
        hops = (stage.hop_first, stage.hop_later, stage.hop_output)
        key = (stage.room, stage.scale, id(stage.time), hops, stage.least, stage.most, stage.phase, bound)
        twin = seen.get(key)
        before.append(twin)
        head.append(number if twin is None else head[twin])
        seen[key] = number
    return Family(head, before, [head.count(each) for each in head])


def best_bound(
    problem: Problem,
    fits: Fits,
    plain: Sequence[Cost],
    limits: Sequence[Limit],
    family: Family,
    seed: Placement | None,
    like: Placement | None,
    rounds: int,
) -> Bound:
    """The best bound that ``rounds`` steps find. ``seed``: a placement within all limits, if one is known.

    ``like``: a placement that may break common limits, to take the first rents from.
    """
    stages, top = problem.stages, seed.cost if seed else None
    heads = sorted(set(family.head))
    rents = _first_rents(problem, fits, plain, family, like)
    values = [0.0] * len(limits)  # a limit's price times its size
    best: Bound | None = None
    factor, idle = 1.0, 0
    for turn in range(max(1, rounds)):
        prices = tuple(int(value / max(1, limit.size)) for value, limit in zip(values, limits))
        costs = [
            Cost(cost.prefix, _raised(cost.fixed, int(rents[head])), cost.shared)
            for head, cost in zip(family.head, priced(problem, plain, limits, prices) if any(prices) else plain)
        ]
        chain = relax(problem, fits, costs, limits, prices, family)
        if chain.start is None:
            return Bound(INF, prices, chain)
        paid = sum(int(rents[head]) for head in family.head)
        value = chain.total - paid - sum(price * limit.size for price, limit in zip(prices, limits))
        idle += 1
        if best is None or value > best.value:
            best, idle = Bound(value, prices, chain), 0
        if turn + 1 >= rounds or (top is not None and top - best.value <= slack_of(top)):
            break
        if idle > 2:
            factor, idle = factor / 2, 0
        runs = _chain_runs(problem, fits, chain, family)
        used = [family.head[run.stage] for run in runs]
        pull = {head: float(used.count(head) - family.size[head]) for head in heads}
        for head in heads:  # a rent does not go below nothing, unless the stage must be used
            if pull[head] < 0 and rents[head] <= 0 and not stages[head].least:
                pull[head] = 0.0
        drag = []
        for limit, price in zip(limits, prices):
            use = limit.start_use(chain.start) + sum(limit.run_use(problem, run, k == 0) for k, run in enumerate(runs))
            over = (use - limit.size) / max(1, limit.size)
            drag.append(0.0 if over < 0 and not price else over)
        norm = sum(step * step for step in pull.values()) + sum(step * step for step in drag)
        if not norm:
            break
        aim = value + abs(value) / 16 + 1 if top is None else max(top, value)
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


def _first_rents(
    problem: Problem, fits: Fits, plain: Sequence[Cost], family: Family, seed: Placement | None
) -> list[float]:
    """Rents to begin with: what a stage saves on its best run if every unit is worth what a part of ``seed`` takes.

    Which part: the one that gives the best bound, sum of worths less sum of rents, which has one summit.
    """
    if seed is None or not seed.runs:
        return [0.0] * len(problem.stages)
    scale, units = plain[0].prefix, problem.units
    parts = [(plain[run.stage].of(problem, run, k == 0), scale[run.end] - scale[run.begin])
             for k, run in enumerate(seed.runs)]  # fmt: skip
    parts.append((seed.start.cost, scale[seed.start.units]))
    rates = {cost / size for cost, size in parts if size}
    found = [0.0] * len(problem.stages)
    best = -float(INF)
    for rate in sorted(rates, reverse=True)[:_RATES]:
        worth = [rate * size for size in scale]
        rents: list[float] = []
        for number, (cost, (ends, closes), stage) in enumerate(zip(plain, fits[1], problem.stages)):
            if family.before[number] is not None:
                rents.append(rents[family.head[number]])
                continue
            gain = [here - there for here, there in zip(worth, cost.prefix)]
            saved = [gain[end] - here for end, here in zip(ends, gain) if end > 0]
            closing = [here for here, last in zip(gain[1:], closes[1:]) if last]
            rent = max(saved[1:], default=0.0) - cost.fixed[1]
            if closing:
                rent = max(rent, gain[units] - min(closing) - cost.fixed[3])
            rents.append(rent if stage.least else max(0.0, rent))
        left = min(start.cost + worth[units] - worth[start.units] for start in problem.starts)
        if left - sum(rents) <= best:
            break
        found, best = rents, left - sum(rents)
    return found


def relax(
    problem: Problem,
    fits: Fits,
    costs: Sequence[Cost],
    limits: Sequence[Limit],
    prices: Sequence[int],
    family: Family,
) -> Chain:
    """The best chain of runs; of a family only the first stage is looked at."""
    reach: list[list[float]] = [[INF] * (problem.units + 1) for _stage in problem.stages]
    chain = Chain(costs, INF, None, reach, {}, {})
    rest = _Rest.nothing(problem.units)
    for phase in sorted({stage.phase for stage in problem.stages}, reverse=True):
        _relax_phase(problem, fits, chain, family, phase, rest)
        chain.nexts[phase], chain.others[phase] = list(rest.which), list(rest.other)
    total: float = INF
    chosen = None
    for start in problem.starts:
        whole: float = start.cost + sum(p * limit.start_use(start) for p, limit in zip(prices, limits))
        if start.units < problem.units:
            found = arcs(problem, fits, chain, family, start.units, None, each=1)
            whole += min((arc.cost for arc in found), default=INF)
        if whole < total:
            total, chosen = whole, start
    return chain._replace(total=total, start=chosen)


class _Rest(NamedTuple):
    """From each boundary on: the least cost and which stage comes next, and the same without that stage."""

    best: list[float]
    which: list[int]
    second: list[float]
    other: list[int]

    @staticmethod
    def nothing(units: int) -> _Rest:
        """Only at the last boundary there is nothing left to do."""
        nobody = [-1] * (units + 1)
        return _Rest([*([INF] * units), 0], nobody, [*([INF] * units), 0], list(nobody))


def _relax_phase(problem: Problem, fits: Fits, chain: Chain, family: Family, phase: int, rest: _Rest) -> None:
    """Let the stages of ``phase`` stand before ``rest``, boundary by boundary from the end; fills ``chain.reach``."""
    units, trunk_end, cuts, costs = problem.units, problem.trunk_end, problem.cuts, chain.costs
    data = [
        (k, chain.reach[k], costs[k].prefix, fits[1][k].ends, fits[1][k].closes, costs[k].fixed[1],
         costs[k].fixed[3] + costs[k].prefix[units], max(1, stage.least), costs[k].shared, family.size[k] > 1)
        for k, stage in enumerate(problem.stages)
        if stage.phase == phase and family.before[k] is None
    ]  # fmt: skip
    for begin in range(units - 1, 0, -1):
        best, which, second, other = rest.best[begin], rest.which[begin], rest.second[begin], rest.other[begin]
        for k, here, prefix, ends, closes, inner, outer, least, shared, _several in data:
            low, high = begin + least, ends[begin] + 1
            value: float = INF
            if low < high:
                value = min(here[low:high])
                value += inner if value < INF else 0  # a rent may be negative
            if closes[begin] and low <= units and outer < value:
                value = outer
            if value < INF:
                value -= prefix[begin] - (shared if begin < trunk_end else 0)
                if value < best:
                    best, which, second, other = value, k, best, which
                elif value < second:
                    second, other = value, k
        rest.best[begin], rest.which[begin], rest.second[begin], rest.other[begin] = best, which, second, other
        if cuts is None or cuts[begin]:
            for k, here, prefix, *_data, several in data:
                beyond = second if k == which and not several else best
                if beyond < INF:
                    here[begin] = prefix[begin] + beyond


def arcs(
    problem: Problem,
    fits: Fits,
    chain: Chain,
    family: Family,
    at: int,
    phase: int | None,
    only: int | None = None,
    each: int | None = None,
) -> list[Arc]:
    """The runs that may begin at ``at``, behind a stage of ``phase`` or (None) as the first one; or of one stage.

    ``each``: at most so many of each stage, the cheapest ones.
    """
    units = problem.units
    kind = 0 if phase is None else 1
    found = []
    for number in range(len(problem.stages)) if only is None else (only,):
        stage, source = problem.stages[number], family.head[number]
        if phase is not None and stage.phase < phase:
            continue
        cost, reach, (ends, closes) = chain.costs[source], chain.reach[source], fits[kind][source]
        off = (cost.shared if at < problem.trunk_end else 0) - cost.prefix[at]
        low = at + max(1, stage.least)
        inner = off + cost.fixed[kind]
        options = reach[low : ends[at] + 1]
        chosen: Iterable[int] = range(len(options))
        if each is not None and len(options) > each:
            least = nsmallest(each, chosen, key=options.__getitem__) if each > 1 else [options.index(min(options))]
            chosen = least
        found += [Arc(options[k] + inner, number, low + k) for k in chosen if options[k] < INF]
        if closes[at] and low <= units:
            found.append(Arc(cost.prefix[units] + cost.fixed[kind + 2] + off, number, units))
    return found


def _chain_runs(problem: Problem, fits: Fits, chain: Chain, family: Family) -> list[Run]:
    """The runs of the best chain."""
    at = chain.start.units if chain.start else problem.units
    runs: list[Run] = []
    while at < problem.units:
        if not runs:
            arc = min(arcs(problem, fits, chain, family, at, None, each=1))
        else:
            last = runs[-1].stage
            phase = problem.stages[last].phase
            only = chain.nexts[phase][at]
            if only == family.head[last] and family.size[last] == 1:
                only = chain.others[phase][at]
            arc = min(arcs(problem, fits, chain, family, at, phase, only, 1))
        runs.append(Run(arc.stage, at, arc.end))
        at = arc.end
    return runs
