# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Search over orders: which stage takes the next run, and how far. Exact, unless it runs out of effort.

Two questions. ``any_placement``: is there a placement at all; depth first, the fullest runs first, never again where it
was. ``Search``: the cheapest placement; partial placements grow from boundary to boundary, and one is dropped when the
runs in it are dearer than the bound of _rents by more than the best placement known, or when another one with the same
stages is no worse in cost and in all common limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from operator import mul
from typing import NamedTuple

from ansible_collections.llamafleet.rpc.plugins.module_utils._rents import Arc, Bound, Family, arcs, slack_of
from ansible_collections.llamafleet.rpc.plugins.module_utils._stages import (
    Cost,
    Fits,
    Limit,
    Placement,
    Problem,
    Run,
    Start,
    run_cost,
)


class Outlook:
    """What the stages not used yet could still hold at most, so that hopeless partial placements end early.

    A set of used stages is a ``mask``: bit k for stage k.
    """

    def __init__(self, problem: Problem, fits: Fits, limits: Sequence[Limit], family: Family) -> None:
        self.problem = problem
        self.limits = limits
        self.before = family.before
        units = problem.units
        self.longest = [0] * len(problem.stages)
        for row in fits:
            for number, (ends, closes) in enumerate(row):
                spans = [end - begin for begin, end in enumerate(ends)]
                spans += [units - begin for begin, closing in enumerate(closes) if closing]
                self.longest[number] = max([self.longest[number], *spans])
        self.rooms = [max(0, stage.room - min(problem.work)) for stage in problem.stages]
        self.pools = [(number, limit) for number, limit in enumerate(limits) if limit.pool is not None]
        self.places = next((limit.size for limit in limits if limit.pool is None), len(problem.stages))
        pooled = {member for _number, limit in self.pools for member in limit.members}
        self.unpooled = [number for number in range(len(problem.stages)) if number not in pooled]
        self.known: dict[tuple[int, int], tuple[int, int]] = {}

    def may_use(self, mask: int, phase: int, number: int) -> bool:
        """Whether stage ``number`` is free behind one of ``phase``, and every twin before it in use."""
        if mask >> number & 1 or self.problem.stages[number].phase < phase:
            return False
        twin = self.before[number]
        return twin is None or bool(mask >> twin & 1)

    def hopeless(self, mask: int, at: int, phase: int, used: Sequence[int]) -> bool:
        """Whether the stages that are left can surely not hold the units from ``at`` on, or must hold more."""
        stages = self.problem.stages
        if (mask, phase) not in self.known:
            free = [k for k, stage in enumerate(stages) if stage.phase >= phase and not mask >> k & 1]
            spans = sorted((self.longest[k] for k in free), reverse=True)[: self.places - bin(mask).count("1")]
            unused = [k for k, stage in enumerate(stages) if stage.least and not mask >> k & 1]
            late = any(stages[k].phase < phase or self.longest[k] < stages[k].least for k in unused)
            due = self.problem.units + 1 if late else sum(stages[k].least for k in unused)
            self.known[mask, phase] = (sum(spans), due)
        span, due = self.known[mask, phase]
        left = self.problem.units - at
        if span < left or due > left:
            return True
        if not self.pools:
            return False
        room = sum(self.rooms[k] for k in self.unpooled if stages[k].phase >= phase and not mask >> k & 1)
        for number, limit in self.pools:
            members = (self.rooms[k] for k in limit.members if stages[k].phase >= phase and not mask >> k & 1)
            room += min(max(0, limit.size - used[number]), sum(members))
        return room < self.problem.need[-1] - self.problem.need[at]


class _Node(NamedTuple):
    """A partial placement of ``any_placement``."""

    start: Start
    mask: int
    at: int
    used: tuple[int, ...]
    runs: tuple[Run, ...]


