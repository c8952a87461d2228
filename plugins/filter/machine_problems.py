# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: machine_problems
short_description: What is wrong with the machines behind an inventory
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - Finds hosts of the inventory that are one machine and would overwrite each other's services, and machines that were
    copied together with their identity.
  - Looks at the hosts that have facts of M(llamafleet.rpc.host_facts) in this run. Expects hosts in which the filter
    P(llamafleet.rpc.fleet_problems#filter) found nothing.
positional: _input
options:
  _input:
    description: Variables of the hosts, as C(groups['llama_fleet'] | map('extract', hostvars)).
    type: list
    elements: dict
    required: true
"""

EXAMPLES = r"""
- name: Each host is a machine of its own, or at least has services of its own
  ansible.builtin.assert:
    that: inventory_hostname not in problems
    fail_msg: "{{ problems[inventory_hostname] | default('') }}"
  vars:
    problems: "{{ groups['llama_fleet'] | map('extract', hostvars) | llamafleet.rpc.machine_problems }}"
"""

RETURN = r"""
_value:
  description: For each host that has a problem a sentence that says which, and what to do. Empty when there is none.
  type: dict
"""

from typing import Any, Callable

from ansible.errors import AnsibleFilterError
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._fleet import host_list
from ansible_collections.llamafleet.rpc.plugins.module_utils._fleet import machine_problems as core


def machine_problems(hosts: Any) -> dict[str, str]:
    try:
        return core(host_list(hosts))
    except FleetError as error:
        raise AnsibleFilterError(f"llamafleet.rpc.machine_problems: {error}") from error


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"machine_problems": machine_problems}
