# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: fleet_problems
short_description: What is wrong with the inventory of a fleet
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - Checks the members of the groups C(llama_primary) and C(llama_workers) as a whole, before any host is touched.
    Every cluster has one primary and it is no worker of its own cluster, endpoints are unique IPv4 addresses with a
    port, and all hosts want the same build.
  - Warns of variables that are named like a role's and read by none, as misspelt ones are.
positional: _input
options:
  _input:
    description: Variables of the hosts, as C(groups['llama_fleet'] | map('extract', hostvars)).
    type: list
    elements: dict
    required: true
  limit:
    description:
      - Hosts that the run is limited to. A cluster whose workers are in it and whose primary is not is a problem.
    type: list
    elements: str
"""

EXAMPLES = r"""
- name: The inventory makes sense
  ansible.builtin.assert:
    that: problems | length == 0
    fail_msg: "{{ problems | join('\n') }}"
  vars:
    problems: "{{ groups['llama_fleet'] | map('extract', hostvars) | llamafleet.rpc.fleet_problems }}"
"""

RETURN = r"""
_value:
  description: One sentence for each problem. Empty when there is none.
  type: list
  elements: str
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

from ansible.errors import AnsibleFilterError
from ansible.utils.display import Display
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._fleet import fleet_problems as core
from ansible_collections.llamafleet.rpc.plugins.module_utils._fleet import host_list, limit_problems, unread_variables


def fleet_problems(hosts: Any, limit: Sequence[str] | None = None) -> list[str]:
    try:
        members = host_list(hosts)
        problems = core(members)
    except FleetError as error:
        raise AnsibleFilterError(f"llamafleet.rpc.fleet_problems: {error}") from error
    for sentence in unread_variables(members, _role_variables()):
        Display().warning(sentence)
    return problems if problems or limit is None else limit_problems(members, list(limit))


def _role_variables() -> set[str]:
    """What the roles of this collection take: each has a default."""
    roles = Path(__file__).resolve().parents[2] / "roles"
    texts = (path.read_text(encoding="utf-8") for path in roles.glob("*/defaults/main.yml"))
    return {name for text in texts for name in re.findall(r"^(llama_\w+):", text, re.MULTILINE)}


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"fleet_problems": fleet_problems}
