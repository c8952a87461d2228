# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who is in the mesh, at which address, and who peers with whom over which path: computed once for the whole inventory.

A member is every host of a cluster, in this run or not. What a host in this run has (its public key, its links, the
peers that it knows) comes from the module mesh_node; of a host outside of it we take what was read from it, else what
the others still know of it. So a run that is limited to some hosts never makes another one lose a peer, and a host that
left the inventory is in no list any more. Nothing here holds a private or preshared key.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._fleet import (
    DEFAULT_ADDRESS,
    DEFAULT_CLUSTER,
    WORKER_GROUP,
    topology,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._worker_args import (
    DEFAULT_INSTANCES,
    checked_address,
    checked_instances,
    checked_port,
)

MODES = ("wireguard", "existing", "none")
SHAPES = ("star", "full")
#: Bytes that WireGuard adds at most: 40 (IPv6) + 8 (UDP) + 32 (header and tag). wg-quick takes 80 too.
OVERHEAD = 80
#: A NAT forgets a UDP mapping after 30 s or more; 25 is what wg(8) recommends.
NAT_KEEPALIVE = 25

#: Bridges that containers and virtual machines make on every host alike: equal subnets, but no common wire.
_PRIVATE_BRIDGE = re.compile(r"(?:docker|br-|virbr|veth|cni|flannel|podman|lxcbr|lxdbr|incusbr|kube|cali)")
_KEY = re.compile(r"[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=")
_INTERFACE = re.compile(r"[A-Za-z0-9_=+.-]{1,15}")


_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class MeshError(FleetError):
    """A mesh that cannot work, or a host that cannot join it; the message names the hosts, the value and the remedy."""


@dataclass(frozen=True)
class Member:
    """One host: what the inventory says of it, and its ``node`` as mesh_node returned it (None: not known).

    A worker that is not ``managed`` has no part in the mesh. ``fresh`` is true for a host of this run. Its node holds
    ``{interface, public_key, key_changed, address, links: [{interface, address, prefix, mtu, speed_mbps, medium}],
    routes: [{to, interface}], default_address, peers: {host: {public_key, address, endpoint}}}``; MTUs are in bytes.
    """

    name: str
    fresh: bool
    node: Mapping[str, Any] | None
    address: str | None = None
    endpoint: str | None = None
    nat: bool = False
    underlay: str | None = None
    ports: tuple[tuple[int, str], ...] = ()
    managed: bool = True


@dataclass(frozen=True)
class Path:
    """How one host reaches another below the mesh: the other's address, and the MTU that both links carry (bytes)."""

    address: str | None
    mtu: int | None = None
    wireless: tuple[str, ...] = field(default=())


def checked_key(value: object, what: str) -> str:
    """``value`` as a WireGuard key in base64. The value itself is never part of the message: it may be a secret."""
    if not isinstance(value, str) or not _KEY.fullmatch(value):
        raise MeshError(f"{what} is no WireGuard key: 44 characters of base64 for 32 bytes, as `wg genpsk` prints them")
    return str(value)


def checked_interface(value: object) -> str:
    """``value`` as an interface name that wg-quick takes."""
    if not isinstance(value, str) or not _INTERFACE.fullmatch(value):
        raise MeshError(f"interface {value!r} must be 1 to 15 letters, digits or any of _ = + . -")
    return str(value)


def checked_network(value: object) -> ipaddress.IPv4Network:
    """``value`` as the IPv4 network of the mesh: workers speak IPv4 only, so its inside is IPv4 (B5-13)."""
    try:
        network = ipaddress.IPv4Network(str(value))
    except ValueError as error:
        raise MeshError(
            f"llama_mesh_network {value!r} is no IPv4 network ({error}); write it as 10.98.0.0/20. "
            "Workers speak IPv4 only"
        ) from None
    if network.prefixlen > 30:
        raise MeshError(f"llama_mesh_network {network} holds no two hosts; give a prefix of 30 or shorter, such as /20")
    return network


def checked_endpoint(value: object, default_port: int, what: str) -> str:
    """``address``, ``address:port`` or ``[IPv6]:port`` with its port. The underlay may be IPv6; names are refused.

    wg(8) resolves a name once, when the interface starts, and without a name server the start of wg-quick@ hangs.
    """
    text = str(value)
    match = re.fullmatch(r"\[([0-9a-fA-F:.]+)\](?::([0-9]+))?|([^:\[\]]+)(?::([0-9]+))?|([0-9a-fA-F:.]+)", text)
    try:
        host = ipaddress.ip_address((match and (match.group(1) or match.group(3) or match.group(5))) or "")
    except ValueError:
        raise MeshError(
            f"{what}: {text!r} is no address with an optional port, such as 203.0.113.7:51820. Names are not taken, "
            "for they are resolved only once; a host whose address changes needs llama_mesh_nat: true and no endpoint"
        ) from None
    port = checked_port((match and (match.group(2) or match.group(4))) or default_port, what)
    return f"[{host}]:{port}" if host.version == 6 else f"{host}:{port}"


def check_disjoint(prefixes: Mapping[str, Iterable[str]]) -> None:
    """No address belongs to two peers: allowed IPs are a routing table, the last peer would get all (B5-03)."""
    nets = sorted(
        ((ipaddress.ip_network(prefix), host) for host, given in prefixes.items() for prefix in given),
        key=lambda item: (item[0].version, int(item[0].network_address), item[0].prefixlen),
    )
    for position, (net, host) in enumerate(nets):
        # Sorted by their first address, so a net that holds others stands directly before them.
        for other, owner in nets[position + 1 :]:
            if other.version != net.version or int(other.network_address) > int(net.broadcast_address):
                break
            if owner != host:
                raise MeshError(
                    f"{host} and {owner} share the mesh address {other}; give one of them another llama_mesh_address"
                )


# ------------------------------------------------------------------------------------------------------ addresses


def assign_addresses(
    names: Iterable[str],
    network: ipaddress.IPv4Network,
    stated: Mapping[str, str],
    kept: Mapping[str, str],
) -> dict[str, str]:
    """Host -> mesh address, for all ``names``. Stated ones first, then those that hosts have already, then new ones.

    A new host takes the address that its name hashes to, or the next free one: it does not depend on the order of the
    inventory, and no host ever moves because another came or went. A kept address outside of ``network``, or stated for
    another host, is given up.
    """
    members = sorted(set(names))
    first, size = int(network.network_address) + 1, network.num_addresses - 2
    if len(members) > size:
        raise MeshError(
            f"llama_mesh_network {network} holds {size} hosts and the fleet has {len(members)}; give a larger network"
        )
    owners: dict[str, str] = {}
    found: dict[str, str] = {}
    for name in members:
        if name not in stated:
            continue
        address = checked_address(stated[name], f"{name}: llama_mesh_address")
        if not _usable(address, network):
            raise MeshError(f"{name}: llama_mesh_address {address} is no host address of llama_mesh_network {network}")
        if address in owners:
            raise MeshError(f"{owners[address]} and {name} have the same llama_mesh_address {address}; change one")
        owners[address], found[name] = name, address
    for name in members:
        address = kept.get(name, "")
        owner = owners.get(address)
        if name in found or owner in stated or not _usable(address, network):
            continue
        if owner is not None:
            raise MeshError(
                f"{owner} and {name} both have the mesh address {address} (a copied disk, perhaps); "
                "state llama_mesh_address for one of them"
            )
        owners[address], found[name] = name, address
    for name in members:
        if name in found:
            continue
        slot = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % size
        while str(ipaddress.IPv4Address(first + slot)) in owners:
            slot = (slot + 1) % size
        address = str(ipaddress.IPv4Address(first + slot))
        owners[address], found[name] = name, address
    return found


def _usable(address: str, network: ipaddress.IPv4Network) -> bool:
    try:
        value = ipaddress.IPv4Address(address)
    except ValueError:
        return False
    return value in network and value not in (network.network_address, network.broadcast_address)


def overlaps(network: ipaddress.IPv4Network, node: Mapping[str, Any]) -> str | None:
    """What of a host's own networks collides with the mesh, in words; None when nothing does.

    A connected network that overlaps, or a route to a part of the mesh, would draw its traffic out of the tunnel.
    A route that is wider than the mesh does no harm: the mesh's own is more specific.
    """
    for link in node.get("links") or []:
        own = ipaddress.IPv4Network(f"{link['address']}/{link['prefix']}", strict=False)
        if link["interface"] != node.get("interface") and own.overlaps(network):
            return f"the network {own} of its interface {link['interface']}"
    for route in node.get("routes") or []:
        to = ipaddress.IPv4Network(route["to"], strict=False)
        if route["interface"] != node.get("interface") and to.subnet_of(network):
            return f"its route to {to} by {route['interface']}"
    return None


def free_network(wanted: ipaddress.IPv4Network, nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """A private network of the same size that collides on none of the hosts, to be proposed in a message."""
    for base in ("10.98.0.0", "10.77.0.0", "172.29.0.0", "172.22.0.0", "192.168.208.0", "10.233.0.0"):
        prefix = max(wanted.prefixlen, 20)
        network = ipaddress.IPv4Network(f"{base}/{prefix}")
        if not any(overlaps(network, node) for node in nodes):
            return str(network)
    return None


# ---------------------------------------------------------------------------------------------------------- paths


def underlay_links(member: Member) -> list[Mapping[str, Any]]:
    """The links of a host that may carry the mesh. Its llama_mesh_underlay (a network or an interface) narrows them."""
    links = [
        link
        for link in (member.node or {}).get("links") or []
        if link["interface"] != (member.node or {}).get("interface") and link["medium"] != "wireguard"
    ]
    if not member.underlay:
        return [link for link in links if not _PRIVATE_BRIDGE.match(link["interface"])]
    if "/" in member.underlay:
        try:
            wanted = ipaddress.IPv4Network(member.underlay, strict=False)
        except ValueError:
            raise MeshError(f"{member.name}: llama_mesh_underlay {member.underlay!r} is no IPv4 network") from None
        chosen = [link for link in links if ipaddress.IPv4Address(link["address"]) in wanted]
    else:
        chosen = [link for link in links if link["interface"] == member.underlay]
    if member.node is not None and not chosen:
        there = ", ".join(f"{link['interface']} {link['address']}/{link['prefix']}" for link in links) or "none"
        raise MeshError(
            f"{member.name}: llama_mesh_underlay {member.underlay} matches none of its links ({there}); correct it"
        )
    return chosen


def find_path(here: Member, there: Member, port: int) -> Path:
    """How ``here`` reaches ``there``: its stated endpoint, else the fastest common subnet, else its default address.

    Behind NAT (llama_mesh_nat) a host has no default address that others could use. Wireless is the last choice.
    """
    ours, theirs = underlay_links(here), underlay_links(there)
    if there.endpoint is not None:
        return Path(checked_endpoint(there.endpoint, port, f"{there.name}: llama_mesh_endpoint"), _least_mtu(ours))
    best: tuple[tuple[bool, int, str], Mapping[str, Any], Mapping[str, Any]] | None = None
    for our in ours:
        subnet = _subnet(our["address"], our["prefix"])
        for their in theirs:
            if _subnet(their["address"], their["prefix"]) != subnet or their["address"] == our["address"]:
                continue
            wired = "wireless" not in (our["medium"], their["medium"])
            speed = min(our["speed_mbps"] or 0, their["speed_mbps"] or 0)
            rank = (wired, speed, subnet)
            if best is None or rank > best[0]:
                best = (rank, our, their)
    if best is not None:
        _rank, our, their = best
        wireless = [
            f"{who.name} ({link['interface']})"
            for who, link in ((here, our), (there, their))
            if link["medium"] == "wireless"
        ]
        return Path(f"{their['address']}:{port}", _least_mtu([our, their]), tuple(wireless))
    default = (there.node or {}).get("default_address")
    if there.underlay and theirs:
        default = theirs[0]["address"]
    if there.nat or default is None:
        return Path(None, _least_mtu(ours))
    return Path(f"{default}:{port}", _least_mtu(ours))


@lru_cache(maxsize=4096)
def _subnet(address: str, prefix: int) -> str:
    return str(ipaddress.IPv4Network(f"{address}/{prefix}", strict=False))


def _least_mtu(links: Sequence[Mapping[str, Any]]) -> int | None:
    known = [int(link["mtu"]) for link in links if link.get("mtu")]
    return min(known) if known else None


def pairs(clusters: Mapping[str, Mapping[str, Any]], shape: str) -> list[tuple[str, str]]:
    """Pairs of hosts that peer, each once. ``star``: a worker with its primary. ``full``: all of a cluster."""
    found: dict[tuple[str, str], None] = {}
    for _name, cluster in sorted(clusters.items()):
        members = [name for name in [cluster["primary"], *cluster["workers"]] if name]
        if shape == "star":
            couples = [(cluster["primary"], worker) for worker in cluster["workers"] if cluster["primary"]]
        else:
            couples = [(one, other) for at, one in enumerate(members) for other in members[at + 1 :]]
        for one, other in couples:
            if one != other:
                found[(min(one, other), max(one, other))] = None
    return sorted(found)


# ----------------------------------------------------------------------------------------------------------- plan


def members_of(hosts: Sequence[Mapping[str, Any]], known: Mapping[str, Any]) -> dict[str, Member]:
    """The hosts of the inventory as members. ``known``: nodes of hosts outside of this run, by name."""
    found: dict[str, Member] = {}
    for host in hosts:
        name = str(host["inventory_hostname"])
        registered = host.get("llama_mesh__node")
        fresh = registered.get("node") if isinstance(registered, Mapping) else None
        cluster = str(host.get("llama_fleet_cluster") or DEFAULT_CLUSTER)
        instances = (
            checked_instances(host.get("llama_worker_instances") or DEFAULT_INSTANCES, name)
            if WORKER_GROUP in set(host.get("group_names") or [])
            else []
        )
        found[name] = Member(
            managed=_flag(host, "llama_worker_managed", True),
            name=name,
            fresh=fresh is not None,
            node=fresh if fresh is not None else known.get(name),
            address=_text(host.get("llama_mesh_address")),
            endpoint=_text(host.get("llama_mesh_endpoint")),
            nat=_flag(host, "llama_mesh_nat", False),
            underlay=_text(host.get("llama_mesh_underlay")),
            ports=tuple((int(entry["port"]), str(entry.get("cluster") or cluster)) for entry in instances),
        )
    return found


def _flag(host: Mapping[str, Any], key: str, default: bool) -> bool:
    """A variable that is true or false; an inventory in INI form, and -e, give it as text."""
    value = host.get(key)
    word = str(default if value is None else value).strip().lower()
    if word not in (*_YES, *_NO):
        raise MeshError(f"{host['inventory_hostname']}: {key} is {value!r}; it must be true or false")
    return word in _YES


def _text(value: Any) -> str | None:
    return str(value) if value else None


def plan_mesh(
    hosts: Sequence[Mapping[str, Any]],
    mode: str = "wireguard",
    network: object = "10.98.0.0/20",
    port: int = 51820,
    shape: str = "star",
    known: Mapping[str, Any] | None = None,
    preshared: Iterable[str] = (),
) -> dict[str, Any]:
    """The mesh of the inventory: ``{mode, network, prefix, hosts: {name: Self}, unknown: [names], warnings: [text]}``.

    ``hosts`` are inventory variables with the node of each host of this run (see members_of). Self, for hosts of this
    run only: ``{address, peers: [{host, public_key, address, endpoint, keepalive, path_mtu, link, fresh}],
    ports: [{port, source}], endpoints: [{address, port}], primaries: {cluster: {host, address}}}``. ``unknown`` are
    hosts that a host of this run should peer with while nobody knows their key: read them and call again with
    ``known``. ``preshared`` are the names of links that have a preshared key (never the keys): the worker in a star,
    "a,b" in alphabetical order in full.
    """
    if mode not in MODES or shape not in SHAPES:
        raise MeshError(f"mode {mode!r} and shape {shape!r} must be of {', '.join(MODES)} and of {', '.join(SHAPES)}")
    clusters = topology(hosts)
    members = members_of(hosts, known or {})
    warnings: list[str] = []
    unknown: set[str] = set()
    peers: dict[str, list[dict[str, Any]]] = {name: [] for name in members}
    if mode == "wireguard":
        net = checked_network(network)
        _check_nodes(members, net)
        joined = [name for name, who in members.items() if who.managed]
        stated = {name: str(members[name].address) for name in joined if members[name].address}
        addresses = assign_addresses(joined, net, stated, _kept(members))
        check_disjoint({name: [address + "/32"] for name, address in addresses.items()})
        addresses = {**_given_addresses(hosts, members, "none"), **addresses}
        prefix = net.prefixlen
        couples = [pair for pair in pairs(clusters, shape) if set(pair) <= set(joined)]
        links = {couple: _link_name(couple, clusters, shape) for couple in couples}
        stray = sorted(set(map(str, preshared)) - set(links.values()))
        if stray:
            raise MeshError(
                f"llama_mesh_preshared_keys has a key for {', '.join(stray)}, but no tunnel is called that; "
                f"name {'a worker' if shape == 'star' else 'both hosts as in a,b'}"
            )
        peers, unknown = _peers(members, links, addresses, port, warnings)
        warnings += _stale_keys(members, peers)
    else:
        addresses, prefix = _given_addresses(hosts, members, mode), 32
    selves = {
        name: {
            "address": addresses.get(name),
            "peers": peers[name],
            **_doors(who, clusters, members, addresses, mode),
        }
        for name, who in members.items()
        if who.fresh
    }
    return {
        "mode": mode,
        "network": str(network) if mode == "wireguard" else None,
        "prefix": prefix,
        "hosts": selves,
        "unknown": sorted(unknown),
        "warnings": warnings,
    }


def _kept(members: Mapping[str, Member]) -> dict[str, str]:
    """Addresses that hosts have already: as their peers know them, or, which counts more, as they do themselves."""
    found: dict[str, str] = {}
    for who in members.values():
        for name, peer in ((who.node or {}).get("peers") or {}).items():
            found.setdefault(name, str(peer["address"]))
    for name, who in members.items():
        address = (who.node or {}).get("address")
        if address:
            found[name] = str(address)
    return {name: address for name, address in found.items() if name in members}


def _check_nodes(members: Mapping[str, Member], network: ipaddress.IPv4Network) -> None:
    nodes = [who.node for who in members.values() if who.node is not None]
    owners: dict[str, str] = {}
    for name, who in members.items():
        if who.node is None:
            continue
        collision = overlaps(network, who.node)
        if collision:
            proposal = free_network(network, nodes)
            hint = f", for example {proposal}, which is free on all hosts of this run" if proposal else ""
            raise MeshError(f"{name}: llama_mesh_network {network} overlaps with {collision}; choose another one{hint}")
        key = who.node.get("public_key")
        if key and owners.setdefault(checked_key(key, f"{name}: public key"), name) != name:
            raise MeshError(
                f"{owners[key]} and {name} have the same WireGuard key, so one was copied from the other; remove "
                f"its .key and .conf file in /etc/wireguard on {name}, and run again. If they are one machine, make "
                "them instances of one host"
            )


def _peers(
    members: Mapping[str, Member],
    links: Mapping[tuple[str, str], str],
    addresses: Mapping[str, str],
    port: int,
    warnings: list[str],
) -> tuple[dict[str, list[dict[str, Any]]], set[str]]:
    peers: dict[str, list[dict[str, Any]]] = {name: [] for name in members}
    unknown: set[str] = set()
    for (one, other), link in links.items():
        a, b = members[one], members[other]
        if not (a.fresh or b.fresh):
            continue
        ahead, back = find_path(a, b, port), find_path(b, a, port)
        both_known = a.node is not None and b.node is not None
        if both_known and ahead.address is None and back.address is None:
            raise MeshError(
                f"{one} and {other} cannot reach each other: they share no subnet and neither has an endpoint. Set "
                "llama_mesh_endpoint for one of them (an address and UDP port that its router forwards), or, with "
                "llama_mesh_topology full, use star, where only the primary needs one"
            )
        for wireless in dict.fromkeys([*ahead.wireless, *back.wireless]):
            warnings.append(
                f"{wireless}: the mesh runs over Wi-Fi, which costs several ms for every token; use a cable, or name a "
                "wired network with llama_mesh_underlay"
            )
        for here, there, path, reverse in ((a, b, ahead, back), (b, a, back, ahead)):
            if here.fresh:
                entry = _peer(here, there, path, reverse, addresses, link)
                if entry is None:
                    unknown.add(there.name)
                else:
                    peers[here.name].append(entry)
    return peers, unknown


def _link_name(couple: tuple[str, str], clusters: Mapping[str, Mapping[str, Any]], shape: str) -> str:
    """Name of a tunnel, under which its preshared key stands, if it has one: the worker in a star, else both hosts."""
    if shape == "full":
        return ",".join(couple)
    one, other = couple
    return other if any(c["primary"] == one and other in c["workers"] for c in clusters.values()) else one


def _peer(
    here: Member, there: Member, path: Path, reverse: Path, addresses: Mapping[str, str], link: str
) -> dict[str, Any] | None:
    """How ``here`` writes down ``there``, as it was known if it was not read; None when nobody knows its key."""
    kept = ((here.node or {}).get("peers") or {}).get(there.name) or {}
    known = there.node is not None and (there.node.get("public_key") is not None or there.fresh)
    if not known and not kept:
        return None
    node = there.node or {}
    return {
        "host": there.name,
        "public_key": node.get("public_key") if known else kept["public_key"],
        "address": addresses[there.name],
        "endpoint": path.address if known else kept.get("endpoint"),
        # Who cannot be called has to call, and to keep the way open.
        "keepalive": NAT_KEEPALIVE if (known and reverse.address is None) or (not known and here.nat) else None,
        "path_mtu": path.mtu,
        "link": link,
        "fresh": there.fresh,
    }


def _stale_keys(members: Mapping[str, Member], peers: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Hosts outside of this run that still have the old key of one of this run (B5-07).

    A key is new when the host itself says so, or when another one knows the host by another key (it was set up again).
    """
    known: dict[str, dict[str, str]] = {}
    for holder, who in members.items():
        for name, peer in ((who.node or {}).get("peers") or {}).items():
            known.setdefault(name, {})[holder] = str(peer["public_key"])
    found = []
    for name, who in sorted(members.items()):
        key = (who.node or {}).get("public_key")
        if not who.fresh or key is None or who.node is None:
            continue
        if not who.node.get("key_changed") and set(known.get(name, {}).values()) <= {key}:
            continue
        outside = [str(peer["host"]) for peer in peers[name] if not peer["fresh"]]
        stale = [other for other in outside if known.get(name, {}).get(other) != key]
        if stale:
            found.append(
                f"{name} has a new key, and {', '.join(stale)}, outside of this run, still "
                f"{'has' if len(stale) == 1 else 'have'} its old one; run again without --limit"
            )
    return found


def _given_addresses(hosts: Sequence[Mapping[str, Any]], members: Mapping[str, Member], mode: str) -> dict[str, str]:
    """Addresses of a mesh that is not ours: those of the interface (existing), or as the inventory says (none)."""
    found: dict[str, str] = {}
    for host in hosts:
        who = members[str(host["inventory_hostname"])]
        if mode == "existing":
            given = who.address or (who.node or {}).get("address")
        else:
            given = who.address or host.get("llama_worker_address") or DEFAULT_ADDRESS
        if given:
            found[who.name] = checked_address(given, f"{who.name}: llama_mesh_address")
    return found


def _doors(
    who: Member,
    clusters: Mapping[str, Mapping[str, Any]],
    members: Mapping[str, Member],
    addresses: Mapping[str, str],
    mode: str,
) -> dict[str, Any]:
    """The ports that a worker opens, each with the one address that may come in; the endpoints a primary calls."""
    ports: list[dict[str, Any]] = []
    endpoints: list[dict[str, Any]] = []
    primaries: dict[str, dict[str, Any]] = {}
    for port, cluster in who.ports:
        primary = clusters[cluster]["primary"]
        source = _source(who, members.get(primary), addresses, mode) if primary else None
        ports.append({"port": port, "source": source})
        own = addresses.get(who.name, "")
        primaries[cluster] = {"host": primary, "address": own if own.startswith("127.") else source}
    for name, served in sorted(clusters.items()):
        if served["primary"] != who.name:
            continue
        for worker in served["workers"]:
            for port, serves in members[worker].ports:
                if serves == name and addresses.get(worker):
                    endpoints.append({"address": addresses[worker], "port": port})
    return {"ports": ports, "endpoints": endpoints, "primaries": primaries}


def _source(who: Member, primary: Member | None, addresses: Mapping[str, str], mode: str) -> str | None:
    """The address that a worker sees its primary come from; None when that cannot be known."""
    if primary is None:
        return None
    if mode != "none" or primary.address:
        return addresses.get(primary.name)
    if addresses[who.name].startswith("127."):
        return None
    path = find_path(who, primary, 1)
    return path.address.rsplit(":", 1)[0] if path.address else None
