# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: mesh_peers
short_description: The mesh of a fleet, with the address, the peers and the open ports of each host
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - Computes the mesh once for the whole inventory. Members are all hosts of the groups C(llama_primary) and
    C(llama_workers), never only those of the play. A host outside of the run stays a peer, as it was read or as the
    others know it, and a host that left the inventory is in no list any more.
  - A host keeps its address. A new one gets the address that its name hashes to, or the next free one, unless
    C(llama_mesh_address) states it.
  - No private or preshared key goes in or comes out.
positional: _input
options:
  _input:
    description:
      - Variables of the hosts, as C(groups['llama_fleet'] | map('extract', hostvars)). Hosts of the run hold the result
        of M(llamafleet.rpc.mesh_node) as C(llama_mesh__node).
    type: list
    elements: dict
    required: true
  mode:
    description: V(wireguard) is a mesh of ours. V(existing) and V(none) only say who reaches whom.
    type: str
    choices: [wireguard, existing, none]
    default: wireguard
  network:
    description: IPv4 network of the mesh.
    type: str
    default: 10.98.0.0/20
  port:
    description: UDP port of the mesh.
    type: int
    default: 51820
  topology:
    description: V(star) makes each worker a peer of its primary only. V(full) joins all hosts of a cluster.
    type: str
    choices: [star, full]
    default: star
  known:
    description: The C(node) of hosts outside of the run, by name, as far as they could be read.
    type: dict
    default: {}
  preshared:
    description: Names of the tunnels that have a preshared key, to find misspelt ones.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Compute the mesh
  ansible.builtin.set_fact:
    mesh: >-
      {{ groups['llama_fleet'] | map('extract', hostvars) | llamafleet.rpc.mesh_peers(network='10.98.0.0/20') }}
  run_once: true

- name: The peers of this host
  ansible.builtin.debug:
    msg: "{{ mesh.hosts[inventory_hostname].peers | map(attribute='host') }}"
"""

RETURN = r"""
_value:
  description:
    - The mesh, with C(mode), C(network), C(prefix), and C(hosts), which has for each host of the run its C(address),
      its C(peers) (host, public_key, address, endpoint, keepalive, path_mtu, link, fresh), its worker C(ports) with the
      one C(source) that may come in, the C(endpoints) that it uses as a primary, and its C(primaries) by cluster.
    - C(unknown) are hosts that a host of the run should peer with while nobody knows their key. C(warnings) are
      sentences.
  type: dict
"""

from collections.abc import Iterable, Mapping
from typing import Any, Callable

from ansible.errors import AnsibleFilterError
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._fleet import host_list
from ansible_collections.llamafleet.rpc.plugins.module_utils._mesh import plan_mesh


def mesh_peers(
    hosts: Any,
    mode: str = "wireguard",
    network: str = "10.98.0.0/20",
    port: int = 51820,
    topology: str = "star",
    known: Mapping[str, Any] | None = None,
    preshared: Iterable[str] = (),
) -> dict[str, Any]:
    try:
        return plan_mesh(host_list(hosts), mode, network, port, topology, known, preshared)
    except FleetError as error:
        raise AnsibleFilterError(f"llamafleet.rpc.mesh_peers: {error}") from error


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"mesh_peers": mesh_peers}
