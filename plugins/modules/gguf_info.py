#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gguf_info
short_description: Tell what each layer of a GGUF model costs, without loading it
version_added: 0.1.0
description:
  - Reads the header of a GGUF model, a few MiB at most, and accounts for every byte of the model. That is weights and
    active bytes per layer, cache geometry, recurrent state, what stays on the primary and what goes with the output.
  - All shards of a split model are found by name, whichever one is given. RV(model.path) is always the first shard,
    the one that llama.cpp must be given.
  - A file that is truncated, empty, a git LFS pointer, a web page or no GGUF at all fails with its own message.
  - An architecture whose memory is not known is refused by name. Nothing is guessed.
author:
  - llamafleet contributors (@llamafleet)
extends_documentation_fragment:
  - llamafleet.rpc.attributes
  - llamafleet.rpc.attributes.info_module
  - llamafleet.rpc.attributes.actiongroup_all
options:
  path:
    description:
      - File of the model on the host, or any one of its shards.
      - Exactly one of O(path), O(url) and O(source) is required.
    type: path
  url:
    description:
      - HTTP or HTTPS address of the model, or of any one of its shards. Only the header is fetched, by byte ranges.
      - A user, a password and a query string are used but never shown.
    type: str
  source:
    description:
      - Either of both, or a file of a repository on a model hub, written as C(hf:owner/repo/file.gguf) or
        C(hf:owner/repo@revision/file.gguf). The prefix may be left out where no file of that name is on the host.
    type: str
  endpoint:
    description:
      - Address of the model hub or of a mirror of it. By default that of the environment variable E(HF_ENDPOINT).
    type: str
    default: https://huggingface.co
  token:
    description:
      - Token that may read the model. By default that of the environment variable E(HF_TOKEN).
      - It is sent to O(endpoint) only, never to a server that it redirects to.
    type: str
    default: ''
  projector:
    description: Whether the file is a multimodal projector (C(mmproj-*.gguf)) and no model.
    type: bool
    default: false
  timeout:
    description: Seconds that one request may take as a whole.
    type: float
    default: 30
"""

EXAMPLES = r"""
- name: What does the model cost?
  llamafleet.rpc.gguf_info:
    path: /opt/llamafleet/models/model-00001-of-00003.gguf
  register: model_info

- name: How many layers are there to spread?
  ansible.builtin.debug:
    msg: "{{ model_info.model.name }}: {{ model_info.model.n_layer }} layers, {{ model_info.model.file_bytes }} bytes"

- name: The same before anything is downloaded
  llamafleet.rpc.gguf_info:
    url: https://example.com/models/model-00001-of-00003.gguf
  register: remote_info

- name: The same for a file on a model hub
  llamafleet.rpc.gguf_info:
    source: hf:example/Some-70B-GGUF/some-70b-q4_k_m-00001-of-00002.gguf
  register: hub_info
