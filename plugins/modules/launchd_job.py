#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: launchd_job
short_description: Bring one daemon of launchd to a wanted state
version_added: 0.1.0
description:
  - Writes the property list of a job of the system domain, and loads, restarts, unloads or removes it with the verbs
    C(bootstrap), C(kickstart), C(bootout) and C(enable) of C(launchctl).
  - A job is loaded anew if its file, the owner or mode of its file, or the arguments that launchd has of it differ from
    what is wanted, for launchd does not read a file again by itself.
  - Workers and primaries are written by M(llamafleet.rpc.managed_service). This module is for other jobs.
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
    support: partial
    details:
      - O(state=restarted) always replaces a running process.
  platform:
    platforms: macos
options:
  label:
    description: Label of the job. Its file is called like it.
    type: str
    required: true
  state:
    description:
      - V(started) loads the job. V(restarted) also replaces its process, without reading the file again if that is
        right. V(stopped) unloads it and keeps the file, which launchd loads at the next boot. V(absent) removes it.
    type: str
    choices: [started, restarted, stopped, absent]
    default: started
  definition:
    description:
      - Keys and values of C(launchd.plist(5)), apart from C(Label). Needed for V(started) and V(restarted).
    type: dict
    default: {}
  directory:
    description: Directory of the file.
    type: path
    default: /Library/LaunchDaemons
  patience:
    description: Seconds that launchd has to unload or to load a job. It needs the job's C(ExitTimeOut) and some more.
    type: int
    default: 40
"""

EXAMPLES = r"""
- name: Keep the machine awake
  llamafleet.rpc.launchd_job:
    label: org.example.awake
    definition:
      ProgramArguments: [/usr/bin/caffeinate, -s]
      RunAtLoad: true
      KeepAlive: true

- name: Remove it
  llamafleet.rpc.launchd_job:
    label: org.example.awake
    state: absent
"""

RETURN = r"""
actions:
  description:
    - What was done, or in check mode would be, out of C(write), C(enable), C(bootout), C(bootstrap), C(kickstart),
      C(remove).
  returned: always
  type: list
  elements: str
path:
  description: Path of the property list.
  returned: always
  type: str
pid:
  description: Process of the job, or null.
  returned: always
  type: int
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._launchd import DAEMONS, Launchctl, Place, converge
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "label": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["started", "restarted", "stopped", "absent"], "default": "started"},
            "definition": {"type": "dict", "default": {}},
            "directory": {"type": "path", "default": DAEMONS},
            "patience": {"type": "int", "default": 40},
        },
        required_if=[("state", "started", ("definition",)), ("state", "restarted", ("definition",))],
        supports_check_mode=True,
    )
    options = module.params
    place = Place(options["directory"])
    launchctl = Launchctl(SystemRunner(), float(options["patience"]))
    try:
        outcome = converge(
            launchctl, place, options["label"], options["definition"], options["state"], module.check_mode
        )
    except FleetError as error:
        module.fail_json(msg=str(error))
    path = place.path(options["label"])
    module.exit_json(
        changed=outcome.changed,
        actions=outcome.actions,
        path=path,
        pid=outcome.pid,
        diff={"before": outcome.before, "after": outcome.after, "before_header": path, "after_header": path},
    )


if __name__ == "__main__":
    main()
