# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The wire probe against real workers, fake ones and strangers."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils import _rpc_wire, _sockets
from ansible_collections.llamafleet.rpc.plugins.module_utils._rpc_wire import Probe, WireError, connect_only, probe
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner
from ansible_collections.llamafleet.rpc.tests.unit import servers
from ansible_collections.llamafleet.rpc.tests.unit.fakes import FakeRunner

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HOST = "127.0.0.1"
MIB = 1 << 20
GIB = 1 << 30
#: A primary that has no connection yet.
UNCONNECTED = FakeRunner({"/proc/net/tcp": "head\n"})


def ask(port: int, timeout: float = 4.0, expected: str | None = "7.0.0", clients: tuple[str, ...] = ()) -> Probe:
    return probe(SystemRunner(), HOST, port, timeout, expected, clients)


def ask_timed(port: int, timeout: float = 4.0) -> tuple[Probe, float]:
    start = time.monotonic()
    answer = ask(port, timeout)
    return answer, time.monotonic() - start


def test_devices_are_reported_in_bytes_as_claimed() -> None:
    with servers.serve(servers.worker((7, 0, 0), [(1 * GIB, 2 * GIB), (3 * GIB, 4 * GIB)])) as port:
        answer = ask(port)
    assert answer.status == "ok"
    assert answer.protocol == "7.0.0"
    assert answer.devices == (
        {"index": 0, "total": 2 * GIB, "free": 1 * GIB},
        {"index": 1, "total": 4 * GIB, "free": 3 * GIB},
    )
    assert answer.latency_ms is not None
    assert 0 < answer.latency_ms < 4000
    assert answer.hint == ""


def test_free_is_never_more_than_there_is() -> None:
    """B1-09: the twin of an integrated GPU offers 122880 MiB, of which 124831 MiB are free."""
    with servers.serve(servers.worker((7, 0, 0), [(124831 * MIB, 122880 * MIB)])) as port:
        (found,) = ask(port).devices
    assert found == {"index": 0, "total": 122880 * MIB, "free": 122880 * MIB}


@pytest.mark.parametrize("version", [(6, 0, 0), (8, 0, 0), (7, 1, 0), (7, 0, 9)])
def test_any_of_the_three_numbers_makes_it_incompatible(version: tuple[int, int, int]) -> None:
    """B2-01: a worker that still runs the old binary is flagged before any primary starts; 7.0.9 too, which llama.cpp
    itself accepts."""
    with servers.serve(servers.worker(version, [(GIB, GIB)])) as port:
        answer = ask(port)
    spoken = "{}.{}.{}".format(*version)
    assert (answer.status, answer.protocol, answer.devices) == ("incompatible", spoken, ())
    assert spoken in answer.hint
    assert "expected 7.0.0" in answer.hint
    assert "restart the workers first, then the primary" in answer.hint


def test_without_an_expectation_a_later_protocol_is_reported_as_it_is() -> None:
    with servers.serve(servers.worker((6, 0, 0), [(GIB, GIB)])) as port:
        answer = ask(port, expected=None)
    assert (answer.status, answer.protocol) == ("ok", "6.0.0")


@pytest.mark.parametrize("version", [(2, 0, 0), (3, 6, 1)])
@pytest.mark.parametrize("expected", [None, "7.0.0"])
def test_a_worker_with_a_three_byte_hello_is_recognised_by_its_version(
    version: tuple[int, int, int], expected: str | None
) -> None:
    with servers.serve(servers.old_worker(version)) as port:
        answer = ask(port, expected=expected)
    assert (answer.status, answer.protocol) == ("incompatible", "{}.{}.{}".format(*version))


@pytest.mark.parametrize(
    ("talk", "status", "why"),
    [
        (servers.silent, "timeout", "accepts connections but did not answer"),
        (servers.patient_web, "timeout", "accepts connections but did not answer"),
        (servers.dripping, "timeout", "accepts connections but did not answer"),
        (servers.web, "not_rpc", "it answers in HTTP"),
        (servers.closing, "not_rpc", "closes the connection"),
        (servers.boasting, "not_rpc", f"a message of {1 << 62} bytes"),
        (servers.worker((7, 0, 0), count=1 << 31), "not_rpc", f"claims {1 << 31} devices"),
        (servers.crashing_worker, "refused", "answered HELLO and then hung up"),
    ],
)
def test_strangers_are_told_apart_within_the_deadline(
    talk: Callable[[socket.socket], None], status: str, why: str
) -> None:
    """B8-10: a silent peer or a web server on the port is an error in less than five seconds."""
    with servers.serve(talk) as port:
        answer, seconds = ask_timed(port, timeout=1.5)
    assert answer.status == status
    assert why in answer.hint
    assert f"{HOST}:{port}" in answer.hint
    assert seconds < 2.5


def test_nobody_there_is_refused_with_the_reasons_of_a_restart_loop() -> None:
    answer, seconds = ask_timed(servers.free_port())
    assert answer.status == "refused"
    assert "restart loop" in answer.hint
    assert seconds < 1


