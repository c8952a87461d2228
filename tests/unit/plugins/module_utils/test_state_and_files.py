# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kept decisions say how they differ, and a file that is being replaced is never half of anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._files import read_json, write_atomic, write_json
from ansible_collections.llamafleet.rpc.plugins.module_utils._state import differences


def test_differences_name_what_a_person_would_look_for() -> None:
    kept = {"build": "b1", "workers": {"a:1": "x", "b:1": "y"}, "argv": ["-ts", "1,2"]}
    wanted = {"build": "b1", "workers": {"a:1": "x", "b:1": "z"}, "argv": ["-ts", "2,1"], "new": 1}
    assert differences(kept, wanted) == ["argv: -ts 1,2 -> -ts 2,1", "new: nothing -> 1", "workers.b:1: y -> z"]
    assert differences(kept, kept) == []
    assert differences(kept, {}) == [
        "argv: -ts 1,2 -> nothing",
        "build: b1 -> nothing",
        "workers: {'a:1': 'x', 'b:1': 'y'} -> nothing",
    ]


def test_a_crash_while_writing_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    write_json(str(path), {"a": 1})

    def power_cut(_handle: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", power_cut)
    with pytest.raises(OSError, match="no space"):
        write_json(str(path), {"a": 2})
    monkeypatch.undo()
    assert read_json(str(path)) == {"a": 1}
    assert os.listdir(tmp_path) == ["state.json"]


def test_what_is_no_json_counts_as_absent(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    assert read_json(str(path)) is None
    write_atomic(str(path), '{"half": ')
    assert read_json(str(path)) is None
    assert read_json(str(path / "below-a-file.json")) is None
    path.write_bytes(b'{"torn": "\xff\xfe"}')
    assert read_json(str(path)) is None
    path.write_text("[" * 100000)
    assert read_json(str(path)) is None


def test_mode_is_what_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_atomic(str(path), "x", 0o600)
    assert path.stat().st_mode & 0o777 == 0o600
