# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan is the optimum: judged by trying every split. Nothing of the planner is used to judge it."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from ansible_collections.llamafleet.rpc.plugins.module_utils import _memory
from ansible_collections.llamafleet.rpc.plugins.module_utils._model import Model
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan import plan_split
from ansible_collections.llamafleet.rpc.tests.unit import plan_world
from ansible_collections.llamafleet.rpc.tests.unit.plan_world import MIB, device, layer
from hypothesis import given, settings
from hypothesis import strategies as st

MARGIN = 3 * MIB


class Split(NamedTuple):
    """One way to place all units: units per device, and what the cost model says of it."""

    units: tuple[int, ...]
    sum_ms: float
    slowest_ms: float
    fullest: float
    used: int


class Judge:
    """Every split of a model over devices, by the rules as they are written down."""

    def __init__(self, model: dict[str, Any], devices: list[dict[str, Any]], params: _memory.ContextParams) -> None:
        self.model = Model.from_dict(model)
        self.devices = devices
        self.params = params
        layers = self.model.layers
        self.context = [_memory.layer_context_bytes(self.model, k, params) for k in range(len(layers))]
        self.bytes = [each.weights + context for each, context in zip(layers, self.context)]
        self.read = [each.active + context for each, context in zip(layers, self.context)]
        self.has_cpu = devices[0]["endpoint"] is None and devices[0]["device"] == "CPU"

    def splits(self, allowed: list[bool], lend: bool) -> Iterator[Split]:
        units = len(self.bytes) + 1
        for counts in self._counts(0, units, allowed):
            found = self._try(counts, lend)
            if found is not None:
                yield found

    def _counts(self, number: int, left: int, allowed: list[bool]) -> Iterator[tuple[int, ...]]:
        if number == len(self.devices):
            if left == 0:
                yield ()
            return
        item = self.devices[number]
        least = item["min_units"] or 0
        most = left if item["max_units"] is None else min(left, item["max_units"])
        for count in range(least, (most if allowed[number] else 0) + 1):
            for rest in self._counts(number + 1, left - count, allowed):
                yield (count, *rest)

    def _try(self, counts: tuple[int, ...], lend: bool) -> Split | None:
        model, params, units = self.model, self.params, len(self.bytes) + 1
        on_cpu = counts[0] if self.has_cpu else 0
        listed = [k for k, count in enumerate(counts) if count and not (k == 0 and self.has_cpu)]
        pipelining = len(listed) > 1 and not on_cpu
        own = model.input_bytes + _memory.output_buffer_bytes(model, params)
        own += _memory.host_compute_bytes(model, params, pipelining)
        taken: dict[str, int] = {}
        loads: list[float] = []
        times: list[float] = []
        begin = 0
        for k, count in enumerate(counts):
            end = begin + count
            if not count:
                continue
            output = end == units
            size = sum(self.bytes[begin:end]) + (model.output_bytes if output else 0)
            read = sum(self.read[begin:end]) + (model.output_bytes if output else 0)
            if begin < units - 1:
                size += model.per_device_bytes
            borrows = [
                self.context[source]
                for source in (each.borrows_from for each in model.layers[begin:end])
                if source is not None and source < begin
            ]
            if borrows and not lend:
                return None
            size += sum(borrows) * (4 if pipelining else 1)
            item = self.devices[k]
            cpu = k == 0 and self.has_cpu
            if cpu:
                size += self._cpu_compute(output)
            else:
                size += _memory.compute_bytes(
                    model,
                    params,
                    n_devices_listed=len(listed),
                    is_first=k == listed[0],
                    is_last_with_output=output,
                    pipelining=pipelining,
                )
            if size + (own if cpu else 0) + MARGIN > item["usable"]:
                return None
            taken[item["pool"]] = taken.get(item["pool"], 0) + size
            loads.append((size + (own if cpu else 0)) / max(1, item["usable"]))
            times.append(self._ms(item, read, first=bool(listed) and k == listed[0], output=output))
            begin = end
        if self.has_cpu:
            pool = self.devices[0]["pool"]
            taken[pool] = taken.get(pool, 0) + own
            if own + MARGIN > self.devices[0]["usable"]:
                return None
        for item in self.devices:
            if taken.get(item["pool"], 0) + MARGIN > item["pool_usable"] and item["pool"] in taken:
                return None
        slowest = max(times) if pipelining else sum(times)
        return Split(counts, sum(times), slowest, max(loads), len(times))

    def _cpu_compute(self, everything: bool) -> int:
        model, params = self.model, self.params
        held = _memory.host_compute_bytes(model, params, False, range(len(model.layers)))
        grown = held - _memory.host_compute_bytes(model, params, False)
        if not everything:
            return grown
        alone = _memory.compute_bytes(
            model, params, n_devices_listed=1, is_first=True, is_last_with_output=True, pipelining=False
        )
        return max(grown, alone)

    def _ms(self, item: dict[str, Any], read: int, first: bool, output: bool) -> float:
        ms: float = read / item["bandwidth"] * 1000 + (item["overhead_ms"] or 0)
        if item["endpoint"] is None:
            return ms
        ms += item["rtt_ms"]
        if item.get("link_mbps"):
            cells = {
                (cache.window, cache.ratio): _memory.cache_cells(cache, self.params)
                for each in self.model.layers
                for cache in each.caches
            }
            wire = 2242 + 4 * self.model.n_embd + 2 * sum(cells.values())
            wire += 628 + 8 * self.model.n_embd if first else 0
            wire += 4 * (self.model.n_vocab if output else self.model.n_embd) + 8
            ms += wire * 8 / (item["link_mbps"] * 1000)
        return ms


