# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Links, routes and addresses of a Mac, from ifconfig, netstat and route, in the shapes that the mesh reads."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_apple import parse_ifconfig
from ansible_collections.llamafleet.rpc.plugins.module_utils._macos import TUNNELS, tunnel_of
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Runner

MARK = "/System/Library/CoreServices/SystemVersion.plist"


def is_mac(runner: Runner) -> bool:
    """Whether this host is a Mac."""
    return runner.exists(MARK)


def prefixes(text: str) -> dict[str, int]:
    """Address -> prefix length, of ``ifconfig``, which prints the mask in hex."""
    found = re.findall(r"^\s+inet (\d{1,3}(?:\.\d{1,3}){3}) .*?netmask 0x([0-9a-f]{8})", text, re.MULTILINE)
    return {address: bin(int(mask, 16)).count("1") for address, mask in found}


def parse_routes(text: str) -> list[dict[str, Any]]:
    """``{to, interface}`` of the networks in ``netstat -rn -f inet``, which leaves out the zeros: 10.0.0/24, 127."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) < 4 or not re.fullmatch(r"\d[\d.]*(/\d{1,2})?", words[0]) or "H" in words[2] or words[3] == "lo0":
            continue
        octets, _slash, length = words[0].partition("/")
        parts = octets.split(".")
        whole = ".".join([*parts, *["0"] * (4 - len(parts))])
        try:
            network = ipaddress.ip_network(f"{whole}/{length or 8 * len(parts)}", strict=False)
        except ValueError:
            continue  # not a route
        found.append({"to": str(network), "interface": words[3]})
    return found


def mac_underlay(runner: Runner) -> dict[str, Any]:
    """``{links, routes, default_address}`` as _underlay.underlay has them.

    A tunnel of WireGuard goes by the name of its configuration, for its utunN is another one after each start.
    """
    ifconfig = runner.run(["ifconfig"]).stdout
    lengths, tunnels = prefixes(ifconfig), tunnel_names(runner)
    links = [
        {**link, "prefix": lengths.get(str(link["address"]), 32)}
        for link in parse_ifconfig(ifconfig, runner.run(["networksetup", "-listallhardwareports"]).stdout)
        if link["address"] is not None
    ]
    default = mac_route(runner, "default")
    address = next((link["address"] for link in links if default and link["interface"] == default), None)
    for link in links:
        if link["interface"] in tunnels:
            link.update(interface=tunnels[link["interface"]], medium="wireguard")
    routes = parse_routes(runner.run(["netstat", "-rn", "-f", "inet"]).stdout)
    return {
        "links": links,
        "routes": [{**route, "interface": tunnels.get(route["interface"], route["interface"])} for route in routes],
        "default_address": address,
    }


def tunnel_names(runner: Runner) -> dict[str, str]:
    """utunN -> the name of WireGuard's configuration, for each that runs."""
    names = [entry[: -len(".name")] for entry in runner.listdir(TUNNELS) if entry.endswith(".name")]
    return {device: name for name in names for device in [tunnel_of(runner, name)] if device}


def mac_route(runner: Runner, to: str) -> str | None:
    """The interface that packets to an address, or by the default route, leave by; None without a route."""
    shown = runner.run(["route", "-n", "get", to])
    found = re.search(r"^\s*interface: (\S+)", shown.stdout, re.MULTILINE)
    return found.group(1) if shown.rc == 0 and found else None


def mac_tunnel(runner: Runner, name: str) -> tuple[str, str | None, int | None] | None:
    """(utunN, address with prefix, MTU) of the tunnel ``name``; None while it is down."""
    device = tunnel_of(runner, name)
    shown = runner.run(["ifconfig", device]) if device else None
    if device is None or shown is None or shown.rc != 0:
        return None
    address = next((f"{one}/{length}" for one, length in prefixes(shown.stdout).items()), None)
    mtu = re.search(r"\bmtu (\d{1,9})", shown.stdout)
    return device, address, int(mtu.group(1)) if mtu else None


def mac_udp_owner(runner: Runner, port: int) -> str | None:
    """Who has a UDP port, in words; None when it is free."""
    shown = runner.run(["lsof", "-nP", f"-iUDP:{port}", "-Fpc"]).stdout
    found = re.search(r"^p(\d+)\n(?:c(.*))?", shown, re.MULTILINE)
    return f"{found.group(2) or 'a process'} (pid {found.group(1)})" if found else None


def mac_interface_address(runner: Runner, name: str) -> str | None:
    """The address of an interface by its own name, or by the one that WireGuard's configuration has."""
    wanted = tunnel_of(runner, name) or name
    links = parse_ifconfig(runner.run(["ifconfig"]).stdout)
    return next((str(link["address"]) for link in links if link["interface"] == wanted and link["address"]), None)
