# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""mesh_node, mesh_interface and mesh_info on real WireGuard interfaces, each host a network namespace."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._mesh import plan_mesh
from ansible_collections.llamafleet.rpc.tests.unit import netns

pytestmark = [pytest.mark.real, pytest.mark.privileged]
NETWORK = "10.99.0.0/20"
PRESHARED = "cHJlc2hhcmVkLCBhbmQgbm8gcmVhbCBrZXkgZWl0aGU="


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[netns.Lab]:
    with netns.lab(tmp_path) as made:
        yield made


class Mesh:
    """The role's steps without Ansible around them: n1 is the primary, all others are its workers."""

    def __init__(self, lab: netns.Lab, names: str = "n1 n2", **variables: Any) -> None:
        self.lab = lab
        self.variables = variables
        for name in names.split():
            lab.add(name)

    def node(self, name: str, **options: Any) -> dict[str, Any]:
        host = self.lab.hosts[name]
        return host.module("mesh_node", interface=host.interface, directory=str(host.directory), **options)

    def plan(self, names: list[str] | None = None, **options: Any) -> dict[str, Any]:
        members = list(self.lab.hosts) if names is None else names
        hosts = [
            {
                "inventory_hostname": name,
                "group_names": ["llama_primary" if name == "n1" else "llama_workers"],
                "llama_mesh__node": self.node(name),
                **self.variables.get(name, {}),
            }
            for name in members
        ]
        return plan_mesh(hosts, network=NETWORK, **options)

    def bring_up(self, plan: dict[str, Any], name: str, check: bool = False, **options: Any) -> dict[str, Any]:
        host, own = self.lab.hosts[name], plan["hosts"][name]
        return host.module(
            "mesh_interface",
            check,
            name=host.interface,
            directory=str(host.directory),
            manager="none",
            address=own["address"],
            prefix=plan["prefix"],
            peers=own["peers"],
            **options,
        )

    def info(self, plan: dict[str, Any], name: str, wait: int = 20) -> dict[str, Any]:
        host, peers = self.lab.hosts[name], plan["hosts"][name]["peers"]
        return host.module(
            "mesh_info", name=host.interface, peers=peers, required=[peer["host"] for peer in peers], wait=wait
        )

    def all_up(self, names: list[str] | None = None, **options: Any) -> dict[str, Any]:
        plan = self.plan(names)
        for name in plan["hosts"]:
            result = self.bring_up(plan, name, **options)
            assert not result["failed"], result
        return plan


def secrets_of(host: netns.Host) -> list[str]:
    return [(host.directory / f"{host.interface}.key").read_text().strip()]


def test_a_mesh_comes_up_is_proved_and_a_second_run_changes_nothing(lab: netns.Lab) -> None:
    """B5-04 and law 18; law 15: the key is in no result."""
    mesh = Mesh(lab)
    first = mesh.node("n1")
    assert first["changed"]
    plan = mesh.plan()
    keys = [key for host in lab.hosts.values() for key in secrets_of(host)]
    assert first["node"]["public_key"] == plan["hosts"]["n2"]["peers"][0]["public_key"]
    outputs = [first]
    for name in ("n1", "n2"):
        outputs.append(mesh.bring_up(plan, name, check=True))
        assert outputs[-1]["actions"] == ["write", "start"]
        assert not (lab.hosts[name].directory / f"{lab.hosts[name].interface}.conf").exists()
        outputs.append(mesh.bring_up(plan, name, preshared_keys={"n2": PRESHARED}))
    for name in ("n1", "n2"):
        outputs.append(mesh.info(plan, name))
        assert outputs[-1]["peers"][0]["status"] == "ok", outputs[-1]
        assert not mesh.node(name)["changed"]
        assert not mesh.bring_up(plan, name, preshared_keys={"n2": PRESHARED})["changed"]
    host = lab.hosts["n1"]
    for file in (f"{host.interface}.key", f"{host.interface}.conf"):
        assert stat.S_IMODE((host.directory / file).stat().st_mode) == 0o600
    assert not any(secret in json.dumps(outputs) for secret in [*keys, PRESHARED])
    # The next plan is the same, from what the hosts keep.
    assert mesh.plan()["hosts"]["n2"]["address"] == plan["hosts"]["n2"]["address"]


