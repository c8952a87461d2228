#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: rpc_info
short_description: Ask a worker (ggml-rpc-server) over the wire what it is and what it offers
version_added: 0.1.0
description:
  - Speaks the RPC protocol of llama.cpp with a worker, on the worker's own host and under one deadline, and classifies
    every way in which that can fail.
  - The socket table is read first. While a client is attached nothing is sent, since a worker serves one client at a
    time and a HELLO that is given up can kill it later.
  - From the primary use O(connect_only=true), which sends nothing.
author:
  - llamafleet contributors (@llamafleet)
extends_documentation_fragment:
  - llamafleet.rpc.attributes
  - llamafleet.rpc.attributes.info_module
  - llamafleet.rpc.attributes.actiongroup_all
options:
  host:
    description: IPv4 address that the worker is bound to. Names and IPv6 are refused, as the worker takes neither.
    type: str
  port:
    description: Port of the worker.
    type: int
  endpoints:
    description: Several workers at once, each as C(address:port). They are asked one after the other.
    type: list
    elements: str
  timeout:
    description:
      - Seconds for the whole conversation with one worker, connecting included.
      - With the default a silent peer is reported in less than five seconds.
    type: float
    default: 4
  expected_protocol:
    description:
      - Protocol version that the build speaks, such as V(7.0.0). Unless all three numbers are equal the worker is
        RV(status=incompatible).
    type: str
  expected_clients:
    description: Addresses of the primary that this worker serves. A client from anywhere else is foreign.
    type: list
    elements: str
    default: []
  primary_sockets:
    description:
      - The primary's own ends of its connections, each as C(address:port), as RV(local_ends) of this module on the
        primary shows them.
      - When given, a client that is not in it is stale, even from the right address.
    type: list
    elements: str
  connect_only:
    description:
      - Only connect and close. Tells whether the port can be reached, and nothing about what answers there.
      - Where this host has a connection to the port already, the answer is V(busy_ours) and no other is opened, for a
        busy worker would keep it in its short queue.
    type: bool
    default: false
  required:
    description: Fail unless every worker is V(ok) or V(busy_ours).
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Is the worker up, and does it speak the protocol of the build?
  llamafleet.rpc.rpc_info:
    host: 127.0.0.1
    port: 18711
    expected_protocol: 7.0.0
    expected_clients: [127.0.0.1]
  register: worker_rpc
  until: worker_rpc.status in ['ok', 'busy_ours']
  retries: 10
  delay: 1

- name: Can the primary reach all workers?
  llamafleet.rpc.rpc_info:
    endpoints:
      - 10.0.0.2:18711
      - 10.0.0.3:18711
    connect_only: true
    required: true
"""

RETURN = r"""
status:
  description:
    - One of V(ok), V(busy_ours), V(busy_stale), V(busy_foreign), V(refused), V(timeout), V(unreachable), V(not_rpc)
      and V(incompatible).
    - V(busy_ours) is a worker that serves its primary, V(busy_stale) one that holds a connection which the primary no
      longer has, V(busy_foreign) one that serves somebody else.
    - The return values from here to RV(hint) describe the worker of O(host) and O(port).
  returned: when O(host) is given
  type: str
  sample: ok
endpoint:
  description: The worker as C(address:port).
  returned: when O(host) is given
  type: str
  sample: 10.0.0.2:18711
client:
  description: The client that is attached, as C(address:port).
  returned: when O(host) is given
  type: str
protocol:
  description: Protocol version that the worker speaks, where it said so.
  returned: when O(host) is given
  type: str
  sample: 7.0.0
devices:
  description: The devices of the worker with their total and free memory in bytes, as it claims them.
  returned: when O(host) is given
  type: list
  elements: dict
  sample: [{"index": 0, "total": 25276514304, "free": 25276514304}]
latency_ms:
  description: Round trip of the first question in milliseconds.
  returned: when O(host) is given
  type: float
hint:
  description: What to do next, empty when all is well.
  returned: when O(host) is given
  type: str
results:
  description: The same values for every worker that was asked, in order.
  returned: always
  type: list
  elements: dict
local_ends:
  description: This host's own ends of live connections to the workers that were asked, as C(address:port).
  returned: always
  type: list
  elements: str
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils import _rpc_wire, _sockets
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner


def ask(options: dict[str, Any], host: str, port: int) -> _rpc_wire.Probe:
    """One worker, asked the way the options say."""
    if options["connect_only"]:
        return _rpc_wire.connect_only(SystemRunner(), host, port, options["timeout"])
    return _rpc_wire.probe(
        SystemRunner(),
        host,
        port,
        options["timeout"],
        options["expected_protocol"],
        options["expected_clients"],
        options["primary_sockets"],
    )


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str"},
            "port": {"type": "int"},
            "endpoints": {"type": "list", "elements": "str"},
            "timeout": {"type": "float", "default": 4},
            "expected_protocol": {"type": "str"},
            "expected_clients": {"type": "list", "elements": "str", "default": []},
            "primary_sockets": {"type": "list", "elements": "str"},
            "connect_only": {"type": "bool", "default": False},
            "required": {"type": "bool", "default": False},
        },
        required_together=[("host", "port")],
        required_one_of=[("host", "endpoints")],
        mutually_exclusive=[("host", "endpoints")],
        supports_check_mode=True,
    )
    options = module.params
    if not 0 < options["timeout"] <= 86400:
        module.fail_json(msg=f"timeout: {options['timeout']:g} s; give a number above 0 and at most a day")
    try:
        if options["host"] is not None:
            asked = [_rpc_wire.check_address(options["host"], options["port"])]
        else:
            asked = [_rpc_wire.parse_endpoint(endpoint) for endpoint in options["endpoints"]]
            asked = [_rpc_wire.check_address(host, port) for host, port in asked]
        found = [ask(options, host, port) for host, port in asked]
        table = _sockets.read_table(SystemRunner())
    except FleetError as error:
        module.fail_json(msg=str(error))
    ends = [end for host, port in asked for end in _sockets.local_ends(table, host, port)]
    result: dict[str, Any] = {"changed": False, "results": [probe.to_dict() for probe in found], "local_ends": ends}
    if options["host"] is not None:
        result.update(found[0].to_dict())
    wrong = [probe for probe in found if probe.status not in ("ok", "busy_ours")]
    if wrong and options["required"]:
        module.fail_json(msg="; ".join(f"worker {bad.endpoint} is {bad.status}: {bad.hint}" for bad in wrong), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
