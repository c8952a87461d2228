#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: worker_record_info
short_description: Read the kept record of what a host lends
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - Reads a record that M(llamafleet.rpc.worker_record) kept. Nothing is measured and nothing is written, so it also
    serves members of a cluster that are outside of the limit of a run.
extends_documentation_fragment:
  - llamafleet.rpc.attributes
  - llamafleet.rpc.attributes.info_module
  - llamafleet.rpc.attributes.actiongroup_all
options:
  path:
    description: File that keeps the record.
    type: path
    required: true
seealso:
  - module: llamafleet.rpc.worker_record
"""

EXAMPLES = r"""
- name: Read what a host lends
  llamafleet.rpc.worker_record_info:
    path: /var/lib/llamafleet/default/box/worker.json
  register: box
"""

RETURN = r"""
record:
  description:
    - The record, in the shape that M(llamafleet.rpc.worker_record) returns. None when there is none.
  returned: success
  type: dict
reason:
  description: Why there is no record; none when there is one.
  returned: success
  type: str
  sample: /var/lib/llamafleet/default/box/worker.json does not exist
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils._files import read_json
from ansible_collections.llamafleet.rpc.plugins.module_utils._worker_record import usable_previous


def main() -> None:
    module = AnsibleModule(argument_spec={"path": {"type": "path", "required": True}}, supports_check_mode=True)
    path = module.params["path"]
    try:
        record = read_json(path)
    except OSError as error:
        module.fail_json(msg=f"{path} cannot be read: {error.strerror}; run the task as an account that may")
    reason = None
    if not usable_previous(record):
        reason = f"{path} holds no record of this release" if os.path.exists(path) else f"{path} does not exist"
        record = None
    module.exit_json(changed=False, record=record, reason=reason)


if __name__ == "__main__":
    main()