def test_each_class_of_failure_to_connect_gives_advice_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """B5-15: refused, timeout and no route each say something else (no other network than the loopback is touched)."""
    advice = {}
    for status, failure in {
        "refused": ConnectionRefusedError(111, "Connection refused"),
        "timeout": socket.timeout("timed out"),
        "unreachable": OSError(113, "No route to host"),
    }.items():

        def refuse(*_arguments: object, failure: Exception = failure, **_options: object) -> socket.socket:
            raise failure

        monkeypatch.setattr(socket, "create_connection", refuse)
        answer = connect_only(UNCONNECTED, "10.77.0.9", 18711, 1)
        assert answer.status == status
        advice[status] = answer.hint
    assert "restart loop" in advice["refused"]
    assert "firewall drops them" in advice["timeout"]
    assert "no route to the host" in advice["unreachable"]
    assert len(set(advice.values())) == 3


def test_three_workers_of_which_one_is_gone_and_one_takes_no_connection() -> None:
    """B5-15 on real sockets: a: refused, b: its queue is full, so that attempts time out, c: ok."""
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind((HOST, 0))
        full.listen(0)
        for waiting in (first, second):
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        time.sleep(0.1)
        with servers.serve(servers.silent) as good:
            ports = [servers.free_port(), full.getsockname()[1], good]
            answers = [connect_only(UNCONNECTED, HOST, port, 0.5) for port in ports]
    assert [answer.status for answer in answers] == ["refused", "timeout", "ok"]


def test_a_wireguard_interface_without_that_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> socket.socket:
        raise OSError(126, "Required key not available")

    monkeypatch.setattr(socket, "create_connection", refuse)
    answer = connect_only(UNCONNECTED, "10.77.0.9", 18711, 1)
    assert answer.status == "unreachable"
    assert "no WireGuard peer has that address" in answer.hint


def test_connect_only_sends_nothing() -> None:
    received: list[bytes] = []
    with servers.serve(lambda connection: received.append(connection.recv(64))) as port:
        answer = connect_only(SystemRunner(), HOST, port, 2)
        end = time.monotonic() + 2
        while not received and time.monotonic() < end:
            time.sleep(0.01)
    assert answer.status == "ok"
    assert answer.protocol is None
    assert received == [b""]


def test_a_primary_that_is_connected_does_not_fill_the_queue_of_its_worker() -> None:
    with socket.socket() as busy:
        busy.bind((HOST, 0))
        busy.listen(1)
        port = busy.getsockname()[1]
        with socket.create_connection((HOST, port)):
            answers = [connect_only(SystemRunner(), HOST, port, 0.5) for _number in range(4)]
            others = _sockets.clients(_sockets.read_table(SystemRunner()), HOST, port)
    assert [answer.status for answer in answers] == ["busy_ours"] * 4
    assert len(others) == 1


@pytest.mark.parametrize(
    ("host", "port", "says"),
    [
        ("localhost", 18711, "not an IPv4 address"),
        ("::1", 18711, "not an IPv4 address"),
        ("10.0.0", 18711, "not an IPv4 address"),
        ("10.0.0.2\n", 18711, "not an IPv4 address"),
        ("0.0.0.0", 18711, "not one for binding to all"),
        ("10.0.0.2", 0, "from 1 to 65535"),
        ("10.0.0.2", 65536, "from 1 to 65535"),
    ],
)
def test_addresses_that_a_worker_cannot_have_are_errors(host: str, port: int, says: str) -> None:
    with pytest.raises(WireError, match=says):
        probe(SystemRunner(), host, port, 1)


@pytest.mark.parametrize("text", ["10.0.0.2", "10.0.0.2:", "10.0.0.2:18711x", "[::1]:18711", "host:18711", ":18711"])
def test_endpoints_that_are_no_ipv4_and_port_are_errors(text: str) -> None:
    with pytest.raises(WireError):
        _rpc_wire.parse_endpoint(text)


def test_an_endpoint_is_taken_apart() -> None:
    assert _rpc_wire.parse_endpoint("10.0.0.2:18711") == ("10.0.0.2", 18711)


def table_with_client(state: str = "01", inode: int = 4711) -> FakeRunner:
    """10.77.0.2:18711 listens and 10.77.0.1:40000 is connected; anything that is sent there would fail loudly."""
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    tail = "00000000:00000000 00:00000000 00000000     0        0"
    rows = (
        f"   0: 02004D0A:4917 00000000:0000 0A {tail} 4710 1\n"
        f"   1: 02004D0A:4917 01004D0A:9C40 {state} {tail} {inode} 1\n"
    )
    return FakeRunner(files={"/proc/net/tcp": head + rows})


