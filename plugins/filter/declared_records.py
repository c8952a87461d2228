# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: declared_records
short_description: Records of machines that are declared and not connected to
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - Makes the records of those hosts whose inventory variables declare devices, as M(llamafleet.rpc.worker_record) makes
    them, without a connection and without a task for each host. Other hosts are left out.
  - Devices of C(llama_primary_instances) count before C(llama_worker_devices_declared), because they tell of the memory
    for a primary's own buffers too.
positional: _input
options:
  _input:
    description: Variables of the hosts, as C(groups['all'] | map('extract', hostvars)).
    type: list
    elements: dict
    required: true
  primary:
    description:
      - Name of the primary, where the hosts are those of one cluster. Only its C(llama_primary_instances) count then,
        and the others are its workers, so that two of them at one loopback address are an error.
    type: str
seealso:
  - plugin: llamafleet.rpc.place_models
    plugin_type: filter
"""

EXAMPLES = r"""
- name: What is declared of all machines
  ansible.builtin.debug:
    msg: "{{ groups['all'] | map('extract', hostvars) | llamafleet.rpc.declared_records }}"

- name: What is declared of the members of a cluster
  ansible.builtin.debug:
    msg: "{{ groups['all'] | map('extract', hostvars) | llamafleet.rpc.declared_records(primary='gamer') }}"
"""

RETURN = r"""
_value:
  description: Records, as of M(llamafleet.rpc.worker_record). Their C(machine_id) is null.
  type: list
  elements: dict
"""

from typing import Any, Callable

from ansible.errors import AnsibleFilterError
from ansible_collections.llamafleet.rpc.plugins.module_utils._declared import declared_records as core
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._fleet import host_list


def declared_records(hosts: Any, primary: str | None = None) -> list[dict[str, Any]]:
    try:
        return core(host_list(hosts), primary)
    except FleetError as error:
        raise AnsibleFilterError(f"llamafleet.rpc.declared_records: {error}") from error


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"declared_records": declared_records}
