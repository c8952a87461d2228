# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The exact optimum of placing whole units, in order, on an ordered list of devices.

Nothing here knows llama.cpp: units have bytes and times, a stage is a device that takes a run of neighbouring units,
and some limits (a memory pool, the number of devices) bind several stages together. Bytes and costs are whole numbers.

How it stays exact and fast: without the common limits, the best completion from each boundary is a short dynamic
programme (``_tables``), because bytes and times of a run are differences of prefix sums. If its result breaks a common
limit, that limit gets a price per byte (a Lagrange multiplier); the priced tables bound every completion from below,
and a search over partial placements (``_Search``) that drops what is dominated or cannot beat the best one known
proves the optimum.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import NamedTuple

INF = 1 << 90
_PRICE_ROUNDS = 30  # rounds of the search for prices; more would only tighten a bound that is valid anyway
_BEAM = 3  # partial placements kept at each boundary by the first, inexact walk
_PATIENCE = 4_000  # partial placements after which prices are worth their while


@dataclass(frozen=True)
class Stage:
    """One device. ``room``: bytes for units, compute included. ``time[j]``: cost of reading the units [0, j).

    ``hop_first``, ``hop_later``: fixed cost if it is the first stage used, or a later one; ``hop_output``: added
    when it holds the last unit. ``least``/``most``: units it must or may hold. ``scale``: the bytes that its load is
    measured against. ``pool``: number of its common limit, or None.
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
    """A start, the runs behind it in order, the total cost, and whether it is proved to be the best one."""

    start: Start
    runs: tuple[Run, ...]
    cost: int
    proved: bool = True


@dataclass(frozen=True)
class Problem:
    """What is to be placed, and where.

    ``need[j]``: bytes of the units [0, j) (one entry more than units; the last unit is the output). ``shared``: bytes
    that come once with a run that begins before unit ``trunk_end``. ``work``: compute bytes of a stage that is (first,
    later, first with the output, later with the output). ``pools``: bytes of each common limit. ``places``: how many
    stages may be used. ``cuts[j]``: whether a run may end before unit j. ``borrowed``: unit -> (the earlier unit whose
    cache it reads, bytes that this costs a stage which holds the one but not the other). ``effort``: partial placements
    to try before the best one so far is taken without a proof; only tangled common limits get there.
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


class _Fit(NamedTuple):
    """For each begin: the last end short of the output that fits (or less), and whether all the rest fits."""

    ends: Sequence[int]
    closes: Sequence[bool]


class _Cost(NamedTuple):
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


class _Tables(NamedTuple):
    """first[d][i], later[d][i]: the least cost of placing the units from i on, on the stages from d on."""

    first: Sequence[Sequence[float]]
    later: Sequence[Sequence[float]]


_Fits = tuple[Sequence[_Fit], Sequence[_Fit]]


class _Limit(NamedTuple):
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


# --- The three questions ---------------------------------------------------------------------------------------------


def cheapest(problem: Problem, time_limit: int | None = None, below: float = INF) -> Placement | None:
    """The placement of least total cost, or None.

    ``time_limit``: the most that a single stage may cost. ``below``: a placement that costs as much is not wanted.
    """
    fits = _fits(problem, time_limit)
    costs = [_plain_cost(stage) for stage in problem.stages]
    tables = _tables(problem, fits, costs)
    found = _best(problem, fits, costs, tables)
    if found is None or found.cost >= below:
        return None
    limits = _limits(problem)
    if all(limit.use(problem, found) <= limit.size for limit in limits):
        return found
    return _Search(problem, fits, costs, tables, limits, below=below).run()


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


def most_even(problem: Problem) -> Placement | None:
    """Of the placements whose fullest stage (bytes / scale) is least full, the cheapest one. None if there is none."""

    def within(limit: float) -> Placement | None:
        # One byte more than the limit: rounding must not forbid the optimum itself.
        stages = [replace(stage, room=min(stage.room, int(limit * stage.scale) + 1)) for stage in problem.stages]
        starts = [start for start in problem.starts if start.load <= limit]
        return cheapest(replace(problem, stages=stages, starts=starts))

    return _narrowest(problem, [_load_cost(problem, stage) for stage in problem.stages], within)


def shortest_stage(problem: Problem) -> Placement | None:
    """Of the placements whose slowest stage is fastest, the cheapest one. None if there is none."""
    costs = [_plain_cost(stage) for stage in problem.stages]
    return _narrowest(problem, costs, lambda limit: cheapest(problem, int(limit)))


