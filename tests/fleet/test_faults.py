# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What breaks in a running fleet: what must hold meanwhile, what is said, and that the next site.yml brings it back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.llamafleet.rpc.tests.fleet.lab import (
    PORT,
    WORKERS,
    Inventory,
    Run,
    address,
    answer,
    answers,
    ask,
    command,
    endpoint,
    environment,
    fleet,
    hosts,
    kept,
    pid,
    play,
    sh,
    until,
)

pytestmark = pytest.mark.fleet

SERVER = "llama-server-default"
UNIT = "llama-rpc-default-cpu"
#: A frozen worker is found in seconds instead of minutes.
PATIENCE = {"llama_primary_answer_timeout": 20, "llama_primary_start_timeout": 120}


@pytest.fixture(scope="module")
def inventory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inventory]:
    with hosts(tmp_path_factory.mktemp("seed")):
        inventory = Inventory(tmp_path_factory.mktemp("inventory") / "i").change(fleet=PATIENCE)
        play(inventory, "site")
        yield inventory


@pytest.fixture(scope="module")
def proved(inventory: Inventory) -> str:
    """The answer of the fleet in health, which each mended one has to give again."""
    return answer()


def healed(inventory: Inventory, proved: str) -> Run:
    """One run mends all, and what it leaves answers as before."""
    run = play(inventory, "site")
    assert answer() == proved
    return run


def stopped(inventory: Inventory, proved: str, *arguments: str) -> Run:
    """A run that stops: it has changed nothing, and the primary serves on."""
    before = pid("p1", SERVER)
    run = play(inventory, "site", *arguments, ok=False)
    assert not any(run.changed.values()), run.changed
    assert (answer(), pid("p1", SERVER)) == (proved, before)
    return run


# --- the run stops, says why, and has changed nothing ---


def test_a_port_that_somebody_holds_stops_the_run(inventory: Inventory, proved: str) -> None:
    """A foreign program, and an rpc-server that somebody started by hand and forgot."""
    build = sh("w2", "readlink -f /opt/llamafleet/current").strip()
    listen = "import socket, time; s = socket.create_server(('0.0.0.0', 18750)); time.sleep(1000)"
    fleet("exec", "w1", "systemd-run", "-q", "--unit=foreign", "python3", "-c", listen)
    fleet(
        "exec",
        "w2",
        "systemd-run",
        "-q",
        "--unit=byhand",
        f"{build}/bin/ggml-rpc-server",
        "-H",
        "127.0.0.1",
        "-p",
        "18750",
        "-d",
        "CPU",
    )
    instance = {"name": "cpu", "port": 18750, "backend": "cpu", "memory_limit": "300MiB", "threads": 1}
    try:
        inventory.change(hosts={host: {"llama_worker_instances": [instance]} for host in ("w1", "w2")}, fleet=PATIENCE)
        said = stopped(inventory, proved).flat
    finally:
        inventory.change(fleet=PATIENCE)
        for host, unit in (("w1", "foreign"), ("w2", "byhand")):
            sh(host, f"systemctl stop {unit}")
    assert "w1: port 18750 is held by /usr/bin/python3" in said
    assert f"w2: port 18750 is held by {build}/bin/ggml-rpc-server" in said
    assert "llamafleet.rpc.rpc_process" in said


def test_another_build_on_one_worker_stops_the_run(inventory: Inventory, proved: str) -> None:
    """Law 6: a program that is not the one of the manifest, in one byte."""
    program = "/opt/llamafleet/current/bin/ggml-rpc-server"
    sh("w2", f"mv {program} /srv/good && cp /srv/good {program} && echo >> {program}")
    try:
        run = stopped(inventory, proved)
    finally:
        sh("w2", f"mv /srv/good {program}")
    assert "TASK [Run the workers]" not in run.output and "failed: [w2]" in run.output


def test_a_wrong_become_password_stops_the_run_and_is_not_shown(inventory: Inventory, proved: str) -> None:
    """Case B6-10: ansible-core calls such a host failed, or unreachable where sudo did not answer in time."""
    sh("w2", "echo deploy:right | chpasswd && sed -i 's/NOPASSWD: //' /etc/sudoers.d/deploy")
    try:
        inventory.change(hosts={"w2": {"ansible_become_password": "canary-become"}}, fleet=PATIENCE)
        run = stopped(inventory, proved, "-vvv")
    finally:
        inventory.change(fleet=PATIENCE)
        sh("w2", "usermod -p '*' deploy && sed -i 's/ALL$/NOPASSWD: ALL/' /etc/sudoers.d/deploy")
    assert "for w2 failed or cannot be reached" in run.flat and "canary-become" not in run.output
    assert re.search(r"^w2 .*(unreachable|failed)=1", run.output, re.M)


