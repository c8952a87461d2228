# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A wrong inventory is refused before any host is touched, with where and what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._fleet import (
    fleet_problems,
    limit_problems,
    machine_problems,
    topology,
    unread_variables,
    worker_identities,
)


def primary(name: str = "p", **more: Any) -> dict[str, Any]:
    return {"inventory_hostname": name, "group_names": ["llama_fleet", "llama_primary"], **more}


def worker(name: str, **more: Any) -> dict[str, Any]:
    return {"inventory_hostname": name, "group_names": ["llama_fleet", "llama_workers"], **more}


GOOD = [
    primary(),
    worker("a", llama_worker_address="10.0.0.2"),
    worker(
        "b",
        llama_worker_address="10.0.0.3",
        llama_worker_instances=[{"name": "x", "port": 1801}, {"name": "y", "port": 1802}],
    ),
]


def test_a_good_fleet_has_no_problems() -> None:
    assert fleet_problems(GOOD) == []
    ports = {"p": [8080], "a": [50052], "b": [1801, 1802]}
    assert topology(GOOD) == {"default": {"primary": "p", "workers": ["a", "b"], "ports": ports}}


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ([], "are empty"),
        ([worker("a")], "but no primary"),
        ([primary("p"), primary("q"), worker("a")], "2 primaries \\(p, q\\)"),
        ([{**primary("p"), "group_names": ["llama_primary", "llama_workers"]}], "p is primary and worker"),
        ([primary(), worker("a", llama_worker_address="gpu.lan")], "'gpu.lan' is no IPv4 address"),
        ([primary(), worker("a", llama_worker_address="fd00::2")], "'fd00::2' is no IPv4 address"),
        ([primary(), worker("a", llama_worker_address="localhost")], "'localhost' is no IPv4 address"),
        ([primary(), worker("a", llama_worker_address="0.0.0.0")], "every interface"),
        (
            [primary(), worker("a", llama_worker_instances=[{"name": "x", "port": 70000}])],
            "port 70000 is not a number from 1",
        ),
        ([primary(), worker("a", llama_worker_instances=[{"name": "x", "port": 0}])], "port 0"),
        ([primary(), worker("a", llama_worker_instances=[{"name": "x", "port": True}])], "port True"),
        ([primary(), worker("a", llama_worker_instances=[])], None),
        ([primary(), worker("a", llama_worker_instances="x")], "must be a list"),
        ([primary(), worker("a", llama_worker_instances=[{"nam": "x"}])], "unknown keys nam"),
        ([primary(), worker("a", llama_worker_instances=[{"port": 5}, {"port": 6}])], "'default' is taken"),
        (
            [primary(), worker("a", llama_worker_instances=[{"name": "x", "port": 5}, {"name": "y", "port": 5}])],
            "port 5 is taken",
        ),
        (
            [primary(), worker("a", llama_worker_address="10.0.0.2"), worker("b", llama_worker_address="10.0.0.2")],
            "10.0.0.2:50052 is given twice",
        ),
        (
            [primary(), worker("a", llama_fleet_scope="user"), worker("b", llama_fleet_scope="user")],
            "127.0.0.1:50052 is given twice, by a",
        ),
        ([primary(), worker("a"), worker("b")], None),  # the mesh gives each its own address
        ([primary(), worker("a", llama_worker_instances=[{"devices": ["CUDA 0"]}])], "'CUDA 0' is no llama.cpp device"),
        ([primary(llama_fleet_build="b11434"), worker("a", llama_fleet_build="b11430")], "llama_fleet_build differs"),
        ([primary(llama_build_source="git"), worker("a")], "llama_build_source differs .* \\(the default: a; git: p"),
        ([primary(llama_fleet_cluster="A B")], "'A B' must be"),
        ([*GOOD, {"inventory_hostname": "stray", "group_names": ["llama_fleet"]}], "stray: in neither"),
        ([primary(llama_fleet_build="master"), worker("a", llama_fleet_build="master")], "'master' is not a fixed tag"),
        ([primary(llama_primary_port=70000), worker("a")], "p: llama_primary_port: port 70000"),
        ([primary(llama_primary_port="abc"), worker("a")], "p: llama_primary_port: port 'abc'"),
        ([primary(llama_primary_port=50052), worker("a", llama_fleet_scope="user")], "that of|given twice"),
        ([primary(llama_primary_host="0.0.0.0"), worker("a")], "would serve others without a key"),
        ([primary(llama_primary_extra_args=["-ts", "1"]), worker("a")], "p: llama_primary_extra_args: -ts is refused"),
        ([primary(llama_primary_n_ctx="many"), worker("a")], "p: n_ctx is 'many'"),
        ([primary(llama_primary_type_k="q9"), worker("a")], "p: type_k is 'q9'"),
        ([primary(), worker("a", llama_worker_instances=[{"port": 22}])], "port 22 is for root alone"),
        ([primary(), worker("a", llama_worker_instances=[{"devices": "CPU"}])], "devices is 'CPU', not a list"),
        ([primary(), worker("a", llama_worker_instances=[{"backend": "foo"}])], "backend 'foo' is not one of"),
        ([primary(), worker("a", llama_worker_instances=[{"threads": "many"}])], "threads is 'many'"),
        ([primary(), worker("a", llama_worker_instances=[{"min_units": 3, "max_units": 2}])], "more than max_units"),
        ([primary(), worker("a", llama_worker_instances=[{"env": [1]}])], "not a mapping of variables"),
        (
            [primary(), worker("a", llama_worker_instances=[{"memory_limit": "lots"}])],
            "0.: memory_limit",
        ),
        ([primary(llama_primary_n_ctx="8192", llama_primary_kv_unified="true"), worker("a")], None),
    ],
)
def test_bad_input_is_named(hosts: list[dict[str, Any]], message: str | None) -> None:
    """Cases B1-10, B5-13, B2-02, B6-08 (what one host decides for all is the same for all), and other bad input."""
    problems = fleet_problems(hosts)
    if message is None:
        assert problems == []
        return
    assert any(re.search(message, problem) for problem in problems), problems


