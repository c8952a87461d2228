# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Long work as seen from the controller: a real ansible-playbook, two hosts on one machine, a small build."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.errors import AnsibleConnectionFailure
from ansible_collections.llamafleet.rpc.plugins.plugin_utils import _long_work
from ansible_collections.llamafleet.rpc.plugins.plugin_utils._long_work import LongWork, progress_line

COLLECTIONS = next(
    parent.parent for parent in Path(progress_line.__code__.co_filename).parents if parent.name == "llamafleet"
).parent

CMAKE = """
cmake_minimum_required(VERSION 3.14)
project(fake C CXX)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_executable(ggml-rpc-server main.c)
add_custom_command(TARGET ggml-rpc-server PRE_LINK COMMAND sleep 11)
"""
FACTS: dict[str, Any] = {
    "backend": "cpu",
    "candidates": [{"backend": "cpu", "problems": [], "packages": {"build": ["cmake"], "run": [], "note": None}}],
    "class_id": "linux-test",
    "cmake_flags": [],
    "cpu": {"isa": ""},
    "user": {"home": "/"},
}


def test_a_progress_line_is_fit_for_a_log() -> None:
    known = {"phase": "compile", "percent": 41, "message": "step 91/221", "seconds": 95}
    assert progress_line("gpu1", "llama.cpp b11434", known) == "gpu1: llama.cpp b11434: compile 41 %, step 91/221, 95 s"
    unknown = {"phase": "download", "percent": None, "message": "", "seconds": 3}
    assert progress_line("gpu1", "model m.gguf", unknown) == "gpu1: model m.gguf: download, 3 s"


