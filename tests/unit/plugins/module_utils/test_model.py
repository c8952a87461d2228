# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From header to model: the contract's fields, the rules of the families, and refusals by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._gguf import Header, MetaValue, Tensor
from ansible_collections.llamafleet.rpc.plugins.module_utils._model import Cache, Model, ModelError, model_from_header
from ansible_collections.llamafleet.rpc.tests.unit import measured
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CONTRACT = {
    "path", "architecture", "name", "n_layer", "n_embd", "n_vocab", "n_ctx_train", "n_expert", "n_expert_used",
    "file_bytes", "input_bytes", "output_bytes", "per_device_bytes", "tied", "layers", "quantization", "shards",
}  # fmt: skip
LAYER = {"weights", "active", "caches", "state_per_sequence", "borrows_from", "mtp"}
CACHE = {"k_width", "v_width", "window", "ratio", "per_sequence"}


def f32(name: str, *dims: int) -> Tensor:
    size = 4
    for dim in dims:
        size *= dim
    return Tensor(name, dims, "F32", size)


def make(arch: str, layers: int, values: dict[str, MetaValue], *tensors: Tensor) -> Header:
    """A header with the least that every model has, ``values`` under the architecture."""
    metadata: dict[str, MetaValue] = {"general.architecture": arch}
    defaults: dict[str, MetaValue] = {
        "block_count": layers,
        "context_length": 4096,
        "embedding_length": 64,
        "attention.head_count": 4,
    }
    for key, value in {**defaults, **values}.items():
        metadata[f"{arch}.{key}"] = value
    blocks = [f32(f"blk.{number}.attn_norm.weight", 64) for number in range(layers)]
    everything = (f32("token_embd.weight", 64, 1000), f32("output_norm.weight", 64), *blocks, *tensors)
    return Header("m.gguf", 3, metadata, {}, everything, 1 << 20, ("m.gguf",))


def caches(header: Header) -> list[tuple[Cache, ...]]:
    return [layer.caches for layer in model_from_header(header).layers]


def windows(arch: str, layers: int, values: dict[str, MetaValue]) -> list[int | None]:
    return [found[0].window for found in caches(make(arch, layers, values))]


@pytest.mark.parametrize("name", measured.NAMES)
def test_a_model_is_plain_data_with_the_fields_of_the_contract(name: str) -> None:
    model = measured.model(name)
    data = json.loads(json.dumps(model.to_dict()))
    assert set(data) >= CONTRACT
    assert all(set(layer) >= LAYER for layer in data["layers"])
    assert all(set(cache) == CACHE for layer in data["layers"] for cache in layer["caches"])
    assert Model.from_dict(data) == model
    for layer in data["layers"]:
        for extra in set(layer) - LAYER:
            del layer[extra]
    bare = Model.from_dict({key: value for key, value in data.items() if key in CONTRACT})
    assert [layer.weights for layer in bare.layers] == [layer.weights for layer in model.layers]


