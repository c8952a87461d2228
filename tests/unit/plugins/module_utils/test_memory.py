# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Memory as measured on llama.cpp b11434: weights and caches to the byte, compute never under and little over."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._gguf import Header, MetaValue, Tensor
from ansible_collections.llamafleet.rpc.plugins.module_utils._memory import (
    CACHE_TYPES,
    ContextParams,
    MemoryParamsError,
    cache_cells,
    check_cache_types,
    compute_bytes,
    host_compute_bytes,
    layer_context_bytes,
    output_buffer_bytes,
    row_bytes,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._model import Cache, Layer, Model, model_from_header
from ansible_collections.llamafleet.rpc.tests.unit import measured

MIB = 1 << 20
GIB = 1 << 30


def weights(model: Model, layers: tuple[int, ...], output: bool = False, draft_mtp: bool = False) -> int:
    held = [model.layers[index] for index in layers]
    total = sum(layer.mtp_weights if draft_mtp and layer.mtp else layer.weights for layer in held)
    if any(not layer.mtp for layer in held):
        total += model.per_device_bytes
    return total + (model.output_bytes if output else 0)


def context(model: Model, layers: tuple[int, ...], params: ContextParams) -> int:
    return sum(layer_context_bytes(model, index, params) for index in layers)


def uniform(layers: int, cache: Cache, extra: tuple[Layer, ...] = ()) -> Model:
    """A model of equal layers, for figures that people reported."""
    each = Layer(weights=1, active=1, caches=(cache,))
    return Model(
        path="m.gguf",
        architecture="llama",
        name=None,
        n_layer=layers + len(extra),
        n_embd=4096,
        n_vocab=32000,
        n_ctx_train=131072,
        n_expert=0,
        n_expert_used=0,
        file_bytes=1,
        input_bytes=1,
        output_bytes=1,
        per_device_bytes=0,
        tied=False,
        layers=(each,) * layers + extra,
        quantization=None,
        shards=("m.gguf",),
    )


def total_context(model: Model, params: ContextParams) -> int:
    return context(model, tuple(range(model.n_layer)), params)


@pytest.mark.parametrize("name", measured.NAMES)
def test_weights_are_those_that_llama_cpp_loaded_to_the_byte(name: str) -> None:
    model = measured.model(name)
    checked = 0
    for run in measured.runs(name):
        if run.experts_on_host:
            continue  # experts moved by an override, which the planner never asks for
        for device in run.devices:
            assert weights(model, device.layers, device.output, run.draft_mtp) == device.model_bytes, run.name
            checked += 1
        if not run.layers_on_host:
            assert run.host.model_bytes == model.input_bytes, run.name
    assert checked > 100


@pytest.mark.parametrize("name", measured.NAMES)
def test_caches_and_state_are_those_that_llama_cpp_allocated_to_the_byte(name: str) -> None:
    model = measured.model(name)
    for run in measured.runs(name):
        for device in run.devices:
            expected = 0 if run.kv_on_host else context(model, device.layers, run.params)
            assert expected == device.context_bytes, run.name
        held = tuple(range(model.n_layer)) if run.kv_on_host else run.layers_on_host
        assert context(model, held, run.params) == run.host.context_bytes, run.name


@pytest.mark.parametrize("name", measured.NAMES)
def test_compute_is_never_under_what_llama_server_took_and_little_over(name: str) -> None:
    model = measured.model(name)
    checked = 0
    for run in measured.runs(name):
        if run.kind != "server":
            continue
        for number, device in enumerate(run.devices):
            if device.compute_real_bytes is None:
                continue
            bounds = [
                compute_bytes(
                    model,
                    run.params,
                    n_devices_listed=len(run.devices),
                    is_first=number == 0,
                    is_last_with_output=device.output,
                    pipelining=run.pipelining,
                    layers=layers,
                )
                for layers in (None, device.layers)
            ]
            assert device.compute_real_bytes <= bounds[1] <= bounds[0], (run.name, number)
            assert bounds[0] <= device.compute_real_bytes * 1.15 + 64 * MIB, (run.name, number)
            checked += 1
        taken = run.host.compute_real_bytes or run.host.compute_bytes
        bound = host_compute_bytes(model, run.params, run.pipelining)
        assert taken <= bound <= taken * 1.15 + 64 * MIB, run.name
    assert checked >= 6


@pytest.mark.parametrize("name", measured.NAMES)
def test_a_single_device_does_not_pipeline(name: str) -> None:
    """With one listed device every input exists once, so the bound must fall with it."""
    model = measured.model(name)
    for run in measured.runs(name):
        if len(run.devices) > 1 or run.params.flash_attn == "off":
            continue
        (device,) = run.devices
        one = compute_bytes(
            model, run.params, n_devices_listed=1, is_first=True, is_last_with_output=True, pipelining=True
        )
        # llama-fit-params reserves logits for the whole micro batch, llama-server for its slots only.
        logits = model.n_vocab * run.params.micro_batch * 4
        assert one <= device.compute_bytes * 1.15 + 64 * MIB, run.name
        assert one + logits >= device.compute_bytes, run.name


@pytest.mark.parametrize("name", measured.FAMILIES)
def test_other_families_as_llama_fit_params_accounts_for_them(name: str) -> None:
    """Latent attention, indexers, compressed and shared caches, recurrent and hybrid layers: to the MiB printed."""
    model = measured.model(name)
    for run in measured.estimates(name):
        for number, (layers, (model_mib, context_mib, compute_mib)) in enumerate(run.devices):
            output = number == len(run.devices) - 1
            where = (name, run.params, number)
            assert weights(model, layers, output) // MIB == model_mib, where
            assert context(model, layers, run.params) // MIB == context_mib, where
            if output:
                continue  # its figure includes logits for the whole micro batch, which llama-server does not keep
            several_streams = model.stream != model.n_embd
            artefact = 0 if number == 0 or several_streams else 4 * run.params.micro_batch * model.n_embd * 4
            taken = compute_mib * MIB - artefact
            bound = compute_bytes(
                model,
                run.params,
                n_devices_listed=len(run.devices),
                is_first=number == 0,
                is_last_with_output=False,
                pipelining=True,
                layers=layers,
            )
            assert taken <= bound, where
            if run.params.flash_attn != "off":
                assert bound <= taken * 1.15 + 64 * MIB, where
        assert model.input_bytes // MIB == run.host[0], name
        bound = host_compute_bytes(model, run.params, pipelining=True)
        assert run.host[2] * MIB <= bound, name
        assert run.params.flash_attn == "off" or bound <= run.host[2] * 1.15 * MIB + 64 * MIB, name


@pytest.mark.parametrize(
    ("name", "units", "options", "taken"),
    [
        # five slots: the graph is reserved for 515 tokens
        ("llama-70b-3shards", [16, 65], {"n_ctx": 2048, "n_parallel": 5, "kv_unified": False}, [449368576, 297472512]),
        # flash attention copies an F32 cache to F16
        (
            "llama-8b-q4km",
            [6, 7, 20],
            {"n_ctx": 32768, "type_v": "f32", "n_batch": 256, "n_ubatch": 128},
            [136329216, 117450752, 117450880],
        ),
        # four copies of the part of every layer, four streams that become one, caches of another device
        ("gemma3n", [10, 21], {"n_ctx": 1024}, [335093760, 348233856]),
        ("gemma3n", [10, 20, 1], {"n_ctx": 1024}, [335093760, 268541952, 217055360]),
        ("gemma3n", [20, 11], {"n_ctx": 1024}, [335093760, 411082880]),
        ("gemma4e4b", [8, 34, 1], {"n_ctx": 1024}, [218177536, 178331648, 27273344]),
        ("gemma4e4b", [24, 19], {"n_ctx": 1024}, [218177536, 325066880]),
        # what attention read from a quantised cache crosses to the recurrent layer of the next device
        ("lfm2", [3, 1, 3], {"n_ctx": 4096, "type_k": "q8_0", "type_v": "q8_0"}, [147005568, 92340352, 92463360]),
        ("jamba", [5, 3, 1], {"n_ctx": 2048, "type_k": "q4_0", "type_v": "q4_0"}, [344408320, 260182400]),
        ("jamba", [2, 1, 6], {"n_ctx": 512}, [302104832, 239173888, 362779008]),
        # deepseek4 puts window and compressed cells of all slots side by side
        ("dsv4", [3, 3, 3], {"n_ctx": 8192, "n_parallel": 8, "swa_full": True}, [378415872, 631172480, 615402368]),
        # attention and mamba side by side
        ("falconh1", [7], {"n_ctx": 2048, "n_ubatch": 2048}, [520347744]),
    ],
)
def test_compute_of_other_settings_is_never_under_what_was_allocated(
    name: str, units: list[int], options: dict[str, Any], taken: list[int]
) -> None:
    """Allocated by the scheduler of b11434 with as many outputs as slots, over CPU workers."""
    model = measured.model(name)
    start = 0
    for number, (count, bytes_taken) in enumerate(zip(units, taken)):
        bound = compute_bytes(
            model,
            ContextParams(**options),
            n_devices_listed=len(units),
            is_first=number == 0,
            is_last_with_output=start + count > model.n_layer,
            pipelining=True,
            layers=range(start, min(start + count, model.n_layer)),
        )
        assert bytes_taken <= bound <= bytes_taken * 1.15 + 64 * MIB, number
        start += count


@pytest.mark.parametrize(("name", "taken"), [("gemma3n", 38828064), ("gemma4e4b", 50362400)])
def test_the_primary_keeps_the_per_layer_embeddings_twice(name: str, taken: int) -> None:
    """One device without pipelining, 1024 cells, as allocated by b11434."""
    bound = host_compute_bytes(measured.model(name), ContextParams(n_ctx=1024), pipelining=False)
    assert taken <= bound <= taken * 1.15 + 64 * MIB


def three_layers(arch: str, values: dict[str, MetaValue], matrices: dict[str, tuple[int, int]], vocab: int) -> Model:
    """A model of three equal layers with these matrices."""
    width = int(str(values["embedding_length"]))
    metadata: dict[str, MetaValue] = {"general.architecture": arch}
    metadata.update({f"{arch}.{key}": value for key, value in values.items()})
    metadata.update({f"{arch}.block_count": 3, f"{arch}.context_length": 4096})
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (width, vocab), "output_norm.weight": (width,)}
    for number in range(3):
        shapes.update({f"blk.{number}.{name}.weight": dims for name, dims in matrices.items()})
    tensors = tuple(Tensor(name, dims, "F32", 4 * math.prod(dims)) for name, dims in shapes.items())
    return model_from_header(Header("m.gguf", 3, metadata, {}, tensors, 1, ("m.gguf",)))


