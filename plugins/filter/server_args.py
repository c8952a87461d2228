# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: server_args
short_description: The arguments that make llama.cpp run a model as planned
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - Model, workers, devices, layers, context and caches as arguments, in an order that llama.cpp understands.
  - Address, port, keys and logging are not part of a plan and not in the list. It never holds a secret.
positional: _input
options:
  _input:
    description: A plan of P(llamafleet.rpc.plan_split#filter).
    type: dict
    required: true
  model:
    description: What M(llamafleet.rpc.gguf_info) returned for the file on the primary, or the path of that file.
    type: raw
    required: true
  build:
    description: The llama.cpp build whose arguments are made. Builds from b10151 on are supported.
    type: str
    default: b11434
  tool:
    description: The program to make them for.
    type: str
    default: llama-server
    choices: [llama-server, llama-bench, llama-fit-params]
seealso:
  - plugin: llamafleet.rpc.plan_split
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Ask llama.cpp itself what the plan takes
  ansible.builtin.command:
    argv: "{{ ['llama-fit-params'] + (plan | llamafleet.rpc.server_args(model, tool='llama-fit-params')) }}"
  changed_when: false
"""

RETURN = r"""
_value:
  description: The arguments, without the program.
  type: list
  elements: str
  sample: [-m, /srv/m.gguf, --rpc, "10.0.0.2:18711", -dev, RPC0, -ngl, "31", -sm, layer, -ts, "31"]
"""

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._server_args import server_args as core


def server_args(plan: Any, model: Any = None, build: Any = "b11434", tool: Any = "llama-server") -> list[str]:
    try:
        return core(plan, model, build, tool)
    except FleetError as error:
        raise AnsibleFilterError(f"llamafleet.rpc.server_args: {error}") from error


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"server_args": server_args}
