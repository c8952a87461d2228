#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: worker_firewall
short_description: Open worker ports to their primary alone
version_added: 0.1.0
description:
  - Keeps one nftables table, C(inet llamafleet), that accepts a worker port from its primary on the mesh interface and
    drops it from everywhere else. All other traffic and all other tables are left alone.
  - The table is loaded by a unit of its own before the network is up, and again when C(nftables.service) flushed it.
  - An accept here does not overrule a drop of another firewall. ufw gets the same rules through its own command, marked
    with a comment; for firewalld and for other tables a warning says what to add.
author:
  - llamafleet contributors (@llamafleet)
extends_documentation_fragment:
  - llamafleet.rpc.attributes
  - llamafleet.rpc.attributes.state_module
  - llamafleet.rpc.attributes.linux
  - llamafleet.rpc.attributes.actiongroup_all
options:
  state:
    description: V(absent) removes table, file, unit and our rules in ufw.
    type: str
    choices: [present, absent]
    default: present
  interface:
    description: Interface of the mesh. Empty where the mesh is a trusted LAN.
    type: str
    default: ''
  ports:
    description: The worker ports of this host.
    type: list
    elements: dict
    default: []
    suboptions:
      port:
        description: TCP port.
        type: int
        required: true
      source:
        description: The address of the primary. Null opens the port to this host alone.
        type: str
  endpoints:
    description: Worker ports on other hosts that this host uses as their primary. They matter with O(users) only.
    type: list
    elements: dict
    default: []
    suboptions:
      address:
        description: IPv4 address.
        type: str
        required: true
      port:
        description: TCP port.
        type: int
        required: true
  users:
    description: Accounts of this host that may connect to worker ports, besides root. Empty for all.
    type: list
    elements: str
    default: []
  listen_port:
    description: UDP port of the mesh, which ufw has to let in. V(0) for none.
    type: int
    default: 0
  ufw:
    description: Whether an active ufw gets the rules that it needs. Without it a warning says which.
    type: bool
    default: true
  unprotected:
    description:
      - V(accept) goes on with a warning where no packet filter works. V(refuse) fails. Through a worker port one can
        run code, so this is for a host by name only.
    type: str
    choices: [refuse, accept]
    default: refuse
  path:
    description: File of the table.
    type: path
    default: /etc/llamafleet/firewall.nft
  manager:
    description: V(none) loads the table now only, where there is no systemd to load it at boot.
    type: str
    choices: [systemd, none]
    default: systemd
"""

EXAMPLES = r"""
- name: Open the worker port to the primary on the mesh
  llamafleet.rpc.worker_firewall:
    interface: wg-llama
    listen_port: 51820
    ports:
      - port: 50052
        source: 10.98.0.1

- name: Remove the table
  llamafleet.rpc.worker_firewall:
    state: absent
"""

RETURN = r"""
actions:
  description: What was done, or in check mode would be, out of C(write), C(load), C(remove), C(unit), C(ufw).
  returned: always
  type: list
  elements: str
protected:
  description: Whether a packet filter stands before the ports.
  returned: always
  type: bool
unit:
  description: The unit that loads it at boot; empty without one.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils import _firewall as firewall
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._mesh import checked_interface
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner
from ansible_collections.llamafleet.rpc.plugins.module_utils._worker_args import checked_address, checked_port

PORT = {"port": {"type": "int", "required": True}, "source": {"type": "str"}}
ENDPOINT = {"address": {"type": "str", "required": True}, "port": {"type": "int", "required": True}}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "interface": {"type": "str", "default": ""},
            "ports": {"type": "list", "elements": "dict", "default": [], "options": PORT},
            "endpoints": {"type": "list", "elements": "dict", "default": [], "options": ENDPOINT},
            "users": {"type": "list", "elements": "str", "default": []},
            "listen_port": {"type": "int", "default": 0},
            "ufw": {"type": "bool", "default": True},
            "unprotected": {"type": "str", "choices": ["refuse", "accept"], "default": "refuse"},
            "path": {"type": "path", "default": firewall.RULES_PATH},
            "manager": {"type": "str", "choices": ["systemd", "none"], "default": "systemd"},
        },
        supports_check_mode=True,
    )
    options, runner = module.params, SystemRunner()
    wanted = options["state"] == "present"
    try:
        rules = firewall.Rules("", ())
        if wanted:
            rules = firewall.Rules(
                interface=checked_interface(options["interface"]) if options["interface"] else "",
                doors=tuple(
                    firewall.Door(
                        checked_port(door["port"], "ports"),
                        None if door["source"] is None else checked_address(door["source"], "source"),
                    )
                    for door in options["ports"]
                ),
                endpoints=tuple(
                    (checked_address(end["address"], "endpoints"), checked_port(end["port"], "endpoints"))
                    for end in options["endpoints"]
                ),
                users=firewall.user_ids(options["users"], module.check_mode),
            )
        listen = options["listen_port"] if wanted else None
        place = firewall.Place(path=options["path"], systemd=options["manager"] == "systemd")
        try:
            if wanted and rules.doors:
                firewall.usable(runner)
        except firewall.FirewallError as error:
            _without(module, str(error))
        outcome = firewall.converge(runner, place, rules, listen, options["ufw"] and wanted, module.check_mode)
    except FleetError as error:
        module.fail_json(msg=f"worker firewall: {error}")
    for warning in outcome.warnings:
        module.warn(warning)
    module.exit_json(
        changed=outcome.changed,
        actions=outcome.actions,
        protected=bool(rules.doors),
        unit=firewall.UNIT if rules.doors and place.systemd else "",
        diff={
            "before": outcome.before,
            "after": outcome.after,
            "before_header": options["path"],
            "after_header": options["path"],
        },
    )


def _without(module: AnsibleModule, problem: str) -> None:
    """End the module where there is no packet filter: as a failure, unless the operator accepted it for this host."""
    if module.check_mode and "not installed" in problem:
        module.warn(f"provisional: {problem}; outside check mode it is installed first")
        module.exit_json(changed=True, actions=["write", "load"], protected=False, unit="")
    if module.params["unprotected"] == "accept":
        module.warn(f"the worker ports of this host are open to whoever reaches them: {problem}")
        module.exit_json(changed=False, actions=[], protected=False, unit="")
    module.fail_json(
        msg=f"worker firewall: {problem}. The worker port has no authentication, and whoever reaches it can run code. "
        "Mend that, or accept it for this host by name with llama_worker_unprotected_port: accept"
    )


if __name__ == "__main__":
    main()