def feed_forward(width: int, inner: int) -> dict[str, tuple[int, int]]:
    return {"ffn_gate": (width, inner), "ffn_up": (width, inner), "ffn_down": (inner, width)}


QWEN3_4B = three_layers(
    "qwen3",
    {
        "embedding_length": 2560,
        "attention.head_count": 32,
        "attention.head_count_kv": 8,
        "attention.key_length": 128,
        "attention.value_length": 128,
    },
    {
        "attn_q": (2560, 4096),
        "attn_k": (2560, 1024),
        "attn_v": (2560, 1024),
        "attn_output": (4096, 2560),
        **feed_forward(2560, 9728),
    },
    151936,
)
ARWKV7_7B = three_layers(
    "arwkv7",
    {"embedding_length": 3584, "attention.head_count": 56, "wkv.head_size": 64, "token_shift_count": 1},
    {"time_mix_key": (3584, 3584), **feed_forward(3584, 18944)},
    152064,
)


@pytest.mark.parametrize(
    ("model", "units", "taken"),
    [
        (QWEN3_4B, [2, 2], [155246592, 51421312]),  # 32 heads of 128 beside 2560 elements
        (ARWKV7_7B, [1, 1, 2], [284129408, 336650368, 272636160]),
        (ARWKV7_7B, [4], [180359232]),
    ],
)
def test_compute_of_models_that_are_not_recorded(model: Model, units: list[int], taken: list[int]) -> None:
    """Shapes of Qwen3-4B and ARWKV-7B, three layers, 2048 cells, allocated by b11434 over CPU workers."""
    start = 0
    for number, (count, bytes_taken) in enumerate(zip(units, taken)):
        bound = compute_bytes(
            model,
            ContextParams(n_ctx=2048),
            n_devices_listed=len(units),
            is_first=number == 0,
            is_last_with_output=start + count > 3,
            pipelining=True,
            layers=range(start, min(start + count, 3)),
        )
        assert bytes_taken <= bound <= bytes_taken * 1.15 + 64 * MIB, number
        start += count


