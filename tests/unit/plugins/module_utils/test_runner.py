# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The one door to the system, opened for real: small commands and files of a temporary directory."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import (
    NOT_FOUND,
    TIMED_OUT,
    DeadlineRunner,
    SystemRunner,
)

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

RUNNER = SystemRunner()


def test_a_command_gives_status_and_both_streams_in_the_c_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("LANGUAGE", "de")
    code = "import os, sys; print(os.environ['LC_ALL'], os.environ.get('LANGUAGE')); sys.stderr.write('e'); sys.exit(3)"
    assert RUNNER.run([sys.executable, "-c", code]) == (3, "C None\n", "e")


def test_a_command_reads_no_input_of_ours() -> None:
    assert RUNNER.run([sys.executable, "-c", "import sys; print(repr(sys.stdin.read()))"]).stdout == "''\n"


def test_a_missing_and_an_unrunnable_program_are_results_not_exceptions(tmp_path: Path) -> None:
    assert RUNNER.run([str(tmp_path / "absent")]).rc == NOT_FOUND
    (tmp_path / "text").write_text("no program")
    assert RUNNER.run([str(tmp_path / "text")]).rc == NOT_FOUND


def test_a_hung_command_is_ended_with_its_children_and_keeps_what_it_said(tmp_path: Path) -> None:
    late = tmp_path / "late"
    child = f"import time; time.sleep(2); open({str(late)!r}, 'w')"
    code = (
        "import subprocess, sys, time; print('said', flush=True); "
        f"subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    )
    start = time.monotonic()
    result = RUNNER.run([sys.executable, "-c", code], timeout=1.0)
    assert time.monotonic() - start < 4
    assert result.rc == TIMED_OUT
    assert result.stdout == "said\n"
    assert "timed out after 1 s" in result.stderr
    time.sleep(2.2)
    assert not late.exists(), "the child went on after its parent was ended"


def test_bytes_that_are_no_text_do_not_stop_a_run() -> None:
    assert RUNNER.run([sys.executable, "-c", r"import sys; sys.stdout.buffer.write(b'\xff')"]).stdout == "�"


def test_files_links_and_directories_that_are_not_there_are_none(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    assert RUNNER.read(absent) is None
    assert RUNNER.read(str(tmp_path)) is None
    assert RUNNER.readlink(absent) is None
    assert RUNNER.listdir(absent) == []
    assert not RUNNER.exists(absent)
    (tmp_path / "b").write_text("text")
    (tmp_path / "a").symlink_to("b")
    assert RUNNER.listdir(str(tmp_path)) == ["a", "b"]
    assert RUNNER.readlink(str(tmp_path / "a")) == "b"
    assert RUNNER.read(str(tmp_path / "a"), limit=2) == "te"
    assert RUNNER.exists(str(tmp_path / "a"))


def test_programs_are_found_outside_of_a_poor_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """B3-17: sudo and systemd give a PATH that lacks the places where vendors put their tools."""
    monkeypatch.setenv("PATH", "/nowhere")
    assert (RUNNER.which("env") or "").endswith("/bin/env")
    assert RUNNER.which("no-such-program-anywhere") is None


def test_commands_that_follow_one_another_end_by_one_deadline(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    bounded = DeadlineRunner(RUNNER, 1.0)
    start = time.monotonic()
    results = [bounded.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=30.0) for _number in range(3)]
    assert time.monotonic() - start < 3
    assert [result.rc for result in results] == [TIMED_OUT] * 3
    assert "not started, the time is used up" in results[2].stderr
    assert (bounded.read(str(tmp_path / "file")), bounded.listdir(str(tmp_path))) == ("text", ["file"])
    assert (bounded.exists(str(tmp_path)), bounded.readlink(str(tmp_path))) == (True, None)
    assert bounded.which("no-such-program-anywhere") is None
