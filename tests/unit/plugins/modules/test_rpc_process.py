# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""rpc_process as a task sees it: it ends a stray worker, and nothing else."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._sockets import Process
from ansible_collections.llamafleet.rpc.plugins.modules import rpc_process
from ansible_collections.llamafleet.rpc.tests.unit import servers

if TYPE_CHECKING:
    import subprocess


def call(check_mode: bool = False, **options: Any) -> dict[str, Any]:
    return servers.run_module(rpc_process.main, options, check_mode)


@pytest.fixture
def worker_like(tmp_path: Path) -> Path:
    """A program that has the name of a worker and sleeps."""
    path = tmp_path / "ggml-rpc-server"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", path)
    return path


def wait_for_exec(process: subprocess.Popen[bytes], name: str) -> None:
    """Between fork and exec the child still is this interpreter."""
    end = time.monotonic() + 5
    while not Path(f"/proc/{process.pid}/exe").resolve().name.startswith(name) and time.monotonic() < end:
        time.sleep(0.01)


def test_a_stray_worker_is_ended_once(worker_like: Path) -> None:
    with servers.program([worker_like, "60"]) as process:
        wait_for_exec(process, "ggml-rpc-server")
        planned = call(check_mode=True, pid=process.pid)
        assert process.poll() is None
        ended = call(pid=process.pid)
        assert process.wait(1) == -15
        again = call(pid=process.pid)
    assert (planned["changed"], ended["changed"], again["changed"]) == (True, True, False)
    assert ended["processes"][0]["exe"] == str(worker_like)
    assert ended["diff"] == planned["diff"] == {"before": f"{process.pid} {worker_like}\n", "after": ""}
    assert ended["killed"] == []


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    stubborn = tmp_path / "rpc-server"
    shutil.copy(shutil.which("bash") or "/bin/bash", stubborn)
    ready = tmp_path / "ready"
    with servers.program([stubborn, "-c", f"trap '' TERM; : > {ready}; while :; do read -t 1 < <(:); done"]) as process:
        end = time.monotonic() + 5
        while not ready.exists() and time.monotonic() < end:
            time.sleep(0.02)
        result = call(pid=process.pid, grace=0.3)
        assert process.wait(1) == -9
    assert result["killed"] == [process.pid]


def test_another_program_is_refused() -> None:
    with servers.program([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        wait_for_exec(process, "python")
        result = call(pid=process.pid)
        assert process.poll() is None
    assert result["failed"]
    assert f"process {process.pid}" in result["msg"]
    assert "not a worker" in result["msg"]


def test_another_program_on_the_port_is_refused() -> None:
    with servers.serve(servers.silent) as port:
        result = call(port=port)
    assert result["failed"]
    assert "not a worker" in result["msg"]


def test_a_pid_that_is_ours_is_left_alone(worker_like: Path) -> None:
    with servers.program([worker_like, "60"]) as process:
        wait_for_exec(process, "ggml-rpc-server")
        result = call(pid=process.pid, owned_pids=[process.pid])
        assert process.poll() is None
    assert result["failed"]
    assert "owned_pids" in result["msg"]


def test_a_supervisor_program_of_ours_is_left_alone(worker_like: Path) -> None:
    """The parent's command line says supervisord, as supervisor's own does."""
    script = (
        "import os, subprocess, sys\n"
        "environment = dict(os.environ, SUPERVISOR_PROCESS_NAME='llama-rpc-a', SUPERVISOR_GROUP_NAME='llama-rpc-a')\n"
        f"child = subprocess.Popen([{str(worker_like)!r}, '60'], env=environment)\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    daemon = worker_like.parent / "supervisord"
    daemon.write_text(script)
    with servers.program([sys.executable, daemon]) as process:
        child = _child_of(process.pid)
        try:
            result = call(pid=child, owned_programs=["llama-rpc-a"])
            assert result["failed"]
            assert "our supervisor program llama-rpc-a" in result["msg"]
        finally:
            assert call(pid=child)["changed"]


def _child_of(pid: int) -> int:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children and Path(f"/proc/{children[0]}/exe").resolve().name == "ggml-rpc-server":
            return int(children[0])
        time.sleep(0.02)
    pytest.fail("the worker did not start")


def test_a_service_of_ours_is_left_alone() -> None:
    process = Process(pid=42, exe="/x/ggml-rpc-server", unit="llama-rpc-default-a.service")
    for name in ("llama-rpc-default-a", "llama-rpc-default-a.service"):
        options = {"owned_units": [name], "owned_programs": [], "owned_pids": []}
        with pytest.raises(rpc_process.ProcessError, match=r"our service llama-rpc-default-a\.service"):
            rpc_process.check(process, options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pid": -1}, "pid: -1 is no pid"),
        ({"pid": 0}, "pid: 0 is no pid"),
        ({"port": 65536}, "port: 65536 is no port; give a number from 1 to 65535"),
        ({"port": 18711, "grace": float("nan")}, "grace: nan s"),
    ],
)
def test_numbers_that_mean_nothing_are_named(options: dict[str, Any], says: str) -> None:
    result = call(**options)
    assert result["failed"]
    assert says in result["msg"]


def test_a_free_port_is_no_change() -> None:
    assert not call(port=servers.free_port())["changed"]


@pytest.mark.real
def test_a_real_stray_worker_frees_its_port(llama_bin: Path) -> None:
    port = servers.free_port()
    with servers.program([llama_bin / "ggml-rpc-server", "-p", port, "-d", "CPU"]) as process:
        servers.wait_for_port(port)
        result = call(port=port, owned_units=["llama-rpc-default-default.service"])
        assert result["changed"]
        assert process.wait(1) == -15
        assert not call(port=port)["changed"]
