# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Records of a cluster's members become the ordered, checked devices of a plan."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._records import RecordError, fleet_devices, parse_endpoint

GIB = 1 << 30


def device(name: str = "CUDA0", index: Any = 0, **more: Any) -> dict[str, Any]:
    return {"index": index, "device": name, "pool": None, "usable": 8 * GIB, "budget": None, **more}


def instance(endpoint: str | None, *devices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": "default", "endpoint": endpoint, "devices": list(devices) or [device()], **more}


def record(host: str, *instances: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"schema": 1, "host": host, "cluster": "default", "instances": list(instances), **more}


def test_order_is_cpu_of_the_primary_then_rpc_then_local_gpus() -> None:
    """Case B1-07: RPC devices come before local GPUs, wherever the primary's record stands."""
    primary = record("head", instance(None, device("CUDA0", 0), device("CPU", 1)))
    first = record("a", instance("10.0.0.2:18711", device("CUDA1", 1), device("CUDA0", 0)))
    second = record("b", instance("10.0.0.3:18711"), instance("10.0.0.3:18712", device("CPU"), name="cpu"))
    found = fleet_devices([first, primary, second])
    assert [(item["host"], item["device"], item["endpoint"]) for item in found] == [
        ("head", "CPU", None),
        ("a", "CUDA0", "10.0.0.2:18711"),
        ("a", "CUDA1", "10.0.0.2:18711"),
        ("b", "CUDA0", "10.0.0.3:18711"),
        ("b", "CPU", "10.0.0.3:18712"),
        ("head", "CUDA0", None),
    ]
    assert [item["n_endpoint_devices"] for item in found] == [2, 2, 2, 1, 1, 2]


def test_a_mapping_gives_the_same_as_a_list() -> None:
    records = [record("a", instance("10.0.0.2:1024")), record("b", instance("10.0.0.3:1024"))]
    assert fleet_devices({item["host"]: item for item in records}) == fleet_devices(records)


def test_keys_and_unknown_values() -> None:
    """Every key of the contract is there; what is unknown is null."""
    (found,) = fleet_devices([record("a", instance("10.0.0.2:1024", rtt_ms=0.5))])
    assert found == {
        "host": "a",
        "endpoint": "10.0.0.2:1024",
        "index": 0,
        "n_endpoint_devices": 1,
        "device": "CUDA0",
        "pool": None,
        "usable": 8 * GIB,
        "pool_usable": 8 * GIB,
        "bandwidth": None,
        "rtt_ms": 0.5,
        "overhead_ms": None,
        "priority": None,
        "min_units": None,
        "max_units": None,
    }


def test_only_the_chosen_cluster() -> None:
    records = [record("a", instance("10.0.0.2:1024")), record("b", instance("10.0.0.3:1024"), cluster="lab")]
    assert [item["host"] for item in fleet_devices(records, "lab")] == ["b"]


def test_two_clusters_may_each_have_a_primary() -> None:
    records = [record("a", instance(None)), record("b", instance(None), cluster="lab")]
    assert [item["host"] for item in fleet_devices(records)] == ["a"]


@pytest.mark.parametrize(("budget", "expected"), [(None, 8 * GIB), (3 * GIB, 3 * GIB), (9 * GIB, 8 * GIB)])
def test_budget_is_clamped_to_the_capacity(budget: int | None, expected: int) -> None:
    """Case B1-09: a reading above the total is clamped, never believed. Case B1-14: a small budget is kept."""
    (found,) = fleet_devices([record("a", instance("10.0.0.2:1024", device(budget=budget)))])
    assert found["usable"] == expected
    assert found["pool_usable"] == 8 * GIB


def test_pool_capacity_is_the_largest_of_its_devices() -> None:
    """Law 3: two devices that share memory know how much there is in total."""
    records = [
        record("head", instance(None, device("CPU", 0, pool="m/ram", usable=10 * GIB))),
        record("a", instance("127.0.0.1:18711", device("CPU", pool="m/ram", usable=12 * GIB, budget=1 * GIB))),
    ]
    assert [(item["usable"], item["pool_usable"]) for item in fleet_devices(records)] == [
        (10 * GIB, 12 * GIB),
        (1 * GIB, 12 * GIB),
    ]


@pytest.mark.parametrize(
    ("endpoint", "fault"),
    [
        ("10.0.0.5:26000:26000", "more than one colon"),
        ("[fd00::2]:50052", "IPv6"),
        ("fd00::2:50052", "IPv6"),
        ("node.lan:50052", "names are not resolved"),
        ("localhost:50052", "names are not resolved"),
        ("http://10.0.0.5:50052", "scheme"),
        (" 10.0.0.5:50052", "blank"),
        ("10.0.0.5:50052\n", "blank"),
        ("10.0.0.5:50052,", "comma"),
        ("10.0.0.5", "no port"),
        ("10.0.0.5:", "no port"),
        ("10.0.0.5:0", "outside 1 to 65535"),
        ("10.0.0.5:65536", "outside 1 to 65535"),
        ("10.0.0.5:050", "decimal port"),
        ("10.0.0.5:50052x", "decimal port"),
        ("10.0.0.256:50052", "IPv4"),
        ("10.0.0.05:50052", "IPv4"),
        ("10.0.1:50052", "IPv4"),
        ("0.0.0.0:50052", "IPv4"),
        ("", "no port"),
        (50052, "not text"),
        (True, "not text"),
    ],
)
def test_endpoint_must_be_ipv4_and_port(endpoint: Any, fault: str) -> None:
    """Cases B1-10, B5-13, B8-11: what llama.cpp would misread or abort on is refused, with the remedy."""
    with pytest.raises(RecordError) as caught:
        fleet_devices([record("a", instance(endpoint))])
    text = str(caught.value)
    assert fault in text
    assert "host a" in text
    assert "IPv4:port" in text


@pytest.mark.parametrize("endpoint", ["10.0.0.5:1", "127.0.0.1:65535", "255.255.255.255:18711"])
def test_good_endpoints_pass(endpoint: str) -> None:
    assert parse_endpoint(endpoint, "here") == endpoint


def test_same_endpoint_twice_names_both() -> None:
    """Case B1-10: llama.cpp would merge them silently and shares no longer line up."""
    with pytest.raises(RecordError, match=r"10\.0\.0\.5:26000 is used twice, by host a.* and by host b"):
        fleet_devices([record("a", instance("10.0.0.5:26000")), record("b", instance("10.0.0.5:26000"))])


def test_one_worker_under_two_addresses_names_both() -> None:
    """Two names of one single-client worker hang the start of the primary for ever."""
    with pytest.raises(RecordError, match=r"10\.0\.0\.5:26000 and 192\.168\.0\.5:26000"):
        fleet_devices([record("a", instance("10.0.0.5:26000"), instance("192.168.0.5:26000", name="lan"))])


def test_two_primaries_are_named() -> None:
    with pytest.raises(RecordError, match="two primaries, a and b"):
        fleet_devices([record("a", instance(None)), record("b", instance(None))])


def test_primary_and_worker_of_one_cluster() -> None:
    with pytest.raises(RecordError, match="host a is primary and worker of cluster default"):
        fleet_devices([record("a", instance(None)), record("a", instance("10.0.0.2:1024"))])


@pytest.mark.parametrize(
    ("devices", "fault"),
    [
        ([device(index=1)], "indices are 1"),
        ([device(index=0), device(index=0)], "indices are 0, 0"),
        ([device(index=0), device(index=2)], "indices are 0, 2"),
        ([device(index=-1)], "at least 0"),
        ([device(index=True)], "whole number"),
        ([device(index=None)], "whole number"),
        ([device("CUDA0;rm")], "letters and a number"),
        ([device("0")], "letters and a number"),
        ([device("Vulkan0\n")], "letters and a number"),
        ([device(usable=None)], "unknown"),
        ([device(usable=-1)], "at least 0"),
        ([device(usable="8 GiB")], "whole number"),
        ([device(usable=True)], "whole number"),
        ([device(budget=1.5)], "whole number"),
        ([device(bandwidth=0)], "above 0"),
        ([device(bandwidth="fast")], "number or null"),
        ([device(rtt_ms=-1)], "at least 0"),
        ([device(overhead_ms=float("nan"))], "at least 0"),
        ([device(overhead_ms=True)], "number or null"),
        ([device(usable=1 << 63)], "must be at most 9223372036854775807"),
        ([device(rtt_ms=10**400)], "at least 0, and finite"),
        ([device(bandwidth=float("inf"))], "above 0, and finite"),
        ([device(bandwidth=5e-324)], "above 0"),
        ([device(usable="8589934592")], "this is text: write it in digits without quotes"),
        ([device(bandwidth="900e9")], "this is text: write it in digits without quotes"),
        ([device(pool=7)], "pool is 7"),
        ([device(max_units=-1)], "at least 0"),
        (["CUDA0"], "must be a mapping"),
        ([], "at least one device"),
        (None, "at least one device"),
    ],
)
def test_bad_devices_are_named(devices: Any, fault: str) -> None:
    broken = {"name": "default", "endpoint": "10.0.0.2:1024", "devices": devices}
    with pytest.raises(RecordError) as caught:
        fleet_devices([record("a", broken)])
    assert "host a, instance default" in str(caught.value)
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("records", "fault"),
    [
        ("text", "list of worker records"),
        (7, "list of worker records"),
        ([None], "record 0 is None"),
        ({"a": None}, "record of a is None"),
        ([{"instances": []}], "inventory name"),
        ([{"host": "a"}], "host a: instances"),
        ([{"host": "a", "schema": 2, "instances": []}], "schema 2"),
        ([{"host": "a", "instances": ["x"]}], "host a: an instance"),
        ([record("a", measured={"build": None, "devices": True})], "host a: measured devices are True, not a list"),
    ],
)
def test_bad_records_are_named(records: Any, fault: str) -> None:
    with pytest.raises(RecordError, match=fault):
        fleet_devices(records)


def test_an_instance_whose_cluster_is_null_serves_that_of_its_host() -> None:
    """Unknown is null: such an instance must not vanish from the plan without a word."""
    records = [
        record("a", instance("10.0.0.2:1024", cluster=None), cluster="big"),
        record("b", instance("10.0.0.3:1024"), cluster=None),
    ]
    assert [item["host"] for item in fleet_devices(records, "big")] == ["a"]
    assert [item["host"] for item in fleet_devices(records)] == ["b"]


def test_what_was_measured_of_something_else_is_left_aside() -> None:
    odd = [{"host": [], "endpoint": {}, "index": 0, "device": "CUDA0", "bandwidth": 1e9}, 7]
    (found,) = fleet_devices([record("a", instance("10.0.0.2:1024"), measured={"build": None, "devices": odd})])
    assert found["bandwidth"] is None


def test_link_speed_is_handed_on_only_where_known() -> None:
    records = [record("a", instance("10.0.0.2:1024", link_mbps=100)), record("b", instance("10.0.0.3:1024"))]
    assert ["link_mbps" in item for item in fleet_devices(records)] == [True, False]
