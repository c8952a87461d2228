# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""site.yml over ssh on four real hosts: from nothing to an answer, every change of the inventory, and gone again."""

from __future__ import annotations

import base64
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest
from ansible_collections.llamafleet.rpc.tests.fleet.lab import (
    ASK,
    FLEET,
    MESH_PORT,
    PORT,
    WORKERS,
    Inventory,
    Run,
    address,
    answer,
    ask,
    connect,
    endpoint,
    fleet,
    hosts,
    kept,
    pid,
    play,
    sh,
)

pytestmark = pytest.mark.fleet

#: Every secret that the collection handles. The private keys come to it when the hosts have made them.
CANARIES = {
    "preshared key": base64.b64encode(secrets.token_bytes(32)).decode(),
    "API key": "canary-api-" + secrets.token_hex(16),
    "model token": "canary-hf-" + secrets.token_hex(16),
}
API_KEYS = {"llama_primary_api_key_file": "/etc/llamafleet-api-keys"}
MESH = {"llama_mesh_preshared_keys": {"w1": CANARIES["preshared key"]}}


@pytest.fixture(scope="module")
def inventory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inventory]:
    with hosts(tmp_path_factory.mktemp("seed")):
        # Not as an argument, which the host's journal would keep.
        fleet("exec", "p1", "tee", API_KEYS["llama_primary_api_key_file"], text=CANARIES["API key"] + "\n")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_TOKEN", CANARIES["model token"])
            yield change(Inventory(tmp_path_factory.mktemp("inventory") / "i"))


def change(
    inventory: Inventory, without: Sequence[str] = (), hosts: Mapping[str, Mapping[str, object]] | None = None
) -> Inventory:
    """The inventory with secrets in it, and what a test changes."""
    changes = dict(hosts or {})
    changes["p1"] = {**API_KEYS, **changes.get("p1", {})}
    return inventory.change(without, changes, MESH)


@dataclass
class Site:
    first: Run
    second: Run
    commands: str  # command lines of all processes that ran on p1 and w1 during the first


@pytest.fixture(scope="module")
def site(inventory: Inventory) -> Site:
    watch = "while sleep 0.05; do cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '; echo; done > /srv/commands"
    for host in ("p1", "w1"):
        fleet("exec", host, "systemd-run", "-q", "--unit=watch", "sh", "-c", watch)
    first = play(inventory, "site", "-vvvv", "--diff")
    commands = "".join(
        sh(host, "systemctl stop watch; sort -u /srv/commands; rm /srv/commands") for host in ("p1", "w1")
    )
    return Site(first, play(inventory, "site"), commands)


# --- before anything is there ---


def test_a_check_of_bare_hosts_reaches_the_end_and_changes_nothing(inventory: Inventory) -> None:
    everything = "find /etc /opt -printf '%p %s %m %u %T@\\n' | sort; ls /var/lib; ip -o link; nft list ruleset"
    before = {host: sh(host, everything) for host in ("p1", "w1", "w3")}
    run = play(inventory, "site", "--check", "--diff")
    assert "PLAY [Start and prove the primaries]" in run.output
    for host, seen in before.items():
        assert sh(host, everything) == seen


# --- up ---


def test_a_second_run_changes_nothing_with_full_workers(site: Site) -> None:
    """Law 18. The model, its caches and buffers fill more than 60 % of what the workers lend."""
    plan = kept("p1", "plan")
    filled = {row["host"]: row["total"] / row["usable"] for row in plan["devices"]}
    assert sum(row["total"] for row in plan["devices"]) / sum(row["usable"] for row in plan["devices"]) >= 0.6
    assert set(site.second.changed) == {"localhost", "p1", *WORKERS}
    assert not any(site.second.changed.values()), site.second.changed
    print(f"no-op: {site.second.seconds:.1f} s, tasks per host {site.second.tasks}, filled {filled}")


