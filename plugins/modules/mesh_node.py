#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: mesh_node
short_description: Make a host ready to join the mesh, and say what the others must know of it
version_added: 0.1.0
description:
  - Makes the WireGuard key of the host, if it has none, and returns the public one together with the host's links, the
    address that it has in the mesh already, and the peers that it knows.
  - The private key is written to a file of mode 0600 and never leaves the host. It is not part of any result.
author:
  - llamafleet contributors (@llamafleet)
extends_documentation_fragment:
  - llamafleet.rpc.attributes
  - llamafleet.rpc.attributes.posix
  - llamafleet.rpc.attributes.actiongroup_all
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
    details:
      - What changes is a private key.
  idempotent:
    support: partial
    details:
      - O(rotate=true) makes a new key each time.
options:
  mode:
    description:
      - V(wireguard) is a mesh of ours. V(existing) takes the address of an interface that is there already.
        V(none) only looks.
    type: str
    choices: [wireguard, existing, none]
    default: wireguard
  interface:
    description: Name of the interface.
    type: str
    required: true
  port:
    description: UDP port of the mesh, which must not belong to another service.
    type: int
    default: 51820
  directory:
    description: Directory of key and configuration.
    type: path
    default: /etc/wireguard
  rotate:
    description: Replace the key of the host by a new one.
    type: bool
    default: false
  firewall:
    description: Whether nftables is needed, too.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Make this host ready for the mesh
  llamafleet.rpc.mesh_node:
    interface: wg-llama
  register: node

- name: Its public key
  ansible.builtin.debug:
    var: node.node.public_key
"""

RETURN = r"""
node:
  description: What the others must know of this host. Input of the filter P(llamafleet.rpc.mesh_peers#filter).
  returned: always
  type: dict
  contains:
    interface:
      description: Name of the interface.
      type: str
    public_key:
      description: Public key, or null without wireguard-tools, and in check mode where there is no key yet.
      type: str
    key_changed:
      description: Whether the key is another one than the configuration of this host was made with.
      type: bool
    address:
      description: Address that the host has in the mesh already, or null.
      type: str
    mtu:
      description: MTU of the tunnel as it was settled before, in bytes, or null.
      type: int
    links:
      description: IPv4 links with interface, address, prefix, mtu, speed_mbps and medium.
      type: list
      elements: dict
    routes:
      description: IPv4 routes other than the default one.
      type: list
      elements: dict
    default_address:
      description: Address that the host is reached at from other networks, or null.
      type: str
    peers:
      description: Peers that the host knows, with public_key, address and endpoint by host name.
      type: dict
implementation:
  description: C(kernel) or C(userspace), null where WireGuard cannot run or is not asked for.
  returned: always
  type: str
missing:
  description: Packages that the host lacks, by their Debian names.
  returned: always
  type: list
  elements: str
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils import _underlay as underlay
from ansible_collections.llamafleet.rpc.plugins.module_utils import _wireguard as wireguard
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._files import read_text
from ansible_collections.llamafleet.rpc.plugins.module_utils._mesh import MeshError, checked_interface
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner


def _join(
    runner: SystemRunner, options: dict[str, Any], node: dict[str, Any], check: bool
) -> tuple[str, list[str], bool]:
    """Fill in ``node`` for a mesh of ours; the implementation, what is missing, and whether something changed."""
    name, directory = options["interface"], options["directory"]
    kind, why = wireguard.implementation(runner)
    if kind is None:
        raise MeshError(f"{why}. Give the container that device, or use llama_mesh_mode existing")
    missing = wireguard.missing_packages(runner, kind, options["firewall"])
    if "wireguard-tools" in missing:
        return kind, missing, False
    live = wireguard.look(runner, name)
    if not live.present or (live.answers and live.port != options["port"]):
        owner = underlay.port_owner(runner, options["port"])
        if owner:
            raise MeshError(
                f"UDP port {options['port']} of the mesh belongs to {owner}; set llama_mesh_port for the whole fleet"
            )
    kept = wireguard.parse_config(read_text(wireguard.config_path(directory, name)) or "")
    path = wireguard.key_path(directory, name)
    node["public_key"], changed = wireguard.ensure_key(runner, path, options["rotate"], check)
    node["key_changed"] = kept["public_key"] is not None and (
        node["public_key"] != kept["public_key"] or (check and options["rotate"])
    )
    node.update({key: kept[key] for key in ("address", "mtu", "peers")})
    return kind, missing, changed


def _existing(module: AnsibleModule, runner: SystemRunner, interface: str) -> str | None:
    """The address of an interface that is there already. A check goes on without one, for the run may start it."""
    try:
        return underlay.interface_address(runner, interface)
    except FleetError as error:
        if not module.check_mode:
            raise
        module.warn(f"{error}. This check goes on with the address that is in the inventory, or with none")
        return None


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "mode": {"type": "str", "choices": ["wireguard", "existing", "none"], "default": "wireguard"},
            "interface": {"type": "str", "required": True},
            "port": {"type": "int", "default": 51820},
            "directory": {"type": "path", "default": wireguard.CONFIG_DIRECTORY},
            "rotate": {"type": "bool", "default": False},
            "firewall": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    options, runner = module.params, SystemRunner()
    node: dict[str, Any] = {
        "interface": options["interface"],
        "public_key": None,
        "key_changed": False,
        "address": None,
        "mtu": None,
        "peers": {},
    }
    kind, missing, changed = None, wireguard.missing_packages(runner, None, options["firewall"]), False
    try:
        checked_interface(options["interface"])
        node.update(underlay.underlay(runner))
        if options["mode"] == "wireguard":
            kind, missing, changed = _join(runner, options, node, module.check_mode)
        elif options["mode"] == "existing":
            node["address"] = _existing(module, runner, options["interface"])
    except FleetError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=changed, node=node, implementation=kind, missing=missing)


if __name__ == "__main__":
    main()
