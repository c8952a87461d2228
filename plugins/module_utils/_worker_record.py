# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What one host lends to one cluster, as decisions that stay the same from run to run.

Facts are readings and move by a few MiB each time; a plan made of readings would never be the same twice. So the
capacity of a device is agreed once and kept until it moves by more than 10 % (what our own services hold does not
count as a move, host_facts adds it back), until it is re-measured on purpose, or until the host booted and has less
than was agreed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import (
    Device,
    backend_of,
    gpu_pool,
    mib_text,
    parse_size,
    ram_pool,
    reserve_bytes,
    usable_bytes,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._reconcile import listing, reconcile
from ansible_collections.llamafleet.rpc.plugins.module_utils._records import (
    RECORD_SCHEMA,
    check_device_name,
    check_number,
    check_whole,
    parse_endpoint,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._visible import chooses, seen_devices

# What ggml-rpc-server listens on unless told otherwise.
DEFAULT_PORT = 50052

# A figure that moved by no more than this is the one that was agreed.
TOLERANCE_PERCENT = 10

# Keys of a record that say when and where, not what was decided. rtt_ms is a reading as well, but the plan's speed
# hangs on it, so the first one is kept like a capacity.
_IDENTITY = ("machine_id", "boot_id")


class WorkerRecordError(FleetError):
    """A record that cannot be made of what was given."""


@dataclass(frozen=True)
class Inputs:
    """All that a record is made of.

    `facts`: ansible_facts.llamafleet. `probes`: results of rpc_info, found by their endpoint. `identities`: started_at
    of _sockets.describe_process, in the order of `instances`. `previous`: the record kept so far, if any. `listed`:
    output of llama-server --list-devices, of the host or by instance name. `measured`: what a primary found out of its
    cluster by calibration, `{build, at, devices}`; without it that of `previous` stays, while the build does.
    `warnings` is filled by build_record.
    """

    host: str
    cluster: str
    instances: Sequence[Mapping[str, Any]]
    facts: Mapping[str, Any] | None = None
    build: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, Any] = field(default_factory=dict)
    probes: Sequence[Mapping[str, Any]] = ()
    identities: Sequence[str | None] = ()
    previous: Mapping[str, Any] | None = None
    primary: bool = False
    remeasure: bool = False
    collected_at: str | None = None
    listed: str | Sequence[str] | Mapping[str, str | Sequence[str]] | None = None
    measured: Mapping[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)


def build_record(inputs: Inputs) -> dict[str, Any]:
    """The worker record (schema 1, design section 4) of a host; a FleetError says what is wrong.

    Devices carry two keys besides the contract's: `reported`, the total that llama.cpp itself reports, and `idle_free`,
    what the worker reported as free when it was first seen idle. Both are None for a CPU, which reports all RAM.
    """
    if not inputs.host:
        raise WorkerRecordError("host is empty; give the inventory name of the host")
    if not inputs.instances:
        raise WorkerRecordError(
            f"{inputs.host}: no instances; give at least one, or remove the record with state: absent"
        )
    facts = inputs.facts or {}
    previous = inputs.previous if usable_previous(inputs.previous) else None
    old = {instance["name"]: instance for instance in (previous or {}).get("instances", [])}
    same_boot = previous is not None and previous.get("boot_id") == facts.get("boot_id")
    instances: list[dict[str, Any]] = []
    for position, given in enumerate(inputs.instances):
        if not isinstance(given, Mapping):
            raise WorkerRecordError(
                f"{inputs.host}: an instance is {given!r}; it must be a mapping with name and devices"
            )
        instance = _instance(inputs, given, old.get(_name(given)), same_boot)
        instance["started_at"] = inputs.identities[position] if position < len(inputs.identities) else None
        for other in instances:
            if other["name"] == instance["name"]:
                raise WorkerRecordError(f"{inputs.host}: two instances are called {instance['name']!r}; rename one")
            if other["endpoint"] == instance["endpoint"]:
                where = instance["endpoint"] or "the primary's own devices"
                raise WorkerRecordError(f"{inputs.host}: {other['name']} and {instance['name']} are both {where}")
        instances.append(instance)
    mesh = inputs.mesh
    record = {
        "schema": RECORD_SCHEMA,
        "host": inputs.host,
        "machine_id": facts.get("machine_id"),
        "boot_id": facts.get("boot_id"),
        "collected_at": inputs.collected_at or facts.get("collected_at"),
        "cluster": inputs.cluster,
        "build": inputs.build.get("build"),
        "manifest_id": inputs.build.get("manifest_id"),
        "mesh": {"address": mesh.get("address"), "public_key": mesh.get("public_key")},
        "instances": instances,
    }
    measured = inputs.measured or (previous or {}).get("measured")
    if measured and measured.get("build") == record["build"]:
        record["measured"] = dict(measured)
    elif measured:
        inputs.warnings.append(
            f"{inputs.host}: the speeds of the cluster were measured with {measured.get('build')}, and this is "
            f"{record['build']}: run playbooks/calibrate.yml again; until then defaults are used"
        )
    return record


def usable_previous(record: object) -> bool:
    """Whether a kept record has the shape of this release, so that figures may be taken from it."""
    if not isinstance(record, Mapping) or record.get("schema") != RECORD_SCHEMA:
        return False
    instances, measured = record.get("instances"), record.get("measured")
    if not isinstance(instances, list) or not (measured is None or isinstance(measured, Mapping)):
        return False
    try:
        return all(_usable_instance(instance) for instance in instances)
    except FleetError:
        return False


def _usable_instance(instance: object) -> bool:
    """Whether figures may be taken from an instance of a kept record; a FleetError for a figure that is none."""
    if not isinstance(instance, Mapping) or not isinstance(instance.get("name"), str):
        return False
    check_number(instance.get("rtt_ms"), "rtt_ms")
    devices = instance.get("devices")
    if not isinstance(devices, list) or not all(isinstance(device, Mapping) for device in devices):
        return False
    for device in devices:
        for key in ("index", "usable", "reported", "idle_free"):
            check_whole(device.get(key), key, optional=True)
    return all(isinstance(device.get("device"), str) and isinstance(device.get("pool"), str) for device in devices)


def decisions(record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What of a record counts as changed when it differs: no times, no process identities, no boot."""
    if record is None or not usable_previous(record):
        return None
    kept = {key: value for key, value in record.items() if key not in (*_IDENTITY, "collected_at")}
    kept["instances"] = [
        {key: value for key, value in instance.items() if key not in ("started_at", "rtt_ms")}
        for instance in record["instances"]
    ]
    return kept


def same_identity(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two records speak of the same boot and the same processes."""
    return all(one.get(key) == other.get(key) for key in _IDENTITY) and [
        (instance.get("name"), instance.get("started_at"), instance.get("rtt_ms")) for instance in one["instances"]
    ] == [(instance.get("name"), instance.get("started_at"), instance.get("rtt_ms")) for instance in other["instances"]]


def agreed(kept: int | None, fresh: int | None, same_boot: bool) -> int | None:
    """The figure to plan with: the kept one while the fresh one is near; after a boot never more than is there."""
    if kept is None or fresh is None:
        return fresh
    near = abs(fresh - kept) * 100 <= kept * TOLERANCE_PERCENT
    return kept if near and (same_boot or kept <= fresh) else fresh


def _name(given: Mapping[str, Any]) -> str:
    return str(_first(given.get("name"), "default"))


def _instance(
    inputs: Inputs, given: Mapping[str, Any], old: Mapping[str, Any] | None, same_boot: bool
) -> dict[str, Any]:
    name = _name(given)
    where = f"{inputs.host}, instance {name}"
    endpoint = None if inputs.primary else _endpoint(inputs, given, where)
    probe = next((probe for probe in inputs.probes if endpoint and probe.get("endpoint") == endpoint), {})
    found = _chosen_devices(inputs, given, where)
    offered = probe.get("devices") if probe.get("status") == "ok" else None
    if offered and not (isinstance(offered, Sequence) and all(isinstance(answer, Mapping) for answer in offered)):
        raise WorkerRecordError(f"{where}: the probe's devices are {offered!r}; give what rpc_info returned")
    if offered and len(offered) != len(found):
        raise WorkerRecordError(
            f"{where}: the worker offers {len(offered)} devices, but {len(found)} are configured "
            f"({', '.join(device.name for device, _extra in found)}); restart it with the configured ones"
        )
    old_devices = {
        (device.get("index"), device.get("device"), device.get("pool")): device
        for device in (old or {}).get("devices", [])
    }
    devices = []
    for index, (device, extra) in enumerate(found):
        answer = offered[index] if offered else {}
        kept = None if inputs.remeasure else old_devices.get((index, device.name, device.pool))
        devices.append(
            _device(inputs, given, device, extra, index, answer, kept or {}, same_boot, f"{where}, {device.name}")
        )
    return {
        "name": name,
        "cluster": str(given.get("cluster") or inputs.cluster),
        "endpoint": endpoint,
        "started_at": None,
        "protocol": probe.get("protocol") or inputs.build.get("protocol") or (old or {}).get("protocol"),
        "devices": devices,
        "rtt_ms": _first(
            check_number(given.get("rtt_ms"), f"{where}: rtt_ms"),
            None if inputs.remeasure else (old or {}).get("rtt_ms"),
        ),
        "link_mbps": _first(
            check_number(given.get("link_mbps"), f"{where}: link_mbps", positive=True), _link(inputs.facts, endpoint)
        ),
    }


def _endpoint(inputs: Inputs, given: Mapping[str, Any], where: str) -> str:
    if given.get("endpoint") is not None:
        return parse_endpoint(given["endpoint"], where)
    address, port = given.get("address") or inputs.mesh.get("address"), _first(given.get("port"), DEFAULT_PORT)
    if address is None:
        raise WorkerRecordError(f"{where}: no endpoint; give it an endpoint or an address, or the host a mesh address")
    return parse_endpoint(f"{address}:{port}", where)


def _link(facts: Mapping[str, Any] | None, endpoint: str | None) -> float | None:
    """Speed of the interface that has the endpoint's address; None for a tunnel, whose speed nobody knows."""
    address = (endpoint or "").partition(":")[0]
    listed = (facts or {}).get("links")
    links = [link for link in listed if isinstance(link, Mapping)] if isinstance(listed, list) else []
    # A tunnel names a speed that nobody measured (a TUN device says 10000), and is not there before the first run.
    real = [link for link in links if link.get("medium") not in ("virtual", "wireguard")]
    return next((link.get("speed_mbps") for link in real if address and link.get("address") == address), None)


def _chosen_devices(inputs: Inputs, given: Mapping[str, Any], where: str) -> list[tuple[Device, Mapping[str, Any]]]:
    """The instance's devices, each with the keys its declaration adds (none for a detected one)."""
    listed = given.get("devices") or []
    if not isinstance(listed, Sequence) or isinstance(listed, (str, bytes)):
        raise WorkerRecordError(f"{where}: devices is {listed!r}; it must be a list such as [CUDA0]")
    if not listed:
        backend = given.get("backend") or (inputs.facts or {}).get("backend") or "cpu"
        listed = [name for name, device in _detected(inputs, given).items() if device.backend == backend]
        if inputs.primary and "CPU" not in listed:
            listed = [*listed, "CPU"]
        if not listed:
            raise WorkerRecordError(
                f"{where}: this host has no device of backend {backend}; name its devices or another backend"
            )
    chosen: list[tuple[Device, Mapping[str, Any]]] = []
    for item in listed:
        if isinstance(item, Mapping):
            chosen.append((_declared(inputs, item, where), item))
            continue
        name = check_device_name(item, where)
        known = _detected(inputs, given)
        # llama.cpp compares device names without regard to case (ggml-backend-reg.cpp).
        device = next((device for key, device in known.items() if key.lower() == name.lower()), None)
        if device is None:
            raise WorkerRecordError(
                f"{where}: device {name} was not detected on this host (it has {', '.join(known) or 'none'}); "
                "correct its name, or mend the driver and detect again"
            )
        chosen.append((device, {}))
    return chosen


def _detected(inputs: Inputs, given: Mapping[str, Any]) -> dict[str, Device]:
    """The host's devices by the name they have inside this instance."""
    facts = inputs.facts
    if facts is None:
        raise WorkerRecordError(
            f"{inputs.host}: no facts; run host_facts first, or declare the devices of its instances"
        )
    try:
        devices = [_fact_device(entry, f"{inputs.host}: the facts") for entry in facts.get("devices") or []]
    except (TypeError, ValueError, AttributeError) as error:
        raise WorkerRecordError(
            f"{inputs.host}: the facts are not those of host_facts ({error}); run it again"
        ) from error
    environment = given.get("env") or {}
    if not isinstance(environment, Mapping):
        raise WorkerRecordError(f"{inputs.host}: env is {environment!r}; it must be a mapping of names to values")
    seen = seen_devices([device.to_dict() for device in devices], environment)
    return {name: Device(**device) for name, device in seen.items()}


def _fact_device(entry: Mapping[str, Any], where: str) -> Device:
    """A device of host_facts; keys it may lack, or have as null, are unknown."""
    known = {key: value for key, value in entry.items() if key in Device.__dataclass_fields__ and value is not None}
    sizes = {
        key: check_whole(entry.get(key), f"{where}: {key} of {entry.get('name')}", optional=True)
        for key in ("total", "free", "usable", "ceiling")
    }
    device = Device(**{**known, **sizes})
    if not all(isinstance(text, str) for text in (device.name, device.backend, device.kind, device.pool)):
        raise TypeError(f"device {device.name!r} has no text as name, backend, kind or pool")
    return replace(device, environment=dict(device.environment), warnings=tuple(device.warnings))


def _declared(inputs: Inputs, item: Mapping[str, Any], where: str) -> Device:
    """A device that its operator describes: `device` and either `usable`, or `total`, of which the reserve is kept."""
    name = check_device_name(item.get("device"), where)
    at = f"{where}, {name}"
    backend = item.get("backend") or backend_of(name)
    if backend is None:
        raise WorkerRecordError(f"{at}: no backend follows from the name; declare it")
    kind = str(
        item.get("kind") or ("system_ram" if backend == "cpu" else "unified" if backend == "metal" else "dedicated")
    )
    total = parse_size(item["total"], None, f"{at}: total") if item.get("total") is not None else None
    if item.get("usable") is not None:
        usable = parse_size(item["usable"], total, f"{at}: usable")
    elif total is not None:
        usable = usable_bytes(total, reserve_bytes(kind, total, "Darwin" if backend == "metal" else "Linux"))
    else:
        raise WorkerRecordError(f"{at}: declare its memory, as usable or as total ('24GiB')")
    machine = str((inputs.facts or {}).get("machine_id") or inputs.host)
    pool = gpu_pool(machine, name) if kind in ("dedicated", "carveout") else ram_pool(machine)
    return Device(
        name=name,
        backend=str(backend),
        description=str(item.get("description") or "declared"),
        kind=kind,
        pool=str(item.get("pool") or pool),
        total=total,
        free=None,
        usable=usable,
        source="declared",
    )


def _device(
    inputs: Inputs,
    given: Mapping[str, Any],
    device: Device,
    extra: Mapping[str, Any],
    index: int,
    answer: Mapping[str, Any],
    kept: Mapping[str, Any],
    same_boot: bool,
    where: str,
) -> dict[str, Any]:
    capacity, reported, idle = check_whole(device.usable, f"{where}: usable", optional=True), None, None
    if device.backend != "cpu" and device.source != "declared":
        reported, idle = _report(inputs, given, device, answer, where)
        reported = agreed(kept.get("reported"), reported, same_boot) if reported else kept.get("reported")
        capacity = reconcile(device, reported, None).usable
    usable = agreed(kept.get("usable"), capacity, same_boot)
    # An idle measurement belongs to the capacity it was made with.
    kept_idle = kept.get("idle_free") if usable == kept.get("usable") else None
    idle = agreed(kept_idle, idle, same_boot) if idle is not None else kept_idle
    limit = given.get("memory_limit")
    if usable is None:
        if limit is None:
            raise WorkerRecordError(f"{where}: how much memory it has is unknown; set memory_limit of the instance")
        usable = parse_size(limit, None, f"{where}: memory_limit")
    bounds = [usable] if limit is None else [usable, parse_size(limit, usable, f"{where}: memory_limit")]
    if idle is not None:
        bounds.append(idle)
    budget = min(bounds)
    if budget <= 0 and not inputs.primary:
        raise WorkerRecordError(
            f"{where}: nothing can be lent ({mib_text(usable)} usable); free memory on the host or leave the device out"
        )
    entry: dict[str, Any] = {
        "index": index,
        "device": device.name,
        "backend": device.backend,
        "pool": device.pool,
        "usable": usable,
        "reported": reported,
        "idle_free": idle,
        "budget": budget,
    }
    for key in ("bandwidth", "overhead_ms"):
        entry[key] = check_number(extra.get(key, given.get(key)), f"{where}: {key}", positive=key == "bandwidth")
    for key, least in (("priority", 0), ("min_units", 0), ("max_units", 0)):
        entry[key] = check_whole(extra.get(key, given.get(key)), f"{where}: {key}", least, optional=True)
    return entry


def _report(
    inputs: Inputs, given: Mapping[str, Any], device: Device, answer: Mapping[str, Any], where: str
) -> tuple[int | None, int | None]:
    """(total, free while idle) that llama.cpp reports: the smaller of the listing's and the worker's totals."""
    by_instance = inputs.listed if isinstance(inputs.listed, Mapping) else {}
    own = given.get("listed_devices") or by_instance.get(_name(given))
    listed = listing(own, f"{where}: listed_devices")
    if own is None and not isinstance(inputs.listed, Mapping) and not chooses(given.get("env") or {}):
        listed = listing(inputs.listed, f"{inputs.host}: listed_devices")
    totals, idle = [], None
    if listed is not None:
        entry = listed.get(device.name.lower())
        if entry is None or entry.total is None:
            names = ", ".join(found.name for found in listed.values()) or "none"
            raise WorkerRecordError(
                f"{where}: llama-server does not list it with memory (it lists {names}): its driver did not come up, "
                "or the build is for another backend"
            )
        totals.append(entry.total)
        inputs.warnings.extend(f"{inputs.host}: {text}" for text in reconcile(device, entry.total, None).warnings)
    if answer:
        total = check_whole(answer.get("total"), f"{where}: reported total")
        if not total:
            raise WorkerRecordError(
                f"{where}: the worker reports no memory for it: its driver did not come up; see the log"
            )
        totals.append(total)
        verdict = reconcile(
            device, total, check_whole(answer.get("free"), f"{where}: reported free") or 0, "the worker"
        )
        idle = verdict.free
        inputs.warnings.extend(f"{inputs.host}: {text}" for text in verdict.warnings)
    return min(totals, default=None), idle


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