@pytest.mark.parametrize("entry", [{}, {"inventory_hostname": ""}, None, "n1"])
def test_what_is_no_host_is_told_with_what_is_expected(entry: Any) -> None:
    for ask in (fleet_problems, topology):
        with pytest.raises(FleetError, match=r"no inventory_hostname; use groups\['llama_fleet'\]"):
            ask([entry])


def test_one_cause_is_one_problem_however_many_hosts_have_it() -> None:
    lost = [{"inventory_hostname": f"n{number}", "group_names": ["llama_fleet", "workers"]} for number in range(9)]
    (problem,) = fleet_problems([*GOOD, *lost])
    assert problem.startswith(
        "n0, n1, n2, n3, n4 and 4 more: in neither llama_primary nor llama_workers, but in workers;"
    )
    (problem, *_rest) = fleet_problems([worker(f"n{number}", llama_fleet_cluster="Big") for number in range(9)])
    assert problem.startswith("n0, n1, n2, n3, n4 and 4 more: llama_fleet_cluster 'Big' must be")


def test_a_second_primary_is_named_for_what_it_is() -> None:
    (problem,) = fleet_problems([primary("p"), primary("q"), worker("a")])
    assert "cluster default has 2 primaries (p, q)" in problem


def test_a_misspelt_variable_is_named_with_the_one_that_was_meant() -> None:
    known = {"llama_fleet_missing_worker", "llama_primary_n_ctx"}
    hosts = [
        primary(
            llama_primary_nctx=8192, llama_fleet_missing_workers="drop", llama_primary_n_ctx=1, llama_primary__own=1
        ),
        worker("a", llama_fleet_missing_workers="drop", llama_model_of_mine="x", vault_llama=1),
    ]
    assert unread_variables(hosts, known) == [
        "llama_fleet_missing_workers of p, a is read by no role; did you mean llama_fleet_missing_worker?",
        "llama_model_of_mine of a is read by no role",
        "llama_primary_nctx of p is read by no role; did you mean llama_primary_n_ctx?",
    ]


