# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What else could be done: the plan with one device more or less, the second-best plan, the plan after a loss.

Each is the optimum of the same question with a device forbidden, or forced to hold a unit. Every plan with other
devices than the best one lacks one of its devices or has one more; so the best of these is the second-best choice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils import _optimise
from ansible_collections.llamafleet.rpc.plugins.module_utils._placement import (
    Solved,
    milliseconds,
    parts,
    solve,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan_input import Device, Request

_SUMMARY = ("units", "ms_per_token", "slower_by", "fullest", "units_moved", "bytes_moved")
_EFFORT = 5_000  # partial placements to try for each; these are figures to compare with, not plans to start


def quantity(request: Request, solved: Solved) -> str:
    """What the objective counts, in words."""
    if request.objective == "memory":
        return "share of the fullest device"
    return "ms of the slowest device" if _by_stage(request, solved) else "ms per token"


def in_words(request: Request, value: float) -> float:
    """A value of the objective for people: ms, or a share of the memory."""
    if request.objective == "memory":
        return round(value, 6)
    return milliseconds(value)


def _by_stage(request: Request, solved: Solved) -> bool:
    return request.objective == "prefill" and solved.way.pipelining


def certificate(request: Request, solved: Solved) -> dict[str, Any]:
    """How good the plan is, and how much better any other could be at most."""
    return {
        "quantity": quantity(request, solved),
        "value": in_words(request, solved.value),
        "lower_bound": in_words(request, solved.value if solved.proved else solved.bound),
        "gap": round(solved.gap, 6),
        "proved": solved.proved,
    }


def choices(request: Request, solved: Solved) -> dict[str, Any]:
    """The keys ``devices_compared``, ``second_best`` and ``without`` of a plan."""
    quick = replace(request, effort=min(request.effort, _EFFORT))
    held = [part.device for part in parts(request, solved)]
    compared = []
    others: list[Solved] = []
    for device in request.devices:
        if device.most == 0:
            continue
        used = device in held
        other = solve(_changed(quick, [device], _forbidden if used else _forced))
        if other is not None:
            others.append(other)
        compared.append(_compared(request, solved, device, used, other))
    best = min(others, key=lambda each: (each.value, each.placement.cost), default=None)
    return {
        "devices_compared": compared,
        "second_best": None if best is None else _summary(request, solved, best),
        "without": [
            _loss(quick, solved, host)
            for host in dict.fromkeys(device.host for device in held if device.endpoint is not None)
        ],
    }


def _changed(request: Request, chosen: Collection[Device], change: Callable[[Device], Device]) -> Request:
    return replace(request, devices=tuple(change(each) if each in chosen else each for each in request.devices))


def _forbidden(device: Device) -> Device:
    return replace(device, least=0, most=0)


def _forced(device: Device) -> Device:
    return replace(device, least=max(1, device.least))


def _compared(request: Request, solved: Solved, device: Device, used: bool, other: Solved | None) -> dict[str, Any]:
    """What the device costs or saves; None where it cannot be left out, or cannot be used."""
    unit = "of the memory of the fullest device" if request.objective == "memory" else quantity(request, solved)
    here = in_words(request, solved.value)
    there = None if other is None else in_words(request, other.value)
    with_it, without_it = (here, there) if used else (there, here)
    if there is None:
        text = "kept: the model does not fit without it" if used else "left out: no split with a layer on it fits"
    elif used:
        text = f"kept: {here:.4g} {unit}, without it {there:.4g}"
    else:
        text = f"left out: {here:.4g} {unit}, with it {there:.4g}"
    return {
        "host": device.host,
        "endpoint": device.endpoint,
        "device": device.device,
        "used": used,
        "with_it": with_it,
        "without_it": without_it,
        "saves": None if with_it is None or without_it is None else round(without_it - with_it, 6),
        "text": text,
    }


def _summary(request: Request, solved: Solved, other: Solved) -> dict[str, Any]:
    """Another plan in short, and how far it is from this one."""
    cost = milliseconds(other.placement.cost)
    moved, moved_bytes = _moved(request, solved, other)
    return {
        "units": [
            {
                "host": part.device.host,
                "endpoint": part.device.endpoint,
                "device": part.device.device,
                "units": part.end - part.begin,
            }
            for part in parts(request, other)
        ],
        "ms_per_token": cost,
        "slower_by": round(cost - milliseconds(solved.placement.cost), 6),
        "fullest": round(_optimise.fullest(other.problem, other.placement), 6),
        "units_moved": moved,
        "bytes_moved": moved_bytes,
    }


def _moved(request: Request, solved: Solved, other: Solved) -> tuple[int, int]:
    """Units that are on another device in the other plan, and the bytes of weights that these devices do not have."""
    before, after = _places(request, solved), _places(request, other)
    moved = [unit for unit, (here, there) in enumerate(zip(before, after)) if here != there]
    return len(moved), sum(request.sizes.weights[unit] for unit in moved)


def _places(request: Request, solved: Solved) -> list[Device]:
    """The device of every unit, as the request lists it."""
    names = {(each.host, each.endpoint, each.device, each.index): each for each in request.devices}
    found: list[Device] = []
    for part in parts(request, solved):
        device = part.device
        same = names.get((device.host, device.endpoint, device.device, device.index), device)
        found += [same] * (part.end - part.begin)
    return found


def _loss(request: Request, solved: Solved, host: str) -> dict[str, Any]:
    """The plan if the workers of ``host`` are gone."""
    lost = [each for each in request.devices if each.host == host and each.endpoint is not None]
    other = solve(_changed(request, lost, _forbidden))
    endpoints = sorted({str(each.endpoint) for each in lost})
    summary = dict.fromkeys(_SUMMARY) if other is None else _summary(request, solved, other)
    return {"host": host, "endpoints": endpoints, "feasible": other is not None, **summary}
