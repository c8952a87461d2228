# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a plan is asked for: the model, the devices and the parameters, checked and turned into bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ansible_collections.llamafleet.rpc.plugins.module_utils import _memory
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError, kind_of
from ansible_collections.llamafleet.rpc.plugins.module_utils._model import Layer, Model
from ansible_collections.llamafleet.rpc.plugins.module_utils._records import (
    check_device_name,
    check_number,
    check_whole,
    is_primary_cpu,
    parse_endpoint,
)

MIB = 1 << 20
OBJECTIVES = ("latency", "memory", "prefill")
MAX_DEVICES = 15  # law 5: GGML_SCHED_MAX_BACKENDS is 16 at b11434, and the CPU takes one
CACHE_RAM_STEPS = (8192, 4096, 2048, 1024, 512, 256, 0)  # MiB; the first is llama-server's default
DEFAULT_PRIORITY = 50
MARGIN_BYTES = 64 * MIB
MARGIN_DIVISOR = 50  # 2 %
MAX_TOKENS = (1 << 31) - 1  # llama.cpp reads n_ctx and its like as int
EFFORT = 100_000  # partial placements to try where memory pools are tangled: some seconds

# Used where a device has no measured value. Guesses of the right order for common hardware, in bytes/s and ms.
DEFAULT_BANDWIDTH = {
    "CUDA": 400e9,
    "ROCm": 400e9,
    "MTL": 200e9,
    "Metal": 200e9,
    "SYCL": 300e9,
    "Vulkan": 250e9,
    "CPU": 40e9,
}
OTHER_BANDWIDTH = 100e9
DEFAULT_RTT_MS = 0.5  # switched gigabit Ethernet through WireGuard
DEFAULT_OVERHEAD_MS = 1.0  # per RPC device and token; 1 to 2 ms measured on b11434 over loopback


class PlanError(FleetError):
    """An input that cannot be planned with; the message names it, its value and the remedy. Not: too little memory."""


@dataclass(frozen=True)
class Device:
    """A checked plan device; sizes in bytes, ``bandwidth`` in bytes/s. ``assumed``: it is a default, not a reading."""

    host: str
    endpoint: str | None
    index: int
    n_endpoint_devices: int
    device: str
    pool: str
    usable: int
    pool_usable: int
    bandwidth: float
    assumed: bool
    rtt_ms: float
    overhead_ms: float
    link_mbps: float | None
    priority: int
    least: int
    most: int | None

    @property
    def is_cpu(self) -> bool:
        """The primary's own CPU: holds the first layers, is not in ``-dev``."""
        return is_primary_cpu(self.endpoint, self.device)

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"{self.host} {self.device}" + (f" ({self.endpoint})" if self.endpoint else "")


class Sizes(NamedTuple):
    """Bytes of every unit, layers in order, the output last. ``trunk_end``: where the layers end that are loaded."""

    weights: Sequence[int]
    context: Sequence[int]
    active: Sequence[int]
    trunk_end: int


class Buffers(NamedTuple):
    """Bytes beside the layers.

    ``host_*``: the primary's compute buffer, with and without pipelining; ``cpu_*``: what it grows by when its CPU
    holds layers, or all units, or the output matrix. ``work_*``: compute buffer of a device that is (first, later,
    first with the output, later with the output) if it is alone, one of several that pipeline, or behind layers on the
    CPU.
    """

    output: int
    host_pipelined: int
    host_plain: int
    cpu_layers: int
    cpu_all: int
    cpu_head: int
    work_alone: tuple[int, int, int, int]
    work_pipelined: tuple[int, int, int, int]
    work_plain: tuple[int, int, int, int]


