# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: extra_args
short_description: Additional arguments of llama-server, unless they undo the plan
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - Refuses arguments that the plan decides, whose memory is in no plan, that cost round trips, that would download at
    start, or that hold a secret, and says what to use instead.
positional: _input
options:
  _input:
    description: The arguments.
    type: list
    elements: str
    required: true
"""

EXAMPLES = r"""
- name: Metrics are welcome
  ansible.builtin.debug:
    msg: "{{ ['--metrics'] | llamafleet.rpc.extra_args }}"
"""

RETURN = r"""
_value:
  description: The arguments as text.
  type: list
  elements: str
"""

from collections.abc import Mapping
from typing import Any, Callable

from ansible.errors import AnsibleFilterError
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError, kind_of
from ansible_collections.llamafleet.rpc.plugins.module_utils._extra_args import checked_extra_args


def extra_args(arguments: Any) -> list[str]:
    if isinstance(arguments, (str, Mapping)) or not hasattr(arguments, "__iter__"):
        raise AnsibleFilterError(
            f"llamafleet.rpc.extra_args: the input is a {kind_of(arguments)}, not a list of arguments"
        )
    try:
        return checked_extra_args(list(arguments))
    except FleetError as error:
        raise AnsibleFilterError(f"llamafleet.rpc.extra_args: {error}") from error


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"extra_args": extra_args}
