# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: place_models
short_description: Clusters for several models, or for copies of one, on many hosts
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - Chooses for each copy of each model the hosts of a cluster, the primary among them, and plans each cluster with
    P(llamafleet.rpc.plan_split#filter). A host serves one cluster at most, and so do hosts that share memory.
  - Models of a smaller priority come first. Of equal ones each gets its first copy before any gets a second, the
    largest model first. A copy gets the number of hosts, and the fastest of them, with which a token takes least.
    With V(memory) as its objective it gets as few and as roomy hosts as possible. Where that leaves a copy without a
    place, the smallest hosts that will do are tried instead, and the better outcome is kept.
  - That is greedy. How many copies and how many tokens per second no placement can exceed is computed and told.
  - The result does not depend on the order of records or models.
  - A round trip that was measured from one primary is taken for that from another one.
positional: _input, models
options:
  _input:
    description:
      - Worker records, one of each host, as P(llamafleet.rpc.fleet_devices#filter) takes them, of whatever clusters.
        Any host may become a primary or a worker, whatever it was. As a primary it has all devices of its record, as
        a worker those it lends, which is all of a worker's record and of a primary's all but the CPU beside a GPU.
      - Instead of a record, a host may be described by C(host), C(devices), which are declared as in
        M(llamafleet.rpc.worker_record), and optionally C(address), the IPv4 address in the mesh.
    type: raw
    required: true
  models:
    description:
      - The models. Each has a C(name), C(model) as M(llamafleet.rpc.gguf_info) returns it, and C(n_ctx).
      - Optional are C(replicas) (V(1)), C(n_parallel), C(type_k), C(type_v) and C(objective) as of
        P(llamafleet.rpc.plan_split#filter), C(priority) (V(50)), of which smaller numbers come first, and C(variables),
        which the primary of each copy gets in the inventory.
    type: list
    elements: dict
    required: true
  primaries:
    description: Names of the hosts that may be a primary. By default any may.
    type: list
    elements: str
seealso:
  - plugin: llamafleet.rpc.plan_split
    plugin_type: filter
  - plugin: llamafleet.rpc.declared_records
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Two copies of a small model and one of a large one
  ansible.builtin.debug:
    msg: "{{ (records | llamafleet.rpc.place_models(models)).lines }}"
  vars:
    records:
      - host: a
        address: 10.77.0.2
        devices:
          - {device: CUDA0, usable: 22GiB, bandwidth: 800000000000}
          - {device: CPU, usable: 52GiB, bandwidth: 60000000000}
      - host: b
        address: 10.77.0.3
        devices:
          - {device: MTL0, usable: 44GiB, bandwidth: 410000000000}
    models:
      - {name: small, model: "{{ small_gguf.model }}", n_ctx: 8192, replicas: 2}
      - {name: large, model: "{{ large_gguf.model }}", n_ctx: 8192, priority: 10, objective: memory}
"""

RETURN = r"""
_value:
  description: The placement. Sizes are bytes.
  type: dict
  contains:
    clusters:
      description:
        - The clusters, with C(cluster), C(model), C(primary), C(workers), C(plan) and C(headroom).
        - C(plan) has C(feasible), C(objective), C(n_ctx), C(ms_per_token), C(tokens_per_s), C(lower_bound_ms),
          C(round_trips) and C(devices), with C(host), C(device), C(units), C(total) and C(headroom) of each.
        - C(headroom) is the least that any device of the cluster, or the memory of its primary, has left.
      type: list
      elements: dict
    unplaced:
      description: Models of which copies have no place, with C(model), C(replicas) (how many) and C(reason).
      type: list
      elements: dict
    unused:
      description: Hosts without a cluster, with C(host) and C(why).
      type: list
      elements: dict
    bound:
      description:
        - C(asked) and C(placed) are numbers of copies. No placement has more copies than C(replicas), by the memory of
          all hosts together, and no more tokens per second for all copies together than C(tokens_per_s), by the
          bandwidth of all hosts together with links that cost nothing. C(predicted_tokens_per_s) is what this one has.
      type: dict
    inventory:
      description:
        - An inventory of the clusters, with the groups C(llama_fleet), C(llama_primary) and C(llama_workers), and
          C(llama_fleet_cluster) for each host. Declared machines keep their devices in it.
      type: dict
    warnings:
      description: What to watch.
      type: list
      elements: str
    lines:
      description: All of it, without the inventory, for people.
      type: list
      elements: str
"""

from typing import Any, Callable

from ansible.errors import AnsibleFilterError
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._place_models import place_models as core


def place_models(records: Any, models: Any = None, primaries: Any = None) -> dict[str, Any]:
    try:
        return core(records, models, primaries)
    except FleetError as error:
        raise AnsibleFilterError(f"llamafleet.rpc.place_models: {error}") from error


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"place_models": place_models}
