#!/usr/bin/python

# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: stray_services
short_description: Remove worker services of a host that left its inventory
version_added: 0.1.0
description:
  - An instance that was renamed or taken out of C(llama_worker_instances) has a service that no run would touch any
    more, which goes on to hold its port and memory. This module ends and removes those.
  - Only services whose definition names O(host_directory) are looked at, so that several inventory hosts may be one
    machine. A host that was taken out of the inventory is not reached at all. Run C(playbooks/teardown.yml) on it
    before.
author:
  - llamafleet contributors (@llamafleet)
extends_documentation_fragment:
  - llamafleet.rpc.attributes
  - llamafleet.rpc.attributes.actiongroup_all
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
  idempotent:
    support: full
options:
  manager:
    description: The service manager.
    type: str
    choices: [systemd, supervisor, launchd]
    required: true
  scope:
    description: Whether units belong to the system or to the connecting account. Only for O(manager=systemd).
    type: str
    choices: [system, user]
    default: system
  directory:
    description: Directory of our supervisor. Only for O(manager=supervisor).
    type: path
  host_directory:
    description: State directory of the inventory host.
    type: path
    required: true
  keep:
    description: Names of the services that belong to the host.
    type: list
    elements: str
    required: true
"""

EXAMPLES = r"""
- name: Remove workers that left the inventory
  llamafleet.rpc.stray_services:
    manager: systemd
    host_directory: /var/lib/llamafleet/default/box
    keep: [llama-rpc-default-gpu]
"""

RETURN = r"""
removed:
  description: Names of the services that were removed, or in check mode would be.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._managers import manager_of
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner
from ansible_collections.llamafleet.rpc.plugins.module_utils._service import strays


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "manager": {"type": "str", "choices": ["systemd", "supervisor", "launchd"], "required": True},
            "scope": {"type": "str", "choices": ["system", "user"], "default": "system"},
            "directory": {"type": "path"},
            "host_directory": {"type": "path", "required": True},
            "keep": {"type": "list", "elements": "str", "required": True},
        },
        required_if=[("manager", "supervisor", ("directory",))],
        supports_check_mode=True,
    )
    options = module.params
    runner = SystemRunner()
    manager = manager_of(runner, options)
    try:
        removed = strays(manager, options["host_directory"].rstrip("/") + "/", options["keep"])
        for name in [] if module.check_mode else removed:
            if manager.pid(name) is not None:
                manager.stop(name)
            manager.forget(name)
    except FleetError as error:
        module.fail_json(msg=str(error))
    before = "".join(f"{manager.path(name)}\n" for name in removed)
    module.exit_json(changed=bool(removed), removed=removed, diff={"before": before, "after": ""})


if __name__ == "__main__":
    main()
