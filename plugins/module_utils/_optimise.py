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
from ansible_collections.llamafleet.rpc.plugins.module_utils._rents import best_bound, slack_of, twins
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

FEW = 8  # stages up to which the proof gets the whole effort
_EFFORT_MANY = 4_000  # partial placements to try with more of them: some 20 ms
_ROUNDS_FEW, _ROUNDS_MANY, _ROUNDS_QUICK = 24, 6, 3  # steps towards a better bound
_BELOW, _ABOVE = 1 - 1e-12, 1 + 1e-12  # of a limit: loads between them are the same, but for rounding
_BEAM = 4  # partial placements kept at each boundary by the first, inexact walk
_HALVINGS_FEW, _HALVINGS_MANY = 12, 4  # of the range in which the smallest possible limit lies


class Answer(NamedTuple):
    """The best placement found, or None; and a bound: none has less of what was asked for (INF: there is none).

    The placement is proved to be the best one if it has as much as the bound.
    """

    placement: Placement | None
    bound: float


def cheapest(
    problem: Problem, time_limit: int | None = None, below: float = INF, seed: Placement | None = None
) -> Answer:
    """The placement of least total cost.

    ``time_limit``: the most that a single stage may cost. ``below``: a placement that costs as much is not wanted.
    ``seed``: a placement that is known to be possible.
    """
    fits = find_fits(problem, time_limit)
    plain = [plain_cost(stage) for stage in problem.stages]
    limits = find_limits(problem)
    given = _chain.in_order(problem, fits, plain)
    if given is not None and all(limit.use(problem, given) <= limit.size for limit in limits):
        seed = given if seed is None or given.cost <= seed.cost else seed
    if not problem.stages:
        wanted = seed if seed is not None and seed.cost < below else None
        return Answer(wanted, INF if seed is None else seed.cost)
    before = twins(problem, limits)
    few = len(problem.stages) <= FEW
    effort = problem.effort if few else min(problem.effort, _EFFORT_MANY)
    if seed is None:
        seed, final = any_placement(problem, fits, limits, before, effort)
        if seed is None and final:
            return Answer(None, INF)
    bound = best_bound(problem, fits, plain, limits, before, seed, _ROUNDS_FEW if few else _ROUNDS_MANY)
    kept = seed if seed is not None and seed.cost < below else None
    top = kept.cost if kept else below
    if bound.value >= top - slack_of(top):
        return Answer(kept, min(bound.value, top))
    search = Search(problem, fits, plain, limits, before, bound, kept, below)
    proved = search.run(_BEAM, effort)
    best = search.best and _tidied(problem, fits, limits, search.best)
    if proved:
        return Answer(best, INF if seed is None and best is None else search.top)
    return Answer(best, bound.value)


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


def cost_bound(problem: Problem, seed: Placement | None) -> float:
    """No placement costs less in total; quick, and not as close as what ``cheapest`` says."""
    if not problem.stages:
        return min((start.cost for start in problem.starts if start.units == problem.units), default=INF)
    fits, limits = find_fits(problem, None), find_limits(problem)
    plain = [plain_cost(stage) for stage in problem.stages]
    return best_bound(problem, fits, plain, limits, twins(problem, limits), seed, _ROUNDS_QUICK).value


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


def most_even(problem: Problem) -> Answer:
    """Of the placements whose fullest stage (bytes / scale) is least full, the cheapest one."""

    def limited(limit: float, strict: bool) -> tuple[Problem, int | None]:
        part = limit * (_BELOW if strict else _ABOVE)
        rooms = [int(part * each.scale) for each in problem.stages]
        stages = [replace(each, room=min(each.room, room)) for each, room in zip(problem.stages, rooms)]
        starts = [start for start in problem.starts if (start.load < limit if strict else start.load <= limit)]
        return replace(problem, stages=stages, starts=starts), None

    return _narrowest(problem, [load_cost(problem, stage) for stage in problem.stages], limited, fullest)


def shortest_stage(problem: Problem) -> Answer:
    """Of the placements whose slowest stage is fastest, the cheapest one."""

    def limited(limit: float, strict: bool) -> tuple[Problem, int | None]:
        most = int(limit) - (1 if strict else 0)
        return replace(problem, starts=[start for start in problem.starts if start.cost <= most]), most

    return _narrowest(problem, [plain_cost(stage) for stage in problem.stages], limited, slowest)


def _narrowest(
    problem: Problem,
    costs: Sequence[Cost],
    limited: Callable[[float, bool], tuple[Problem, int | None]],
    worst: Callable[[Problem, Placement], float],
) -> Answer:
    """The cheapest placement at the smallest limit on the cost of every single stage (and of the start).

    ``limited``: the problem with that limit, and a limit of time for it; with True, the limit itself is too much.
    """
    few = len(problem.stages) <= FEW
    effort = problem.effort if few else min(problem.effort, _EFFORT_MANY)

    def some(limit: float, strict: bool, tries: int) -> tuple[Placement | None, bool]:
        other, most = limited(limit, strict)
        limits = find_limits(other)
        return any_placement(other, find_fits(other, most), limits, twins(other, limits), tries)

    found, final = _in_order(problem, costs, limited), False
    if found is None:
        found, final = some(1 << 60, False, effort)
    if found is None:
        return Answer(None, INF if final else _least_limit(problem, costs))
    high, low = worst(problem, found), _least_limit(problem, costs)
    doubtful = low  # nothing was found there, which proves nothing
    for _halving in range(_HALVINGS_FEW if few else _HALVINGS_MANY):
        if high - doubtful <= slack_of(high) or high <= low:
            break
        middle = (doubtful + high) / 2
        other, final = some(middle, False, min(effort, _EFFORT_MANY))
        if other is not None:
            found, high = other, worst(problem, other)
        else:
            doubtful = middle
            low = middle if final else low
    proved = high <= low
    while not proved:
        other, proved = some(high, True, effort)
        if other is None:
            break
        found, high, proved = other, worst(problem, other), False
    narrowed, most = limited(high, False)
    return Answer(cheapest(narrowed, most, seed=found).placement or found, high if proved else min(low, high))


def _in_order(
    problem: Problem, costs: Sequence[Cost], limited: Callable[[float, bool], tuple[Problem, int | None]]
) -> Placement | None:
    """The same with the stages in the order given; None if that breaks a common limit."""
    tables = _chain.bottleneck(problem, costs)
    limit = min((max(start.load, tables.first[0][start.units]) for start in problem.starts), default=INF)
    if limit >= INF:
        return None
    other, most = limited(limit, False)
    found = _chain.in_order(other, find_fits(other, most), [plain_cost(stage) for stage in other.stages])
    if found is None or any(each.use(problem, found) > each.size for each in find_limits(problem)):
        return None
    return found


def _least_limit(problem: Problem, costs: Sequence[Cost]) -> float:
    """No placement has a smaller worst stage, whatever the order: each stage holds the lightest units there are.

    A stage takes its k-th unit no sooner than its lightest k neighbours come below the limit; so for r units the limit
    is at least the r-th smallest of these costs of all stages together.
    """
    fits, units = find_fits(problem, None), problem.units
    known: dict[tuple[int, float], list[float]] = {}
    steps: list[float] = []
    for number, (stage, cost) in enumerate(zip(problem.stages, costs)):
        fixed = min(cost.fixed)
        key = (id(stage.time), stage.scale + fixed)
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
