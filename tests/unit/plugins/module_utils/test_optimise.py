# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Common limits (pools, number of devices): the optimiser against every placement, also on its way for tangled ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils import _optimise
from ansible_collections.llamafleet.rpc.plugins.module_utils._optimise import Placement, Problem, Run, Stage, Start


def placements(problem: Problem, at: int, runs: tuple[Run, ...]) -> Iterator[tuple[Run, ...]]:
    """All ways to put the units from ``at`` on unused stages in any order, by the rooms of the stages alone."""
    used = {run.stage for run in runs}
    if at == problem.units:
        if all(number in used for number, stage in enumerate(problem.stages) if stage.least):
            yield runs
        return
    for number, stage in enumerate(problem.stages):
        if number in used or (runs and stage.phase < problem.stages[runs[-1].stage].phase):
            continue
        for count in range(max(1, stage.least), min(stage.most, problem.units - at) + 1):
            end = at + count
            cut = end == problem.units or problem.cuts is None or problem.cuts[end]
            if cut and size_of(problem, at, end, first=not runs) <= stage.room:
                yield from placements(problem, end, (*runs, Run(number, at, end)))


def size_of(problem: Problem, begin: int, end: int, first: bool) -> int:
    output = end == problem.units
    size = sum(problem.need[k + 1] - problem.need[k] for k in range(begin, end))
    size += problem.work[2 if output else 0] if first else problem.work[3 if output else 1]
    size += problem.shared if begin < problem.trunk_end else 0
    lent = [problem.borrowed[k] for k in range(begin, end) if problem.borrowed and k in problem.borrowed]
    return size + sum(price for source, price in lent if source < begin)


def cost_of(problem: Problem, run: Run, first: bool) -> int:
    stage = problem.stages[run.stage]
    cost = stage.time[run.end] - stage.time[run.begin] + (stage.hop_first if first else stage.hop_later)
    return cost + (stage.hop_output if run.end == problem.units else 0)


def every(problem: Problem) -> list[tuple[int, float, int, Placement]]:
    """(cost, fullest, slowest, placement) of everything within all limits."""
    found = []
    for start in problem.starts:
        for runs in placements(problem, start.units, ()):
            sizes = [size_of(problem, run.begin, run.end, k == 0) for k, run in enumerate(runs)]
            used = list(start.used)
            for run, size in zip(runs, sizes):
                pool = problem.stages[run.stage].pool
                if pool is not None:
                    used[pool] += size
            if len(runs) > problem.places or any(take > has for take, has in zip(used, problem.pools)):
                continue
            costs = [cost_of(problem, run, k == 0) for k, run in enumerate(runs)]
            total = start.cost + sum(costs)
            loads = [size / problem.stages[run.stage].scale for run, size in zip(runs, sizes)]
            fullest = max([start.load, *loads])
            found.append((total, fullest, max([start.cost, *costs]), Placement(start, runs, total)))
    return found


