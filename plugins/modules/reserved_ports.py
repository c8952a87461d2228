#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: reserved_ports
short_description: Keep the ports of workers out of the range that outgoing connections take theirs from
version_added: 0.1.0
description:
  - Linux takes the local port of an outgoing connection from 32768 to 60999 unless told otherwise. A worker whose port
    is taken that way ends with status 0, and so does each start until that connection is over.
  - Adds the ports to C(net.ipv4.ip_local_reserved_ports), now and at boot. What others reserved stays reserved, and
    what this module reserved before and is not in O(ports) is given back.
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
  ports:
    description: The ports; none gives all back.
    type: list
    elements: int
    required: true
"""

EXAMPLES = r"""
- name: Reserve the port of a worker
  llamafleet.rpc.reserved_ports:
    ports: [50052]

- name: Give it back
  llamafleet.rpc.reserved_ports:
    ports: []
"""

RETURN = r"""
path:
  description: The file that the kernel's setting is taken from at boot.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._reserved_ports import PATH, converge
from ansible_collections.llamafleet.rpc.plugins.module_utils._worker_args import checked_port


def main() -> None:
    module = AnsibleModule(
        argument_spec={"ports": {"type": "list", "elements": "int", "required": True}},
        supports_check_mode=True,
    )
    try:
        ports = [checked_port(port, "ports") for port in module.params["ports"]]
        outcome = converge(ports, module.check_mode)
    except FleetError as error:
        module.fail_json(msg=f"reserved ports: {error}")
    module.exit_json(
        changed=outcome.changed,
        path=PATH,
        diff={"before": outcome.before, "after": outcome.after, "before_header": PATH, "after_header": PATH},
    )


if __name__ == "__main__":
    main()
