# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Records of what hosts lend: what is agreed, what is kept, what counts as changed."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import GIB, MIB
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._records import fleet_devices
from ansible_collections.llamafleet.rpc.plugins.module_utils._worker_record import (
    Inputs,
    WorkerRecordError,
    agreed,
    build_record,
    decisions,
    same_identity,
    usable_previous,
)
from hypothesis import given
from hypothesis import strategies as st

MACHINE = "0123456789abcdef0123456789abcdef"
ENDPOINT = "127.0.0.1:18711"


def device(name: str, usable: int | None, **more: Any) -> dict[str, Any]:
    backend = "cpu" if name == "CPU" else "cuda"
    pool = f"{MACHINE}/ram" if backend == "cpu" else f"{MACHINE}/gpu/{name}"
    fixed = {"name": name, "backend": backend, "description": name, "kind": "dedicated", "pool": pool, "total": usable}
    return {**fixed, "free": usable, "usable": usable, **more}


def facts(*devices: dict[str, Any], boot: str = "boot-1", backend: str = "cpu") -> dict[str, Any]:
    listed = list(devices) or [device("CPU", 20 * GIB)]
    return {
        "machine_id": MACHINE,
        "boot_id": boot,
        "collected_at": "t",
        "backend": backend,
        "devices": listed,
        "links": [],
    }


def worker(**more: Any) -> dict[str, Any]:
    return {"name": "a", "endpoint": ENDPOINT, "devices": ["CPU"], **more}


def record(instance: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "host": "box",
        "cluster": "default",
        "facts": facts(),
        "instances": [instance or worker()],
    }
    return build_record(Inputs(**{**options, **more}))