def test_learned_positions_are_looked_up_on_the_primary() -> None:
    """GPT-2 XL shapes, three layers, one device: 18499616 bytes on the primary."""
    model = three_layers(
        "gpt2", {"embedding_length": 1600, "attention.head_count": 25}, {"attn_qkv": (1600, 4800)}, 50257
    )
    bound = host_compute_bytes(model, ContextParams(n_ctx=2048), pipelining=False)
    assert 18499616 <= bound <= 20 * MIB


def test_a_micro_batch_is_reserved_in_equal_parts_per_slot() -> None:
    params = ContextParams(n_ctx=2048, n_parallel=5)
    assert (params.micro_batch, params.graph_tokens) == (512, 515)
    assert ContextParams(n_ctx=2048, n_parallel=4).graph_tokens == 512
    assert cache_cells(Cache(64, 64, 256), params) == 1792  # the window follows the micro batch as it was asked for


def test_minimax_weighs_every_token_against_every_other() -> None:
    """Decay of 512 x 512 tokens x 4 heads, 4 MiB: four input copies and one at work, four on the primary."""
    linear = Layer(weights=1, active=1, state_per_sequence=65536, n_head=4, scratch=0)
    plain = replace(uniform(1, Cache(64, 64), (linear,)), architecture="other")
    params = ContextParams(n_ctx=2048)

    def both(model: Model) -> tuple[int, int]:
        device = compute_bytes(
            model, params, n_devices_listed=2, is_first=True, is_last_with_output=False, pipelining=True, layers=[1]
        )
        return device, host_compute_bytes(model, params, pipelining=True)

    device, host = both(replace(plain, architecture="minimax-01"))
    assert (device - both(plain)[0], host - both(plain)[1]) == (20 * MIB, 16 * MIB)


