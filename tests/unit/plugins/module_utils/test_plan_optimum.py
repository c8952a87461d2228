# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan is the optimum: judged by trying every split in every order. Nothing of the planner is used to judge it."""

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
    """One way to place all units: (device, units) in order, and what the cost model says of it."""

    held: tuple[tuple[int, int], ...]
    head: bool
    sum_ms: float
    slowest_ms: float
    fullest: float


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
        for held in self._orders(0, (), allowed):
            for head in (False, True):
                found = self._try(held, lend, head, allowed)
                if found is not None:
                    yield found

    def _orders(
        self, at: int, held: tuple[tuple[int, int], ...], allowed: list[bool]
    ) -> Iterator[tuple[tuple[int, int], ...]]:
        """The primary's CPU comes first, its GPUs last, the workers in any order."""
        units = len(self.bytes) + 1
        used = [k for k, _count in held]
        if at == units:
            if not any(item["min_units"] and k not in used for k, item in enumerate(self.devices)):
                yield held
            return
        for k, item in enumerate(self.devices):
            if k in used or not allowed[k] or (used and self._place(k) < self._place(used[-1])):
                continue
            if self._place(k) == 0 and used:
                continue
            most = units - at if item["max_units"] is None else min(units - at, item["max_units"])
            for count in range(max(1, item["min_units"] or 0), most + 1):
                yield from self._orders(at + count, (*held, (k, count)), allowed)

    def _place(self, k: int) -> int:
        if k == 0 and self.has_cpu:
            return 0
        return 2 if self.devices[k]["endpoint"] is None else 1

    def _try(self, held: tuple[tuple[int, int], ...], lend: bool, head: bool, allowed: list[bool]) -> Split | None:
        model, params, units = self.model, self.params, len(self.bytes) + 1
        on_cpu = held[0][1] if self.has_cpu and held[0][0] == 0 else 0
        listed = [k for k, _count in held[1 if on_cpu else 0 :]]
        kept = (model.head_bytes or 0) if head else 0
        if head:
            cpu_barred = not self.has_cpu or self.devices[0]["max_units"] == 0 or not allowed[0]
            remote = any(allowed[k] and self._place(k) == 1 and each["max_units"] != 0
                         for k, each in enumerate(self.devices))  # fmt: skip
            if cpu_barred or not kept or not remote or not listed:
                return None
        pipelining = len(listed) > 1 and not on_cpu and not head
        own = model.input_bytes + _memory.output_buffer_bytes(model, params) + kept
        own += _memory.host_compute_bytes(model, params, pipelining)
        own += _memory.head_compute_bytes(model, params) if head else 0
        taken: dict[str, int] = {}
        loads: list[float] = []
        times: list[float] = []
        begin = 0
        for k, count in held:
            end = begin + count
            output = end == units
            size = sum(self.bytes[begin:end]) + (model.output_bytes - kept if output else 0)
            read = sum(self.read[begin:end]) + (model.output_bytes - kept if output else 0)
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
                    is_last_with_output=output and not head,
                    pipelining=pipelining,
                )
            if size + (own if cpu else 0) + MARGIN > item["usable"]:
                return None
            taken[item["pool"]] = taken.get(item["pool"], 0) + size
            loads.append((size + (own if cpu else 0)) / max(1, item["usable"]))
            ms = read / item["bandwidth"] * 1000 + (item["overhead_ms"] or 0)
            if item["endpoint"] is not None:
                ms += item["rtt_ms"] + self._wire_ms(item, bool(on_cpu), k == listed[0], output, head)
            times.append(ms)
            begin = end
        if self.has_cpu:
            host = self.devices[0]
            taken[host["pool"]] = taken.get(host["pool"], 0) + own
            if own + MARGIN > host["usable"]:
                return None
            if head:
                times.append(kept / host["bandwidth"] * 1000 + (host["overhead_ms"] or 0))
                loads.append(own / max(1, host["usable"]))
        for item in self.devices:
            if taken.get(item["pool"], 0) + MARGIN > item["pool_usable"] and item["pool"] in taken:
                return None
        slowest = max(times) if pipelining else sum(times)
        return Split(held, head, sum(times), slowest, max(loads))

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

    def _wire_ms(self, item: dict[str, Any], behind_cpu: bool, first: bool, output: bool, head: bool) -> float:
        """Bytes of b11434 as they were counted, e.g. 4740 up for SmolLM2 in the middle of three workers."""
        if not item.get("link_mbps"):
            return 0
        n_embd, n_vocab = self.model.n_embd, self.model.n_vocab
        cells = {
            (cache.window, cache.ratio): _memory.cache_cells(cache, self.params)
            for each in self.model.layers
            for cache in each.caches
        }
        wire = 334 + 4 * 314 + 20 + 4 * n_embd + max(1, len(cells)) * 314 + 2 * sum(cells.values())
        if first:
            wire += 314 + 4 * n_embd if behind_cpu else 3 * 314 + 8 * n_embd + 8
        if output:
            wire += 318
        wire += 4 * (n_vocab if output and not head else n_embd) + 8
        return float(wire * 8 / (item["link_mbps"] * 1000))


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
    output = draw(whole(0, 30)) * MIB
    model = plan_world.model(
        layers,
        output_bytes=output,
        head_bytes=draw(st.sampled_from([None, output, max(0, output - 1000)])),
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


def held_by(plan: dict[str, Any], devices: list[dict[str, Any]]) -> tuple[tuple[int, int], ...]:
    numbers = {(item["host"], item["device"]): k for k, item in enumerate(devices)}
    return tuple((numbers[entry["host"], entry["device"]], entry["units"]) for entry in plan["devices"])


def check(model: dict[str, Any], devices: list[dict[str, Any]], objective: str, n_ctx: int) -> None:
    splits = judge(model, devices, _memory.ContextParams(n_ctx=n_ctx, n_ubatch=64))
    plan = planned(model, devices, objective, n_ctx)
    assert plan["feasible"] == bool(splits), plan["reason"]
    if not splits:
        assert plan["reason"]
        assert plan["devices"] == []
        return
    held, head = held_by(plan, devices), plan["output_on_primary"] is not None
    chosen = next((split for split in splits if (split.held, split.head) == (held, head)), None)
    assert chosen is not None, "the plan breaks a budget or a limit"
    value = attrgetter({"latency": "sum_ms", "memory": "fullest", "prefill": "slowest_ms"}[objective])
    best = min(value(split) for split in splits)
    assert value(chosen) <= best * (1 + 1e-8) + 1e-9
    assert abs(plan["predicted"]["ms_per_token"] - chosen.sum_ms) <= 1e-4
    equals = [split for split in splits if value(split) <= best * (1 + 1e-12)]
    assert chosen.sum_ms <= min(split.sum_ms for split in equals) * (1 + 1e-6) + 1e-6, "a quicker plan is as good"
    check_certificate(plan, best, min(split.sum_ms for split in splits))
    check_split(plan, model)


def check_certificate(plan: dict[str, Any], best: float, quickest: float) -> None:
    """The bounds hold for every split there is; at this size nothing stays unproved."""
    certificate = plan["certificate"]
    assert certificate["proved"]
    assert certificate["gap"] == plan["predicted"]["gap"] == 0
    assert certificate["lower_bound"] == certificate["value"]
    assert abs(certificate["value"] - best) <= 1e-5 + best * 1e-8
    assert plan["predicted"]["lower_bound_ms"] <= quickest + 1e-5


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