def only(made: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = made["instances"][0]["devices"][0]
    return found


def probe(*memories: tuple[int, int], status: str = "ok", endpoint: str = ENDPOINT) -> dict[str, Any]:
    listed = [{"index": index, "total": total, "free": free} for index, (total, free) in enumerate(memories)]
    return {"endpoint": endpoint, "status": status, "protocol": "7.0.0", "devices": listed, "latency_ms": 0.1}


# --- shape


def test_a_record_has_the_shape_of_the_contract_and_feeds_the_planner() -> None:
    made = record(
        worker(memory_limit="200MiB", priority=1, bandwidth=30_000_000_000),
        build={"build": "b11434", "manifest_id": "m", "protocol": "7.0.0"},
        identities=["boot-1:77"],
    )
    assert {key: value for key, value in made.items() if key != "instances"} == {
        "schema": 1,
        "host": "box",
        "machine_id": MACHINE,
        "boot_id": "boot-1",
        "collected_at": "t",
        "cluster": "default",
        "build": "b11434",
        "manifest_id": "m",
        "mesh": {"address": None, "public_key": None},
    }
    instance = made["instances"][0]
    assert (instance["name"], instance["endpoint"], instance["started_at"]) == ("a", ENDPOINT, "boot-1:77")
    assert (instance["protocol"], instance["rtt_ms"]) == ("7.0.0", None)
    assert only(made) == {
        "index": 0,
        "device": "CPU",
        "backend": "cpu",
        "pool": f"{MACHINE}/ram",
        "usable": 20 * GIB,
        "reported": None,
        "idle_free": None,
        "budget": 200 * MIB,
        "bandwidth": 30_000_000_000,
        "overhead_ms": None,
        "priority": 1,
        "min_units": None,
        "max_units": None,
    }
    planned = fleet_devices([json.loads(json.dumps(made))])[0]
    assert (planned["usable"], planned["pool_usable"]) == (200 * MIB, 20 * GIB)


def test_a_primary_lends_its_own_devices_without_an_endpoint() -> None:
    both = facts(device("CUDA0", 23 * GIB), device("CPU", 20 * GIB), backend="cuda")
    made = record({"name": "primary"}, facts=both, primary=True, probes=[probe((1, 1))])
    assert made["instances"][0]["endpoint"] is None
    assert [entry["device"] for entry in made["instances"][0]["devices"]] == ["CUDA0", "CPU"]
    assert [entry["device"] for entry in fleet_devices([made])] == ["CPU", "CUDA0"]


def test_a_full_primary_may_have_nothing_left_but_a_worker_may_not() -> None:
    full = facts(device("CPU", 0))
    assert only(record({"name": "primary"}, facts=full, primary=True))["budget"] == 0
    with pytest.raises(WorkerRecordError, match="box, instance a, CPU: nothing can be lent"):
        record(facts=full)


def test_endpoints_come_from_the_instance_or_the_mesh() -> None:
    made = record({"name": "a", "port": 18712, "devices": ["CPU"]}, mesh={"address": "10.9.0.2", "public_key": "k"})
    assert made["instances"][0]["endpoint"] == "10.9.0.2:18712"
    assert made["mesh"]["public_key"] == "k"
    made = record({"name": "a", "address": "10.0.0.2", "devices": ["CPU"]})
    assert made["instances"][0]["endpoint"] == "10.0.0.2:50052"
    with pytest.raises(WorkerRecordError, match="no endpoint; give it"):
        record({"name": "a", "devices": ["CPU"]})
    with pytest.raises(FleetError, match="IPv4:port"):
        record(worker(endpoint="box.local:18711"))


def test_an_instance_may_serve_another_cluster_than_its_host() -> None:
    instances = [worker(), worker(name="b", endpoint="127.0.0.1:18712", cluster="other")]
    made = record(instances=instances, identities=["one", "two"])
    assert [(entry["cluster"], entry["started_at"]) for entry in made["instances"]] == [
        ("default", "one"),
        ("other", "two"),
    ]
    assert [entry["endpoint"] for entry in fleet_devices([made], "other")] == ["127.0.0.1:18712"]


# --- what is agreed


def test_what_a_cpu_worker_reports_is_never_believed() -> None:
    """Law 3: llama.cpp's CPU device says that all RAM is free, whatever limits and runs there."""
    made = record(probes=[probe((64 * GIB, 64 * GIB))])
    assert (only(made)["usable"], only(made)["budget"], only(made)["idle_free"]) == (20 * GIB, 20 * GIB, None)
    made = record(probes=[probe((1, 1))])
    assert only(made)["budget"] == 20 * GIB


def test_a_card_is_believed_where_it_says_less_than_the_driver() -> None:
    card = facts(device("CUDA0", 23 * GIB), backend="cuda")
    gpu = worker(devices=["CUDA0"])
    made = record(gpu, facts=card, probes=[probe((22 * GIB, 21 * GIB))])
    assert (only(made)["usable"], only(made)["idle_free"], only(made)["budget"]) == (22 * GIB, 21 * GIB, 21 * GIB)
    with pytest.raises(WorkerRecordError, match="reports no memory for it: its driver did not come up"):
        record(gpu, facts=card, probes=[probe((0, 0))])
    # free above total, as some drivers say (B1-09)
    made = record(gpu, facts=card, probes=[probe((22 * GIB, 30 * GIB))])
    assert only(made)["budget"] == 22 * GIB


def test_the_idle_measurement_is_kept_while_the_worker_is_busy() -> None:
    card = facts(device("CUDA0", 23 * GIB), backend="cuda")
    gpu = worker(devices=["CUDA0"])
    first = record(gpu, facts=card, probes=[probe((22 * GIB, 21 * GIB))])
    busy = probe(status="busy_ours")
    busy["protocol"] = None
    later = record(gpu, facts=card, previous=first, probes=[busy])
    assert decisions(later) == decisions(first)


@pytest.mark.parametrize(
    ("kept", "fresh", "same_boot", "result"),
    [
        (None, 100, True, 100),
        (100, None, True, None),
        (100, 109, True, 100),
        (100, 91, True, 100),
        (100, 90, True, 100),
        (100, 89, True, 89),
        (100, 111, True, 111),
        (100, 105, False, 100),
        (100, 95, False, 95),
        (0, 0, True, 0),
    ],
)
def test_a_figure_is_kept_until_it_moves(
    kept: int | None, fresh: int | None, same_boot: bool, result: int | None
) -> None:
    assert agreed(kept, fresh, same_boot) == result


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50), st.booleans())
def test_agreeing_twice_changes_nothing(kept: int, fresh: int, same_boot: bool) -> None:
    once = agreed(kept, fresh, same_boot)
    assert agreed(once, fresh, True) == once
    assert same_boot or once == fresh or (once is not None and once <= fresh)