def test_grok_never_has_flash_attention() -> None:
    """llama.cpp forces it off, so the scores of all heads are written out, whatever was asked for."""
    grok = replace(uniform(2, Cache(1024, 1024)), architecture="grok", v_width_max=2048)
    asked, off = ContextParams(n_ctx=4096, flash_attn="on"), ContextParams(n_ctx=4096, flash_attn="off")
    assert total_context(grok, asked) == total_context(grok, off) == 2 * 4096 * 2 * (1024 + 2048)
    sizes = [
        compute_bytes(grok, params, n_devices_listed=1, is_first=True, is_last_with_output=True, pipelining=False)
        for params in (asked, off)
    ]
    assert sizes[0] == sizes[1] >= 64 * 4096 * 512 * 4
    with pytest.raises(MemoryParamsError, match="switches off for grok"):
        check_cache_types(grok, replace(asked, type_k="q8_0", type_v="q8_0"))


def test_cache_types_that_do_not_divide_a_head_are_refused() -> None:
    """phi2: 32 heads of 80, so a row is whole blocks and a head is not; refused by llama.cpp with flash attention."""
    phi2 = replace(uniform(32, Cache(2560, 2560)), k_step=80, v_step=80)
    quantised = ContextParams(n_ctx=4096, type_k="q8_0", type_v="q8_0")
    with pytest.raises(MemoryParamsError, match="type_k is 'q8_0', whose blocks of 32 do not divide"):
        check_cache_types(phi2, quantised)
    with pytest.raises(MemoryParamsError, match="type_v is 'q8_0'"):
        check_cache_types(replace(phi2, k_step=64), quantised)
    check_cache_types(phi2, ContextParams(n_ctx=4096))
    check_cache_types(phi2, ContextParams(n_ctx=4096, type_k="q8_0", flash_attn="off"), fa_all_quants=True)
    check_cache_types(replace(phi2, k_step=None, v_step=None), quantised)