def test_the_answer_comes_from_other_hosts_and_all_of_it_through_the_tunnel(site: Site) -> None:
    plan = kept("p1", "plan")
    assert {row["host"] for row in plan["devices"] if row["units"]} == set(WORKERS)
    argv = ("exec", "p1", "python3", "-c", ASK, 16, 60, API_KEYS["llama_primary_api_key_file"])
    quiet = ("sh", "-c", '"$@" >/dev/null', "sh", FLEET)
    seen = json.loads(fleet("capture", "p1", f"{PORT},{MESH_PORT}", "--", *quiet, *argv))
    assert "Paris" in answer()
    assert (seen["ports"][str(PORT)]["frames"], seen["missed"]) == (0, 0)
    assert seen["ports"][str(MESH_PORT)]["bytes"] > 4 * plan["predicted"]["wire_bytes_per_token"]


def test_a_worker_port_is_closed_to_all_but_the_primary(site: Site) -> None:
    """Law 11, from outside: an outsider and a mesh member, plainly, by a static route, and with garbage."""
    processes = {host: pid(host) for host in WORKERS}
    ports = {host: endpoint(host).split(":") for host in WORKERS}
    closed = {"timed out", "Connection refused", "No route to host", "Network is unreachable"}
    attempts = {}
    for source in ("x1", "w2", "p1"):
        attempts[source, "plain"] = connect(source, address("w1"), PORT, os.urandom(64))
    for source in ("x1", "w2"):
        attempts[source, "mesh"] = connect(source, ports["w1"][0], PORT, os.urandom(64))
        # The weak host model: the address of the mesh, asked for over the plain link.
        sh(source, f"ip route replace {ports['w1'][0]}/32 via {address('w1')}")
        attempts[source, "route"] = connect(source, ports["w1"][0], PORT, os.urandom(64))
        sh(source, f"ip route del {ports['w1'][0]}/32 via {address('w1')}")
    # The same by the primary's own address, as a neighbour may claim it.
    mesh_of_primary = sh("p1", "ip -4 -o addr show wg-llama").split()[3].split("/")[0]
    there = f"{ports['w1'][0]}/32 via {address('w1')} src {mesh_of_primary}"
    sh("x1", f"ip addr add {mesh_of_primary}/32 dev eth0; ip route replace {there}")
    attempts["x1", "claimed"] = connect("x1", ports["w1"][0], PORT, os.urandom(64))
    sh("x1", f"ip route del {ports['w1'][0]}/32; ip addr del {mesh_of_primary}/32 dev eth0")
    assert set(attempts.values()) <= closed, attempts
    noise = (
        "import os, socket; s = socket.socket(2, 2)\n"
        f"for _ in range(200): s.sendto(os.urandom(200), ('{address('w1')}', {MESH_PORT}))"
    )
    fleet("exec", "x1", "python3", "-c", noise)
    # The attempts are no accident of a network that does not work: the primary is let in.
    assert connect("p1", ports["w1"][0], PORT) == "connected"
    assert answer() and {host: pid(host) for host in WORKERS} == processes
    print("closed to all but the primary:", attempts)


def test_the_api_is_on_the_loopback_address_and_wants_its_key(site: Site) -> None:
    """Law 12."""
    assert connect("x1", address("p1"), 8080) == "Connection refused"
    without = fleet("exec", "p1", "python3", "-c", ASK, 4, 20, ok=False)
    assert "HTTP Error 401" in without
    assert ask(4)["choices"]


@pytest.mark.parametrize(
    ("host", "unit"), [("p1", "llama-server-default"), *((host, "llama-rpc-default-cpu") for host in WORKERS)]
)
def test_units_are_sandboxed_ordered_and_sound(site: Site, host: str, unit: str) -> None:
    exposure = sh(host, f"systemd-analyze security --no-pager {unit}.service | tail -1")
    print(host, exposure.strip())
    assert float(exposure.split(":")[1].split()[0]) <= 1.5
    assert (
        sh(host, f"systemd-analyze --man=no verify /etc/systemd/system/{unit}.service 2>&1 | grep {unit}; true") == ""
    )
    show = dict(
        line.split("=", 1)
        for line in sh(
            host, f"systemctl show {unit} -p After,Wants,User,MemoryMax,NRestarts,Restart,ControlGroup"
        ).splitlines()
    )
    assert (show["User"], show["Restart"], show["NRestarts"]) == ("llamafleet", "always", "0")
    needed = {"wg-quick@wg-llama.service", "llamafleet-awake.service", "network-online.target"}
    if host != "p1":
        needed.add("llamafleet-firewall.service")
        # 300 MiB and an eighth, but 64 MiB at least, in steps of 16 MiB. And the kernel knows of it.
        assert int(show["MemoryMax"]) == 352 << 20
        group = f"/sys/fs/cgroup/memory{show['ControlGroup']}/memory.limit_in_bytes"
        assert (
            int(sh(host, f"cat {group} 2>/dev/null || cat /sys/fs/cgroup{show['ControlGroup']}/memory.max"))
            == 352 << 20
        )
    assert needed <= set(show["Wants"].split()) and needed <= set(show["After"].split())
    # Case B4-08: what llama.cpp writes to is there before it starts.
    cache = (
        sh(host, f"systemctl show -p Environment {unit} | tr ' ' '\\n' | grep LLAMA_CACHE=").split("=", 1)[1].strip()
    )
    assert sh(host, f"stat -c '%U %a' {cache.rpartition('/')[0]}") == "llamafleet 750\n"
    assert "llamafleet" in sh(host, "systemd-inhibit --list --no-legend --no-pager")


