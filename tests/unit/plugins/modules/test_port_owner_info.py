# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""port_owner_info as a task sees it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ansible_collections.llamafleet.rpc.plugins.modules import port_owner_info
from ansible_collections.llamafleet.rpc.tests.unit import servers


def test_a_listener_of_this_process_is_named_and_a_free_port_has_no_owner() -> None:
    with servers.serve(servers.silent) as port:
        result = servers.run_module(port_owner_info.main, {"ports": [port, servers.free_port()]})
    (owner,) = result["owners"]
    assert not result["changed"]
    assert (owner["port"], owner["kind"], owner["pid"]) == (port, "listener", os.getpid())
    assert owner["exe"] == os.path.realpath(f"/proc/{os.getpid()}/exe")


def test_a_port_out_of_range_is_an_error() -> None:
    result = servers.run_module(port_owner_info.main, {"ports": 65536})
    assert result["failed"]
    assert "65536" in result["msg"]


@pytest.mark.real
def test_a_worker_whose_file_was_replaced_shows_it(llama_bin: Path, tmp_path: Path) -> None:
    binary = tmp_path / "ggml-rpc-server"
    binary.write_bytes((llama_bin / "ggml-rpc-server").read_bytes())
    binary.chmod(0o755)
    port = servers.free_port()
    with servers.program([binary, "-p", port, "-d", "CPU"]) as process:
        servers.wait_for_port(port)
        binary.unlink()
        (owner,) = servers.run_module(port_owner_info.main, {"ports": port})["owners"]
    assert (owner["pid"], owner["exe"], owner["exe_deleted"]) == (process.pid, str(binary), True)