def test_the_device_without_layers_that_holds_the_output_needs_room_for_logits() -> None:
    model = measured.model("llama-8b-q4km")
    bound = compute_bytes(
        model,
        ContextParams(n_ctx=8192, n_parallel=4),
        n_devices_listed=2,
        is_first=False,
        is_last_with_output=True,
        pipelining=True,
        layers=(),
    )
    assert 5 * 512 * 4096 * 4 + 4 * 128256 * 4 <= bound <= 128 * MIB


def test_compute_without_flash_attention_holds_the_scores() -> None:
    model = measured.model("llama-8b-q4km")
    for run in measured.runs("llama-8b-q4km"):
        if run.params.flash_attn != "off":
            continue
        device = run.devices[0]
        bound = compute_bytes(
            model, run.params, n_devices_listed=2, is_first=True, is_last_with_output=False, pipelining=True
        )
        assert device.compute_real_bytes is not None
        assert device.compute_real_bytes <= bound <= device.compute_real_bytes * 1.15 + 64 * MIB


def test_compute_of_a_model_without_the_optional_extras_stays_a_bound() -> None:
    model = measured.model("llama-8b-q4km")
    plain = replace(
        model,
        stream=None,
        v_width_max=None,
        layers=tuple(replace(layer, scratch=None, n_head=None) for layer in model.layers),
    )
    for run in measured.runs("llama-8b-q4km"):
        if run.kind == "server":
            taken = run.devices[0].compute_real_bytes
            bound = compute_bytes(
                plain, run.params, n_devices_listed=2, is_first=True, is_last_with_output=False, pipelining=True
            )
            assert taken is not None
            assert taken <= bound


@pytest.mark.parametrize("name", measured.NAMES)
def test_layers_on_the_primary_add_to_its_own_compute_and_end_pipelining(name: str) -> None:
    model = measured.model(name)
    (run,) = [run for run in measured.runs(name) if run.layers_on_host]
    assert not run.pipelining
    bound = host_compute_bytes(model, run.params, run.pipelining, run.layers_on_host)
    taken = run.host.compute_real_bytes or run.host.compute_bytes
    assert taken <= bound <= taken * 1.15 + 64 * MIB
    device = run.devices[0]
    bound = compute_bytes(
        model,
        run.params,
        n_devices_listed=2,
        is_first=True,
        is_last_with_output=False,
        pipelining=run.pipelining,
        layers=device.layers,
    )
    taken = device.compute_real_bytes or device.compute_bytes
    assert taken <= bound <= taken * 1.15 + 64 * MIB


def test_b1_02_three_to_one_is_layers_not_memory() -> None:
    """B1-02: shares 3,1 of 31 units put 24 layers here and 6 with the output there, 50.73 and 41.37 MiB."""
    model = measured.model("smol-header-only")
    params = ContextParams(n_ctx=512)
    first, last = tuple(range(24)), tuple(range(24, 30))
    assert weights(model, first) == 24 * 2216448
    assert weights(model, last, output=True) == 6 * 2216448 + 30081024 + 2304
    assert [round(weights(model, first) / MIB, 2), round(weights(model, last, True) / MIB, 2)] == [50.73, 41.37]
    assert [context(model, first, params) / MIB, context(model, last, params) / MIB] == [9.0, 2.25]
    assert round(model.input_bytes / MIB, 2) == 28.69


