# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From the records of a cluster's members to the ordered list of devices that a plan may use.

Records come from other machines, so they are data: every value is checked here, and a message names the host, the
value and the remedy. The order of the result is the order in which llama.cpp b11434 numbers and lists devices
(src/llama.cpp, llama_prepare_model_devices): the primary's CPU takes the first blocks, RPC devices follow in the order
of ``--rpc``, the primary's own GPUs come last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError, kind_of

RECORD_SCHEMA = 1
DEFAULT_CLUSTER = "default"
_DEVICE_NAME = re.compile(r"[A-Za-z]+[0-9]*")
_OCTET = r"(?:0|[1-9][0-9]{0,2})"
_ENDPOINT = re.compile(rf"({_OCTET})\.({_OCTET})\.({_OCTET})\.({_OCTET}):([1-9][0-9]{{0,4}})")
_PRIMARY_CPU = re.compile(r"CPU[0-9]*")
_LARGEST = (1 << 63) - 1  # what llama.cpp, and JSON elsewhere, can hold
_SMALLEST = 1e-9  # of a rate; below, times of a plan would have no end
_ENDPOINT_REMEDY = "write it as IPv4:port, for example 10.0.0.2:18711"


class RecordError(FleetError):
    """A record, or a set of records, that cannot be planned with; the message names host, value and remedy."""


def parse_endpoint(value: object, where: str) -> str:
    """``value`` if it is ``IPv4:port`` with a port of 1 to 65535, else RecordError. ``where`` names its owner.

    llama.cpp b11434 neither trims nor checks: names and IPv6 addresses abort the primary or the worker, ``a:1:2`` is
    read as port 1, and one server under two names hangs the start for ever (measured).
    """
    if not isinstance(value, str):
        raise RecordError(f"{where}: endpoint is {value!r}, not text; {_ENDPOINT_REMEDY}")
    match = _ENDPOINT.fullmatch(value)
    if match and value[:2] != "0.":  # 0.0.0.0 is a place to listen, not an address
        *octets, port = (int(part) for part in match.groups())
        if max(octets) <= 255 and port <= 65535:
            return str(value)
    raise RecordError(f"{where}: endpoint {value!r} {_endpoint_fault(value)}; {_ENDPOINT_REMEDY}")


def _endpoint_fault(text: str) -> str:
    """What is wrong with an endpoint that did not match, in words."""
    if text != "".join(text.split()):
        return "contains a blank"
    if "://" in text:
        return "has a scheme, and llama.cpp takes none"
    if "," in text:
        return "contains a comma: one endpoint per instance, no trailing comma"
    if "[" in text or "::" in text:
        return "is an IPv6 address, and the worker speaks IPv4 only"
    if text.count(":") > 1:
        return "has more than one colon"
    host, colon, port = text.partition(":")
    if not colon or not port:
        return "has no port"
    if re.fullmatch(r"[0-9]+", port) and not 1 <= int(port) <= 65535:
        return f"has port {port}, outside 1 to 65535"
    if re.fullmatch(r"[0-9.]+", host):
        return "is not a dotted IPv4 address with a decimal port"
    return "is not IPv4:port: names are not resolved, use the mesh address of the host"


def is_primary_cpu(endpoint: object, device: str) -> bool:
    """True for the primary's own CPU: a device of the plan that is never listed in ``-dev`` (law 1)."""
    return endpoint is None and _PRIMARY_CPU.fullmatch(device) is not None


def check_device_name(value: object, where: str) -> str:
    """A llama.cpp device name such as ``CUDA0``; it becomes part of an argument list, so it is checked (law 16)."""
    if not isinstance(value, str) or not _DEVICE_NAME.fullmatch(value):
        raise RecordError(f"{where}: device is {value!r}; a device is called letters and a number, for example CUDA0")
    return str(value)