def test_readings_move_and_the_record_does_not() -> None:
    """Laws 4 and 18: the second run, a few hundred MiB later, plans with the figures of the first."""
    first = record()
    moved = facts(device("CPU", 19 * GIB))
    moved["collected_at"] = "later"
    second = record(facts=moved, previous=first)
    assert decisions(second) == decisions(first)
    assert same_identity(first, second)
    third = record(facts=facts(device("CPU", 17 * GIB)), previous=second)
    assert only(third)["usable"] == 17 * GIB
    assert decisions(third) != decisions(first)
    assert only(record(facts=moved, previous=first, remeasure=True))["usable"] == 19 * GIB


def test_a_new_limit_counts_at_once_though_it_is_near_the_old_one() -> None:
    first = record(worker(memory_limit="200MiB"))
    second = record(worker(memory_limit="210MiB"), previous=first)
    assert only(second)["budget"] == 210 * MIB
    assert only(record(worker(), previous=second))["budget"] == 20 * GIB
    assert only(record(worker(memory_limit="900GiB")))["budget"] == 20 * GIB
    assert only(record(worker(memory_limit="50%")))["budget"] == 10 * GIB


def test_a_restart_and_a_boot_are_other_processes_but_no_other_decision() -> None:
    first = record(identities=["boot-1:5"])
    restarted = record(identities=["boot-1:9"], previous=first)
    assert decisions(restarted) == decisions(first)
    assert not same_identity(first, restarted)
    booted = record(identities=["boot-2:5"], previous=first, facts=facts(device("CPU", 21 * GIB), boot="boot-2"))
    assert decisions(booted) == decisions(first)
    booted = record(previous=first, facts=facts(device("CPU", 19 * GIB), boot="boot-2"))
    assert only(booted)["usable"] == 19 * GIB


def test_round_trip_times_are_kept_like_capacities() -> None:
    first = record(worker(rtt_ms=0.4))
    assert record(previous=first)["instances"][0]["rtt_ms"] == 0.4
    assert record(previous=first, remeasure=True)["instances"][0]["rtt_ms"] is None


def test_the_speed_of_the_link_is_that_of_the_interface_with_the_address() -> None:
    with_link = facts()
    with_link["links"] = [{"interface": "eth0", "address": "10.0.0.2", "speed_mbps": 2500}]
    made = record(worker(endpoint="10.0.0.2:18711"), facts=with_link)
    assert made["instances"][0]["link_mbps"] == 2500
    assert record(facts=with_link)["instances"][0]["link_mbps"] is None


def kept(**device_: Any) -> dict[str, Any]:
    """A kept record with one device, some of whose figures were spoilt by hand."""
    good = {"index": 0, "device": "CPU", "pool": "p", "usable": GIB, "reported": None, "idle_free": None}
    return {"schema": 1, "instances": [{"name": "a", "rtt_ms": None, "devices": [{**good, **device_}]}]}


@pytest.mark.parametrize(
    "junk",
    [
        None,
        7,
        "x",
        [],
        {},
        {"schema": 2, "instances": []},
        {"schema": 1, "instances": [7]},
        {"schema": 1, "instances": [{"name": "a", "devices": [], "rtt_ms": "fast"}]},
        {"schema": 1, "instances": [], "measured": True},
        kept(usable="lots"),
        kept(idle_free=-1),
        kept(index=[]),
        kept(pool=None),
    ],
)
def test_a_kept_record_of_another_shape_is_no_previous_one(junk: Any) -> None:
    assert not usable_previous(junk)
    assert decisions(record(previous=junk)) == decisions(record())


