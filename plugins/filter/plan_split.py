# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: plan_split
short_description: Which device holds which layers of a model
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - Computes the split of a model over the devices of a cluster before a byte of it moves. The plan is the exact optimum
    of the cost model below, and a model that does not fit gives a plan that says by how much and what would fit.
  - A device needs the weights and caches of its layers and a compute buffer. That and O(margin) must fit its usable
    memory, and all devices of a pool together must fit the pool.
  - A device takes the bytes that it reads for a token, divided by its bandwidth. A device behind RPC takes its round
    trip and its overhead on top.
  - Layers keep their order. The first of them may stay on the CPU of the primary, its GPUs come last, and remote
    devices stand in the best order there is. The output layer is on the last device; its matrix stays on the CPU of the
    primary where that pays. Devices that get nothing are left out.
  - The formulae, their units and sources are in C(docs/cost-model.md) of the collection.
  - A device with a larger number as priority is used only if the devices with smaller numbers cannot hold the model.
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
  n_ctx:
    description: Tokens of context for all slots together.
    type: int
    required: true
  n_parallel:
    description: Number of slots, which are requests served at a time.
    type: int
    default: 1
  type_k:
    description: Type of the K cache.
    type: str
    default: f16
    choices: [f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1]
  type_v:
    description: Type of the V cache. A quantized one needs flash attention.
    type: str
    default: f16
    choices: [f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1]
  n_batch:
    description: Tokens of a batch.
    type: int
    default: 2048
  n_ubatch:
    description: Tokens of a micro batch. Compute buffers grow with it.
    type: int
    default: 512
  flash_attn:
    description: Flash attention.
    type: str
    default: auto
    choices: [auto, "on", "off"]
  kv_unified:
    description: Whether all slots share one cache.
    type: bool
    default: true
  swa_full:
    description: Whether layers with a sliding window keep the whole context.
    type: bool
    default: false
  objective:
    description:
      - V(latency) makes a token as quick as possible.
      - V(memory) makes the smallest headroom, relative to what is usable, as large as possible.
      - V(prefill) makes the slowest device as quick as possible where llama.cpp pipelines a prompt over several.
    type: str
    default: latency
    choices: [latency, memory, prefill]
  margin:
    description: Bytes to leave free on every device and in every pool. By default 2 %, and at least 64 MiB.
    type: int
  cache_ram:
    description:
      - Bytes that llama-server may use to keep prompts in the memory of the primary.
      - By default the largest of 8192, 4096, 2048, 1024, 512, 256 and 0 MiB that fits beside the plan.
    type: int
  alternatives:
    description:
      - Whether to say as well what each device costs or saves, which other choice of devices is the best, and what
        would be left after the loss of each worker. It takes as many plans as there are devices and workers.
    type: bool
    default: false
seealso:
  - plugin: llamafleet.rpc.fleet_devices
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Plan for the fewest milliseconds per token
  ansible.builtin.debug:
    msg: "{{ model | llamafleet.rpc.plan_split(devices, n_ctx=8192) }}"
  vars:
    model: "{{ gguf.model }}"
    devices: "{{ records | llamafleet.rpc.fleet_devices }}"

- name: Plan for even headroom, with a cache of half the size
  ansible.builtin.debug:
    msg: >-
      {{ gguf.model
         | llamafleet.rpc.plan_split(devices, n_ctx=8192, type_k='q8_0', type_v='q8_0', objective='memory') }}
"""

RETURN = r"""
_value:
  description: The plan. Every key is there also when it is not feasible. Sizes are bytes.
  type: dict
  contains:
    feasible:
      description: Whether the model fits.
      type: bool
    reason:
      description: Why it does not fit, and what would. Null if it does.
      type: str
    objective:
      description: The objective.
      type: str
    n_gpu_layers:
      description: Units on devices, the output layer counted as one. The others stay on the CPU of the primary.
      type: int
    devices:
      description:
        - Who holds what, with C(host), C(endpoint), C(index), C(device), C(rpc_name), C(units), C(first_layer),
          C(last_layer), C(output), C(weights), C(kv), C(compute), C(total), C(usable), C(headroom) and C(ms).
      type: list
      elements: dict
    rpc:
      description: Endpoints for C(--rpc).
      type: str
    tensor_split:
      description: Units for each device of C(device_order).
      type: str
    device_order:
      description: Names for C(-dev).
      type: list
      elements: str
    n_ctx:
      description: The context that was planned.
      type: int
    params:
      description: The other parameters of the context, for P(llamafleet.rpc.server_args#filter).
      type: dict
    primary_host:
      description:
        - What the process of the primary takes in its own memory, layers on its CPU included, with C(weights), C(kv),
          C(compute), C(cache_ram), C(total) and C(usable), which is null if the primary's CPU is not among the devices.
      type: dict
    predicted:
      description:
        - Speed by the cost model, with C(ms_per_token), C(tokens_per_s), C(lower_bound_ms), below which no plan of
          these devices is, C(gap) as in C(certificate), C(hardware_ms), which is this plan without any overhead,
          C(wire_bytes_per_token) and C(round_trips).
      type: dict
    output_on_primary:
      description:
        - Null, or that the output matrix stays on the CPU of the primary, with C(override) for C(-ot), C(weights),
          C(ms) and C(wire_bytes_saved).
      type: dict
    certificate:
      description:
        - How good the plan is, with C(quantity) that the objective counts, its C(value), the C(lower_bound) that no
          plan of these devices goes below, their C(gap) as a share of the value, and whether it is C(proved) that there
          is none. Null if nothing fits.
      type: dict
    devices_compared:
      description:
        - With O(alternatives), for each device C(host), C(endpoint), C(device), C(used), the value of the objective
          C(with_it) and C(without_it), which is null where that does not fit, what it C(saves), and C(text).
      type: list
      elements: dict
    second_best:
      description:
        - With O(alternatives), the best plan with another choice of devices, with C(units), C(ms_per_token),
          C(slower_by), C(fullest), C(units_moved) and C(bytes_moved). Null if there is none.
      type: dict
    without:
      description:
        - With O(alternatives), for each host whose workers hold layers C(host), C(endpoints) and C(feasible), and what
          C(second_best) has, for the plan without them.
      type: list
      elements: dict
    dropped:
      description: Devices that hold nothing, with C(host), C(endpoint), C(device) and C(why).
      type: list
      elements: dict
    warnings:
      description: What to watch, with C(code) and C(text).
      type: list
      elements: dict
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan import plan_split as core


def plan_split(model: Any, devices: Any = None, n_ctx: Any = None, **options: Any) -> dict[str, Any]:
    if n_ctx is None:
        raise AnsibleFilterError("llamafleet.rpc.plan_split: n_ctx is missing; say for how many tokens to plan")
    unknown = sorted(set(options) - OPTIONS)
    if unknown:
        raise AnsibleFilterError(
            f"llamafleet.rpc.plan_split: unknown option {', '.join(unknown)}; there are {', '.join(sorted(OPTIONS))}"
        )
    try:
        return core(model, devices, n_ctx=n_ctx, **options)
    except FleetError as error:
        raise AnsibleFilterError(f"llamafleet.rpc.plan_split: {error}") from error


OPTIONS = frozenset(name for name in signature(core).parameters if name not in ("model", "devices", "n_ctx"))


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"plan_split": plan_split}