@pytest.fixture
def play(tmp_path: Path) -> list[str]:
    """An ansible-playbook command over the role llama_build, without the network."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in {"CMakeLists.txt": CMAKE, "main.c": "int main(void) { return 0; }\n"}.items():
            info = tarfile.TarInfo(f"llama.cpp/{name}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    data = gzip.compress(buffer.getvalue(), mtime=0)
    (tmp_path / "source.tar.gz").write_bytes(data)
    host = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    (tmp_path / "hosts.json").write_text(json.dumps({"all": {"hosts": {"one": host, "two": host}}}))
    variables = {
        "llama_fleet_prefix": str(tmp_path / "p"),
        "llama_fleet_scope": "user",
        "llama_fleet_user": "",
        "llama_build_source": "archive",
        "llama_build_path": str(tmp_path / "source.tar.gz"),
        "llama_build_sha256": hashlib.sha256(data).hexdigest(),
        "llama_build_targets": ["ggml-rpc-server"],
    }
    tasks = [
        {"name": "Facts", "ansible.builtin.set_fact": {"llamafleet": FACTS, "cacheable": True}},
        {"name": "Build", "ansible.builtin.import_role": {"name": "llamafleet.rpc.llama_build"}},
    ]
    plays = [{"name": "Test", "hosts": "all", "gather_facts": False, "vars": variables, "tasks": tasks}]
    (tmp_path / "play.json").write_text(json.dumps(plays))
    return ["-i", str(tmp_path / "hosts.json"), str(tmp_path / "play.json")]


def run(play: list[str], cwd: Path, *more: str) -> str:
    environment = dict(
        os.environ,
        ANSIBLE_COLLECTIONS_PATH=str(COLLECTIONS.parent),
        ANSIBLE_INVENTORY_ENABLED="yaml",
        ANSIBLE_YAML_FILENAME_EXT=".json",
        ANSIBLE_FORCE_COLOR="0",
        ANSIBLE_HOME=str(cwd / "ansible"),
    )
    program = shutil.which("ansible-playbook", path=os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"])
    assert program is not None
    done = subprocess.run(
        [program, *play, *more], check=False, capture_output=True, text=True, env=environment, cwd=cwd, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_hosts_on_one_machine_see_progress_of_one_build(play: list[str], tmp_path: Path) -> None:
    planned = run(play, tmp_path, "--check", "--diff")
    assert planned.count("changed=1") == 2
    assert "+b11434-" in planned
    assert not (tmp_path / "p").exists()
    first = run(play, tmp_path)
    assert "one: llama.cpp b11434: compile" in first
    assert "two: llama.cpp b11434: compile" in first
    assert first.count("changed=1") == 2
    assert len(list((tmp_path / "p" / "builds").iterdir())) == 1
    assert (tmp_path / "p" / "current" / "bin" / "ggml-rpc-server").exists()
    second = run(play, tmp_path)
    assert second.count("changed=0") == 2
    assert "llama.cpp b11434:" not in second


def test_cards_of_two_makers_get_two_builds(play: list[str], tmp_path: Path) -> None:
    """The backend of the host and the one that an instance names, by the role; the second run changes nothing."""
    other = {"backend": "vulkan", "devices": ["Vulkan0"], "class_id": "other", "cmake_flags": ["-DSTUB=1"]}
    cpu = {**FACTS["candidates"][0], "devices": ["CPU"]}
    plays = json.loads((tmp_path / "play.json").read_text())
    plays[0]["tasks"][0]["ansible.builtin.set_fact"]["llamafleet"] = {**FACTS, "candidates": [other, cpu]}
    plays[0]["vars"]["llama_worker_instances"] = [{"name": "card", "backend": "vulkan"}, {"name": "cpu"}]
    plays[0]["tasks"].append({"name": "Say", "ansible.builtin.debug": {"var": "ansible_facts.llamafleet_builds"}})
    (tmp_path / "play.json").write_text(json.dumps(plays))
    first = run([*play, "--limit", "one"], tmp_path)
    assert "changed=1" in first and "vulkan" in first
    builds = {path.name for path in (tmp_path / "p" / "builds").iterdir()}
    assert len(builds) == 2
    assert os.readlink(tmp_path / "p" / "current").partition("/")[2] in builds
    assert "changed=0" in run([*play, "--limit", "one"], tmp_path)


class Flaky(LongWork):
    """Long work over a connection that breaks as told: an answer, or None for no connection."""

    def __init__(self, answers: list[dict[str, Any] | None]) -> None:
        self.answers = answers
        self.calls: list[dict[str, Any]] = []
        around: dict[str, Any] = {
            "_task": SimpleNamespace(args={"build": "b11434"}, async_val=0, check_mode=False),
            "_play_context": SimpleNamespace(remote_addr="gpu1"),
            "_connection": SimpleNamespace(_shell=SimpleNamespace(tmpdir=None)),
        }
        self.__dict__.update(around)

    def subject(self, args: dict[str, Any]) -> str:
        return "llama.cpp"

    def _execute_module(self, *_args: Any, **options: Any) -> dict[str, Any]:
        self.calls.append(options["module_args"])
        answer = self.answers.pop(0)
        if answer is None:
            raise AnsibleConnectionFailure("Connection reset by peer")
        return answer


RUNNING: dict[str, Any] = {"done": False, "progress": {"run": "r1", "phase": "compile", "seconds": 5}}


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_long_work, "_PAUSE", 0)


def test_a_lost_connection_costs_a_call_and_not_the_work() -> None:
    work = Flaky([RUNNING, None, None, RUNNING, {"done": True, "changed": True}])
    assert work.run(task_vars={"inventory_hostname": "gpu1"})["changed"] is True
    assert [call.get("follow") for call in work.calls] == [None, "r1", "r1", "r1", "r1"]


def test_a_host_that_is_not_there_is_told_at_once_and_one_that_went_away_after_a_while() -> None:
    with pytest.raises(AnsibleConnectionFailure):
        Flaky([None, RUNNING]).run(task_vars={})
    gone = Flaky([RUNNING, *[None] * 20])
    with pytest.raises(AnsibleConnectionFailure):
        gone.run(task_vars={})
    assert len(gone.calls) == 7


def test_a_failure_ends_it() -> None:
    work = Flaky([RUNNING, {"failed": True, "msg": "no space"}])
    assert work.run(task_vars={})["msg"] == "no space"
