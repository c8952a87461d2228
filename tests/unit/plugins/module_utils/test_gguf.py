# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The GGUF reader: agrees with the reference package, and answers hostile headers fast, small and with reasons."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._gguf import (
    TENSOR_TYPES,
    FileSource,
    GgufError,
    Header,
    read_header,
    read_model,
    read_model_url,
    resolve_shards,
    shard_names,
)
from ansible_collections.llamafleet.rpc.tests.unit.web import Server, serve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 98362432\n"


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def head(n_tensors: int, n_pairs: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_pairs)


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(dims)}q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def write(path: Path, tokens: int = 300, extra: Callable[[gguf.GGUFWriter], None] | None = None) -> Path:
    """A small model, written by the reference package."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_context_length(2048)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_array("llama.attention.head_count_kv", [2, 1])
    writer.add_array("llama.attention.sliding_window_pattern", [True, False])
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_string("general.name", "tiny é")
    writer.add_token_list([f"token{number}" for number in range(tokens)])
    writer.add_token_scores([0.5] * tokens)
    writer.add_int64("llama.some.negative", -5)
    if extra:
        extra(writer)
    writer.add_tensor("token_embd.weight", np.zeros((tokens, 64), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.zeros((64,), dtype=np.float32))
    for layer in range(2):
        writer.add_tensor(f"blk.{layer}.attn_q.weight", np.zeros((64, 64), dtype=np.float16))
        raw = np.zeros((96, 34 * 2), dtype=np.uint8)
        writer.add_tensor(f"blk.{layer}.ffn_up.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "small.gguf")


def header_of(data: bytes, path: Path) -> Header:
    path.write_bytes(data)
    return read_model(str(path))


def same_as_reference(path: Path) -> None:
    ours = read_model(str(path))
    reference = gguf.GGUFReader(str(path))
    assert [(item.name, list(item.dims), item.type, item.nbytes) for item in ours.tensors] == [
        (item.name, [int(size) for size in item.shape], item.tensor_type.name, item.n_bytes)
        for item in reference.tensors
    ]
    assert ours.file_bytes == path.stat().st_size
    for key, field in reference.fields.items():
        if key.startswith("GGUF."):
            continue
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            assert ours.array_lengths[key] == len(field.data)
            if key in ours.metadata:
                assert ours.metadata[key] == tuple(field.contents())
        elif key in ours.metadata:
            assert ours.metadata[key] == field.contents()
        else:
            assert len(field.contents()) > 1024


# -- agreement with the reference --------------------------------------------------------------------------------


def test_reads_what_the_reference_wrote(small: Path) -> None:
    same_as_reference(small)
    header = read_model(str(small))
    assert header.metadata["general.name"] == "tiny é"
    assert header.metadata["llama.attention.head_count_kv"] == (2, 1)
    assert header.metadata["llama.attention.sliding_window_pattern"] == (True, False)
    assert header.metadata["llama.some.negative"] == -5
    assert header.array_lengths["tokenizer.ggml.tokens"] == 300
    assert "tokenizer.ggml.tokens" not in header.metadata
    assert header.path == str(small)
    assert header.shards == (str(small),)


@pytest.mark.parametrize("tokens", [1, 5, 20000])
def test_array_lengths_do_not_depend_on_the_buffer(tmp_path: Path, tokens: int) -> None:
    same_as_reference(write(tmp_path / "m.gguf", tokens))


def test_an_own_alignment_is_respected(tmp_path: Path) -> None:
    def align(writer: gguf.GGUFWriter) -> None:
        writer.add_custom_alignment(256)

    same_as_reference(write(tmp_path / "m.gguf", extra=align))


def test_the_table_of_types_is_the_reference_one() -> None:
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        ours = TENSOR_TYPES[kind.value]
        if kind == gguf.GGMLQuantizationType.Q8_1:
            size = 36  # noqa: PLW2901 - the package still has the 40 bytes of before; ggml-common.h of b11434 has 36
        assert (ours.name, ours.block, ours.size) == (kind.name, block, size)


@pytest.mark.real
def test_the_real_model_reads_as_by_the_reference(demo_model: Path) -> None:
    same_as_reference(demo_model)


# -- files that are no model (B7-03) -----------------------------------------------------------------------------


def test_b7_03_each_broken_download_has_its_own_message(small: Path, tmp_path: Path) -> None:
    """B7-03: truncated file, HTML error page, LFS pointer, empty file, something else: five different messages."""
    whole = small.read_bytes()
    messages = {}
    for what, data, expected in (
        ("truncated", whole[: len(whole) // 2], r"ends at byte \d+ but tensor '.+' needs \d+: download is incomplete"),
        ("html", b"<!DOCTYPE html><html><body>Sign in</body></html>", "HTML page"),
        ("html, lower case", b"\n <html>", "HTML page"),
        ("lfs", LFS, "git LFS pointer"),
        ("empty", b"", "is empty"),
        ("zip", b"PK\x03\x04" + bytes(100), "not a GGUF file"),
    ):
        with pytest.raises(GgufError, match=expected) as caught:
            header_of(data, tmp_path / "m.gguf")
        messages[what.partition(",")[0]] = str(caught.value)
    assert len(set(messages.values())) == 5


def test_a_file_that_ends_one_byte_early_is_incomplete(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    needed = max(item.data_offset + item.n_bytes for item in gguf.GGUFReader(str(small)).tensors)
    assert header_of(whole[:needed], tmp_path / "m.gguf").tensors
    with pytest.raises(GgufError, match=f"ends at byte {needed - 1} but tensor 'blk.1.ffn_up.weight' needs {needed}"):
        header_of(whole[: needed - 1], tmp_path / "m.gguf")


def test_a_file_that_ends_within_its_header_is_incomplete(small: Path, tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=r"ends at byte 700 but its header needs byte \d+ .*download is incomplete"):
        header_of(small.read_bytes()[:700], tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(40), "big-endian"),
        (head(0, 0, version=1), "version 1"),
        (head(0, 0, version=4), "version 4"),
        (b"GG", "not a GGUF file"),
        (b"GGUF", "header needs byte 8"),
        (head(0, 1) + pair("k", 77, bytes(8)), "unknown type 77"),
        (head(0, 1) + pair("k", 9, struct.pack("<IQ", 9, 1)) + bytes(20), "array of unknown type 9"),
        (head(0, 2) + pair("k", 4, bytes(4)) * 2, "the key 'k' again"),
        (head(0, 1) + pair("", 4, bytes(4)), "no key"),
        (head(0, 1) + pair("general.alignment", 4, struct.pack("<I", 48)), "not a power of 2"),
        (head(1, 0) + tensor("t", (1,) * 5, 0, 0), "5 dimensions"),
        (head(1, 0) + tensor("t", (-1,), 0, 0), "shape"),
        (head(1, 0) + tensor("t", (1 << 40, 1 << 40), 0, 0), "too large"),
        (head(1, 0) + tensor("t", (32,), 4, 0), "unknown type 4"),
        (head(1, 0) + tensor("t", (33,), 8, 0), "no multiple of the 32"),
        (head(1, 0) + tensor("t", (1,), 0, 64), "offset 64, expected 0"),
        (head(1, 0) + tensor("x" * 64, (1,), 0, 0), "64 bytes"),
        (head(1, 0) + tensor("", (1,), 0, 0) + bytes(64), "no name"),
        (head(2, 0) + tensor("t", (1,), 0, 0) + tensor("t", (1,), 0, 32) + bytes(99), "the name 't' again"),
    ],
)
def test_a_corrupt_header_says_what_is_wrong(data: bytes, expected: str, tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=expected):
        header_of(data, tmp_path / "m.gguf")


def test_places_that_are_no_file(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="cannot be read: No such file"):
        read_model(str(tmp_path / "none.gguf"))
    with pytest.raises(GgufError, match="cannot be read"):
        read_model(str(tmp_path))


# -- hostile headers ---------------------------------------------------------------------------------------------

HUGE = 1 << 60


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(head(HUGE, 0), id="tensors"),
        pytest.param(head(0, HUGE), id="metadata entries"),
        pytest.param(head(0, 1) + struct.pack("<Q", HUGE), id="key length"),
        pytest.param(head(0, 1) + pair("k", 8, struct.pack("<Q", HUGE)), id="string length"),
        pytest.param(head(0, 1) + pair("k", 8, struct.pack("<Q", (1 << 64) - 1)), id="string length at the limit"),
        pytest.param(head(0, 1) + pair("k", 9, struct.pack("<IQ", 8, HUGE)), id="array of strings"),
        pytest.param(head(0, 1) + pair("k", 9, struct.pack("<IQ", 4, HUGE)), id="array of numbers"),
        pytest.param(
            head(0, 1) + pair("k", 9, struct.pack("<IQQ", 8, 3, HUGE)), id="length of a string within an array"
        ),
        pytest.param(head(1, 0) + struct.pack("<Q", HUGE), id="tensor name length"),
        pytest.param(head(1, 0) + tensor("t", (1 << 58,), 0, 0), id="tensor size"),
        pytest.param(head(1 << 20, 0), id="tensors of no bytes"),
        pytest.param(head(0, 1) + pair("k", 9, struct.pack("<IQ", 8, 1 << 33)), id="array of empty strings"),
        pytest.param(head(0, 1) + pair("k", 9, struct.pack("<IQ", 8, 1 << 24)), id="fewer empty strings"),
        pytest.param(head(0, 1 << 15), id="entries without a key"),
    ],
)
@pytest.mark.parametrize("size", [0, 1 << 40], ids=["short", "sparse"])
def test_claimed_counts_cost_neither_time_nor_memory(data: bytes, size: int, tmp_path: Path) -> None:
    """Within a second and a few MiB, also when a sparse file of 1 TiB makes every claim plausible."""
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.write(data)
        file.truncate(max(size, len(data) + 64))
    tracemalloc.start()
    started = time.process_time()
    with pytest.raises(GgufError):
        read_model(str(path))
    elapsed = time.process_time() - started
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert elapsed < 1.0
    assert peak < 4 << 20


def test_a_header_that_leads_far_away_is_not_followed(tmp_path: Path) -> None:
    """Over HTTP without ranges every byte on the way would be downloaded."""
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.write(head(0, 2) + pair("k", 8, struct.pack("<Q", 300 << 20)))
        file.truncate(1 << 30)
    with serve(Server(tmp_path, ranges=False)) as server, pytest.raises(GgufError, match="no header is longer"):
        read_model_url(server.url("m.gguf"), timeout=10)
    assert server.sent < 16 << 20


def test_many_strings_are_bounded(tmp_path: Path) -> None:
    """The most strings that are let through take less than a second to step over."""
    count = 1 << 21
    data = head(0, 1) + pair("k", 9, struct.pack("<IQ", 8, count)) + bytes(8 * count)
    started = time.process_time()
    assert header_of(data, tmp_path / "m.gguf").array_lengths == {"k": count}
    assert time.process_time() - started < 2.0  # 0.7 s on an idle core


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    cut=st.integers(0, 4000),
    edits=st.lists(st.tuples(st.integers(0, 4000), st.binary(min_size=1, max_size=8)), max_size=4),
)
def test_mutated_headers_fail_only_with_reasons(
    small: Path, tmp_path: Path, cut: int, edits: list[tuple[int, bytes]]
) -> None:
    data = bytearray(small.read_bytes())
    for place, value in edits:
        data[place : place + len(value)] = value
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(data[: len(data) - cut]))
    tracemalloc.start()
    message = str(path)
    try:
        header = read_model(str(path))
    except GgufError as error:
        message = str(error)
    else:
        assert all(item.nbytes <= header.file_bytes for item in header.tensors)
    assert str(path) in message
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


# -- shards ------------------------------------------------------------------------------------------------------


def write_shards(directory: Path, total: int = 3, **claims: int) -> list[Path]:
    paths = []
    for number in range(total):
        path = directory / f"m-{number + 1:05d}-of-{total:05d}.gguf"
        writer = gguf.GGUFWriter(str(path), "llama")
        if number == 0:
            writer.add_block_count(total)
        writer.add_uint16("split.no", claims.get(f"no{number}", number))
        writer.add_uint16("split.count", claims.get("count", total))
        writer.add_int32("split.tensors.count", claims.get("tensors", total))
        writer.add_tensor(f"blk.{claims.get('same', number)}.w.weight", np.zeros((64,), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


def test_any_shard_leads_to_the_whole_set_and_to_shard_one(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    for given_path in paths:
        header = read_model(str(given_path))
        assert header.path == str(paths[0])
        assert header.shards == tuple(str(path) for path in paths)
        assert header.file_bytes == sum(path.stat().st_size for path in paths)
        assert [item.name for item in header.tensors] == ["blk.0.w.weight", "blk.1.w.weight", "blk.2.w.weight"]
        assert header.metadata["llama.block_count"] == 3


def test_b7_01_an_incomplete_set_names_the_missing_shard(tmp_path: Path) -> None:
    """B7-01: the set is expanded from the name and checked before anything is fetched."""
    there = ["m-00001-of-00003.gguf", "m-00003-of-00003.gguf"]
    with pytest.raises(GgufError, match=r"incomplete, missing 2 \(m-00002-of-00003.gguf\)"):
        resolve_shards(there[0], there)
    paths = write_shards(tmp_path)
    paths[1].unlink()
    with pytest.raises(GgufError, match="missing 2"):
        read_model(str(paths[2]))
    assert shard_names("m-00002-of-00003.gguf") == (
        "m-00001-of-00003.gguf",
        "m-00002-of-00003.gguf",
        "m-00003-of-00003.gguf",
    )
    assert shard_names("best-of-breed.gguf") == ("best-of-breed.gguf",)
    assert shard_names("m-1-of-3.gguf") == ("m-1-of-3.gguf",)
    for wrong in ("m-00000-of-00003.gguf", "m-00004-of-00003.gguf", "m-00000-of-00000.gguf"):
        with pytest.raises(GgufError, match="counted from 1"):
            shard_names(wrong)


def test_b7_02_the_order_of_the_listing_does_not_matter() -> None:
    """B7-02: llama.cpp must be given shard 1."""
    listing = ["GLM-4.5-Air-Q4_K_M-00002-of-00002.gguf", "other.gguf", "GLM-4.5-Air-Q4_K_M-00001-of-00002.gguf"]
    for name in (listing[0], listing[2]):
        assert resolve_shards(name, listing)[0] == listing[2]


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ({"count": 2}, "one of 2 shards, its name says 3"),
        ({"no1": 2}, "holds shard 2 .* its name says 1"),
        ({"tensors": 7}, "has 3 tensors but claims 7"),
        ({"same": 0}, "is in two shards"),
    ],
)
def test_shards_of_different_sets_are_refused(claims: dict[str, int], expected: str, tmp_path: Path) -> None:
    paths = write_shards(tmp_path, **claims)
    with pytest.raises(GgufError, match=expected):
        read_model(str(paths[0]))


def test_a_renamed_shard_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(GgufError, match="one of 3 shards, its name says 1"):
        read_model(str(tmp_path / "model.gguf"))


# -- over HTTP ---------------------------------------------------------------------------------------------------


def large(path: Path, tokens: int = 100000) -> Path:
    """A model whose header is longer than the first range and whose data are much longer than its header."""
    write(path, tokens)
    writer_end = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(writer_end + (64 << 20))
    return path


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "no ranges"])
def test_a_url_reads_as_the_file_and_fetches_the_header_only(tmp_path: Path, ranges: bool) -> None:
    path = large(tmp_path / "m.gguf")
    with serve(Server(tmp_path, ranges=ranges)) as server:
        header = read_model_url(server.url("m.gguf?token=s3cret"), timeout=10)
        assert server.requests > 1 if ranges else server.requests == 1
    local = read_model(str(path))
    assert (header.metadata, header.tensors, header.file_bytes) == (local.metadata, local.tensors, local.file_bytes)
    assert server.sent < path.stat().st_size / 4
    assert header.path == server.url("m.gguf")  # without the query


def test_shards_are_found_over_http(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    with serve(Server(tmp_path, ranges=True)) as server:
        header = read_model_url(server.url(paths[1].name), timeout=10)
        assert header.shards == tuple(server.url(path.name) for path in paths)
        assert header.path == server.url(paths[0].name)
        paths[1].unlink()
        with pytest.raises(GgufError, match="shard 2 of 3 is missing on the server"):
            read_model_url(server.url(paths[2].name), timeout=10)


def test_what_a_server_may_answer_instead(tmp_path: Path, small: Path) -> None:
    (tmp_path / "page.gguf").write_bytes(b"<!DOCTYPE html><html>Not here</html>")
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "cut.gguf").write_bytes(small.read_bytes()[:-3000])
    with serve(Server(tmp_path, ranges=True)) as server:
        for name, expected in (
            ("none.gguf", "answered 404"),
            ("page.gguf", "HTML page"),
            ("empty.gguf", "is empty"),
            ("cut.gguf", "download is incomplete"),
        ):
            with pytest.raises(GgufError, match=expected):
                read_model_url(server.url(name), timeout=10)


def test_a_server_without_ranges_and_length_is_refused(tmp_path: Path) -> None:
    large(tmp_path / "m.gguf", 10)
    with serve(Server(tmp_path, ranges=False, length=False)) as server, pytest.raises(GgufError, match="neither"):
        read_model_url(server.url("m.gguf"), timeout=10)


def test_a_trickling_server_is_given_up_in_time(tmp_path: Path) -> None:
    large(tmp_path / "m.gguf")
    started = time.monotonic()
    with serve(Server(tmp_path, ranges=True, pause=0.3)) as server, pytest.raises(GgufError, match=r"within 0\.5 s"):
        read_model_url(server.url("m.gguf"), timeout=0.5)
    assert time.monotonic() - started < 5


def test_b7_04_a_hub_that_redirects_gets_the_token_and_its_store_does_not(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    with serve(Server(tmp_path, ranges=True)) as store:
        hub = Server(tmp_path, ranges=True, store=store.url(""), token="s3cret")
        with serve(hub):
            url = hub.url("owner/repo/resolve/main/" + paths[1].name)
            header = read_model_url(url, timeout=10, token="s3cret")
            with pytest.raises(GgufError, match=r"answered 401 .*give one that may read") as caught:
                read_model_url(url, timeout=10, token="0ther")
    assert [tensor.name for tensor in header.tensors] == [tensor.name for tensor in read_model(str(paths[0])).tensors]
    assert store.seen and set(store.seen) == {None}
    assert "0ther" not in str(caught.value)


def test_a_renamed_repository_on_the_same_server_still_gets_the_token(tmp_path: Path, small: Path) -> None:
    server = Server(small.parent, ranges=True, token="s3cret")
    with serve(server):
        server.store = server.url("new/")
        with pytest.raises(GgufError, match="answered 30"):  # round and round, but asked with the token each time
            read_model_url(server.url("old/m.gguf"), timeout=10, token="s3cret")
    assert len(server.seen) > 1
    assert set(server.seen) == {"Bearer s3cret"}


def test_a_token_is_not_sent_in_clear() -> None:
    with pytest.raises(GgufError, match="a token is sent over https only") as caught:
        read_model_url("http://192.0.2.1/m.gguf", token="s3cret")
    assert "s3cret" not in str(caught.value)


def test_a_redirect_leads_to_the_web_only(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for store in (f"file://{tmp_path}/", "ftp://127.0.0.1/"):
        with (
            serve(Server(tmp_path, ranges=True, store=store)) as server,
            pytest.raises(GgufError, match=r"answered 302|unknown url type: ftp"),
        ):
            read_model_url(server.url("m.gguf"), timeout=10)


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "no ranges"])
def test_a_server_that_compresses_is_refused(tmp_path: Path, ranges: bool) -> None:
    large(tmp_path / "m.gguf", 10)
    with (
        serve(Server(tmp_path, ranges=ranges, coding="gzip")) as server,
        pytest.raises(GgufError, match=r"sends it compressed \(gzip\)"),
    ):
        read_model_url(server.url("m.gguf"), timeout=10)


def test_answers_that_end_early_are_asked_for_again_but_not_for_ever(tmp_path: Path) -> None:
    path = large(tmp_path / "m.gguf")
    with serve(Server(tmp_path, ranges=True, cut=400_000)) as server:
        assert read_model_url(server.url("m.gguf"), timeout=10).tensors == read_model(str(path)).tensors
        assert server.requests < 20
    with serve(Server(tmp_path, ranges=True, cut=1000)) as server, pytest.raises(GgufError, match="end early"):
        read_model_url(server.url("m.gguf"), timeout=10)


def test_a_server_that_is_not_there_is_named_without_secrets() -> None:
    with pytest.raises(GgufError, match=r"http://127\.0\.0\.1:9/m\.gguf: cannot be fetched") as caught:
        read_model_url("http://me:pass@127.0.0.1:9/m.gguf?token=s3cret", timeout=2)
    assert "s3cret" not in str(caught.value)
    assert "pass" not in str(caught.value)
    for wrong in ("ftp://127.0.0.1/m.gguf", "file:///etc/passwd", "m.gguf"):
        with pytest.raises(GgufError, match="not an http or https URL"):
            read_model_url(wrong)


def test_a_source_is_closed_after_use(small: Path) -> None:
    with FileSource(str(small)) as source:
        assert read_header(source).tensors
    with pytest.raises(ValueError, match="closed"):
        source.read_at(0, 1)