def _narrowest(
    problem: Problem, costs: Sequence[_Cost], within: Callable[[float], Placement | None]
) -> Placement | None:
    """The cheapest placement at the smallest limit on the cost of every single stage (and the load of the start)."""
    tables = _bottleneck(problem, costs)
    bound = min((max(start.load, tables.first[0][start.units]) for start in problem.starts), default=INF)
    if bound >= INF:
        return None
    limits = _limits(problem)
    found = within(bound)
    if found is not None or not (limits or problem.borrowed):
        return found
    widest = _Search(problem, _fits(problem, None), costs, tables, limits, worst=True).run()
    if widest is None:
        return None
    loads = [costs[run.stage].of(problem, run, number == 0) for number, run in enumerate(widest.runs)]
    return within(max([widest.start.load, *loads]))


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


def worst_shortage(problem: Problem) -> tuple[int, Placement] | None:
    """The fewest bytes that, added to every stage, would make all units fit, and the placement that shows it.

    Pools and ``places`` are left out. None if even unlimited stages cannot hold the units (``most``, ``least``).
    """
    roomy = replace(problem, stages=[replace(stage, room=INF) for stage in problem.stages], pools=(), places=1 << 30)
    rooms = []
    for stage in problem.stages:
        first, later, first_out, later_out = (work - stage.room for work in problem.work)
        rooms.append(_Cost(problem.need, (first, later, first_out, later_out), problem.shared))
    tables = _bottleneck(roomy, rooms, floor=-INF)
    short = min((max(0, tables.first[0][start.units]) for start in problem.starts), default=INF)
    if short >= INF:
        return None
    enough = [replace(stage, room=stage.room + int(short)) for stage in problem.stages]
    found = cheapest(replace(roomy, stages=enough))
    return (int(short), found) if found else None


def least_use(problem: Problem, pool: int | None) -> int | None:
    """The fewest bytes of ``pool`` (the fewest stages, if None) with which all units fit the stages; None if never.

    The other common limits are left out.
    """
    members = frozenset(k for k, stage in enumerate(problem.stages) if pool is None or stage.pool == pool)
    limit = _Limit(0, members, pool)
    fits, plain = _fits(problem, None), [_plain_cost(stage) for stage in problem.stages]
    floor = _tables(problem, fits, _priced(problem, plain, [limit], (1,), free=True))
    least = min((limit.start_use(start) + floor.first[0][start.units] for start in problem.starts), default=INF)
    return int(least) if least < INF else None


# --- Tables ----------------------------------------------------------------------------------------------------------


def _plain_cost(stage: Stage) -> _Cost:
    first, later, output = stage.hop_first, stage.hop_later, stage.hop_output
    return _Cost(stage.time, (first, later, first + output, later + output))


def _load_cost(problem: Problem, stage: Stage) -> _Cost:
    scale = max(1, stage.scale)
    first, later, first_out, later_out = (work / scale for work in problem.work)
    prefix = [size / scale for size in problem.need]
    return _Cost(prefix, (first, later, first_out, later_out), problem.shared / scale, 1 / scale)


def _fits(problem: Problem, time_limit: int | None) -> _Fits:
    """Which runs fit each stage, as the first stage used and as a later one."""
    shared = problem.shared
    bases = [size - (shared if begin < problem.trunk_end else 0) for begin, size in enumerate(problem.need[:-1])]
    begins = _begins(problem)
    known: dict[tuple[int, int, bool], _Fit] = {}
    rows: tuple[list[_Fit], list[_Fit]] = ([], [])
    for stage in problem.stages:
        for row, first in zip(rows, (True, False)):
            key = (stage.room, stage.most, first)
            if time_limit is not None or key not in known:
                known[key] = _fit(problem, stage, first, bases, time_limit, begins)
            row.append(known[key])
    return rows


def _begins(problem: Problem) -> Sequence[int]:
    """Where the first stage used may begin."""
    return sorted({start.units for start in problem.starts if start.units < problem.units})


def _fit(
    problem: Problem, stage: Stage, first: bool, bases: Sequence[int], time_limit: int | None, begins: Sequence[int]
) -> _Fit:
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
    return _Fit(ends, closes)


