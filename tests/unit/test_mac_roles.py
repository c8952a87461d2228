# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The roles on a Mac that is made of recordings."""

from __future__ import annotations

import datetime as dt
import hashlib
import io
import json
import os
import plistlib
import random
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.tests.unit import netns
from ansible_collections.llamafleet.rpc.tests.unit.recorded import text as recorded_text
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


COMMAND = "/opt/llamafleet/bin/llama-worker"  # /usr/local is that of the Linux below


def owner_takes_it_back(mac: Mac, tasks: list[dict[str, Any]]) -> None:
    """`llama-worker` and hours under launchd, on a Mac whose worker runs."""
    name = "llamafleet.llama-rpc-default-cpu"
    other = (dt.datetime.now().hour + 12) % 24  # lends but for a minute half a day from now
    mac.variables["llama_worker_hours"] = [f"{other:02d}:01-{other:02d}:00"]
    setup = [*tasks[:-1], role("worker", "owner", llama_worker__command=COMMAND)]
    assert mac.play(setup)["changed"] and mac.unrecorded() == ""
    hours = jobs(mac)["llamafleet.llama-hours-default-studio"]
    assert hours["ProgramArguments"] == [COMMAND, "hours", "studio"] and len(hours["StartCalendarInterval"]) == 14
    assert mac.play(setup)["changed"] == 0

    def ask(*words: str) -> str:
        mac.play([{"name": "Ask", "ansible.builtin.command": {"argv": [COMMAND, *words]}}], "-v")
        assert mac.unrecorded() == ""
        return mac.output

    # 10.9.0.1 is the client in the recording of netstat.
    assert "10.9.0.4:18711: running, in use by 10.9.0.1" in ask("status")
    assert "studio is paused" in ask("pause")
    assert name not in mac.state()["jobs"] and name in mac.state()["disabled"], "and no boot starts it"
    assert "not running" in ask("status")
    assert "nothing to change" in ask("hours"), "an owner's pause is not ended by hours"
    assert "lends again" in ask("resume")
    assert name in mac.state()["jobs"] and name not in mac.state()["disabled"]


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
    # Law 18: while the tunnel is down as well, a check reaches the end, and says that an address is missing.
    name_file = mac.path("/var/run/wireguard/wg-llama.name")
    name_file.rename(mac.path("/recorded/name"))
    check = mac.play(tasks, "--check", "--diff")
    assert check["changed"] and jobs(mac) == {} and mac.unrecorded() == ""
    assert "This check goes on with the address" in mac.output
    mac.path("/recorded/name").rename(name_file)
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
    owner_takes_it_back(mac, tasks)
    mac.play(
        [
            tasks[0],
            role("worker", "absent", llama_worker__command=COMMAND),
            role("mesh", "absent"),
            role("fleet", "absent", llama_fleet__ports=[18711]),
        ]
    )
    assert jobs(mac) == {} and mac.state()["jobs"] == {} and mac.state()["rules"] == [] and mac.state()["wired"] == 0
    assert not mac.path("/etc/newsyslog.d/llamafleet.conf").exists() and mac.unrecorded() == ""


@pytest.fixture
def head(mac: Mac, tmp_path: Path) -> Iterator[netns.Host]:
    """A host of Linux on the cable of the Mac, where the primary is."""
    with netns.lab(tmp_path) as lab:
        host = lab.add("head", address="10.0.0.9")
        cable = ["link", "add", "en0", "type", "veth", "peer", "name", "pmac", "netns", lab.core]
        subprocess.run(["ip", "-n", mac.namespace, *cable], check=True)
        subprocess.run(["ip", "-n", lab.core, "link", "set", "pmac", "master", "br0", "up"], check=True)
        subprocess.run(["ip", "-n", mac.namespace, "link", "set", "en0", "up"], check=True)
        subprocess.run(["ip", "-n", mac.namespace, "addr", "add", "10.0.0.4/24", "dev", "en0"], check=True)
        subprocess.run(["ip", "-n", mac.namespace, "addr", "del", f"{ADDRESS}/32", "dev", "lo"], check=True)
        shell = tmp_path / "head-sh"
        shell.write_text(f'#!/bin/sh\nexec ip netns exec {host.namespace} /bin/sh "$@"\n')
        shell.chmod(0o755)
        mac.head = {
            "ansible_shell_executable": str(shell),
            "ansible_remote_tmp": str(tmp_path / "head-tmp"),
            "llama_mesh_interface": host.interface,
            "llama_mesh_directory": str(host.directory),
            "llama_fleet_service_manager": "supervisor",
            "llama_mesh_firewall": False,
        }
        yield host