def test_worker_ports_are_not_handed_out(site: Site) -> None:
    assert {sh(host, "cat /proc/sys/net/ipv4/ip_local_reserved_ports") for host in WORKERS} == {f"{PORT}\n"}


def test_no_secret_is_seen_anywhere(site: Site, inventory: Inventory) -> None:
    """Law 15. The first run was at -vvvv --diff, and every command line of two hosts was watched meanwhile."""
    found = dict(CANARIES)
    for host in ("p1", *WORKERS):
        found[f"private key of {host}"] = sh(
            host, "cat /etc/wireguard/*.key 2>/dev/null || wg show wg-llama private-key"
        ).strip()
        assert sh(host, "find /etc/wireguard -type f -perm /077") == ""
    assert all(len(value) > 30 and "\n" not in value for value in found.values())
    assert len(site.commands) > 1000 and "ggml-rpc-server" in site.commands
    places = {"output of -vvvv --diff": site.first.output, "output": site.second.output, "command lines": site.commands}
    for host in ("p1", *WORKERS):
        # Secrets lie in the files that are made for them, and there alone.
        where = "/etc/systemd /etc/sysctl.d /etc/llamafleet /var/lib/llamafleet /opt/llamafleet/jobs /tmp /var/tmp"
        places[f"files of {host}"] = sh(
            host,
            f"cat $(find {where} -type f -size -1M); cat /proc/[0-9]*/cmdline | tr '\\0' ' '; journalctl -o cat",
        )
    for what, secret in found.items():
        for place, text in places.items():
            assert secret not in text, f"the {what} is in the {place}"


# --- runs that change nothing ---


def test_a_limit_without_the_primary_stops_and_prints_the_one_that_works(site: Site, inventory: Inventory) -> None:
    run = play(inventory, "site", "--limit", "w1", ok=False)
    assert "run again with --limit 'w1,p1'" in run.flat
    assert not any(run.changed.values())


def test_a_limit_with_the_primary_changes_nothing_for_the_others(site: Site, inventory: Inventory) -> None:
    """A host outside of the limit stays in the mesh and in the plan (law 17)."""
    override = "/etc/systemd/system/llama-rpc-default-cpu.service.d/override.conf"
    sh(
        "w1",
        f"mkdir {override.rpartition('/')[0]}; printf '[Service]\\nEnvironment=CUDA_VISIBLE_DEVICES=1\\n' > {override}",
    )
    sh("w1", "systemctl daemon-reload")
    try:
        run = play(inventory, "site", "--limit", "w1,p1")
    finally:
        sh("w1", f"rm -r {override.rpartition('/')[0]}; systemctl daemon-reload")
    assert run.changed == {"p1": 0, "w1": 0}
    assert f"{override} changes what the unit llama-rpc-default-cpu says" in run.flat  # case B4-20
    assert "Paris" in answer()


def test_a_stage_runs_alone_by_its_tag(site: Site, inventory: Inventory) -> None:
    run = play(inventory, "site", "--tags", "llama_mesh")
    assert "Prove the tunnels" in run.output and "Build llama.cpp" not in run.task("llama_build")
    assert not any(run.changed.values())
    refused = play(inventory, "site", "--skip-tags", "llama_mesh", ok=False)
    assert "llama_mesh" in refused.flat and not any(refused.changed.values())


