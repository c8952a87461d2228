# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The mesh of an inventory: addresses, peers, paths, and who loses access when."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import time
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._mesh import (
    MeshError,
    assign_addresses,
    check_disjoint,
    checked_endpoint,
    checked_key,
    checked_network,
    members_of,
    plan_mesh,
)
from hypothesis import given
from hypothesis import strategies as st

NET = ipaddress.IPv4Network("10.99.0.0/20")


def key(name: str) -> str:
    """A well-formed public key that is the same for the same name."""
    raw = bytearray(hashlib.sha256(name.encode()).digest())
    return base64.b64encode(bytes(raw)).decode()


def link(address: str, interface: str = "eth0", **more: Any) -> dict[str, Any]:
    own, prefix = address.split("/")
    return {
        "interface": interface,
        "address": own,
        "prefix": int(prefix),
        "mtu": 1500,
        "speed_mbps": 1000,
        "medium": "wired",
        **more,
    }


def node(name: str, *links: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "interface": "wg-llama",
        "public_key": key(name),
        "key_changed": False,
        "address": None,
        "mtu": None,
        "links": list(links),
        "routes": [],
        "default_address": links[0]["address"] if links else None,
        "peers": {},
        **more,
    }


def host(name: str, group: str, its_node: dict[str, Any] | None = None, **variables: Any) -> dict[str, Any]:
    found = {"inventory_hostname": name, "group_names": [group, "llama_fleet"], **variables}
    if its_node is not None:
        found["llama_mesh__node"] = {"node": its_node}
    return found


def fleet(workers: int, **variables: Any) -> list[dict[str, Any]]:
    """A primary n0 and workers n1.. on one LAN."""
    return [
        host(
            f"n{i}",
            "llama_workers" if i else "llama_primary",
            node(f"n{i}", link(f"192.168.{i // 250}.{i % 250 + 1}/16")),
            **variables,
        )
        for i in range(workers + 1)
    ]


def names(plan: dict[str, Any], name: str) -> list[str]:
    return [peer["host"] for peer in plan["hosts"][name]["peers"]]


