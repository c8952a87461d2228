# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Small GGUF files that llama-server loads and nobody trained: a projector, and a model with MTP layers."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

_F16, _F32 = np.float16, np.float32


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def projector(path: Path, width: int = 192, blocks: int = 2, size: int = 256, out: int = 576) -> Path:
    """A SigLIP vision encoder with the projector of SmolVLM (idefics3), all zeros; ``out``: embedding of the model."""
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "idefics3")
    writer.add_bool("clip.use_gelu", True)
    hidden, patch, merge = 4 * width, 16, 4
    numbers = {
        "image_size": size,
        "patch_size": patch,
        "embedding_length": width,
        "feed_forward_length": hidden,
        "block_count": blocks,
        "projection_dim": out,
        "attention.head_count": 3,
        "projector.scale_factor": merge,
    }
    for key, number in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5, 0.5, 0.5])
    writer.add_tensor("v.patch_embd.weight", np.zeros((width, 3, patch, patch), _F32))
    writer.add_tensor("v.patch_embd.bias", np.zeros(width, _F32))
    writer.add_tensor("v.position_embd.weight", np.zeros(((size // patch) ** 2, width), _F32))
    for part in ("weight", "bias"):
        writer.add_tensor(f"v.post_ln.{part}", np.ones(width, _F32))
    for block in range(blocks):
        prefix = f"v.blk.{block}."
        for name, rows, columns in (
            *((f"attn_{part}", width, width) for part in ("q", "k", "v", "out")),
            ("ffn_up", hidden, width),
            ("ffn_down", width, hidden),
        ):
            writer.add_tensor(f"{prefix}{name}.weight", np.zeros((rows, columns), _F16))
            writer.add_tensor(f"{prefix}{name}.bias", np.zeros(rows, _F32))
        for norm in ("ln1", "ln2"):
            writer.add_tensor(f"{prefix}{norm}.weight", np.ones(width, _F32))
            writer.add_tensor(f"{prefix}{norm}.bias", np.zeros(width, _F32))
    writer.add_tensor("mm.model.fc.weight", np.zeros((out, width * merge * merge), _F16))
    _finish(writer)
    return path


def with_mtp(path: Path, tokens_of: Path, width: int = 256, blocks: int = 3) -> Path:
    """A glm4moe with one MTP layer and small noise for weights; the tokenizer is that of another model."""
    writer = gguf.GGUFWriter(str(path), "glm4moe")
    reader = gguf.GGUFReader(str(tokens_of))
    for key, field in reader.fields.items():
        if key.startswith("tokenizer."):
            element = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=element)
    vocabulary = len(reader.fields["tokenizer.ggml.tokens"].data)
    heads, key_heads, size, hidden, experts = 4, 2, 64, 2 * width, 4
    writer.add_block_count(blocks + 1)
    writer.add_context_length(8192)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(2)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(width)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_uint32("glm4moe.nextn_predict_layers", 1)
    noise = np.random.default_rng(1)

    def add(name: str, *shape: int, kind: type = _F16) -> None:
        writer.add_tensor(name, (noise.standard_normal(shape) * 0.02).astype(kind))

    add("token_embd.weight", vocabulary, width)
    add("output_norm.weight", width, kind=_F32)
    add("output.weight", vocabulary, width)
    for block in range(blocks + 1):
        prefix = f"blk.{block}."
        for name in ("attn_norm", "post_attention_norm"):
            add(f"{prefix}{name}.weight", width, kind=_F32)
        for name, count in (("q", heads), ("k", key_heads), ("v", key_heads)):
            add(f"{prefix}attn_{name}.weight", count * size, width)
            add(f"{prefix}attn_{name}.bias", count * size, kind=_F32)
        add(f"{prefix}attn_output.weight", width, heads * size)
        if block == 0:
            for name, rows, columns in (("gate", hidden, width), ("up", hidden, width), ("down", width, hidden)):
                add(f"{prefix}ffn_{name}.weight", rows, columns)
        else:
            add(f"{prefix}ffn_gate_inp.weight", experts, width, kind=_F32)
            add(f"{prefix}exp_probs_b.bias", experts, kind=_F32)
            for name in ("gate", "up", "down"):
                add(f"{prefix}ffn_{name}_exps.weight", experts, width, width)
                add(f"{prefix}ffn_{name}_shexp.weight", width, width)
        if block == blocks:
            add(f"{prefix}nextn.eh_proj.weight", width, 2 * width)
            for name in ("enorm", "hnorm", "shared_head_norm"):
                add(f"{prefix}nextn.{name}.weight", width, kind=_F32)
    _finish(writer)
    return path
