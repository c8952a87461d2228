# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which source a fleet is built from, with a real git repository."""

from __future__ import annotations

import json
import os
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._builds import BuildError, python_package
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner
from ansible_collections.llamafleet.rpc.plugins.modules.build_source_info import choose

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def repository(tmp_path: Path) -> tuple[str, str]:
    """(URL, commit) of a repository with the annotated tag b11434."""
    names = {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

    def git(*argv: str) -> str:
        argv = ("git", "-C", str(tmp_path / "r"), *argv)
        return subprocess.run(
            argv, check=True, capture_output=True, text=True, env={**os.environ, **names}
        ).stdout.strip()

    (tmp_path / "r").mkdir()
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "one")
    git("tag", "-a", "b11434", "-m", "annotated")
    return f"file://{tmp_path}/r", git("rev-parse", "HEAD")


def ask(tmp_path: Path, **options: Any) -> tuple[str, str]:
    wanted = {"build": "b11434", "prefix": str(tmp_path / "p"), "repository": f"file://{tmp_path}/none", "commit": ""}
    return choose(SystemRunner(), {**wanted, "sha256": "", "timeout": 5, **options})


def test_git_is_taken_when_it_answers_and_its_commit_is_pinned(tmp_path: Path, repository: tuple[str, str]) -> None:
    url, commit = repository
    assert ask(tmp_path, repository=url, commit=commit)[0] == "git"
    # unpinned, a tag is not trusted, and the package with a known hash is taken
    assert ask(tmp_path, repository=url)[0] == "python_package"


def test_a_moved_tag_stops_it(tmp_path: Path, repository: tuple[str, str]) -> None:
    """B2-16."""
    with pytest.raises(BuildError, match=f"expected {'1' * 40}, got {repository[1]}"):
        ask(tmp_path, repository=repository[0], commit="1" * 40)


def test_a_repository_that_does_not_answer_is_left_out_with_the_reason(tmp_path: Path) -> None:
    kind, reason = ask(tmp_path, commit="1" * 40)
    assert kind == "python_package"
    assert "git was not taken:" in reason
    assert "none" in reason


def test_a_silent_repository_costs_the_timeout_and_no_more(tmp_path: Path) -> None:
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        started = time.monotonic()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/r.git"
        kind, reason = ask(tmp_path, repository=url, commit="1" * 40, timeout=1)
    assert kind == "python_package"
    assert "timed out" in reason
    assert time.monotonic() - started < 5


def test_without_any_pin_the_ways_are_named(tmp_path: Path, repository: tuple[str, str]) -> None:
    with pytest.raises(BuildError, match=r"no source is pinned.*source=git.*source=archive.*sha256.*\(b11434\)"):
        ask(tmp_path, build="b11400")
    with pytest.raises(BuildError, match="has no tag b11400"):
        ask(tmp_path, build="b11400", repository=repository[0], commit=repository[1])
    assert ask(tmp_path, build="b11400", sha256="a" * 64)[0] == "python_package"
    with pytest.raises(BuildError, match="not a fixed tag"):
        ask(tmp_path, build="master")


def test_what_is_in_use_stays(tmp_path: Path, repository: tuple[str, str]) -> None:
    """Law 18: a repository that answers today and not tomorrow rebuilds nothing."""
    url, commit = repository
    current = tmp_path / "p" / "current"
    current.mkdir(parents=True)
    manifest: dict[str, Any] = {"build": "b11434", "files": {}, "commit": commit}
    package = {"kind": "python_package", "sha256": python_package("b11434")[1]}
    (current / "manifest.json").write_text(json.dumps({**manifest, "commit": None, "source": package}))
    assert ask(tmp_path, repository=url, commit=commit) == ("python_package", "as the build in use")
    (current / "manifest.json").write_text(json.dumps({**manifest, "source": {"kind": "git", "sha256": None}}))
    assert ask(tmp_path, commit=commit) == ("git", "as the build in use")
    # of another tag or another commit, it decides nothing
    assert ask(tmp_path, commit="")[0] == "python_package"
    (current / "manifest.json").write_text(json.dumps({**manifest, "build": "b11400", "source": package}))
    assert ask(tmp_path, repository=url, commit=commit)[0] == "git"
