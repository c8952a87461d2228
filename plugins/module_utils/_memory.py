# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a device needs besides weights: caches and state to the byte, compute buffers as an upper bound.

Rules of llama.cpp b11434, checked against sizes measured on that build over CPU workers. MiB appear nowhere:
all sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._model import Cache, Layer, Model

# Block (elements, bytes) of the types that -ctk and -ctv accept (common/arg.cpp, kv_cache_types).
CACHE_TYPES: dict[str, tuple[int, int]] = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "iq4_nl": (32, 18),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
}
_FLASH = ("auto", "on", "off")
_PAD = 256  # cells; llama-context.cpp pads n_ctx, llama-kv-cache-iswa.cpp the window
_MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
_F32 = 4
_SMALL = 1 << 20  # positions, output ids, row indices and padding: measured 0.02 to 0.6 MiB
COPIES = 4  # GGML_SCHED_MAX_COPIES, the input copies of pipelining


class MemoryParamsError(FleetError):
    """A context parameter is impossible; the message names it, its value and what to set instead."""


@dataclass(frozen=True)
class ContextParams:
    """The parameters of llama-server that decide memory; checked on construction.

    ``n_ctx`` in tokens for all slots together, ``n_parallel`` slots, ``type_k``/``type_v`` cache types,
    ``flash_attn`` auto, on or off (auto counts as on, which b11434 chose in every measured case).
    """

    n_ctx: int
    n_parallel: int = 1
    type_k: str = "f16"
    type_v: str = "f16"
    n_batch: int = 2048
    n_ubatch: int = 512
    flash_attn: str = "auto"
    kv_unified: bool = True
    swa_full: bool = False

    def __post_init__(self) -> None:
        for name in ("n_ctx", "n_parallel", "n_batch", "n_ubatch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise MemoryParamsError(f"{name} is {value!r}, expected a whole number of at least 1")
        if self.n_parallel > _MAX_SEQUENCES:
            raise MemoryParamsError(f"n_parallel is {self.n_parallel}, llama.cpp allows at most {_MAX_SEQUENCES} slots")
        if not self.kv_unified and self.n_ctx < self.n_parallel:
            raise MemoryParamsError(
                f"n_ctx is {self.n_ctx} for {self.n_parallel} separate slots, which leaves none of them a cell;"
                " raise n_ctx, lower n_parallel or set kv_unified"
            )
        for name in ("type_k", "type_v"):
            value = getattr(self, name)
            if value not in CACHE_TYPES:
                raise MemoryParamsError(f"{name} is {value!r}, expected one of {', '.join(CACHE_TYPES)}")
        for name in ("kv_unified", "swa_full"):
            if not isinstance(getattr(self, name), bool):
                raise MemoryParamsError(f"{name} is {getattr(self, name)!r}, expected true or false")
        if self.flash_attn not in _FLASH:
            raise MemoryParamsError(f"flash_attn is {self.flash_attn!r}, expected one of {', '.join(_FLASH)}")
        if self.flash_attn == "off" and CACHE_TYPES[self.type_v][0] > 1:
            raise MemoryParamsError(
                f"type_v is {self.type_v!r} with flash_attn off: a quantised V cache requires flash attention;"
                " set flash_attn to auto, or type_v to f16"
            )

    @property
    def padded_ctx(self) -> int:
        """Cells of one stream: n_ctx, or what is left of it for one slot, padded to 256."""
        padded = _pad(self.n_ctx)
        return padded if self.kv_unified else _pad(padded // self.n_parallel)

    @property
    def streams(self) -> int:
        """Streams of a cache that follows kv_unified."""
        return 1 if self.kv_unified else self.n_parallel

    @property
    def micro_batch(self) -> int:
        """n_ubatch as llama-context.cpp cuts it: at most n_batch and n_ctx."""
        return min(self.n_ubatch, self.n_batch, self.n_ctx)

    @property
    def graph_tokens(self) -> int:
        """Tokens that compute buffers are reserved for: the micro batch in equal parts per slot (graph_reserve)."""
        return -(-self.micro_batch // self.n_parallel) * self.n_parallel


def _pad(cells: int) -> int:
    return -(-cells // _PAD) * _PAD


def check_cache_types(model: Model, params: ContextParams, fa_all_quants: bool = False) -> None:
    """Raise MemoryParamsError for cache types that llama.cpp would refuse or crash on.

    Models that cache K only (latent attention, deepseek4) refuse two different types. Elsewhere a quantised type
    beside a different one needs a GPU build with GGML_CUDA_FA_ALL_QUANTS (``fa_all_quants``). Flash attention takes
    whole blocks of a head only (llama_init_from_model).
    """
    _check_heads(model, params)
    if params.type_k == params.type_v:
        return
    if any(cache.v_width == 0 for layer in model.layers for cache in layer.caches):
        raise MemoryParamsError(
            f"type_k is {params.type_k!r} and type_v {params.type_v!r}, but {model.architecture} caches K only and"
            f" refuses different types; set type_v to {params.type_k!r} as well"
        )
    if _quantised(params) and not fa_all_quants:
        raise MemoryParamsError(
            f"type_k is {params.type_k!r} and type_v {params.type_v!r}: GPU workers crash on this combination unless"
            f" llama.cpp was built with GGML_CUDA_FA_ALL_QUANTS; set type_v to {params.type_k!r} as well"
        )


def _check_heads(model: Model, params: ContextParams) -> None:
    """Raise MemoryParamsError for a type with blocks that do not divide the heads, or that needs what grok lacks."""
    flash = flashes(model, params)
    if not flash and CACHE_TYPES[params.type_v][0] > 1:
        raise MemoryParamsError(
            f"type_v is {params.type_v!r}: a quantised V cache requires flash attention, which llama.cpp switches off"
            f" for {model.architecture}; set type_v to 'f16'"
        )
    for name, step in (("type_k", model.k_step), ("type_v", model.v_step)):
        block = CACHE_TYPES[getattr(params, name)][0]
        if flash and step is not None and step % block:
            raise MemoryParamsError(
                f"{name} is {getattr(params, name)!r}, whose blocks of {block} do not divide the heads of this model"
                f" ({step} elements, or a multiple): llama.cpp refuses that with flash attention; set {name} to 'f16'"
            )


def row_bytes(type_name: str, width: int) -> int:
    """Bytes of one cached row of ``width`` elements. Raises MemoryParamsError unless whole blocks fit."""
    if type_name not in CACHE_TYPES:
        raise MemoryParamsError(f"cache type {type_name!r} is unknown, expected one of {', '.join(CACHE_TYPES)}")
    block, size = CACHE_TYPES[type_name]
    if width % block:
        raise MemoryParamsError(
            f"a row of {width} elements is no multiple of the {block} of {type_name}; use f16 for this model"
        )
    return width // block * size


def cache_cells(cache: Cache, params: ContextParams) -> int:
    """Cells of one stream of ``cache`` (llama-kv-cache-iswa.cpp, llama-kv-cache-dsv4.cpp)."""
    full = params.padded_ctx
    if cache.per_sequence and params.kv_unified:
        full = _pad(params.n_ctx)
    if cache.ratio > 1:
        return _pad(max(1, -(-full // cache.ratio)))
    if cache.window is None or params.swa_full:
        return full
    together = params.n_parallel if params.kv_unified and not cache.per_sequence else 1
    return _pad(min(full, cache.window * together + params.micro_batch))


def layer_context_bytes(model: Model, layer_index: int, params: ContextParams) -> int:
    """Bytes of caches and recurrent state of one layer, exact for b11434.

    Raises MemoryParamsError when ``layer_index`` is out of range or a row does not fit the cache type.
    """
    if not 0 <= layer_index < len(model.layers):
        raise MemoryParamsError(f"layer {layer_index} does not exist, the model has {len(model.layers)} layers")
    layer = model.layers[layer_index]
    total = layer.state_per_sequence * params.n_parallel
    for cache in layer.caches:
        v_width = cache.v_width
        if v_width and not flashes(model, params):  # the transposed V cache has one width for all layers
            v_width = max(v_width, _widest_v(model))
        row = row_bytes(params.type_k, cache.k_width) + row_bytes(params.type_v, v_width)
        streams = params.n_parallel if cache.per_sequence else params.streams
        total += cache_cells(cache, params) * streams * row
    return total


def _widest_v(model: Model) -> int:
    if model.v_width_max is not None:
        return model.v_width_max
    return max((cache.v_width for layer in model.layers for cache in layer.caches), default=0)


def output_buffer_bytes(model: Model, params: ContextParams) -> int:
    """Logits that the primary keeps for its slots, in bytes (llama-context.cpp, output_reserve)."""
    return model.n_vocab * params.n_parallel * _F32


def head_compute_bytes(model: Model, params: ContextParams) -> int:
    """What the primary's compute buffer grows by when its CPU holds the output matrix, in bytes: an upper bound.

    The logits of its slots and the hidden states they come from; measured on b11434, they often fit below its peak.
    """
    return (model.n_vocab + model.n_embd) * params.n_parallel * _F32


def compute_bytes(
    model: Model,
    params: ContextParams,
    *,
    n_devices_listed: int,
    is_first: bool,
    is_last_with_output: bool,
    pipelining: bool,
    layers: Iterable[int] | None = None,
) -> int:
    """Compute buffer of one device under llama-server, in bytes: an upper bound.

    ``layers`` are the repeating layers it holds (None: any of the model's, none borrowing a cache from elsewhere).
    ``pipelining`` only counts with more than one listed device. With it every input of a device exists four times: 5
    activations (n_ubatch x stream x 4 B) beside the layer's own peak, 14 on the first device, measured on b11434 to
    within 1 MiB on plain models. Masks are the inputs that grow with the context. The same from what one device of
    gemma3n or gemma4 borrows of another, and from what recurrent layers spill over to the next device.
    """
    held = list(range(len(model.layers)) if layers is None else layers)
    pipelined = pipelining and n_devices_listed > 1
    activation = _activation(model, params)
    resident = _resident(model, is_first) * activation if pipelined else 3 * activation
    if model.side_input:
        side = params.graph_tokens * model.side_input * _F32
        if is_first or not pipelined:
            resident += (3 if is_first else 2) * side
        else:  # each layer gets its part of it, in as many copies as any input
            resident += COPIES * side * len(held) // len(model.layers)
        if pipelined and is_first and activation == params.graph_tokens * model.n_embd * _F32:
            resident += COPIES * activation
    if pipelined and is_first:  # one of them is the output of attention, which may be wider
        wide = max((_attended(model, model.layers[index]) for index in held), default=0)
        resident += max(0, wide - model.n_embd * _F32) * params.graph_tokens
    if pipelined:
        spilled = _crossing(model, held, layers is None, is_first, is_last_with_output, _quantised(params))
        resident += COPIES * spilled * params.graph_tokens
    resident += (COPIES if pipelined else 1) * _borrowed(model, held, params)
    peak = max((_peak(model, index, params) for index in held if not model.layers[index].mtp), default=0)
    if is_last_with_output:
        logits = 2 * model.n_vocab * params.n_parallel * _F32
        peak = max(peak, 4 * activation + logits)
        if pipelined and _altup(model):  # the streams become one again
            resident += 5 * activation
    inputs = _masks(model, held, params) + _decay(model, held, params)
    return resident + peak + inputs * (COPIES if pipelined else 1) + _small(params)


def host_compute_bytes(model: Model, params: ContextParams, pipelining: bool, layers: Iterable[int] = ()) -> int:
    """Compute buffer of the primary itself, in bytes: an upper bound.

    It keeps the inputs of all devices: 10 activations and the masks four times with pipelining, 4 and once without
    (measured on b11434). ``layers`` are those that its own CPU holds.
    """
    activation = params.graph_tokens * model.n_embd * _F32
    held = list(layers)
    everything = range(len(model.layers))
    inputs = _masks(model, everything, params) + _decay(model, everything, params)
    side = params.graph_tokens * (model.side_input or 0) * _F32
    learned = activation if model.architecture in ("gpt2", "starcoder") else 0  # positions looked up as tokens are
    if pipelining:
        inputs = 10 * activation + COPIES * inputs + 2 * side
    else:
        inputs += 4 * activation + side + max(side - 2 * activation, 0)
    peak = max((_peak(model, index, params) for index in held), default=0)
    return inputs + learned + peak + _small(params)


def _resident(model: Model, is_first: bool) -> int:
    """Activations that stay with pipelining: input copies, and outputs kept for the next device."""
    several = (model.stream or model.n_embd) // model.n_embd
    if several > 1:  # one embedding comes in, all residual streams go on
        if any(cache.per_sequence for layer in model.layers for cache in layer.caches):
            return 2 if is_first else 8  # deepseek4
        return 9 if is_first else 5  # gemma3n
    return 14 if is_first else 5


def _crossing(
    model: Model, held: list[int], anywhere: bool, is_first: bool, is_last: bool, quantised_cache: bool
) -> int:
    """Bytes per token that cross from a layer to the recurrent one of another device, in and out (see _model.Layer).

    What attention read from a quantised cache is rotated back by an operation that has no weight either, so it lands
    beside the recurrent layer that follows: measured on b11434 as one activation on both sides.
    """
    layers = model.layers
    if anywhere:
        rotated = max((_attended(model, layer) for layer in layers), default=0) if quantised_cache else 0
        rotated = rotated if any(layer.state_per_sequence for layer in layers) else 0
        inward = max((layer.spill_in for layer in layers), default=0) + rotated
        outward = max((layer.spill_out for layer in layers), default=0) + rotated
        return (0 if is_first else inward) + (0 if is_last else outward)
    inward = outward = 0
    stateful = [index for index, layer in enumerate(layers) if layer.caches or layer.state_per_sequence]
    for before, after in zip(stateful, stateful[1:]):
        if not layers[after].state_per_sequence or (before in held) == (after in held):
            continue
        rotated = _attended(model, layers[before]) if quantised_cache else 0
        if before in held:
            outward = max(outward, layers[before].spill_out + rotated)
        else:
            inward = max(inward, layers[before].spill_in + rotated)
    return inward + outward


def _attended(model: Model, layer: Layer) -> int:
    """Bytes per token of what a layer with attention alone reads from its cache."""
    if layer.state_per_sequence or not any(cache.v_width for cache in layer.caches):
        return 0
    return max(model.n_embd, (layer.n_head or 0) * (model.k_head or 0)) * _F32


def _borrowed(model: Model, held: list[int], params: ContextParams) -> int:
    """Bytes of caches that layers here borrow from layers elsewhere: each borrower gets its own copy at every step."""
    lenders = [model.layers[index].borrows_from for index in held]
    return sum(
        layer_context_bytes(model, lender, params) for lender in lenders if lender is not None and lender not in held
    )


def _altup(model: Model) -> bool:
    """gemma3n: several residual streams that are merged before the output; deepseek4 has its own way."""
    return (model.stream or model.n_embd) > model.n_embd and bool(model.side_input)


def _decay(model: Model, held: Iterable[int], params: ContextParams) -> int:
    """Bytes of one copy of the decay between all tokens of a micro batch (minimax-01.cpp, inp_diag_decay)."""
    if model.architecture != "minimax-01":
        return 0
    heads = (model.layers[index].n_head or 0 for index in held if model.layers[index].state_per_sequence)
    return max(heads, default=0) * params.graph_tokens**2 * _F32


def _activation(model: Model, params: ContextParams) -> int:
    """Bytes of what one layer hands to the next for one micro batch."""
    return params.graph_tokens * (model.stream or model.n_embd) * _F32


def _peak(model: Model, index: int, params: ContextParams) -> int:
    """Bytes alive at the peak of a layer, without inputs."""
    layer = model.layers[index]
    scratch = layer.scratch
    if scratch is None:  # a model without the extras: gate, up and product of a usual width, and its experts
        scratch = (14 + 4 * model.n_expert_used) * model.n_embd * _F32
    total = scratch * params.graph_tokens + 2 * layer.state_per_sequence * params.n_parallel
    total += _decay(model, [index], params)
    if not layer.caches and layer.borrows_from is None:
        return total
    heads = layer.n_head or max(1, model.n_embd // 64)
    lender = layer if layer.borrows_from is None else model.layers[layer.borrows_from]
    for cache, indexer in zip(lender.caches, lender.caches[1:]):
        if (cache.window, cache.ratio) == (indexer.window, indexer.ratio):  # scores of the indexer and their order
            total += 5 * cache_cells(indexer, params) * params.graph_tokens
    if any(cache.per_sequence for cache in lender.caches):  # deepseek4 reads window and compressed cells as one
        keys = [cache for cache in lender.caches if cache.k_width == lender.caches[0].k_width]
        total += sum(cache_cells(cache, params) * params.n_parallel * cache.k_width * 2 for cache in keys)
    if flashes(model, params):
        total += sum(_halved(cache, params) for cache in lender.caches)
    else:  # the scores of all heads are written out
        keys = [cache for cache in lender.caches if cache.k_width == lender.caches[0].k_width]
        cells = sum(cache_cells(cache, params) for cache in keys)
        total += heads * cells * params.graph_tokens * _F32
    if _quantised(params):  # queries, keys and values are rotated before a quantised cache (llama-kv-cache.cpp)
        total += 2 * params.graph_tokens * model.n_embd * _F32
    return total


def _halved(cache: Cache, params: ContextParams) -> int:
    """Bytes of the F16 copies that flash attention makes of an F32 cache (llama-graph.cpp, build_attn_mha)."""
    streams = params.n_parallel if cache.per_sequence else params.streams
    width = cache.k_width if params.type_k == "f32" else 0
    width += (cache.v_width or cache.k_width) if params.type_v == "f32" else 0  # latent: V is a view of K
    return cache_cells(cache, params) * streams * width * 2


def flashes(model: Model, params: ContextParams) -> bool:
    """Whether attention is fused; for grok llama.cpp forces it off, whatever is asked for (llama_init_from_model)."""
    return params.flash_attn != "off" and model.architecture != "grok"


def quantised(params: ContextParams) -> tuple[bool, bool]:
    """Whether the K cache and the V cache are of a type with blocks."""
    return CACHE_TYPES[params.type_k][0] > 1, CACHE_TYPES[params.type_v][0] > 1


def _quantised(params: ContextParams) -> bool:
    return any(quantised(params))


def _small(params: ContextParams) -> int:
    """Bytes of the small inputs; a quantised cache adds the rotation matrices, measured up to 5 MiB."""
    return 6 * _SMALL if _quantised(params) else _SMALL


def _masks(model: Model, held: Iterable[int], params: ContextParams) -> int:
    """Bytes of one copy of the attention masks of these layers: one per kind of cache."""
    flash = flashes(model, params)
    width = 2 if flash else 4
    kinds: set[tuple[int, int | None, int, int]] = set()
    for index in held:
        layer = model.layers[index]
        lender = layer if layer.borrows_from is None else model.layers[layer.borrows_from]
        kinds.update(
            (number, cache.window, cache.ratio, cache_cells(cache, params))
            for number, cache in enumerate(lender.caches)
        )
    total = sum(kind[-1] for kind in kinds) * params.graph_tokens * width
    if not flash:  # the transposed V cache is written by index, 8 bytes per element
        total += len({kind[1] for kind in kinds}) * params.graph_tokens * _widest_v(model) * 8
    return total
