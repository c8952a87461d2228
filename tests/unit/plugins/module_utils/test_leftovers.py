# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A removal that left a file, a process or a listener is found out."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._launchd import DAEMONS
from ansible_collections.llamafleet.rpc.plugins.module_utils._leftovers import LeftoversError, leftovers
from ansible_collections.llamafleet.rpc.plugins.module_utils._mac_network import MARK
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Result, SystemRunner
from ansible_collections.llamafleet.rpc.tests.unit.fakes import FakeRunner
from ansible_collections.llamafleet.rpc.tests.unit.recorded import mac, text


def test_directory_process_and_listener_are_named(tmp_path: Path) -> None:
    program = tmp_path / "prefix" / "sleep"
    program.parent.mkdir()
    shutil.copy("/bin/sleep", program)
    process = subprocess.Popen([str(program), "60"])
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    try:
        found = leftovers(SystemRunner(), [str(program.parent)], [port])
    finally:
        process.kill()
        process.wait()
        listener.close()
    assert f"{program.parent} still exists" in found
    assert f"process {process.pid} still runs {program}" in found
    assert any(line.startswith(f"port {port} is held by") for line in found)


def test_nothing_left_is_nothing_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert leftovers(SystemRunner(), [str(tmp_path / "gone")], [port]) == []


def studio() -> FakeRunner:
    """A Mac where a worker was not ended, its job not unloaded, and the file of another left."""
    runner = mac("sysctl_m4_max_128g", lsof=text("sockets/lsof-macos.txt"))
    for target, recording in (("", "system"), ("/llamafleet.llama-rpc-default-gpu", "job")):
        runner.commands[f"launchctl print system{target}"] = Result(0, text(f"macos/launchctl_print_{recording}"), "")
    runner.commands["launchctl print"] = Result(113, "", "Could not find service")
    job = f"{DAEMONS}/llamafleet.llama-rpc-default-old.plist"
    runner.files = {MARK: "", job: "<string>/opt/llamafleet/builds/x/bin/ggml-rpc-server</string>"}
    return runner


def test_a_mac_tells_processes_jobs_and_listeners_without_proc() -> None:
    found = leftovers(studio(), ["/opt/llamafleet"], [50052])
    assert "process 501 still runs /opt/llamafleet/current/bin/ggml-rpc-server" in found
    assert any("launchctl bootout system/llamafleet.llama-rpc-default-gpu" in line for line in found)
    assert f"{DAEMONS}/llamafleet.llama-rpc-default-old.plist still exists" in found
    assert any(line.startswith("port 50052 is held by") for line in found)
    assert len(found) == 4, "jobs of ours that have no part in these directories are no leftovers"
    assert leftovers(studio(), ["/opt/other"], [50099]) == []


@pytest.mark.parametrize("silent", ["ps", "launchctl print system"])
def test_a_mac_that_does_not_tell_is_no_clean_mac(silent: str) -> None:
    runner = studio()
    runner.commands[silent] = Result(1, "", "not allowed")
    with pytest.raises(LeftoversError, match=r"cannot see what is left on this Mac.*not allowed"):
        leftovers(runner, ["/opt/llamafleet"], [])
