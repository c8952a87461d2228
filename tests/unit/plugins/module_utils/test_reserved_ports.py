# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The kernel's list of reserved ports is everybody's: only our own part of it changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils import _reserved_ports as reserved
from hypothesis import given
from hypothesis import strategies as st


@given(st.sets(st.integers(1, 65535), max_size=40))
def test_a_list_is_read_back(ports: set[int]) -> None:
    assert reserved.parse_ports(reserved.format_ports(ports) + "\n") == ports


def test_what_others_reserved_stays(tmp_path: Path) -> None:
    kernel, path = tmp_path / "kernel", tmp_path / "90.conf"
    kernel.write_text("8080,50000-50010\n")

    def run(*ports: int, check: bool = False) -> bool:
        return reserved.converge(ports, check, str(path), str(kernel)).changed

    assert run(50052, check=True)
    assert (kernel.read_text(), path.exists()) == ("8080,50000-50010\n", False)
    assert run(50052)
    assert kernel.read_text() == "8080,50000-50010,50052\n"
    assert "ip_local_reserved_ports = 8080,50000-50010,50052\n" in path.read_text()
    assert not run(50052)
    kernel.write_text("8080\n")  # as after a boot without our file
    assert run(50052)
    assert run(50060)
    assert kernel.read_text() == "8080,50060\n"
    assert run()
    assert (kernel.read_text(), path.exists()) == ("8080\n", False)
    assert not run()


def test_a_file_of_somebody_else_and_a_strange_list_are_left_alone(tmp_path: Path) -> None:
    kernel, path = tmp_path / "kernel", tmp_path / "90.conf"
    kernel.write_text("all\n")
    with pytest.raises(reserved.PortError, match="no list of ports"):
        reserved.converge([1], False, str(path), str(kernel))
    path.write_text("net.ipv4.ip_forward = 1\n")
    with pytest.raises(reserved.PortError, match="not ours"):
        reserved.converge([1], False, str(path), str(kernel))
