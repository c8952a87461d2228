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
  - Tells processes that launchd holds back, programs that macOS kills as they start, and hosts of the local network
    that macOS keeps a program from.
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
  endpoints:
    description:
      - Endpoints (IPv4 and port) to connect to, and to hang up at once. Not those of workers that serve, which take one
        client at a time.
      - macOS decides by program and by who started it. Through SSH nearly all is allowed, so what an agent is denied
        shows only where the agent itself runs this.
    type: list
    elements: str
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

import errno
import socket
import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._macos import health, network_problem
from ansible_collections.llamafleet.rpc.plugins.module_utils._records import parse_endpoint
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner


def _connect(address: str, port: int) -> tuple[int, float]:
    start = time.monotonic()
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.settimeout(5.0)
        try:
            error = sock.connect_ex((address, port))
        except socket.timeout:
            error = errno.ETIMEDOUT
    return error, (time.monotonic() - start) * 1000


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "pids": {"type": "list", "elements": "int", "default": []},
            "programs": {"type": "list", "elements": "path", "default": []},
            "endpoints": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    try:
        endpoints = [parse_endpoint(endpoint, "endpoints") for endpoint in module.params["endpoints"]]
    except FleetError as error:
        module.fail_json(msg=str(error))
    problems = health(SystemRunner(), module.params["pids"], module.params["programs"])
    problems += filter(None, (network_problem(SystemRunner(), endpoint, _connect) for endpoint in endpoints))
    module.exit_json(changed=False, problems=problems)


if __name__ == "__main__":
    main()
