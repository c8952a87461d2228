# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The job of a Mac's tunnel under a launchctl that keeps state. The tunnel itself: tests/unit/test_mac_roles.py."""

from __future__ import annotations

import os
import plistlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._launchd import Launchctl, Place
from ansible_collections.llamafleet.rpc.plugins.module_utils._mac_network import MARK
from ansible_collections.llamafleet.rpc.plugins.module_utils._mac_wireguard import Daemon
from ansible_collections.llamafleet.rpc.plugins.module_utils._mesh import MeshError
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Result
from ansible_collections.llamafleet.rpc.plugins.module_utils._wireguard import Live
from ansible_collections.llamafleet.rpc.tests.unit.launchd import Launchd

DUMP = f"(hidden)\t{'b' * 43}=\t51820\toff\n"


@dataclass
class Mac(Launchd):
    """A Mac whose tunnel comes up ``after`` so many looks at its interface."""

    after: int = 0
    routed: int = 0  # looks at the route until it leads into the tunnel

    def exists(self, path: str) -> bool:
        return path == MARK

    def read(self, path: str, limit: int = 1 << 20) -> str | None:
        return "utun7\n" if path.endswith(".name") else None

    def run(self, argv: Sequence[str], timeout: float = 30.0) -> Result:
        name = os.path.basename(argv[0])
        if name == "ifconfig" and argv[1:] == ["utun7"]:
            self.after -= 1
            inet = "\tinet 10.98.0.4 --> 10.98.0.4 netmask 0xfffff000\n"
            return Result(0, f"utun7: flags=8051<UP> mtu 1420\n{inet}", "") if self.after < 0 else Result(1, "", "")
        if name == "route":
            self.routed -= 1
            return Result(0, f"  interface: {'utun7' if self.routed < 0 else 'en0'}\n", "")
        if name == "wg":
            return Result(0, DUMP, "")
        if name == "ifconfig" and argv[2] == "mtu":
            return Result(1, "", "ifconfig: ioctl (set mtu): Invalid argument")
        return super().run(argv, timeout)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(str(tmp_path), (os.getuid(), tmp_path.stat().st_gid))


def daemon(mac: Mac, place: Place, address: str = "10.98.0.4") -> Daemon:
    launchctl = Launchctl(mac, 30.0, mac.sleep, mac.clock)
    return Daemon(mac, "/etc/wireguard", "wg-llama", address, 20, place, launchctl, mac.sleep)


def test_the_job_comes_back_after_wireguard_go_ended_and_holds_no_key(place: Place) -> None:
    tunnel = daemon(Mac(), place)
    assert tunnel.drop_in_differs(True)
    tunnel.write_drop_in(True)
    assert not tunnel.drop_in_differs(True)
    job = plistlib.loads(Path(place.path("llamafleet.wg-llama")).read_bytes())
    assert job["KeepAlive"] is True and job["RunAtLoad"] is True
    shell, flag, script, _name, *arguments = job["ProgramArguments"]
    assert (shell, flag) == ("/bin/sh", "-c")
    assert subprocess.run(["/bin/sh", "-n", "-c", script], check=False).returncode == 0
    assert arguments == [
        *("/bin/wireguard-go", "/bin/wg", "wg-llama", "/etc/wireguard/wg-llama.conf"),
        *("10.98.0.4/20", "10.98.0.0/20"),
    ]
    # The foreground: its end is the end of the job. Another address is another job.
    assert "-f utun" in script and daemon(Mac(), place, "10.98.0.5").drop_in_differs(True)


def test_the_start_is_waited_for(place: Place) -> None:
    mac = Mac(after=5, routed=3)
    tunnel = daemon(mac, place)
    tunnel.write_drop_in(True)
    tunnel.restart(Live(present=False))
    assert mac.changes == [f"bootstrap system {place.path('llamafleet.wg-llama')}"]
    assert mac.after < 0 and mac.routed < 0, "the route comes last"
    tunnel.restart(Live(present=True))
    assert mac.changes[1:] == ["bootout system/llamafleet.wg-llama", mac.changes[0]]


def test_a_tunnel_that_does_not_come_up_is_told_within_15_seconds(place: Place) -> None:
    mac = Mac(after=1 << 30)
    tunnel = daemon(mac, place)
    tunnel.write_drop_in(True)
    with pytest.raises(MeshError, match=r"wg-llama is not up 15 s after the start of llamafleet.wg-llama"):
        tunnel.restart(Live(present=False))
    assert mac.now <= 16


def test_an_mtu_that_macos_refuses_and_the_removal(place: Place) -> None:
    mac = Mac()
    tunnel = daemon(mac, place)
    with pytest.raises(MeshError, match=r"does not take an MTU of 9: .*Invalid argument"):
        tunnel.set_mtu(Live(present=True, device="utun7"), 9)
    tunnel.write_drop_in(True)
    tunnel.restart(Live(present=False))
    tunnel.remove(Live(present=True))
    assert mac.jobs == {} and os.listdir(place.directory) == []
