# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The network of a recorded Mac, in the shapes that the mesh reads."""

from __future__ import annotations

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils import _underlay, _wireguard
from ansible_collections.llamafleet.rpc.plugins.module_utils._mac_network import MARK, parse_routes
from ansible_collections.llamafleet.rpc.plugins.module_utils._mesh import MeshError
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Result
from ansible_collections.llamafleet.rpc.tests.unit.fakes import FakeRunner
from ansible_collections.llamafleet.rpc.tests.unit.recorded import mac, text


def studio() -> FakeRunner:
    runner = mac("sysctl_m4_max_128g", netstat=text("macos/netstat_studio"), route="  interface: en0\n")
    runner.files = {MARK: "", "/var/run/wireguard/wg-llama.name": "utun4\n"}
    runner.commands["ifconfig wg-llama"] = Result(1, "", "ifconfig: interface wg-llama does not exist\n")
    return runner


def test_links_routes_and_the_default_address() -> None:
    found = _underlay.underlay(studio())
    assert found["default_address"] == "10.0.0.4"
    assert [(one["interface"], one["address"], one["prefix"], one["mtu"], one["medium"]) for one in found["links"]] == [
        ("en0", "10.0.0.4", 24, 1500, "wired"),
        ("en1", "10.0.1.4", 24, 1500, "wireless"),
        ("utun4", "10.9.0.4", 24, 1420, "virtual"),
    ]
    assert {"to": "10.9.0.0/24", "interface": "utun4"} in found["routes"]
    assert {"to": "10.0.1.0/24", "interface": "en1"} in found["routes"]


def test_routes_are_written_out_and_hosts_and_loopback_left_out() -> None:
    routes = [route["to"] for route in parse_routes(text("macos/netstat_studio"))]
    assert routes == ["10.0.0.0/24", "10.0.0.1/32", "10.0.1.0/24", "10.9.0.0/24", "169.254.0.0/16", "224.0.0.0/4"]
    assert parse_routes("") == [] and parse_routes("999/24 x U en0\n1.2.3.4.5/3 x U en0\n") == []


def test_the_address_on_the_mesh_by_wireguards_name_or_by_the_interface() -> None:
    assert _underlay.interface_address(studio(), "wg-llama") == "10.9.0.4"
    assert _underlay.interface_address(studio(), "en1") == "10.0.1.4"
    down = studio()
    down.commands["ifconfig"] = Result(0, "", "")
    with pytest.raises(MeshError, match="is not there"):
        _underlay.interface_address(down, "wg-llama")
    assert not any(argv[0] == "ip" for argv in down.ran)


def test_no_package_of_linux_is_missed() -> None:
    assert _wireguard.missing_packages(studio(), None, True) == []
