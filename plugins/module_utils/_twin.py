# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A stand-in for a model to measure devices with: a few layers as wide and as heavy as its own, of zeros, in a hole.

A GGUF file is a header and weights. Here the header is written and the weights are a hole of the right size, so that a
layer of 500 MiB takes no disk and no time to make. Zeros multiply as slowly as anything else. The stand-in is a plain
llama architecture: what a token costs on a device is, to a good approximation, the bytes that it reads there.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._gguf import TENSOR_TYPES, Header
from ansible_collections.llamafleet.rpc.plugins.module_utils._model import Model

_VOCABULARY = 512  # small: the output matrix is not what is measured
_CONTEXT = 4096
_ALIGNMENT = 32
_F32 = 0
_UINT32, _FLOAT32, _TEXT = 4, 6, 8
_FALLBACK = 8  # Q8_0: rows of any multiple of 32
#: Of these the kernels of every backend are fast; others (F32 norms, I32 tables) are no matrices.
_SMALLEST_HEAD = 32


class TwinError(FleetError):
    """A model that no stand-in can be made of; the message says why."""


@dataclass(frozen=True)
class Shape:
    """What the layers of a stand-in look like: widths in elements, ``kind`` is the number of a ggml type."""

    width: int
    heads: int
    kv_heads: int
    feed_forward: int
    kind: int

    @property
    def layer_bytes(self) -> int:
        """Bytes of the matrices of a layer: what a token reads of it."""
        return sum(_bytes(dims, kind) for name, dims, kind in self.layer() if not name.endswith("norm"))

    def layer(self) -> list[tuple[str, tuple[int, ...], int]]:
        """(name within a layer, dims in ggml's order, type) of its tensors."""
        head = self.width // self.heads
        return [
            ("attn_norm", (self.width,), _F32),
            ("attn_q", (self.width, self.width), self.kind),
            ("attn_k", (self.width, head * self.kv_heads), self.kind),
            ("attn_v", (self.width, head * self.kv_heads), self.kind),
            ("attn_output", (self.width, self.width), self.kind),
            ("ffn_norm", (self.width,), _F32),
            ("ffn_gate", (self.width, self.feed_forward), self.kind),
            ("ffn_up", (self.width, self.feed_forward), self.kind),
            ("ffn_down", (self.feed_forward, self.width), self.kind),
        ]


def shape_of(model: Model, header: Header) -> Shape:
    """The shape that is nearest to the average layer of a model: its width, its type, the bytes that a token reads.

    The type is the one that most bytes of its layers have. A width that no head of 32 to 256 elements divides, or that
    is no multiple of 32, is an error: none of the models that llama.cpp knows has one.
    """
    width = model.n_embd
    head = next((size for size in (128, 64, 96, 80, 256, 32) if width % size == 0), None)
    if head is None:
        raise TwinError(f"{model.architecture}: n_embd is {width}, which no attention head divides; nothing to measure")
    by_type: dict[str, int] = {}
    for tensor in header.tensors:
        if tensor.name.startswith("blk.") and len(tensor.dims) > 1:
            by_type[tensor.type] = by_type.get(tensor.type, 0) + tensor.nbytes
    names = {kind.name: number for number, kind in TENSOR_TYPES.items()}
    kind = names[max(by_type, key=lambda name: (by_type[name], name))] if by_type else _FALLBACK
    if width % TENSOR_TYPES[kind].block:
        kind = _FALLBACK
    widths = [layer.caches[0].k_width for layer in model.layers if layer.caches]
    kv_heads = min(width // head, max(1, round(sum(widths) / len(widths) / head))) if widths else 1
    while (width // head) % kv_heads:
        kv_heads -= 1
    read = sum(layer.active for layer in model.layers) / len(model.layers)
    step = TENSOR_TYPES[kind].block if TENSOR_TYPES[kind].block > 32 else 32
    thin = Shape(width, width // head, kv_heads, step, kind)
    per_step = Shape(width, width // head, kv_heads, 2 * step, kind).layer_bytes - thin.layer_bytes
    more = max(0, round((read - thin.layer_bytes) / per_step))
    return Shape(width, width // head, kv_heads, step * (1 + more), kind)


def write_twin(path: str, shape: Shape, layers: int) -> int:
    """Write a stand-in of so many layers; returns the size of the file in bytes, nearly all of it a hole."""
    pairs: dict[str, object] = {
        "general.architecture": "llama",
        "llama.block_count": layers,
        "llama.context_length": _CONTEXT,
        "llama.embedding_length": shape.width,
        "llama.feed_forward_length": shape.feed_forward,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": shape.width // shape.heads,
        "llama.vocab_size": _VOCABULARY,
        "tokenizer.ggml.model": "none",
    }
    tensors = [
        ("token_embd.weight", (shape.width, _VOCABULARY), shape.kind),
        ("output_norm.weight", (shape.width,), _F32),
    ]
    tensors += [
        (f"blk.{number}.{name}.weight", dims, kind) for number in range(layers) for name, dims, kind in shape.layer()
    ]
    text = _header(pairs, tensors)
    data = sum(_padded(_bytes(dims, kind)) for _name, dims, kind in tensors)
    with open(path, "wb") as stream:
        stream.write(text)
        stream.truncate(len(text) + data)
    return len(text) + data


def _header(pairs: Mapping[str, object], tensors: Sequence[tuple[str, tuple[int, ...], int]]) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(pairs))]
    for key, value in pairs.items():
        parts.append(_string(key))
        if isinstance(value, str):
            parts.append(struct.pack("<I", _TEXT) + _string(value))
        elif isinstance(value, float):
            parts.append(struct.pack("<If", _FLOAT32, value))
        else:
            parts.append(struct.pack("<II", _UINT32, value))
    offset = 0
    for name, dims, kind in tensors:
        parts.append(_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset))
        offset += _padded(_bytes(dims, kind))
    text = b"".join(parts)
    return text + bytes(_padded(len(text)) - len(text))


def _string(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _bytes(dims: Sequence[int], kind: int) -> int:
    elements = 1
    for dim in dims:
        elements *= dim
    return elements // TENSOR_TYPES[kind].block * TENSOR_TYPES[kind].size
