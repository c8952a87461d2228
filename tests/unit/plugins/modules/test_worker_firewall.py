# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""worker_firewall against real packets: who reaches a worker port, and who does not. Each host a network namespace."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.tests.unit import netns
from ansible_collections.llamafleet.rpc.tests.unit.plugins.modules.test_mesh_modules import Mesh

pytestmark = [pytest.mark.real, pytest.mark.privileged]
PORT = 50052


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[netns.Lab]:
    with netns.lab(tmp_path) as made:
        yield made


def protect(host: netns.Host, check: bool = False, **options: Any) -> dict[str, Any]:
    path = str(host.directory / "fw" / "firewall.nft")
    return host.module("worker_firewall", check, manager="none", path=path, **options)


def table(host: netns.Host) -> str:
    return host.run("nft", "list", "ruleset").stdout


def test_only_the_primary_on_the_mesh_reaches_the_port(lab: netns.Lab) -> None:
    """Law 11, each way in tried: the LAN, a static route to the mesh address, a mesh host that is no primary."""
    mesh = Mesh(lab, "n1 n2 n3")
    outsider = lab.add("out")
    full = mesh.plan(["n1", "n2", "n3"], shape="full")
    for name in ("n1", "n2", "n3"):
        assert not mesh.bring_up(full, name)["failed"]
    n1, n2, n3 = (lab.hosts[name] for name in ("n1", "n2", "n3"))
    worker = full["hosts"]["n2"]["address"]
    outsider.run("ip", "route", "add", f"{worker}/32", "via", n2.address)
    with n2.listener(PORT), n2.listener(5000):
        # Without a filter all of these get in: binding to the mesh address is no protection.
        assert [host.connects(worker, PORT) for host in (n1, n3, outsider)] == ["open"] * 3
        result = protect(n2, interface=n2.interface, ports=full["hosts"]["n2"]["ports"])
        assert result["actions"] == ["write", "load"]
        assert n1.connects(worker, PORT) == "open"
        assert n2.connects(worker, PORT) == "open"
        assert n3.connects(worker, PORT) == "timeout"
        assert outsider.connects(worker, PORT) == "timeout"
        assert outsider.connects(n2.address, PORT) == "timeout"
        assert n1.connects(n2.address, PORT) == "timeout"
        # A packet with the primary's address that comes by the plain link is as foreign. Its answer would go to the
        # primary, so the attempt alone proves nothing: a later chain counts what gets through.
        spoofed = full["hosts"]["n1"]["address"]
        outsider.run("ip", "addr", "add", spoofed + "/32", "dev", "eth0")
        n2.run("nft", "add table inet t; add chain inet t input { type filter hook input priority 10; }")
        for port in (PORT, 5000):
            n2.run("nft", f"add rule inet t input ip saddr {spoofed} tcp dport {port} counter")
            assert outsider.connects(worker, port, spoofed) == "timeout"
        counted = re.findall(r"dport (\d+) counter packets (\d+)", table(n2))
        assert [(port, packets == "0") for port, packets in counted] == [(str(PORT), True), ("5000", False)]
        assert outsider.connects(n2.address, 5000) == "open"


def test_a_second_run_changes_nothing_and_a_flushed_or_altered_table_comes_back(lab: netns.Lab) -> None:
    host = lab.add("n2")
    host.run("nft", "add table inet mine; add chain inet mine input { type filter hook input priority 0; }")
    host.run("nft", "add rule inet mine input tcp dport 22 accept")
    options: dict[str, Any] = {"interface": "wg-llama", "ports": [{"port": PORT, "source": "10.99.0.1"}]}
    before = table(host)
    shown = protect(host, True, **options)
    assert shown["changed"]
    assert "tcp dport 50052 accept" in shown["diff"]["after"]
    assert table(host) == before
    assert not (host.directory / "fw").exists()
    protect(host, **options)
    assert not protect(host, **options)["changed"]
    host.run("nft", "delete table inet llamafleet")
    assert protect(host, **options)["actions"] == ["load"]
    host.run("nft", "insert rule inet llamafleet input accept")
    assert protect(host, **options)["actions"] == ["load"]
    host.run("nft", "flush chain inet llamafleet input")
    assert protect(host, **options)["actions"] == ["load"]
    assert protect(host, state="absent")["actions"] == ["write", "remove"]
    assert table(host) == before
    assert not (host.directory / "fw").exists()
    assert not protect(host, state="absent")["changed"]


