# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The best placement of whole units, in order, on stages in the best order: the three questions a plan asks.

First the stages are taken in the order given, which a short dynamic programme solves (_chain). Then a bound over all
orders (_rents) says how much another order could gain, and a search (_search) finds it or proves that there is nothing
to find. What is not proved within the effort carries the bound, so that the gap is known. Of equal placements the one
in the order given wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import sub
from typing import NamedTuple

from ansible_collections.llamafleet.rpc.plugins.module_utils import _chain
from ansible_collections.llamafleet.rpc.plugins.module_utils._rents import best_bound, families, slack_of
from ansible_collections.llamafleet.rpc.plugins.module_utils._search import Search, any_placement
from ansible_collections.llamafleet.rpc.plugins.module_utils._stages import (
    INF,
    Cost,
    Fit,
    Fits,
    Limit,
    Placement,
    Problem,
    Run,
    Stage,
    Start,
    find_fits,
    find_limits,
    fullest,
    load_cost,
    plain_cost,
    run_cost,
    slowest,
)

__all__ = ["INF", "Answer", "Placement", "Problem", "Run", "Stage", "Start", "fullest", "run_cost", "slowest"]

_BELOW, _ABOVE = 1 - 1e-12, 1 + 1e-12  # of a limit: loads between them are the same, but for rounding


class Means(NamedTuple):
    """How hard to try. ``rounds``: steps towards a better bound; ``priced_rounds``: the same where limits have prices.

    ``width``: partial placements that the first, inexact walk keeps at each boundary; ``branches``: how many it makes
    of each, ``each`` of them with the same stage. ``effort``: partial placements to try for the proof, at most, and
    ``search`` for any placement; ``halvings``: of the range in which the smallest limit on the worst stage lies.
    """

    rounds: int
    priced_rounds: int
    width: int
    branches: int
    each: int
    effort: int
    search: int
    halvings: int


#: Up to so many stages everything is proved, but for tangled pools. Above, time goes first and the gap is stated.
FEW = 8
_THOROUGH = Means(
    rounds=24, priced_rounds=24, width=4, branches=12, each=4, effort=1 << 30, search=1 << 30, halvings=12
)
_MIDDLE = Means(rounds=8, priced_rounds=12, width=4, branches=12, each=4, effort=4_000, search=4_000, halvings=4)
_QUICK = Means(rounds=1, priced_rounds=3, width=1, branches=4, each=1, effort=0, search=600, halvings=0)
_SMALL = 400  # stages x units up to which a middle course takes no longer than the quick one with the most of both
_EFFORT_HALVING = 4_000  # as ``search``, where nothing but a better start is at stake
_TRIES = 1  # steps down from the worst stage of the order given, where time goes first
_NEAR = 1.02  # with many stages, a way of running that starts from more than this of the best one is not searched


def _means(problem: Problem) -> Means:
    means = _THOROUGH if problem.effort >= _MIDDLE.effort * 2 else _MIDDLE
    if len(problem.stages) > FEW:
        means = _MIDDLE if len(problem.stages) * problem.units <= _SMALL else _QUICK
    return means._replace(effort=min(means.effort, problem.effort), search=min(means.search, problem.effort))


class Answer(NamedTuple):
    """The best placement found, or None; and a bound: none has less of what was asked for (INF: there is none).

    The placement is proved to be the best one if it has as much as the bound.
    """

    placement: Placement | None
    bound: float


def cheapest(
    problem: Problem,
    time_limit: int | None = None,
    below: float = INF,
    seed: Placement | None = None,
    quick: bool = False,
) -> Answer:
    """The placement of least total cost.

    ``time_limit``: the most that a single stage may cost. ``below``: a placement that costs as much is not wanted.
    ``seed``: a placement that is known to be possible. ``quick``: the order of it, or the one given, is good enough.
    """
    fits = find_fits(problem, time_limit)
    plain = [plain_cost(stage) for stage in problem.stages]
    limits = find_limits(problem)
    unlimited = _chain.in_order(problem, fits, plain)
    given = _given_order(problem, unlimited, plain, limits, time_limit)
    if given is not None and (seed is None or given.cost <= seed.cost):
        seed = given
    if quick and seed is not None:
        return Answer(seed, 0)
    if not problem.stages:
        wanted = seed if seed is not None and seed.cost < below else None
        return Answer(wanted, INF if seed is None else seed.cost)
    family, means = families(problem, limits), _means(problem)
    if seed is None:
        greedy = not means.effort
        seed, final = any_placement(problem, fits, limits, family, means.search, greedy)
        if seed is None and final:
            return Answer(None, INF)
    rounds = means.priced_rounds if limits else means.rounds
    bound = best_bound(problem, fits, plain, limits, family, seed, seed or unlimited, rounds)
    kept = seed if seed is not None and seed.cost < below else None
    top = kept.cost if kept else below
    if bound.value >= top - slack_of(top):
        return Answer(kept, min(bound.value, top))
    if not means.effort and seed is not None and seed.cost > below * _NEAR:
        return Answer(None, bound.value)
    search = Search(problem, fits, plain, limits, family, bound, kept, below)
    proved = search.run(means.width, means.branches, means.each, means.effort)
    best = search.best and _tidied(problem, fits, limits, search.best)
    if proved:
        return Answer(best, INF if seed is None and best is None else search.top)
    return Answer(best, bound.value)