def test_a_kept_record_with_figures_is_a_previous_one() -> None:
    assert usable_previous(kept())


def test_null_is_the_same_as_absent() -> None:
    """As YAML has it for a key without a value: the default name, port and cluster, and facts that know less."""
    bare = {"name": "CPU", "backend": "cpu", "description": "x", "kind": "system_ram", "pool": "p", "total": 2 * GIB}
    lacking = facts({**bare, "free": None, "usable": GIB, "environment": None, "warnings": None, "uuid": None})
    nothing = dict.fromkeys(("name", "port", "endpoint", "address", "cluster", "env", "memory_limit", "listed_devices"))
    made = record({**nothing, "devices": ["CPU"]}, facts={**lacking, "links": None}, mesh={"address": "10.0.0.2"})
    (found,) = made["instances"]
    assert (found["name"], found["endpoint"], found["cluster"]) == ("default", "10.0.0.2:50052", "default")
    assert only(made)["budget"] == GIB


# --- devices of an instance


def test_a_mig_slice_is_found_by_the_environment_of_its_instance() -> None:
    """B3-07: every slice is CUDA0 of a worker of its own."""
    slices = facts(
        device("CUDA0", 39 * GIB, uuid="MIG-b", pool="m/gpu/x/MIG-b"),
        device("CUDA0", 19 * GIB, uuid="MIG-c", pool="m/gpu/x/MIG-c"),
        backend="cuda",
    )
    for uuid, size in (("MIG-b", 39 * GIB), ("MIG-c", 19 * GIB)):
        made = record(worker(devices=["CUDA0"], env={"CUDA_VISIBLE_DEVICES": uuid}), facts=slices)
        assert (only(made)["usable"], only(made)["pool"]) == (size, f"m/gpu/x/{uuid}")
    assert only(record(worker(devices=["CUDA0"]), facts=slices))["usable"] == 39 * GIB


def test_hidden_cards_renumber_the_rest() -> None:
    """B3-19: shares are mapped by identity, not by a number that changes with the environment."""
    cards = facts(device("CUDA0", 5 * GIB, uuid="GPU-1"), device("CUDA1", 23 * GIB, uuid="GPU-2"), backend="cuda")
    for visible in ("1", "GPU-2", " GPU-2 , GPU-1"):
        made = record(worker(devices=["cuda0"], env={"CUDA_VISIBLE_DEVICES": visible}), facts=cards)
        assert (only(made)["device"], only(made)["usable"]) == ("CUDA0", 23 * GIB)
    with pytest.raises(WorkerRecordError, match="CUDA1 was not detected on this host"):
        record(worker(devices=["CUDA1"], env={"CUDA_VISIBLE_DEVICES": "1"}), facts=cards)


def test_declared_devices_need_no_facts() -> None:
    devices = [{"device": "MTL0", "usable": "21GiB", "bandwidth": 400e9}, {"device": "CUDA0", "total": "24GiB"}]
    made = record(worker(devices=devices), facts=None)
    first, second = made["instances"][0]["devices"]
    assert (first["backend"], first["usable"], first["pool"], first["bandwidth"]) == (
        "metal",
        21 * GIB,
        "box/ram",
        400e9,
    )
    assert (second["usable"], second["pool"]) == (24 * GIB - 512 * MIB, "box/gpu/CUDA0")
    assert made["machine_id"] is None
    assert len(fleet_devices([made])) == 2


