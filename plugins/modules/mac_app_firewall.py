#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: mac_app_firewall
short_description: Have the application firewall of a Mac hand connections to programs
version_added: 0.1.0
description:
  - Does nothing where the application firewall is off. Where it is on, it cuts off a daemon that it does not know
    without a word. It knows a program by path and signature, so each build is told anew.
author:
  - llamafleet contributors (@llamafleet)
extends_documentation_fragment:
  - llamafleet.rpc.attributes
  - llamafleet.rpc.attributes.actiongroup_all
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
    details:
      - The programs that it is told of are in RV(programs).
  idempotent:
    support: full
  platform:
    platforms: macos
options:
  programs:
    description: Programs that shall get connections.
    type: list
    elements: path
    required: true
"""

EXAMPLES = r"""
- name: Let the worker be reached
  llamafleet.rpc.mac_app_firewall:
    programs: [/opt/llamafleet/builds/b11434-0123456789ab/bin/ggml-rpc-server]
"""

RETURN = r"""
programs:
  description: The programs that the firewall was told of.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._macos import converge_apps
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner


def main() -> None:
    module = AnsibleModule(
        argument_spec={"programs": {"type": "list", "elements": "path", "required": True}},
        supports_check_mode=True,
    )
    try:
        told = converge_apps(SystemRunner(), module.params["programs"], module.check_mode)
    except FleetError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=bool(told), programs=told)


if __name__ == "__main__":
    main()
