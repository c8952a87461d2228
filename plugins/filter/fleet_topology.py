# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: fleet_topology
short_description: Which hosts form which cluster
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - Names the primary and the workers of each cluster of the inventory.
positional: _input
options:
  _input:
    description: Variables of the hosts, as C(groups['llama_fleet'] | map('extract', hostvars)).
    type: list
    elements: dict
    required: true
"""

EXAMPLES = r"""
- name: The primary of this host's cluster
  ansible.builtin.debug:
    msg: "{{ topology[llama_fleet_cluster | default('default')].primary }}"
  vars:
    topology: "{{ groups['llama_fleet'] | map('extract', hostvars) | llamafleet.rpc.fleet_topology }}"
"""

RETURN = r"""
_value:
  description:
    - For each cluster C(primary), a host name or none, C(workers), a list of host names, and C(ports), the TCP ports of
      our services for each host.
  type: dict
"""

from typing import Any, Callable

from ansible.errors import AnsibleFilterError
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._fleet import host_list, topology


def fleet_topology(hosts: Any) -> dict[str, dict[str, Any]]:
    try:
        return topology(host_list(hosts))
    except FleetError as error:
        raise AnsibleFilterError(f"llamafleet.rpc.fleet_topology: {error}") from error


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"fleet_topology": fleet_topology}
