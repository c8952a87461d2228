# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: worker_report
short_description: What workers answered as lines that a person can read
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - Shows for each worker its state, its client, its protocol and its devices. Sizes are MiB.
positional: _input
options:
  _input:
    description: The RV(llamafleet.rpc.rpc_info#module:results) of M(llamafleet.rpc.rpc_info).
    type: list
    elements: dict
    required: true
"""

EXAMPLES = r"""
- name: Show the workers
  ansible.builtin.debug:
    msg: "{{ workers.results | llamafleet.rpc.worker_report }}"
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
from ansible_collections.llamafleet.rpc.plugins.module_utils._report import worker_lines


def worker_report(results: Any) -> list[str]:
    if isinstance(results, (str, Mapping)) or not hasattr(results, "__iter__"):
        raise AnsibleFilterError(
            f"llamafleet.rpc.worker_report: the input is a {kind_of(results)}, "
            "not the results of llamafleet.rpc.rpc_info"
        )
    return worker_lines(list(results))


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"worker_report": worker_report}
