# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The hosts of a fleet as material for clusters: each as a primary and as a worker, and which of them are one machine.

A record says what a host was when it was made, a primary (its devices have no endpoint) or a worker. Here it may become
either: as a primary it has all its devices, as a worker those it lends, which is all of a worker's record and of a
primary's the GPUs (a worker that lends its CPU beside a GPU is as slow as the CPU). A GPU that has its memory in RAM
brings a CPU that holds no layers, so that the own buffers of a primary are counted there. Endpoints of hosts whose
address is not known yet, or is a loopback one, are stand-ins: a mesh gives each host an address of its own later on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._declared import machine_record
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import ram_pool
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError, kind_of
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan_input import (
    DEFAULT_OVERHEAD_MS,
    DEFAULT_PRIORITY,
    DEFAULT_RTT_MS,
    default_bandwidth,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._records import fleet_devices, is_primary_cpu
from ansible_collections.llamafleet.rpc.plugins.module_utils._worker_record import DEFAULT_PORT

CLUSTER = "placed"  # of all records here: which cluster a host served before does not matter


class PlaceError(FleetError):
    """Hosts or models that cannot be placed as they are given; the message names the value and the remedy."""


@dataclass(frozen=True)
class Lane:
    """A device as a place for layers: bytes, bytes/s, and the ms that a token costs beside reading.

    ``cpu``: the CPU of a primary, which also holds the primary's own buffers.
    """

    device: str
    cpu: bool
    usable: int
    pool: str
    pool_usable: int
    bandwidth: float
    hop_ms: float
    most: int | None


@dataclass(frozen=True)
class Host:
    """One host. ``machine`` is the same for hosts that share memory.

    ``leads``, ``lends``: its record as a primary and as a worker, with the ``lanes`` of each; ``known``: the lanes of
    the record as it came. ``address`` is its IPv4 address outside of itself, if known; ``declared``: nobody connected.
    """

    name: str
    machine: str
    may_lead: bool
    priority: int
    leads: Mapping[str, Any]
    lends: Mapping[str, Any]
    leads_lanes: tuple[Lane, ...]
    lends_lanes: tuple[Lane, ...]
    known: tuple[Lane, ...]
    address: str | None
    declared: bool


def read_hosts(records: object, primaries: object = None) -> list[Host]:
    """The hosts of ``records`` by name, in an order that does not depend on that of the records.

    ``records``: worker records as fleet_devices takes them, or ``{host, devices, address}`` with devices declared as in
    worker_record; a list, or a mapping whose values are those. ``primaries``: the names of hosts that may be primary,
    None for all. Raises PlaceError or RecordError.
    """
    if isinstance(records, Mapping):
        records = list(records.values())
    if not isinstance(records, Sequence) or isinstance(records, (str, bytes)):
        raise PlaceError(f"records are a {kind_of(records)}; give a list of worker records, or a mapping of them")
    if not records:
        raise PlaceError("there are no records; gather them with worker_record, or declare the devices of the hosts")
    found: dict[str, Mapping[str, Any]] = {}
    devices: dict[str, list[dict[str, Any]]] = {}
    for number, given in enumerate(records):
        record = _relabelled(given)
        held = fleet_devices({number: record}, CLUSTER)
        name = str(record["host"])
        if not held:
            raise PlaceError(f"host {name}: its record has no instances; gather it again, or leave the host out")
        if name in found:
            raise PlaceError(f"host {name} has two records; give one of each host, the newest")
        found[name], devices[name] = record, held
    leaders = _leaders(primaries, found)
    machines = _machines(devices)
    sizes = _pool_sizes(devices.values())
    return [
        _host(found[name], devices[name], position, machines[name], name in leaders, sizes)
        for position, name in enumerate(sorted(found))
    ]


def _relabelled(given: Any) -> Any:
    """The record as one of CLUSTER; what has devices but no instances becomes a record first. Errors come later."""
    if not isinstance(given, Mapping):
        return given
    if "instances" not in given and "devices" in given:
        name = given.get("host")
        if not isinstance(name, str) or not name:
            raise PlaceError(f"a host is called {name!r}; give the inventory name of each host as host")
        given = machine_record(str(name), given["devices"], given.get("address"))
    instances = given.get("instances")
    if isinstance(instances, Sequence) and not isinstance(instances, (str, bytes)):
        instances = [{**item, "cluster": CLUSTER} if isinstance(item, Mapping) else item for item in instances]
    return {**given, "cluster": CLUSTER, "instances": instances}


def _leaders(primaries: object, found: Mapping[str, Any]) -> set[str]:
    if primaries is None:
        return set(found)
    if not isinstance(primaries, Sequence) or isinstance(primaries, (str, bytes)):
        raise PlaceError(f"primaries is {primaries!r}; it must be a list of host names, or absent for any host")
    unknown = sorted({str(name) for name in primaries} - set(found))
    if unknown:
        raise PlaceError(f"primaries names {', '.join(unknown)}, of which there is no record; correct the name")
    return {str(name) for name in primaries}


def _machines(devices: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """Host -> the first of the hosts that it shares memory with, itself included."""
    root = {name: name for name in sorted(devices)}

    def find(name: str) -> str:
        while root[name] != name:
            name = root[name]
        return name

    owner: dict[str, str] = {}
    for name in root:
        for device in devices[name]:
            if device["pool"] is not None:
                first, second = sorted((find(owner.setdefault(device["pool"], name)), find(name)))
                root[second] = first
    return {name: find(name) for name in root}


def _pool_sizes(devices: Iterable[Sequence[Mapping[str, Any]]]) -> dict[str, int]:
    """Bytes of each pool: the most that any of its devices has, on whichever host it was seen."""
    sizes: dict[str, int] = {}
    for device in (device for held in devices for device in held):
        if device["pool"] is not None:
            sizes[device["pool"]] = max(sizes.get(device["pool"], 0), device["pool_usable"])
    return sizes


def _host(
    record: Mapping[str, Any],
    held: Sequence[Mapping[str, Any]],
    position: int,
    machine: str,
    may_lead: bool,
    sizes: Mapping[str, int],
) -> Host:
    name = str(record["host"])
    was_primary = held[0]["endpoint"] is None
    raw = [device for instance in record["instances"] for device in instance["devices"]]
    address = _address(record, held, was_primary)
    stand_in = f"198.18.{position // 256}.{position % 256}"  # RFC 2544: never the address of a host
    own: dict[str, Any] = {}
    for device in sorted(raw, key=lambda device: -int(device["usable"])):  # instances may share a device
        own.setdefault(str(device["device"]), device)
    leads = [own[device] for device in sorted(own)]
    shared = next((device for device in leads if str(device.get("pool")).endswith(ram_pool(""))), None)
    if shared and not any(is_primary_cpu(None, device["device"]) for device in leads):
        memory = {key: shared.get(key) for key in ("pool", "usable", "budget")}
        leads.append({"device": "CPU", "backend": "cpu", "max_units": 0, **memory})
    if not was_primary:  # what it costs over RPC says nothing about the device itself
        leads = [{**device, "overhead_ms": None} for device in leads]
    if was_primary:
        lent = [device for device in leads if not is_primary_cpu(None, device["device"])] or leads
        instances = [
            {
                "name": "default",
                "endpoint": f"{address or stand_in}:{DEFAULT_PORT}",
                "devices": _numbered([{**device, "overhead_ms": None} for device in lent]),
            }
        ]
    else:
        instances = [
            {**item, "endpoint": item["endpoint"] if address else f"{stand_in}:{item['endpoint'].rpartition(':')[2]}"}
            for item in record["instances"]
        ]
    as_primary = _record(name, [{"name": "own", "endpoint": None, "devices": _numbered(leads)}])
    as_worker = _record(name, instances)
    return Host(
        name=name,
        machine=machine,
        may_lead=may_lead,
        priority=min(DEFAULT_PRIORITY if d["priority"] is None else d["priority"] for d in held),
        leads=as_primary,
        lends=as_worker,
        leads_lanes=_lanes(fleet_devices([as_primary], CLUSTER), sizes),
        lends_lanes=_lanes(fleet_devices([as_worker], CLUSTER), sizes),
        known=_lanes(held, sizes),
        address=address,
        declared=record.get("machine_id") is None,
    )


def _address(record: Mapping[str, Any], held: Sequence[Mapping[str, Any]], was_primary: bool) -> str | None:
    """The address that others reach the host at; None if that is not known."""
    if was_primary:
        mesh = record.get("mesh")
        found = mesh.get("address") if isinstance(mesh, Mapping) else None
    else:
        found = held[0]["endpoint"].partition(":")[0]
    return None if found is None or str(found).startswith("127.") else str(found)


def _numbered(devices: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**device, "index": index} for index, device in enumerate(devices)]


def _record(name: str, instances: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"host": name, "cluster": CLUSTER, "instances": [{**item, "cluster": CLUSTER} for item in instances]}


def _lanes(devices: Iterable[Mapping[str, Any]], sizes: Mapping[str, int]) -> tuple[Lane, ...]:
    """The devices that may hold layers, the fastest first."""
    lanes = []
    for device in devices:
        remote = device["endpoint"] is not None
        rtt, overhead = device["rtt_ms"], device["overhead_ms"]
        hop = (DEFAULT_RTT_MS if rtt is None else rtt) if remote else 0
        hop += (DEFAULT_OVERHEAD_MS if remote else 0) if overhead is None else overhead
        pool = device["pool"] or f"{device['host']}/{device['endpoint']}/{device['device']}"
        lanes.append(
            Lane(
                device=device["device"],
                cpu=is_primary_cpu(device["endpoint"], device["device"]),
                usable=device["usable"],
                pool=pool,
                pool_usable=sizes.get(pool, device["usable"]),
                bandwidth=device["bandwidth"] or default_bandwidth(device["device"]),
                hop_ms=hop,
                most=device["max_units"],
            )
        )
    return tuple(sorted(lanes, key=lambda lane: (-lane.bandwidth, lane.device)))
