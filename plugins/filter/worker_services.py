# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: worker_services
short_description: Worker instances as the services that have to run for them
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - Checks the instances of a host and derives for each the options of M(llamafleet.rpc.managed_service), its endpoint
    and its devices. Devices are always named to C(ggml-rpc-server), so that a broken driver is an error and never a
    silent fall-back to the CPU.
positional: _input
options:
  _input:
    description: The instances, as in C(llama_worker_instances).
    type: list
    elements: dict
    required: true
  host:
    description: Name of the host, for messages.
    type: str
    required: true
  facts:
    description:
      - Facts of M(llamafleet.rpc.host_facts). Without them or O(build) only the names of the services are given.
    type: dict
  build:
    description: The installed build, of which C(bin_dir) and C(worker_binary) are used.
    type: dict
  builds:
    description: Builds beside O(build), by the backend whose instances run them.
    type: dict
  cluster:
    description: Cluster that instances serve which name none of their own.
    type: str
    required: true
  address:
    description: IPv4 address to listen on.
    type: str
    required: true
  user:
    description: Account that the services run as.
    type: str
    default: ''
  directory:
    description: State directory that the services may write to.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: The services of this host
  ansible.builtin.debug:
    msg: >-
      {{ llama_worker_instances | llamafleet.rpc.worker_services(host=inventory_hostname,
         facts=ansible_facts.llamafleet, build=ansible_facts.llamafleet_build, cluster='default',
         address='127.0.0.1', directory='/var/lib/llamafleet') | map(attribute='service.argv') }}
"""

RETURN = r"""
_value:
  description:
    - One mapping for each instance, with its keys and C(endpoint), C(devices), C(backend), C(cluster), and C(service),
      the options of M(llamafleet.rpc.managed_service).
  type: list
  elements: dict
"""

from collections.abc import Mapping
from typing import Any, Callable

from ansible.errors import AnsibleFilterError
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._worker_args import worker_instances


def worker_services(
    instances: Any,
    host: str,
    cluster: str,
    address: str,
    directory: str,
    facts: Mapping[str, Any] | None = None,
    build: Mapping[str, Any] | None = None,
    user: str = "",
    builds: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    try:
        return worker_instances(instances, host, facts, build, cluster, address, directory, user, builds)
    except FleetError as error:
        raise AnsibleFilterError(f"llamafleet.rpc.worker_services: {error}") from error


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"worker_services": worker_services}
