# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The network of a recorded Mac, in the shapes that the mesh reads."""

from __future__ import annotations

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils import _echo, _underlay, _wireguard
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
        ("wg-llama", "10.9.0.4", 24, 1420, "wireguard"),
    ]
    # Our own tunnel by its name, so that it is not taken for a network that collides with the mesh.
    assert {"to": "10.9.0.0/24", "interface": "wg-llama"} in found["routes"]
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


def test_no_package_of_linux_is_missed_and_those_of_homebrew_are() -> None:
    runner = studio()
    assert _wireguard.implementation(runner)[0] == "userspace"
    assert _wireguard.missing_packages(runner, None, True) == []
    assert _wireguard.missing_packages(runner, "userspace", True) == ["wireguard-tools", "wireguard-go"]
    runner.programs = {"wg": "/opt/homebrew/bin/wg", "wireguard-go": "/opt/homebrew/bin/wireguard-go"}
    assert _wireguard.missing_packages(runner, "userspace", True) == []


OWN, OTHER = "b" * 43 + "=", "c" * 43 + "="
DUMP = f"(hidden)\t{OWN}\t51820\toff\n{OTHER}\t(none)\t10.0.0.9:51820\t10.9.0.1/32\t1764446400\t148\t92\toff\n"


def test_what_runs_is_asked_by_the_number_of_this_start() -> None:
    runner = studio()
    runner.commands["ifconfig utun4"] = Result(0, "utun4: " + text("macos/ifconfig_studio").partition("utun4: ")[2], "")
    runner.commands["wg show utun4 dump"] = Result(0, DUMP, "")
    live = _wireguard.look(runner, "wg-llama")
    assert (live.device, live.address, live.mtu, live.port) == ("utun4", "10.9.0.4/24", 1420, 51820)
    assert live.answers and live.peers == {OTHER: ("10.9.0.1/32", None, False)}
    del runner.commands["wg show utun4 dump"]
    assert _wireguard.look(runner, "wg-llama").answers is False
    runner.commands["ifconfig utun4"] = Result(1, "", "ifconfig: interface utun4 does not exist")
    assert _wireguard.look(runner, "wg-llama").present is False, "a name file is no tunnel"


@pytest.mark.parametrize(("leaves_by", "status"), [("utun4", "ok"), ("en0", "wrong_route")])
def test_a_tunnel_of_a_mac_is_proved_by_packets_and_its_route(leaves_by: str, status: str) -> None:
    runner = studio()
    runner.commands["ifconfig utun4"] = Result(0, "utun4: flags=8051<UP> mtu 1420\n", "")
    runner.commands["wg show utun4 dump"] = Result(0, DUMP, "")
    runner.commands["route -n get 10.9.0.1"] = Result(0, f"   route to: 10.9.0.1\n  interface: {leaves_by}\n", "")
    peer = _wireguard.Peer("head", OTHER, "10.9.0.1")
    verdicts = _wireguard.prove(runner, "wg-llama", [peer], ["head"], 0, lambda hosts, _size: set(hosts))
    assert verdicts[0]["status"] == status


def test_who_has_a_udp_port_of_a_mac() -> None:
    runner = studio()
    runner.commands["lsof -nP -iUDP:51820 -Fpc"] = Result(0, "p612\ncTunnelblick\nf7\n", "")
    assert _underlay.port_owner(runner, 51820) == "Tunnelblick (pid 612)"
    runner.commands["lsof -nP -iUDP:51820 -Fpc"] = Result(1, "", "")
    assert _underlay.port_owner(runner, 51820) is None


def test_the_header_of_a_ping_of_a_mac() -> None:
    """Length and flags in the order of the machine (little-endian on all Macs), the don't-fragment bit set."""
    header = _echo._mac_header("10.9.0.1", 1400)
    assert header[:2] == b"\x45\0" and header[2:4] == (1420).to_bytes(2, "little")
    assert header[6:8] == b"\x00\x40" and header[9] == 1 and header[16:] == bytes([10, 9, 0, 1])