def test_two_clusters_on_one_machine_may_use_the_same_loopback_port() -> None:
    hosts = [
        primary("p", llama_fleet_cluster="one"),
        worker("a", llama_fleet_cluster="one"),
        primary("q", llama_fleet_cluster="two"),
        worker("b", llama_fleet_cluster="two"),
    ]
    assert fleet_problems(hosts) == []


def test_a_limit_without_the_primary_is_refused_with_the_limit_that_works() -> None:
    assert limit_problems(GOOD, ["p", "a"]) == []
    (problem,) = limit_problems(GOOD, ["a"])
    assert "--limit 'a,p'" in problem


def test_identities_are_those_of_the_cluster_alone() -> None:
    records = [
        {"cluster": "default", "instances": [{"endpoint": "10.0.0.2:1", "started_at": "b:1"}]},
        {"cluster": "other", "instances": [{"endpoint": "10.0.0.3:1", "started_at": "b:2"}]},
        {"cluster": "default", "instances": [{"endpoint": None, "started_at": None}]},
    ]
    assert worker_identities(records, "default") == {"10.0.0.2:1": "b:1"}


def seen(host: dict[str, Any], machine: str, boot: str | None = "b", address: str = "10.0.0.1") -> dict[str, Any]:
    """A host whose facts were collected."""
    facts = {"machine_id": machine, "boot_id": boot, "links": [{"interface": "eth0", "address": address}]}
    return {**host, "ansible_facts": {"llamafleet": facts}}


def test_one_machine_twice_in_the_inventory_would_overwrite_its_own_services() -> None:
    """By its name and by its address, for example: both would write llama-rpc-default-default."""
    hosts = [seen(primary(), "m1"), seen(worker("gpu"), "m2"), worker("off"), seen(worker("gpu.lan"), "m2")]
    problems = machine_problems(hosts)
    assert set(problems) == {"gpu.lan"}
    assert "gpu.lan and gpu are one machine (m2)" in problems["gpu.lan"]
    assert "the service llama-rpc-default-default and the endpoint 127.0.0.1:50052" in problems["gpu.lan"]


def test_hosts_of_one_machine_differ_in_services_and_endpoints() -> None:
    two = {"llama_worker_instances": [{"name": "two", "port": 50053}]}
    assert machine_problems([seen(primary(), "m"), seen(worker("a"), "m"), seen(worker("b", **two), "m")]) == {}
    same = {"llama_worker_instances": [{"name": "two", "port": 8080}]}
    assert (
        "the endpoint 127.0.0.1:8080" in machine_problems([seen(primary(), "m"), seen(worker("b", **same), "m")])["b"]
    )
    elsewhere = {**same, "llama_worker_address": "127.0.0.2"}
    assert machine_problems([seen(primary(), "m"), seen(worker("b", **elsewhere), "m")]) == {}


def test_containers_of_one_machine_have_services_of_their_own() -> None:
    assert (
        machine_problems([seen(worker("a"), "m", "b", "172.17.0.2"), seen(worker("b"), "m", "b", "172.17.0.3")]) == {}
    )


def test_a_copied_machine_has_to_get_an_identity_of_its_own() -> None:
    problems = machine_problems([seen(worker("a"), "m", "b1"), seen(worker("b"), "m", "b2"), seen(worker("c"), "n")])
    assert set(problems) == {"a", "b"}
    assert all(
        "a, b are different machines" in text and "systemd-machine-id-setup" in text for text in problems.values()
    )
