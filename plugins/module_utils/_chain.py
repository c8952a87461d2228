# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The optimum for stages in the order given, by a short dynamic programme over boundaries, last stage first.

Exact where no common limit binds; the search over orders starts from what is found here. The same tables say by how
many bytes a problem without a solution is short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
    find_fits,
    plain_cost,
    priced,
    run_cost,
    where_begins,
)


class Tables(NamedTuple):
    """first[d][i], later[d][i]: the least cost of placing the units from i on, on the stages from d on."""

    first: Sequence[Sequence[float]]
    later: Sequence[Sequence[float]]


def worst_shortage(problem: Problem) -> tuple[int, Placement] | None:
    """The fewest bytes that, added to every stage, would make all units fit, and the placement that shows it.

    Pools and ``places`` are left out. None if even unlimited stages cannot hold the units (``most``, ``least``).
    """
    roomy = replace(problem, stages=[replace(stage, room=INF) for stage in problem.stages], pools=(), places=1 << 30)
    rooms = []
    for stage in problem.stages:
        first, later, first_out, later_out = (work - stage.room for work in problem.work)
        rooms.append(Cost(problem.need, (first, later, first_out, later_out), problem.shared))
    tables = bottleneck(roomy, rooms, floor=-INF)
    short = min((max(0, tables.first[0][start.units]) for start in problem.starts), default=INF)
    if short >= INF:
        return None
    enough = replace(roomy, stages=[replace(stage, room=stage.room + int(short)) for stage in problem.stages])
    found = in_order(enough, find_fits(enough, None), [plain_cost(stage) for stage in problem.stages])
    return (int(short), found) if found else None


def least_use(problem: Problem, pool: int | None) -> int | None:
    """The fewest bytes of ``pool`` (the fewest stages, if None) with which all units fit the stages; None if never.

    The other common limits are left out.
    """
    members = frozenset(k for k, stage in enumerate(problem.stages) if pool is None or stage.pool == pool)
    limit = Limit(0, members, pool)
    fits, plain = find_fits(problem, None), [plain_cost(stage) for stage in problem.stages]
    floor = find_tables(problem, fits, priced(problem, plain, [limit], (1,), free=True))
    least = min((limit.start_use(start) + floor.first[0][start.units] for start in problem.starts), default=INF)
    return int(least) if least < INF else None


def find_tables(problem: Problem, fits: Fits, costs: Sequence[Cost]) -> Tables:
    """The cost of the best completion from every boundary, last stage first."""
    units = problem.units
    begins = where_begins(problem)
    last: list[float] = [*([INF] * units), 0]
    later, first = [last], [last]
    for number in range(len(problem.stages) - 1, -1, -1):
        stage, cost, beyond = problem.stages[number], costs[number], later[-1]
        reach = reach_of(problem, cost, beyond)
        for kind, rows, where in ((0, first, begins), (1, later, range(1, units))):
            skip = rows[-1]
            row: list[float] = [INF] * units + [INF if stage.least else beyond[units]]
            ends, closes = fits[kind][number]
            inner, outer = cost.fixed[kind], cost.fixed[kind + 2] + cost.prefix[units] + beyond[units]
            least = max(1, stage.least)
            for begin in where:
                best = INF if stage.least else skip[begin]
                base = cost.prefix[begin] - (cost.shared if begin < problem.trunk_end else 0)
                if begin + least <= ends[begin]:
                    value = min(reach[begin + least : ends[begin] + 1]) + inner - base
                    if value < best:
                        best = value
                if closes[begin] and begin + least <= units and outer - base < best:
                    best = outer - base
                row[begin] = best
            rows.append(row)
    later.reverse()
    first.reverse()
    return Tables(first, later)


def reach_of(problem: Problem, cost: Cost, beyond: Sequence[float]) -> list[float]:
    """Cost up to each boundary, and from there on with the stages beyond; INF where no run may end."""
    if problem.cuts is None:
        return [here + there for here, there in zip(cost.prefix, beyond)]
    return [here + (there if cut else INF) for here, there, cut in zip(cost.prefix, beyond, problem.cuts)]


