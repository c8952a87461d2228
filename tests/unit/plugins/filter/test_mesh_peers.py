# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The filter hands on and names itself in errors; what it computes is tested with _mesh."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.llamafleet.rpc.plugins.filter.mesh_peers import FilterModule

mesh_peers = FilterModule().filters()["mesh_peers"]


def hosts() -> list[Any]:
    node: dict[str, Any] = {
        "public_key": None,
        "links": [],
        "routes": [],
        "peers": {},
        "default_address": "192.168.0.5",
    }
    return [
        UserDict(inventory_hostname="p", group_names=["llama_primary"], llama_mesh__node={"node": dict(node)}),
        UserDict(inventory_hostname="w", group_names=["llama_workers"], llama_mesh__node={"node": dict(node)}),
    ]


def test_hosts_of_a_run_that_have_no_key_yet_are_planned_for_check_mode() -> None:
    found = mesh_peers(iter(hosts()), network="10.77.0.0/24", port=51999)
    assert found["prefix"] == 24
    (peer,) = found["hosts"]["w"]["peers"]
    assert (peer["host"], peer["public_key"], peer["endpoint"]) == ("p", None, "192.168.0.5:51999")


@pytest.mark.parametrize("wrong", ["n1", {"n1": {}}, 7, None])
def test_the_input_is_a_list_of_hosts(wrong: object) -> None:
    with pytest.raises(AnsibleFilterError, match=r"llamafleet\.rpc\.mesh_peers: the input is a"):
        mesh_peers(wrong)


def test_an_error_names_the_filter() -> None:
    with pytest.raises(AnsibleFilterError, match=r"llamafleet\.rpc\.mesh_peers: llama_mesh_network 'x'"):
        mesh_peers(hosts(), network="x")
