# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The socket table and the processes behind it, on recorded text and on this machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils import _sockets
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Result, SystemRunner
from ansible_collections.llamafleet.rpc.tests.unit import servers
from ansible_collections.llamafleet.rpc.tests.unit.fakes import FakeRunner

RECORDINGS = Path(__file__).parents[2] / "recordings" / "sockets"

# Rows of a machine with a worker on 127.0.0.1:24311 that serves a primary; the queue holds a second connection.
PROC_NET_TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:5EF7 00000000:0000 0A 00000000:00000000 00:00000000 00000000   998        0 20262 1 00000000665f7bd8 100
   1: 0100007F:5EF7 0100007F:A343 01 00000000:00000000 00:00000000 00000000     0        0 0 2 000000002c5059ce 20 4 21
   2: 0100007F:5EF7 0100007F:A342 01 00000000:00000000 00:00000000 00000000   998        0 20307 2 000000002c5059cd 20 4
   3: 0100007F:A342 0100007F:5EF7 01 00000000:00000000 00:00000000 00000000     0        0 20306 2 000000002c5059cf 20 4
   4: 0100007F:A343 0100007F:5EF7 01 00000000:00000000 00:00000000 00000000     0        0 20308 2 000000002c5059d0 20 4
   5: 0100007F:A2F0 0100007F:5EF7 06 00000000:00000000 03:00001715 00000000     0        0 0 3 000000000a9c8a42
   6: 0100007F:5EF
"""
PROC_NET_TCP6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when
 0: 00000000000000000000000000000000:1F90 00000000000000000000000000000000:0000 0A 00000000:00000000 00:0 0 0 0 31
 1: 0000000000000000FFFF000002004D0A:1F90 0000000000000000FFFF000001004D0A:9C40 01 00000000:00000000 00:0 0 0 0 32
"""


def test_a_connection_between_two_local_ends_appears_once_served_before_waiting() -> None:
    found = _sockets.clients(_sockets.parse_proc_net(PROC_NET_TCP), "127.0.0.1", 24311)
    assert [(row.remote_port, row.waiting) for row in found] == [(0xA342, False), (0xA343, True)]


def test_a_line_that_the_read_limit_cut_off_is_left_out() -> None:
    assert len(_sockets.parse_proc_net(PROC_NET_TCP)) == 6


def test_ipv4_mapped_into_ipv6_is_ipv4_and_a_wildcard_server_is_one_server() -> None:
    table = _sockets.parse_proc_net(PROC_NET_TCP6)
    assert table[0].local_address == "::"
    found = _sockets.clients(table, "127.0.0.1", 8080)
    assert [(row.local_address, row.remote_address, row.remote_port) for row in found] == [
        ("10.77.0.2", "10.77.0.1", 40000)
    ]


def test_a_server_on_another_address_is_another_server() -> None:
    table = _sockets.parse_proc_net(PROC_NET_TCP)
    assert _sockets.clients(table, "10.77.0.2", 24311) == []
    assert _sockets.listeners(table, 24311, "10.77.0.2") == []


def test_local_ends_of_the_primary() -> None:
    table = _sockets.parse_proc_net(PROC_NET_TCP)
    assert _sockets.local_ends(table, "127.0.0.1", 24311) == ["127.0.0.1:41794", "127.0.0.1:41795"]


def test_lsof_of_macos_gives_the_same_picture() -> None:
    text = (RECORDINGS / "lsof-macos.txt").read_text()
    table = _sockets.parse_lsof(text)
    assert [(row.pid, row.uid) for row in _sockets.listeners(table, 50052)] == [(612, 501)]
    (client,) = _sockets.clients(table, "10.77.0.2", 50052)
    assert (client.remote_address, client.remote_port, client.waiting) == ("10.77.0.1", 40000, False)
    assert _sockets.listeners(table, 5000)[0].local_address == "0.0.0.0"


def test_a_host_without_proc_is_read_through_lsof_and_one_without_both_says_so() -> None:
    text = (RECORDINGS / "lsof-macos.txt").read_text()
    runner = FakeRunner(commands={"lsof": Result(1, text, "")})
    assert len(_sockets.read_table(runner)) == 5
    with pytest.raises(_sockets.SocketError, match="install lsof"):
        _sockets.read_table(FakeRunner())


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("0::/system.slice/llama-rpc-default-a.service\n", "llama-rpc-default-a.service"),
        ("0::/system.slice/system-llama\\x2drpc.slice/llama\\x2drpc@1.service\n", "llama-rpc@1.service"),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/llama-rpc-a.service\n", "llama-rpc-a.service"),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/app-foot.scope\n", None),
        ("0::/user.slice/user-1000.slice/session-4.scope\n", None),
        ("9:memory:/x.service\n1:name=systemd:/system.slice/sshd.service\n0::/\n", "sshd.service"),
        ("0::/\n", None),
        ("", None),
    ],
)
def test_the_service_of_a_process_comes_from_its_cgroup(text: str, unit: str | None) -> None:
    assert _sockets.unit_of_cgroup(text) == unit


