# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the optimiser places, and on what: units, stages, limits; sizes and costs of a run of units on a stage.

Nothing here knows llama.cpp: units have bytes and times, a stage is a device that takes a run of neighbouring units,
and some limits (a memory pool, the number of devices) bind several stages together. Bytes and costs are whole numbers.
Which runs fit a stage is looked up by bisection, because bytes and times of a run are differences of prefix sums.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

INF = 1 << 90


@dataclass(frozen=True)
class Stage:
    """One device. ``room``: bytes for units, compute included. ``time[j]``: cost of reading the units [0, j).

    ``hop_first``, ``hop_later``: fixed cost if it is the first stage used, or a later one; ``hop_output``: added
    when it holds the last unit. ``least``/``most``: units it must or may hold. ``scale``: the bytes that its load is
    measured against. ``pool``: number of its common limit, or None. ``phase``: stages of a lower one stand before
    those of a higher one; within a phase any order is allowed.
    """

    room: int
    scale: int
    time: Sequence[int]
    hop_first: int = 0
    hop_later: int = 0
    hop_output: int = 0
    least: int = 0
    most: int = 1 << 30
    pool: int | None = None
    phase: int = 0


class Start(NamedTuple):
    """Units [0, ``units``) that are placed before the first stage: their cost, load, and bytes used in each pool."""

    units: int
    cost: int
    load: float
    used: tuple[int, ...]


class Run(NamedTuple):
    """Stage ``stage`` holds the units [``begin``, ``end``)."""

    stage: int
    begin: int
    end: int


@dataclass(frozen=True)
class Placement:
    """A start, the runs behind it in order, and the total cost."""

    start: Start
    runs: tuple[Run, ...]
    cost: int


@dataclass(frozen=True)
class Problem:
    """What is to be placed, and where.

    ``need[j]``: bytes of the units [0, j) (one entry more than units; the last unit is the output). ``shared``: bytes
    that come once with a run that begins before unit ``trunk_end``. ``work``: compute bytes of a stage that is (first,
    later, first with the output, later with the output). ``pools``: bytes of each common limit. ``places``: how many
    stages may be used. ``cuts[j]``: whether a run may end before unit j. ``borrowed``: unit -> (the earlier unit whose
    cache it reads, bytes that this costs a stage which holds the one but not the other). ``effort``: partial placements
    to try before the best one so far is taken without a proof.
    """

    need: Sequence[int]
    trunk_end: int
    shared: int
    work: tuple[int, int, int, int]
    stages: Sequence[Stage]
    starts: Sequence[Start]
    pools: Sequence[int] = ()
    places: int = 1 << 30
    cuts: Sequence[bool] | None = None
    borrowed: Mapping[int, tuple[int, int]] | None = None
    effort: int = 300_000

    @property
    def units(self) -> int:
        """Number of units, the output included."""
        return len(self.need) - 1

    def run_bytes(self, begin: int, end: int, first: bool) -> int:
        """Bytes that a stage needs to hold the units [begin, end)."""
        total = self.need[end] - self.need[begin] + self.work[(0 if first else 1) + (2 if end == self.units else 0)]
        if begin < self.trunk_end:
            total += self.shared
        return total + self.borrowed_bytes(begin, end)

    def borrowed_bytes(self, begin: int, end: int) -> int:
        """Bytes for caches that the units [begin, end) read but do not hold."""
        if not self.borrowed:
            return 0
        pairs = (self.borrowed[unit] for unit in range(begin, end) if unit in self.borrowed)
        return sum(size for source, size in pairs if source < begin)


class Fit(NamedTuple):
    """For each begin: the last end short of the output that fits (or less), and whether all the rest fits."""

    ends: Sequence[int]
    closes: Sequence[bool]


class Cost(NamedTuple):
    """Cost of a run [i, j): prefix[j] - prefix[i], the constant of its kind (as in ``work``), and ``shared`` if due.

    ``borrowed``: cost of a byte that the run borrows; only a load has it, and tables leave it out.
    """

    prefix: Sequence[float]
    fixed: tuple[float, float, float, float]
    shared: float = 0
    borrowed: float = 0

    def of(self, problem: Problem, run: Run, first: bool) -> float:
        """The cost of ``run``."""
        kind = (0 if first else 1) + (2 if run.end == problem.units else 0)
        cost = self.prefix[run.end] - self.prefix[run.begin] + self.fixed[kind]
        if run.begin < problem.trunk_end:
            cost += self.shared
        return cost + self.borrowed * problem.borrowed_bytes(run.begin, run.end) if self.borrowed else cost


Fits = tuple[Sequence[Fit], Sequence[Fit]]


class Limit(NamedTuple):
    """A common limit: the bytes of ``pool`` (or, if None, the number of stages) that ``members`` use together."""

    size: int
    members: frozenset[int]
    pool: int | None

    def run_use(self, problem: Problem, run: Run, first: bool) -> int:
        if run.stage not in self.members:
            return 0
        return 1 if self.pool is None else problem.run_bytes(run.begin, run.end, first)

    def start_use(self, start: Start) -> int:
        return 0 if self.pool is None else start.used[self.pool]

    def use(self, problem: Problem, found: Placement) -> int:
        runs = (self.run_use(problem, run, k == 0) for k, run in enumerate(found.runs))
        return self.start_use(found.start) + sum(runs)


