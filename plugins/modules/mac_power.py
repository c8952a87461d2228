#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: mac_power
short_description: Keep a Mac awake that serves others
version_added: 0.1.0
description:
  - Sets what C(pmset) shows otherwise. A setting that a Mac does not have is left alone.
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
      - The settings that differ are in RV(set).
  idempotent:
    support: full
  platform:
    platforms: macos
options:
  settings:
    description: Names and values of C(pmset), for all power sources.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Stay awake, and start again after a power cut
  llamafleet.rpc.mac_power:
    settings: {sleep: 0, disksleep: 0, autorestart: 1}
"""

RETURN = r"""
set:
  description: The settings that differed, with their new values.
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._macos import converge_power
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner


def main() -> None:
    module = AnsibleModule(
        argument_spec={"settings": {"type": "dict", "required": True}},
        supports_check_mode=True,
    )
    settings = module.params["settings"]
    if not all(name.isalpha() and str(value).isdecimal() for name, value in settings.items()):
        module.fail_json(msg=f"settings: {settings!r}; give names of pmset with whole numbers, such as sleep: 0")
    try:
        done = converge_power(SystemRunner(), {name: int(value) for name, value in settings.items()}, module.check_mode)
    except FleetError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=bool(done), set=done)


if __name__ == "__main__":
    main()
