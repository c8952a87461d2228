# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Links, routes and addresses of a Mac, from ifconfig, netstat and route, in the shapes that the mesh reads."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_apple import parse_ifconfig
from ansible_collections.llamafleet.rpc.plugins.module_utils._macos import tunnel_of
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
    """``{links, routes, default_address}`` as _underlay.underlay has them."""
    ifconfig = runner.run(["ifconfig"]).stdout
    lengths = prefixes(ifconfig)
    links = [
        {**link, "prefix": lengths.get(str(link["address"]), 32)}
        for link in parse_ifconfig(ifconfig, runner.run(["networksetup", "-listallhardwareports"]).stdout)
        if link["address"] is not None
    ]
    default = re.search(r"^\s*interface: (\S+)", runner.run(["route", "-n", "get", "default"]).stdout, re.MULTILINE)
    address = next((link["address"] for link in links if default and link["interface"] == default.group(1)), None)
    return {
        "links": links,
        "routes": parse_routes(runner.run(["netstat", "-rn", "-f", "inet"]).stdout),
        "default_address": address,
    }


def mac_interface_address(runner: Runner, name: str) -> str | None:
    """The address of an interface by its own name, or by the one that WireGuard's configuration has."""
    wanted = tunnel_of(runner, name) or name
    links = parse_ifconfig(runner.run(["ifconfig"]).stdout)
    return next((str(link["address"]) for link in links if link["interface"] == wanted and link["address"]), None)