def test_every_byte_of_a_dense_model_has_one_place() -> None:
    model = measured.model("llama-8b-q4km")
    header = measured.header("llama-8b-q4km")
    placed = model.input_bytes + model.output_bytes + model.per_device_bytes + sum(one.weights for one in model.layers)
    assert placed == sum(-(-tensor.nbytes // 32) * 32 for tensor in header.tensors)
    assert not model.tied
    assert model.n_vocab == 128256
    assert all(layer.active <= layer.weights for layer in model.layers)


def test_a_tied_model_pays_its_embedding_twice() -> None:
    model = measured.model("llama-1b-tied")
    assert model.tied
    assert model.output_bytes == model.input_bytes + 8192
    assert model.per_device_bytes == 128  # rope_freqs


def test_bitnet_multiplies_by_the_embedding_of_the_primary() -> None:
    """b11434 loads no second copy of it: 1000 x 64 F32 less on the device with the output than for other models."""
    assert model_from_header(make("bitnet", 1, {})).output_bytes == 256
    assert model_from_header(make("llama", 1, {})).output_bytes == 256 + 256000


def test_head_sizes_that_cache_types_must_divide() -> None:
    model = measured.model("gemma4_31b")  # heads of 512, and of 256 where the window slides
    assert (model.k_step, model.v_step) == (256, 256)
    phi2 = model_from_header(make("phi2", 2, {"embedding_length": 320}))
    assert (phi2.k_step, phi2.v_step) == (80, 80)


def test_experts_count_by_use() -> None:
    model = measured.model("qwen3moe-30b")
    header = measured.header("qwen3moe-30b")
    assert (model.n_expert, model.n_expert_used) == (128, 8)
    mine = [tensor for tensor in header.tensors if tensor.name.startswith("blk.0.")]
    experts = sum(tensor.nbytes for tensor in mine if "_exps" in tensor.name)
    others = sum(tensor.nbytes for tensor in mine) - experts
    assert model.layers[0].active == others + experts * 8 // 128


def test_mtp_layers_cost_nothing_until_they_are_asked_for() -> None:
    model = measured.model("glm4moe-air-mtp")
    assert model.n_layer == 47
    assert [layer.mtp for layer in model.layers] == [False] * 46 + [True]
    last = model.layers[-1]
    assert (last.weights, last.active, last.caches, last.state_per_sequence) == (0, 0, (), 0)
    assert last.mtp_weights == 16285046272 - 13876817920  # measured with and without --spec-type draft-mtp


# -- sliding windows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "values", "expected"),
    [
        ("llama", {"attention.sliding_window": 512}, "DDDDDDDD"),
        ("phi3", {"attention.sliding_window": 512}, "DDDDDDDD"),
        ("gemma2", {}, "WDWDWDWD"),
        ("gemma3", {"attention.sliding_window": 512}, "WWWWWDWW"),
        ("gemma3", {"attention.sliding_window": 0}, "DDDDDDDD"),
        ("gemma3", {}, "DDDDDDDD"),
        ("gemma3", {"attention.sliding_window": 512, "attention.sliding_window_pattern": 2}, "WDWDWDWD"),
        ("gpt-oss", {"attention.sliding_window": 128}, "WDWDWDWD"),
        ("cohere2", {"attention.sliding_window": 4096}, "WWWDWWWD"),
        ("cohere2moe", {"attention.sliding_window": 4096}, "DWWWDWWW"),
        ("olmo2", {"attention.sliding_window": 4096}, "WWWDWWWD"),
        ("exaone4", {"attention.sliding_window": 4096}, "DDDDDDDD"),  # only with 64 layers
        ("llama4", {}, "WWWDWWWD"),
        ("llama4", {"attention.sliding_window": 0}, "DDDDDDDD"),
        ("smallthinker", {"attention.sliding_window": 100}, "DWWWDWWW"),
        (
            "mimo2",
            {
                "attention.sliding_window": 128,
                "attention.sliding_window_pattern": (False, True, True, True, True, False, True, True),
            },
            "DWWWWDWW",
        ),
    ],
)
def test_which_layers_slide(arch: str, values: dict[str, MetaValue], expected: str) -> None:
    found = windows(arch, 8, values)
    assert "".join("D" if window is None else "W" for window in found) == expected


def test_how_far_they_slide() -> None:
    assert windows("gemma2", 2, {}) == [4096, None]
    assert windows("gemma2", 2, {"attention.sliding_window": 1024}) == [1024, None]
    assert windows("llama4", 2, {"attention.sliding_window": 100}) == [8192, 8192]  # forced
    assert windows("smallthinker", 2, {"attention.sliding_window": 100}) == [None, 4096]  # forced
    with pytest.raises(ModelError, match="sliding_window is missing"):
        windows("gpt-oss", 2, {})
    with pytest.raises(ModelError, match="sliding_window_pattern is missing"):
        windows("mimo2", 2, {"attention.sliding_window": 128})


def test_window_layers_may_have_their_own_heads() -> None:
    values: dict[str, MetaValue] = {
        "attention.sliding_window": 1024,
        "attention.sliding_window_pattern": (True, False),
        "attention.head_count_kv": (8, 2),
        "attention.key_length": 512,
        "attention.value_length": 512,
        "attention.key_length_swa": 256,
        "attention.value_length_swa": 128,
    }
    assert caches(make("mimo2", 2, values)) == [(Cache(2048, 1024, 1024),), (Cache(1024, 1024),)]


# -- other caches ------------------------------------------------------------------------------------------------


def test_latent_attention_keeps_keys_only_when_the_file_has_the_keys() -> None:
    values: dict[str, MetaValue] = {
        "attention.head_count_kv": 1,
        "attention.key_length": 576,
        "attention.value_length": 512,
        "attention.key_length_mla": 192,
        "attention.value_length_mla": 128,
    }
    assert caches(make("deepseek2", 1, values)) == [(Cache(576, 0),)]
    old: dict[str, MetaValue] = {
        "attention.head_count_kv": 4,
        "attention.key_length": 192,
        "attention.value_length": 128,
    }
    assert caches(make("deepseek2", 1, old)) == [(Cache(768, 512),)]


def test_an_indexer_has_a_cache_of_its_own() -> None:
    values: dict[str, MetaValue] = {
        "attention.head_count_kv": 1,
        "attention.key_length": 576,
        "attention.value_length": 512,
        "attention.key_length_mla": 192,
        "attention.value_length_mla": 128,
        "attention.indexer.key_length": 128,
    }
    both = (Cache(576, 0), Cache(128, 0))
    assert caches(make("glm-dsa", 8, values)) == [both] * 8
    newer = caches(make("glm-dsa", 8, {**values, "context_length": 1048576}))
    assert [len(found) for found in newer] == [2, 2, 2, 1, 1, 1, 2, 1]
    listed = caches(make("glm-dsa", 3, {**values, "attention.indexer.types": (0, 1, 0)}))
    assert [len(found) for found in listed] == [1, 2, 1]
    assert caches(make("deepseek32", 2, {**values, "context_length": 1048576})) == [both] * 2


def test_glm_dsa_loads_one_tensor_of_its_mtp_layer() -> None:
    values: dict[str, MetaValue] = {"nextn_predict_layers": 1, "attention.indexer.key_length": 128}
    header = make("glm-dsa", 2, values, f32("blk.1.exp_probs_b.bias", 256), f32("blk.1.nextn.eh_proj.weight", 128, 64))
    last = model_from_header(header).layers[-1]
    assert (last.weights, last.mtp_weights) == (1024, 1024 + 32768 + 256)


def test_compressed_caches_of_deepseek4() -> None:
    values: dict[str, MetaValue] = {
        "attention.head_count_kv": 1,
        "attention.key_length": 512,
        "attention.value_length": 512,
        "attention.sliding_window": 128,
        "attention.compress_ratios": (0, 4, 128),
        "attention.indexer.key_length": 128,
        "hyper_connection.count": 4,
    }
    layers = model_from_header(make("deepseek4", 3, values)).layers
    raw = Cache(512, 0, 128, 1, True)
    assert [layer.caches for layer in layers] == [
        (raw,),
        (raw, Cache(512, 0, None, 4, True), Cache(128, 0, None, 4, True)),
        (raw, Cache(512, 0, None, 128, True)),
    ]
    assert [layer.state_per_sequence for layer in layers] == [0, 8 * 2 * (512 + 128) * 8, 128 * 512 * 8]


@pytest.mark.parametrize(("arch", "extra"), [("gemma3n", {}), ("gemma4", {"attention.shared_kv_layers": 5})])
def test_the_last_layers_may_borrow_the_cache_of_their_kind(arch: str, extra: dict[str, MetaValue]) -> None:
    pattern = tuple(number % 5 != 4 for number in range(25))
    values: dict[str, MetaValue] = {
        "attention.sliding_window": 512,
        "attention.sliding_window_pattern": pattern,
        **extra,
    }
    layers = model_from_header(make(arch, 25, values)).layers
    assert all(layer.caches and layer.borrows_from is None for layer in layers[:20])
    assert all(not layer.caches for layer in layers[20:])
    assert [layer.borrows_from for layer in layers[20:]] == [18, 18, 18, 18, 19]


# -- recurrent state (facts measured on b11434) ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "values", "elements", "pattern"),
    [
        (
            "mamba",
            {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16, "attention.head_count": 0},
            3 * 128 + 16 * 128,
            "RRRR",
        ),
        (
            "mamba2",
            {
                "ssm.conv_kernel": 4,
                "ssm.inner_size": 128,
                "ssm.state_size": 16,
                "ssm.group_count": 2,
                "attention.head_count": 0,
            },
            3 * (128 + 2 * 2 * 16) + 16 * 128,
            "RRRR",
        ),
        ("rwkv7", {"wkv.head_size": 32, "attention.head_count": 0}, 2 * 64 + 64 * 32, "RRRR"),
        ("lfm2", {"shortconv.l_cache": 3, "attention.head_count_kv": (0, 2, 0, 2)}, 64 * 2, "RARA"),
        (
            "jamba",
            {
                "ssm.conv_kernel": 4,
                "ssm.inner_size": 128,
                "ssm.state_size": 16,
                "attention.head_count_kv": (0, 0, 2, 0),
            },
            3 * 128 + 16 * 128,
            "RRAR",
        ),
        (
            "falcon-h1",
            {
                "ssm.conv_kernel": 4,
                "ssm.inner_size": 128,
                "ssm.state_size": 16,
                "ssm.group_count": 1,
                "attention.head_count_kv": 2,
            },
            3 * (128 + 32) + 16 * 128,
            "BBBB",
        ),
        (
            "nemotron_h",
            {
                "ssm.conv_kernel": 4,
                "ssm.inner_size": 128,
                "ssm.state_size": 16,
                "ssm.group_count": 1,
                "attention.head_count_kv": (0, 0, 2, 0),
                "feed_forward_length": (0, 256, 0, 0),
            },
            3 * (128 + 32) + 16 * 128,
            "R.AR",
        ),
        (
            "qwen3next",
            {
                "ssm.conv_kernel": 4,
                "ssm.inner_size": 128,
                "ssm.state_size": 16,
                "ssm.group_count": 1,
                "attention.head_count_kv": 2,
            },
            3 * (128 + 32) + 16 * 128,
            "RRRA",
        ),
        (
            "kimi-linear",
            {
                "ssm.conv_kernel": 4,
                "kda.head_dim": 128,
                "attention.head_count_kv": (0, 0, 1, 0),
                "attention.key_length": 576,
                "attention.value_length": 512,
            },
            9 * 4 * 128 + 128 * 128 * 4,
            "RRAR",
        ),
    ],
)
def test_recurrent_layers_keep_a_state_per_slot(
    arch: str, values: dict[str, MetaValue], elements: int, pattern: str
) -> None:
    layers = model_from_header(make(arch, 4, values)).layers
    kinds = {(True, False): "R", (False, True): "A", (True, True): "B", (False, False): "."}
    assert "".join(kinds[bool(layer.state_per_sequence), bool(layer.caches)] for layer in layers) == pattern
    assert {layer.state_per_sequence for layer in layers} <= {0, elements * 4}


