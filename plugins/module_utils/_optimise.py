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
from typing import NamedTuple

INF = 1 << 90
_PRICE_ROUNDS = 30  # rounds of the search for prices; more would only tighten a bound that is valid anyway


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
    cache it reads, bytes that this costs a stage which holds the one but not the other).
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
        sources = dict(self.borrowed[unit] for unit in range(begin, end) if unit in self.borrowed)
        return sum(size for source, size in sources.items() if source < begin)


class _Fit(NamedTuple):
    """For each begin: the last end short of the output that fits (or less), and whether all the rest fits."""

    ends: Sequence[int]
    closes: Sequence[bool]


class _Cost(NamedTuple):
    """Cost of a run [i, j): prefix[j] - prefix[i], the constant of its kind (as in ``work``), and ``shared`` if due."""

    prefix: Sequence[float]
    fixed: tuple[float, float, float, float]
    shared: float = 0


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


def cheapest(problem: Problem, time_limit: int | None = None) -> Placement | None:
    """The placement of least total cost, or None. ``time_limit``: the most that a single stage may cost."""
    fits = _fits(problem, time_limit)
    costs = [_plain_cost(stage) for stage in problem.stages]
    tables = _tables(problem, fits, costs)
    found = _best(problem, fits, costs, tables)
    if found is None:
        return None
    limits = _limits(problem)
    if all(limit.use(problem, found) <= limit.size for limit in limits):
        return found
    return _Search(problem, fits, costs, tables, limits).run()


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

    loads = [_load_cost(problem, stage) for stage in problem.stages]
    return _narrow(_bottleneck(problem, loads), within, problem, lambda found: fullest(problem, found))


def shortest_stage(problem: Problem) -> Placement | None:
    """Of the placements whose slowest stage is fastest, the cheapest one. None if there is none."""
    costs = [_plain_cost(stage) for stage in problem.stages]
    bound = _bottleneck(problem, costs)
    return _narrow(bound, lambda limit: cheapest(problem, int(limit)), problem, lambda found: slowest(problem, found))


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
    rooms = [
        _Cost(problem.need, tuple(work - stage.room for work in problem.work), problem.shared)  # type: ignore[arg-type] # four
        for stage in problem.stages
    ]
    short = _bottleneck(roomy, rooms, floor=-INF)
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
    floor = _tables(problem, fits, _priced(problem, plain, [limit], (1,), priced_only=True))
    least = min((limit.start_use(start) + floor.first[0][start.units] for start in problem.starts), default=INF)
    return int(least) if least < INF else None


def _narrow(
    bound: float,
    within: Callable[[float], Placement | None],
    problem: Problem,
    measure: Callable[[Placement], float],
) -> Placement | None:
    """The cheapest placement at the smallest limit that has one; that is ``bound`` unless a common limit binds."""
    if bound >= INF:
        return None
    found = within(bound) or cheapest(problem)
    if found is None:
        return None
    low, high = bound, max(bound, measure(found))
    whole = isinstance(low, int) and isinstance(high, int)
    while high - low > (1 if whole else 1e-9 * high):
        middle = (low + high) // 2 if whole else (low + high) / 2
        better = within(middle)
        if better is None:
            low = middle
        else:
            found, high = better, max(low, min(middle, measure(better)))
    return within(high) or found


# --- Tables ----------------------------------------------------------------------------------------------------------


def _plain_cost(stage: Stage) -> _Cost:
    first, later, output = stage.hop_first, stage.hop_later, stage.hop_output
    return _Cost(stage.time, (first, later, first + output, later + output))


def _load_cost(problem: Problem, stage: Stage) -> _Cost:
    scale = max(1, stage.scale)
    first, later, first_out, later_out = (work / scale for work in problem.work)
    prefix = [size / scale for size in problem.need]
    return _Cost(prefix, (first, later, first_out, later_out), problem.shared / scale)


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


def _bottleneck(problem: Problem, costs: Sequence[_Cost], floor: float = 0) -> float:
    """The smallest limit on the cost of every single stage (and load of the start) that the stages' rooms allow."""
    units = problem.units
    fits = _fits(problem, None)
    begins = _begins(problem)
    smooth = problem.cuts is None and not problem.borrowed and not any(stage.least for stage in problem.stages)
    later: list[float] = [INF] * units + [floor]
    first: list[float] = [INF] * units + [floor]
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
    return min((max(start.load, first[start.units]) for start in problem.starts), default=INF)


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
    """A partial placement: its cost, its use of each limit, and how it came about."""

    cost: int
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
    priced_only: bool = False,
) -> list[_Cost]:
    """The stages' costs with a price on every use of a limit; ``priced_only`` leaves the plain costs out."""
    result = []
    for number, own in enumerate(plain):
        due = [(price, limit.pool is None) for price, limit in zip(prices, limits) if number in limit.members]
        per_byte = sum(price for price, by_count in due if not by_count)
        per_use = sum(price for price, by_count in due if by_count)
        prefix: Sequence[float] = [0] * len(problem.need) if priced_only else own.prefix
        fixed: Sequence[float] = (0, 0, 0, 0) if priced_only else own.fixed
        if per_byte:
            prefix = [here + per_byte * size for here, size in zip(prefix, problem.need)]
        first, later, first_out, later_out = (
            here + per_use + per_byte * size for here, size in zip(fixed, problem.work)
        )
        result.append(_Cost(prefix, (first, later, first_out, later_out), per_byte * problem.shared))
    return result