def _tables(problem: Problem, fits: _Fits, costs: Sequence[_Cost]) -> _Tables:
    """The cost of the best completion from every boundary, last stage first."""
    units = problem.units
    begins = _begins(problem)
    last: list[float] = [*([INF] * units), 0]
    later, first = [last], [last]
    for number in range(len(problem.stages) - 1, -1, -1):
        stage, cost, beyond = problem.stages[number], costs[number], later[-1]
        reach = _reach(problem, cost, beyond)
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
    return _Tables(first, later)


def _reach(problem: Problem, cost: _Cost, beyond: Sequence[float]) -> list[float]:
    """Cost up to each boundary, and from there on with the stages beyond; INF where no run may end."""
    if problem.cuts is None:
        return [here + there for here, there in zip(cost.prefix, beyond)]
    return [here + (there if cut else INF) for here, there, cut in zip(cost.prefix, beyond, problem.cuts)]


def _best(problem: Problem, fits: _Fits, costs: Sequence[_Cost], tables: _Tables) -> Placement | None:
    """The placement of least cost that the tables promise, without the common limits."""
    chosen = min(problem.starts, key=lambda start: start.cost + tables.first[0][start.units], default=None)
    if chosen is None or chosen.cost + tables.first[0][chosen.units] >= INF:
        return None
    return _trace(problem, fits, costs, tables, chosen)


def _trace(problem: Problem, fits: _Fits, costs: Sequence[_Cost], tables: _Tables, start: Start) -> Placement:
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
            reach = _reach(problem, cost, beyond)
            end = fits[kind][number].ends[at]
            while reach[end] - base + cost.fixed[kind] != wanted:
                end -= 1
        runs.append(Run(number, at, end))
        at = end
    total = start.cost + sum(run_cost(problem, run, k == 0) for k, run in enumerate(runs))
    return Placement(start, tuple(runs), total)


def _bottleneck(problem: Problem, costs: Sequence[_Cost], floor: float = 0) -> _Tables:
    """Like ``_tables``, but what counts is the dearest stage: the least that it can cost."""
    units = problem.units
    fits = _fits(problem, None)
    begins = _begins(problem)
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
    return _Tables(all_first[::-1], all_later[::-1])


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


# --- Common limits ---------------------------------------------------------------------------------------------------


def _limits(problem: Problem) -> list[_Limit]:
    """The common limits that could be broken at all."""
    found = []
    for pool, size in enumerate(problem.pools):
        members = frozenset(number for number, stage in enumerate(problem.stages) if stage.pool == pool)
        most = sum(problem.stages[number].room for number in members)
        if most + max((start.used[pool] for start in problem.starts), default=0) > size:
            found.append(_Limit(size, members, pool))
    if len(problem.stages) > problem.places:
        found.append(_Limit(problem.places, frozenset(range(len(problem.stages))), None))
    return found


class _Label(NamedTuple):
    """A partial placement: its cost (or largest load), its use of each limit, and how it came about."""

    cost: float
    used: tuple[int, ...]
    start: Start
    runs: tuple[Run, ...]


class _Bound(NamedTuple):
    """Priced tables: cost + prices * (use - size) of every completion is at least what they say."""

    prices: tuple[int, ...]
    costs: Sequence[_Cost]
    tables: _Tables


def _priced(
    problem: Problem,
    plain: Sequence[_Cost],
    limits: Sequence[_Limit],
    prices: Sequence[int],
    free: bool = False,
) -> list[_Cost]:
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
        result.append(_Cost(prefix, (first, later, first_out, later_out), per_byte * problem.shared))
    return result


class _Floor(NamedTuple):
    """Tables of the least use: prices * use of every completion is at least what they say, and must not exceed size."""

    prices: tuple[int, ...]
    tables: _Tables
    size: int