# -- where tensors without a layer live --------------------------------------------------------------------------


def test_tensors_of_the_first_layers_device() -> None:
    values: dict[str, MetaValue] = {"attention.sliding_window": 512}
    header = make(
        "gemma3n",
        5,
        values,
        f32("per_layer_token_embd.weight", 1280, 1000),
        f32("per_layer_model_proj.weight", 64, 1280),
        f32("per_layer_proj_norm.weight", 256),
        f32("altup_proj.weight", 64, 64, 3),
    )
    model = model_from_header(header)
    assert model.input_bytes == 64 * 1000 * 4 + 1280 * 1000 * 4
    assert model.layers[0].weights == 256 + 64 * 1280 * 4 + 1024
    assert model.output_bytes == 256 + 64 * 64 * 3 * 4 + 64 * 1000 * 4  # tied

    norm = f32("token_embd_norm.weight", 64)
    rwkv = {"wkv.head_size": 32, "attention.head_count": 0}
    lfm2 = {"shortconv.l_cache": 3, "attention.head_count_kv": 2}
    assert model_from_header(make("rwkv7", 2, dict(rwkv), norm)).layers[0].weights == 512
    assert model_from_header(make("lfm2", 2, dict(lfm2), norm)).layers[0].weights == 256


def test_small_tensors_are_padded_to_the_alignment() -> None:
    header = make("llama", 1, {}, f32("blk.0.scale.weight", 1), f32("rope_factors_long.weight", 3))
    model = model_from_header(header)
    assert model.layers[0].weights == 256 + 32
    assert model.per_device_bytes == 32