@pytest.mark.parametrize(
    ("what", "model", "n_ctx", "gib"),
    [
        # 62 layers, every sixth global, 16 heads of 128, window 1024
        (
            "gemma-3 27B",
            uniform(10, Cache(2048, 2048), (Layer(1, 1, (Cache(2048, 2048, 1024),)),) * 52),
            131072,
            10.4,
        ),
        # 64 layers, every fourth attends, 4 heads of 256; the others keep a small state
        ("Qwen3.5 27B", uniform(16, Cache(1024, 1024), (Layer(1, 1, (), 3244032),) * 48), 262144, 16.0),
        # latent attention: 61 layers, keys of 576 only
        ("DeepSeek-V3.1", uniform(61, Cache(576, 0)), 163840, 10.7),
        ("Kimi-K2.5", uniform(61, Cache(576, 0)), 262144, 17.2),
        # heads of 128 although 1024 / 16 is 64
        ("Qwen3-0.6B", uniform(28, Cache(1024, 1024)), 40960, 4.4),
    ],
)
def test_b7_06_no_single_formula(what: str, model: Model, n_ctx: int, gib: float) -> None:
    """B7-06: sliding window, hybrid, latent attention and explicit head sizes, each within 10 % of the true cache."""
    assert total_context(model, ContextParams(n_ctx=n_ctx)) / GIB == pytest.approx(gib, rel=0.10), what


def test_b7_07_sliding_window_layers_do_not_grow_with_the_context() -> None:
    """B7-07: 25 of 30 layers with a window of 1024 (Gemma 4 26B-A4B), at 4k, 8k, 32k and 128k."""
    local = Layer(1, 1, (Cache(2048, 2048, 1024),))
    model = uniform(5, Cache(1024, 1024), (local,) * 25)
    for n_ctx, gigabytes in ((4096, 0.40), (8192, 0.48), (32768, 0.99), (131072, 3.00)):
        found = total_context(model, ContextParams(n_ctx=n_ctx)) / 1e9
        assert found == pytest.approx(gigabytes, rel=0.02), n_ctx


def test_b7_10_swa_full_gives_window_layers_the_whole_context() -> None:
    """B7-10: --swa-full switches gpt-oss-20b to full-size caches."""
    model = measured.model("gpt-oss-20b")
    small = ContextParams(n_ctx=8192, n_parallel=32, kv_unified=True)
    full = replace(small, swa_full=True)
    assert total_context(model, full) == 24 * 8192 * (512 + 512) * 2
    window = 32 * 128 + 512
    assert total_context(model, small) == 12 * (8192 + window) * (512 + 512) * 2
    (run,) = [run for run in measured.runs("gpt-oss-20b") if run.params.swa_full]
    assert total_context(model, run.params) == sum(device.context_bytes for device in run.devices)


def test_b7_13_different_cache_types_are_refused_with_the_remedy() -> None:
    """B7-13: -ctk q4_0 alone crashes GPU workers; latent attention refuses it everywhere."""
    dense = measured.model("llama-8b-q4km")
    mixed = ContextParams(n_ctx=4096, type_k="q4_0")
    with pytest.raises(MemoryParamsError, match="set type_v to 'q4_0'"):
        check_cache_types(dense, mixed)
    check_cache_types(dense, mixed, fa_all_quants=True)
    check_cache_types(dense, replace(mixed, type_v="q4_0"))
    check_cache_types(dense, ContextParams(n_ctx=4096, type_k="bf16"))
    latent = measured.model("deepseek2-lite")
    for wrong in (mixed, ContextParams(n_ctx=4096, type_k="bf16")):
        with pytest.raises(MemoryParamsError, match="caches K only"):
            check_cache_types(latent, wrong, fa_all_quants=True)