def in_order(problem: Problem, fits: Fits, costs: Sequence[Cost]) -> Placement | None:
    """The placement of least cost with the stages in the order given, whatever the common limits; None if none fits."""
    tables = find_tables(problem, fits, costs)
    chosen = min(problem.starts, key=lambda start: start.cost + tables.first[0][start.units], default=None)
    if chosen is None or chosen.cost + tables.first[0][chosen.units] >= INF:
        return None
    return trace(problem, fits, costs, tables, chosen)


def trace(problem: Problem, fits: Fits, costs: Sequence[Cost], tables: Tables, start: Start) -> Placement:
    """Walk the tables from ``start``; of equal choices a stage is left out, or takes as much as it can."""
    at = start.units
    runs: list[Run] = []
    for number, stage in enumerate(problem.stages):
        kind = 1 if runs else 0
        rows = tables.later if runs else tables.first
        if at == problem.units or (not stage.least and rows[number][at] == rows[number + 1][at]):
            continue
        wanted, cost, beyond = rows[number][at], costs[number], tables.later[number + 1]
        base = cost.prefix[at] - (cost.shared if at < problem.trunk_end else 0)
        end = problem.units
        if not fits[kind][number].closes[at] or cost.prefix[end] - base + cost.fixed[kind + 2] + beyond[end] != wanted:
            reach = reach_of(problem, cost, beyond)
            end = fits[kind][number].ends[at]
            while reach[end] - base + cost.fixed[kind] != wanted:
                end -= 1
        runs.append(Run(number, at, end))
        at = end
    total = start.cost + sum(run_cost(problem, run, k == 0) for k, run in enumerate(runs))
    return Placement(start, tuple(runs), total)


def bottleneck(problem: Problem, costs: Sequence[Cost], floor: float = 0) -> Tables:
    """Like ``tables``, but what counts is the dearest stage: the least that it can cost."""
    units = problem.units
    fits = find_fits(problem, None)
    begins = where_begins(problem)
    smooth = problem.cuts is None and not problem.borrowed and not any(stage.least for stage in problem.stages)
    last: list[float] = [*([INF] * units), floor]
    later, first = last, last
    all_later, all_first = [last], [last]
    for number in range(len(problem.stages) - 1, -1, -1):
        stage, cost = problem.stages[number], costs[number]
        rows: list[list[float]] = []
        for kind, skip, where in ((0, first, begins), (1, later, list(range(1, units)))):
            row: list[float] = [INF] * units + [INF if stage.least else later[units]]
            ends, closes = fits[kind][number]
            least = max(1, stage.least)
            turn = units
            for begin in reversed(where):
                best = INF if stage.least else skip[begin]
                base = cost.prefix[begin] - (cost.shared if begin < problem.trunk_end else 0) - cost.fixed[kind]
                low, high = begin + least, ends[begin]
                if smooth and low <= high:
                    # The stage's cost rises with its end, the rest's falls: the best end is where they cross.
                    turn = min(turn, high + 1)
                    while turn > low and cost.prefix[turn - 1] - base >= later[turn - 1]:
                        turn -= 1
                    if turn <= high:
                        best = min(best, max(cost.prefix[turn] - base, later[turn]))
                    if turn > low:
                        best = min(best, later[turn - 1])
                elif low <= high:
                    best = min(best, _scan(problem, cost.prefix, base, later, low, high))
                if closes[begin] and begin + least <= units:
                    rest = cost.prefix[units] - base - cost.fixed[kind] + cost.fixed[kind + 2]
                    best = min(best, max(rest, later[units]))
                row[begin] = best
            rows.append(row)
        first, later = rows
        all_first.append(first)
        all_later.append(later)
    return Tables(all_first[::-1], all_later[::-1])


def _scan(problem: Problem, prefix: Sequence[float], base: float, later: Sequence[float], low: int, high: int) -> float:
    """The least of max(own cost, rest) over the ends low to high, where the rest need not fall steadily."""
    best: float = INF
    for end in range(low, high + 1):
        own = prefix[end] - base
        if own >= best:
            break
        if (problem.cuts is None or problem.cuts[end]) and later[end] < best:
            best = max(own, later[end])
    return best
