#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: mac_health_info
short_description: Look at what slows services down or keeps them from starting on a Mac
version_added: 0.1.0
description:
  - Tells processes that launchd holds back, and programs that macOS kills as they start.
author:
  - llamafleet contributors (@llamafleet)
extends_documentation_fragment:
  - llamafleet.rpc.attributes
  - llamafleet.rpc.attributes.info_module
  - llamafleet.rpc.attributes.actiongroup_all
attributes:
  platform:
    platforms: macos
options:
  pids:
    description: Processes of our services.
    type: list
    elements: int
    default: []
  programs:
    description: Programs to try with C(--version).
    type: list
    elements: path
    default: []
"""

EXAMPLES = r"""
- name: See whether the workers run as they should
  llamafleet.rpc.mac_health_info:
    pids: [4711]
    programs: [/opt/llamafleet/current/bin/ggml-rpc-server]
"""

RETURN = r"""
problems:
  description: One sentence each, with the remedy.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils._macos import health
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "pids": {"type": "list", "elements": "int", "default": []},
            "programs": {"type": "list", "elements": "path", "default": []},
        },
        supports_check_mode=True,
    )
    problems = health(SystemRunner(), module.params["pids"], module.params["programs"])
    module.exit_json(changed=False, problems=problems)


if __name__ == "__main__":
    main()