def test_a_quantised_v_cache_requires_flash_attention() -> None:
    """B7-13, second half."""
    with pytest.raises(MemoryParamsError, match="requires flash attention"):
        ContextParams(n_ctx=4096, type_k="q8_0", type_v="q8_0", flash_attn="off")
    ContextParams(n_ctx=4096, type_k="q8_0", type_v="f16", flash_attn="off")


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_ctx": 0},
        {"n_ctx": -1},
        {"n_ctx": True},
        {"n_ctx": "4096"},
        {"n_parallel": 0},
        {"n_parallel": 257},
        {"n_batch": 0},
        {"n_ubatch": 0},
        {"type_k": "q3_K"},
        {"type_v": ""},
        {"flash_attn": "yes"},
        {"kv_unified": "false"},
        {"swa_full": 1},
        {"n_ctx": 2, "n_parallel": 4, "kv_unified": False},
    ],
)
def test_impossible_parameters_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(MemoryParamsError, match=next(iter(wrong))):
        ContextParams(**{"n_ctx": 4096, **wrong})


def test_rows_of_every_cache_type() -> None:
    assert {name: row_bytes(name, 64) for name in CACHE_TYPES} == {
        "f32": 256,
        "f16": 128,
        "bf16": 128,
        "q8_0": 68,
        "q4_0": 36,
        "q4_1": 40,
        "iq4_nl": 36,
        "q5_0": 44,
        "q5_1": 48,
    }
    with pytest.raises(MemoryParamsError, match="no multiple of the 32"):
        row_bytes("q8_0", 80)
    with pytest.raises(MemoryParamsError, match="unknown"):
        row_bytes("q9", 64)


def test_cells_follow_padding_slots_and_window() -> None:
    full, window = Cache(64, 64), Cache(64, 64, 1000)
    assert cache_cells(full, ContextParams(n_ctx=3000)) == 3072
    assert cache_cells(full, ContextParams(n_ctx=3000, n_parallel=2, kv_unified=False)) == 1536
    assert cache_cells(window, ContextParams(n_ctx=8192)) == 1536  # 1000 + 512, padded
    assert cache_cells(window, ContextParams(n_ctx=8192, n_parallel=4)) == 4608  # one window per slot
    assert cache_cells(window, ContextParams(n_ctx=8192, n_parallel=4, kv_unified=False)) == 1536
    assert cache_cells(window, ContextParams(n_ctx=300)) == 512  # never more than the context
    assert cache_cells(window, ContextParams(n_ctx=8192, n_batch=256)) == 1280  # a batch limits the micro batch


def test_compressed_caches_keep_one_stream_per_slot() -> None:
    model = uniform(1, Cache(512, 0, None, 4, True))
    unified = ContextParams(n_ctx=8192, n_parallel=4)
    assert total_context(model, unified) == 4 * 2048 * 512 * 2
    assert total_context(model, replace(unified, kv_unified=False)) == 4 * 512 * 512 * 2


def test_without_flash_attention_every_v_row_is_as_wide_as_the_widest() -> None:
    model = uniform(1, Cache(64, 64), (Layer(1, 1, (Cache(64, 128),)),))
    assert total_context(model, ContextParams(n_ctx=256)) == 256 * 2 * (64 + 64 + 64 + 128)
    assert total_context(model, ContextParams(n_ctx=256, flash_attn="off")) == 256 * 2 * (64 + 128 + 64 + 128)


def test_a_layer_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(MemoryParamsError, match="layer 30 does not exist"):
        layer_context_bytes(measured.model("smol-header-only"), 30, ContextParams(n_ctx=512))


def test_the_output_buffer_holds_the_logits_of_the_slots() -> None:
    """0.75 MiB with 4 slots, 0.19 with one, as llama-server logged."""
    model = measured.model("smol-header-only")
    assert output_buffer_bytes(model, ContextParams(n_ctx=512, n_parallel=4)) == 49152 * 4 * 4
    assert output_buffer_bytes(model, ContextParams(n_ctx=512)) == 49152 * 4
