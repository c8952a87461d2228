#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: mesh_info
short_description: Prove that the tunnels of a host work
version_added: 0.1.0
description:
  - Sends a small packet and one of the full MTU through the tunnel to each peer, and looks at handshakes and routes.
    So a dead C(wireguard-go), a key of yesterday, a path that loses big packets and a route that bypasses the tunnel
    are told apart, none of which a unit's state shows.
author:
  - llamafleet contributors (@llamafleet)
extends_documentation_fragment:
  - llamafleet.rpc.attributes
  - llamafleet.rpc.attributes.info_module
  - llamafleet.rpc.attributes.posix
  - llamafleet.rpc.attributes.actiongroup_all
options:
  name:
    description: Name of the interface.
    type: str
    required: true
  peers:
    description: The peers, as the filter P(llamafleet.rpc.mesh_peers#filter) returns them for a host.
    type: list
    elements: dict
    required: true
  required:
    description: Hosts whose tunnel must work. The module fails when one does not.
    type: list
    elements: str
    default: []
  wait:
    description: Seconds that the tunnels to O(required) hosts have to come up.
    type: int
    default: 20
"""

EXAMPLES = r"""
- name: The tunnels of this host work
  llamafleet.rpc.mesh_info:
    name: wg-llama
    peers: "{{ mesh.hosts[inventory_hostname].peers }}"
    required: [n1]
"""

RETURN = r"""
peers:
  description: One entry for each peer.
  returned: always
  type: list
  elements: dict
  contains:
    host:
      description: Name of the peer.
      type: str
    address:
      description: Its address in the mesh.
      type: str
    status:
      description:
        - C(ok), C(silent) (the tunnel is up, pings are not answered), C(no_answer), C(big_packets_lost),
          C(wrong_route) or C(not_running).
      type: str
    handshake_age:
      description: Seconds since the last handshake, or null.
      type: int
    hint:
      description: What to do.
      type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils import _wireguard as wireguard
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._mesh import checked_interface
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "peers": {"type": "list", "elements": "dict", "required": True},
            "required": {"type": "list", "elements": "str", "default": []},
            "wait": {"type": "int", "default": 20},
        },
        supports_check_mode=True,
    )
    options = module.params
    try:
        name = checked_interface(options["name"])
        peers = [wireguard.checked_peer(peer, wireguard.DEFAULT_PORT) for peer in options["peers"]]
        verdicts = wireguard.prove(SystemRunner(), name, peers, options["required"], options["wait"])
    except FleetError as error:
        module.fail_json(msg=f"mesh interface {options['name']}: {error}")
    bad = [
        f"{verdict['host']} ({verdict['address']}): {verdict['status']}: {verdict['hint']}"
        for verdict in verdicts
        if verdict["host"] in options["required"] and verdict["status"] not in ("ok", "silent")
    ]
    if bad:
        module.fail_json(msg=f"the mesh does not work on {name}: " + "; ".join(bad), peers=verdicts)
    silent = [verdict for verdict in verdicts if verdict["status"] != "ok"]
    for verdict in silent:
        module.warn(f"mesh: {verdict['host']}: {verdict['status']}: {verdict['hint']}")
    module.exit_json(changed=False, peers=verdicts)


if __name__ == "__main__":
    main()
