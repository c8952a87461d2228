#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: mesh_interface
short_description: Bring the WireGuard interface of a host to what it shall be
version_added: 0.1.0
description:
  - Writes the configuration, and does the least that makes the running interface equal to it. A changed peer, key or
    port is loaded with C(wg syncconf), which does not interrupt the tunnels that stay. Only another address, or an
    interface that is gone or does not answer, needs a start.
  - It looks at the interface, never at the state of its unit, for C(wg-quick@) stays active when C(wireguard-go) died.
  - On a Mac the interface is a C(utun) of C(wireguard-go), which a job of launchd runs. Nobody has run that on a real
    Mac yet.
  - The private key comes from the file that M(llamafleet.rpc.mesh_node) made. It is in no option, result or diff.
author:
  - llamafleet contributors (@llamafleet)
extends_documentation_fragment:
  - llamafleet.rpc.attributes
  - llamafleet.rpc.attributes.state_module
  - llamafleet.rpc.attributes.posix
  - llamafleet.rpc.attributes.actiongroup_all
options:
  name:
    description: Name of the interface.
    type: str
    required: true
  state:
    description: V(absent) removes interface, configuration and key.
    type: str
    choices: [present, absent]
    default: present
  address:
    description: Address of the host in the mesh. Needed for O(state=present).
    type: str
  prefix:
    description: Prefix length of the mesh.
    type: int
    default: 24
  port:
    description: UDP port to listen on.
    type: int
    default: 51820
  mtu:
    description:
      - MTU of the interface in bytes. V(0) settles it once. That is the MTU of the narrowest path to a peer, as far as
        pings of that size come back, less 80, and 1420 where nobody answers.
    type: int
    default: 0
  peers:
    description: The peers, as the filter P(llamafleet.rpc.mesh_peers#filter) returns them for a host.
    type: list
    elements: dict
    default: []
    suboptions:
      host:
        description: Inventory name of the peer.
        type: str
        required: true
      public_key:
        description: Its public key. May be null in check mode only.
        type: str
      address:
        description: Its address in the mesh, the only one that it may use.
        type: str
        required: true
      endpoint:
        description: Address and UDP port below the mesh. Null for a peer that calls this host.
        type: str
      keepalive:
        description: Seconds between packets that keep the way through a NAT open.
        type: int
      path_mtu:
        description: MTU of the links at both ends in bytes, the most that the path can carry.
        type: int
      link:
        description: Name of the tunnel in O(preshared_keys).
        type: str
      fresh:
        description: Whether the peer is part of this run. Not used here.
        type: bool
  preshared_keys:
    description: Preshared keys by the name of the tunnel.
    type: dict
    default: {}
  directory:
    description: Directory of key and configuration. C(wg-quick@) reads C(/etc/wireguard) only.
    type: path
    default: /etc/wireguard
  manager:
    description:
      - V(systemd) uses the unit C(wg-quick@), V(launchd) a job of its own on a Mac. V(none) starts it itself; it is
        gone after a boot.
    type: str
    choices: [systemd, launchd, none]
    default: systemd
"""

EXAMPLES = r"""
- name: The mesh of this host
  llamafleet.rpc.mesh_interface:
    name: wg-llama
    address: "{{ mesh.hosts[inventory_hostname].address }}"
    prefix: "{{ mesh.prefix }}"
    peers: "{{ mesh.hosts[inventory_hostname].peers }}"

- name: Remove it
  llamafleet.rpc.mesh_interface:
    name: wg-llama
    state: absent
"""

RETURN = r"""
actions:
  description:
    - What was done, or in check mode would be, out of C(write), C(sync), C(mtu), C(start), C(restart), C(unit),
      C(enable), C(stop), C(remove), C(forget key).
  returned: always
  type: list
  elements: str
mtu:
  description: MTU of the interface in bytes.
  returned: when O(state=present)
  type: int
unit:
  description: The systemd unit of the interface, which workers start after, or the label of its job.
  returned: always
  type: str
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils import _wireguard as wireguard
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._files import read_text
from ansible_collections.llamafleet.rpc.plugins.module_utils._mac_wireguard import Daemon
from ansible_collections.llamafleet.rpc.plugins.module_utils._mesh import checked_interface, checked_key
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner
from ansible_collections.llamafleet.rpc.plugins.module_utils._worker_args import checked_address, checked_port

PEER = {
    "host": {"type": "str", "required": True},
    "public_key": {"type": "str", "no_log": False},
    "address": {"type": "str", "required": True},
    "endpoint": {"type": "str"},
    "keepalive": {"type": "int"},
    "path_mtu": {"type": "int"},
    "link": {"type": "str"},
    "fresh": {"type": "bool"},
}


def _starter(runner: SystemRunner, options: dict[str, Any], name: str) -> wireguard.Starter:
    if options["manager"] == "launchd":
        address = None if options["address"] is None else checked_address(options["address"], "address")
        return Daemon(runner, options["directory"], name, address, options["prefix"])
    return wireguard.Quick(runner, options["manager"], options["directory"], name)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "address": {"type": "str"},
            "prefix": {"type": "int", "default": 24},
            "port": {"type": "int", "default": 51820},
            "mtu": {"type": "int", "default": 0},
            "peers": {"type": "list", "elements": "dict", "default": [], "options": PEER},
            "preshared_keys": {"type": "dict", "default": {}, "no_log": True},
            "directory": {"type": "path", "default": wireguard.CONFIG_DIRECTORY},
            "manager": {"type": "str", "choices": ["systemd", "launchd", "none"], "default": "systemd"},
        },
        required_if=[("state", "present", ("address",))],
        supports_check_mode=True,
    )
    options, runner = module.params, SystemRunner()
    directory, result = options["directory"], {}
    try:
        name = checked_interface(options["name"])
        path = wireguard.config_path(directory, name)
        quick = _starter(runner, options, name)
        if options["state"] == "absent":
            outcome = wireguard.remove(runner, quick, name, directory, module.check_mode)
        else:
            peers = tuple(wireguard.checked_peer(peer, options["port"]) for peer in options["peers"])
            kept = wireguard.parse_config(read_text(path) or "")["mtu"]
            paths = wireguard.endpoint_mtus(peers)
            result["mtu"] = options["mtu"] or wireguard.settle_mtu(paths, kept)
            interface = wireguard.Interface(
                name=name,
                address=checked_address(options["address"], "address"),
                prefix=options["prefix"],
                port=checked_port(options["port"], "port"),
                mtu=result["mtu"],
                peers=peers,
            )
            preshared = {
                str(link): checked_key(key, f"the preshared key of {link}")
                for link, key in options["preshared_keys"].items()
            }
            userspace = wireguard.implementation(runner)[0] == "userspace"
            outcome = wireguard.converge(runner, quick, interface, preshared, directory, userspace, module.check_mode)
    except FleetError as error:
        module.fail_json(msg=f"mesh interface {options['name']}: {error}")
    diff = {"before": outcome.before, "after": outcome.after, "before_header": path, "after_header": path}
    module.exit_json(changed=outcome.changed, actions=outcome.actions, unit=quick.unit, diff=diff, **result)


if __name__ == "__main__":
    main()
