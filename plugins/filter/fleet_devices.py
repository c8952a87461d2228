# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: fleet_devices
short_description: The devices of a cluster, in the order in which llama.cpp uses them
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - Turns the records of the members of a cluster into the list of devices for P(llamafleet.rpc.plan_split#filter).
  - The CPU of the primary comes first, then the devices of the workers in the order of the records, then the other
    devices of the primary. llama.cpp lists devices in this order.
  - Records are checked. An endpoint that is not IPv4:port, an endpoint in use twice, two primaries, device numbers with
    gaps, or a value of a wrong type is an error that names the host.
positional: _input
options:
  _input:
    description:
      - Worker records as a list, or as a mapping of them.
      - The record of the primary has instances whose endpoint is null.
    type: raw
    required: true
  cluster:
    description: Only instances that serve this cluster are used.
    type: str
    default: default
seealso:
  - plugin: llamafleet.rpc.plan_split
    plugin_type: filter
"""

EXAMPLES = r"""
- name: What can this cluster plan with
  ansible.builtin.debug:
    msg: "{{ records | llamafleet.rpc.fleet_devices }}"
  vars:
    records:
      - host: box
        cluster: default
        instances:
          - name: default
            endpoint: 10.0.0.2:18711
            rtt_ms: 0.4
            devices:
              - {index: 0, device: CUDA0, pool: box/gpu, usable: 25000000000, budget: null, bandwidth: 900000000000}
"""

RETURN = r"""
_value:
  description: The devices in order. Sizes are bytes, unknown values are null.
  type: list
  elements: dict
  contains:
    host:
      description: Inventory name of the host.
      type: str
      sample: box
    endpoint:
      description: Address and port of the worker, null for a device of the primary.
      type: str
      sample: 10.0.0.2:18711
    index:
      description: Number of the device within its endpoint.
      type: int
      sample: 0
    n_endpoint_devices:
      description: How many devices the endpoint has.
      type: int
      sample: 1
    device:
      description: Name of the device in llama.cpp on its host.
      type: str
      sample: CUDA0
    pool:
      description: The physical memory behind the device.
      type: str
      sample: box/gpu
    usable:
      description: Bytes that may be planned on the device.
      type: int
      sample: 25000000000
    pool_usable:
      description: Bytes that all devices of the pool may use together.
      type: int
      sample: 25000000000
    bandwidth:
      description: Memory bandwidth in bytes per second.
      type: float
      sample: 900000000000
    rtt_ms:
      description: Round trip from the primary in milliseconds.
      type: float
      sample: 0.4
    overhead_ms:
      description: Fixed cost of the device for each token in milliseconds.
      type: float
    priority:
      description: Lower numbers are used first.
      type: int
    min_units:
      description: The device must hold at least so many units.
      type: int
    max_units:
      description: The device must not hold more units.
      type: int
    link_mbps:
      description: Speed of the link to the primary. Present only where a record has it.
      type: float
"""

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.llamafleet.rpc.plugins.module_utils._records import RecordError
from ansible_collections.llamafleet.rpc.plugins.module_utils._records import fleet_devices as core


def fleet_devices(records: Any, cluster: Any = "default") -> list[dict[str, Any]]:
    try:
        return core(records, cluster)
    except RecordError as error:
        raise AnsibleFilterError(f"llamafleet.rpc.fleet_devices: {error}") from error


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"fleet_devices": fleet_devices}
