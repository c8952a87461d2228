# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: tensor_split
short_description: The C(--tensor-split) argument of a plan
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - The number of whole layers for each device of C(-dev), the output layer counted as one.
  - Raises an error for a plan that is not feasible.
positional: _input
options:
  _input:
    description: A plan of P(llamafleet.rpc.plan_split#filter).
    type: dict
    required: true
  consumer:
    description: The program that reads it. llama-bench takes slashes, because commas separate its test runs.
    type: str
    default: llama-server
    choices: [llama-server, llama-bench, llama-fit-params]
seealso:
  - plugin: llamafleet.rpc.plan_split
    plugin_type: filter
"""

EXAMPLES = r"""
- name: How many layers each device holds
  ansible.builtin.debug:
    msg: "{{ llamafleet_plan | llamafleet.rpc.tensor_split }}"

- name: The same for llama-bench
  ansible.builtin.debug:
    msg: "{{ llamafleet_plan | llamafleet.rpc.tensor_split(consumer='llama-bench') }}"
"""

RETURN = r"""
_value:
  description: Whole numbers in the order of the devices. Empty when no device is used.
  type: str
  sample: 20,11
"""

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._server_args import tensor_split as core


def tensor_split(plan: Any, consumer: Any = "llama-server") -> str:
    try:
        return core(plan, consumer)
    except FleetError as error:
        raise AnsibleFilterError(f"llamafleet.rpc.tensor_split: {error}") from error


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"tensor_split": tensor_split}