def fullest(problem: Problem, found: Placement) -> float:
    """Load (bytes / scale) of the fullest part of a placement."""
    loads = [found.start.load]
    for number, run in enumerate(found.runs):
        loads.append(problem.run_bytes(run.begin, run.end, number == 0) / max(1, problem.stages[run.stage].scale))
    return max(loads)


def slowest(problem: Problem, found: Placement) -> int:
    """Cost of the slowest part of a placement."""
    return max([found.start.cost] + [run_cost(problem, run, k == 0) for k, run in enumerate(found.runs)])


def run_cost(problem: Problem, run: Run, first: bool) -> int:
    """Cost of one run on its stage."""
    stage = problem.stages[run.stage]
    cost = stage.time[run.end] - stage.time[run.begin] + (stage.hop_first if first else stage.hop_later)
    return cost + (stage.hop_output if run.end == problem.units else 0)


def plain_cost(stage: Stage) -> Cost:
    first, later, output = stage.hop_first, stage.hop_later, stage.hop_output
    return Cost(stage.time, (first, later, first + output, later + output))


def load_cost(problem: Problem, stage: Stage) -> Cost:
    scale = max(1, stage.scale)
    first, later, first_out, later_out = (work / scale for work in problem.work)
    prefix = [size / scale for size in problem.need]
    return Cost(prefix, (first, later, first_out, later_out), problem.shared / scale, 1 / scale)


def find_fits(problem: Problem, time_limit: int | None) -> Fits:
    """Which runs fit each stage, as the first stage used and as a later one."""
    shared = problem.shared
    bases = [size - (shared if begin < problem.trunk_end else 0) for begin, size in enumerate(problem.need[:-1])]
    begins = where_begins(problem)
    known: dict[tuple[int, int, bool], Fit] = {}
    rows: tuple[list[Fit], list[Fit]] = ([], [])
    for stage in problem.stages:
        for row, first in zip(rows, (True, False)):
            key = (stage.room, stage.most, first)
            if time_limit is not None or key not in known:
                known[key] = _fit(problem, stage, first, bases, time_limit, begins)
            row.append(known[key])
    return rows


def where_begins(problem: Problem) -> Sequence[int]:
    """Where the first stage used may begin."""
    return sorted({start.units for start in problem.starts if start.units < problem.units})


def _fit(
    problem: Problem, stage: Stage, first: bool, bases: Sequence[int], time_limit: int | None, begins: Sequence[int]
) -> Fit:
    need, units, time = problem.need, problem.units, stage.time
    inner = stage.room - problem.work[0 if first else 1]
    outer = stage.room - problem.work[2 if first else 3]
    if first and len(begins) == 1:  # nearly always: nothing is placed before the first stage
        ends, closes = [0] * units, [False] * units
        where = range(begins[0], begins[0] + 1)
    else:
        where = range(units)
        ends, closes = [], []
    ends[where.start : where.stop] = [bisect_right(need, bases[begin] + inner, 0, units) - 1 for begin in where]
    closes[where.start : where.stop] = [need[units] - bases[begin] <= outer for begin in where]
    if stage.most < units:
        for begin in where:
            ends[begin] = min(ends[begin], begin + stage.most)
            closes[begin] = closes[begin] and units - begin <= stage.most
    if time_limit is not None:
        left = time_limit - (stage.hop_first if first else stage.hop_later)
        for begin in where:
            ends[begin] = min(ends[begin], bisect_right(time, time[begin] + left) - 1)
            closes[begin] = closes[begin] and time[units] - time[begin] + stage.hop_output <= left
    if problem.borrowed:
        for begin in where:
            while ends[begin] > begin and problem.run_bytes(begin, ends[begin], first) > stage.room:
                ends[begin] -= 1
            closes[begin] = closes[begin] and problem.run_bytes(begin, units, first) <= stage.room
    return Fit(ends, closes)


def find_limits(problem: Problem) -> list[Limit]:
    """The common limits that could be broken at all."""
    found = []
    for pool, size in enumerate(problem.pools):
        members = frozenset(number for number, stage in enumerate(problem.stages) if stage.pool == pool)
        most = sum(problem.stages[number].room for number in members)
        if most + max((start.used[pool] for start in problem.starts), default=0) > size:
            found.append(Limit(size, members, pool))
    if len(problem.stages) > problem.places:
        found.append(Limit(problem.places, frozenset(range(len(problem.stages))), None))
    return found


def priced(
    problem: Problem,
    plain: Sequence[Cost],
    limits: Sequence[Limit],
    prices: Sequence[int],
    free: bool = False,
) -> list[Cost]:
    """The stages' costs with a price on every use of a limit; ``free`` leaves the plain costs out."""
    result = []
    for number, own in enumerate(plain):
        due = [(price, limit.pool is None) for price, limit in zip(prices, limits) if number in limit.members]
        per_byte = sum(price for price, by_count in due if not by_count)
        per_use = sum(price for price, by_count in due if by_count)
        prefix: Sequence[float] = [0] * len(problem.need) if free else own.prefix
        fixed: Sequence[float] = (0, 0, 0, 0) if free else own.fixed
        if per_byte:
            prefix = [here + per_byte * size for here, size in zip(prefix, problem.need)]
        first, later, first_out, later_out = (
            here + per_use + per_byte * size for here, size in zip(fixed, problem.work)
        )
        result.append(Cost(prefix, (first, later, first_out, later_out), per_byte * problem.shared))
    return result