"""

RETURN = r"""
projector:
  description: The projector as P(llamafleet.rpc.plan_primary#filter) takes it. Sizes are bytes.
  returned: with O(projector=true)
  type: dict
  contains:
    path:
      description: The file to load.
      type: str
    kind:
      description: Kind of projector.
      type: str
      sample: idefics3
    weights:
      description: Its tensors.
      type: int
    compute:
      description: Its compute buffer, an upper bound for kinds that were measured.
      type: int
    picture:
      description: What it takes of the primary's own memory.
      type: int
    width:
      description: Elements of an embedding that it makes, or V(null).
      type: int
    measured:
      description: Whether the memory of its kind was measured.
      type: bool
model:
  description:
    - The model as the planner takes it. All sizes are bytes, as they are loaded (each tensor padded to 32 bytes).
    - RV(ignore:null) means unknown.
  returned: without O(projector=true)
  type: dict
  contains:
    path:
      description: The file to load, shard 1 of a split model. For O(url) without its query.
      type: str
      sample: /opt/llamafleet/models/model-00001-of-00003.gguf
    architecture:
      description: Architecture as llama.cpp names it.
      type: str
      sample: llama
    name:
      description: Name of the model, or V(null).
      type: str
    n_layer:
      description: All repeating layers, layers for speculative decoding (MTP) included.
      type: int
      sample: 30
    n_embd:
      description: Width of the embedding.
      type: int
    n_vocab:
      description: Size of the vocabulary.
      type: int
    n_ctx_train:
      description: Context length that the model was trained for.
      type: int
    n_expert:
      description: Experts per layer, 0 for a dense model.
      type: int
    n_expert_used:
      description: Experts used per token, 0 for a dense model.
      type: int
    file_bytes:
      description: Bytes of all shards.
      type: int
    input_bytes:
      description: Tensors that stay on the primary.
      type: int
    output_bytes:
      description: Tensors of the output unit, a second copy of the token embedding included when RV(model.tied).
      type: int
    per_device_bytes:
      description: Tensors copied to every device that holds a repeating layer.
      type: int
    tied:
      description: Whether the output uses the token embedding.
      type: bool
    layers:
      description: One entry per repeating layer, in order.
      type: list
      elements: dict
      contains:
        weights:
          description: Tensors of the layer. 0 for an MTP layer, which is only loaded on request.
          type: int
        active:
          description: Bytes read per generated token. Of experts, those that are used.
          type: int
        caches:
          description: Caches of the layer.
          type: list
          elements: dict
          contains:
            k_width:
              description: Elements of a row of keys.
              type: int
            v_width:
              description: Elements of a row of values, 0 when only keys are cached.
              type: int
            window:
              description: Sliding window in cells, or V(null).
              type: int
            ratio:
              description: Cells of context per cached cell.
              type: int
            per_sequence:
              description: Whether each slot has its own stream even when the cache is unified.
              type: bool
        state_per_sequence:
          description: Recurrent state of one slot.
          type: int
        borrows_from:
          description: The layer whose cache is used instead of an own one, or V(null).
          type: int
        mtp:
          description: Whether the layer only serves speculative decoding.
          type: bool
        mtp_weights:
          description: What an MTP layer weighs when it is loaded on request.
          type: int
        scratch:
          description: Bytes per token of the micro batch at the peak of the layer, an upper bound, or V(null).
          type: int
        n_head:
          description: Query heads, or V(null).
          type: int
        spill_out:
          description: Bytes per token of an intermediate that is computed on the device of the next recurrent layer.
          type: int
        spill_in:
          description: Bytes per token of what that intermediate is computed from.
          type: int
    quantization:
      description: Kind of quantisation, or V(null).
      type: str
      sample: Q4_K_M
    shards:
      description: All files of the model, in order.
      type: list
      elements: str
    v_width_max:
      description: Widest row of values of all layers, or V(null).
      type: int
    stream:
      description: Elements per token that a layer hands to the next, or V(null).
      type: int
    side_input:
      description: Elements per token of per-layer embeddings that enter beside it, or V(null).
      type: int
    k_step:
      description: Greatest common divisor of the sizes of all K heads; blocks of a quantised cache must divide it.
      type: int
    v_step:
      description: The same of all V heads.
      type: int
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.common.parameters import env_fallback
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._gguf import read_model, read_model_url
from ansible_collections.llamafleet.rpc.plugins.module_utils._hub import HUB, Place, place_of
from ansible_collections.llamafleet.rpc.plugins.module_utils._model import model_from_header
from ansible_collections.llamafleet.rpc.plugins.module_utils._projector import projector_from_header


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path"},
            "url": {"type": "str"},
            "source": {"type": "str"},
            "endpoint": {"type": "str", "default": HUB, "fallback": (env_fallback, ["HF_ENDPOINT"])},
            "token": {"type": "str", "default": "", "no_log": True, "fallback": (env_fallback, ["HF_TOKEN"])},
            "projector": {"type": "bool", "default": False},
            "timeout": {"type": "float", "default": 30.0},
        },
        mutually_exclusive=[("path", "url", "source")],
        required_one_of=[("path", "url", "source")],
        supports_check_mode=True,
    )
    params = module.params
    timeout = params["timeout"]
    if not 0 < timeout <= 86400:
        module.fail_json(msg=f"timeout is {timeout:g} seconds, expected more than 0 and at most a day")
    try:
        if params["path"] is not None:
            place = Place(params["path"], None, False)
        else:
            place = place_of(
                params["url"] if params["source"] is None else params["source"],
                params["endpoint"] or HUB,
                os.path.exists,
            )
        if place.url is None:
            header = read_model(place.path or "")
        else:
            header = read_model_url(place.url, timeout, params["token"] if place.of_hub else "")
        if params["projector"]:
            found = {"projector": projector_from_header(header).to_dict()}
        else:
            found = {"model": model_from_header(header).to_dict()}
    except FleetError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, **found)


if __name__ == "__main__":
    main()
