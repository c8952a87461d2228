# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The inventory as a whole: which hosts form which cluster, and what is wrong with that before any host is touched."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._builds import parse_build
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError, kind_of, listed
from ansible_collections.llamafleet.rpc.plugins.module_utils._extra_args import checked_extra_args
from ansible_collections.llamafleet.rpc.plugins.module_utils._memory import ContextParams
from ansible_collections.llamafleet.rpc.plugins.module_utils._worker_args import (
    DEFAULT_INSTANCES,
    checked_address,
    checked_instances,
    checked_port,
    service_name,
)

DEFAULT_CLUSTER = "default"
DEFAULT_ADDRESS = "127.0.0.1"
DEFAULT_PRIMARY_PORT = 8080
#: Ports below are given to root alone (Linux, net.ipv4.ip_unprivileged_port_start).
FIRST_FREE_PORT = 1024
#: What the roles llama_fleet and llama_mesh do where nothing else is said.
DEFAULT_SCOPE, DEFAULT_MESH = "system", "wireguard"
#: The settings of a primary that its memory follows from, with the defaults of the role.
CONTEXT: Mapping[str, Any] = {
    "n_ctx": 4096,
    "n_parallel": 1,
    "type_k": "f16",
    "type_v": "f16",
    "n_batch": 2048,
    "n_ubatch": 512,
    "flash_attn": "auto",
    "kv_unified": True,
    "swa_full": False,
}
FLEET_GROUP = "llama_fleet"
PRIMARY_GROUP = "llama_primary"
WORKER_GROUP = "llama_workers"

_CLUSTER = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
#: Names that are the roles' to give. What a role keeps for itself has two underscores.
_VARIABLE = re.compile(r"llama_(build|fleet|mesh|model|preflight|primary|worker)_[a-z0-9]\w*")


#: Law 6. The source is chosen once, for all hosts (by the first of them, whose settings then would count for all).
_ONE_FOR_ALL = ("llama_fleet_build", "llama_build_source", "llama_build_commit", "llama_build_sha256")


