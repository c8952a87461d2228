# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: plan_report
short_description: A plan as lines that a person can read
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - Shows for each device its layers and what they take, then why other devices hold none, and warnings. Sizes are MiB.
positional: _input
options:
  _input:
    description: A plan of P(llamafleet.rpc.plan_split#filter).
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Show the plan
  ansible.builtin.debug:
    msg: "{{ llama_primary__plan | llamafleet.rpc.plan_report | join('\n') }}"
"""

RETURN = r"""
_value:
  description: The lines.
  type: list
  elements: str
"""

from collections.abc import Mapping
from typing import Any, Callable

from ansible.errors import AnsibleFilterError
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import kind_of
from ansible_collections.llamafleet.rpc.plugins.module_utils._report import plan_lines


def plan_report(plan: Any) -> list[str]:
    if not isinstance(plan, Mapping) or "feasible" not in plan:
        raise AnsibleFilterError(
            f"llamafleet.rpc.plan_report: the input is a {kind_of(plan)} and no plan of llamafleet.rpc.plan_split"
        )
    return plan_lines(plan)


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"plan_report": plan_report}