def any_placement(
    problem: Problem, fits: Fits, limits: Sequence[Limit], family: Family, effort: int, greedy: bool = False
) -> tuple[Placement | None, bool]:
    """Some placement within all limits, or None; and whether the answer is final.

    ``greedy``: every run is as long as it can be, also where a shorter one might leave more to others.
    """
    outlook = Outlook(problem, fits, limits, family)
    # Without these, what remains is the less, the further a run goes.
    monotone = not problem.borrowed and not any(stage.least for stage in problem.stages)
    reached: dict[int, dict[tuple[int, tuple[int, ...]], None]] = {}
    stack = []
    for start in sorted(problem.starts, key=lambda start: start.units):
        used = tuple(limit.start_use(start) for limit in limits)
        if all(use <= limit.size for use, limit in zip(used, limits)) and not outlook.hopeless(0, start.units, 0, used):
            stack.append(_Node(start, 0, start.units, used, ()))
    made = 0
    while stack:
        node = stack.pop()
        if node.at == problem.units:
            cost = node.start.cost + sum(run_cost(problem, run, k == 0) for k, run in enumerate(node.runs))
            return Placement(node.start, node.runs, cost), True
        # Not so for starts: what takes the first run needs other buffers than what comes later.
        if node.mask:
            known, here = reached.setdefault(node.mask, {}), (node.at, node.used)
            if here in known or (monotone and any(_as_far(other, here) for other in known)):
                continue
            known[here] = None
        moves = _moves(problem, fits, limits, outlook, node, monotone, greedy)
        made += len(moves)
        if made > effort:
            return None, False
        moves.sort(key=lambda move: move[0], reverse=True)
        stack += [further for _waste, further in moves]
    return None, not greedy or (monotone and not outlook.pools)


def _as_far(one: tuple[int, tuple[int, ...]], other: tuple[int, tuple[int, ...]]) -> bool:
    """Whether what can follow the ``other`` (boundary, uses) can follow ``one`` with the same stages, if monotone."""
    return one[0] >= other[0] and all(mine <= theirs for mine, theirs in zip(one[1], other[1]))


def _moves(
    problem: Problem,
    fits: Fits,
    limits: Sequence[Limit],
    outlook: Outlook,
    node: _Node,
    monotone: bool,
    greedy: bool,
) -> list[tuple[int, _Node]]:
    """The next runs of ``node``, with how many units less than it ever could each stage then holds.

    Only the longest on each stage, if nobody else needs what a shorter one would leave.
    """
    found = []
    phase = problem.stages[node.runs[-1].stage].phase if node.runs else 0
    for number, stage in enumerate(problem.stages):
        if not outlook.may_use(node.mask, phase, number):
            continue
        mask = node.mask | 1 << number
        others = (
            any(not mask >> member & 1 for member in limit.members)
            for _index, limit in outlook.pools
            if number in limit.members
        )
        longest = greedy or (monotone and not any(others))
        ends, closes = fits[1 if node.runs else 0][number]
        least = node.at + max(1, stage.least)
        wanted = range(ends[node.at], least - 1, -1)
        for end in (problem.units, *wanted) if closes[node.at] and least <= problem.units else wanted:
            if end < problem.units and problem.cuts is not None and not problem.cuts[end]:
                continue
            run = Run(number, node.at, end)
            used = tuple([u + limit.run_use(problem, run, not node.runs) for u, limit in zip(node.used, limits)])
            if any(use > limit.size for use, limit in zip(used, limits)):
                continue
            if not outlook.hopeless(mask, end, stage.phase, used):
                waste = outlook.longest[number] - (end - node.at)
                found.append((waste, _Node(node.start, mask, end, used, (*node.runs, run))))
            if longest:
                break
    return found


class _Label(NamedTuple):
    """A partial placement of ``Search``: its cost, rents and prices included, also with the best chain behind it."""

    spent: float
    whole: float
    used: tuple[int, ...]
    mask: int
    start: Start
    run: Run | None
    parent: _Label | None

    def runs(self) -> tuple[Run, ...]:
        """Its runs, the first one first."""
        found = []
        label: _Label | None = self
        while label is not None and label.run is not None:
            found.append(label.run)
            label = label.parent
        return tuple(reversed(found))