def after(hosts: list[dict[str, Any]], plan: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What each host knows once the plan was carried out: its node of the next run."""
    found = {}
    for entry in hosts:
        name, own = entry["inventory_hostname"], plan["hosts"][entry["inventory_hostname"]]
        peers = {
            peer["host"]: {field: peer[field] for field in ("public_key", "address", "endpoint")}
            for peer in own["peers"]
        }
        found[name] = dict(entry["llama_mesh__node"]["node"], address=own["address"], mtu=1420, peers=peers)
    return found


# ------------------------------------------------------------------------------------------------------ addresses

HOST_NAMES = st.sets(st.from_regex(r"[a-z][a-z0-9-]{0,12}", fullmatch=True), min_size=1, max_size=40)


@given(HOST_NAMES)
def test_addresses_are_unique_host_addresses_of_the_network(members: set[str]) -> None:
    found = assign_addresses(members, NET, {}, {})
    assert set(found) == members
    assert len(set(found.values())) == len(members)
    assert all(ipaddress.IPv4Address(address) in NET for address in found.values())
    assert not {str(NET.network_address), str(NET.broadcast_address)} & set(found.values())


@given(HOST_NAMES, HOST_NAMES, st.sampled_from(["10.99.0.0/20", "10.99.0.0/25"]))
def test_no_host_moves_when_others_come_and_go(before: set[str], later: set[str], network: str) -> None:
    net = ipaddress.IPv4Network(network)
    kept = assign_addresses(before, net, {}, {})
    found = assign_addresses(later, net, {}, {name: kept[name] for name in before & later})
    assert {name: found[name] for name in before & later} == {name: kept[name] for name in before & later}


@given(HOST_NAMES)
def test_the_order_of_the_inventory_does_not_matter(members: set[str]) -> None:
    net = ipaddress.IPv4Network("10.99.0.0/26")
    assert assign_addresses(sorted(members), net, {}, {}) == assign_addresses(
        sorted(members, reverse=True), net, {}, {}
    )


@given(HOST_NAMES, st.data())
def test_a_stated_address_is_taken_and_nobody_else_gets_it(members: set[str], data: st.DataObject) -> None:
    who = data.draw(st.sampled_from(sorted(members)))
    taken_by_another = data.draw(st.sampled_from(sorted(members)))
    kept = assign_addresses(members, NET, {}, {})
    found = assign_addresses(members, NET, {who: kept[taken_by_another]}, kept)
    assert found[who] == kept[taken_by_another]
    assert len(set(found.values())) == len(members)


def test_stated_and_kept_addresses_that_are_there_twice_are_refused() -> None:
    with pytest.raises(MeshError, match=r"a and b have the same llama_mesh_address 10\.99\.0\.7"):
        assign_addresses(["a", "b"], NET, {"a": "10.99.0.7", "b": "10.99.0.7"}, {})
    with pytest.raises(MeshError, match="a and b both have the mesh address"):
        assign_addresses(["a", "b"], NET, {}, {"a": "10.99.0.7", "b": "10.99.0.7"})


def test_an_address_outside_of_the_network_is_refused_when_stated_and_given_up_when_kept() -> None:
    with pytest.raises(MeshError, match=r"a: llama_mesh_address 10\.50\.0\.1 is no host address"):
        assign_addresses(["a"], NET, {"a": "10.50.0.1"}, {})
    assert ipaddress.IPv4Address(assign_addresses(["a"], NET, {}, {"a": "10.50.0.1"})["a"]) in NET


def test_a_network_that_is_too_small_says_by_how_much() -> None:
    with pytest.raises(MeshError, match="holds 2 hosts and the fleet has 3"):
        assign_addresses("abc", ipaddress.IPv4Network("10.99.0.0/30"), {}, {})


@pytest.mark.parametrize("value", ["fd00::/64", "10.99.0.1/20", "10.99.0.0/31", "office"])
def test_the_inside_of_the_mesh_is_an_ipv4_network(value: str) -> None:
    """B5-13: workers speak IPv4 only, so the inside of the mesh does, too."""
    with pytest.raises(MeshError, match="llama_mesh_network"):
        checked_network(value)


@pytest.mark.parametrize(
    ("network", "links", "routes", "what"),
    [
        ("10.99.0.0/20", [link("10.99.3.4/24", "eth1")], [], "10.99.3.0/24 of its interface eth1"),
        ("10.99.0.0/20", [link("10.0.0.4/8")], [], "10.0.0.0/8 of its interface eth0"),
        (
            "10.99.0.0/20",
            [link("192.168.0.2/24")],
            [{"to": "10.99.7.0/24", "interface": "tun0"}],
            "route to 10.99.7.0/24 by tun0",
        ),
    ],
)
def test_a_network_that_a_host_is_in_is_refused_with_a_free_one(
    network: str, links: list[dict[str, Any]], routes: list[dict[str, Any]], what: str
) -> None:
    hosts = [host("p", "llama_primary", node("p", *links, routes=routes)), host("w", "llama_workers", node("w"))]
    with pytest.raises(MeshError, match=what) as caught:
        plan_mesh(hosts, network=network)
    proposed = str(caught.value).partition("for example ")[2].partition(",")[0]
    plan_mesh(hosts, network=proposed)


def test_the_mesh_itself_and_a_wider_route_are_no_overlap() -> None:
    own = node("p", link("192.168.0.2/24"), link("10.99.0.1/20", "wg-llama", medium="virtual"), routes=[
        {"to": "10.99.0.0/20", "interface": "wg-llama"}, {"to": "10.0.0.0/8", "interface": "tun0"},
    ])  # fmt: skip
    plan_mesh(
        [host("p", "llama_primary", own), host("w", "llama_workers", node("w", link("192.168.0.3/24")))],
        network="10.99.0.0/20",
    )


def test_disjoint_prefixes() -> None:
    """B5-03: one prefix on two peers means that the last one gets all the traffic."""
    with pytest.raises(MeshError, match=r"a and b share the mesh address 10\.9\.0\.0/24"):
        check_disjoint({"a": ["10.9.0.0/24"], "b": ["10.9.0.0/24"]})
    with pytest.raises(MeshError, match=r"share the mesh address 10\.9\.0\.7/32"):
        check_disjoint({"a": ["10.9.0.0/24"], "b": ["10.9.1.0/24"], "c": ["10.9.0.7/32"]})
    check_disjoint({"a": ["10.9.0.1/32", "10.9.0.0/32"], "b": ["10.9.0.2/32", "fd00::/64"]})


# ---------------------------------------------------------------------------------------------------------- peers


def test_a_star_makes_workers_peers_of_their_primary_only() -> None:
    """Law 17: workers never talk to each other."""
    plan = plan_mesh(fleet(3))
    assert names(plan, "n0") == ["n1", "n2", "n3"]
    assert [names(plan, f"n{i}") for i in (1, 2, 3)] == [["n0"]] * 3


def test_clusters_do_not_meet() -> None:
    hosts = [
        host("p1", "llama_primary", node("p1", link("192.168.0.1/24"))),
        host("p2", "llama_primary", node("p2", link("192.168.0.2/24")), llama_fleet_cluster="two"),
        host("w1", "llama_workers", node("w1", link("192.168.0.3/24"))),
        host("w2", "llama_workers", node("w2", link("192.168.0.4/24")), llama_fleet_cluster="two"),
        host("both", "llama_workers", node("both", link("192.168.0.5/24")), llama_worker_instances=[
            {"name": "a", "port": 50052}, {"name": "b", "port": 50053, "cluster": "two"},
        ]),
    ]  # fmt: skip
    for shape in ("star", "full"):
        plan = plan_mesh(hosts, shape=shape)
        assert "w2" not in names(plan, "p1")
        assert "p1" not in names(plan, "w2")
        assert {"p1", "p2"} <= set(names(plan, "both"))
    ports = {door["port"]: door["source"] for door in plan["hosts"]["both"]["ports"]}
    assert ports == {50052: plan["hosts"]["p1"]["address"], 50053: plan["hosts"]["p2"]["address"]}
    called = {(end["address"], end["port"]) for end in plan["hosts"]["p2"]["endpoints"]}
    assert called == {(plan["hosts"]["both"]["address"], 50053), (plan["hosts"]["w2"]["address"], 50052)}


def test_full_joins_all_hosts_of_a_cluster() -> None:
    plan = plan_mesh(fleet(3), shape="full")
    assert all(len(names(plan, f"n{i}")) == 3 for i in range(4))


@pytest.mark.parametrize("limit", [["n2"], ["n0"], ["n0", "n3"]])
def test_a_host_outside_of_the_limit_stays_a_peer(limit: list[str]) -> None:
    """B5-05: four hosts, a limit of some; their peers are those of the inventory, not of the play."""
    hosts = fleet(3)
    nodes = after(hosts, plan_mesh(hosts))
    limited = []
    for entry in hosts:
        name = entry["inventory_hostname"]
        bare = {field: value for field, value in entry.items() if field != "llama_mesh__node"}
        limited.append(dict(bare, llama_mesh__node={"node": nodes[name]}) if name in limit else bare)
    plan = plan_mesh(limited)
    assert set(plan["hosts"]) == set(limit)
    everything = plan_mesh(
        [dict(entry, llama_mesh__node={"node": nodes[entry["inventory_hostname"]]}) for entry in hosts]
    )
    for name in limit:
        wanted = [
            {k: v for k, v in peer.items() if k not in ("fresh", "path_mtu")}
            for peer in everything["hosts"][name]["peers"]
        ]
        assert [
            {k: v for k, v in peer.items() if k not in ("fresh", "path_mtu")} for peer in plan["hosts"][name]["peers"]
        ] == wanted
    assert plan["unknown"] == []


def test_a_host_that_left_the_inventory_loses_access() -> None:
    hosts = fleet(3)
    nodes = after(hosts, plan_mesh(hosts))
    left = [dict(entry, llama_mesh__node={"node": nodes[entry["inventory_hostname"]]}) for entry in hosts[:3]]
    assert names(plan_mesh(left), "n0") == ["n1", "n2"]


def test_a_host_that_nobody_knows_is_named_and_then_taken_from_what_was_read() -> None:
    hosts = fleet(2)
    unread = [hosts[0], hosts[1], host("n2", "llama_workers")]
    plan = plan_mesh(unread)
    assert plan["unknown"] == ["n2"]
    assert names(plan, "n0") == ["n1"]
    plan = plan_mesh(unread, known={"n2": node("n2", link("192.168.0.3/16"), address="10.98.0.77")})
    assert plan["unknown"] == []
    (peer,) = [peer for peer in plan["hosts"]["n0"]["peers"] if peer["host"] == "n2"]
    assert (peer["address"], peer["public_key"], peer["endpoint"]) == ("10.98.0.77", key("n2"), "192.168.0.3:51820")


def test_hosts_outside_of_the_run_that_keep_an_old_key_are_named() -> None:
    """B5-07: host b rebuilt, host c not reached: c still has the old key of b."""
    hosts = fleet(2)
    nodes = after(hosts, plan_mesh(hosts, shape="full"))
    rotated = dict(nodes["n1"], public_key=key("new"), key_changed=True)
    set_up_again = dict(hosts[1]["llama_mesh__node"]["node"], public_key=key("new"))
    for rebuilt in (rotated, set_up_again):
        plan = plan_mesh(
            [
                host("n0", "llama_primary", nodes["n0"]),
                host("n1", "llama_workers", rebuilt),
                host("n2", "llama_workers"),
            ],
            shape="full",
            known={} if rebuilt is rotated else {"n2": nodes["n2"]},
        )
        assert plan["warnings"] == [
            "n1 has a new key, and n2, outside of this run, still has its old one; run again without --limit"
        ]
    assert key("new") in [peer["public_key"] for peer in plan["hosts"]["n0"]["peers"]]


def test_a_key_on_two_hosts_is_a_copied_disk() -> None:
    hosts = fleet(2)
    hosts[2]["llama_mesh__node"]["node"]["public_key"] = key("n1")
    with pytest.raises(MeshError, match="n1 and n2 have the same WireGuard key"):
        plan_mesh(hosts)


def test_a_misspelt_preshared_key_is_an_error_and_not_a_tunnel_without() -> None:
    plan_mesh(fleet(2), preshared=["n2"])
    plan_mesh(fleet(2), shape="full", preshared=["n1,n2"])
    with pytest.raises(MeshError, match="n9"):
        plan_mesh(fleet(2), preshared=["n9"])


# ---------------------------------------------------------------------------------------------------------- paths


def two(primary: dict[str, Any], worker: dict[str, Any], **variables: Any) -> dict[str, dict[str, Any]]:
    """Peer entry of each side of a pair, by the name of the side that writes it down."""
    plan = plan_mesh([host("p", "llama_primary", primary), host("w", "llama_workers", worker, **variables)])
    return {name: {**plan["hosts"][name]["peers"][0], "warnings": plan["warnings"]} for name in ("p", "w")}


def test_the_fastest_common_subnet_carries_the_mesh() -> None:
    primary = node("p", link("192.168.0.1/24"), link("172.20.5.1/24", "sfp0", speed_mbps=10000, mtu=9000))
    worker = node("w", link("192.168.0.2/24"), link("172.20.5.2/24", "sfp0", speed_mbps=10000, mtu=1500))
    found = two(primary, worker)
    assert found["p"]["endpoint"] == "172.20.5.2:51820"
    assert found["w"]["endpoint"] == "172.20.5.1:51820"
    assert found["w"]["path_mtu"] == 1500


def test_a_cable_goes_before_wifi_whatever_its_speed_and_wifi_is_warned_about() -> None:
    wifi = {"medium": "wireless", "speed_mbps": None}
    primary = node("p", link("192.168.7.1/24", "wlan0", **wifi), link("192.168.0.1/24", speed_mbps=100))
    worker = node("w", link("192.168.7.2/24", "wlan0", **wifi), link("192.168.0.2/24", speed_mbps=100))
    found = two(primary, worker)
    assert found["p"]["endpoint"] == "192.168.0.2:51820"
    assert found["p"]["warnings"] == []
    found = two(node("p", link("192.168.7.1/24", "wlan0", **wifi)), node("w", link("192.168.7.2/24", "wlan0", **wifi)))
    assert len(found["p"]["warnings"]) == 2
    assert "w (wlan0): the mesh runs over Wi-Fi" in " ".join(found["p"]["warnings"])


def test_bridges_of_containers_are_no_common_subnet() -> None:
    docker: dict[str, Any] = {"interface": "docker0", "medium": "virtual", "speed_mbps": 100000}
    primary = node("p", link("192.168.0.1/24"), link("172.17.0.1/16", **docker))
    worker = node("w", link("192.168.0.2/24"), link("172.17.0.2/16", **docker))
    assert two(primary, worker)["p"]["endpoint"] == "192.168.0.2:51820"


def test_the_underlay_can_be_named_by_network_or_interface() -> None:
    primary = node("p", link("192.168.0.1/24", speed_mbps=10000), link("172.20.5.1/24", "eth1"))
    worker = node("w", link("192.168.0.2/24", speed_mbps=10000), link("172.20.5.2/24", "eth1"))
    for underlay in ("172.20.5.0/24", "eth1"):
        assert two(primary, worker, llama_mesh_underlay=underlay)["p"]["endpoint"] == "172.20.5.2:51820"
    with pytest.raises(MeshError, match="w: llama_mesh_underlay eth7 matches none of its links"):
        two(primary, worker, llama_mesh_underlay="eth7")


def test_an_endpoint_that_is_not_known_is_left_out_and_that_side_keeps_the_way_open() -> None:
    """B5-08: behind NAT no endpoint and a keepalive of 25 s; the other side has neither."""
    primary = node("p", link("203.0.113.5/24"))
    found = two(primary, node("w", link("192.168.0.2/24")), llama_mesh_nat=True)
    assert (found["p"]["endpoint"], found["p"]["keepalive"]) == (None, None)
    assert (found["w"]["endpoint"], found["w"]["keepalive"]) == ("203.0.113.5:51820", 25)
    found = two(primary, node("w", link("192.168.0.2/24")))
    assert found["p"]["endpoint"] == "192.168.0.2:51820"
    assert found["w"]["keepalive"] is None
    found = two(primary, node("w", link("192.168.0.2/24")), llama_mesh_endpoint="[2001:db8::7]:1234")
    assert found["p"]["endpoint"] == "[2001:db8::7]:1234"


def test_two_hosts_without_endpoints_are_refused_unless_a_hub_lies_between() -> None:
    """B5-08: a has an endpoint, b and c are behind NATs: star works by way of a, full has no way from b to c."""
    hosts = [
        host("a", "llama_primary", node("a", link("203.0.113.5/24"))),
        host("b", "llama_workers", node("b", link("192.168.0.2/24")), llama_mesh_nat=True),
        host("c", "llama_workers", node("c", link("192.168.1.2/24")), llama_mesh_nat=True),
    ]
    plan_mesh(hosts)
    with pytest.raises(MeshError, match="b and c cannot reach each other"):
        plan_mesh(hosts, shape="full")


@pytest.mark.parametrize(
    "value", ["n1.example.org", "n1.example.org:51820", "10.0.0.1:0", "10.0.0.1:99999", "", "1.2.3"]
)
def test_endpoints_that_are_no_addresses_are_refused(value: str) -> None:
    with pytest.raises(Exception, match="here"):
        checked_endpoint(value, 51820, "here")


def test_the_value_of_a_bad_key_is_in_no_message() -> None:
    with pytest.raises(MeshError) as caught:
        checked_key("canary-secret", "the preshared key of n1")
    assert "canary" not in str(caught.value)


# ----------------------------------------------------------------------------------------------------- other modes


def test_the_worker_port_is_for_the_one_primary() -> None:
    plan = plan_mesh(fleet(2))
    assert plan["hosts"]["n1"]["ports"] == [{"port": 50052, "source": plan["hosts"]["n0"]["address"]}]
    assert plan["hosts"]["n0"]["ports"] == []


def test_an_existing_mesh_gives_its_addresses() -> None:
    hosts = [
        host("p", "llama_primary", node("p", address="100.64.0.1")),
        host("w", "llama_workers", node("w", address="100.64.0.2")),
    ]
    plan = plan_mesh(hosts, mode="existing")
    assert plan["hosts"]["w"]["address"] == "100.64.0.2"
    assert plan["hosts"]["w"]["ports"] == [{"port": 50052, "source": "100.64.0.1"}]
    assert plan["hosts"]["w"]["peers"] == []


def test_without_a_mesh_a_trusted_lan_is_open_to_the_primary_there_and_loopback_to_nobody() -> None:
    primary, worker = node("p", link("192.168.0.1/24")), node("w", link("192.168.0.2/24"))
    hosts = [
        host("p", "llama_primary", primary),
        host("w", "llama_workers", worker, llama_worker_address="192.168.0.2"),
    ]
    assert plan_mesh(hosts, mode="none")["hosts"]["w"]["ports"] == [{"port": 50052, "source": "192.168.0.1"}]
    del hosts[1]["llama_worker_address"]
    plan = plan_mesh(hosts, mode="none")["hosts"]["w"]
    assert (plan["address"], plan["ports"]) == ("127.0.0.1", [{"port": 50052, "source": None}])
    # Who may be attached there is on this very host.
    assert plan["primaries"] == {"default": {"host": "p", "address": "127.0.0.1"}}


def test_a_worker_that_is_not_managed_has_no_part_in_the_mesh() -> None:
    unmanaged = host("w", "llama_workers", llama_worker_managed=False, llama_worker_address="192.168.0.9")
    plan = plan_mesh([*fleet(1), unmanaged])
    assert names(plan, "n0") == ["n1"]
    assert plan["unknown"] == []
    assert {"address": "192.168.0.9", "port": 50052} in plan["hosts"]["n0"]["endpoints"]


# ----------------------------------------------------------------------------------------------------------- size


@pytest.mark.parametrize(("shape", "seconds"), [("star", 0.5), ("full", 5.0)])
def test_two_hundred_hosts(shape: str, seconds: float) -> None:
    """The whole mesh is computed once; a star of 200 takes 0.06 s, and full, with 39,800 entries, 1.3 s."""
    hosts = fleet(199)
    start = time.monotonic()
    plan = plan_mesh(hosts, shape=shape)
    assert time.monotonic() - start < seconds
    assert len(plan["hosts"]["n0"]["peers"]) == 199
    addresses = {own["address"] for own in plan["hosts"].values()}
    assert len(addresses) == 200


@pytest.mark.parametrize("text", [True, "true", "True", "yes", "on", "1"])
def test_flags_of_an_inventory_in_ini_form_are_text(text: object) -> None:
    """B5-08: nat=true in an INI file is the text "true", and such a host must not look reachable."""
    found = members_of([host("w", "llama_workers", llama_mesh_nat=text)], {})
    assert found["w"].nat
    assert not members_of([host("w", "llama_workers", llama_worker_managed="false")], {})["w"].managed
    with pytest.raises(MeshError, match="w: llama_mesh_nat is 'maybe'; it must be true or false"):
        members_of([host("w", "llama_workers", llama_mesh_nat="maybe")], {})