@pytest.mark.parametrize(
    ("clients", "primary_sockets", "status"),
    [
        (["10.77.0.1"], None, "busy_ours"),
        (["10.77.0.1"], ["10.77.0.1:40000"], "busy_ours"),
        (["10.77.0.1"], ["10.77.0.1:40001"], "busy_stale"),
        (["10.77.0.1"], [], "busy_stale"),
        (["10.77.0.3"], None, "busy_foreign"),
        ([], None, "busy_foreign"),
    ],
)
def test_a_busy_worker_is_judged_by_the_other_end_of_its_connection(
    clients: list[str], primary_sockets: list[str] | None, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 7: healthy only if the primary shows that very connection; and not a byte is sent."""
    monkeypatch.setattr(socket, "create_connection", lambda *_a, **_k: pytest.fail("spoke to a busy worker"))
    answer = probe(table_with_client(), "10.77.0.2", 18711, 1, "7.0.0", clients, primary_sockets)
    assert (answer.status, answer.client) == (status, "10.77.0.1:40000")
    assert bool(answer.hint) is (status != "busy_ours")


def test_a_client_that_has_gone_unnoticed_is_stale() -> None:
    answer = probe(table_with_client(state="08"), "10.77.0.2", 18711, 0.2, "7.0.0", ["10.77.0.1"], ["10.77.0.1:40000"])
    assert answer.status == "busy_stale"
    assert "the client has closed it" in answer.hint


def test_a_worker_that_is_just_done_with_its_client_gets_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaving(FakeRunner):
        def read(self, path: str, limit: int = 1 << 20) -> str | None:
            text = super().read(path, limit)
            self.files["/proc/net/tcp"] = "head\n"
            return text

    def refuse(*_arguments: object, **_options: object) -> socket.socket:
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refuse)
    leaving = Leaving(files=table_with_client(state="08").files)
    assert probe(leaving, "10.77.0.2", 18711, 2).status == "refused"


@pytest.mark.real
def test_a_real_worker_with_two_devices_answers_with_its_protocol(llama_bin: Path) -> None:
    port = servers.free_port()
    with servers.program([llama_bin / "ggml-rpc-server", "-p", port, "-d", "CPU,CPU"]):
        servers.wait_for_port(port)
        answer = ask(port)
    assert (answer.status, answer.protocol) == ("ok", "7.0.0")
    assert [device["index"] for device in answer.devices] == [0, 1]
    assert all(device["total"] >= device["free"] > 0 for device in answer.devices)


@pytest.mark.real
def test_a_held_worker_is_busy_at_once_lives_on_and_answers_again(llama_bin: Path) -> None:
    """B8-09: hold an idle connection to the worker: "busy", not a hang; the worker survives the probe, whatever it does
    about SIGPIPE."""
    port = servers.free_port()
    with servers.program([llama_bin / "ggml-rpc-server", "-p", port, "-d", "CPU"]) as process:
        servers.wait_for_port(port)
        with socket.create_connection((HOST, port)) as holder:
            mine = "{}:{}".format(*holder.getsockname()[:2])
            foreign, seconds = ask_timed(port)
            ours = ask(port, clients=(HOST,))
            stale = probe(SystemRunner(), HOST, port, 4, "7.0.0", [HOST], ["127.0.0.1:9"])
            from_the_primary = [connect_only(SystemRunner(), HOST, port, 2).status for _number in range(4)]
        assert (foreign.status, foreign.client) == ("busy_foreign", mine)
        assert seconds < 1
        assert (ours.status, ours.client) == ("busy_ours", mine)
        assert stale.status == "busy_stale"
        # More often than its queue holds: each run of site.yml asks, for as long as the primary serves.
        assert from_the_primary == ["busy_ours"] * 4
        assert ask(port).status == "ok"
        time.sleep(0.2)
        assert process.poll() is None
        assert ask(port).status == "ok"


@pytest.mark.real
def test_a_real_worker_of_another_protocol_than_expected(llama_bin: Path) -> None:
    """B2-01 against the real binary."""
    port = servers.free_port()
    with servers.program([llama_bin / "ggml-rpc-server", "-p", port, "-d", "CPU"]):
        servers.wait_for_port(port)
        answer = ask(port, expected="7.0.1")
    assert (answer.status, answer.protocol) == ("incompatible", "7.0.0")


@pytest.mark.real
@pytest.mark.parametrize("wrong", [["-m", "2000"], ["-H", "10.77.0.9"], ["-H", "localhost"], ["-H", "::1"]])
def test_a_worker_that_ends_with_status_0_is_refused_on_the_wire(llama_bin: Path, wrong: list[str]) -> None:
    """B4-15: the exit status says success, the probe on the exact address says refused."""
    port = servers.free_port()
    with servers.program([llama_bin / "ggml-rpc-server", "-p", port, "-d", "CPU", *wrong]) as process:
        assert process.wait(10) == 0
        answer = ask(port)
    assert answer.status == "refused"
    assert "status 0" in answer.hint


@pytest.mark.real
def test_a_worker_whose_port_is_taken_ends_with_status_0_and_is_not_ok(llama_bin: Path) -> None:
    """B4-15, the variant of a taken port: what answers there is a stranger."""
    with servers.serve(servers.web) as port:
        with servers.program([llama_bin / "ggml-rpc-server", "-p", port, "-d", "CPU"]) as process:
            assert process.wait(10) == 0
        assert ask(port).status == "not_rpc"
