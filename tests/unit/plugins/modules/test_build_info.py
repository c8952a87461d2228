# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What build_info tells of builds that were put there by hand. (Of real ones: test_build.py.)"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import pytest
from ansible_collections.llamafleet.rpc.plugins.modules.build_info import look

if TYPE_CHECKING:
    from pathlib import Path


def put(prefix: Path, says: str, status: int = 0) -> Path:
    """A build whose llama-server says a version."""
    server = prefix / "builds" / "b11434-0123456789ab" / "bin" / "llama-server"
    server.parent.mkdir(parents=True)
    server.write_text(f"#!/bin/sh\necho '{says}'\necho oops >&2\nexit {status}\n")
    server.chmod(0o755)
    data = server.read_bytes()
    manifest = {
        "build": "b11434",
        "commit": None,
        "manifest_id": "0123456789ab",
        "files": {"bin/llama-server": hashlib.sha256(data).hexdigest()},
        "sizes": {"bin/llama-server": len(data)},
    }
    (server.parent.parent / "manifest.json").write_text(json.dumps(manifest))
    (prefix / "current").symlink_to("builds/b11434-0123456789ab")
    return server


def test_no_build_is_a_result(tmp_path: Path) -> None:
    told = look(str(tmp_path), verify=True)
    assert told["ok"] is False
    assert told["build"] is None
    assert told["manifest"] is None
    assert "no build with a manifest" in told["problems"][0]
    assert "llama_build" in told["problems"][0]


def test_a_file_in_place_of_the_prefix_is_no_build(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "no build with a manifest" in look(str(tmp_path / "file"), verify=False)["problems"][0]


@pytest.mark.parametrize("damage", ["not json", "[]", '{"files": 5}'])
def test_a_damaged_manifest_is_no_build(tmp_path: Path, damage: str) -> None:
    put(tmp_path, "version: 0 ()")
    (tmp_path / "current" / "manifest.json").write_text(damage)
    assert look(str(tmp_path), verify=False)["ok"] is False


def test_a_server_that_does_not_know_its_version_is_believed_by_its_stamp(tmp_path: Path) -> None:
    """B2-14."""
    put(tmp_path, "version: 0 ()")
    told = look(str(tmp_path), verify=True)
    assert told["ok"] is True
    assert told["build"] == "b11434"
    assert told["version"] == {"number": None, "commit": None}


@pytest.mark.parametrize(
    ("says", "status", "problem"),
    [
        ("version: 0.6.0-dev (build 11430, commit abc)", 0, "says it is b11430, its manifest says b11434"),
        ("version: 0.6.0-dev (build 11434, commit abc)", 127, "ended with status 127: oops"),
    ],
)
def test_a_server_that_contradicts_its_stamp_or_does_not_start_is_a_problem(
    tmp_path: Path, says: str, status: int, problem: str
) -> None:
    put(tmp_path, says, status)
    told = look(str(tmp_path), verify=True)
    assert told["ok"] is False
    assert problem in told["problems"][0]


def test_content_is_compared_only_when_asked(tmp_path: Path) -> None:
    server = put(tmp_path, "version: 0 ()")
    server.write_text(server.read_text().replace("oops", "oups"))
    assert look(str(tmp_path), verify=False)["ok"] is True
    assert "other content" in look(str(tmp_path), verify=True)["problems"][0]
    server.unlink()
    assert "is missing" in look(str(tmp_path), verify=False)["problems"][0]