class Search:
    """The cheapest placement, given a bound and perhaps a placement to beat. One object serves one question."""

    def __init__(
        self,
        problem: Problem,
        fits: Fits,
        plain: Sequence[Cost],
        limits: Sequence[Limit],
        family: Family,
        bound: Bound,
        best: Placement | None,
        below: float,
    ) -> None:
        self.problem = problem
        self.fits = fits
        self.plain = plain
        self.limits = limits
        self.family = family
        self.bound = bound
        self.best = best
        self.top = min(below, best.cost) if best else below
        self.outlook = Outlook(problem, fits, limits, family)
        self.each: int | None = None
        self.known: dict[tuple[int, int | None], list[Arc]] = {}

    def run(self, width: int, branches: int, each: int, effort: int) -> bool:
        """Whether ``best`` is now the best placement there is below ``top``; else ``effort`` was not enough.

        A first, inexact walk keeps ``width`` partial placements at each boundary and makes ``branches`` of each, of
        which ``each`` with the same stage; the better its result, the more the exact one may drop.
        """
        self.each = each
        self._walk(width, branches, 1 << 30)
        self.each, self.known = None, {}
        return effort > 0 and self._walk(None, 1 << 30, effort)

    def _ceiling(self) -> float:
        """What a chain of runs must stay below, rents and prices included, to be better than the best placement."""
        return self.top - slack_of(self.top) - self.bound.value + self.bound.chain.total

    def _walk(self, width: int | None, branches: int, effort: int) -> bool:
        """Extend partial placements, boundary by boundary. False if more than ``effort`` of them were made."""
        problem, limits = self.problem, self.limits
        buckets: list[dict[int, list[_Label]]] = [{} for _unit in range(problem.units + 1)]
        for start in problem.starts:
            used = tuple(limit.start_use(start) for limit in limits)
            if start.units < problem.units and all(use <= limit.size for use, limit in zip(used, limits)):
                spent = start.cost + sum(price * use for price, use in zip(self.bound.prices, used))
                label = _Label(spent, spent, used, 0, start, None, None)
                buckets[start.units].setdefault(0, []).append(label)
        made = 0
        for at in range(problem.units):
            labels = [label for same in buckets[at].values() for label in self._undominated(same)]
            buckets[at] = {}
            if width is not None and len(labels) > width:
                labels = nsmallest(width, labels, key=lambda label: label.whole)
            for label in labels:
                phase = None if label.run is None else problem.stages[label.run.stage].phase
                ceiling = self._ceiling() - label.spent
                tried = 0
                for cost, number, end in self._arcs(at, phase):
                    if cost >= ceiling or tried >= branches:
                        break
                    if self.outlook.may_use(label.mask, phase or 0, number):
                        tried += 1
                        self._extend(label, at, number, end, cost, buckets[end])
                made += tried
                if made > effort:
                    return False
        return True

    def _arcs(self, at: int, phase: int | None) -> list[Arc]:
        """The runs from ``at``, the cheapest chain first."""
        key = (at, phase)
        if key not in self.known:
            found = arcs(self.problem, self.fits, self.bound.chain, self.family, at, phase, each=self.each)
            if not any(stage.least for stage in self.problem.stages):  # else a rent, and what is spent, may be negative
                ceiling = self._ceiling()
                found = [arc for arc in found if arc.cost < ceiling]
            self.known[key] = sorted(found)
        return self.known[key]

    def _extend(
        self, label: _Label, at: int, number: int, end: int, cost: float, bucket: dict[int, list[_Label]]
    ) -> None:
        """Add ``label`` with one more run to the bucket of its end; at the last boundary, keep the better placement."""
        problem, limits, chain = self.problem, self.limits, self.bound.chain
        mask, whole, spent, head = label.mask | 1 << number, label.spent + cost, 0.0, self.family.head[number]
        same: list[_Label] = []
        if end < problem.units:
            spent = whole - chain.reach[head][end] + chain.costs[head].prefix[end]
            same = bucket.setdefault(mask, [])
            if same and not limits and spent >= same[0].spent:
                return
        run, used = Run(number, at, end), label.used
        if limits:
            used = tuple([u + limit.run_use(problem, run, label.run is None) for u, limit in zip(used, limits)])
            if any(use > limit.size for use, limit in zip(used, limits)):
                return
        if self.outlook.hopeless(mask, end, problem.stages[number].phase, used):
            return
        wider = _Label(spent, whole, used, mask, label.start, run, label)
        if end == problem.units:
            self._arrived(wider)
        elif limits:
            same.append(wider)
        else:
            bucket[mask] = [wider]

    def _arrived(self, label: _Label) -> None:
        """Keep a whole placement if it is better than the best one known."""
        runs = label.runs()
        cost = label.start.cost + sum(run_cost(self.problem, each, k == 0) for k, each in enumerate(runs))
        if cost < self.top - slack_of(self.top):
            self.best, self.top = Placement(label.start, runs, cost), cost

    def _undominated(self, labels: list[_Label]) -> list[_Label]:
        """Drop every label that another one equals or beats in cost and in all uses that still matter."""
        if len(labels) < 2:
            return labels
        mask = labels[0].mask
        open_limits = [
            index for index, limit in enumerate(self.limits) if any(not mask >> member & 1 for member in limit.members)
        ]
        kept: list[_Label] = []
        for label in sorted(labels, key=lambda label: (self._cost(label), label.used)):
            if not any(all(other.used[k] <= label.used[k] for k in open_limits) for other in kept):
                kept.append(label)
        return kept

    def _cost(self, label: _Label) -> float:
        """What a label costs without the prices of what it uses; its rents are those of all with the same stages."""
        cost: float = label.spent - sum(map(mul, self.bound.prices, label.used))
        return cost
