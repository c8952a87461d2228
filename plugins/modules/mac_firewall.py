#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: mac_firewall
short_description: Open worker ports of a Mac to their primary alone
version_added: 0.1.0
description:
  - Loads an anchor of pf that lets one address in to each worker port, by the interface of the mesh, and drops the
    rest. A job of launchd loads it at boot, and again whenever WireGuard makes its tunnel anew, for that then has
    another number.
  - Turns pf on if it is off. It is not turned off again, for others may have come to rely on it.
author:
  - llamafleet contributors (@llamafleet)
extends_documentation_fragment:
  - llamafleet.rpc.attributes
  - llamafleet.rpc.attributes.state_module
  - llamafleet.rpc.attributes.actiongroup_all
attributes:
  platform:
    platforms: macos
options:
  state:
    description: V(absent) removes anchor and job.
    type: str
    choices: [present, absent]
    default: present
  interface:
    description: Name of the WireGuard interface of the mesh, as its configuration is called. Empty for none.
    type: str
    default: ''
  ports:
    description: Worker ports of this host.
    type: list
    elements: dict
    default: []
    suboptions:
      port:
        description: TCP port.
        type: int
        required: true
      source:
        description: The address that may come in. Null for nobody.
        type: str
"""

EXAMPLES = r"""
- name: Open the worker port to the primary on the mesh
  llamafleet.rpc.mac_firewall:
    interface: wg-llama
    ports:
      - port: 50052
        source: 10.98.0.1

- name: Remove the anchor
  llamafleet.rpc.mac_firewall:
    state: absent
"""

RETURN = r"""
actions:
  description:
    - What was done, or in check mode would be, out of C(write), C(load), C(remove), C(job).
  returned: always
  type: list
  elements: str
protected:
  description: Whether a packet filter stands before the ports.
  returned: always
  type: bool
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils import _macos
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._firewall import Door
from ansible_collections.llamafleet.rpc.plugins.module_utils._launchd import Launchctl
from ansible_collections.llamafleet.rpc.plugins.module_utils._mesh import checked_interface
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner
from ansible_collections.llamafleet.rpc.plugins.module_utils._worker_args import checked_address, checked_port

PORT = {"port": {"type": "int", "required": True}, "source": {"type": "str"}}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "interface": {"type": "str", "default": ""},
            "ports": {"type": "list", "elements": "dict", "default": [], "options": PORT},
        },
        supports_check_mode=True,
    )
    options, runner = module.params, SystemRunner()
    wanted = options["state"] == "present"
    try:
        doors = [
            Door(
                checked_port(door["port"], "ports"),
                None if door["source"] is None else checked_address(door["source"], "source"),
            )
            for door in (options["ports"] if wanted else [])
        ]
        interface = checked_interface(options["interface"]) if options["interface"] else ""
        done = _macos.converge_pf(runner, Launchctl(runner), _macos.Wall(), doors, interface, module.check_mode)
    except FleetError as error:
        module.fail_json(msg=f"worker firewall: {error}")
    module.exit_json(
        changed=done.changed,
        actions=done.actions,
        protected=bool(doors),
        diff={
            "before": done.before,
            "after": done.after,
            "before_header": _macos.ANCHOR,
            "after_header": _macos.ANCHOR,
        },
    )


if __name__ == "__main__":
    main()
