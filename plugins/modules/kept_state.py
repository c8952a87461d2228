#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kept_state
short_description: Compare the decisions of this run with those that a service was started with
version_added: 0.1.0
description:
  - Keeps a mapping of decisions as JSON on the host and says in which of them a new mapping differs.
  - A primary is restarted if and only if its kept state differs from the wanted one (its workers' identities, the plan,
    the arguments, the build). A run that died half-way leaves a kept state that differs, and is thereby healed by the
    next.
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
  path:
    description: File that the state is kept in. Its directory must exist when O(state=present).
    type: path
    required: true
  wanted:
    description: The decisions of this run. Nothing volatile belongs in here, such as a reading of free memory.
    type: dict
    default: {}
  state:
    description:
      - V(compared) only reports. V(present) writes O(wanted) where it differs. V(absent) removes the file.
    type: str
    choices: [compared, present, absent]
    default: present
"""

EXAMPLES = r"""
- name: Would this plan restart the primary?
  llamafleet.rpc.kept_state:
    path: /var/lib/llamafleet/default/primary.json
    wanted:
      build: b11434
      tensor_split: "20,11"
    state: compared
  register: primary_state

- name: Show why
  ansible.builtin.debug:
    var: primary_state.differences
"""

RETURN = r"""
differences:
  description: One line for each decision that differs.
  returned: always
  type: list
  elements: str
differs:
  description: Whether the kept state differs from O(wanted), or is not there.
  returned: always
  type: bool
kept:
  description: What was kept before, or none.
  returned: always
  type: dict
"""

import json
import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils._files import read_json, write_json
from ansible_collections.llamafleet.rpc.plugins.module_utils._state import differences


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "wanted": {"type": "dict", "default": {}},
            "state": {"type": "str", "choices": ["compared", "present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    path, wanted, state = module.params["path"], module.params["wanted"], module.params["state"]
    kept = read_json(path)
    kept = kept if isinstance(kept, dict) else None
    if state == "absent":
        present = os.path.exists(path)
        if present and not module.check_mode:
            os.unlink(path)
        module.exit_json(changed=present, differs=present, differences=[], kept=kept)
    lines = differences(kept or {}, wanted)
    differs = kept != wanted
    if differs and state == "present" and not module.check_mode:
        write_json(path, wanted)
    module.exit_json(
        changed=differs and state == "present",
        differs=differs,
        differences=lines,
        kept=kept,
        diff={
            "before": json.dumps(kept, indent=2, sort_keys=True) + "\n" if kept is not None else "",
            "after": json.dumps(wanted, indent=2, sort_keys=True) + "\n",
            "before_header": path,
            "after_header": path,
        },
    )


if __name__ == "__main__":
    main()