@dataclass(frozen=True)
class Request:
    """What to plan. ``margin``: bytes to leave free on every device and pool, None for max(64 MiB, 2 %).

    ``effort``: see _optimise.Problem.
    """

    model: Model
    devices: tuple[Device, ...]
    params: _memory.ContextParams
    objective: str
    margin: int | None
    cache_ram: int | None
    sizes: Sizes
    buffers: Buffers
    effort: int

    def budget(self, usable: int) -> int:
        """What may be planned of ``usable`` bytes."""
        margin = max(MARGIN_BYTES, -(-usable // MARGIN_DIVISOR)) if self.margin is None else self.margin
        return usable - margin

    @property
    def cpu(self) -> Device | None:
        """The primary's CPU, None if it is not among the devices."""
        return next((device for device in self.devices if device.is_cpu), None)

    @property
    def head_bytes(self) -> int:
        """The output matrix, 0 if it cannot be kept apart from the output layer."""
        return min(self.model.head_bytes or 0, self.model.output_bytes)

    def host_bytes(self, pipelining: bool, head: bool = False) -> int:
        """What the primary itself takes beside layers: embedding, compute buffer, logits, prompt cache.

        ``head``: its CPU holds the output matrix. That of a tied model may share the pages of the embedding, but not
        where the CPU wants its type in another order (CPU_REPACK), so it is counted.
        """
        compute = self.buffers.host_pipelined if pipelining else self.buffers.host_plain
        compute += self.buffers.cpu_head if head else 0
        weights = self.model.input_bytes + (self.head_bytes if head else 0)
        return weights + compute + self.buffers.output + (self.cache_ram or 0)

    def with_params(self, params: _memory.ContextParams) -> Request:
        """The same question for other context parameters."""
        return replace(self, params=params, sizes=_sizes(self.model, params), buffers=_buffers(self.model, params))


# --- Inputs ----------------------------------------------------------------------------------------------------------


def make_request(
    model: object, devices: object, params: Mapping[str, object], objective: object, margin: object, cache_ram: object
) -> Request:
    """Check everything that the caller gave; see ``plan_split`` for what is raised."""
    known = _checked_model(Model.from_dict(model))
    if objective not in OBJECTIVES:
        raise PlanError(f"objective is {objective!r}; it must be one of {', '.join(OBJECTIVES)}")
    checked = _context_params(params)
    listed = _parse_devices(devices)
    cache = check_whole(cache_ram, "cache_ram", optional=True)
    if cache is not None and 0 < cache < MIB:
        raise PlanError(f"cache_ram is {cache} bytes, less than 1 MiB; sizes are bytes, 2 GiB are 2147483648")
    gpu_worker = any(not device.device.startswith("CPU") for device in listed)
    _memory.check_cache_types(known, checked, fa_all_quants=not gpu_worker)
    return Request(
        model=known,
        devices=tuple(listed),
        params=checked,
        objective=str(objective),
        margin=check_whole(margin, "margin", optional=True),
        cache_ram=cache,
        sizes=_sizes(known, checked),
        buffers=_buffers(known, checked),
        effort=EFFORT,
    )


def _checked_model(model: Model) -> Model:
    """``model``, or PlanError for what no header of a model says, and no rule of memory could be applied to."""
    remedy = "pass the value that gguf_info returned"
    if not model.n_embd:
        raise PlanError(f"model.n_embd is 0, which no model has; {remedy}")
    parts = [("model", model), *((f"model.layers[{index}]", layer) for index, layer in enumerate(model.layers))]
    for where, part in parts:
        for name, value in vars(part).items():
            if isinstance(value, int) and value >= 1 << 63:
                raise PlanError(f"{where}.{name} is 2^63 or more, which no model has; {remedy}")
    for index, layer in enumerate(model.layers):
        if layer.borrows_from is not None and layer.borrows_from >= index:
            raise PlanError(
                f"model.layers[{index}].borrows_from is {layer.borrows_from}, but a layer can only use the cache of "
                f"one before it; {remedy}"
            )
    return model


def _context_params(values: Mapping[str, object]) -> _memory.ContextParams:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name.startswith("n_"):
            found[name] = check_whole(value, name, least=1)
            if found[name] > MAX_TOKENS:
                raise PlanError(f"{name} is {value}, and llama.cpp takes at most {MAX_TOKENS}; lower it")
        elif name == "flash_attn" and isinstance(value, bool):  # YAML reads on and off as true and false
            found[name] = "on" if value else "off"
        elif name in ("type_k", "type_v", "flash_attn") and not isinstance(value, str):
            raise PlanError(f"{name} is {value!r}, a {kind_of(value)}; it must be text such as {_TEXT[name]}")
        else:
            found[name] = str(value) if isinstance(value, str) else value
    return _memory.ContextParams(**found)


_TEXT = {"type_k": "f16", "type_v": "f16", "flash_attn": "auto"}


def _sizes(model: Model, params: _memory.ContextParams) -> Sizes:
    """The bytes of every unit under ``params``."""
    context = [_memory.layer_context_bytes(model, index, params) for index in range(model.n_layer)]
    weights = [layer.weights for layer in model.layers]
    active = [0 if layer.mtp else layer.active for layer in model.layers]
    trunk = [index for index, layer in enumerate(model.layers) if not layer.mtp]
    return Sizes(
        [*weights, model.output_bytes], [*context, 0], [*active, model.output_bytes], trunk[-1] + 1 if trunk else 0
    )


def _buffers(model: Model, params: _memory.ContextParams) -> Buffers:
    model = _one_of_each_kind(model)

    def work(pipelining: bool, n_devices: int) -> tuple[int, int, int, int]:
        first, later, first_output, later_output = (
            _memory.compute_bytes(
                model,
                params,
                n_devices_listed=n_devices,
                is_first=is_first,
                is_last_with_output=output,
                pipelining=pipelining,
            )
            for output in (False, True)
            for is_first in (True, False)
        )
        return first, later, first_output, later_output

    plain = _memory.host_compute_bytes(model, params, pipelining=False)
    held = _memory.host_compute_bytes(model, params, pipelining=False, layers=range(model.n_layer))
    alone = work(pipelining=False, n_devices=1)
    return Buffers(
        output=_memory.output_buffer_bytes(model, params),
        host_pipelined=_memory.host_compute_bytes(model, params, pipelining=True),
        host_plain=plain,
        cpu_layers=held - plain,
        cpu_all=max(held - plain, alone[2]),
        cpu_head=_memory.head_compute_bytes(model, params),
        work_alone=alone,
        work_pipelined=work(pipelining=True, n_devices=2),
        work_plain=work(pipelining=False, n_devices=2),
    )


def _one_of_each_kind(model: Model) -> Model:
    """The model cut down to one layer of each kind: the compute rules look at nothing else, and this is quicker."""
    kinds: dict[Layer, int] = {}
    chosen: list[Layer] = []
    position: dict[int, int] = {}  # of a layer's kind
    for index, layer in enumerate(model.layers):
        lender = None if layer.borrows_from is None else position[layer.borrows_from]
        kind = replace(layer, weights=0, active=0, mtp_weights=0, borrows_from=lender)
        if kind not in kinds:
            kinds[kind] = len(chosen)
            chosen.append(kind)
        position[index] = kinds[kind]
    return replace(model, layers=tuple(chosen), n_layer=len(chosen))


def _parse_devices(devices: object) -> list[Device]:
    if not isinstance(devices, Sequence) or isinstance(devices, (str, bytes)):
        raise PlanError(f"devices are a {kind_of(devices)}; give the list that fleet_devices returns")
    if not devices:
        raise PlanError(
            "there are no devices to plan with; add hosts to the groups of the fleet, or gather their records"
        )
    found = _with_pools(devices, [_parse_device(item, f"device {number}") for number, item in enumerate(devices)])
    seen: dict[tuple[str | None, str | int], Device] = {}
    sizes: dict[str, int] = {}
    for device in found:
        # The primary's own devices are told apart by name, those of a worker by number.
        key = (device.endpoint, device.device if device.endpoint is None else device.index)
        if key in seen:
            raise PlanError(
                f"{seen[key].label} and {device.label} are the same device ({device.endpoint or 'local'}, index "
                f"{device.index}); list every device once"
            )
        seen[key] = device
        if sizes.setdefault(device.pool, device.pool_usable) != device.pool_usable:
            raise PlanError(
                f"{device.label}: pool {device.pool} has {sizes[device.pool]} bytes for one device and "
                f"{device.pool_usable} for another; pool_usable must be the same for all devices of a pool"
            )
    cpus = [device for device in found if device.is_cpu]
    if len(cpus) > 1:
        raise PlanError(f"{cpus[0].label} and {cpus[1].label} are both the primary's CPU; keep one")
    # llama.cpp puts the layers it does not offload first, wherever the list has the CPU.
    return cpus + [device for device in found if not device.is_cpu]


def _with_pools(items: Sequence[Mapping[str, object]], devices: Sequence[Device]) -> list[Device]:
    """Devices that do not say how large their pool is get what another one says, else the largest ``usable`` in it."""
    sizes: dict[str, int] = {}
    for device in devices:
        sizes[device.pool] = max(sizes.get(device.pool, 0), device.usable)
    said = [item.get("pool") and item.get("pool_usable") is not None for item in items]
    sizes.update({device.pool: device.pool_usable for device, says in zip(devices, said) if says})
    return [device if says else replace(device, pool_usable=sizes[device.pool]) for device, says in zip(devices, said)]


def _parse_device(item: object, where: str) -> Device:
    if not isinstance(item, Mapping):
        raise PlanError(f"{where} is {item!r}; it must be a mapping, as fleet_devices returns it")
    host = item.get("host")
    if not isinstance(host, str) or not host:
        raise PlanError(f"{where}: host is {host!r}; it must be the inventory name of the host")
    where = f"{where} (host {host})"
    name = check_device_name(item.get("device"), where)
    endpoint = item.get("endpoint")
    if endpoint is not None:
        endpoint = parse_endpoint(endpoint, where)
    index = _whole(item, "index", where, 0)
    count = _whole(item, "n_endpoint_devices", where, index + 1)
    if index >= count:
        raise PlanError(f"{where}: index is {index}, but the endpoint has {count} devices, numbered from 0")
    usable = check_whole(item.get("usable"), f"{where}: usable") or 0  # only optional numbers are None
    pool = item.get("pool")
    if pool is not None and not isinstance(pool, str):
        raise PlanError(f"{where}: pool is {pool!r}; it must be a name or null")
    numbers = {key: check_number(item.get(key), f"{where}: {key}") for key in ("rtt_ms", "overhead_ms")}
    bandwidth = check_number(item.get("bandwidth"), f"{where}: bandwidth", positive=True)
    remote = endpoint is not None
    least = _whole(item, "min_units", where, 0)
    most = check_whole(item.get("max_units"), f"{where}: max_units", optional=True)
    if most is not None and least > most:
        raise PlanError(f"{where}: min_units is {least}, above max_units {most}; lower one or raise the other")
    return Device(
        host=str(host),
        endpoint=endpoint,
        index=index,
        n_endpoint_devices=count,
        device=name,
        pool=str(pool) if pool else f"{host}/{endpoint}/{name}",
        usable=usable,
        pool_usable=_whole(item, "pool_usable", where, usable) if pool else usable,
        bandwidth=default_bandwidth(name) if bandwidth is None else bandwidth,
        assumed=bandwidth is None,
        rtt_ms=_or(numbers["rtt_ms"], DEFAULT_RTT_MS) if remote else 0,
        overhead_ms=_or(numbers["overhead_ms"], DEFAULT_OVERHEAD_MS if remote else 0),
        link_mbps=check_number(item.get("link_mbps"), f"{where}: link_mbps", positive=True) if remote else None,
        priority=_whole(item, "priority", where, DEFAULT_PRIORITY),
        least=least,
        most=most,
    )


def _whole(item: Mapping[str, object], key: str, where: str, default: int) -> int:
    value = check_whole(item.get(key), f"{where}: {key}", optional=True)
    return default if value is None else value


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def default_bandwidth(device: str) -> float:
    """Bytes per second to assume for a device of this name."""
    return DEFAULT_BANDWIDTH.get(device.rstrip("0123456789"), OTHER_BANDWIDTH)
