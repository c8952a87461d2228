# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A removal that left a file, a process or a listener is found out."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

from ansible_collections.llamafleet.rpc.plugins.module_utils._leftovers import leftovers
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner


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