def judge(model: dict[str, Any], devices: list[dict[str, Any]], params: _memory.ContextParams) -> list[Split]:
    """All splits that may be chosen from: the first priority level that has any, borrowing only if there is none."""
    seen = Judge(model, devices, params)
    levels = sorted({50 if item["priority"] is None else item["priority"] for item in devices})
    for lend in (False, True):
        for level in levels:
            allowed = [
                (50 if item["priority"] is None else item["priority"]) <= level or bool(item["min_units"])
                for item in devices
            ]
            found = list(seen.splits(allowed, lend))
            if found:
                return found
    return []


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A random model of few uneven layers and a few random devices, pools shared at random."""
    whole = st.integers
    layers: list[dict[str, Any]] = []
    for _number in range(draw(whole(1, 6))):
        size = draw(whole(0, 40)) * MIB + draw(whole(0, MIB))
        window = draw(st.sampled_from([None, None, 256]))
        width = draw(st.sampled_from([0, 32, 1024]))
        caches = [{"k_width": width, "v_width": width, "window": window, "ratio": 1, "per_sequence": False}]
        kept = layer(size, active=draw(whole(0, size)), caches=caches)
        lenders = [k for k, each in enumerate(layers) if each["caches"]]
        if lenders and draw(whole(0, 5)) == 0:
            kept = {**kept, "caches": [], "borrows_from": draw(st.sampled_from(lenders))}
        layers.append(kept)
    model = plan_world.model(
        layers,
        output_bytes=draw(whole(0, 30)) * MIB,
        input_bytes=draw(whole(0, 10)) * MIB,
        per_device_bytes=draw(st.sampled_from([0, 0, 5 * MIB])),
        n_vocab=draw(st.sampled_from([1000, 200000])),
    )
    count = draw(whole(1, 4))
    # Sizes near what the model needs, so that budgets and pools bind without ruling everything out.
    total = sum(each["weights"] for each in layers) + model["output_bytes"] + 8 * MIB
    pools = [f"pool{k}" for k in range(draw(whole(1, 3)))]
    sizes = {pool: total * draw(whole(30, 130)) // 100 + draw(whole(0, 4)) * MIB for pool in pools}
    shared = draw(whole(0, 3)) > 0
    devices = []
    for number in range(count):
        usable = total * draw(whole(15, 140)) // 100
        changed: dict[str, Any] = {
            "bandwidth": draw(whole(1, 50)) * 1e9,
            "priority": draw(st.sampled_from([None, None, None, 1, 90])),
            "min_units": draw(st.sampled_from([None, None, None, None, 1, 2])),
            "max_units": draw(st.sampled_from([None, None, None, 2, 4])),
        }
        if shared and draw(whole(0, 3)):
            pool = draw(st.sampled_from(pools))
            changed.update(pool=pool, pool_usable=sizes[pool])
        local = number == count - 1 and draw(st.booleans())
        if not local:
            changed.update(rtt_ms=draw(whole(0, 40)) / 10, overhead_ms=draw(whole(0, 10)) / 10)
            if draw(whole(0, 4)) == 0:
                changed["link_mbps"] = draw(st.sampled_from([10, 1000]))
        devices.append(device(f"h{number}", usable, None if local else f"10.0.0.{number + 1}:1024", **changed))
    if draw(st.booleans()):
        changed = {"bandwidth": draw(whole(1, 50)) * 1e9, "max_units": draw(st.sampled_from([None, None, 0, 3]))}
        if shared and draw(whole(0, 3)):
            changed.update(pool=pools[0], pool_usable=sizes[pools[0]])
        devices.insert(0, device("head", total * draw(whole(20, 140)) // 100 + 10 * MIB, None, "CPU", **changed))
    return model, devices


def planned(model: dict[str, Any], devices: list[dict[str, Any]], objective: str, n_ctx: int) -> dict[str, Any]:
    return plan_split(model, devices, n_ctx=n_ctx, n_ubatch=64, objective=objective, margin=MARGIN, cache_ram=0)


def counts_of(plan: dict[str, Any], devices: list[dict[str, Any]]) -> tuple[int, ...]:
    held = {(entry["host"], entry["device"]): entry["units"] for entry in plan["devices"]}
    return tuple(held.get((item["host"], item["device"]), 0) for item in devices)


def check(model: dict[str, Any], devices: list[dict[str, Any]], objective: str, n_ctx: int) -> None:
    splits = judge(model, devices, _memory.ContextParams(n_ctx=n_ctx, n_ubatch=64))
    plan = planned(model, devices, objective, n_ctx)
    assert plan["feasible"] == bool(splits), plan["reason"]
    if not splits:
        assert plan["reason"]
        assert plan["devices"] == []
        return
    chosen = next((split for split in splits if split.units == counts_of(plan, devices)), None)
    assert chosen is not None, "the plan breaks a budget or a limit"
    value = attrgetter({"latency": "sum_ms", "memory": "fullest", "prefill": "slowest_ms"}[objective])
    best = min(value(split) for split in splits)
    assert value(chosen) <= best * (1 + 1e-8) + 1e-9
    assert abs(plan["predicted"]["ms_per_token"] - chosen.sum_ms) <= 1e-4
    equals = [split for split in splits if value(split) <= best * (1 + 1e-12)]
    assert chosen.sum_ms <= min(split.sum_ms for split in equals) * (1 + 1e-6) + 1e-6, "a quicker plan is as good"
    check_split(plan, model)


def check_split(plan: dict[str, Any], model: dict[str, Any]) -> None:
    """Law 1: llama.cpp's float32 rule puts every unit where the plan says."""
    listed = [entry for entry in plan["devices"] if entry["rpc_name"] in plan["device_order"]]
    split = [int(part) for part in plan["tensor_split"].split(",")] if listed else []
    assert split == [entry["units"] for entry in listed]
    assert sum(split) == plan["n_gpu_layers"]
    expected: list[int | None] = [None] * (model["n_layer"] + 1 - sum(split))
    for number, units in enumerate(split):
        expected += [number] * units
    if split:
        assert plan_world.assigned(split, model["n_layer"], plan["n_gpu_layers"]) == expected


@settings(max_examples=700, deadline=None)
@given(worlds())
def test_latency_is_the_least_of_all_splits(world: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    check(*world, "latency", 256)


@settings(max_examples=500, deadline=None)
@given(worlds())
def test_memory_leaves_the_largest_least_headroom(world: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    check(*world, "memory", 2048)


@settings(max_examples=500, deadline=None)
@given(worlds())
def test_prefill_has_the_quickest_slowest_device(world: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    check(*world, "prefill", 256)