def test_secrets_in_a_command_line_are_hidden_and_the_rest_stays() -> None:
    shown = _sockets.redact(
        [
            *["llama-server", "--api-key", "hunter2", "--api-key=hunter3", "--api-key-file", "/etc/llama/key"],
            *["--api_key", "hunter6", "WG_PRIVATE_KEY=hunter7", "--api_key=hunter8"],
            *["-hft", "hf_x", "--hf-token=hf_y", "HF_TOKEN=hf_z", "-c", "2048", "--special-tokens"],
            *["-H", "Authorization: Bearer hunter4", "http://ada:hunter5@10.0.0.2/", "--port", "8080"],
        ]
    )
    text = " ".join(shown)
    assert not any(secret in text for secret in ("hunter", "hf_"))
    assert "--api-key-file /etc/llama/key" in text
    assert "-c 2048" in text
    assert "http://ada:********@10.0.0.2/" in text


def host(parent: str = "/usr/bin/python3\0/usr/bin/supervisord\0-c\0/x.conf\0", **changed: str) -> FakeRunner:
    """A host where process 42 listens on port 24311."""
    files = {
        "/proc/net/tcp": PROC_NET_TCP,
        "/proc/self/stat": "1 (x) S",
        "/proc/42/stat": "42 (ggml) (rpc) S 7 42 42 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 55021 0 0",
        "/proc/42/status": "Name:\tggml-rpc-server\nUid:\t0\t0\t0\t0\n",
        "/proc/42/cmdline": "/opt/llama/ggml-rpc-server\0-p\x0024311\0",
        "/proc/42/cgroup": "0::/system.slice/llama-rpc-default-a.service\n",
        "/proc/42/environ": "HOME=/\0SUPERVISOR_PROCESS_NAME=llama-rpc-a\0SUPERVISOR_GROUP_NAME=llama-rpc-a\0",
        "/proc/7/cmdline": parent,
        "/proc/sys/kernel/random/boot_id": "0f2a-boot\n",
    }
    files.update(changed)
    links = {"/proc/42/exe": "/opt/llama/ggml-rpc-server (deleted)", "/proc/42/fd/3": "socket:[20262]"}
    return FakeRunner(files=files, links=links)


def test_everything_an_operator_asks_about_the_owner_of_a_port() -> None:
    assert _sockets.port_owners(host(), [24311]) == [
        {
            "port": 24311,
            "kind": "listener",
            "address": "127.0.0.1",
            "remote": None,
            "pid": 42,
            "exe": "/opt/llama/ggml-rpc-server",
            "exe_deleted": True,
            "cmdline": ["/opt/llama/ggml-rpc-server", "-p", "24311"],
            "user": "root",
            "started_at": "0f2a-boot:55021",
            "unit": "llama-rpc-default-a.service",
            "supervisor_program": "llama-rpc-a",
        }
    ]


def test_a_name_inherited_from_supervisor_is_not_a_program_of_it() -> None:
    process = _sockets.describe_process(host(parent="sshd: ada\0"), 42)
    assert process is not None
    assert process.supervisor_program is None


def test_without_root_the_user_of_a_port_is_known_and_its_process_is_not() -> None:
    runner = host()
    runner.links.clear()
    (owner,) = _sockets.port_owners(runner, [24311])
    assert (owner["pid"], owner["exe"]) == (None, None)
    assert owner["user"] == _sockets.user_name(998)


def test_a_zombie_and_a_missing_process_are_no_processes() -> None:
    zombie = host(**{"/proc/42/stat": "42 (x) Z 7 42 42 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 55021 0 0"})
    assert _sockets.describe_process(zombie, 42) is None
    assert _sockets.describe_process(zombie, 43) is None


def test_a_process_of_macos_is_described_through_ps() -> None:
    runner = FakeRunner(
        commands={
            "ps -ww -p 612 -o user= -o lstart= -o comm=": Result(
                0, "ada      Sat Nov 29 19:22:01 2026     /opt/llama/ggml-rpc-server\n", ""
            ),
            "ps -ww -p 612 -o args=": Result(0, "/opt/llama/ggml-rpc-server -p 50052 --api-key x\n", ""),
            "sysctl -n kern.bootsessionuuid": Result(0, "6B1E-BOOT\n", ""),
        }
    )
    process = _sockets.describe_process(runner, 612)
    assert process is not None
    assert (process.exe, process.user) == ("/opt/llama/ggml-rpc-server", "ada")
    assert process.started_at == "6B1E-BOOT:Sat Nov 29 19:22:01 2026"
    assert process.cmdline == ("/opt/llama/ggml-rpc-server", "-p", "50052", "--api-key", "********")


def test_a_port_in_time_wait_is_free_for_a_worker() -> None:
    assert _sockets.port_owners(host(), [0xA2F0]) == []


def test_an_outgoing_connection_that_holds_the_port_is_found_on_this_machine() -> None:
    """The local end of an outgoing connection makes a worker's bind fail just like a listener."""
    with servers.serve(servers.silent) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        mine = connection.getsockname()[1]
        (owner,) = _sockets.port_owners(SystemRunner(), [mine])
    assert (owner["kind"], owner["remote"], owner["pid"]) == ("connection", f"127.0.0.1:{port}", os.getpid())


def test_this_process_is_described_from_proc() -> None:
    process = _sockets.describe_process(SystemRunner(), os.getpid())
    assert process is not None
    assert process.exe == os.path.realpath(f"/proc/{os.getpid()}/exe")
    assert process.user == _sockets.user_name(os.getuid())
    assert process.started_at is not None