def test_a_check_shows_a_change_and_makes_none(site: Site, inventory: Inventory) -> None:
    change(
        inventory,
        hosts={
            "w1": {
                "llama_worker_instances": [{"name": "cpu", "port": 18799, "backend": "cpu", "memory_limit": "300MiB"}]
            }
        },
    )
    before = (pid("p1", "llama-server-default"), [pid(host) for host in WORKERS], kept("p1", "primary"))
    run = play(inventory, "site", "--check", "--diff")
    assert '-ExecStart="/opt/llamafleet/builds/' in run.output and '"18799"' in run.output
    # The other workers start anew with their primary (law 7), and that is all.
    assert run.changed["w1"] > 1 and run.changed["p1"] and run.changed["w2"] == run.changed["w3"] == 1
    assert (pid("p1", "llama-server-default"), [pid(host) for host in WORKERS], kept("p1", "primary")) == before
    assert "Paris" in answer()
    change(inventory)


# --- changes ---


def settle(inventory: Inventory) -> Run:
    """A run that changes something and one that does not."""
    run = play(inventory, "site")
    assert any(run.changed.values())
    again = play(inventory, "site")
    assert not any(again.changed.values()), again.output[-6000:]
    assert "Paris" in answer()
    return run


def test_a_host_goes_and_a_port_changes(site: Site, inventory: Inventory) -> None:
    stranger = endpoint("w3")
    instance = {"name": "cpu", "port": 18799, "backend": "cpu", "memory_limit": "330MiB", "threads": 1}
    change(
        inventory,
        without=["w3"],
        hosts={"w1": {"llama_worker_instances": [instance]}, "p1": {"llama_primary_n_ctx": 8192}},
    )
    settle(inventory)
    plan = kept("p1", "plan")
    assert {row["host"] for row in plan["devices"]} == {"w1", "w2"}
    assert endpoint("w1").endswith(":18799") and endpoint("w1") in plan["rpc"] and stranger not in plan["rpc"]
    assert sh("w1", "cat /proc/sys/net/ipv4/ip_local_reserved_ports") == "18799\n"
    assert f"dport {PORT}" not in sh("w1", "nft list table inet llamafleet")
    assert connect("w3", endpoint("w1").split(":", maxsplit=1)[0], 18799) in {
        "timed out",
        "No route to host",
        "Network is unreachable",
        "Required key not available",
    }


def test_a_host_comes_and_the_split_changes(site: Site, inventory: Inventory) -> None:
    change(
        inventory,
        hosts={
            "p1": {"llama_primary_n_ctx": 8192},
            "w1": {
                "llama_worker_instances": [
                    {
                        "name": "cpu",
                        "port": PORT,
                        "backend": "cpu",
                        "memory_limit": "300MiB",
                        "threads": 1,
                        "max_units": 3,
                    }
                ]
            },
        },
    )
    settle(inventory)
    plan = kept("p1", "plan")
    assert {row["host"]: row["units"] for row in plan["devices"]}["w1"] == 3
    assert {row["host"] for row in plan["devices"]} == set(WORKERS)
    assert plan["rpc"].count(",") == 2


# --- gone ---


def test_teardown_leaves_nothing(site: Site, inventory: Inventory) -> None:
    change(inventory)
    play(inventory, "teardown", "--diff")
    look = """
        getent passwd llamafleet
        ls -d /opt/llamafleet /var/lib/llamafleet /etc/llamafleet /etc/wireguard/* 2>/dev/null
        ls /etc/systemd/system /etc/systemd/system/*.wants /etc/sysctl.d /etc/sudoers.d /usr/local/bin | grep -i llama
        cat /proc/sys/net/ipv4/ip_local_reserved_ports
        nft list tables
        ip -o link show wg-llama 2>/dev/null
        systemctl list-units --all --no-legend '*llama*'
        systemctl --failed --no-legend
        ss -Htln | grep -E ':(8080|18711|18799) '
        ps -eo comm=,args= | grep -E '^(ggml-rpc|llama-serv|wireguard-go)|launc[h][.]py'
        true"""
    for host in ("p1", *WORKERS):
        assert sh(host, look).strip() == "", host
    again = play(inventory, "teardown")
    assert not any(again.changed.values()), again.changed
