# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What no placement can exceed: a bound on the number of copies, and one on their tokens per second together.

Both follow from memory and bandwidth alone, whoever is primary. Hosts that share memory count as one machine, and a
machine serves one cluster. Of a model with U units of together W bytes (weights and context), machine i can hold at
most u_i units (on each device as many of the lightest as fit its budget beside the least compute buffer there is,
within the budget of each pool) and b_i bytes. All units of a copy lie on the machines of its cluster, so their
min(1, u_i / U) add up to 1 at least, and so do their min(1, b_i / W). Hence, with f_i one of the two:

* copies of one model are at most floor(sum of f_i), and no more than are asked for;
* copies together are at most the sum of these, and at most floor(sum over machines of the largest f_i of any model);
* each copy needs a primary, so they are at most as many as machines that may be one.

Speed: the j quickest copies of a model read j times its R bytes per token (active weights and context) on different
machines, each of which can give no copy more than R bytes. Reading those bytes from the fastest devices first takes
T(j), so the j smallest times add up to T(j) at least. As 1/t falls and is convex, the copies' speeds add up to the sum
of 1 / (T(j) - T(j-1)) at most (weak majorisation; Tomic 1949, Weyl 1950). Each model is taken as if it had the whole
fleet for itself, and links cost nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from ansible_collections.llamafleet.rpc.plugins.module_utils._place_hosts import Host, Lane
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan_input import Request
from ansible_collections.llamafleet.rpc.plugins.module_utils._records import is_primary_cpu

_ROUNDING = 1e-9  # sums of shares are floating point
_ROUNDED_S, _ROUNDED_SPEED = 1e-9, 0.0005  # a plan tells ms with six digits behind the point, tokens/s with three


class Bounds(NamedTuple):
    """Upper bounds: copies, and tokens/s of all copies together."""

    replicas: int
    tokens_per_s: float


class _Share(NamedTuple):
    """The most of a copy that a machine can hold: by units, by bytes; and (bytes read, bandwidth), fastest first."""

    units: float
    bytes: float
    reads: Sequence[tuple[float, float]]


def bounds(wanted: Sequence[tuple[Request, int]], hosts: Sequence[Host]) -> Bounds:
    """Bounds on what ``hosts`` can serve of the models ``wanted``, (request, copies) each."""
    machines: dict[str, list[Lane]] = {}
    leaders = set()
    for host in hosts:
        machines.setdefault(host.machine, []).extend(host.known)
        if host.may_lead:
            leaders.add(host.machine)
    shares = [[_share(request, lanes) for lanes in machines.values()] for request, _copies in wanted]
    each = [
        min(copies, _whole(sum(share.units for share in held)), _whole(sum(share.bytes for share in held)))
        for (_request, copies), held in zip(wanted, shares)
    ]
    columns = list(zip(*shares))
    together = (
        _whole(sum(max(share.units for share in column) for column in columns)),
        _whole(sum(max(share.bytes for share in column) for column in columns)),
    )
    speed = sum(_speed(request, copies, held) for (request, _c), copies, held in zip(wanted, each, shares))
    return Bounds(min(sum(each), *together, len(leaders)), math.ceil(speed * 1000) / 1000)


def _whole(share: float) -> int:
    return math.floor(share * (1 + _ROUNDING) + _ROUNDING)


def _share(request: Request, lanes: Sequence[Lane]) -> _Share:
    sizes, buffers = request.sizes, request.buffers
    light = [weights + context for weights, context in zip(sizes.weights, sizes.context)]
    total = sum(light)
    light[-1] -= request.head_bytes  # which may stay on the CPU of a primary, away from its unit
    sums = list(accumulate(sorted(light)))
    least = min(*buffers.work_alone, *buffers.work_plain, *buffers.work_pipelined)
    pools: dict[str, list[tuple[Lane, int]]] = {}
    for lane in sorted(lanes, key=lambda lane: -lane.bandwidth):
        room = request.budget(lane.usable) - (0 if is_primary_cpu(None, lane.device) else least)
        if room > 0 and lane.most != 0:
            pools.setdefault(lane.pool, []).append((lane, room))
    units = held = 0
    reads: list[tuple[float, float]] = []
    for members in pools.values():
        budget = left = request.budget(max(lane.pool_usable for lane, _room in members))
        count = 0
        for lane, room in members:
            fitting = bisect_right(sums, room)
            count += fitting if lane.most is None else min(fitting, lane.most)
            taken = min(room, left)
            left -= taken
            reads.append((taken * _densest(request, light), lane.bandwidth))
        units += min(count, bisect_right(sums, budget))
        held += budget - left
    read, most = [], float(sum(sizes.active) + sum(sizes.context))
    for size, bandwidth in sorted(reads, key=lambda each: -each[1]):
        read.append((min(size, most), bandwidth))
        most -= read[-1][0]
    return _Share(min(1, units / len(sums)), min(1, held / total), read)


def _densest(request: Request, light: Sequence[int]) -> float:
    """The most bytes that are read per token of a byte that is held, over the units; the output matrix is all read."""
    sizes = request.sizes
    found = [
        (active + context) / size for active, context, size in zip(sizes.active, sizes.context, light[:-1]) if size > 0
    ]
    return max([1.0, *found])


def _speed(request: Request, copies: int, shares: Sequence[_Share]) -> float:
    """The most tokens/s of so many copies of one model."""
    bytes_ = float(sum(request.sizes.active) + sum(request.sizes.context))
    segments = sorted((segment for share in shares for segment in share.reads), key=lambda each: -each[1])
    speed, left, seconds = 0.0, bytes_, 0.0
    for room, bandwidth in segments:
        size = room
        while copies and size >= left:  # a copy is complete
            seconds += left / bandwidth
            speed += 1 / (seconds - _ROUNDED_S) + _ROUNDED_SPEED
            size, left, seconds, copies = size - left, bytes_, 0.0, copies - 1
        left -= size
        seconds += size / bandwidth
    return speed
