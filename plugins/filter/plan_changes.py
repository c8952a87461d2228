# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: plan_changes
short_description: What would move, how many bytes, and what that gains
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - Compares a plan with the one that a primary was started with. The kept split is planned again with the devices of
    today, so the gain is not a difference of readings.
positional: _input, devices, kept, plan
options:
  _input:
    description: The model, as M(llamafleet.rpc.gguf_info) returns it.
    type: dict
    required: true
  devices:
    description: The devices, as P(llamafleet.rpc.fleet_devices#filter) returns them.
    type: list
    elements: dict
    required: true
  kept:
    description: The plan that the primary was started with.
    type: dict
    required: true
  plan:
    description: The new plan, of P(llamafleet.rpc.plan_primary#filter).
    type: dict
    required: true
  options:
    description: All named options that O(plan) was made with.
    type: dict
seealso:
  - plugin: llamafleet.rpc.plan_primary
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Would it be worth a restart?
  ansible.builtin.debug:
    msg: "{{ (gguf.model | llamafleet.rpc.plan_changes(devices, kept, plan, n_ctx=8192)).lines }}"
"""

RETURN = r"""
_value:
  description: What would change.
  type: dict
  contains:
    moves:
      description:
        - Layers that would go to another device, with C(first), C(last), C(output), C(source), C(target) and C(bytes).
      type: list
      elements: dict
    bytes:
      description: Bytes of weights that another device would get.
      type: int
    ms_kept:
      description: Milliseconds per token that are predicted for the kept split. Null if it does not fit any more.
      type: float
    ms_new:
      description: Milliseconds per token that are predicted for the plan.
      type: float
    kept_fits:
      description: Whether the kept split still fits.
      type: bool
    settings:
      description: Settings that differ, each with the kept value and the new one.
      type: dict
    lines:
      description: The same for people.
      type: list
      elements: str
"""

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.llamafleet.rpc.plugins.module_utils import _plan_changes
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError


def plan_changes(model: Any, devices: Any, kept: Any, plan: Any, **options: Any) -> dict[str, Any]:
    try:
        changes = _plan_changes.plan_changes(model, devices, kept, plan, **options)
    except FleetError as error:
        raise AnsibleFilterError(f"llamafleet.rpc.plan_changes: {error}") from error
    return {**changes, "lines": _plan_changes.change_lines(changes)}


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"plan_changes": plan_changes}