def test_an_outgoing_connection_may_use_the_worker_port_as_its_own(lab: netns.Lab) -> None:
    """Worker ports may lie in the range of outgoing ports; answers to such a connection are not dropped."""
    host, other = lab.add("n2"), lab.add("n3")
    protect(host, interface="wg-llama", ports=[{"port": PORT, "source": None}])
    code = (
        "import socket, sys\n"
        "s = socket.socket(); s.settimeout(3); s.bind(('', 50052)); s.connect((sys.argv[1], 5000)); print(s.recv(1))\n"
    )
    with other.listener(5000):
        assert host.python(code, other.address).stdout.strip() == "b'x'"


def test_local_users_are_kept_out_when_asked(lab: netns.Lab) -> None:
    host = lab.add("n2")
    connect = (
        "import encodings.idna, os, socket, sys\n"
        "os.setuid(int(sys.argv[1]))\n"
        "try:\n    print(socket.create_connection(('127.0.0.1', 50052), 2).recv(1))\n"
        "except ConnectionRefusedError:\n    print('refused')\n"
    )
    ports = [{"port": PORT, "source": None}]
    with host.listener(PORT):
        protect(host, ports=ports)
        assert host.python(connect, 65534).stdout.strip() == "b'x'"
        protect(host, ports=ports, users=["4711"])
        seen = {user: host.python(connect, user).stdout.strip() for user in (0, 4711, 65534)}
    assert seen == {0: "b'x'", 4711: "b'x'", 65534: "refused"}


def test_a_drop_of_another_table_counts_more_than_our_accept_and_is_told_of(lab: netns.Lab) -> None:
    """Coexistence: a default-deny table of the operator's goes on to drop, and the warning says what to add there."""
    host, primary = lab.add("n2"), lab.add("n1")
    host.run(
        "nft", "add table inet mine; add chain inet mine input { type filter hook input priority 0; policy drop; }"
    )
    options: dict[str, Any] = {"interface": "eth0", "ports": [{"port": PORT, "source": primary.address}]}
    with host.listener(PORT):
        result = protect(host, **options)
        assert primary.connects(host.address, PORT) == "timeout"
        (warning,) = result["warnings"]
        rule = f'iifname "eth0" ip saddr {primary.address} tcp dport {PORT} accept'
        assert rule in str(warning)
        host.run("nft", f"add rule inet mine input {rule}")
        assert primary.connects(host.address, PORT) == "open"


def test_without_a_packet_filter_the_host_stops_unless_it_was_accepted_by_name(lab: netns.Lab, tmp_path: Path) -> None:
    """Law 11, B5-16: nft that cannot talk to the kernel."""
    host = lab.add("n2")
    broken = tmp_path / "bin"
    broken.mkdir()
    (broken / "nft").write_text("#!/bin/sh\necho 'cache initialization failed: Operation not supported' >&2\nexit 1\n")
    (broken / "nft").chmod(0o755)
    options: dict[str, Any] = {"interface": "wg-llama", "ports": [{"port": PORT, "source": "10.99.0.1"}]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(broken), prepend=":")
        refused = protect(host, **options)
        accepted = protect(host, unprotected="accept", **options)
    assert refused["failed"]
    assert "llama_worker_unprotected_port: accept" in refused["msg"]
    assert not accepted["failed"]
    assert not accepted["protected"]
    assert "open to whoever reaches them" in str(accepted["warnings"])