def test_no_secret_is_ever_an_argument(lab: netns.Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 15: every program that the modules start writes down its arguments and its environment."""
    log, shims = tmp_path / "log", tmp_path / "bin"
    shims.mkdir()
    for name in ("wg", "wg-quick", "ip", "sh"):
        shim = shims / name
        shim.write_text(f'#!/bin/bash\n{{ echo "$0 $*"; env; }} >> {log}\nexec {shutil.which(name)} "$@"\n')
        shim.chmod(0o755)
    mesh = Mesh(lab, "n1")
    monkeypatch.setenv("PATH", str(shims), prepend=":")
    mesh.all_up()
    keys = secrets_of(lab.hosts["n1"])
    mesh.node("n1", rotate=True)
    mesh.all_up(preshared_keys={"n2": PRESHARED})
    seen = log.read_text()
    assert "/wg pubkey" in seen
    assert "/wg syncconf" in seen
    assert "/wg-quick up" in seen
    assert not any(secret in seen for secret in [*keys, *secrets_of(lab.hosts["n1"]), PRESHARED])


def test_streams_survive_a_new_peer_and_a_removed_one_loses_access(lab: netns.Lab) -> None:
    """wg syncconf: an open connection goes on while peers come and go."""
    mesh = Mesh(lab, "n1 n2 n3")
    plan = mesh.all_up(["n1", "n2"])
    n1, n2, n3 = (lab.hosts[name] for name in ("n1", "n2", "n3"))
    address = plan["hosts"]["n2"]["address"]
    stream = (
        "import socket, sys, time\n"
        "s = socket.create_connection((sys.argv[1], 5000), 10); s.settimeout(10)\n"
        "print('up', flush=True)\n"
        "for line in sys.stdin:\n    s.sendall(b'x'); print(s.recv(1), flush=True)\n"
    )
    server = (
        "import socket, sys\n"
        "s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "s.bind((sys.argv[1], 5000)); s.listen(1); print('ready', flush=True)\n"
        "c, _ = s.accept()\n"
        "while data := c.recv(1):\n    c.sendall(data)\n"
    )
    with (
        subprocess.Popen(n2.argv(sys.executable, "-c", server, address), stdout=subprocess.PIPE) as answers,
        subprocess.Popen(
            n1.argv(sys.executable, "-c", stream, address), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as asks,
    ):
        try:
            assert answers.stdout and asks.stdin and asks.stdout
            assert answers.stdout.readline() == b"ready\n"
            assert asks.stdout.readline() == b"up\n"

            def alive() -> bool:
                assert asks.stdin and asks.stdout
                asks.stdin.write(b"\n")
                asks.stdin.flush()
                return asks.stdout.readline() == b"b'x'\n"

            assert alive()
            grown = mesh.plan()
            assert grown["hosts"]["n2"]["address"] == address
            assert mesh.bring_up(grown, "n1")["actions"] == ["write", "sync"]
            mesh.bring_up(grown, "n3")
            assert mesh.info(grown, "n3")["peers"][0]["status"] == "ok"
            assert alive()
            shrunk = mesh.plan(["n1", "n2"])
            assert mesh.bring_up(shrunk, "n1")["actions"] == ["write", "sync"]
            assert alive()
            assert mesh.info(grown, "n3", wait=0)["failed"]
            assert n3.run("ping", "-c1", "-W1", plan["hosts"]["n1"]["address"], check=False).returncode != 0
        finally:
            asks.kill()
            answers.kill()


def test_a_configuration_that_wg_refuses_leaves_the_running_interface_as_it_is(lab: netns.Lab) -> None:
    """B5-06: a syntax error, loaded the way converge loads."""
    mesh = Mesh(lab)
    mesh.all_up()
    host = lab.hosts["n1"]
    before = host.run("wg", "showconf", host.interface).stdout
    code = (
        "import sys\n"
        "from ansible_collections.llamafleet.rpc.plugins.module_utils import _wireguard, _runner\n"
        "text = open(sys.argv[2]).read().replace('AllowedIPs', 'AllowedIP')\n"
        "_wireguard.sync(_runner.SystemRunner(), sys.argv[1], text, 1, sys.argv[3])\n"
    )
    config = host.directory / f"{host.interface}.conf"
    done = host.python(code, host.interface, config, host.directory, check=False)
    assert done.returncode != 0
    assert "the running interface is unchanged" in done.stderr
    assert host.run("wg", "showconf", host.interface).stdout == before
    assert sorted(path.name for path in host.directory.iterdir()) == [config.name, f"{host.interface}.key"]


def test_a_dead_or_hanging_wireguard_go_is_seen_and_healed(lab: netns.Lab) -> None:
    """The trap: the interface goes with its process, and no unit notices."""
    mesh = Mesh(lab)
    plan = mesh.all_up()
    host = lab.hosts["n2"]
    assert mesh.info(plan, "n2")["peers"][0]["status"] == "ok"
    for sign, status, action in (
        (signal.SIGKILL, "not_running", "start"),
        (signal.SIGSTOP, "not_running", "restart"),
    ):
        os.kill(wireguard_pid(host), sign)
        verdict = mesh.info(plan, "n2", wait=0)
        assert verdict["failed"]
        assert verdict["peers"][0]["status"] == status
        assert mesh.bring_up(plan, "n2")["actions"] == [action]
        assert mesh.info(plan, "n2")["peers"][0]["status"] == "ok"
        assert not mesh.bring_up(plan, "n2")["changed"]


def wireguard_pid(host: netns.Host) -> int:
    for pid in netns.call(["ip", "netns", "pids", host.namespace]).stdout.split():
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if words[0].endswith("wireguard-go") and host.interface in words:
            return int(pid)
    raise AssertionError("no wireguard-go in " + host.namespace)


def test_what_was_changed_by_hand_is_put_right_with_the_least(lab: netns.Lab) -> None:
    mesh = Mesh(lab)
    plan = mesh.all_up()
    host = lab.hosts["n1"]
    peer = plan["hosts"]["n1"]["peers"][0]
    for argv, actions in (
        (("wg", "set", host.interface, "peer", peer["public_key"], "remove"), ["sync"]),
        (("wg", "set", host.interface, "peer", peer["public_key"], "allowed-ips", "0.0.0.0/0"), ["sync"]),
        (("wg", "set", host.interface, "listen-port", "51999"), ["sync"]),
        (("ip", "link", "set", "dev", host.interface, "mtu", "1300"), ["mtu"]),
        (("ip", "addr", "flush", "dev", host.interface), ["restart"]),
    ):
        host.run(*argv)
        assert mesh.bring_up(plan, "n1")["actions"] == actions, argv
        assert not mesh.bring_up(plan, "n1")["changed"], argv
    assert mesh.info(plan, "n1")["peers"][0]["status"] == "ok"


def test_a_rotated_key_replaces_the_old_one_everywhere(lab: netns.Lab) -> None:
    """B5-07: after a change of the key all peers are rendered in the same run."""
    mesh = Mesh(lab)
    mesh.all_up()
    old = secrets_of(lab.hosts["n2"])
    assert mesh.node("n2", rotate=True)["node"]["key_changed"]
    assert secrets_of(lab.hosts["n2"]) != old
    plan = mesh.plan()
    for name in ("n1", "n2"):
        result = mesh.bring_up(plan, name)
        assert result["actions"] == ["write", "sync"]
    assert "PrivateKey = (hidden, new)" in result["diff"]["after"]
    assert mesh.info(plan, "n1")["peers"][0]["status"] == "ok"
    assert not mesh.node("n2")["node"]["key_changed"]


def test_a_preshared_key_comes_changes_and_goes_without_a_restart(lab: netns.Lab) -> None:
    """`wg syncconf` keeps the key of a peer whose section has none any more, so the interface is asked each time."""
    mesh = Mesh(lab)
    plan = mesh.all_up()
    host = lab.hosts["n1"]
    other = PRESHARED.replace("c", "d", 1)
    for keys, live in (({"n2": PRESHARED}, PRESHARED), ({"n2": other}, other), ({}, "(none)")):
        for name in ("n1", "n2"):
            assert mesh.bring_up(plan, name, preshared_keys=keys)["actions"] == ["write", "sync"]
            assert not mesh.bring_up(plan, name, preshared_keys=keys)["changed"]
        assert host.run("wg", "show", host.interface, "preshared-keys").stdout.split()[1] == live
        assert mesh.info(plan, "n1")["peers"][0]["status"] == "ok"


def test_jumbo_cards_on_a_plain_path_do_not_make_a_jumbo_tunnel(lab: netns.Lab) -> None:
    """B5-01: both cards say 9000; what lies between carries 1500 for one host and 9000 for the other."""
    mesh = Mesh(lab, "")
    for name, carried in (("n1", 9000), ("n2", 1500), ("n3", 9000)):
        host = lab.add(name, mtu=9000)
        port = f"p{list(lab.hosts).index(name) + 11}"
        netns.call(["ip", "-n", lab.core, "link", "set", port, "mtu", carried])
        assert host.run("cat", "/sys/class/net/eth0/mtu").stdout.strip() == "9000"
    plan = mesh.plan()
    assert plan["hosts"]["n1"]["peers"][0]["path_mtu"] == 9000
    assert [mesh.bring_up(plan, name)["mtu"] for name in ("n1", "n2", "n3")] == [1420, 1420, 8920]
    for name in ("n2", "n3"):
        assert mesh.info(plan, name)["peers"][0]["status"] == "ok"
    assert not any(mesh.bring_up(plan, name)["changed"] for name in ("n1", "n2", "n3"))


def test_a_worker_behind_a_nat_calls_its_primary(lab: netns.Lab) -> None:
    """B5-08, with real packets: the primary has no endpoint for n2, and learns it from n2's own."""
    mesh = Mesh(lab, n2={"llama_mesh_nat": True, "llama_mesh_underlay": "eth0"})
    plan = mesh.plan()
    # In the lab both share a subnet, so take away what a NAT would take away.
    plan["hosts"]["n1"]["peers"][0]["endpoint"] = None
    plan["hosts"]["n2"]["peers"][0]["keepalive"] = 25
    for name in ("n1", "n2"):
        assert not mesh.bring_up(plan, name)["failed"]
    config = (lab.hosts["n1"].directory / f"{lab.hosts['n1'].interface}.conf").read_text()
    assert "Endpoint" not in config
    netns.wait_until(lambda: mesh.info(plan, "n1")["peers"][0]["status"] == "ok")


def test_a_route_past_the_tunnel_fails_the_proof(lab: netns.Lab) -> None:
    """B5-17: `ip route get` of a peer answers with eth0."""
    mesh = Mesh(lab)
    plan = mesh.all_up()
    host = lab.hosts["n2"]
    host.run("ip", "route", "add", plan["hosts"]["n1"]["address"] + "/32", "dev", "eth0")
    result = mesh.info(plan, "n2", wait=0)
    assert result["failed"]
    assert result["peers"][0]["status"] == "wrong_route"


def test_a_udp_port_of_another_service_is_named_before_anything_changes(lab: netns.Lab) -> None:
    """B5-12."""
    mesh = Mesh(lab, "n1")
    code = (
        "import socket, time\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('', 51820))\n"
        "print(1, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen(lab.hosts["n1"].argv(sys.executable, "-c", code), stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout and other.stdout.readline() == b"1\n"
            result = mesh.node("n1")
        finally:
            other.kill()
    assert result["failed"]
    assert f"(pid {other.pid}" in result["msg"]
    assert list(lab.hosts["n1"].directory.iterdir()) == []


def test_what_is_not_ours_is_left_alone(lab: netns.Lab) -> None:
    mesh = Mesh(lab)
    plan = mesh.plan()
    host = lab.hosts["n1"]
    config = host.directory / f"{host.interface}.conf"
    config.write_text("[Interface]\nListenPort = 1\n")
    assert "is not ours" in mesh.bring_up(plan, "n1")["msg"]
    removed = host.module(
        "mesh_interface", name=host.interface, directory=str(host.directory), manager="none", state="absent"
    )
    assert "is not ours" in removed["msg"]
    assert config.read_text() == "[Interface]\nListenPort = 1\n"


def test_absent_leaves_nothing(lab: netns.Lab) -> None:
    mesh = Mesh(lab)
    mesh.all_up()
    host = lab.hosts["n1"]
    options: dict[str, Any] = {
        "name": host.interface,
        "directory": str(host.directory),
        "manager": "none",
        "state": "absent",
    }
    assert host.module("mesh_interface", True, **options)["changed"]
    assert host.run("ip", "link", "show", "dev", host.interface).returncode == 0
    assert host.module("mesh_interface", **options)["actions"] == ["stop", "remove", "forget key"]
    assert host.run("ip", "link", "show", "dev", host.interface, check=False).returncode != 0
    assert list(host.directory.iterdir()) == []
    assert not host.module("mesh_interface", **options)["changed"]