def check_whole(value: object, where: str, least: int = 0, optional: bool = False) -> int | None:
    """A whole number of at least ``least``; None only where ``optional``. true and false are no numbers."""
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise RecordError(f"{where} is {value!r}, a {kind_of(value)}; it must be a whole number{_unquoted(value)}")
    if value < least:
        raise RecordError(f"{where} is {value}; it must be at least {least} (unknown is null)")
    if value > _LARGEST:
        raise RecordError(f"{where} is {_short(value)}; it must be at most {_LARGEST}")
    return int(value)


def check_number(value: object, where: str, positive: bool = False) -> float | int | None:
    """A finite number of at least 0 (above 0 if ``positive``), or None for unknown."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RecordError(f"{where} is {value!r}, a {kind_of(value)}; it must be a number or null{_unquoted(value)}")
    if not 0 <= value <= _LARGEST or (positive and value < _SMALLEST):
        bound = "above 0" if positive else "at least 0"
        raise RecordError(f"{where} is {_short(value)}; it must be {bound}, and finite (unknown is null)")
    return int(value) if isinstance(value, int) else float(value)


def _unquoted(value: object) -> str:
    """The remedy for a number that came as text: from -e name=8192, in quotes, or as 9e11, which YAML has no number."""
    if not isinstance(value, str):
        return ""
    try:
        float(value)
    except ValueError:
        return ""
    return ", and this is text: write it in digits without quotes, or pass it through int or float"


def fleet_devices(records: object, cluster: str = DEFAULT_CLUSTER) -> list[dict[str, Any]]:
    """Plan devices of ``cluster`` out of ``records`` (a list of worker records, or a mapping whose values are those).

    Each: ``{host, endpoint, index, n_endpoint_devices, device, pool, usable, pool_usable, bandwidth, rtt_ms,
    overhead_ms, priority, min_units, max_units}``, sizes in bytes; ``usable`` is the record's budget (its usable
    where there is none, and never more than that), ``pool_usable`` the largest ``usable`` within the pool.
    ``link_mbps`` is handed on where a record has it. Speeds that a record leaves open are those that the primary of the
    cluster has measured with the same build (calibrate), if it has. Order: primary's CPU, RPC devices (as listed, then
    instance, then index), primary's GPUs.
    """
    if not isinstance(cluster, str) or not cluster:
        raise RecordError(f"cluster is {cluster!r}; it must be the name of a cluster, for example {DEFAULT_CLUSTER}")
    first: list[dict[str, Any]] = []
    remote: list[dict[str, Any]] = []
    last: list[dict[str, Any]] = []
    owners: dict[str, str] = {}
    ports: dict[tuple[str, str], str] = {}
    roles: dict[str, str] = {}
    primaries: dict[str, str] = {}
    for host, instance in _instances(records, cluster):
        where = f"host {host}, instance {instance.get('name', 'default')}"
        endpoint = instance.get("endpoint")
        _check_role(roles, primaries, host, "primary" if endpoint is None else "worker", cluster)
        if endpoint is not None:
            endpoint = parse_endpoint(endpoint, where)
            _check_unique(owners, ports, host, endpoint, where)
        for device in _devices(instance, host, endpoint, where):
            if endpoint is not None:
                remote.append(device)
            elif is_primary_cpu(endpoint, device["device"]):
                first.append(device)
            else:
                last.append(device)
    if len(first) > 1:
        names = ", ".join(device["device"] for device in first)
        raise RecordError(f"host {first[0]['host']}: the primary's record has more than one CPU ({names}); keep one")
    ordered = first + remote + last
    _add_pools(ordered)
    _add_measured(ordered, _measured(records))
    return ordered


def _instances(records: object, cluster: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """(host, instance) of every instance that serves ``cluster``, in the order of the records."""
    if isinstance(records, Mapping):
        named: list[tuple[str, object]] = [(f"record of {key}", value) for key, value in records.items()]
    elif isinstance(records, Sequence) and not isinstance(records, (str, bytes)):
        named = [(f"record {number}", value) for number, value in enumerate(records)]
    else:
        kind = kind_of(records)
        raise RecordError(f"records are a {kind}; give a list of worker records, or a mapping of them")
    for label, record in named:
        if not isinstance(record, Mapping):
            raise RecordError(f"{label} is {_short(record)}; gather it with worker_record, or leave the host out")
        host = record.get("host")
        if not isinstance(host, str) or not host:
            raise RecordError(f"{label}: host is {host!r}; it must be the inventory name of the host")
        schema = record.get("schema", RECORD_SCHEMA)
        if schema != RECORD_SCHEMA or isinstance(schema, bool):
            raise RecordError(
                f"host {host}: the record has schema {schema!r}, this release reads {RECORD_SCHEMA}; gather it again"
            )
        instances = record.get("instances")
        if not isinstance(instances, Sequence) or isinstance(instances, (str, bytes)):
            raise RecordError(f"host {host}: instances is {_short(instances)}, not a list; gather the record again")
        for instance in instances:
            if not isinstance(instance, Mapping):
                raise RecordError(f"host {host}: an instance is {_short(instance)}; it must be a mapping")
            serves = instance.get("cluster")
            serves = record.get("cluster") if serves is None else serves
            if (DEFAULT_CLUSTER if serves is None else serves) == cluster:
                yield str(host), instance


def _measured(records: object) -> Iterable[Mapping[str, Any]]:
    """What primaries have measured of the devices of their clusters with the build that they run."""
    listed = records.values() if isinstance(records, Mapping) else records
    for record in listed if isinstance(listed, Iterable) else ():
        measured = record.get("measured") if isinstance(record, Mapping) else None
        if isinstance(measured, Mapping) and measured.get("build") == record.get("build"):
            found = measured.get("devices")
            if found is not None and (not isinstance(found, Sequence) or isinstance(found, (str, bytes))):
                raise RecordError(
                    f"host {record.get('host')}: measured devices are {_short(found)}, not a list; run calibrate again"
                )
            yield from (one for one in found or () if isinstance(one, Mapping))


def _add_measured(devices: Sequence[dict[str, Any]], measured: Iterable[Mapping[str, Any]]) -> None:
    """Fill in what was measured where a record says nothing. A link carries at most what was measured of it."""
    known = {tuple(str(one.get(key)) for key in _MEASURED_OF): one for one in measured}
    for device in devices:
        found = known.get(tuple(str(device[key]) for key in _MEASURED_OF))
        if found is None:
            continue
        where = f"host {device['host']}, device {device['device']}: measured"
        for key in ("bandwidth", "overhead_ms", "rtt_ms"):
            if device[key] is None:
                device[key] = check_number(found.get(key), f"{where} {key}", positive=key == "bandwidth")
        link = check_number(found.get("link_mbps"), f"{where} link_mbps", positive=True)
        if link is not None:
            device["link_mbps"] = min(link, device.get("link_mbps") or link)


_MEASURED_OF = ("host", "endpoint", "index", "device")


def _check_role(roles: dict[str, str], primaries: dict[str, str], host: str, role: str, cluster: str) -> None:
    """One primary in a cluster, and it is no worker of its own cluster."""
    if roles.setdefault(host, role) != role:
        raise RecordError(
            f"host {host} is primary and worker of cluster {cluster}: a primary uses its own devices without RPC; "
            "take it out of one of the two groups"
        )
    if role == "primary" and primaries.setdefault(cluster, host) != host:
        raise RecordError(
            f"cluster {cluster} has two primaries, {primaries[cluster]} and {host} (both have devices without an "
            "endpoint); give one of them another llama_fleet_cluster"
        )


def _check_unique(
    owners: dict[str, str], ports: dict[tuple[str, str], str], host: str, endpoint: str, where: str
) -> None:
    """No endpoint twice, and no worker under two addresses: llama.cpp then hangs at the start (measured on b11434)."""
    if endpoint in owners:
        raise RecordError(
            f"endpoint {endpoint} is used twice, by {owners[endpoint]} and by {where}; a worker serves one client, "
            "give each instance its own port"
        )
    owners[endpoint] = where
    port = endpoint.rpartition(":")[2]
    other = ports.setdefault((host, port), endpoint)
    if other != endpoint:
        raise RecordError(
            f"{where}: {other} and {endpoint} are two addresses with one port on the same host, so perhaps one worker "
            "under two names; give each instance its own port"
        )


def _devices(instance: Mapping[str, Any], host: str, endpoint: str | None, where: str) -> list[dict[str, Any]]:
    """The plan devices of one instance, by index; pool_usable still holds the device's own capacity."""
    listed = instance.get("devices")
    if not isinstance(listed, Sequence) or isinstance(listed, (str, bytes)) or not listed:
        raise RecordError(f"{where}: devices is {_short(listed)}; it must be a list of at least one device")
    found: list[dict[str, Any]] = []
    for device in listed:
        if not isinstance(device, Mapping):
            raise RecordError(f"{where}: a device is {_short(device)}; it must be a mapping")
        found.append(_device(device, instance, host, endpoint, where))
    found.sort(key=_index)
    if [_index(device) for device in found] != list(range(len(found))):
        indices = ", ".join(str(device["index"]) for device in found)
        raise RecordError(
            f"{where}: the device indices are {indices}, but an endpoint numbers its {len(found)} devices from 0 "
            "without gaps; list every device that the worker was started with"
        )
    for device in found:
        device["n_endpoint_devices"] = len(found)
    return found