def test_a_mesh_of_ours_between_a_mac_and_linux(mac: Mac, head: netns.Host) -> None:
    """wireguard-go under launchd: made, proved by packets, unchanged the second time, healed, given up again."""
    mac.variables = {"llama_mesh_mode": "wireguard", "llama_mesh_network": "10.97.0.0/20", "llama_mesh_timeout": 30}
    answers = mac.path("/recorded/answers")
    for name in ("ifconfig", "netstat"):  # no other tunnel runs
        lines = (answers / name).read_text().splitlines(keepends=True)
        (answers / name).write_text("".join(line for line in lines if "utun4" not in line and ADDRESS not in line))
    mac.path("/var/run/wireguard/wg-llama.name").unlink()
    tasks: list[dict[str, Any]] = [{"name": "Look", "llamafleet.rpc.host_facts": {}}, role("mesh")]

    check = mac.play(tasks, "--check", "--diff")  # law 18: nothing is there, and the end is reached
    assert check["changed"] and jobs(mac) == {} and not mac.path("/etc/wireguard/wg-llama.key").exists()
    mac.play(tasks)
    assert mac.unrecorded() == ""
    job = jobs(mac)["llamafleet.wg-llama"]
    assert job["KeepAlive"] is True and "/opt/homebrew/bin/wireguard-go" in job["ProgramArguments"]
    for name in ("key", "conf"):
        assert mac.path(f"/etc/wireguard/wg-llama.{name}").stat().st_mode & 0o777 == 0o600
    secret = mac.path("/etc/wireguard/wg-llama.key").read_text().strip()
    assert secret not in mac.output and secret not in str(job) and secret not in str(mac.state())
    address = job["ProgramArguments"][-2].split("/")[0]
    assert head.run("ping", "-c1", "-W5", "-Mdo", "-s1392", address).returncode == 0, "1420 bytes, whole"
    # pf lets the primary in on the interface of this start.
    primary = next(iter(json.loads(head.run("ip", "-j", "-4", "addr", "show", head.interface).stdout)))
    source = primary["addr_info"][0]["local"]
    rules = [rule.split(" label")[0] for rule in mac.state()["rules"]]
    assert f"pass in quick on utun7 inet proto tcp from {source} to any port 50052" in rules
    assert mac.play(tasks)["changed"] == 0 and mac.unrecorded() == ""

    # wireguard-go that died takes its job along; launchd would start it again, and if it did not the next run does.
    os.killpg(mac.state()["jobs"]["llamafleet.wg-llama"]["pid"], signal.SIGKILL)
    assert mac.play(tasks)["changed"] and head.run("ping", "-c1", "-W5", address).returncode == 0
    # A peer's new key is loaded without a start.
    before = mac.state()["jobs"]["llamafleet.wg-llama"]["pid"]
    mac.head["llama_mesh_rotate_key"] = True
    assert mac.play(tasks)["changed"]
    del mac.head["llama_mesh_rotate_key"]
    assert mac.state()["jobs"]["llamafleet.wg-llama"]["pid"] == before
    assert head.run("ping", "-c1", "-W5", address).returncode == 0

    mac.play([tasks[0], role("mesh", "absent")])
    assert jobs(mac) == {} and mac.state()["rules"] == [] and mac.unrecorded() == ""
    assert list(mac.path("/etc/wireguard").iterdir()) == []
    assert head.run("ping", "-c1", "-W1", address, check=False).returncode != 0


