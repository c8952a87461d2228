# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From the header of a model to what a planner must know: bytes per layer, caches, state, active bytes.

Every rule is that of llama.cpp b11434 (src/llama-model.cpp, src/llama-hparams.cpp, src/models/*.cpp) and is
checked against sizes measured on that build. An architecture that is not in the tables below is refused by
name: a wrong number is worse than none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, NamedTuple

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._gguf import Header, Tensor

_ALIGN = 32  # alignment of a tensor in a CPU buffer, measured on b11434 over CPU workers
_F32 = 4
_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
_MAX_VALUE = 1 << 40  # larger metadata values are nonsense and would only produce nonsense


class ModelError(FleetError):
    """The header cannot be accounted for; the message names file, architecture and what is missing."""


@dataclass(frozen=True)
class Cache:
    """One cache of a layer: ``k_width`` and ``v_width`` elements per cell (0: no such tensor).

    ``window`` is the sliding window in cells or None; ``ratio`` the cells of context per cached cell;
    ``per_sequence``: one stream per slot even when the cache is unified.
    """

    k_width: int
    v_width: int
    window: int | None = None
    ratio: int = 1
    per_sequence: bool = False


@dataclass(frozen=True)
class Layer:
    """One repeating layer. Bytes are what the layer costs its device by default.

    ``weights``: padded tensor bytes (0 for an MTP layer, which is loaded only on request: ``mtp_weights``);
    ``active``: bytes read per generated token; ``state_per_sequence``: recurrent state of one slot;
    ``borrows_from``: the layer whose cache is used instead of an own one. Extras for the compute rule, None when
    unknown: ``scratch`` = bytes per token of the micro batch at the layer's peak, ``n_head`` = query heads;
    ``spill_out`` and ``spill_in`` = bytes per token of an intermediate that the scheduler computes on the device of the
    next recurrent layer, and of what it is computed from, when that is another device.
    """

    weights: int
    active: int
    caches: tuple[Cache, ...] = ()
    state_per_sequence: int = 0
    borrows_from: int | None = None
    mtp: bool = False
    mtp_weights: int = 0
    scratch: int | None = None
    n_head: int | None = None
    spill_out: int = 0
    spill_in: int = 0


@dataclass(frozen=True)
class Model:
    """A model as the planner sees it (module gguf_info). All sizes are bytes, padded as they are loaded.

    ``n_layer`` counts all repeating layers, MTP included; ``input_bytes`` stay on the primary; ``output_bytes``
    belong to the output unit (a second copy of the token embedding when ``tied``); ``per_device_bytes`` are copied
    to every device that holds a repeating layer. Extras, None when unknown: ``v_width_max`` = the widest V row of all
    layers, ``stream`` = elements per token that a layer hands to the next, ``side_input`` = elements per token of the
    per-layer embeddings that enter beside it, ``head_bytes`` = the output matrix, a part of ``output_bytes``, if only
    norms stand beside it, ``k_head`` = elements of one K head, 0 if layers differ, ``k_step`` and ``v_step`` = the
    greatest common divisor of the sizes of all K heads and of all V heads.
    """

    path: str
    architecture: str
    name: str | None
    n_layer: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    n_expert: int
    n_expert_used: int
    file_bytes: int
    input_bytes: int
    output_bytes: int
    per_device_bytes: int
    tied: bool
    layers: tuple[Layer, ...]
    quantization: str | None
    shards: tuple[str, ...]
    v_width_max: int | None = None
    stream: int | None = None
    side_input: int | None = None
    head_bytes: int | None = None
    k_head: int | None = None
    k_step: int | None = None
    v_step: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: every field, tuples as lists."""
        plain = _plain(self)
        if not isinstance(plain, dict):
            raise TypeError("a dataclass always gives a mapping")
        return plain

    @staticmethod
    def from_dict(data: object) -> Model:
        """The model that ``data`` (as of ``to_dict``) describes; extras may be absent, unknown keys are ignored."""
        values = _mapping(data, "model")
        layers = _list(values.get("layers"), "model.layers")
        found = _take(values, Model, "model", ("layers", "shards"))
        model = Model(
            layers=tuple(_layer(item, f"model.layers[{number}]") for number, item in enumerate(layers)),
            shards=tuple(_string(item, "model.shards") for item in _list(values.get("shards"), "model.shards")),
            **found,
        )
        if model.n_layer != len(model.layers):
            raise ModelError(
                f"model.n_layer is {model.n_layer} but model.layers has {len(model.layers)} entries;"
                " pass the value that gguf_info returned"
            )
        return model


# -- plain data in and out ---------------------------------------------------------------------------------------


def _plain(value: object) -> object:
    if isinstance(value, (Model, Layer, Cache)):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _mapping(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ModelError(f"{where} is {_short(value)}, expected a mapping; pass the value that gguf_info returned")
    return value


def _list(value: object, where: str) -> list[object]:
    if not isinstance(value, (list, tuple)):
        raise ModelError(f"{where} is {_short(value)}, expected a list; pass the value that gguf_info returned")
    return list(value)


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ModelError(f"{where} holds {_short(value)}, expected text; pass the value that gguf_info returned")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _take(values: Mapping[str, object], kind: type, where: str, skip: tuple[str, ...]) -> dict[str, Any]:
    """The scalar fields of dataclass ``kind`` out of ``values``, checked against their annotations."""
    found: dict[str, Any] = {}
    for field in fields(kind):
        if field.name in skip:
            continue
        if field.name not in values:
            if field.default is MISSING:
                raise ModelError(f"{where}.{field.name} is missing; pass the value that gguf_info returned")
            continue
        value = values[field.name]
        annotation = str(field.type)
        if value is None and "None" in annotation:
            found[field.name] = None
        elif annotation.startswith("bool"):
            if not isinstance(value, bool):
                raise ModelError(f"{where}.{field.name} is {_short(value)}, expected true or false")
            found[field.name] = value
        elif annotation.startswith("int"):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ModelError(f"{where}.{field.name} is {_short(value)}, expected a whole number of at least 0")
            found[field.name] = int(value)
        else:
            found[field.name] = _string(value, f"{where}.{field.name}")
    return found


def _layer(data: object, where: str) -> Layer:
    values = _mapping(data, where)
    caches = _list(values.get("caches", []), f"{where}.caches")
    return Layer(
        caches=tuple(
            Cache(**_take(_mapping(item, f"{where}.caches[{number}]"), Cache, f"{where}.caches[{number}]", ()))
            for number, item in enumerate(caches)
        ),
        **_take(values, Layer, where, ("caches",)),
    )


# -- rules per architecture --------------------------------------------------------------------------------------


class _Swa(NamedTuple):
    """Sliding window of an architecture: where the size and the pattern come from (src/models/*.cpp)."""

    pattern: int | None = None  # every n-th layer is dense unless the file says otherwise; None: file must say
    dense_first: bool = False
    default: int | None = None  # window when the file has none; None: the key is required unless optional
    forced: int | None = None  # window that replaces the file's
    optional: bool = False  # no key, no sliding window


class _Arch(NamedTuple):
    """What distinguishes an architecture. Attention widths always follow the metadata."""

    swa: _Swa | None = None
    mtp: bool = False  # NextN layers are skipped unless asked for
    leaks: tuple[str, ...] = ()  # ... but for tensors whose names contain one of these
    mla: str = "no"  # "no", "keys" (if the *_mla keys are there) or "yes": K only
    recurrent: str = "no"  # "no", "all", "kv0", "both", "nemotron", "interval4", "interval8", "shortconv"
    indexer: str = "no"  # "no", "all", "glm": an indexer cache beside the MLA cache
    shared_kv: str = "no"  # "no", "gemma3n", "gemma4"
    norm_first: bool = False  # token_embd_norm belongs to layer 0, not to the output


_PLAIN = _Arch()
_LEAK_NEXTN = (".nextn.embed_tokens.", ".nextn.shared_head_")
_LEAK_FFN = (".ffn_gate.", ".ffn_down.", ".ffn_up.", ".ffn_gate_inp.", "_exps.", ".exp_probs_b", "_shexp.")

_PLAIN_NAMES = """
    llama deci falcon grok gpt2 gptneox mpt baichuan starcoder refact stablelm qwen qwen2 qwen2moe qwen2vl qwen3
    qwen3moe qwen3vl qwen3vlmoe phi2 phi3 phimoe plamo codeshell orion internlm2 minicpm minicpm3 gemma
    starcoder2 xverse command-r dbrx olmo olmoe openelm arctic deepseek deepseek2-ocr chatglm bitnet jais jais2
    nemotron exaone granite granitemoe chameleon plm bailingmoe dots1 arcee ernie4_5 ernie4_5-moe hunyuan-moe
    hunyuan-dense hunyuan_vl smollm3 seed_oss grovemoe apertus minimax-m2 cogvlm pangu-embedded mistral3
    paddleocr maincoder
"""

_ARCHES: dict[str, _Arch] = {
    **dict.fromkeys(_PLAIN_NAMES.split(), _PLAIN),
    "bloom": _Arch(norm_first=True),
    "bailingmoe2": _Arch(mtp=True),
    "glm4": _Arch(mtp=True),
    "glm4moe": _Arch(mtp=True),
    "hy_v3": _Arch(mtp=True, leaks=_LEAK_NEXTN + _LEAK_FFN),
    # sliding window
    "afmoe": _Arch(swa=_Swa(4, optional=True)),
    "cohere2": _Arch(swa=_Swa(4)),
    "cohere2moe": _Arch(swa=_Swa(4, dense_first=True), mtp=True, leaks=_LEAK_NEXTN),
    "exaone4": _Arch(swa=_Swa(4, default=4096), mtp=True),
    "exaone-moe": _Arch(swa=_Swa(4), mtp=True),
    "gemma2": _Arch(swa=_Swa(2, default=4096)),
    "gemma3": _Arch(swa=_Swa(6, optional=True)),
    "gemma3n": _Arch(swa=_Swa(5), shared_kv="gemma3n"),
    "gemma4": _Arch(swa=_Swa(), shared_kv="gemma4"),
    "granite_swa": _Arch(swa=_Swa()),
    "laguna": _Arch(swa=_Swa(4, dense_first=True, optional=True)),
    "llama4": _Arch(swa=_Swa(4, forced=8192)),
    "maple": _Arch(swa=_Swa()),
    "mellum": _Arch(swa=_Swa(4, optional=True)),
    "mimo2": _Arch(swa=_Swa(), mtp=True),
    "muse-glimmer": _Arch(swa=_Swa(4)),
    "olmo2": _Arch(swa=_Swa(4, optional=True)),
    "gpt-oss": _Arch(swa=_Swa(2)),
    "plamo3": _Arch(swa=_Swa(8, optional=True)),
    "smallthinker": _Arch(swa=_Swa(4, dense_first=True, forced=4096, optional=True)),
    "spark2_5": _Arch(swa=_Swa()),
    "step35": _Arch(
        swa=_Swa(), mtp=True, leaks=_LEAK_NEXTN + _LEAK_FFN + (".attn_q_norm.", ".attn_k_norm.", ".attn_gate.")
    ),
    # latent attention
    "deepseek2": _Arch(mtp=True, mla="keys"),
    "mistral4": _Arch(mtp=True, mla="keys"),
    "deepseek32": _Arch(mtp=True, mla="keys", indexer="all", leaks=(".exp_probs_b",)),
    "glm-dsa": _Arch(mtp=True, mla="keys", indexer="glm", leaks=(".exp_probs_b",)),
    "deepseek4": _Arch(swa=_Swa(), mtp=True),
    # recurrent and hybrid
    "mamba": _Arch(recurrent="all"),
    "mamba2": _Arch(recurrent="all"),
    "rwkv6": _Arch(recurrent="all", norm_first=True),
    "rwkv6qwen2": _Arch(recurrent="all"),
    "rwkv7": _Arch(recurrent="all", norm_first=True),
    "arwkv7": _Arch(recurrent="all"),
    "jamba": _Arch(recurrent="kv0"),
    "plamo2": _Arch(recurrent="kv0"),
    "granitehybrid": _Arch(recurrent="kv0"),
    "falcon-h1": _Arch(recurrent="both"),
    "nemotron_h": _Arch(recurrent="nemotron", mtp=True),
    "nemotron_h_moe": _Arch(recurrent="nemotron", mtp=True),
    "lfm2": _Arch(recurrent="kv0"),
    "lfm2moe": _Arch(recurrent="kv0"),
    "qwen3next": _Arch(recurrent="interval4", mtp=True),
    "qwen35": _Arch(recurrent="interval4", mtp=True),
    "qwen35moe": _Arch(recurrent="interval4", mtp=True),
    "minimax-01": _Arch(recurrent="interval8"),
    "kimi-linear": _Arch(recurrent="kv0", mla="yes"),
    "bailingmoe3": _Arch(recurrent="kv0", mla="yes", mtp=True),
}

_ENCODERS = """
    bert modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert gemma-embedding llama-embed
    t5 t5encoder wavtokenizer-dec
"""

# Known to b11434, not yet accounted: the feature that a rule is missing for.
_NOT_ACCOUNTED: dict[str, str] = {
    **dict.fromkeys(_ENCODERS.split(), "an encoder, which keeps no cache"),
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), "a diffusion model, which keeps no cache"),
    **dict.fromkeys(
        ("eagle3", "dflash", "gemma4-assistant"), "a draft model, which borrows from the model it drafts for"
    ),
    "clip": "a projector, not a text model",
    "qwen3tts": "speech synthesis",
    "pockettts": "speech synthesis",
    "clef": "a decision head",
    "talkie": "its own layout",
    "minimax-m3": "sparse attention with a block indexer",
    "hy_v4": "an indexer shared by layers",
    "dots3note": "latent attention with a sliding window",
    "glm5-next": "KDA with an indexer",
    "kimi-k3": "KDA with cross-layer residuals",
    "qwen4exp": "sparse attention with n-gram embeddings",
    "graniteswitch": "embedded adapters with a router layer",
    "nanbeige": "layers that are run in loops",
    "hrm_text": "layers that are run in loops",
}

# llama_ftype of b11434 (include/llama.h), by number; - was removed.
_FILE_TYPE_NAMES = """
    F32 F16 Q4_0 Q4_1 - - - Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K IQ2_XXS
    IQ2_XS Q2_K_S IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M BF16 - - - TQ1_0 TQ2_0
    MXFP4_MOE NVFP4 Q1_0 Q2_0
"""
_FILE_TYPES = _FILE_TYPE_NAMES.split()

_BLOCK = re.compile(r"^blk\.([0-9]{1,4})\.")
_INPUT = ("token_embd.", "position_embd.", "token_types.", "per_layer_token_embd.")
_FIRST = ("per_layer_model_proj.", "per_layer_proj_norm.")
_PER_DEVICE = ("rope_freqs.", "rope_factors_long.", "rope_factors_short.")


class _Keys:
    """Metadata of one architecture, read as llama.cpp reads it: a scalar stands for every layer."""

    def __init__(self, header: Header, arch: str) -> None:
        self.header = header
        self.arch = arch
        self._values = header.metadata

    def fail(self, text: str) -> ModelError:
        """An error about this file."""
        return ModelError(f"{self.header.path} ({self.arch}): {text}")

    def has(self, key: str) -> bool:
        """Whether the file carries ``<arch>.<key>`` in readable form."""
        return f"{self.arch}.{key}" in self._values

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number; ``default`` None makes the key required."""
        value = self._values.get(f"{self.arch}.{key}", default)
        if value is None:
            raise self.fail(f"{self.arch}.{key} is missing, llama.cpp would not load the file; fetch another one")
        return self._checked(key, value)

    def per_layer(self, key: str, count: int, default: int | None = None) -> list[int]:
        """One number per layer, from a scalar or an array of at least ``count`` values."""
        value = self._values.get(f"{self.arch}.{key}", default)
        if isinstance(value, tuple):
            if len(value) < count:
                raise self.fail(f"{self.arch}.{key} has {len(value)} values for {count} layers; the header is corrupt")
            return [self._checked(key, item) for item in value[:count]]
        return [self.number(key, default)] * count

    def array(self, key: str) -> tuple[object, ...] | None:
        """The array, or None when the key is absent or a scalar."""
        value = self._values.get(f"{self.arch}.{key}")
        return value if isinstance(value, tuple) else None

    def _checked(self, key: str, value: object) -> int:
        if isinstance(value, bool):
            return int(value)
        if not isinstance(value, int) or not 0 <= value <= _MAX_VALUE:
            raise self.fail(f"{self.arch}.{key} is {_short(value)}, no sensible number; the header is corrupt")
        return value


class _Shape(NamedTuple):
    """Geometry of all layers, as llama_hparams holds it after loading."""

    n_layer: int
    n_trunk: int
    n_embd: int
    head: list[int]
    head_kv: list[int]
    k_width: list[int]
    v_width: list[int]
    window: list[int | None]
    k_step: int
    v_step: int


def model_from_header(header: Header) -> Model:
    """Account for every byte of ``header``. Raises ModelError for an architecture without a rule, never guesses."""
    arch = header.metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelError(f"{header.path}: general.architecture is missing; this is no language model")
    rule = _ARCHES.get(arch)
    if rule is None:
        why = _NOT_ACCOUNTED.get(arch)
        if why is None:
            raise ModelError(
                f"{header.path}: unknown architecture '{arch}': its memory cannot be told, and is not guessed;"
                " use a model of a supported architecture or a newer collection"
            )
        raise ModelError(
            f"{header.path}: architecture '{arch}' is not yet accounted ({why}): its memory cannot be told,"
            " and is not guessed; use a model of a supported architecture"
        )
    keys = _Keys(header, arch)
    shape = _shape(keys, rule)
    blocks, loose = _sort_tensors(keys, shape)
    used = keys.per_layer("expert_used_count", shape.n_layer, 0)
    n_expert = keys.number("expert_count", 0)
    recurrent = _recurrent(keys, rule, shape)
    layers = []
    for number in range(shape.n_layer):
        layers.append(_one_layer(keys, rule, shape, number, blocks[number], used[number], recurrent))
    first = sum(_padded(tensor.nbytes) for tensor in loose["first"])
    if layers and first:
        layer = layers[0]
        layers[0] = Layer(**{**_fields(layer), "weights": layer.weights + first, "active": layer.active + first})
    tied = not any(tensor.name == "output.weight" for tensor in loose["output"])
    copied = tied and arch != "bitnet"  # bitnet.cpp multiplies by the token embedding where it is
    embedding = next((tensor for tensor in loose["input"] if tensor.name == "token_embd.weight"), None)
    if embedding is None or len(embedding.dims) < 2:
        raise keys.fail("the tensor token_embd.weight is missing; the file is no complete model, fetch another one")
    name = header.metadata.get("general.name")
    return Model(
        path=header.path,
        architecture=arch,
        name=name if isinstance(name, str) else None,
        n_layer=shape.n_layer,
        n_embd=shape.n_embd,
        n_vocab=embedding.dims[1],
        n_ctx_train=keys.number("context_length"),
        n_expert=n_expert,
        n_expert_used=max(used) if n_expert else 0,
        file_bytes=header.file_bytes,
        input_bytes=sum(_padded(tensor.nbytes) for tensor in loose["input"]),
        output_bytes=sum(_padded(tensor.nbytes) for tensor in loose["output"])
        + (_padded(embedding.nbytes) if copied else 0),
        per_device_bytes=sum(_padded(tensor.nbytes) for tensor in loose["device"]),
        tied=tied,
        layers=tuple(layers),
        quantization=_quantization(header),
        shards=header.shards,
        v_width_max=max(shape.v_width),
        stream=shape.n_embd * _streams(keys),
        side_input=sum(
            tensor.dims[-1]
            for tensor in loose["first"]
            if tensor.name == "per_layer_model_proj.weight" and len(tensor.dims) == 2
        ),
        head_bytes=_head_bytes(loose["output"], embedding),
        k_head=_k_head(shape),
        k_step=shape.k_step,
        v_step=shape.v_step,
    )


def _head_bytes(output: list[Tensor], embedding: Tensor) -> int | None:
    """Bytes of the output matrix, if it comes last: a bias or a scale behind it would need the logits back."""
    if any(tensor.name != "output.weight" and "_norm." not in tensor.name for tensor in output):
        return None
    return _padded(next((tensor for tensor in output if tensor.name == "output.weight"), embedding).nbytes)


def _k_head(shape: _Shape) -> int:
    """Elements of a K head where all layers with attention have the same (llama-kv-cache.cpp, n_embd_head_k_all)."""
    found = {width // heads for width, heads in zip(shape.k_width, shape.head_kv) if width and heads}
    return found.pop() if len(found) == 1 else 0


def _fields(layer: Layer) -> dict[str, Any]:
    return {field.name: getattr(layer, field.name) for field in fields(layer)}


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _quantization(header: Header) -> str | None:
    """The name llama.cpp gives the file type, or the type that holds most bytes when the file has none."""
    kind = header.metadata.get("general.file_type")
    if isinstance(kind, int) and 0 <= kind < len(_FILE_TYPES) and _FILE_TYPES[kind] != "-":
        return _FILE_TYPES[kind]
    totals: dict[str, int] = {}
    for tensor in header.tensors:
        totals[tensor.type] = totals.get(tensor.type, 0) + tensor.nbytes
    return max(totals, key=lambda name: totals[name]) if totals else None


def _shape(keys: _Keys, rule: _Arch) -> _Shape:
    """llama_model_base::load_hparams and the sliding-window part of load_arch_hparams."""
    n_layer = keys.number("block_count")
    if not 0 < n_layer <= _MAX_LAYERS:
        raise keys.fail(f"block_count is {n_layer}, llama.cpp takes 1 to {_MAX_LAYERS}; the header is corrupt")
    nextn = keys.number("nextn_predict_layers", 0)
    if nextn > n_layer:
        raise keys.fail(f"nextn_predict_layers is {nextn} of {n_layer} layers; the header is corrupt")
    if nextn and not rule.mtp:
        raise keys.fail("carries MTP (NextN) layers, which are not yet accounted for this architecture")
    if nextn == n_layer:
        raise keys.fail("holds only MTP (NextN) layers, a draft; give the model itself")
    if keys.arch == "deepseek4" and nextn:
        probe = f"blk.{n_layer - nextn}.nextn.eh_proj.weight"
        if all(tensor.name != probe for tensor in keys.header.tensors):
            nextn = 0  # deepseek4.cpp: without the tensors the layers are trunk
    n_embd = keys.number("embedding_length")
    head = keys.per_layer("attention.head_count", n_layer, 0)
    head_kv = keys.per_layer("attention.head_count_kv", n_layer) if keys.has("attention.head_count_kv") else list(head)
    k_size = v_size = 0
    if head[0]:  # llama.cpp looks at layer 0 only
        k_size = keys.number("attention.key_length", n_embd // head[0])
        v_size = keys.number("attention.value_length", n_embd // head[0])
    elif keys.arch == "plamo2":  # reads the lengths again, whatever layer 0 is
        k_size = keys.number("attention.key_length", 0)
        v_size = keys.number("attention.value_length", 0)
    k_swa = keys.number("attention.key_length_swa", k_size)
    v_swa = keys.number("attention.value_length_swa", v_size)
    window = _windows(keys, rule, n_layer, n_layer - nextn, head_kv)
    return _Shape(
        n_layer,
        n_layer - nextn,
        n_embd,
        head,
        head_kv,
        [count * (k_size if window[layer] is None else k_swa) for layer, count in enumerate(head_kv)],
        [count * (v_size if window[layer] is None else v_swa) for layer, count in enumerate(head_kv)],
        window,
        math.gcd(*(k_size if size is None else k_swa for size in window[: n_layer - nextn])),
        math.gcd(*(v_size if size is None else v_swa for size in window[: n_layer - nextn])),
    )


def _windows(keys: _Keys, rule: _Arch, n_layer: int, n_trunk: int, head_kv: list[int]) -> list[int | None]:
    """The sliding window of each layer in cells, None for a dense one."""
    dense: list[int | None] = [None] * n_layer
    if keys.arch == "lfm2":
        size = keys.number("attention.sliding_window", 0)
        return [size if size and layer < n_trunk and head_kv[layer] else None for layer in range(n_layer)]
    swa = rule.swa
    if swa is None or (keys.arch == "exaone4" and n_trunk != 64):
        return dense
    found = keys.has("attention.sliding_window")
    if keys.arch == "llama4":
        if found and keys.number("attention.sliding_window") == 0:
            return dense
        size = 8192
    elif swa.optional and not (found and keys.number("attention.sliding_window")):
        return dense
    else:
        size = swa.forced or keys.number("attention.sliding_window", swa.default)
    if keys.arch == "deepseek4":
        return [size] * n_layer
    pattern = keys.array("attention.sliding_window_pattern")
    if pattern is not None:
        flags = [bool(value) for value in pattern[:n_layer]] + [False] * (n_layer - len(pattern))
    else:
        if swa.pattern is None:
            raise keys.fail("attention.sliding_window_pattern is missing, llama.cpp would not load the file")
        every = keys.number("attention.sliding_window_pattern", swa.pattern)
        flags = [
            layer < n_trunk and (every == 0 or (layer % every != 0 if swa.dense_first else layer % every < every - 1))
            for layer in range(n_layer)
        ]
    return [size if flag else None for flag in flags]


def _sort_tensors(keys: _Keys, shape: _Shape) -> tuple[list[list[Tensor]], dict[str, list[Tensor]]]:
    """Tensors by layer, and the others by where they live: input, first (layer), device (all), output."""
    rule = _ARCHES[keys.arch]
    blocks: list[list[Tensor]] = [[] for _layer_number in range(shape.n_layer)]
    loose: dict[str, list[Tensor]] = {"input": [], "first": [], "device": [], "output": []}
    for tensor in keys.header.tensors:
        match = _BLOCK.match(tensor.name)
        if match:
            number = int(match.group(1))
            if number >= shape.n_layer:
                raise keys.fail(
                    f"tensor '{tensor.name}' lies beyond the {shape.n_layer} layers that the header claims;"
                    " the header is corrupt, fetch another file"
                )
            blocks[number].append(tensor)
        elif tensor.name.startswith(_INPUT):
            loose["input"].append(tensor)
        elif tensor.name.startswith(_FIRST) or (rule.norm_first and tensor.name.startswith("token_embd_norm.")):
            loose["first"].append(tensor)
        elif tensor.name.startswith(_PER_DEVICE):
            loose["device"].append(tensor)
        else:
            loose["output"].append(tensor)
    if not any(blocks):
        raise keys.fail("holds no layer; the file is no complete model, fetch another one")
    return blocks, loose


class _State(NamedTuple):
    """Recurrent part of a model: which layers have it, and elements of one slot (llama_hparams::n_embd_r, _s)."""

    layers: list[bool]
    attention: list[bool]
    elements: int


def _recurrent(keys: _Keys, rule: _Arch, shape: _Shape) -> _State:
    """Which layers are recurrent, which attend (create_memory of llama-model.cpp), and the size of the state."""
    total, trunk = shape.n_layer, shape.n_trunk
    every = range(total)
    if rule.recurrent == "no":
        return _State([False] * total, [layer < trunk for layer in every], 0)
    if rule.recurrent == "all":
        recurrent = [True] * total
        attention = [False] * total
    elif rule.recurrent == "both":
        recurrent = [True] * total
        attention = [True] * total
    elif rule.recurrent == "nemotron":
        n_ff = keys.per_layer("feed_forward_length", total, 0)
        recurrent = [layer < trunk and not shape.head_kv[layer] and not n_ff[layer] for layer in every]
        attention = [not recurrent[layer] and not n_ff[layer] for layer in every]
    elif rule.recurrent == "kv0":
        recurrent = [layer < trunk and not shape.head_kv[layer] for layer in every]
        attention = [not flag for flag in recurrent]
    else:
        if keys.has("attention.recurrent_layers"):
            flags = [bool(value) for value in keys.per_layer("attention.recurrent_layers", total)]
        else:
            interval = keys.number("full_attention_interval", 4 if rule.recurrent == "interval4" else 8) or 1
            flags = [(layer + 1) % interval != 0 for layer in every]
        recurrent = [layer < trunk and flags[layer] for layer in every]
        attention = [layer < trunk and not flags[layer] for layer in every]
    return _State(recurrent, attention, _state_elements(keys, shape))


def _state_elements(keys: _Keys, shape: _Shape) -> int:
    """Elements of the conv (R) and recurrent (S) state of one layer and slot, both F32."""
    n_embd, heads = shape.n_embd, shape.head[0]
    if "rwkv" in keys.arch:
        size = keys.number("wkv.head_size")
        return keys.number("token_shift_count", 2) * n_embd + n_embd * size
    if keys.arch in ("lfm2", "lfm2moe"):
        return n_embd * (keys.number("shortconv.l_cache") - 1)
    if keys.arch in ("kimi-linear", "bailingmoe3"):
        size = keys.number("kda.head_dim")
        kernel = keys.number("ssm.conv_kernel")
        return 3 * (kernel - 1 if kernel else 3) * heads * size + size * size * heads
    if keys.arch == "minimax-01":
        size = keys.number("attention.key_length", n_embd // heads if heads else 0)
        return size * size * heads
    kernel = keys.number("ssm.conv_kernel")
    inner = keys.number("ssm.inner_size")
    state = keys.number("ssm.state_size")
    group = keys.number("ssm.group_count", 0)
    return max(kernel - 1, 0) * (inner + 2 * group * state) + state * inner


def _one_layer(
    keys: _Keys, rule: _Arch, shape: _Shape, number: int, tensors: list[Tensor], used: int, state: _State
) -> Layer:
    """Bytes, caches and state of layer ``number``; ``used`` experts are read per token."""
    mtp = number >= shape.n_trunk
    loaded = [tensor for tensor in tensors if not mtp or any(part in tensor.name for part in rule.leaks)]
    caches: tuple[Cache, ...] = ()
    borrows = None
    state_bytes = state.elements * _F32 if state.layers[number] else 0
    if keys.arch == "deepseek4":
        caches, state_bytes = _deepseek4(keys, shape, number)
    elif state.attention[number]:
        borrows = _lender(keys, rule, shape, number)
        if borrows is None:
            caches = _caches(keys, rule, shape, number)
    spill_out, spill_in = _spill(keys, shape, tensors)
    return Layer(
        weights=sum(_padded(tensor.nbytes) for tensor in loaded),
        active=0 if mtp else sum(_active(tensor, used) for tensor in tensors),
        caches=caches,
        state_per_sequence=state_bytes,
        borrows_from=borrows,
        mtp=mtp,
        mtp_weights=sum(_padded(tensor.nbytes) for tensor in tensors) if mtp else 0,
        scratch=_F32 * _scratch(keys, shape, tensors, used),
        n_head=shape.head[number],
        spill_out=_F32 * spill_out,
        spill_in=_F32 * spill_in,
    )


def _streams(keys: _Keys) -> int:
    """Residual streams side by side: altup of gemma3n (always 4), hyper-connections of deepseek4."""
    if keys.arch == "gemma3n":
        return 4
    return keys.number("hyper_connection.count", 1) if keys.arch == "deepseek4" else 1


def _outputs(tensors: list[Tensor]) -> dict[str, tuple[int, ...]]:
    """Shapes of the matrices of a layer and its norms, by their bare names."""
    return {
        tensor.name.split(".", 2)[2][: -len(".weight")]: tensor.dims
        for tensor in tensors
        if tensor.name.endswith(".weight") and tensor.dims
    }


def _spill(keys: _Keys, shape: _Shape, tensors: list[Tensor]) -> tuple[int, int]:
    """Elements per token that cross to the device of the next recurrent layer, and what they come from.

    llama.cpp expands the graph of a recurrent layer up to its state, then goes on with the state of the next one: the
    gate that is applied last (a copy of part of the input projection) has no weight of its own and lands beside the
    latter. Attention and expert routing expand the graph in between and prevent it. Measured on b11434.
    """
    out = _outputs(tensors)
    if keys.arch == "minimax-01":
        return 0, shape.n_embd
    if "ffn_gate_inp" in out or "attn_q" in out or "attn_qkv" in out:
        return 0, 0
    if "ssm_in" in out and "ssm_out" in out:
        return out["ssm_out"][0], out["ssm_in"][-1]
    if "time_mix_key" in out or "rwkv" in keys.arch:  # with the feed-forward part of qwen2 a gate crosses as well
        return 0 if "channel_mix_key" in out else shape.n_embd, 4 * shape.n_embd
    return 0, 0


def _scratch(keys: _Keys, shape: _Shape, tensors: list[Tensor], used: int) -> int:
    """Elements per token alive at the peak of a layer: an upper bound, from what the projections write.

    The graph (llama-graph.cpp) peaks either in attention, or in the feed-forward part, where gate, up and their
    product are alive beside the residual and its norm; experts write their outputs before they are summed.
    """
    out = _outputs(tensors)

    def wide(*names: str, axis: int = 1) -> int:
        return sum(out[name][axis] for name in names if name in out and len(out[name]) > axis)

    stream = shape.n_embd * _streams(keys)
    peaks = [wide("ffn_gate", "ffn_up") + wide("ffn_down", axis=0) + 2 * stream]
    if "ssm_in" in out and "attn_q" in out:  # falcon-h1: what both of them gave is alive as well
        peaks[0] += 4 * stream
    if stream > shape.n_embd:  # predictions and corrections of all streams
        peaks[0] += 4 * stream
    elif "post_ffw_norm" in out:
        peaks[0] += stream
    if "ffn_down_exps" in out:
        experts = wide("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps") + wide("ffn_down_exps", axis=0)
        shared = wide("ffn_gate_shexp", "ffn_up_shexp") + wide("ffn_down_shexp", axis=0)
        written = wide("ffn_down_exps")
        # The outputs of the experts go where their gates were when they fit there.
        reused = written <= wide("ffn_down_exps", axis=0)
        peaks.append(used * (experts + (0 if reused else written)) + shared + 3 * stream)
    projected = wide("attn_q", "attn_k", "attn_v", "attn_qkv")
    if "attn_k_b" in out and len(out["attn_k_b"]) == 3:
        _nope, latent, heads = out["attn_k_b"]
        key = latent + keys.number("rope.dimension_count", 0)
        query = wide("attn_q_b") or wide("attn_q")
        peaks.append(query + heads * (latent + key) + 3 * key + 3 * stream)
    else:
        peaks.append(2 * projected + wide("attn_output", axis=0) + 4 * stream)
    if "ssm_in" in out:
        inner = 2 * wide("ssm_conv1d") + 2 * wide("ssm_out", axis=0) + wide("ssm_dt")
        peaks.append(wide("ssm_in") + inner + 2 * stream)
    if "time_mix_key" in out:
        peaks.append((18 if "channel_mix_key" in out else 22) * stream + wide("channel_mix_key"))
    return max(peaks)


def _active(tensor: Tensor, used: int) -> int:
    """Bytes of a tensor read per token: experts are read ``used`` out of as many as the last dimension says."""
    if "_exps." not in tensor.name and "_chexps." not in tensor.name:
        return tensor.nbytes
    experts = tensor.dims[-1] if tensor.dims else 1
    return -(-tensor.nbytes * min(used, experts) // max(experts, 1))


def _lender(keys: _Keys, rule: _Arch, shape: _Shape, number: int) -> int | None:
    """gemma3n and gemma4: the last layers use the cache of an earlier one of their kind (create_memory)."""
    if rule.shared_kv == "no":
        return None
    own = 20 if rule.shared_kv == "gemma3n" else shape.n_layer - keys.number("attention.shared_kv_layers", 0)
    if number < own:
        return None
    lender = own - (1 if shape.window[number] is None else 2)
    if lender < 0:
        raise keys.fail(f"layer {number} would borrow the cache of layer {lender}; the header is corrupt")
    return lender


def _caches(keys: _Keys, rule: _Arch, shape: _Shape, number: int) -> tuple[Cache, ...]:
    k_width, v_width, window = shape.k_width[number], shape.v_width[number], shape.window[number]
    lengths = ("attention.key_length_mla", "attention.value_length_mla")
    latent = rule.mla == "yes" or (rule.mla == "keys" and all(keys.number(key, 0) for key in lengths))
    found = [Cache(k_width, 0 if latent else v_width, window)]
    if rule.indexer != "no" and _has_indexer(keys, rule, shape, number):
        found.append(Cache(keys.number("attention.indexer.key_length"), 0, window))
    return tuple(cache for cache in found if cache.k_width or cache.v_width)


def _has_indexer(keys: _Keys, rule: _Arch, shape: _Shape, number: int) -> bool:
    """glm-dsa.cpp: full everywhere before GLM 5.2, there layers 0, 1, 2 and every fourth after, unless listed."""
    if rule.indexer == "all":
        return True
    if keys.has("attention.indexer.types"):
        return bool(keys.per_layer("attention.indexer.types", shape.n_trunk)[number])
    if keys.number("context_length") < 1048576:
        return True
    return number < 2 or (number - 2) % 4 == 0


def _deepseek4(keys: _Keys, shape: _Shape, number: int) -> tuple[tuple[Cache, ...], int]:
    """llama-kv-cache-dsv4.cpp: K only, one stream per slot; ratio 4 adds an indexer; F32 compressor state in bytes."""
    ratio = keys.per_layer("attention.compress_ratios", shape.n_layer)[number]
    k_width = shape.k_width[number]
    indexer = keys.number("attention.indexer.key_length")
    raw = Cache(k_width, 0, shape.window[number], 1, True)
    k_head = k_width // max(shape.head_kv[number], 1)
    if ratio == 4:
        # 8 rows of two widths, values and scores
        return (raw, Cache(k_width, 0, None, 4, True), Cache(indexer, 0, None, 4, True)), (
            8 * 2 * (k_head + indexer) * 2 * _F32
        )
    if ratio == 128:
        return (raw, Cache(k_width, 0, None, 128, True)), 128 * k_head * 2 * _F32
    return (raw,), 0
