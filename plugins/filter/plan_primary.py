# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: plan_primary
short_description: The plan of a model and of what runs beside it
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - P(llamafleet.rpc.plan_split#filter) for a model that is served with a draft model, its own MTP layers, or a
    multimodal projector. A draft model and a projector live on one device of the primary itself, and their bytes are
    taken off it before the split is planned. MTP layers are part of the split.
  - Without any of these the plan is that of P(llamafleet.rpc.plan_split#filter).
positional: _input, devices
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
  draft:
    description: A draft model with the same tokens, as M(llamafleet.rpc.gguf_info) returns it.
    type: dict
  draft_device:
    description: The device of the primary that holds the draft model. By default its first GPU, or its CPU.
    type: str
  mtp:
    description: Whether the MTP (NextN) layers of the model itself draft.
    type: bool
    default: false
  drafted:
    description: Tokens that are drafted at a time.
    type: int
    default: 3
  projector:
    description: A multimodal projector, as M(llamafleet.rpc.gguf_info) returns it as RV(ignore:projector).
    type: dict
  projector_device:
    description: The device of the primary that holds the projector. By default its first GPU, or its CPU.
    type: str
  options:
    description: All named options of P(llamafleet.rpc.plan_split#filter), C(n_ctx) among them.
    type: dict
seealso:
  - plugin: llamafleet.rpc.plan_split
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Plan with a draft model on the primary's GPU
  ansible.builtin.debug:
    msg: "{{ gguf.model | llamafleet.rpc.plan_primary(devices, n_ctx=8192, draft=draft_gguf.model) }}"
  vars:
    devices: "{{ records | llamafleet.rpc.fleet_devices }}"
"""

RETURN = r"""
_value:
  description:
    - The plan, as of P(llamafleet.rpc.plan_split#filter), with C(companions) and C(drafted).
    - C(companions) lists C(what), C(path), C(device), C(weights), C(kv), C(compute), C(total) and C(beside), the last
      of the primary's own memory. Sizes are bytes.
  type: dict
"""

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.llamafleet.rpc.plugins.module_utils._companions import check_options, plan_with
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError


def plan_primary(model: Any, devices: Any, **options: Any) -> dict[str, Any]:
    try:
        check_options(options)
        return plan_with(model, devices, **options)
    except FleetError as error:
        raise AnsibleFilterError(f"llamafleet.rpc.plan_primary: {error}") from error


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"plan_primary": plan_primary}