# -- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("brandnew", "unknown architecture 'brandnew'"),
        ("bert", "'bert' is not yet accounted .*encoder"),
        ("minimax-m3", "'minimax-m3' is not yet accounted .*sparse attention"),
        ("nanbeige", "'nanbeige' is not yet accounted .*loops"),
    ],
)
def test_what_cannot_be_accounted_is_refused_by_name(arch: str, expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        model_from_header(make(arch, 1, {}))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"block_count": 0}, "block_count is 0"),
        ({"block_count": 513}, "block_count is 513"),
        ({"block_count": "two"}, "block_count is 'two'"),
        ({"block_count": -1}, "no sensible number"),
        ({"embedding_length": 1 << 41}, "no sensible number"),
        ({"attention.head_count_kv": (1,)}, "has 1 values for 2 layers"),
        ({"nextn_predict_layers": 1}, "MTP .* not yet accounted"),
        ({"nextn_predict_layers": 3}, "3 of 2 layers"),
    ],
)
def test_nonsense_in_the_metadata_is_an_error_with_its_key(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        model_from_header(make("llama", 2, values))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_metadata_and_shapes_fail_only_with_reasons(data: st.DataObject) -> None:
    """Any value of any key that a real header has, and any shape of its tensors."""
    name = data.draw(st.sampled_from(measured.NAMES + measured.FAMILIES))
    header = measured.header(name)
    metadata = dict(header.metadata)
    value = st.one_of(
        st.none(),
        st.integers(-2, 1 << 50),
        st.floats(),
        st.booleans(),
        st.text(max_size=3),
        st.lists(st.integers(-1, 300), max_size=9).map(tuple),
    )
    for key in data.draw(st.lists(st.sampled_from(sorted(metadata)), max_size=3)):
        new = data.draw(value)
        if new is None:
            metadata.pop(key, None)
        else:
            metadata[key] = new
    tensors = list(header.tensors)
    shape = st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple)
    for place in data.draw(st.lists(st.integers(0, len(tensors) - 1), max_size=3)):
        tensors[place] = replace(tensors[place], dims=data.draw(shape))
    try:
        model = model_from_header(replace(header, metadata=metadata, tensors=tuple(tensors)))
    except ModelError:
        return
    assert Model.from_dict(model.to_dict()) == model


