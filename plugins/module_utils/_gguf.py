# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads the header of a GGUF model: metadata and the table of tensors, never a weight.

Sources are a file, a set of shards, or the same over HTTP byte ranges. Headers are hostile until proven
otherwise: nothing is allocated by a claimed count, every length is checked against the bytes that are
really there, and whatever is wrong ends in a GgufError that says where and what to do.
"""

from __future__ import annotations

import http.client
import os
import re
import stat
import struct
import time
import urllib.error
import urllib.parse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, NamedTuple, Protocol, Union

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._http import (
    is_web,
    may_carry_token,
    redacted,
    send,
    why_refused,
)

MetaValue = Union[int, float, bool, str, tuple[Union[int, float, bool], ...]]


class GgufError(FleetError):
    """The file is not a GGUF model this collection can read; the message names file, place and remedy."""


class TensorType(NamedTuple):
    """Storage of one ggml type: ``block`` elements take ``size`` bytes."""

    name: str
    block: int
    size: int


# Type ids, block sizes and bytes of a block of llama.cpp b11434 (ggml.h, ggml.c, ggml-common.h). Ids that are
# missing (4, 5, 31-33, 36-38) were removed from the format.
TENSOR_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 36),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
    42: TensorType("Q2_0", 64, 18),
}

# Limits that no real model comes near; they bound the time and memory a hostile header can cost.
_MAX_PAIRS = 1 << 16
_MAX_TENSORS = 1 << 16
_MAX_STRINGS = 1 << 21  # all string arrays together; gemma 3: 262 144 tokens + 514 906 merges
_MAX_HEADER = 1 << 28
_KEEP_STRING = 1024  # longer strings (chat templates, tokenizer files) are skipped
_KEEP_ARRAY = 1024  # longer arrays are skipped; llama.cpp knows at most 512 layers
_KEEP_TOTAL = 4 << 20
_MAX_NAME = 64  # GGML_MAX_NAME, with its closing zero
_MAX_DIMS = 4
_FILE_BLOCK = 1 << 18
_HTTP_BLOCK = 1 << 20
_CUT_SHORT = 16  # answers that end early before a server is given up; a header takes one to some dozens of answers
_INT64_MAX = (1 << 63) - 1

_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING = 8
_ARRAY = 9
_U32 = _SCALARS[4]
_U64 = _SCALARS[10]
_I64 = _SCALARS[11]

_SHARD = re.compile(r"(?P<base>.+)-(?P<index>[0-9]{5})-of-(?P<total>[0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class Tensor:
    """One tensor: ``dims`` in ggml order (row length first), ``nbytes`` in the file, unpadded."""

    name: str
    dims: tuple[int, ...]
    type: str
    nbytes: int


@dataclass(frozen=True)
class Header:
    """Header of a whole model (all its shards).

    ``path`` is what llama.cpp must be given (shard 1); ``metadata`` holds scalars, short strings and short
    numeric arrays of shard 1; ``array_lengths`` the length of every array, kept or skipped; ``file_bytes``
    the bytes of all shards together; ``data_start`` the byte of shard 1 at which its tensors begin.
    """

    path: str
    version: int
    metadata: dict[str, MetaValue]
    array_lengths: dict[str, int]
    tensors: tuple[Tensor, ...]
    file_bytes: int
    shards: tuple[str, ...]
    data_start: int = 0


class ByteSource(Protocol):
    """Random access to bytes; ``label`` names the source in messages."""

    @property
    def label(self) -> str:
        """Name of the source, fit for a message."""

    @property
    def size(self) -> int:
        """Length in bytes."""

    @property
    def block(self) -> int:
        """Bytes worth fetching at a time."""

    def read_at(self, offset: int, count: int) -> bytes:
        """Return ``count`` bytes from ``offset``; fewer only at the end of the data."""


class FileSource:
    """A regular local file, a context manager."""

    block = _FILE_BLOCK

    def __init__(self, path: str) -> None:
        self.label = path
        try:
            self._file: BinaryIO = open(path, "rb")  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise GgufError(f"{path}: cannot be read: {error.strerror}; check the path and its permissions") from error
        status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode):
            self._file.close()
            raise GgufError(f"{path}: is not a regular file; name the .gguf file itself")
        self.size = status.st_size

    def __enter__(self) -> FileSource:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def read_at(self, offset: int, count: int) -> bytes:
        """See ByteSource."""
        try:
            self._file.seek(offset)
            return self._file.read(count)
        except OSError as error:
            raise GgufError(f"{self.label}: reading byte {offset} failed: {error.strerror}") from error


class NotFoundError(GgufError):
    """The URL answered 404 or 410."""


class HttpSource:
    """A file behind an HTTP server, read by byte ranges; a context manager.

    A server that ignores ``Range`` is read forward only as far as asked, then hung up on. An answer that ends early is
    asked for again from where it ended, a few times. ``timeout`` (seconds) bounds each request as a whole, so a server
    that trickles cannot hold the caller. Credentials and query strings of the URL never get into a message, and
    ``token`` goes nowhere but to the server of the URL.
    """

    block = _HTTP_BLOCK

    def __init__(self, url: str, timeout: float = 30.0, token: str = "") -> None:
        if not is_web(url):
            raise GgufError(f"{redacted(url)}: is not an http or https URL; give one, or use a path for a local file")
        self.label = redacted(url)
        if token and not may_carry_token(url):
            raise GgufError(f"{self.label}: a token is sent over https only; use the https address, or give no token")
        self._url = url
        self._token = token
        self._cut_short = 0
        self._timeout = timeout
        self._stream: http.client.HTTPResponse | None = None
        self._stream_at = 0
        self._window = b""
        self._window_at = 0
        self.size = self._open()

    def __enter__(self) -> HttpSource:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._stream is not None:
            self._stream.close()

    def read_at(self, offset: int, count: int) -> bytes:
        """See ByteSource; only forward (and within the last block) when the server ignores ``Range``."""
        count = min(count, self.size - offset)
        if count <= 0:
            return b""
        inside = offset - self._window_at
        if inside >= 0 and inside + count <= len(self._window):
            return self._window[inside : inside + count]
        if self._stream is not None:
            return self._forward(offset, count)
        got = b""
        while len(got) < count:
            piece = self._range(offset + len(got), count - len(got))
            got += piece
            if len(got) < count:
                self._cut_short += 1
            if not piece or self._cut_short > _CUT_SHORT:
                raise GgufError(
                    f"{self.label}: the server's answers end early, the last one at byte {offset + len(got)}; try again"
                )
        return got

    def _open(self) -> int:
        """First request: learns the size, and whether the server honours ranges; returns the size in bytes."""
        until = time.monotonic() + self._timeout
        try:
            response = self._request(0, self.block)
        except urllib.error.HTTPError as error:
            if error.code == 416:  # nothing at byte 0: the file is empty
                return 0
            raise self._failure(error) from error
        coding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            response.close()
            raise GgufError(
                f"{self.label}: the server sends it compressed ({coding[:20]}) although that was not asked for, so byte"
                " positions mean nothing; switch that off for .gguf there, or download the file and use path"
            )
        if response.status == 206:
            with response:
                total = self._content_range(response, 0)
                self._window = self._drain(response, self.block, until)
            return total
        length = response.headers.get("Content-Length")
        if length is None or not length.isdigit():
            response.close()
            raise GgufError(
                f"{self.label}: the server neither honours byte ranges nor tells the size;"
                " download the file and use path"
            )
        self._stream = response
        return int(length)

    def _range(self, offset: int, count: int) -> bytes:
        until = time.monotonic() + self._timeout
        try:
            response = self._request(offset, count)
        except urllib.error.HTTPError as error:
            raise self._failure(error) from error
        with response:
            if response.status != 206 or self._content_range(response, offset) != self.size:
                raise GgufError(
                    f"{self.label}: changed while it was read, or the server dropped byte ranges; try again"
                )
            return self._drain(response, count, until)

    def _forward(self, offset: int, count: int) -> bytes:
        stream = self._stream
        if stream is None or offset < self._window_at:
            raise GgufError(f"{self.label}: the server ignores byte ranges; download the file and use path")
        until = time.monotonic() + self._timeout
        while True:
            inside = offset - self._window_at
            if inside + count <= len(self._window):
                return self._window[inside : inside + count]
            if inside > 0:  # forget what lies behind, so that memory stays at a block
                self._window = self._window[inside:]
                self._window_at += min(inside, self._stream_at - self._window_at)
            piece = self._drain(stream, min(1 << 16, self.size - self._stream_at), until)
            if not piece:
                raise GgufError(f"{self.label}: the server hung up at byte {self._stream_at}; try again")
            self._stream_at += len(piece)
            self._window += piece

    def _request(self, offset: int, count: int) -> http.client.HTTPResponse:
        headers = {"Range": f"bytes={offset}-{offset + count - 1}", "Accept-Encoding": "identity"}
        try:
            return send(self._url, headers, self._token, timeout=self._timeout)
        except urllib.error.HTTPError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise GgufError(f"{self.label}: cannot be fetched: {reason}; check the URL and the network") from error

    def _failure(self, error: urllib.error.HTTPError) -> GgufError:
        error.close()
        remedy = why_refused(error.code) or "try again later"
        text = f"{self.label}: the server answered {error.code} {error.reason}; {remedy}"
        return NotFoundError(text) if error.code in (404, 410) else GgufError(text)

    def _content_range(self, response: http.client.HTTPResponse, offset: int) -> int:
        value = response.headers.get("Content-Range", "")
        match = re.match(r"^bytes ([0-9]+)-([0-9]+)/([0-9]+)$", value.strip())
        if not match or int(match.group(1)) != offset:
            raise GgufError(
                f"{self.label}: the server answered the range from byte {offset} with '{value[:80]}';"
                " download the file and use path"
            )
        return int(match.group(3))

    def _drain(self, response: http.client.HTTPResponse, count: int, until: float) -> bytes:
        """At most ``count`` bytes of the body, given up at the monotonic time ``until``."""
        got: list[bytes] = []
        left = count
        try:
            while left > 0:
                if time.monotonic() > until:
                    raise GgufError(f"{self.label}: not answered within {self._timeout:g} s; raise the timeout")
                piece = response.read1(min(left, 1 << 16))
                if not piece:
                    break
                got.append(piece)
                left -= len(piece)
        except (OSError, http.client.HTTPException) as error:
            raise GgufError(f"{self.label}: the connection broke: {error}; try again") from error
        return b"".join(got)


class _Reader:
    """Forward reader over a source with one small buffer; every step is bounds-checked first."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self.label = source.label
        self.size = source.size
        self.position = 0
        self._buffer = b""
        self._start = 0

    def need(self, count: int, what: str) -> None:
        """Raise unless ``count`` more bytes exist and the header stays within its limit."""
        end = self.position + count
        if end > self.size:
            raise GgufError(
                f"{self.label}: ends at byte {self.size} but its header needs byte {min(end, _INT64_MAX)}"
                f" ({what}): download is incomplete, or the header is corrupt; fetch the file again"
            )
        if end > _MAX_HEADER:
            raise GgufError(
                f"{self.label}: {what} would reach byte {end}, and no header is longer than {_MAX_HEADER} bytes:"
                " the header is corrupt; fetch the file again"
            )

    def take(self, count: int, what: str) -> bytes:
        """The next ``count`` bytes."""
        self.need(count, what)
        inside = self.position - self._start
        if inside < 0 or inside + count > len(self._buffer):
            self._fill(count)
            inside = 0
        self.position += count
        return self._buffer[inside : inside + count]

    def skip(self, count: int, what: str) -> None:
        """Step over ``count`` bytes without reading them."""
        self.need(count, what)
        self.position += count

    def skip_strings(self, count: int, what: str) -> None:
        """Step over ``count`` strings (u64 length, bytes); only lengths are looked at."""
        self.need(count * _U64.size, what)
        unpack = _U64.unpack_from
        while count:
            self.need(_U64.size, what)
            if not 0 <= self.position - self._start <= len(self._buffer) - _U64.size:
                self._fill(_U64.size)
            buffer = self._buffer
            last = len(buffer) - _U64.size
            inside = self.position - self._start
            while count and inside <= last:
                inside += _U64.size + unpack(buffer, inside)[0]
                count -= 1
            self.skip(self._start + inside - self.position, what)

    def u32(self, what: str) -> int:
        """The next unsigned 32-bit number."""
        value: int = _U32.unpack(self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        """The next unsigned 64-bit number."""
        value: int = _U64.unpack(self.take(8, what))[0]
        return value

    def _fill(self, count: int) -> None:
        self._start = self.position
        wanted = min(max(count, self._source.block), self.size - self.position)
        self._buffer = self._source.read_at(self.position, wanted)
        if len(self._buffer) < count:
            raise GgufError(f"{self.label}: shrank while it was read (byte {self.position}); try again")


def read_header(source: ByteSource) -> Header:
    """Read the header of one file. Raises GgufError for anything that llama.cpp b11434 would not load.

    The tensor data must lie within the file: offsets are contiguous as ggml demands, and the last byte of every
    tensor is compared with the size of the source.
    """
    reader = _Reader(source)
    version = _magic(reader)
    n_tensors = reader.u64("the number of tensors")
    n_pairs = reader.u64("the number of metadata entries")
    _limit(reader, n_tensors, _MAX_TENSORS, "tensors", 24)
    _limit(reader, n_pairs, _MAX_PAIRS, "metadata entries", 13)
    metadata, lengths = _metadata(reader, n_pairs)
    alignment = _alignment(reader.label, metadata)
    tensors = _tensors(reader, n_tensors, alignment)
    start = -(-reader.position // alignment) * alignment
    return Header(reader.label, version, metadata, lengths, tensors, reader.size, (reader.label,), start)


def _magic(reader: _Reader) -> int:
    """Check the first bytes; returns the format version (2 or 3)."""
    label = reader.label
    if reader.size == 0:
        raise GgufError(f"{label}: is empty: the download never wrote anything; fetch the file again")
    start = reader.take(min(reader.size, 32), "the first bytes")
    if start[:4] != b"GGUF":
        text = start.lstrip().lower()
        if text.startswith((b"<htm", b"<!do")):
            raise GgufError(
                f"{label}: is an HTML page, not a model: the server sent an error or login page;"
                " check the URL and access rights, and fetch the file again"
            )
        if start.startswith(b"version https://git-lfs"):
            raise GgufError(
                f"{label}: is a git LFS pointer, not the model: run 'git lfs pull' in its repository,"
                " or download the file itself"
            )
        raise GgufError(f"{label}: is not a GGUF file (it starts with {start[:4]!r}, expected b'GGUF')")
    reader.position = 4
    version = reader.u32("the format version")
    if version and not version & 0xFFFF:
        raise GgufError(
            f"{label}: is a big-endian GGUF file, which a little-endian llama.cpp cannot load;"
            " convert it (gguf_convert_endian) or fetch a little-endian one"
        )
    if version == 1:
        raise GgufError(f"{label}: is GGUF version 1, which llama.cpp no longer reads; convert the model anew")
    if version not in (2, 3):
        raise GgufError(f"{label}: has GGUF version {version}; this collection reads versions 2 and 3")
    return version


def _limit(reader: _Reader, count: int, limit: int, what: str, least: int) -> None:
    """A claimed count must be below its limit, and at least ``least`` bytes per item must exist."""
    if count > limit:
        raise GgufError(
            f"{reader.label}: claims {count} {what}, more than any model has (limit {limit}):"
            " the header is corrupt; fetch the file again"
        )
    reader.need(count * least, f"{count} {what}")


def _metadata(reader: _Reader, n_pairs: int) -> tuple[dict[str, MetaValue], dict[str, int]]:
    metadata: dict[str, MetaValue] = {}
    lengths: dict[str, int] = {}
    seen = set()
    kept = 0
    strings = 0
    for number in range(n_pairs):
        key = _text(reader, f"the key of metadata entry {number}", _KEEP_STRING)
        if not key or key in seen:
            raise GgufError(
                f"{reader.label}: metadata entry {number} has {'the key ' + repr(key) + ' again' if key else 'no key'}:"
                " the header is corrupt; fetch the file again"
            )
        seen.add(key)
        kept += len(key)
        kind = reader.u32(f"the type of {key!r}")
        if kind == _STRING:
            length = reader.u64(f"the length of {key!r}")
            if length > _KEEP_STRING:
                reader.skip(length, f"{key!r}")
            else:
                metadata[key] = reader.take(length, f"{key!r}").decode("utf-8", "replace")
                kept += length
        elif kind == _ARRAY:
            element = reader.u32(f"the element type of {key!r}")
            count = reader.u64(f"the length of {key!r}")
            lengths[key] = count
            if element == _STRING:
                strings += count
                if strings > _MAX_STRINGS:
                    raise GgufError(
                        f"{reader.label}: claims {strings} strings up to {key!r}, more than any model has"
                        f" (limit {_MAX_STRINGS}): the header is corrupt; fetch the file again"
                    )
                reader.skip_strings(count, f"{key!r}")
            elif element in _SCALARS:
                width = _SCALARS[element].size
                if count > _KEEP_ARRAY:
                    reader.skip(count * width, f"{key!r}")
                else:
                    data = reader.take(count * width, f"{key!r}")
                    metadata[key] = tuple(value for (value,) in _SCALARS[element].iter_unpack(data))
                    kept += len(data)
            else:
                raise GgufError(
                    f"{reader.label}: {key!r} is an array of unknown type {element}:"
                    " the header is corrupt, or newer than this collection"
                )
        elif kind in _SCALARS:
            metadata[key] = _SCALARS[kind].unpack(reader.take(_SCALARS[kind].size, f"{key!r}"))[0]
        else:
            raise GgufError(
                f"{reader.label}: {key!r} has the unknown type {kind}:"
                " the header is corrupt, or newer than this collection"
            )
        if kept > _KEEP_TOTAL:
            raise GgufError(
                f"{reader.label}: carries more than {_KEEP_TOTAL} bytes of small metadata:"
                " the header is corrupt; fetch the file again"
            )
    return metadata, lengths


def _text(reader: _Reader, what: str, limit: int) -> str:
    length = reader.u64(f"the length of {what}")
    if length > limit:
        reader.need(length, what)
        raise GgufError(
            f"{reader.label}: {what} has {length} bytes, the limit is {limit}:"
            " the header is corrupt; fetch the file again"
        )
    return reader.take(length, what).decode("utf-8", "replace")


def _alignment(label: str, metadata: dict[str, MetaValue]) -> int:
    value = metadata.get("general.alignment", 32)  # GGUF_DEFAULT_ALIGNMENT
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0 or value & (value - 1):
        raise GgufError(f"{label}: general.alignment is {value!r}, not a power of 2: the header is corrupt")
    return value


def _tensors(reader: _Reader, count: int, alignment: int) -> tuple[Tensor, ...]:
    label = reader.label
    found: list[Tensor] = []
    names = set()
    expected = 0
    ends: list[int] = []
    for number in range(count):
        name = _text(reader, f"the name of tensor {number}", _MAX_NAME - 1)
        if not name or name in names:
            raise GgufError(
                f"{label}: tensor {number} has {'the name ' + repr(name) + ' again' if name else 'no name'}:"
                " the header is corrupt; fetch the file again"
            )
        names.add(name)
        n_dims = reader.u32(f"the rank of tensor {name!r}")
        if n_dims > _MAX_DIMS:
            raise GgufError(f"{label}: tensor {name!r} claims {n_dims} dimensions, the limit is {_MAX_DIMS}")
        dims = struct.unpack(f"<{n_dims}q", reader.take(8 * n_dims, f"the shape of tensor {name!r}"))
        kind_id = reader.u32(f"the type of tensor {name!r}")
        offset = reader.u64(f"the offset of tensor {name!r}")
        nbytes = _nbytes(label, name, dims, kind_id)
        if offset != expected:
            raise GgufError(
                f"{label}: tensor {name!r} lies at offset {offset}, expected {expected}:"
                " the header is corrupt; fetch the file again"
            )
        ends.append(offset + nbytes)
        expected += -(-nbytes // alignment) * alignment
        found.append(Tensor(name, tuple(dims), TENSOR_TYPES[kind_id].name, nbytes))
    start = -(-reader.position // alignment) * alignment
    for tensor, end in zip(found, ends):
        if tensor.nbytes and start + end > reader.size:
            raise GgufError(
                f"{label}: ends at byte {reader.size} but tensor {tensor.name!r} needs {start + end}:"
                " download is incomplete; fetch the file again"
            )
    return tuple(found)


def _nbytes(label: str, name: str, dims: tuple[int, ...], kind_id: int) -> int:
    """Bytes of a tensor in the file, as ggml_nbytes counts them."""
    if kind_id not in TENSOR_TYPES:
        raise GgufError(
            f"{label}: tensor {name!r} has the unknown type {kind_id}:"
            " removed from the format, or newer than this collection"
        )
    kind = TENSOR_TYPES[kind_id]
    elements = 1
    for size in dims:
        if size < 0:
            raise GgufError(f"{label}: tensor {name!r} has the shape {list(dims)}: the header is corrupt")
        elements *= size
    if elements > _INT64_MAX:
        raise GgufError(f"{label}: tensor {name!r} has the shape {list(dims)}, too large: the header is corrupt")
    row = dims[0] if dims else 1
    if row % kind.block:
        raise GgufError(
            f"{label}: tensor {name!r} has rows of {row} elements, no multiple of the {kind.block} of {kind.name}:"
            " the header is corrupt"
        )
    return elements // kind.block * kind.size


def shard_names(name: str) -> tuple[str, ...]:
    """All file names of the set that ``name`` (a bare file name) belongs to, shard 1 first.

    A name that is not ``<base>-<index>-of-<total>.gguf`` with five digits each is a set of its own
    (llama.cpp b11434, llama_split_path). Raises GgufError for an index of 0 or beyond the total.
    """
    match = _SHARD.fullmatch(name)
    if not match:
        return (name,)
    index, total = int(match.group("index")), int(match.group("total"))
    if not 1 <= index <= total:
        raise GgufError(
            f"{name}: calls itself shard {index} of {total}, but shards are counted from 1 to {total}; check the name"
        )
    return tuple(f"{match.group('base')}-{number:05d}-of-{total:05d}.gguf" for number in range(1, total + 1))


def resolve_shards(name: str, available: Iterable[str]) -> tuple[str, ...]:
    """The complete set that ``name`` belongs to, shard 1 first, or a GgufError naming the missing numbers.

    ``available`` are the file names found beside it, in any order.
    """
    wanted = shard_names(name)
    present = set(available)
    missing = [number for number, shard in enumerate(wanted, 1) if shard not in present]
    if len(wanted) == 1 and missing:
        raise GgufError(f"{name}: no such file; check the path")
    if missing:
        listed = ", ".join(str(number) for number in missing[:10]) + (", ..." if len(missing) > 10 else "")
        raise GgufError(
            f"{name}: the set of {len(wanted)} shards is incomplete, missing {listed}"
            f" ({wanted[missing[0] - 1]}); fetch the missing files"
        )
    return wanted


def read_model(path: str) -> Header:
    """Header of the model at ``path``, a file or any one of its shards; the rest of a set is found by name."""
    directory, name = os.path.split(path)
    names = shard_names(name)
    if len(names) > 1:
        try:
            names = resolve_shards(name, os.listdir(directory or "."))
        except OSError as error:
            raise GgufError(f"{path}: cannot be read: {error.strerror}; check the path") from error
    return _read_set([os.path.join(directory, shard) for shard in names], FileSource)


def copy_headers(path: str, directory: str) -> str:
    """Files in ``directory`` with the names and sizes of the model at ``path`` and nothing but its headers in them.

    All else is a hole: no weight is read, and no disk space is used for it. Returns the first one. A program that only
    plans (llama-fit-params) takes them for the model.
    """
    copies = []
    for shard in read_model(path).shards:
        copy = os.path.join(directory, os.path.basename(shard))
        with FileSource(shard) as source, open(copy, "wb") as target:
            header = read_header(source)
            target.write(source.read_at(0, header.data_start))
            target.truncate(source.size)
        copies.append(copy)
    return copies[0]


def read_model_url(url: str, timeout: float = 30.0, token: str = "") -> Header:
    """Header of the model at ``url`` (http or https), fetched by byte ranges; shards are found by name.

    ``timeout`` is in seconds and per request; ``token`` is a permission to read from that server. ``path`` and
    ``shards`` of the result are URLs without their query.
    """
    parts = urllib.parse.urlsplit(url)
    directory, _slash, name = parts.path.rpartition("/")
    names = shard_names(urllib.parse.unquote(name))
    if len(names) == 1:
        return _read_set([url], lambda one: HttpSource(one, timeout, token))
    urls = [parts._replace(path=f"{directory}/{urllib.parse.quote(shard)}").geturl() for shard in names]
    return _read_set(urls, lambda one: HttpSource(one, timeout, token))


def _read_set(places: list[str], opener: Callable[[str], FileSource | HttpSource]) -> Header:
    """Read every shard and merge them; split.no, split.count and split.tensors.count must agree with the set."""
    headers: list[Header] = []
    tensors: dict[str, Tensor] = {}
    for number, place in enumerate(places):
        try:
            with opener(place) as source:
                header = read_header(source)
        except NotFoundError as error:
            if len(places) == 1:
                raise
            raise GgufError(
                f"{redacted(place)}: shard {number + 1} of {len(places)} is missing on the server;"
                " the set is incomplete, upload the missing file or use another URL"
            ) from error
        _check_split(header, number, len(places))
        for tensor in header.tensors:
            if tensor.name in tensors:
                raise GgufError(f"{header.path}: tensor {tensor.name!r} is in two shards; fetch the set again")
            tensors[tensor.name] = tensor
        headers.append(header)
    first = headers[0]
    claimed = first.metadata.get("split.tensors.count")
    if len(places) > 1 and claimed is not None and claimed != len(tensors):
        raise GgufError(
            f"{first.path}: the set has {len(tensors)} tensors but claims {claimed!r};"
            " the shards are of different models, fetch the set again"
        )
    return Header(
        first.path,
        first.version,
        first.metadata,
        first.array_lengths,
        tuple(tensors.values()),
        sum(header.file_bytes for header in headers),
        tuple(header.path for header in headers),
        first.data_start,
    )


def _check_split(header: Header, number: int, total: int) -> None:
    """llama.cpp follows split.count of shard 1 and demands split.no in each further one (llama-model-loader.cpp)."""
    count = header.metadata.get("split.count", 0)
    index = header.metadata.get("split.no", 0)
    if total == 1 and count in (0, 1):
        return
    if count != total:
        raise GgufError(
            f"{header.path}: says that it is one of {count!r} shards, its name says {total};"
            " give the shards back their names <base>-0000<index>-of-0000<total>.gguf, or fetch the set again"
        )
    if index != number:
        raise GgufError(
            f"{header.path}: holds shard {index!r} (counted from 0), its name says {number};"
            " the files were renamed or mixed up, fetch the set again"
        )
