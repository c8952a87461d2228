# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Records of machines that nobody connected to: what the inventory declares of them, as worker_record would keep it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._records import DEFAULT_CLUSTER, parse_endpoint
from ansible_collections.llamafleet.rpc.plugins.module_utils._worker_args import DEFAULT_INSTANCES
from ansible_collections.llamafleet.rpc.plugins.module_utils._worker_record import (
    DEFAULT_PORT,
    Inputs,
    WorkerRecordError,
    build_record,
)

_DEFAULT_ADDRESS = "127.0.0.1"  # the default of llama_worker_address


def machine_record(host: str, devices: object, address: object = None) -> dict[str, Any]:
    """The record of ``host`` as a primary with ``devices``, declared as in worker_record (sizes in bytes or text).

    ``address`` is its IPv4 address in the mesh, if one is known. Raises a FleetError that names host and value.
    """
    if address is not None:
        parse_endpoint(f"{address}:{DEFAULT_PORT}", f"host {host}")
    return build_record(
        Inputs(
            host=host,
            cluster=DEFAULT_CLUSTER,
            instances=[{"name": "own", "devices": devices}],
            mesh={"address": address},
            primary=True,
        )
    )


def declared_records(hosts: Sequence[Mapping[str, Any]], primary: str | None = None) -> list[dict[str, Any]]:
    """Records of those ``hosts`` (inventory variables) that declare devices; the others are left out.

    What is declared of it as a primary (llama_primary_instances) counts before what is declared of it as a worker
    (llama_worker_devices_declared), because that has the memory for a primary's own buffers too. Where the ``primary``
    is known by name, ``hosts`` are one cluster: all others are its workers, which it must tell apart by their addresses
    (WorkerRecordError).
    """
    found = []
    for host in hosts:
        name = str(host["inventory_hostname"])
        cluster = str(host.get("llama_fleet_cluster") or DEFAULT_CLUSTER)
        address = host.get("llama_worker_address")
        own, lent = host.get("llama_primary_instances") or [], host.get("llama_worker_devices_declared") or []
        if primary in (None, name) and declares(own):
            mesh = {"address": address}
            found.append(build_record(Inputs(host=name, cluster=cluster, instances=own, mesh=mesh, primary=True)))
        elif lent:
            instances = host.get("llama_worker_instances") or DEFAULT_INSTANCES
            if not isinstance(instances, Sequence) or not isinstance(instances[0], Mapping):
                raise WorkerRecordError(
                    f"{name}: llama_worker_instances is {instances!r}; it must be a list of mappings"
                )
            first = {**instances[0], "address": address or _DEFAULT_ADDRESS, "devices": lent}
            found.append(build_record(Inputs(host=name, cluster=cluster, instances=[first])))
    if primary is not None:
        _check_addresses(found)
    return found


def _check_addresses(records: Sequence[Mapping[str, Any]]) -> None:
    """A loopback address means the host itself, so it tells no two hosts apart; real addresses _fleet has checked."""
    owners: dict[str, list[str]] = {}
    for record in records:
        for endpoint in {instance["endpoint"] for instance in record["instances"]} - {None}:
            if endpoint.startswith("127."):
                owners.setdefault(endpoint, []).append(record["host"])
    for endpoint, names in owners.items():
        if len(names) > 1:
            raise WorkerRecordError(
                f"{', '.join(sorted(names))}: declared workers, all at {endpoint}, so that a plan cannot "
                "tell them apart; give each llama_worker_address, the IPv4 address that it will have (any will do)"
            )


def declares(instances: object) -> bool:
    """Whether a device of ``instances`` is described, and not only named."""
    if not isinstance(instances, Sequence) or isinstance(instances, (str, bytes)):
        raise WorkerRecordError(f"llama_primary_instances is {instances!r}; it must be a list of instances")
    listed = [instance.get("devices") or [] for instance in instances if isinstance(instance, Mapping)]
    for devices in listed:
        if not isinstance(devices, list):
            raise WorkerRecordError(f"llama_primary_instances: devices is {devices!r}; it must be a list of devices")
    return any(isinstance(device, Mapping) for devices in listed for device in devices)