def fleet_problems(hosts: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong with the fleet, one sentence each that says where and what to do; empty when nothing is.

    ``hosts``: the inventory variables of every member of the groups llama_primary and llama_workers, of which
    inventory_hostname, group_names and the llama_* variables of connection-free decisions are read.
    """
    problems: list[str] = []
    misnamed: dict[str, list[str]] = {}
    outside: dict[str, set[str]] = {}
    clusters: dict[str, dict[str, list[str]]] = {}
    endpoints: dict[str, str] = {}
    builds: dict[str, dict[str, list[str]]] = {variable: {} for variable in _ONE_FOR_ALL}
    for host in hosts:
        name = _name_of(host)
        groups = set(host.get("group_names") or [])
        cluster = str(host.get("llama_fleet_cluster") or DEFAULT_CLUSTER)
        if not _CLUSTER.fullmatch(cluster):
            misnamed.setdefault(cluster, []).append(name)
            continue
        for variable, values in builds.items():
            values.setdefault(str(host.get(variable) or ""), []).append(name)
        members = clusters.setdefault(cluster, {PRIMARY_GROUP: [], WORKER_GROUP: []})
        for group in (PRIMARY_GROUP, WORKER_GROUP):
            if group in groups:
                members[group].append(name)
        if not groups & {PRIMARY_GROUP, WORKER_GROUP}:
            outside[name] = groups - {FLEET_GROUP}
        if PRIMARY_GROUP in groups:
            problems += _primary_problems(host, name, cluster, endpoints)
        if WORKER_GROUP in groups:
            problems += _worker_problems(host, name, cluster, clusters, endpoints)
    for cluster, names in misnamed.items():
        problems.append(f"{listed(names)}: llama_fleet_cluster {cluster!r} must be 1 to 31 of a-z, 0-9 and '-'")
    if outside:
        groups = set().union(*outside.values())
        problems.append(
            f"{listed(list(outside))}: in neither {PRIMARY_GROUP} nor {WORKER_GROUP}"
            f"{f', but in {listed(sorted(groups))}' if groups else ''}; put each host into one of them"
        )
    problems += _cluster_problems({name: members for name, members in clusters.items() if any(members.values())})
    for variable, values in builds.items():
        if len(values) > 1:
            said = "; ".join(f"{value or 'the default'}: {listed(names)}" for value, names in sorted(values.items()))
            problems.append(
                f"{variable} differs between hosts ({said}). Every host must run the same build: set it for all"
            )
    for tag in builds["llama_fleet_build"]:
        try:
            parse_build(tag) if tag else None
        except FleetError as error:
            problems.append(f"llama_fleet_build: {error}")
    return problems


def unread_variables(hosts: Iterable[Mapping[str, Any]], known: Collection[str]) -> list[str]:
    """Variables of hosts that are named like a role's and are none of ``known``: a sentence each, with what is near."""
    found: dict[str, list[str]] = {}
    for host in hosts:
        for variable in host:
            if _VARIABLE.fullmatch(str(variable)) and variable not in known:
                found.setdefault(str(variable), []).append(_name_of(host))
    sentences = []
    for variable, names in sorted(found.items()):
        near = difflib.get_close_matches(variable, known, 1, 0.8)
        meant = f"; did you mean {near[0]}?" if near else ""
        sentences.append(f"{variable} of {listed(names)} is read by no role{meant}")
    return sentences


def host_list(hosts: object) -> list[Any]:
    """What a filter was given as the variables of hosts; FleetError when that is no list of them."""
    if isinstance(hosts, (str, Mapping)) or not isinstance(hosts, Iterable):
        raise FleetError(
            f"the input is a {kind_of(hosts)}, not a list of host variables; "
            "use groups['llama_fleet'] | map('extract', hostvars)"
        )
    return list(hosts)


def _name_of(host: Mapping[str, Any]) -> str:
    if not isinstance(host, Mapping) or not host.get("inventory_hostname"):
        raise FleetError(
            f"{host!r:.60} is not the variables of a host: it has no inventory_hostname; "
            "use groups['llama_fleet'] | map('extract', hostvars)"
        )
    return str(host["inventory_hostname"])


def _primary_problems(host: Mapping[str, Any], name: str, cluster: str, endpoints: dict[str, str]) -> list[str]:
    found: list[str] = []
    address = str(host.get("llama_primary_host") or DEFAULT_ADDRESS)
    try:
        port = checked_port(host.get("llama_primary_port", DEFAULT_PRIMARY_PORT), f"{name}: llama_primary_port")
        # A worker on a loopback address is on the primary's own machine.
        key = f"{cluster} {DEFAULT_ADDRESS}:{port}"
        other = endpoints.setdefault(key, f"the API of {name}")
        # That of a second primary of the cluster, which has to leave it, is another machine's.
        if not other.startswith("the API of"):
            found.append(f"{name}: llama_primary_port {port} is that of {other}; choose another")
    except FleetError as error:
        found.append(str(error))
    try:
        checked_extra_args(host.get("llama_primary_extra_args") or [])
        ContextParams(**{option: _context_value(host, option) for option in CONTEXT if _given(host, option)})
    except FleetError as error:
        found.append(f"{name}: {error}")
    guarded = host.get("llama_primary_api_key_file") or _yes(host, "llama_primary_unauthenticated")
    if not address.startswith("127.") and not guarded:
        found.append(
            f"{name}: llama_primary_host {address} would serve others without a key. Set llama_primary_api_key_file, "
            "or llama_primary_unauthenticated: true if that is meant"
        )
    return found


def _given(host: Mapping[str, Any], option: str) -> bool:
    return option == "n_ctx" or host.get(f"llama_primary_{option}") is not None


def _yes(host: Mapping[str, Any], variable: str) -> bool:
    return str(host.get(variable) or "").lower() in ("true", "yes", "1", "on")


def _context_value(host: Mapping[str, Any], option: str) -> Any:
    """A setting of the context as it is planned with; from the command line numbers come as text."""
    value = host.get(f"llama_primary_{option}", CONTEXT[option])
    if isinstance(CONTEXT[option], bool):
        return _yes(host, f"llama_primary_{option}")
    if isinstance(CONTEXT[option], int) and isinstance(value, str) and value.lstrip("-").isdigit():
        return int(value)
    return value


def _worker_problems(
    host: Mapping[str, Any],
    name: str,
    cluster: str,
    clusters: dict[str, dict[str, list[str]]],
    endpoints: dict[str, str],
) -> list[str]:
    found: list[str] = []
    try:
        address = checked_address(host.get("llama_worker_address") or DEFAULT_ADDRESS, f"{name}: llama_worker_address")
        instances = checked_instances(host.get("llama_worker_instances") or DEFAULT_INSTANCES, name)
    except FleetError as error:
        return [str(error)]
    meshed = (
        not host.get("llama_worker_address")
        and (host.get("llama_fleet_scope") or DEFAULT_SCOPE) == "system"
        and (host.get("llama_mesh_mode") or DEFAULT_MESH) != "none"
    )
    for instance in instances:
        serves = str(instance.get("cluster") or cluster)
        if serves != cluster:
            clusters.setdefault(serves, {PRIMARY_GROUP: [], WORKER_GROUP: []})[WORKER_GROUP].append(name)
        endpoint = f"{address}:{instance['port']}"
        # A loopback address means this host, so the same one may stand on hosts of different clusters; where a mesh
        # gives each host an address of its own, on any.
        key = f"{serves} {endpoint}" if address.startswith("127.") else endpoint
        key = f"{name} {endpoint}" if meshed else key
        owner = f"{name} (instance {instance['name']})"
        if instance["port"] < FIRST_FREE_PORT:
            found.append(
                f"{owner}: port {instance['port']} is for root alone, and services run without; take 1024 or more"
            )
        if key in endpoints:
            found.append(
                f"endpoint {endpoint} is given twice, by {endpoints[key]} and {owner}; "
                "a worker serves one primary, so give each its own llama_worker_address and port"
            )
        endpoints[key] = owner
    return found


def _cluster_problems(clusters: Mapping[str, Mapping[str, list[str]]]) -> list[str]:
    if not clusters:
        return [
            f"the groups {PRIMARY_GROUP} and {WORKER_GROUP} are empty; "
            "add one primary and its workers to the inventory, below a group llama_fleet"
        ]
    found: list[str] = []
    for cluster, members in sorted(clusters.items()):
        primaries, workers = members[PRIMARY_GROUP], members[WORKER_GROUP]
        if not primaries:
            found.append(
                f"cluster {cluster} has workers ({listed(workers)}) but no primary; add one host to {PRIMARY_GROUP}"
            )
        elif len(primaries) > 1:
            found.append(
                f"cluster {cluster} has {len(primaries)} primaries ({listed(primaries)}); a cluster has one: "
                "move the others to clusters of their own with llama_fleet_cluster"
            )
        for both in sorted(set(primaries) & set(workers)):
            found.append(
                f"{both} is primary and worker of cluster {cluster}; the primary uses its own devices without a "
                f"worker: remove it from {WORKER_GROUP}"
            )
    return found


def machine_problems(hosts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Host -> what is wrong with the machine behind it; hosts that ``host_facts`` has not looked at are left out.

    Several inventory hosts may be one machine where their services and endpoints differ. Containers of one machine,
    which may share its identity, are told apart by their addresses: they have services and endpoints of their own.
    Machines that were copied with their identity (machine-id) would be planned as one memory.
    """
    machines: dict[str, list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]] = {}
    for host in hosts:
        facts = (host.get("ansible_facts") or {}).get("llamafleet")
        if facts:
            machines.setdefault(str(facts["machine_id"]), []).append((_name_of(host), host, facts))
    found: dict[str, str] = {}
    for machine, members in machines.items():
        if len({facts.get("boot_id") for _name, _host, facts in members}) > 1:
            names = [name for name, _host, _facts in members]
            for name in names:
                found[name] = (
                    f"{listed(names)} are different machines with one identity ({machine}), as copies of a disk "
                    "are, and their memory would count as one. Give each its own: remove /etc/machine-id, run "
                    "systemd-machine-id-setup, and reboot"
                )
            continue
        taken: dict[tuple[frozenset[str], str], str] = {}
        for name, host, facts in members:
            addresses = frozenset(str(link.get("address")) for link in facts.get("links") or [])
            own = _on_machine(host)
            clash = [what for what in own if (addresses, what) in taken]
            if clash:
                found[name] = (
                    f"{name} and {taken[addresses, clash[0]]} are one machine ({machine}), and both would have "
                    f"{' and '.join(clash)}. Take one of them out of the inventory, or give its instances names and "
                    "ports of their own in llama_worker_instances"
                )
            for what in own:
                taken.setdefault((addresses, what), name)
    return found


def _on_machine(host: Mapping[str, Any]) -> list[str]:
    """What a machine has once: the services of a host, and the addresses that they listen on."""
    name, groups = _name_of(host), set(host.get("group_names") or [])
    own = str(host.get("llama_fleet_cluster") or DEFAULT_CLUSTER)
    found: list[str] = []
    if PRIMARY_GROUP in groups:
        address = host.get("llama_primary_host") or DEFAULT_ADDRESS
        port = host.get("llama_primary_port") or DEFAULT_PRIMARY_PORT
        found += [f"the service {service_name('llama-server', own)}", f"the endpoint {address}:{port}"]
    if WORKER_GROUP in groups:
        address = host.get("llama_worker_address") or DEFAULT_ADDRESS
        for instance in checked_instances(host.get("llama_worker_instances") or DEFAULT_INSTANCES, name):
            unit = service_name("llama-rpc", str(instance.get("cluster") or own), instance["name"])
            found += [f"the service {unit}", f"the endpoint {address}:{instance['port']}"]
    return found


def limit_problems(hosts: Sequence[Mapping[str, Any]], limit: Sequence[str]) -> list[str]:
    """Clusters of which ``limit`` holds a worker but not the primary, which has to stop while its workers change."""
    found: list[str] = []
    for cluster, members in sorted(topology(hosts).items()):
        primary, workers = members["primary"], set(members["workers"]) & set(limit)
        if workers and primary not in limit:
            found.append(
                f"cluster {cluster}: {listed(sorted(workers))} cannot change without the primary {primary}, "
                f"which is outside of the limit; run again with --limit '{','.join([*limit, str(primary)])}'"
            )
    return found


def topology(hosts: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Cluster -> ``{primary: name or None, workers: [names], ports: {name: [TCP ports]}}``; hosts have no problems."""
    clusters: dict[str, dict[str, Any]] = {}
    for host in hosts:
        name, groups = _name_of(host), set(host.get("group_names") or [])
        own = str(host.get("llama_fleet_cluster") or DEFAULT_CLUSTER)
        if PRIMARY_GROUP in groups:
            cluster = clusters.setdefault(own, {"primary": None, "workers": [], "ports": {}})
            cluster["primary"] = name
            port = checked_port(host.get("llama_primary_port") or DEFAULT_PRIMARY_PORT, f"{name}: llama_primary_port")
            cluster["ports"].setdefault(name, []).append(port)
        if WORKER_GROUP in groups:
            for instance in checked_instances(host.get("llama_worker_instances") or DEFAULT_INSTANCES, name):
                serves = str(instance.get("cluster") or own)
                cluster = clusters.setdefault(serves, {"primary": None, "workers": [], "ports": {}})
                if name not in cluster["workers"]:
                    cluster["workers"].append(name)
                cluster["ports"].setdefault(name, []).append(instance["port"])
    return clusters


def worker_identities(records: Sequence[Mapping[str, Any]], cluster: str) -> dict[str, Any]:
    """Endpoint -> identity of the process behind it (boot id and start), for the workers of ``cluster``.

    A primary whose workers have other identities than when it started has lost them (law 9 of the design).
    """
    found: dict[str, Any] = {}
    for record in records:
        for instance in record.get("instances") or []:
            if instance.get("endpoint") and str(instance.get("cluster") or record.get("cluster")) == cluster:
                found[str(instance["endpoint"])] = instance.get("started_at")
    return found
