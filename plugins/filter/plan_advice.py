# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: plan_advice
short_description: What it would take for a model to fit
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - Tells the largest context that fits, and for a model that does not fit what would cure that, the cheapest change
    first. These are a smaller type of the KV cache, a smaller context, more memory in a host, and one more worker.
  - Nothing is estimated. Each change was found by planning with it, and is the least of its kind. One step less, which
    is the next larger type, 256 tokens more or 64 MiB less, does not fit.
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
  options:
    description: All named options of P(llamafleet.rpc.plan_primary#filter), C(n_ctx) among them.
    type: dict
seealso:
  - plugin: llamafleet.rpc.plan_primary
    plugin_type: filter
"""

EXAMPLES = r"""
- name: What would it take to serve this model with 32768 tokens?
  ansible.builtin.debug:
    msg: "{{ (gguf.model | llamafleet.rpc.plan_advice(devices, n_ctx=32768)).lines }}"
  vars:
    devices: "{{ records | llamafleet.rpc.fleet_devices }}"
"""

RETURN = r"""
_value:
  description: What it would take.
  type: dict
  contains:
    feasible:
      description: Whether the model fits as asked.
      type: bool
    largest_ctx:
      description:
        - The largest context that fits, in tokens. Null if none fits.
        - No more than what the model was trained for, or what was asked for if that is more.
      type: int
    changes:
      description:
        - What would make it fit, the cheapest first, with C(change) (V(cache_type), V(context) or V(memory)), C(n_ctx),
          C(type_k), C(type_v), C(types_changed), C(memory) and C(tokens_per_s). Empty if it fits.
        - C(memory) lists C(host), C(device), C(more) and C(usable), the last two in bytes.
      type: list
      elements: dict
    lines:
      description: The same for people.
      type: list
      elements: str
"""

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.llamafleet.rpc.plugins.module_utils._advice import advice_lines, advise
from ansible_collections.llamafleet.rpc.plugins.module_utils._companions import check_options
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError


def plan_advice(model: Any, devices: Any, **options: Any) -> dict[str, Any]:
    try:
        check_options(options)
        advice = advise(model, devices, **options)
    except FleetError as error:
        raise AnsibleFilterError(f"llamafleet.rpc.plan_advice: {error}") from error
    trained = model.get("n_ctx_train") if isinstance(model, Mapping) else None
    return {**advice, "lines": advice_lines(advice, trained)}


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"plan_advice": plan_advice}