class _Search:
    """Exact search under common limits: the least sum of costs, or the least maximum of loads.

    ``tables`` bound the rest from below; with ``worst`` the maximum counts, and they are those of ``_bottleneck``. One
    object serves one question.
    """

    def __init__(
        self,
        problem: Problem,
        fits: _Fits,
        costs: Sequence[_Cost],
        tables: _Tables,
        limits: Sequence[_Limit],
        worst: bool = False,
        below: float = INF,
    ) -> None:
        self.problem = problem
        self.fits = fits
        self.plain = costs
        self.limits = limits
        self.worst = worst
        self.below = below
        self.bounds = [_Bound((0,) * len(limits), costs, tables)]
        self.best: tuple[float, Placement] | None = None
        self.floors: list[_Floor] = []
        self.made = 0

    def run(self) -> Placement | None:
        """The best placement within all limits, or None."""
        count = len(self.limits)
        single = [tuple(int(k == number) for k in range(count)) for number in range(count)]
        pools = tuple(int(limit.pool is not None) for limit in self.limits)
        if not all(self._floor(prices) for prices in [*single, pools]):
            return None
        proved = self._walk(None, _PATIENCE)
        if not proved and self.problem.effort > _PATIENCE:
            if not self._floor(self._find_prices(free=True)):
                return None
            if not self.worst:
                self._find_prices()
            self._walk(_BEAM, None)  # a good placement first: the better it is, the more the exact walk can drop
            proved = self._walk(None, self.problem.effort)
        if self.best is None:
            return None
        return replace(self.best[1], proved=proved)

    def _floor(self, prices: tuple[int, ...]) -> bool:
        """Add a bound: the least priced use of the limits. False if even that is more than there is."""
        if not any(prices):
            return True
        tables = _tables(self.problem, self.fits, _priced(self.problem, self.plain, self.limits, prices, free=True))
        size = sum(price * limit.size for price, limit in zip(prices, self.limits))
        self.floors.append(_Floor(prices, tables, size))
        used = (
            sum(price * limit.start_use(start) for price, limit in zip(prices, self.limits))
            + tables.first[0][start.units]
            for start in self.problem.starts
        )
        return min(used, default=INF) <= size

    def _keep(self, value: float, found: Placement) -> None:
        """Remember ``found`` if it is within all limits and better than what is known."""
        if value >= self._top():
            return
        if all(limit.use(self.problem, found) <= limit.size for limit in self.limits):
            self.best = (value, found)

    def _top(self) -> float:
        """What a placement must stay below to be of interest."""
        return self.below if self.best is None else self.best[0]

    def _find_prices(self, free: bool = False) -> tuple[int, ...]:
        """Prices whose tables bound well: steps towards the larger dual value, round by round.

        ``free``: units cost nothing but the prices, which shows whether the limits can be kept at all.
        """
        prices = [0] * len(self.limits) if not free else [1 << 20] * len(self.limits)
        top, best = -float(INF), tuple(prices)
        starts = self.problem.starts
        for turn in range(_PRICE_ROUNDS):
            costs = _priced(self.problem, self.plain, self.limits, prices, free)
            tables = _tables(self.problem, self.fits, costs)
            values = [
                (0 if free else start.cost)
                + tables.first[0][start.units]
                + sum(p * limit.start_use(start) for p, limit in zip(prices, self.limits))
                for start in starts
            ]
            chosen = min(range(len(starts)), key=values.__getitem__)
            found = _trace(self.problem, self.fits, costs, tables, starts[chosen])
            over = [limit.use(self.problem, found) - limit.size for limit in self.limits]
            dual = values[chosen] - sum(p * limit.size for p, limit in zip(prices, self.limits))
            if not self.worst:
                self._keep(found.cost, found)
            if dual > top:
                top, best = dual, tuple(prices)
                if not free:
                    self.bounds = [self.bounds[0], _Bound(best, costs, tables)]
            norm = sum(excess * excess for excess in over)
            if norm == 0 or (free and dual > 0):
                break
            if free:
                step = (1 << 20) * max(abs(excess) for excess in over) / norm / (1 + turn) ** 0.5
            else:
                target = self._top()
                if target >= INF:
                    target = dual + abs(dual) / (4 + turn) + 1
                step = (target - dual) / norm
            moved = [max(0, p + int(step * excess)) for p, excess in zip(prices, over)]
            if moved == prices or not any(moved):
                break
            prices = moved
        return best

    def _walk(self, width: int | None, patience: int | None) -> bool:
        """Extend partial placements stage by stage. ``width``: keep so many for each boundary (not exact then).

        ``patience``: give up, and return False, when more partial placements than that were made.
        """
        problem, units = self.problem, self.problem.units
        states: dict[tuple[int, bool], list[_Label]] = {}
        for start in problem.starts:
            used = tuple(limit.start_use(start) for limit in self.limits)
            if any(use > limit.size for use, limit in zip(used, self.limits)):
                continue
            cost = start.load if self.worst else start.cost
            states.setdefault((start.units, start.units == units), []).append(_Label(cost, used, start, ()))
        self.made = 0
        for number, stage in enumerate(problem.stages):
            following: dict[tuple[int, bool], list[_Label]] = {}
            reaches = [_reach(problem, bound.costs[number], bound.tables.later[number + 1]) for bound in self.bounds]
            for (at, begun), labels in states.items():
                for label in labels:
                    if not stage.least:
                        following.setdefault((at, begun), []).append(label)
                    if at < units:
                        for wider in self._extend(number, stage, label, at, reaches):
                            following.setdefault((wider.runs[-1].end, True), []).append(wider)
                if patience is not None and self.made > patience:
                    return False
            if width is not None:
                bound = self.bounds[-1]
                following = {key: _spread(labels, width, bound.prices) for key, labels in following.items()}
            states = {key: self._undominated(number + 1, key, labels) for key, labels in following.items()}
        for label in states.get((units, True), []):
            total = label.start.cost + sum(run_cost(problem, run, k == 0) for k, run in enumerate(label.runs))
            self._keep(label.cost, Placement(label.start, label.runs, total))
        return True

    def _extend(
        self, number: int, stage: Stage, label: _Label, at: int, reaches: Sequence[Sequence[float]]
    ) -> Iterable[_Label]:
        """The labels of ``label`` with a run on this stage, where they may still beat the best placement known."""
        problem, kind, least = self.problem, 1 if label.runs else 0, max(1, stage.least)
        fit, top = self.fits[kind][number], self._top()
        ends: Iterable[int] = range(at + least, fit.ends[at] + 1)
        if self.worst:
            beyond = self.bounds[0].tables.later[number + 1]
            ends = [end for end in ends if beyond[end] < top]
            if problem.cuts is not None:
                ends = [end for end in ends if problem.cuts[end]]
        else:
            for bound, reach in zip(self.bounds, reaches):
                cost = bound.costs[number]
                base = cost.prefix[at] - (cost.shared if at < problem.trunk_end else 0) - cost.fixed[kind]
                paid = label.cost + sum(p * (u - m.size) for p, u, m in zip(bound.prices, label.used, self.limits))
                slack = top - paid + base
                ends = [end for end in ends if reach[end] < slack]
        if fit.closes[at] and at + least <= problem.units:
            ends = [*ends, problem.units]
        for end in ends:
            run = Run(number, at, end)
            own = self.plain[number].of(problem, run, kind == 0)
            cost_now = max(label.cost, own) if self.worst else label.cost + own
            if cost_now >= top:
                continue
            self.made += 1
            used = tuple([u + limit.run_use(problem, run, kind == 0) for u, limit in zip(label.used, self.limits)])
            for prices, tables, size in self.floors:
                if sum(map(mul, prices, used)) + tables.later[number + 1][end] > size:
                    break
            else:
                yield _Label(cost_now, used, label.start, (*label.runs, run))

    def _undominated(self, number: int, key: tuple[int, bool], labels: list[_Label]) -> list[_Label]:
        """Drop every label that another one equals or beats in cost and in all uses that can still matter."""
        if len(labels) < 2:
            return labels
        problem, at = self.problem, key[0]
        open_limits = []
        for index, limit in enumerate(self.limits):
            members = [stage for stage in limit.members if stage >= number]
            if limit.pool is None:
                future = len(members)
            else:
                future = len(members) * (max(problem.work) + problem.shared) + problem.need[-1] - problem.need[at]
                if problem.borrowed:
                    future = INF
            if members and any(label.used[index] + future > limit.size for label in labels):
                open_limits.append(index)
        labels.sort(key=lambda label: (label.cost, label.used))
        kept: list[_Label] = []
        if len(open_limits) == 1:
            (only,) = open_limits
            least = INF
            for label in labels:
                if label.used[only] < least:
                    least = label.used[only]
                    kept.append(label)
            return kept
        for label in labels:
            if not any(all(other.used[k] <= label.used[k] for k in open_limits) for other in kept):
                kept.append(label)
        return kept


def _spread(labels: list[_Label], width: int, prices: tuple[int, ...]) -> list[_Label]:
    """The ``width`` labels that look best when what they use has its price."""
    if len(labels) <= width:
        return labels
    return sorted(labels, key=lambda label: label.cost + sum(map(mul, prices, label.used)))[:width]
