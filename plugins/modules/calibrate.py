#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: calibrate
short_description: Measure how fast the devices of a cluster are
version_added: 0.1.0
description:
  - Runs C(llama-bench) of the build that serves, on the primary, over one device of the cluster after the other. It
    computes with stand-ins, a few layers as wide and as heavy as those of the model, that cost no disk.
  - Figures that moved by less than a tenth since the last time are kept as they were, so that jitter moves no layers.
  - It speaks to the workers as a primary does. Stop the primary before.
author:
  - llamafleet contributors (@llamafleet)
extends_documentation_fragment:
  - llamafleet.rpc.attributes
  - llamafleet.rpc.attributes.actiongroup_all
  - llamafleet.rpc.attributes.posix
attributes:
  check_mode:
    support: full
    details:
      - Measures nothing, and returns what was kept.
  diff_mode:
    support: none
  idempotent:
    support: full
options:
  program:
    description: Path of C(llama-bench).
    type: path
    required: true
  path:
    description: File of the model whose layers the stand-ins have, or any one of its shards.
    type: path
    required: true
  devices:
    description: Devices of the cluster, as P(llamafleet.rpc.fleet_devices#filter) returns them.
    type: list
    elements: dict
    required: true
  kept:
    description: What an earlier run returned in RV(measured).
    type: list
    elements: dict
    default: []
  arguments:
    description: What C(llama-server) gets besides the plan. Its number of threads is measured with.
    type: list
    elements: str
    default: []
  user:
    description: Account that the program runs as when the module runs as root. Empty for the connecting account.
    type: str
    default: ''
  timeout:
    description: Seconds that one of the two runs over a device may take.
    type: int
    default: 300
"""

EXAMPLES = r"""
- name: How fast are they?
  llamafleet.rpc.calibrate:
    program: /opt/llamafleet/current/bin/llama-bench
    path: /opt/llamafleet/models/model.gguf
    devices: "{{ records | llamafleet.rpc.fleet_devices }}"
  register: speeds
"""

RETURN = r"""
measured:
  description:
    - A device each, with C(host), C(endpoint), C(index), C(device), and what was measured, or none.
    - C(bandwidth) is bytes per second that layers are read with, C(overhead_ms) what a token costs besides, C(rtt_ms)
      the round trip, C(link_mbps) what the way there carries.
  returned: always
  type: list
  elements: dict
problems:
  description: Devices that could not be measured, and why.
  returned: always
  type: list
  elements: str
lines:
  description: The same for people.
  returned: always
  type: list
  elements: str
"""

import os
import tempfile
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils import _calibrate, _rpc_wire, _twin
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._gguf import read_model
from ansible_collections.llamafleet.rpc.plugins.module_utils._jobs import Account, account_for, hand_over, runner_for
from ansible_collections.llamafleet.rpc.plugins.module_utils._model import model_from_header
from ansible_collections.llamafleet.rpc.plugins.module_utils._records import is_primary_cpu
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Runner


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "program": {"type": "path", "required": True},
            "path": {"type": "path", "required": True},
            "devices": {"type": "list", "elements": "dict", "required": True},
            "kept": {"type": "list", "elements": "dict", "default": []},
            "arguments": {"type": "list", "elements": "str", "default": []},
            "user": {"type": "str", "default": ""},
            "timeout": {"type": "int", "default": 300},
        },
        supports_check_mode=True,
    )
    options = module.params
    if module.check_mode:
        module.exit_json(changed=False, measured=options["kept"], problems=[], lines=["Not measured in check mode"])
    try:
        header = read_model(options["path"])
        shape = _twin.shape_of(model_from_header(header), header)
        account = account_for(options["user"])
    except FleetError as error:
        module.fail_json(msg=str(error))
    runner = runner_for(account)
    measured: list[dict[str, Any]] = []
    problems: list[str] = []
    for device in options["devices"]:
        try:
            measured.append({**device, **measure(runner, options, shape, device, account)})
        except FleetError as error:
            problems.append(f"{device['host']} {device['device']}: {error}")
    merged = _calibrate.merge(measured, options["kept"])
    lines = _calibrate.speed_lines(merged, problems)
    module.exit_json(changed=False, measured=merged, problems=problems, lines=lines)


def measure(
    runner: Runner, options: dict[str, Any], shape: _twin.Shape, device: dict[str, Any], account: Account | None
) -> dict[str, float | None]:
    """Figures of one device. The stand-ins lie where the account of the program can read them, and go with this."""
    endpoint = device["endpoint"]
    name = f"RPC{device['index']}" if endpoint else device["device"]
    target = _calibrate.Target("" if is_primary_cpu(endpoint, name) else name, endpoint)
    with tempfile.TemporaryDirectory(prefix="llamafleet-calibrate-") as directory:
        stand_ins = {}
        for layers in _calibrate.layer_counts(shape, device["usable"]):
            path = os.path.join(directory, f"{layers}.gguf")
            stand_ins[layers] = (path, _twin.write_twin(path, shape, layers))
        hand_over(directory, account)
        rtt = _rpc_wire.round_trip_ms(runner, endpoint) if endpoint else None
        extra = _calibrate.threads(options["arguments"])
        return _calibrate.measure(runner, options["program"], target, shape, stand_ins, rtt, options["timeout"], extra)


if __name__ == "__main__":
    main()
