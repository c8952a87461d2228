#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: mac_wired_limit
short_description: Set how much memory Metal may wire on a Mac
version_added: 0.1.0
description:
  - Sets C(iogpu.wired_limit_mb) now, and by a job of launchd at each boot, for it does not outlive one.
  - Without a limit macOS lets Metal have a share of the memory that depends on its release and on the size.
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
    description: V(absent) gives the limit back to macOS, if it is one of ours.
    type: str
    choices: [present, absent]
    default: present
  limit:
    description:
      - The limit as bytes, V(100GiB) or V(80%). At most 85 percent of the memory, or all but 5 GiB, whichever is more.
        Needed for V(present).
    type: str
  need:
    description: What is to be held, in bytes. The limit is not set above that and a margin of 2 percent or 64 MiB.
    type: int
"""

EXAMPLES = r"""
- name: Let Metal have more of a 128 GB Mac that does nothing else
  llamafleet.rpc.mac_wired_limit:
    limit: 112GiB

- name: Leave it to macOS
  llamafleet.rpc.mac_wired_limit:
    state: absent
"""

RETURN = r"""
actions:
  description: What was done, or in check mode would be. C(set) is the running system, the others are those of its job.
  returned: always
  type: list
  elements: str
limit_mb:
  description: The limit in MiB. 0 is that of macOS.
  returned: always
  type: int
before_mb:
  description: The limit before, in MiB.
  returned: always
  type: int
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils import _macos
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import parse_size
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._launchd import Launchctl, Place
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "limit": {"type": "str"},
            "need": {"type": "int"},
        },
        required_if=[("state", "present", ("limit",))],
        supports_check_mode=True,
    )
    options, runner = module.params, SystemRunner()
    limit = None
    try:
        if options["state"] == "present":
            ram = _macos.ram_bytes(runner)
            limit = _macos.wired_limit_mb(ram, parse_size(options["limit"], ram, "limit"), options["need"])
        done, before = _macos.converge_wired(runner, Launchctl(runner), Place(), limit, module.check_mode)
    except FleetError as error:
        module.fail_json(msg=str(error))
    module.exit_json(
        changed=done.changed,
        actions=done.actions,
        limit_mb=limit or 0,
        before_mb=before,
        diff={"before": done.before, "after": done.after},
    )


if __name__ == "__main__":
    main()