def test_an_incomplete_header_is_an_error() -> None:
    good = make("llama", 2, {})
    stray = replace(good, tensors=(*good.tensors, f32("blk.2.w.weight", 64)))
    bare = replace(good, tensors=good.tensors[1:])
    empty = replace(good, tensors=good.tensors[:2])
    nameless = replace(good, metadata={})
    for header, expected in (
        (stray, "beyond the 2 layers"),
        (bare, "token_embd.weight is missing"),
        (empty, "holds no layer"),
        (nameless, "general.architecture is missing"),
    ):
        with pytest.raises(ModelError, match=expected):
            model_from_header(header)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (None, "model is None"),
        ({"layers": None}, "model.layers is None"),
        ({"layers": [1]}, r"model.layers\[0\] is 1"),
        ({"n_layer": 3}, "n_layer is 3 but model.layers has 30"),
        ({"n_embd": "576"}, "model.n_embd is '576'"),
        ({"n_embd": -1}, "model.n_embd is -1"),
        ({"n_embd": True}, "model.n_embd is True"),
        ({"tied": 1}, "model.tied is 1"),
        ({"path": 1}, "model.path holds 1"),
        ({"layers": [{}]}, r"layers\[0\].weights is missing"),
        ({"layers": [{"weights": 1, "active": 1, "caches": [{"k_width": 1}]}]}, r"caches\[0\].v_width is missing"),
    ],
)
def test_wrong_data_is_an_error_that_names_the_place(change: dict[str, Any] | None, expected: str) -> None:
    data: Any = None if change is None else {**measured.model("smol-header-only").to_dict(), **change}
    with pytest.raises(ModelError, match=expected):
        Model.from_dict(data)


def test_a_missing_key_of_the_model_is_named() -> None:
    data = measured.model("smol-header-only").to_dict()
    del data["n_vocab"]
    with pytest.raises(ModelError, match="n_vocab is missing"):
        Model.from_dict(data)


def test_the_kind_of_quantisation_is_named() -> None:
    header = make("llama", 1, {})
    assert model_from_header(header).quantization == "F32"
    named = replace(header, metadata={**header.metadata, "general.file_type": 15})
    assert model_from_header(named).quantization == "Q4_K_M"
    removed = replace(header, metadata={**header.metadata, "general.file_type": 33})
    assert model_from_header(removed).quantization == "F32"
