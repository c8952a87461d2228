# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: worker_identities
short_description: Identities of the worker processes of a cluster
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - Maps each endpoint to the boot id and start of the process behind it. A primary whose workers have other identities
    than when it started has lost them and must be restarted.
positional: _input
options:
  _input:
    description: Records of the hosts, as M(llamafleet.rpc.worker_record) returns them.
    type: list
    elements: dict
    required: true
  cluster:
    description: The cluster.
    type: str
    default: default
"""

EXAMPLES = r"""
- name: What the primary was started with
  ansible.builtin.debug:
    msg: "{{ records | llamafleet.rpc.worker_identities('default') }}"
"""

RETURN = r"""
_value:
  description: Endpoint to identity, which is none for a worker that is not running.
  type: dict
"""

from collections.abc import Mapping
from typing import Any, Callable

from ansible.errors import AnsibleFilterError
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import kind_of
from ansible_collections.llamafleet.rpc.plugins.module_utils._fleet import worker_identities as identities


def worker_identities(records: Any, cluster: str = "default") -> dict[str, Any]:
    if isinstance(records, (str, Mapping)) or not hasattr(records, "__iter__"):
        raise AnsibleFilterError(
            f"llamafleet.rpc.worker_identities: the input is a {kind_of(records)}, not a list of worker records"
        )
    return identities(list(records), cluster)


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"worker_identities": worker_identities}
