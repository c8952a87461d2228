# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A plan against the one that a primary was started with: which layers would move, how many bytes, and what that gains.

The gain is not the difference of two promises made on different days: the kept split is planned again, pinned, with the
devices and parameters of today, and that is compared with the new plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._companions import plan_with
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._explain import mib
from ansible_collections.llamafleet.rpc.plugins.module_utils._model import Model

_Home = tuple[str, str, int]


class PlanChangesError(FleetError):
    """A kept plan that is none, or of another model."""


def plan_changes(
    model: object, devices: object, kept: object, plan: Mapping[str, Any], **options: object
) -> dict[str, Any]:
    """``{moves, bytes, ms_kept, ms_new, kept_fits, settings}`` of a feasible ``plan`` against a ``kept`` one.

    ``moves``: ``[{first, last, output, source, target, bytes}]``, runs of layers that go from one device to another
    (``host device``); ``bytes`` of weights that another device gets. ``ms_*``: milliseconds per token, predicted with
    the devices of today; ``ms_kept`` None where the kept split no longer fits. ``settings``: ``{name: [old, new]}``.
    """
    known = Model.from_dict(model)
    if not isinstance(kept, Mapping) or not isinstance(kept.get("devices"), Sequence):
        raise PlanChangesError("the kept plan is none; give what plan.json of the primary's state directory holds")
    before, after = _homes(kept, known), _homes(plan, known)
    if len(before) != len(after):
        raise PlanChangesError(
            f"the kept plan spreads {len(before)} units and {known.path} has {len(after)}: it is of another model"
        )
    pinned = plan_with(model, _pinned(devices, kept), **options)
    settings = {"n_ctx": [kept.get("n_ctx"), plan["n_ctx"]]}
    params = kept.get("params") or {}
    settings.update({name: [params.get(name), value] for name, value in plan["params"].items()})
    moves = _moves(before, after, known, plan) + _output_matrix(kept, plan, before, after)
    return {
        "moves": moves,
        "bytes": sum(move["bytes"] for move in moves),
        "ms_kept": pinned["predicted"]["ms_per_token"] if pinned["feasible"] else None,
        "ms_new": plan["predicted"]["ms_per_token"],
        "kept_fits": pinned["feasible"],
        "settings": {name: pair for name, pair in settings.items() if pair[0] != pair[1]},
    }


def _homes(plan: Mapping[str, Any], model: Model) -> list[_Home]:
    """The device of every unit, the output last."""
    homes: list[tuple[int, _Home]] = []
    for entry in plan["devices"]:
        home = (str(entry["host"]), str(entry["device"]), int(entry.get("index") or 0))
        if entry["first_layer"] is not None:
            homes += [(layer, home) for layer in range(entry["first_layer"], entry["last_layer"] + 1)]
        if entry["output"]:
            homes.append((model.n_layer, home))
    return [home for _unit, home in sorted(homes, key=lambda pair: pair[0])]


def _output_matrix(
    kept: Mapping[str, Any], plan: Mapping[str, Any], before: Sequence[_Home], after: Sequence[_Home]
) -> list[dict[str, Any]]:
    """The output matrix, where it goes to the primary's CPU or comes back to the device that keeps the output layer."""
    old, new = kept.get("output_on_primary"), plan.get("output_on_primary")
    if bool(old) == bool(new) or (not new and before[-1] != after[-1]):  # in the latter case it moves with its layer
        return []
    cpu, device = "the primary's CPU", " ".join((before if new else after)[-1][:2])
    source, target = (device, cpu) if new else (cpu, device)
    size = (new or old or {}).get("weights", 0)
    return [{"first": None, "last": None, "output": True, "source": source, "target": target, "bytes": size}]


def _moves(
    before: Sequence[_Home], after: Sequence[_Home], model: Model, plan: Mapping[str, Any]
) -> list[dict[str, Any]]:
    beside = plan.get("output_on_primary")
    sizes = [*(layer.weights for layer in model.layers), model.output_bytes - (beside["weights"] if beside else 0)]
    changed = [(unit, source, target) for unit, (source, target) in enumerate(zip(before, after)) if source != target]
    moves = []
    # Neighbours that go the same way: their number minus their rank is the same.
    for _key, group in groupby(enumerate(changed), key=lambda item: (item[1][0] - item[0], item[1][1:])):
        run = [change for _rank, change in group]
        units = [unit for unit, _source, _target in run]
        layers = [unit for unit in units if unit < model.n_layer]
        moves.append(
            {
                "first": layers[0] if layers else None,
                "last": layers[-1] if layers else None,
                "output": units[-1] == model.n_layer,
                "source": " ".join(run[0][1][:2]),
                "target": " ".join(run[0][2][:2]),
                "bytes": sum(sizes[unit] for unit in units),
            }
        )
    return moves


def _pinned(devices: object, kept: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The devices, each with exactly the units that it has in the kept plan."""
    units = {
        (entry["host"], entry["device"], int(entry.get("index") or 0)): entry["units"] for entry in kept["devices"]
    }
    return [
        {**item, "min_units": count, "max_units": count}
        for item in (devices if isinstance(devices, Sequence) else ())
        for count in [units.get((item["host"], item["device"], int(item.get("index") or 0)), 0)]
    ]


def change_lines(changes: Mapping[str, Any]) -> list[str]:
    """What would change, for people."""
    lines = [f"{name} {before} -> {after}" for name, (before, after) in changes["settings"].items()]
    for move in changes["moves"]:
        span = "" if move["first"] is None else f"layers {move['first']}-{move['last']}"
        what = " and ".join(part for part in (span, "the output" if move["output"] else "") if part)
        lines.append(f"{what} would move from {move['source']} to {move['target']}: {mib(move['bytes'])}")
    if not changes["moves"]:
        return [*lines, "no layer would move: the split is the one that the primary was started with"]
    if not changes["kept_fits"]:
        return [*lines, f"{mib(changes['bytes'])} would move; the kept split does not fit any more"]
    gain = changes["ms_kept"] - changes["ms_new"]
    lines.append(
        f"{mib(changes['bytes'])} would move; {changes['ms_kept']:.2f} -> {changes['ms_new']:.2f} ms per token "
        f"predicted, a gain of {gain:.2f} ms ({100 * gain / changes['ms_kept']:.1f} %)"
    )
    return lines
