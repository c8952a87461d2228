# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is handed on of a placement: an inventory fragment that other playbooks read, and lines for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import listed
from ansible_collections.llamafleet.rpc.plugins.module_utils._place_hosts import Host
from ansible_collections.llamafleet.rpc.plugins.module_utils._report import mib, table

if TYPE_CHECKING:
    from ansible_collections.llamafleet.rpc.plugins.module_utils._place_models import Cluster

_DECLARED = ("device", "backend", "pool", "usable", "bandwidth", "overhead_ms", "priority", "min_units", "max_units")
_NAMED = 12  # hosts that a line names one by one


def fragment(clusters: Sequence[Cluster]) -> dict[str, Any]:
    """An inventory with the groups llama_fleet, llama_primary and llama_workers, and the cluster of each host in them.

    Primaries get the context that was planned, and what the model's ``variables`` say. A machine that nobody connected
    to keeps its declared devices, in the role that it has now, so that plan.yml plans the same without it.
    """
    primaries: dict[str, Any] = {}
    workers: dict[str, Any] = {}
    for cluster in clusters:
        options = {f"llama_primary_{key}": _plain(value) for key, value in cluster.wish.options.items()}
        primaries[cluster.primary.name] = {
            "llama_fleet_cluster": cluster.name,
            **options,
            **_own(cluster.primary),
            **_plain(cluster.wish.variables),
        }
        for host in cluster.workers:
            workers[host.name] = {"llama_fleet_cluster": cluster.name, **_lent(host)}
    return {
        "llama_fleet": {
            "children": {
                "llama_primary": {"hosts": dict(sorted(primaries.items()))},
                "llama_workers": {"hosts": dict(sorted(workers.items()))},
            }
        }
    }


def _own(host: Host) -> dict[str, Any]:
    if not host.declared:
        return {}
    devices = host.leads["instances"][0]["devices"]
    return {"llama_primary_instances": [{"name": "own", "devices": [_declaration(device) for device in devices]}]}


def _lent(host: Host) -> dict[str, Any]:
    if not host.declared:
        return {}
    devices = [device for instance in host.lends["instances"] for device in instance["devices"]]
    address = {"llama_worker_address": host.address} if host.address else {}
    return {**address, "llama_worker_devices_declared": [_declaration(device) for device in devices]}


def _declaration(device: Mapping[str, Any]) -> dict[str, Any]:
    """A device as an inventory declares it."""
    found = {key: _plain(device[key]) for key in _DECLARED if device.get(key) is not None}
    if device.get("budget") is not None:
        found["usable"] = min(int(device["budget"]), int(device["usable"]))
    return found


def _plain(value: Any) -> Any:
    """``value`` without what Ansible wraps around it, so that it can be written as YAML."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str) else value


def report_lines(result: Mapping[str, Any]) -> list[str]:
    """The placement as text; sizes are MiB."""
    head = ("cluster", "primary", "workers", "tokens/s", "ms/token", "least headroom MiB")
    rows = [
        (
            cluster["cluster"],
            cluster["primary"],
            _names(cluster["workers"]),
            f"{cluster['plan']['tokens_per_s']:.1f}",
            f"{cluster['plan']['ms_per_token']:.1f}",
            mib(cluster["headroom"]),
        )
        for cluster in result["clusters"]
    ]
    bound = result["bound"]
    lines = table(head, rows) if rows else []
    lines += [
        f"{bound['placed']} of {bound['asked']} copies placed; by the memory of all hosts together, no placement has "
        f"more than {bound['replicas']}",
        f"{bound['predicted_tokens_per_s']:.1f} tokens/s predicted for all clusters together; by the bandwidth of all "
        f"hosts, with links that cost nothing, no placement has more than {bound['tokens_per_s']:.1f}",
    ]
    lines += [f"not placed: {each['replicas']} x {each['model']}: {each['reason']}" for each in result["unplaced"]]
    reasons: dict[str, list[str]] = {}
    for each in result["unused"]:
        reasons.setdefault(each["why"], []).append(each["host"])
    lines += [f"unused: {_names(names)}: {why}" for why, names in reasons.items()]
    return lines + [f"warning: {text}" for text in result["warnings"]]


def _names(names: Sequence[str]) -> str:
    return listed(names, _NAMED) if names else "-"