@pytest.mark.parametrize(
    ("instance", "options", "says"),
    [
        (worker(devices=["CUDA0"]), {}, r"CUDA0 was not detected on this host \(it has CPU\)"),
        (worker(devices=["CPU; rm"]), {}, "device is 'CPU; rm'"),
        (worker(devices="CPU"), {}, "must be a list"),
        (worker(devices=[]), {"facts": facts(backend="cuda")}, "no device of backend cuda"),
        (worker(), {"facts": None}, "no facts; run host_facts first"),
        (worker(), {"facts": {"devices": [{"nonsense": 1}]}}, "not those of host_facts"),
        (worker(), {"facts": facts(device("CPU", GIB, total="2"))}, "the facts: total of CPU is '2'"),
        (worker(), {"facts": facts(device("CPU", GIB, pool=[]))}, "not those of host_facts"),
        (worker(), {"facts": facts(device("CPU", GIB, environment="A=1"))}, "not those of host_facts"),
        (worker(link_mbps=0), {}, "link_mbps is 0; it must be above 0"),
        (worker(), {"probes": [{**probe((1, 1)), "devices": "CPU"}]}, "the probe's devices are 'CPU'"),
        (worker(memory_limit="lots"), {}, "memory_limit: 'lots' is no size"),
        (worker(memory_limit=200), {}, "a unit is missing"),
        (worker(), {"facts": facts(device("CPU", None))}, "unknown; set memory_limit"),
        (worker(priority="high"), {}, "priority is 'high'"),
        (worker(bandwidth=0), {}, "bandwidth is 0"),
        (worker(devices=[{"device": "CUDA0"}]), {}, "declare its memory"),
        (worker(devices=[{"device": "NPU0", "usable": "1GiB"}]), {}, "no backend follows"),
        (worker(), {"probes": [probe((1, 1), (1, 1))]}, "offers 2 devices, but 1 are configured"),
        (worker(), {"instances": []}, "no instances"),
        (worker(), {"instances": [7]}, "an instance is 7"),
        (worker(), {"instances": [worker(), worker(endpoint="127.0.0.1:18712")]}, "two instances are called 'a'"),
        (worker(), {"instances": [worker(), worker(name="b")]}, "a and b are both 127.0.0.1:18711"),
    ],
)
def test_what_cannot_be_is_named(instance: dict[str, Any], options: dict[str, Any], says: str) -> None:
    with pytest.raises(FleetError, match=says) as caught:
        record(instance, **options)
    assert str(caught.value).startswith("box")


def test_an_unknown_size_takes_the_limit_of_its_instance() -> None:
    made = record(worker(memory_limit="2GiB"), facts=facts(device("CPU", None)))
    assert (only(made)["usable"], only(made)["budget"]) == (2 * GIB, 2 * GIB)


# --- anything at all

LEAF = st.one_of(st.none(), st.booleans(), st.integers(-5, 1 << 40), st.floats(), st.text(max_size=8), st.just("CPU"))
ANY = st.recursive(
    LEAF, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3))
)
KEYS = [
    "name",
    "devices",
    "memory_limit",
    "env",
    "priority",
    "bandwidth",
    "endpoint",
    "backend",
    "rtt_ms",
    "port",
    "cluster",
]


@given(st.dictionaries(st.sampled_from(KEYS), ANY, max_size=4), ANY, st.integers(0, 1 << 45))
def test_any_instance_gives_a_record_within_the_memory_or_a_named_error(
    odd: dict[str, Any], junk: Any, size: int
) -> None:
    try:
        made = record({**worker(), **odd}, facts=facts(device("CPU", size)), previous=junk)
    except FleetError:
        return
    for instance in made["instances"]:
        for entry in instance["devices"]:
            assert 0 < entry["budget"] <= entry["usable"]


def test_building_a_record_leaves_its_inputs_alone() -> None:
    previous = record()
    inputs: dict[str, Any] = {"facts": facts(), "previous": previous, "probes": [probe((1, 1))]}
    before = copy.deepcopy(inputs)
    record(**inputs)
    assert inputs == before


@pytest.mark.parametrize("medium", ["virtual", "wireguard"])
def test_the_speed_that_a_tunnel_names_is_not_believed(medium: str) -> None:
    """Law 18: facts are collected before the tunnel is there, and by the second run with it and its made-up speed."""
    with_link = facts()
    with_link["links"] = [{"interface": "wg0", "address": "10.0.0.2", "speed_mbps": 10000, "medium": medium}]
    made = record(worker(endpoint="10.0.0.2:18711"), facts=with_link)
    assert made["instances"][0]["link_mbps"] is None
