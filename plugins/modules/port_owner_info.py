#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: port_owner_info
short_description: Tell who holds a TCP port
version_added: 0.1.0
description:
  - Reads the socket table and tells which process, user and service keeps a TCP port from being bound.
  - An outgoing connection that happens to use the port as its local end is found as well. A worker whose port is taken
    that way ends with status 0, which looks like success.
  - Sends nothing, and needs no program on Linux; elsewhere it needs C(lsof).
notes:
  - Without root the process behind a socket of another user stays unknown. Its user is known all the same.
author:
  - llamafleet contributors (@llamafleet)
extends_documentation_fragment:
  - llamafleet.rpc.attributes
  - llamafleet.rpc.attributes.info_module
  - llamafleet.rpc.attributes.actiongroup_all
options:
  ports:
    description: The ports to look for.
    type: list
    elements: int
    required: true
    aliases: [port]
"""

EXAMPLES = r"""
- name: Who holds the port of the worker?
  llamafleet.rpc.port_owner_info:
    ports: 18711
  register: port_owners

- name: Name them
  ansible.builtin.debug:
    msg: "{{ port_owners.owners | map(attribute='exe') }}"
"""

RETURN = r"""
owners:
  description: One entry for each socket that holds one of the ports; empty when all are free.
  returned: always
  type: list
  elements: dict
  contains:
    port:
      description: The port.
      type: int
    kind:
      description: V(listener), or V(connection) for the local end of an outgoing connection.
      type: str
    address:
      description: Address that the socket is bound to.
      type: str
    remote:
      description: The other end of a connection as C(address:port).
      type: str
    pid:
      description: The process, or none where it may not be seen.
      type: int
    exe:
      description: Path of its executable.
      type: str
    exe_deleted:
      description: Whether that file has been replaced or removed since the process started.
      type: bool
    cmdline:
      description: Its command line. Values of options such as C(--api-key) are hidden.
      type: list
      elements: str
    user:
      description: User that owns the socket.
      type: str
    started_at:
      description: Boot identifier and start time in clock ticks. Equal values mean the very same process.
      type: str
    unit:
      description: Systemd service that the process belongs to.
      type: str
    supervisor_program:
      description: Supervisor program that the process is.
      type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils import _sockets
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner


def main() -> None:
    module = AnsibleModule(
        argument_spec={"ports": {"type": "list", "elements": "int", "required": True, "aliases": ["port"]}},
        supports_check_mode=True,
    )
    wrong = [port for port in module.params["ports"] if not 1 <= port <= 65535]
    if wrong:
        module.fail_json(msg=f"ports: {wrong[0]} is no port; give numbers from 1 to 65535")
    try:
        owners = _sockets.port_owners(SystemRunner(), module.params["ports"])
    except FleetError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, owners=owners)


if __name__ == "__main__":
    main()