def _given_order(
    problem: Problem,
    found: Placement | None,
    plain: Sequence[Cost],
    limits: Sequence[Limit],
    time_limit: int | None,
) -> Placement | None:
    """A good placement with the stages in the order given: ``found``, or if a pool binds, with pools shared out."""
    if found is None or _within(problem, limits, found):
        return found
    shared = _shared_out(problem, limits, by_speed=True)
    found = _chain.in_order(shared, find_fits(shared, time_limit), plain)
    return found if found is not None and _within(problem, limits, found) else None


def _within(problem: Problem, limits: Sequence[Limit], found: Placement) -> bool:
    return all(limit.use(problem, found) <= limit.size for limit in limits)


def _shared_out(problem: Problem, limits: Sequence[Limit], by_speed: bool) -> Problem:
    """The problem without pools: of each, the quickest stage takes what it can, or all members their part of it."""
    stages = list(problem.stages)
    for limit in limits:
        if limit.pool is None:
            continue
        left = limit.size - min((limit.start_use(start) for start in problem.starts), default=0)
        total = sum(stages[member].room for member in limit.members)
        for member in sorted(limit.members, key=lambda k: (stages[k].time[-1], k)):
            stage = stages[member]
            room = max(0, min(stage.room, left if by_speed else stage.room * left // max(1, total)))
            left -= room if by_speed else 0
            stages[member] = replace(stage, room=room)
    return replace(problem, stages=stages, pools=())


def _tidied(problem: Problem, fits: Fits, limits: Sequence[Limit], found: Placement) -> Placement:
    """The same stages with as many units each, in the order given if that is as good: no plan moves for nothing."""
    at = found.start.units
    runs: list[Run] = []
    for run in sorted(found.runs):
        end = at + run.end - run.begin
        ends, closes = fits[1 if runs else 0][run.stage]
        cut = problem.cuts is None or problem.cuts[end]
        if not (closes[at] if end == problem.units else cut and end <= ends[at]):
            return found
        runs.append(Run(run.stage, at, end))
        at = end
    cost = found.start.cost + sum(run_cost(problem, run, k == 0) for k, run in enumerate(runs))
    other = Placement(found.start, tuple(runs), cost)
    worse = cost > found.cost + slack_of(found.cost)
    return found if worse or any(limit.use(problem, other) > limit.size for limit in limits) else other


def cost_bound(problem: Problem, like: Placement) -> float:
    """No placement costs less in total; quick, and not as close as what ``cheapest`` says.

    ``like``: a placement on the same stages, perhaps of another way to run them, to take rents from.
    """
    if not problem.stages:
        return min((start.cost for start in problem.starts if start.units == problem.units), default=INF)
    if not problem.starts:
        return INF
    if not _means(problem).effort:  # every unit on the quickest stage, and one hop
        quickest = min(problem.stages, key=lambda stage: stage.time[-1]).time
        hop = min(min(stage.hop_first, stage.hop_later) for stage in problem.stages)
        rest = [quickest[-1] - here for here in quickest]
        return min(start.cost + (rest[start.units] + hop if rest[start.units] else 0) for start in problem.starts)
    fits, limits = find_fits(problem, None), find_limits(problem)
    plain = [plain_cost(stage) for stage in problem.stages]
    return best_bound(problem, fits, plain, limits, families(problem, limits), None, like, _QUICK.rounds).value


def alone(problem: Problem) -> list[Placement]:
    """Every placement that has all units on one single stage."""
    found = []
    for start in problem.starts:
        for number, stage in enumerate(problem.stages):
            run = Run(number, start.units, problem.units)
            others = (other.least for k, other in enumerate(problem.stages) if k != number)
            size = problem.run_bytes(run.begin, run.end, True)
            if size > stage.room or not stage.least <= run.end - run.begin <= stage.most or any(others):
                continue
            if stage.pool is None or start.used[stage.pool] + size <= problem.pools[stage.pool]:
                found.append(Placement(start, (run,), start.cost + run_cost(problem, run, True)))
    return found


def most_even(problem: Problem, below: float = INF) -> Answer:
    """Of the placements whose fullest stage (bytes / scale) is least full, the cheapest one.

    ``below``: a placement that is fuller than that is not wanted.
    """

    def limited(limit: float, strict: bool) -> tuple[Problem, int | None]:
        part = limit * (_BELOW if strict else _ABOVE)
        rooms = [int(part * each.scale) for each in problem.stages]
        stages = [replace(each, room=min(each.room, room)) for each, room in zip(problem.stages, rooms)]
        starts = [start for start in problem.starts if (start.load < limit if strict else start.load <= limit)]
        return replace(problem, stages=stages, starts=starts), None

    return _narrowest(problem, [load_cost(problem, stage) for stage in problem.stages], limited, fullest, below)


def shortest_stage(problem: Problem, below: float = INF) -> Answer:
    """Of the placements whose slowest stage is fastest, the cheapest one.

    ``below``: a placement whose slowest stage takes longer is not wanted.
    """

    def limited(limit: float, strict: bool) -> tuple[Problem, int | None]:
        most = int(limit) - (1 if strict else 0)
        return replace(problem, starts=[start for start in problem.starts if start.cost <= most]), most

    return _narrowest(problem, [plain_cost(stage) for stage in problem.stages], limited, slowest, below)


def _narrowest(
    problem: Problem,
    costs: Sequence[Cost],
    limited: Callable[[float, bool], tuple[Problem, int | None]],
    worst: Callable[[Problem, Placement], float],
    below: float,
) -> Answer:
    """The cheapest placement at the smallest limit on the cost of every single stage (and of the start).

    ``limited``: the problem with that limit, and a limit of time for it; with True, the limit itself is too much.
    """
    means = _means(problem)

    def some(limit: float, strict: bool, tries: int) -> tuple[Placement | None, bool]:
        other, most = limited(limit, strict)
        limits = find_limits(other)
        greedy = not means.effort
        return any_placement(other, find_fits(other, most), limits, families(other, limits), tries, greedy)

    low = _least_limit(problem, costs)
    if low > below * _ABOVE:
        return Answer(None, low)
    found, final = _in_order(problem, costs, limited), False
    if found is None:
        found, final = some(1 << 60, False, means.search)
    if found is None:
        return Answer(None, INF if final else low)
    high = worst(problem, found)
    if not means.effort and high > below * _NEAR:
        return Answer(None, low)
    doubtful = low  # nothing was found there, which proves nothing
    for _halving in range(means.halvings):
        if high - doubtful <= slack_of(high) or high <= low:
            break
        middle = (doubtful + high) / 2
        other, final = some(middle, False, min(means.search, _EFFORT_HALVING))
        if other is not None:
            found, high = other, worst(problem, other)
        else:
            doubtful = middle
            low = middle if final else low
    proved = high <= low
    tries = 0
    while not proved and (means.effort or tries < _TRIES):
        other, proved = some(high, True, means.search)
        if other is None:
            break
        found, high, proved, tries = other, worst(problem, other), False, tries + 1
    narrowed, most = limited(high, False)
    return Answer(
        cheapest(narrowed, most, seed=found, quick=not means.effort).placement or found,
        high if proved else min(low, high),
    )


def _in_order(
    problem: Problem, costs: Sequence[Cost], limited: Callable[[float, bool], tuple[Problem, int | None]]
) -> Placement | None:
    """The same with the stages in the order given, and pools shared out beforehand; None if that does not fit."""
    limits = find_limits(problem)
    best: tuple[float, Placement] | None = None
    ways = (problem, *(_shared_out(problem, limits, by_speed) for by_speed in (True, False))) if limits else (problem,)
    for given in ways:
        tables = _chain.bottleneck(given, costs)
        limit = min((max(start.load, tables.first[0][start.units]) for start in given.starts), default=INF)
        if limit < (best[0] if best else INF):
            other, most = limited(limit, False)
            rooms = zip(other.stages, given.stages)
            other = replace(other, stages=[replace(each, room=min(each.room, own.room)) for each, own in rooms])
            found = _chain.in_order(other, find_fits(other, most), [plain_cost(stage) for stage in other.stages])
            if found is not None and _within(problem, limits, found):
                best = (limit, found)
                if given is problem:
                    break
    return best[1] if best else None


def _least_limit(problem: Problem, costs: Sequence[Cost]) -> float:
    """No placement has a smaller worst stage, whatever the order: each stage holds the lightest units there are.

    A stage takes its k-th unit no sooner than its lightest k neighbours come below the limit; so for r units the limit
    is at least the r-th smallest of these costs of all stages together.
    """
    fits, units = find_fits(problem, None), problem.units
    known: dict[tuple[int, int, float], list[float]] = {}
    steps: list[float] = []
    for number, (stage, cost) in enumerate(zip(problem.stages, costs)):
        fixed = min(cost.fixed)
        key = (id(stage.time), stage.scale, fixed)
        longest = max(_longest(row[number], units) for row in fits)
        lightest = known.setdefault(key, [])
        for count in range(len(lightest) + 1, longest + 1):
            lightest.append(min(map(sub, cost.prefix[count:], cost.prefix)) + fixed)
        steps += lightest[:longest]
    steps.sort()
    best: float = INF
    for start in problem.starts:
        left = units - start.units
        if left <= len(steps):
            best = min(best, max(start.load, steps[left - 1] if left else 0))
    return best


def _longest(fit: Fit, units: int) -> int:
    """The most units that any run of a stage can have."""
    ends, closes = fit
    spans = [end - begin for begin, end in enumerate(ends)] + [units - k for k, closing in enumerate(closes) if closing]
    return max(spans, default=0)
