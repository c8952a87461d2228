# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The roles on a Mac that is made of recordings."""

from __future__ import annotations

import os
import plistlib
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.tests.unit.recorded_mac import ADDRESS, Mac

pytestmark = [pytest.mark.real, pytest.mark.privileged]
ROLE = "llamafleet.rpc.llama_"
BUILD = {"protocol": "7.0.0", "manifest_id": "0123456789ab", "build": "b11434", "worker_binary": "ggml-rpc-server"}


@pytest.fixture
def mac(tmp_path: Path) -> Iterator[Mac]:
    namespace = f"lfmac-{os.getpid()}-{random.randint(0, 9999)}"
    subprocess.run(["ip", "netns", "add", namespace], check=True)
    made = Mac(tmp_path, namespace)
    try:
        inside = ["ip", "-n", namespace]
        subprocess.run([*inside, "link", "set", "lo", "up"], check=True)
        subprocess.run([*inside, "addr", "add", f"{ADDRESS}/32", "dev", "lo"], check=True)
        made.make()
        yield made
    finally:
        if made.path("/recorded/state.json").exists():
            for job in made.state().get("jobs", {}).values():
                with suppress(ProcessLookupError):
                    os.killpg(job["pid"], signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", namespace], check=True)


def role(name: str, entry: str = "main", **variables: Any) -> dict[str, Any]:
    task = {"ansible.builtin.include_role": {"name": ROLE + name, "tasks_from": entry}}
    return {"name": f"{name} {entry}", **task, "vars": variables}


def test_facts_account_power_and_logs(mac: Mac) -> None:
    tasks = [{"name": "Look", "llamafleet.rpc.host_facts": {}}, role("fleet", "prepare")]
    first = mac.play(tasks)
    assert first["changed"] > 0 and mac.unrecorded() == ""
    user = mac.state()["users"]["llamafleet"]
    assert user["IsHidden"] == "1" and int(user["UniqueID"]) < 500 and user["UserShell"] == "/usr/bin/false"
    assert mac.state()["power"]["sleep"] == "0"
    assert " llamafleet: 640 " in mac.path("/etc/newsyslog.d/llamafleet.conf").read_text()
    assert mac.play(tasks)["changed"] == 0 and mac.unrecorded() == ""


def jobs(mac: Mac) -> dict[str, Any]:
    return {path.stem: plistlib.loads(path.read_bytes()) for path in mac.path("/Library/LaunchDaemons").iterdir()}


def test_law_11_mesh_and_worker_of_a_mac(mac: Mac, llama_bin: Path) -> None:
    mac.variables = {
        # The processes that the recorded launchd starts are real ones of Linux, so what they lend is the CPU.
        "llama_worker_instances": [{"name": "cpu", "port": 18711, "devices": ["CPU"], "threads": 1}],
        "llama_worker_wired_limit": "112GiB",
        "llama_fleet_user": "root",
        "llama_mesh_mac_quick": True,
        "build": {"bin_dir": str(llama_bin), **BUILD},
    }
    tasks: list[dict[str, Any]] = [
        {"name": "Preflight", "ansible.builtin.include_role": {"name": ROLE + "preflight"}},
        role("fleet", "prepare"),
        role("mesh"),
        {"name": "Build", "ansible.builtin.set_fact": {"llamafleet_build": "{{ build }}", "cacheable": True}},
        role("worker"),
    ]
    check = mac.play(tasks, "--check", "--diff")
    assert check["changed"] and jobs(mac) == {} and mac.unrecorded() == ""
    mac.play(tasks)
    assert mac.unrecorded() == ""
    found = jobs(mac)
    assert set(found) == {
        "llamafleet.wg-llama",
        "llamafleet.pf",
        "llamafleet.wired-limit",
        "llamafleet.llama-rpc-default-cpu",
    }
    worker = found["llamafleet.llama-rpc-default-cpu"]
    assert worker["ProgramArguments"][4:] == [
        f"{llama_bin}/ggml-rpc-server",
        "-H",
        ADDRESS,
        "-p",
        "18711",
        "-d",
        "CPU",
        "-t",
        "1",
    ]
    assert worker["ProcessType"] == "Interactive" and worker["KeepAlive"] is True
    assert found["llamafleet.wg-llama"]["ProgramArguments"][0] == "/opt/homebrew/bin/bash"
    assert mac.state()["wired"] == 112 * 1024
    # Only the primary, and only through the tunnel of this boot.
    rules = [rule.split(" label")[0] for rule in mac.state()["rules"]]
    assert rules[1:] == [
        "pass in quick on utun4 inet proto tcp from 10.9.0.1 to any port 18711",
        "block drop in quick proto tcp from any to any port { 18711 }",
    ]
    # B6-05: by the owner of its prefix, never by root (whom the recorded brew refuses).
    assert sorted(mac.state()["cellar"]) == ["bash", "wireguard-go", "wireguard-tools"]
    assert mac.play(tasks)["changed"] == 0 and mac.unrecorded() == ""
    mac.play(
        [
            tasks[0],
            role("worker", "absent"),
            role("mesh", "absent"),
            role("fleet", "absent", llama_fleet__ports=[18711]),
        ]
    )
    assert jobs(mac) == {} and mac.state()["jobs"] == {} and mac.state()["rules"] == [] and mac.state()["wired"] == 0
    assert not mac.path("/etc/newsyslog.d/llamafleet.conf").exists() and mac.unrecorded() == ""


def test_a_primary_of_a_mac(mac: Mac, llama_bin: Path, demo_model: Path) -> None:
    """Planned, started under launchd and proved by an answer, with its layers on the CPU of the Linux below."""
    mac.variables = {
        "llama_primary_instances": [{"name": "own", "devices": ["CPU"]}],
        "llama_primary_port": 18712,
        "llama_primary_python": sys.executable,
        "llama_primary_extra_args": ["-t", "1"],
        "llamafleet_topology": {"default": {"primary": "studio", "workers": []}},
        "llama_fleet_user": "root",
        "build": {"bin_dir": str(llama_bin), **BUILD},
        "file": {"path": str(demo_model.resolve()), "sha256": "0" * 64, "size": demo_model.stat().st_size},
    }
    facts = {"llamafleet_build": "{{ build }}", "llamafleet_model_file": "{{ file }}", "cacheable": True}
    tasks: list[dict[str, Any]] = [
        {"name": "Look", "llamafleet.rpc.host_facts": {}},
        role("fleet", "prepare"),
        {"name": "Build and model", "ansible.builtin.set_fact": facts},
        role("primary", "plan"),
        role("primary", "start"),
    ]
    mac.play(tasks)
    job = jobs(mac)["llamafleet.llama-server-default"]
    assert job["ProcessType"] == "Interactive" and job["ProgramArguments"][5].endswith("/launch.py")
    assert "Paris" in mac.output and mac.unrecorded() == ""
    assert mac.play(tasks)["changed"] == 0


def test_b6_04_a_fresh_mac_gets_the_command_line_tools_without_python(mac: Mac) -> None:
    mac.path("/recorded/state.json").write_text('{"bare": true}')
    mac.variables = {"ansible_python_interpreter": "/nowhere/python3"}
    playbook = Path(__file__).parents[2] / "playbooks" / "bootstrap_macos.yml"
    assert mac.play(playbook, "--limit", "studio")["changed"] == 1
    assert mac.state()["bare"] is False and mac.unrecorded() == ""
    assert mac.play(playbook, "--limit", "studio")["changed"] == 0 and mac.unrecorded() == ""