def test_a_full_disk_stops_the_fetch_of_a_model_and_leaves_no_half_of_one(inventory: Inventory, proved: str) -> None:
    name = Path(kept("p1", "primary")["model_path"]).name
    source = sh("p1", f"ls -d /seed/*/models/{name}").split()[0]
    digest = sh("p1", f"sha256sum {source}").split()[0]
    fleet(
        "exec",
        "x1",
        "systemd-run",
        "-q",
        "--unit=models",
        "-p",
        f"WorkingDirectory={Path(source).parent}",
        "python3",
        "-m",
        "http.server",
        "8000",
    )
    url = {
        "llama_model_kind": "url",
        "llama_model_url": f"http://{address('x1')}:8000/{name}",
        "llama_model_sha256": [digest],
    }
    sh("p1", f"mv /opt/llamafleet/models/{name} /srv/model")
    inventory.change(hosts={"p1": url}, fleet=PATIENCE)
    fleet("limit", "p1", "free=50M")
    try:
        run = play(inventory, "site", "--tags", "llama_model", ok=False)
        assert "MiB" in run.flat and ("space" in run.flat or "disk" in run.flat), run.output[-3000:]
        assert sh("p1", f"ls /opt/llamafleet/models/{name} 2>/dev/null; true") == ""
    finally:
        fleet("limit", "p1", "free=all")
    play(inventory, "site", "--tags", "llama_model")
    assert sh("p1", f"sha256sum < /opt/llamafleet/models/{name}").split()[0] == digest
    sh("p1", f"mv /srv/model /opt/llamafleet/models/{name}")
    sh("x1", "systemctl stop models")
    inventory.change(fleet=PATIENCE)
    assert answer() == proved


# --- the fleet gets over it alone ---


def test_a_cut_cable_is_got_over_when_it_is_mended(inventory: Inventory, proved: str) -> None:
    fleet("link", "w2", "down")
    try:
        ask(seconds=4, ok=False)
    finally:
        fleet("link", "w2", "up")
    assert answer(90) == proved


def test_a_slow_cable_gives_the_same_answer_later(inventory: Inventory, proved: str) -> None:
    def seconds() -> float:
        started = time.monotonic()
        assert answer(120) == proved
        return time.monotonic() - started

    free = min(seconds(), seconds())
    fleet("link", "w3", "4mbit")  # the last of them sends 196,608 bytes of logits for each token, twice that a second
    try:
        assert seconds() > free + 1
    finally:
        fleet("link", "w3", "clear")


def test_a_worker_claims_the_machines_memory_and_is_not_believed(inventory: Inventory, proved: str) -> None:
    """Law 3: the limit of a host is lower than what ggml-rpc-server sees, which is the machine's."""
    for host in WORKERS:
        (device,) = kept(host, "worker")["instances"][0]["devices"]
        assert device["budget"] == 300 << 20 < device["usable"] < 512 << 20


def test_a_worker_that_starts_again_and_again_is_reported(inventory: Inventory, proved: str) -> None:
    """Cases B4-18: it is never parked, so somebody has to say it, and what holds its port."""
    sh("w1", f"systemctl stop {UNIT}")
    listen = f"import socket, time; s = socket.create_server(('0.0.0.0', {PORT})); time.sleep(1000)"
    fleet("exec", "w1", "systemd-run", "-q", "--unit=foreign", "python3", "-c", listen)
    sh("w1", f"systemctl start {UNIT}")
    until(lambda: int(sh("w1", f"systemctl show -p NRestarts --value {UNIT}")) >= 5, "it was started 5 times", 60)
    said = play(inventory, "status", ok=False).flat
    sh("w1", "systemctl stop foreign")
    assert f"had to start {UNIT}" in said and f"Port {PORT} is held by /usr/bin/python3" in said
    until(lambda: pid("w1") != 0 and answers(proved), "its port is free again, and it serves without a run", 60)
    sh("w1", f"systemctl reset-failed {UNIT}")
    play(inventory, "status")


# --- the next run brings it back ---


