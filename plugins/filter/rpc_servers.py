# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: rpc_servers
short_description: The C(--rpc) argument of a plan
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - The endpoints of all workers that hold something, each once, with commas and without blanks.
  - Raises an error for a plan that is not feasible.
positional: _input
options:
  _input:
    description: A plan of P(llamafleet.rpc.plan_split#filter).
    type: dict
    required: true
seealso:
  - plugin: llamafleet.rpc.plan_split
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Which workers does the plan use
  ansible.builtin.debug:
    msg: "{{ llamafleet_plan | llamafleet.rpc.rpc_servers }}"
"""

RETURN = r"""
_value:
  description: The endpoints. Empty when all is local.
  type: str
  sample: 10.0.0.2:18711,10.0.0.3:18711
"""

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._server_args import rpc_servers as core


def rpc_servers(plan: Any) -> str:
    try:
        return core(plan)
    except FleetError as error:
        raise AnsibleFilterError(f"llamafleet.rpc.rpc_servers: {error}") from error


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"rpc_servers": rpc_servers}
