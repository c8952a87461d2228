#!/usr/bin/python

# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: leftovers_info
short_description: Look for what a removal left behind
version_added: 0.1.0
description:
  - Names each of the directories that still exists, each process that runs out of one of them, and each listener on one
    of the ports. Changes nothing.
author:
  - llamafleet contributors (@llamafleet)
extends_documentation_fragment:
  - llamafleet.rpc.attributes
  - llamafleet.rpc.attributes.info_module
  - llamafleet.rpc.attributes.actiongroup_all
options:
  directories:
    description: Directories that should be gone.
    type: list
    elements: path
    default: []
  ports:
    description: TCP ports that nobody should listen on.
    type: list
    elements: int
    default: []
"""

EXAMPLES = r"""
- name: Is anything left?
  llamafleet.rpc.leftovers_info:
    directories: [/opt/llamafleet, /var/lib/llamafleet]
    ports: [18711]
  register: left
  failed_when: left.problems | length > 0
"""

RETURN = r"""
problems:
  description: One sentence for each thing that is left.
  returned: always
  type: list
  elements: str
checked:
  description: What was looked at.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._leftovers import leftovers
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "directories": {"type": "list", "elements": "path", "default": []},
            "ports": {"type": "list", "elements": "int", "default": []},
        },
        supports_check_mode=True,
    )
    directories, ports = module.params["directories"], module.params["ports"]
    try:
        problems = leftovers(SystemRunner(), directories, ports)
    except FleetError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, problems=problems, checked=[*directories, *(f"port {port}" for port in ports)])


if __name__ == "__main__":
    main()