def some_problem(dice: random.Random) -> Problem:
    count = dice.randint(2, 8)
    sizes = [dice.randint(0, 20) for _unit in range(count)]
    need = [sum(sizes[:k]) for k in range(count + 1)]
    pools = dice.randint(0, 3)
    stages = []
    for phase in sorted(dice.choice([0, 0, 1]) for _stage in range(dice.randint(1, 5))):
        least = dice.choice([0, 0, 0, 0, 0, 1, 2])
        pace, hop = dice.randint(1, 9), dice.randint(0, 30)
        stages.append(
            Stage(
                room=dice.randint(0, 60),
                scale=dice.randint(20, 80),
                time=[size * pace for size in need],
                hop_first=hop,
                hop_later=max(0, hop - dice.randint(0, 3)),
                hop_output=dice.randint(0, 5),
                least=least,
                most=dice.choice([99, 99, 99, least + dice.randint(0, 4)]),
                pool=dice.choice([None, *range(pools)]),
                phase=phase,
            )
        )
    starts = [Start(0, 0, 0.0, (0,) * pools)]
    if dice.random() < 0.4:  # units on the CPU before the first stage, its memory being pool 0
        starts = [
            Start(k, need[k] * dice.randint(1, 9), need[k] / 50, tuple(need[k] * (p == 0) for p in range(pools)))
            for k in range(1, count + 1)
        ]
    slow, quick, extra = dice.randint(0, 5), dice.randint(0, 3), dice.randint(0, 5)
    lenders = {k: (dice.randrange(k), dice.randint(0, 30)) for k in range(1, count - 1) if dice.random() < 0.4}
    return Problem(
        need=need,
        trunk_end=dice.choice([count - 1, dice.randint(0, count - 1)]),
        shared=dice.randint(0, 4),
        work=(slow + quick, quick, slow + quick + extra, quick + extra),
        stages=stages,
        starts=starts,
        pools=[dice.randint(20, 120) for _pool in range(pools)],
        places=dice.choice([99, 99, 1, 2, 3]),
        cuts=[dice.random() < 0.8 for _unit in range(count)] + [True] if dice.random() < 0.2 else None,
        borrowed=lenders if dice.random() < 0.2 else None,
    )


@pytest.mark.parametrize(
    ("seed", "rounds", "beam", "cases"),
    [
        (20261129, 24, 4, 1000),
        # Each has one where dropping partial placements by cost with prices, not without, loses the optimum.
        (3, 24, 4, 350),
        (16, 24, 4, 50),
        (20, 24, 4, 200),
        (5, 1, 1, 400),
    ],
)
def test_against_every_placement(
    monkeypatch: pytest.MonkeyPatch, seed: int, rounds: int, beam: int, cases: int
) -> None:
    """Every order of the stages; with a poor bound and a poor first walk too, which leaves the search more to do."""
    means = _optimise._THOROUGH._replace(rounds=rounds, priced_rounds=rounds, width=beam)
    monkeypatch.setattr(_optimise, "_THOROUGH", means)
    dice = random.Random(seed)
    possible = 0
    for number in range(cases):
        problem = some_problem(dice)
        known = every(problem)
        possible += bool(known)
        found, bound = _optimise.cheapest(problem)
        assert (found is None) == (not known) == (bound == _optimise.INF), number
        if found is None:
            continue
        assert any(found.start == each.start and found.runs == each.runs for _c, _f, _s, each in known), number
        assert found.cost == bound == min(cost for cost, _f, _s, _p in known), number
        even, bound = _optimise.most_even(problem)
        assert even is not None, number
        least = min(fullest for _c, fullest, _s, _p in known)
        slack = 1 / min(stage.scale for stage in problem.stages)  # one byte
        assert next(f for _c, f, _s, p in known if (p.start, p.runs) == (even.start, even.runs)) <= least + slack, (
            number
        )
        assert bound <= least + 1e-9, number
        assert bound == _optimise.fullest(problem, even), number
        if problem.starts[0].units == 0:
            quick, bound = _optimise.shortest_stage(problem)
            assert quick is not None, number
            least_slow = min(slow for _c, _f, slow, _p in known)
            assert next(s for _c, _f, s, p in known if p.runs == quick.runs) == bound == least_slow, number
            assert quick.cost == min(cost for cost, _f, slow, _p in known if slow == least_slow), number
    assert possible > cases // 4


def test_an_exhausted_search_says_that_nothing_is_proved() -> None:
    """Tangled limits must not hang a playbook: out of effort, the best placement so far comes with a bound."""
    dice = random.Random(7)
    marked = 0
    for _case in range(600):
        problem = some_problem(dice)
        found, bound = _optimise.cheapest(replace(problem, effort=4))
        if found is not None and bound < found.cost:
            marked += 1
            known = every(problem)
            assert any((found.start, found.runs) == (each.start, each.runs) for _c, _f, _s, each in known)
            assert bound <= min(cost for cost, _f, _s, _p in known) <= found.cost
    assert marked > 0