def test_a_killed_worker_and_a_killed_tunnel(inventory: Inventory, proved: str) -> None:
    first = pid("w1")
    sh("w1", f"kill -9 {first}")
    until(lambda: pid("w1") not in (0, first), "the worker is back as another process", 15)
    sh("w2", "pkill -9 -x wireguard-go")
    # The unit is a liar (law 10): it stays active without an interface.
    until(lambda: sh("w2", "ip -o link show wg-llama 2>/dev/null; true") == "", "the interface is gone", 10)
    assert sh("w2", "systemctl is-active wg-quick@wg-llama") == "active\n"
    healed(inventory, proved)
    assert "wg-llama" in sh("w2", "wg show wg-llama")


def test_a_worker_without_power_and_back(inventory: Inventory, proved: str) -> None:
    lost = endpoint("w3")
    fleet("cut", "w3")
    try:
        ask(seconds=4, ok=False)
        run = play(inventory, "site", ok=False)
        assert "fatal: [w3]: UNREACHABLE!" in run.output
        assert "for w3 failed or cannot be reached" in run.flat
        assert not any(run.changed.values()), run.changed
        # Where it may be missing, the others serve meanwhile, as much as fits without it.
        smaller = {"p1": {"llama_primary_n_ctx": 512}}
        inventory.change(hosts=smaller, fleet={**PATIENCE, "llama_fleet_missing_worker": "drop"})
        run = play(inventory, "site", ok=False)  # as w3 has failed, whatever became of the rest
        assert answer() == proved, run.output[-6000:]
        served = kept("p1", "primary")["rpc"]
        assert served and lost not in served
    finally:
        inventory.change(fleet=PATIENCE)
        fleet("start", "w3")
    healed(inventory, proved)


def test_a_primary_without_power_whose_workers_are_left_half_open(inventory: Inventory, proved: str) -> None:
    before = {host: pid(host) for host in WORKERS}
    fleet("cut", "p1")
    fleet("start", "p1")
    # They hold the connection of a primary that no longer has it, and would for hours.
    assert {host: pid(host) for host in WORKERS} == before
    run = healed(inventory, proved)
    assert "the primary does not show its other end" in run.flat
    assert not set(before.values()) & {pid(host) for host in WORKERS}


def test_an_owner_takes_a_machine_back_and_lends_it_again(inventory: Inventory, proved: str) -> None:
    """The primary ends, says for whom it waits, and serves again without a run; runs meanwhile touch nothing."""
    sh("w2", "llama-worker pause")
    assert "paused" in sh("w2", "llama-worker status")
    until(lambda: "Waiting for w2" in sh("p1", f"journalctl -o cat -u {SERVER} -n 20"), "the primary names w2", 30)
    ask(seconds=4, ok=False)
    run = play(inventory, "site", ok=False)
    assert "w2" in run.task("No worker is paused") and not any(run.changed.values()), run.changed
    fleet("cut", "w2")
    fleet("start", "w2")
    assert sh("w2", f"systemctl is-active {UNIT}; true") == "inactive\n"
    sh("w2", "llama-worker resume")
    until(lambda: answers(proved), "the primary serves again, without a run", 90)
    healed(inventory, proved)


def test_a_worker_that_hangs(inventory: Inventory, proved: str) -> None:
    first = pid("w1")
    sh("w1", f"kill -STOP {first}")
    ask(seconds=4, ok=False)
    assert sh("w1", f"systemctl is-active {UNIT}") == "active\n"
    run = healed(inventory, proved)
    assert pid("w1") != first
    assert "the primary runs and does not answer" in run.flat


def test_a_run_that_was_killed_after_it_restarted_the_workers(inventory: Inventory, proved: str) -> None:
    """Law 9: the next run sees by the identities of the workers that the primary has lost them."""
    instance = {"name": "cpu", "port": PORT, "backend": "cpu", "memory_limit": "300MiB", "threads": 2}
    inventory.change(hosts={host: {"llama_worker_instances": [instance]} for host in WORKERS}, fleet=PATIENCE)
    before = {host: pid(host) for host in WORKERS}
    victim = subprocess.Popen(
        command(inventory, "site"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=environment(),
    )
    assert victim.stdout
    for line in victim.stdout:
        if line.startswith("PLAY [Plan]"):
            break
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()
    assert all(pid(host) not in (0, before[host]) for host in WORKERS)
    assert sh("p1", f"systemctl is-active {SERVER}; true") != "active\n"
    run = healed(inventory, proved)
    assert run.changed["p1"]
    again = play(inventory, "site")
    assert not any(again.changed.values()), again.changed
