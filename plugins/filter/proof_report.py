# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: proof_report
short_description: Promised against measured memory of a primary as lines that a person can read
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - Shows for each device weights, KV cache and compute buffer as promised by the plan and as measured, then the answer
    that proved the primary, and how to use its API.
positional: _input, url
options:
  _input:
    description: A result of M(llamafleet.rpc.primary_proof).
    type: dict
    required: true
  url:
    description: Address of the API.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: Show what was promised and measured
  ansible.builtin.debug:
    msg: "{{ primary_proof_result | llamafleet.rpc.proof_report('http://127.0.0.1:8080') | join('\n') }}"
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
from ansible_collections.llamafleet.rpc.plugins.module_utils._report import proof_lines


def proof_report(proof: Any, url: str) -> list[str]:
    if not isinstance(proof, Mapping):
        raise AnsibleFilterError(
            f"llamafleet.rpc.proof_report: the input is a {kind_of(proof)}, "
            "not a result of llamafleet.rpc.primary_proof"
        )
    return proof_lines(proof, url)


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"proof_report": proof_report}