def _index(device: Mapping[str, Any]) -> int:
    return int(device["index"])


def _device(
    device: Mapping[str, Any], instance: Mapping[str, Any], host: str, endpoint: str | None, where: str
) -> dict[str, Any]:
    name = check_device_name(device.get("device"), where)
    at = f"{where}, device {name}"
    usable = check_whole(device.get("usable"), f"{at}: usable", optional=True)
    if usable is None:
        raise RecordError(f"{at}: usable memory is unknown; detect it again, or use llama_worker_devices_declared")
    budget = check_whole(device.get("budget"), f"{at}: budget", optional=True)
    pool = device.get("pool")
    if pool is not None and (not isinstance(pool, str) or not pool):
        raise RecordError(f"{at}: pool is {pool!r}; it must be the name of the physical memory, or null")
    rtt = device.get("rtt_ms", instance.get("rtt_ms"))
    found: dict[str, Any] = {
        "host": host,
        "endpoint": endpoint,
        "index": check_whole(device.get("index"), f"{at}: index"),
        "n_endpoint_devices": 0,
        "device": name,
        "pool": pool,
        "usable": usable if budget is None else min(budget, usable),
        "pool_usable": usable,
        "bandwidth": check_number(device.get("bandwidth"), f"{at}: bandwidth", positive=True),
        "rtt_ms": check_number(rtt, f"{at}: rtt_ms"),
        "overhead_ms": check_number(device.get("overhead_ms"), f"{at}: overhead_ms"),
        "priority": check_whole(device.get("priority"), f"{at}: priority", optional=True),
        "min_units": check_whole(device.get("min_units"), f"{at}: min_units", optional=True),
        "max_units": check_whole(device.get("max_units"), f"{at}: max_units", optional=True),
    }
    link = device.get("link_mbps", instance.get("link_mbps"))
    if link is not None:
        found["link_mbps"] = check_number(link, f"{at}: link_mbps", positive=True)
    return found


def _add_pools(devices: Sequence[dict[str, Any]]) -> None:
    """Give every device the capacity of its pool: the largest capacity that any device of the pool has."""
    capacity: dict[str, int] = {}
    for device in devices:
        if device["pool"] is not None:
            capacity[device["pool"]] = max(capacity.get(device["pool"], 0), device["pool_usable"])
    for device in devices:
        if device["pool"] is not None:
            device["pool_usable"] = capacity[device["pool"]]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
