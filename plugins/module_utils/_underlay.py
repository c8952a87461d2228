# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What lies below the mesh on one host: its links and routes, the address of another mesh, who has a UDP port."""

from __future__ import annotations

from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._hosts import links
from ansible_collections.llamafleet.rpc.plugins.module_utils._mac_network import (
    is_mac,
    mac_interface_address,
    mac_udp_owner,
    mac_underlay,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._mesh import MeshError
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Runner
from ansible_collections.llamafleet.rpc.plugins.module_utils._sockets import describe_process, pids_of
from ansible_collections.llamafleet.rpc.plugins.module_utils._wireguard import ip_json


def underlay(runner: Runner) -> dict[str, Any]:
    """``{links, routes, default_address}``: the host's IPv4 links (as _hosts.links, with ``prefix``) and routes."""
    if is_mac(runner):
        return mac_underlay(runner)
    found: list[dict[str, Any]] = []
    for entry in ip_json(runner, "-4", "addr", "show"):
        for address in entry.get("addr_info", []):
            if address.get("family") != "inet" or entry.get("ifname") == "lo":
                continue
            name = str(entry["ifname"])
            facts = next((link for link in links(runner, {name: address["local"]}) if link["interface"] == name), {})
            found.append(
                {
                    "interface": name,
                    "address": str(address["local"]),
                    "prefix": int(address["prefixlen"]),
                    "mtu": int(entry["mtu"]),
                    "speed_mbps": facts.get("speed_mbps"),
                    "medium": facts.get("medium", "virtual"),
                }
            )
    routes, default = [], None
    for route in ip_json(runner, "-4", "route", "show"):
        if route.get("dst") == "default":
            device = next((link for link in found if link["interface"] == route.get("dev")), None)
            default = default or route.get("prefsrc") or (device or {}).get("address")
        elif route.get("type", "unicast") == "unicast":
            routes.append({"to": str(route["dst"]), "interface": route.get("dev")})
    return {"links": found, "routes": routes, "default_address": default}


def interface_address(runner: Runner, name: str) -> str:
    """The IPv4 address of an interface that is there already (mode existing), such as tailscale0."""
    mac = is_mac(runner)
    on_mac = mac_interface_address(runner, name) if mac else None
    if on_mac:
        return on_mac
    for entry in [] if mac else ip_json(runner, "-4", "addr", "show"):
        if entry.get("ifname") == name:
            for address in entry.get("addr_info", []):
                if address.get("family") == "inet":
                    return str(address["local"])
    raise MeshError(
        f"interface {name} is not there or has no IPv4 address, and llama_mesh_mode is existing; start it, or name "
        "another one with llama_mesh_interface"
    )


def port_owner(runner: Runner, port: int) -> str | None:
    """Who has a UDP port of this host, in words; None when it is free."""
    if is_mac(runner):
        return mac_udp_owner(runner, port)
    for name in ("udp", "udp6"):
        for line in (runner.read(f"/proc/net/{name}", 8 << 20) or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) < 10 or int(fields[1].rpartition(":")[2], 16) != port:
                continue
            inode = int(fields[9])
            pid = pids_of(runner, [inode]).get(inode)
            process = describe_process(runner, pid) if pid else None
            if process:
                return f"{process.exe or 'a process'} (pid {pid}{f', {process.unit}' if process.unit else ''})"
            return "the kernel (another WireGuard interface, or a tunnel)"
    return None