class _Search:
    """Exact search under common limits. One object serves one problem."""

    def __init__(
        self, problem: Problem, fits: _Fits, costs: Sequence[_Cost], tables: _Tables, limits: Sequence[_Limit]
    ) -> None:
        self.problem = problem
        self.fits = fits
        self.plain = costs
        self.limits = limits
        self.bounds = [_Bound((0,) * len(limits), costs, tables)]
        self.best: Placement | None = None
        self.floors: list[_Tables] = []

    def run(self) -> Placement | None:
        """The cheapest placement within all limits, or None."""
        for number, limit in enumerate(self.limits):
            prices = [1 if k == number else 0 for k in range(len(self.limits))]
            costs = _priced(self.problem, self.plain, self.limits, prices, priced_only=True)
            floor = _tables(self.problem, self.fits, costs)
            found = _best(self.problem, self.fits, costs, floor)
            starts = self.problem.starts
            least = min((limit.start_use(start) + floor.first[0][start.units] for start in starts), default=INF)
            if found is None or least > limit.size:
                return None
            self._keep(found)
            self.floors.append(floor)
        self._find_prices()
        return self._search()

    def _keep(self, found: Placement) -> bool:
        """Remember ``found`` if it is within all limits and better than what is known."""
        if any(limit.use(self.problem, found) > limit.size for limit in self.limits):
            return False
        if self.best is None or found.cost < self.best.cost:
            self.best = found
        return True

    def _find_prices(self) -> None:
        """Prices whose tables bound well: a Polyak step towards the larger dual value, round by round."""
        prices = [0] * len(self.limits)
        top: float = -INF
        for turn in range(_PRICE_ROUNDS):
            costs = _priced(self.problem, self.plain, self.limits, prices)
            tables = _tables(self.problem, self.fits, costs)
            starts = self.problem.starts
            values = [
                start.cost
                + tables.first[0][start.units]
                + sum(p * limit.start_use(start) for p, limit in zip(prices, self.limits))
                for start in starts
            ]
            chosen = min(range(len(starts)), key=values.__getitem__)
            found = _trace(self.problem, self.fits, costs, tables, starts[chosen])
            over = [limit.use(self.problem, found) - limit.size for limit in self.limits]
            dual = values[chosen] - sum(p * limit.size for p, limit in zip(prices, self.limits))
            self._keep(found)
            if dual > top:
                top = dual
                self.bounds = [self.bounds[0], _Bound(tuple(prices), costs, tables)]
            target = self.best.cost if self.best else dual + abs(dual) // (4 + turn) + 1
            norm = sum(excess * excess for excess in over)
            if norm == 0 or target - dual <= 0 or all(e <= 0 and p == 0 for e, p in zip(over, prices)):
                break
            moved = [max(0, p + int((target - dual) * excess // norm)) for p, excess in zip(prices, over)]
            if moved == prices:
                break
            prices = moved

    def _search(self) -> Placement | None:
        problem, units = self.problem, self.problem.units
        states: dict[tuple[int, bool], list[_Label]] = {}
        for start in problem.starts:
            used = tuple(limit.start_use(start) for limit in self.limits)
            states.setdefault((start.units, start.units == units), []).append(_Label(start.cost, used, start, ()))
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
            states = {key: self._undominated(number + 1, key, labels) for key, labels in following.items()}
        for label in states.get((units, True), []):
            self._keep(Placement(label.start, label.runs, label.cost))
        return self.best

    def _extend(
        self, number: int, stage: Stage, label: _Label, at: int, reaches: Sequence[Sequence[float]]
    ) -> Iterable[_Label]:
        """The labels of ``label`` with a run on this stage, where they may still beat the best placement known."""
        problem, kind, least = self.problem, 1 if label.runs else 0, max(1, stage.least)
        fit = self.fits[kind][number]
        ends: Iterable[int] = range(at + least, fit.ends[at] + 1)
        top: float = self.best.cost if self.best else INF
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
            cost_now = label.cost + run_cost(problem, run, kind == 0)
            if cost_now >= top:
                continue
            used = tuple(u + limit.run_use(problem, run, kind == 0) for u, limit in zip(label.used, self.limits))
            if all(
                u + floor.later[number + 1][end] <= limit.size
                for u, floor, limit in zip(used, self.floors, self.limits)
            ):
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
        for label in labels:
            if not any(all(other.used[k] <= label.used[k] for k in open_limits) for other in kept):
                kept.append(label)
        return kept
