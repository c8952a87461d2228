# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Clusters that are printed are valid, the same in any order, and no brute force exceeds the bounds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._declared import declared_records
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._place_models import place_models
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan import plan_split
from ansible_collections.llamafleet.rpc.tests.unit.plan_world import MIB, device, layer, model
from hypothesis import given, settings
from hypothesis import strategies as st

OPTIONS = ("n_ctx", "n_parallel", "type_k", "type_v", "objective")


def host(name: str, *devices: tuple[str, int, float], address: str | None = None, **changed: Any) -> dict[str, Any]:
    """A host by its devices: (name, MiB, GB/s)."""
    listed = [
        {"device": device, "usable": size * MIB, "bandwidth": speed * 1e9, **changed} for device, size, speed in devices
    ]
    return {"host": name, "devices": listed, **({"address": address} if address else {})}


def wish(name: str, **changed: Any) -> dict[str, Any]:
    """Ten layers of 100 MiB, unless ``layers`` says another number."""
    layers = changed.pop("layers", 10)
    return {"name": name, "model": model([layer(100 * MIB)] * layers), "n_ctx": 256, **changed}


def record(name: str, *instances: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """What worker_record keeps, of a machine that was connected to."""
    return {"schema": 1, "host": name, "machine_id": f"id-{name}", "cluster": "old", "instances": instances, **changed}


def instance(endpoint: str | None, *devices: tuple[str, int], pool: str, **changed: Any) -> dict[str, Any]:
    listed = [
        {"index": index, "device": name, "pool": pool, "usable": size * MIB, "budget": None}
        for index, (name, size) in enumerate(devices)
    ]
    return {"name": "default", "cluster": "old", "endpoint": endpoint, "devices": listed, **changed}


# --- What a cluster is, told without the code under test -------------------------------------------------------------


def cluster_devices(primary: dict[str, Any], workers: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    """The plan devices of hosts of ``host``: a primary has all of its own, a worker lends its GPUs or else its CPU."""
    found = []
    for number, member in enumerate((primary, *workers)):
        held = member["devices"]
        if number:
            held = [each for each in held if each["device"] != "CPU"] or held
        for index, each in enumerate(held):
            extra = {key: each[key] for key in ("bandwidth", "max_units", "priority") if key in each}
            endpoint = f"10.9.{number}.1:50052" if number else None
            found.append(
                device(
                    member["host"],
                    each["usable"],
                    endpoint,
                    each["device"],
                    index=index,
                    n_endpoint_devices=len(held),
                    rtt_ms=None,
                    overhead_ms=None,
                    **extra,
                )
            )
    return found


def check(hosts: list[dict[str, Any]], models: list[dict[str, Any]], result: dict[str, Any]) -> None:
    """Every cluster has a plan, each host has one role at most, and nothing is lost."""
    by_name = {each["host"]: each for each in hosts}
    wanted = {each["name"]: each for each in models}
    used: list[str] = []
    for cluster in result["clusters"]:
        members = [cluster["primary"], *cluster["workers"]]
        used += members
        asked = wanted[cluster["model"]]
        devices = cluster_devices(by_name[members[0]], tuple(by_name[name] for name in members[1:]))
        plan = plan_split(asked["model"], devices, **{key: asked[key] for key in OPTIONS if key in asked})
        assert plan["feasible"] and cluster["plan"]["feasible"]
        assert len(plan["device_order"]) <= 15 and len(cluster["plan"]["devices"]) <= 16
        assert plan["predicted"]["ms_per_token"] == pytest.approx(cluster["plan"]["ms_per_token"], rel=1e-6)
        assert {each["host"] for each in cluster["plan"]["devices"]} <= set(members)
        assert set(cluster["workers"]) <= {each["host"] for each in cluster["plan"]["devices"]}
        assert cluster["headroom"] > 0
    assert len(set(used)) == len(used)
    assert sorted([*used, *(each["host"] for each in result["unused"])]) == sorted(by_name)
    names = [cluster["cluster"] for cluster in result["clusters"]]
    assert len(set(names)) == len(names)
    for name, asked in wanted.items():
        placed = sum(cluster["model"] == name for cluster in result["clusters"])
        short = sum(each["replicas"] for each in result["unplaced"] if each["model"] == name)
        assert placed + short == asked.get("replicas", 1)
    bound = result["bound"]
    assert bound["placed"] == len(result["clusters"]) <= bound["replicas"] <= bound["asked"]
    assert bound["predicted_tokens_per_s"] <= bound["tokens_per_s"]


class Best(NamedTuple):
    """The most copies, and the most tokens/s, of all placements there are."""

    copies: int
    tokens_per_s: float


def brute_force(hosts: list[dict[str, Any]], models: list[dict[str, Any]]) -> Best:
    """Every way to give disjoint sets of hosts to copies, with every member of a set as its primary."""
    speeds: dict[tuple[int, int], float] = {}
    for number, asked in enumerate(models):
        options = {key: asked[key] for key in OPTIONS if key in asked}
        for mask in range(1, 1 << len(hosts)):
            members = [each for bit, each in enumerate(hosts) if mask >> bit & 1]
            plans = [
                plan_split(
                    asked["model"],
                    cluster_devices(primary, tuple(each for each in members if each is not primary)),
                    **options,
                )
                for primary in members
            ]
            found = [plan["predicted"]["tokens_per_s"] for plan in plans if plan["feasible"]]
            if found:
                speeds[number, mask] = max(found)

    def placements(free: int, left: tuple[int, ...]) -> Iterator[Best]:
        yield Best(0, 0.0)
        for (number, mask), speed in speeds.items():
            # The set with the lowest host comes first: else each placement is found once for every order.
            if mask & ~free == 0 and left[number]:
                rest = free & ~mask & ~((mask & -mask) - 1)
                fewer = tuple(count - (k == number) for k, count in enumerate(left))
                for copies, total in placements(rest, fewer):
                    yield Best(copies + 1, total + speed)

    found = list(placements((1 << len(hosts)) - 1, tuple(each.get("replicas", 1) for each in models)))
    return Best(max(best.copies for best in found), max(best.tokens_per_s for best in found))


SIZES = st.sampled_from([150, 300, 450, 700, 900, 1300, 2600])
SPEEDS = st.sampled_from([40.0, 100.0, 400.0, 900.0])


@st.composite
def fleets(draw: st.DrawFn, most: int) -> list[dict[str, Any]]:
    found = []
    for number in range(draw(st.integers(1, most))):
        devices = [(f"CUDA{k}", draw(SIZES), draw(SPEEDS)) for k in range(draw(st.integers(0, 2)))]
        if not devices or draw(st.booleans()):
            devices.append(("CPU", draw(SIZES), draw(SPEEDS)))
        address = draw(st.sampled_from([None, f"10.1.0.{number + 1}"]))
        found.append(host(f"h{number}", *devices, address=address))
    return found


@st.composite
def requests(draw: st.DrawFn) -> list[dict[str, Any]]:
    return [
        wish(
            f"m{number}",
            layers=draw(st.sampled_from([3, 10])),
            replicas=draw(st.integers(1, 3)),
            priority=draw(st.sampled_from([10, 50])),
            objective=draw(st.sampled_from(["latency", "memory"])),
        )
        for number in range(draw(st.integers(1, 2)))
    ]


# --- Properties ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(hosts=fleets(most=7), models=requests(), seed=st.integers(0, 1000))
def test_clusters_are_valid_and_do_not_depend_on_the_order(
    hosts: list[dict[str, Any]], models: list[dict[str, Any]], seed: int
) -> None:
    result = place_models(hosts, models)
    check(hosts, models, result)
    mixed, asked = list(hosts), list(models)
    random.Random(seed).shuffle(mixed)
    random.Random(seed + 1).shuffle(asked)
    assert place_models({each["host"]: each for each in mixed}, asked) == result


@settings(max_examples=60, deadline=None)
@given(hosts=fleets(most=4), models=requests())
def test_no_placement_exceeds_the_bounds(hosts: list[dict[str, Any]], models: list[dict[str, Any]]) -> None:
    result = place_models(hosts, models)
    best, bound = brute_force(hosts, models), result["bound"]
    assert bound["placed"] <= best.copies <= bound["replicas"]
    assert bound["predicted_tokens_per_s"] <= best.tokens_per_s + 0.01
    assert best.tokens_per_s <= bound["tokens_per_s"]
    if len(models) == 1 and best.copies == 1:  # one copy is never missed
        assert bound["placed"] == 1


def test_greedy_is_near_the_best_there_is() -> None:
    """Of 25 random fleets of four hosts: copies placed, and tokens/s, as a share of what brute force finds."""
    rng = random.Random(7)
    copies, best_copies, shares = 0, 0, []
    for _number in range(25):
        hosts = [
            host(f"h{k}", ("CUDA0", rng.choice([300, 700, 1300]), rng.choice([100, 400, 900])), ("CPU", 700, 40))
            for k in range(4)
        ]
        models = [wish("m", replicas=rng.choice([1, 2, 4]))]
        bound, best = place_models(hosts, models)["bound"], brute_force(hosts, models)
        copies, best_copies = copies + bound["placed"], best_copies + best.copies
        if bound["placed"] == best.copies:
            shares.append(bound["predicted_tokens_per_s"] / best.tokens_per_s)
    assert copies >= 0.95 * best_copies
    assert sum(shares) / len(shares) >= 0.95


# --- What it chooses -------------------------------------------------------------------------------------------------


def members(result: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    return {each["cluster"]: (each["primary"], *each["workers"]) for each in result["clusters"]}


def test_few_fast_devices_beat_many_slow_ones() -> None:
    slow = [host(f"slow{k}", ("CUDA0", 400, 50.0)) for k in range(4)]
    fast = [host(f"fast{k}", ("CUDA0", 800, 900.0)) for k in range(2)]
    large = [host("large", ("CUDA0", 4000, 60.0))]
    assert members(place_models(slow + fast + large, [wish("m")])) == {"m-1": ("fast0", "fast1")}
    assert members(place_models(slow + large, [wish("m")])) == {"m-1": ("large",)}


def test_memory_takes_the_roomiest_hosts_and_latency_the_smallest_of_equals() -> None:
    hosts = [host(f"h{size}", ("CUDA0", size, 400.0)) for size in (1300, 1500, 4000)]
    assert members(place_models(hosts, [wish("m")])) == {"m-1": ("h1300",)}
    assert members(place_models(hosts, [wish("m", objective="memory")])) == {"m-1": ("h4000",)}


def test_urgent_models_come_first_and_each_model_gets_a_copy_before_any_gets_a_second() -> None:
    hosts = [host(f"h{k}", ("CUDA0", 1300, 400.0 + k)) for k in range(3)]
    even = place_models(hosts, [wish("a", replicas=3), wish("b", replicas=3, layers=9)])
    assert [each["cluster"] for each in even["clusters"]] == ["a-1", "b-1", "a-2"]
    urgent = place_models(hosts, [wish("a", replicas=3), wish("b", replicas=3, layers=9, priority=1)])
    assert [each["cluster"] for each in urgent["clusters"]] == ["b-1", "b-2", "b-3"]
    assert urgent["unplaced"][0]["model"] == "a" and urgent["unplaced"][0]["replicas"] == 3


def test_the_smallest_hosts_are_tried_where_the_fastest_leave_a_copy_out() -> None:
    """The two fast hosts together would leave two that hold no copy: copies count more than speed."""
    hosts = [
        host("fast", ("CUDA0", 700, 900.0)),
        host("faster", ("CUDA0", 900, 900.0)),
        host("slow", ("CUDA0", 700, 400.0)),
        host("small", ("CUDA0", 450, 400.0)),
    ]
    assert members(place_models(hosts, [wish("m")])) == {"m-1": ("fast", "faster")}
    both = members(place_models(hosts, [wish("m", replicas=2)]))
    assert {frozenset(names) for names in both.values()} == {
        frozenset(("fast", "slow")),
        frozenset(("faster", "small")),
    }


def test_only_named_hosts_become_primaries() -> None:
    hosts = [host("head", ("CPU", 200, 40.0)), *(host(f"w{k}", ("CUDA0", 700, 400.0)) for k in range(4))]
    result = place_models(hosts, [wish("m", replicas=2)], primaries=["head"])
    assert [each["primary"] for each in result["clusters"]] == ["head"]
    assert result["bound"]["replicas"] == 1
    assert "none of the 2 hosts left may be a primary" in result["unplaced"][0]["reason"]
    little = place_models([host("head", ("CPU", 70, 40.0)), *hosts[1:]], [wish("m")], primaries=["head"])
    assert "MiB in the memory of its primary" in little["unplaced"][0]["reason"]


def test_what_does_not_fit_is_said_in_numbers() -> None:
    """Law 5: sixteen devices would hold it, but a cluster has fifteen."""
    hosts = [host(f"h{k:02}", ("CUDA0", 190, 400.0)) for k in range(20)]
    result = place_models(hosts, [wish("m", layers=16)])
    assert not result["clusters"] and result["bound"]["replicas"] == 1
    assert [each["replicas"] for each in result["unplaced"]] == [1]
    reason = result["unplaced"][0]["reason"]
    assert "a copy needs 1 612.0 MiB" in reason and "the 20 hosts left hold" in reason and "MiB" in reason
    assert len(result["unused"]) == 20
    assert any(line.startswith("not placed: 1 x m: a copy needs") for line in result["lines"])


def test_hosts_that_share_memory_serve_one_cluster() -> None:
    """Loopback fleets: three names of one machine, whose memory is there once."""
    shared = [
        record(f"h{k}", instance(f"127.0.0.1:{50052 + k}", ("CPU", 3000), pool="box/ram"), machine_id="box")
        for k in range(3)
    ]
    result = place_models(shared, [wish("m", replicas=3)])
    assert len(result["clusters"]) == 1 and result["bound"]["replicas"] == 1
    assert {each["why"] for each in result["unused"]} == {"shares memory with h0 of cluster m-1"}


def test_records_of_any_cluster_serve_in_either_role() -> None:
    """A worker's GPU becomes a primary's own, without what RPC costs; a primary's becomes a worker's."""
    hosts = [
        record("head", instance(None, ("CUDA0", 700), ("CPU", 500), pool="head/m"), mesh={"address": "10.77.0.1"}),
        record("w1", instance("10.77.0.2:50052", ("CUDA0", 700), pool="w1/m", rtt_ms=0.2)),
        record("w2", instance("10.77.0.3:50053", ("CUDA0", 300), ("CUDA1", 1300), pool="w2/m")),
    ]
    for each in hosts[2]["instances"][0]["devices"]:
        each["pool"] = f"w2/{each['device']}"
    result = place_models(hosts, [wish("m", replicas=2)], primaries=["w1", "w2"])
    assert members(result) == {"m-1": ("w2",), "m-2": ("w1", "head")}
    assert result["clusters"][0]["plan"]["round_trips"] == 0
    groups = result["inventory"]["llama_fleet"]["children"]
    assert groups["llama_workers"]["hosts"] == {"head": {"llama_fleet_cluster": "m-2"}}
    assert "llama_primary_instances" not in groups["llama_primary"]["hosts"]["w2"]  # site.yml detects it


def test_a_primary_of_unified_memory_counts_its_own_buffers_there() -> None:
    """A Mac's record as a worker names no CPU; the primary's process lives in the same RAM all the same."""

    def mac(usable: int) -> list[dict[str, Any]]:
        devices = [{"device": "MTL0", "usable": usable * MIB, "bandwidth": 4e11}]
        return [{"host": "mac", "address": "10.77.0.2", "devices": devices}]

    roomy = place_models(mac(1300), [wish("m")])
    assert roomy["clusters"] and not roomy["warnings"]
    apart = place_models([host("box", ("CUDA0", 1084, 400.0))], [wish("m")])
    assert apart["clusters"] and "nothing is recorded of the CPU's memory" in apart["warnings"][0]
    assert not place_models(mac(1084), [wish("m")])["clusters"]


def test_a_warning_is_one_line_however_many_hosts_it_concerns() -> None:
    """Each copy takes a whole GPU as primary and another as worker; nothing tells of a CPU or an address."""
    for copies, more in ((5, ""), (8, " and 3 more")):
        hosts = [host(f"h{k:02}", ("CUDA0", 700, 400.0)) for k in range(2 * copies)]
        result = place_models(hosts, [wish("m", replicas=copies)])
        assert [len(cluster["workers"]) for cluster in result["clusters"]] == [1] * copies
        blind, lost = result["warnings"]
        assert blind.startswith("h00 (primary of m-1), ") and blind.count(" (primary of ") == 5
        assert f"{more}: nothing is recorded of the CPU's memory" in blind
        assert lost.count(" (worker of ") == 5 and f"{more}: no address is known" in lost


def test_priorities_of_hosts_hold_for_the_fleet() -> None:
    hosts = [host("spare", ("CUDA0", 1300, 900.0), priority=90), host("usual", ("CUDA0", 1300, 100.0), priority=10)]
    assert members(place_models(hosts, [wish("m")])) == {"m-1": ("usual",)}
    assert len(place_models(hosts, [wish("m", replicas=2)])["clusters"]) == 2


def test_hosts_that_are_alike_are_told_apart() -> None:
    hosts = [host(f"h{k}", ("CUDA0", 700, 400.0), ("CPU", 200, 40.0), address=f"10.1.0.{k + 1}") for k in range(6)]
    result = place_models(hosts, [wish("m", replicas=3)])
    check(hosts, [wish("m", replicas=3)], result)
    assert len(result["clusters"]) == 3


def test_the_inventory_says_all_that_a_plan_needs() -> None:
    """From the fragment alone the same clusters come out again: declared machines keep their devices in it."""
    hosts = [
        host("a", ("CUDA0", 700, 800.0), ("CPU", 500, 60.0), address="10.77.0.1"),
        host("b", ("MTL0", 900, 400.0), address="10.77.0.2"),
        host("c", ("CPU", 2600, 50.0), address="10.77.0.3"),
    ]
    asked = [wish("m", replicas=2, type_k="q8_0", type_v="q8_0", variables={"llama_model_kind": "path"})]
    result = place_models(hosts, asked)
    groups = result["inventory"]["llama_fleet"]["children"]
    variables = [
        {"inventory_hostname": name, **values} for group in groups.values() for name, values in group["hosts"].items()
    ]
    assert {each["llama_fleet_cluster"] for each in variables} == {"m-1", "m-2"}
    for values in groups["llama_primary"]["hosts"].values():
        assert values["llama_primary_type_k"] == "q8_0" and values["llama_model_kind"] == "path"
    for cluster in result["clusters"]:
        own = [each for each in variables if each["llama_fleet_cluster"] == cluster["cluster"]]
        again = place_models(declared_records(own), [{**asked[0], "replicas": 1}], primaries=[cluster["primary"]])
        assert again["clusters"][0]["plan"] == cluster["plan"]


# --- Bad input -------------------------------------------------------------------------------------------------------

GOOD = [host("a", ("CUDA0", 1300, 400.0))]
SAME = [record(name, instance("10.0.0.1:50052", ("CUDA0", 1300), pool=f"{name}/m")) for name in ("a", "b")]


@pytest.mark.parametrize(
    ("records", "models", "primaries", "text"),
    [
        (7, [wish("m")], None, "records are a int"),
        ([], [wish("m")], None, "there are no records"),
        ([7], [wish("m")], None, "record of 0 is 7"),
        ([GOOD[0], GOOD[0]], [wish("m")], None, "host a has two records"),
        ([{"devices": []}], [wish("m")], None, "a host is called None"),
        ([{"host": "a", "devices": []}], [wish("m")], None, "a: no facts"),
        ([{**GOOD[0], "address": "box.lan"}], [wish("m")], None, "host a: endpoint 'box.lan:50052'"),
        ([record("a")], [wish("m")], None, "host a: its record has no instances"),
        (SAME, [wish("m")], None, "endpoint 10.0.0.1:50052 is used twice"),
        (GOOD, None, None, "models is None"),
        (GOOD, [], None, "models is []"),
        (GOOD, ["m"], None, "models[0] is 'm'"),
        (GOOD, [wish("m"), wish("m")], None, "two models are called m"),
        (GOOD, [wish("M")], None, "models[0]: name is 'M'"),
        (GOOD, [wish("m" * 30)], None, "which must be 1 to 31"),
        (GOOD, [{**wish("m"), "copies": 2}], None, "models[0] has unknown keys copies; known are model"),
        (GOOD, [wish("m", replicas=0)], None, "models[0]: replicas is 0; it must be at least 1"),
        (GOOD, [wish("m", replicas="2")], None, "models[0]: replicas is '2'"),
        (GOOD, [wish("m", n_ctx=None)], None, "models[0] (m): n_ctx is missing"),
        (GOOD, [wish("m", n_ctx=0)], None, "models[0] (m): n_ctx is 0"),
        (GOOD, [wish("m", priority=-1)], None, "models[0] (m): priority is -1"),
        (GOOD, [wish("m", objective="speed")], None, "models[0] (m): objective is 'speed'"),
        (GOOD, [wish("m", type_k="q9")], None, "models[0] (m): type_k is 'q9'"),
        (GOOD, [wish("m", variables=[1])], None, "models[0] (m): variables is [1]"),
        (GOOD, [{"name": "m", "n_ctx": 1}], None, "models[0] (m): model is None"),
        (GOOD, [wish("m")], ["b"], "primaries names b, of which there is no record"),
        (GOOD, [wish("m")], "a", "primaries is 'a'; it must be a list"),
    ],
)
def test_bad_input_is_named(records: Any, models: Any, primaries: Any, text: str) -> None:
    with pytest.raises(FleetError) as caught:
        place_models(records, models, primaries)
    assert text in str(caught.value)


def test_any_number_of_copies_may_be_asked_for() -> None:
    result = place_models(GOOD, [wish("m", replicas=10**9)])
    assert result["unplaced"][0]["replicas"] == 10**9 - 1 and result["bound"]["replicas"] == 1


def test_a_thousand_unlike_hosts_are_all_told_of() -> None:
    rng = random.Random(3)
    hosts = [
        host(
            f"h{k:04}",
            ("CUDA0", rng.randrange(300, 2000), rng.choice([100.0, 400.0, 900.0])),
            address=f"10.1.{k // 250}.{k % 250 + 1}",
        )
        for k in range(1000)
    ]
    asked = [wish("a", replicas=20), wish("b", layers=30, replicas=10)]
    result = place_models(hosts, asked)
    check(hosts, asked, result)
    assert not result["unplaced"]
    assert sum(len(names) for names in members(result).values()) + len(result["unused"]) == 1000
    assert max(map(len, result["lines"])) < 400


def test_large_sizes_and_shapes_of_records_do_not_matter() -> None:
    """More devices on one host than a cluster takes: the plan leaves the rest alone."""
    many = host("many", *((f"CUDA{k}", 300, 400.0) for k in range(18)))
    result = place_models([many], [wish("m", layers=12)])
    assert len(result["clusters"][0]["plan"]["devices"]) <= 15