def test_a_worker_on_metal_is_held_against_what_llama_cpp_lists(mac: Mac, llama_bin: Path) -> None:
    """The programs say MTL0 and are a CPU's; the figures are those of an M4 Max of 128 GB."""
    place = mac.path("/opt/stub")
    place.mkdir(parents=True)
    (place / "ggml-rpc-server").write_text(
        f'#!/bin/sh\n[ "$6" = MTL0 ] || exit 1\nexec {llama_bin}/ggml-rpc-server "$1" "$2" "$3" "$4" -d CPU -t 1\n'
    )
    listing = mac.path("/recorded/list")
    listing.write_text(recorded_text("llama_server/list_devices_metal_m4_max_128g.txt"))
    (place / "llama-server").write_text('#!/bin/sh\n[ "$1" = --list-devices ] && exec cat /recorded/list\n')
    for program in place.iterdir():
        program.chmod(0o755)
    mac.variables = {
        "llama_worker_instances": [{"name": "gpu", "port": 18713}],
        "llama_fleet_user": "root",
        "build": {"bin_dir": "/opt/stub", **BUILD},
    }
    tasks: list[dict[str, Any]] = [
        {"name": "Look", "llamafleet.rpc.host_facts": {}},
        role("fleet", "prepare"),
        role("mesh"),
        {"name": "Build", "ansible.builtin.set_fact": {"llamafleet_build": "{{ build }}", "cacheable": True}},
        role("worker"),
    ]
    mac.play(tasks)
    assert mac.unrecorded() == ""
    (device,) = json.loads(mac.path("/var/lib/llamafleet/default/studio/worker.json").read_text())["instances"][0][
        "devices"
    ]
    assert (device["device"], device["backend"]) == ("MTL0", "metal")
    assert "llama-server reports 110100 MiB, detected were 98304 MiB" in " ".join(mac.output.split())
    assert 0 < device["reported"] <= 110100 << 20 and device["budget"] <= device["usable"] <= device["reported"]
    listing.write_text("Available devices:\n  (none)\n")
    mac.play(tasks, ok=False)
    assert "llama-server does not list it with memory" in " ".join(mac.output.split())


# A program that macOS kills until it is signed.
SOURCES = {
    "CMakeLists.txt": "cmake_minimum_required(VERSION 3.14)\nproject(stub C CXX)\n"
    "set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)\nadd_executable(ggml-rpc-server main.c)\n",
    "main.c": "#include <signal.h>\n#include <unistd.h>\n"
    'int main(void) { if (access("/recorded/signed", F_OK)) raise(SIGKILL); return 0; }\n',
}


def test_b4_14_a_build_on_a_mac_with_the_packages_of_homebrew(mac: Mac) -> None:
    """Formulae as the owner of Homebrew, flags for Metal, and a program that macOS kills is signed anew, once."""
    archive = mac.directory / "remote" / "source.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in SOURCES.items():
            info = tarfile.TarInfo(f"llama.cpp/{name}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    mac.variables = {
        "llama_fleet_user": "root",
        "llama_build_source": "archive",
        "llama_build_path": str(archive),
        "llama_build_sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
        "llama_build_targets": ["ggml-rpc-server"],
        "llama_build_install_packages": True,
    }
    tasks: list[dict[str, Any]] = [{"name": "Look", "llamafleet.rpc.host_facts": {}}, role("build")]
    assert mac.play(tasks, "--check", "--diff")["changed"] and mac.state()["cellar"] == ["bash"]
    assert "cmake, ninja would be installed" in mac.output
    mac.play(tasks)
    assert mac.unrecorded() == "" and {"cmake", "ninja"} <= set(mac.state()["cellar"])
    built = mac.path("/opt/llamafleet/builds")
    (manifest,) = (json.loads(path.read_text()) for path in built.glob("*/manifest.json"))
    assert {"-DGGML_METAL=ON", "-DGGML_BLAS=OFF", "-DGGML_RPC=ON"} <= set(manifest["cmake_flags"])
    (program,) = built.glob("*/bin/ggml-rpc-server")
    assert program.read_bytes().endswith(b"signed")
    assert manifest["files"]["bin/ggml-rpc-server"] == hashlib.sha256(program.read_bytes()).hexdigest()
    assert mac.play(tasks)["changed"] == 0 and mac.unrecorded() == ""


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
