# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role llama_mesh from end to end: a primary and three workers, each a network namespace, over ansible-playbook."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.llamafleet.rpc.tests.unit import netns

pytestmark = pytest.mark.real
PRESHARED = "cHJlc2hhcmVkLCBhbmQgbm8gcmVhbCBrZXkgZWl0aGU="
PLAYBOOK = [
    {
        "name": "Mesh",
        "hosts": "llama_fleet",
        "gather_facts": False,
        "any_errors_fatal": True,
        "tasks": [
            {
                "name": "Mesh",
                "ansible.builtin.include_role": {
                    "name": "llamafleet.rpc.llama_mesh",
                    "tasks_from": "{{ entry | default('main') }}",
                },
            }
        ],
    }
]


class Fleet:
    """An inventory over the hosts of a lab, and ansible-playbook to run the role on it."""

    def __init__(self, lab: netns.Lab, directory: Path) -> None:
        self.lab, self.directory = lab, directory
        self.output = ""
        for name in ("n1", "n2", "n3", "n4"):
            shell = directory / f"sh-{lab.add(name).name}"
            shell.write_text(f'#!/bin/sh\nexec ip netns exec {lab.hosts[name].namespace} /bin/sh "$@"\n')
            shell.chmod(0o755)
        self.members = list(lab.hosts)
        (directory / "play.yml").write_text(yaml.safe_dump(PLAYBOOK))

    def inventory(self) -> Path:
        def entries(names: list[str]) -> dict[str, Any]:
            return {
                name: {
                    "ansible_shell_executable": str(self.directory / f"sh-{name}"),
                    "llama_mesh_interface": self.lab.hosts[name].interface,
                    "llama_mesh_directory": str(self.lab.hosts[name].directory),
                    "llama_mesh_firewall_path": str(self.lab.hosts[name].directory / "fw" / "firewall.nft"),
                }
                for name in names
            }

        groups = {
            "llama_primary": {"hosts": entries(self.members[:1])},
            "llama_workers": {"hosts": entries(self.members[1:])},
        }
        variables = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "llama_fleet_service_manager": "supervisor",
            "llama_mesh_network": "10.99.0.0/20",
            "llama_mesh_preshared_keys": {"n2": PRESHARED},
        }
        path = self.directory / "hosts.yml"
        path.write_text(yaml.safe_dump({"all": {"children": {"llama_fleet": {"children": groups, "vars": variables}}}}))
        return path

    def play(self, *arguments: str) -> dict[str, dict[str, int]]:
        """Run the role; the recap by host. It must not fail."""
        environment = {
            **os.environ,
            "ANSIBLE_COLLECTIONS_PATH": str(netns.COLLECTIONS),
            "ANSIBLE_CONFIG": str(netns.COLLECTIONS.parent / "ansible.cfg"),
            # What a module was called with is then part of what -vvvv shows, as it always was before core 2.20.
            "ANSIBLE_INJECT_INVOCATION": "true",
            "ANSIBLE_LOCAL_TEMP": str(self.directory / "tmp"),
        }
        program = Path(sys.executable).parent / "ansible-playbook"
        argv = [str(program), "-i", str(self.inventory()), str(self.directory / "play.yml"), *arguments]
        done = subprocess.run(
            argv, capture_output=True, text=True, env=environment, timeout=300, stdin=subprocess.DEVNULL, check=False
        )
        self.output = done.stdout + done.stderr
        assert done.returncode == 0, self.output[-6000:]
        recap = re.findall(r"^(\S+) +: (ok=.*)$", done.stdout.rpartition("PLAY RECAP")[2], re.MULTILINE)
        return {host: {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", rest)} for host, rest in recap}

    def address(self, name: str) -> str:
        text = (self.lab.hosts[name].directory / f"{self.lab.hosts[name].interface}.conf").read_text()
        found = re.search(r"Address = ([0-9.]+)", text)
        assert found
        return found.group(1)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with netns.lab(tmp_path) as made:
        yield Fleet(made, tmp_path)


def changed(recap: dict[str, dict[str, int]]) -> dict[str, int]:
    return {host: counts["changed"] for host, counts in recap.items() if counts["changed"]}


def test_the_life_of_a_mesh(fleet: Fleet) -> None:
    lab = fleet.lab
    n1, n2, n3 = (lab.hosts[name] for name in ("n1", "n2", "n3"))

    # Check mode reaches the end on bare hosts, shows what would come, and changes nothing (law 18).
    fleet.play("--check", "--diff")
    assert "+Address = 10.99." in fleet.output
    assert "tcp dport { 50052 } drop" in fleet.output
    assert [list(host.directory.iterdir()) for host in lab.hosts.values()] == [[], [], [], []]

    # The first run, as loud as can be: no key in what it says (law 15).
    fleet.play("-vvvv", "--diff")
    secrets = [(host.directory / f"{host.interface}.key").read_text().strip() for host in lab.hosts.values()]
    assert len(set(secrets)) == 4
    assert "PrivateKey = (hidden" in fleet.output
    assert "n2: VALUE_SPECIFIED_IN_NO_LOG_PARAMETER" in fleet.output
    assert not any(secret in fleet.output for secret in [*secrets, PRESHARED])
    assert PRESHARED in (n2.directory / f"{n2.interface}.conf").read_text()

    # A star: the primary reaches a worker and its port, a worker no other worker (laws 11 and 17).
    with n2.listener(50052):
        assert n1.connects(fleet.address("n2"), 50052) == "open"
        assert n3.connects(fleet.address("n2"), 50052) == "timeout"
        assert n3.connects(n2.address, 50052) == "timeout"

    # A second run changes nothing, limited or not, and a limited one drops nobody (B5-05).
    addresses = {name: fleet.address(name) for name in fleet.members}
    assert changed(fleet.play()) == {}
    assert changed(fleet.play("--limit", "n1,n3")) == {}
    assert changed(fleet.play("--limit", "n2")) == {}

    # A host that left the inventory loses access with the next run, and no other host moves or is restarted.
    fleet.members.remove("n3")
    assert changed(fleet.play()) == {"n1": 1}
    assert {name: fleet.address(name) for name in fleet.members} == {
        name: address for name, address in addresses.items() if name != "n3"
    }
    assert n3.run("ping", "-c1", "-W1", addresses["n1"], check=False).returncode != 0

    # A primary that was set up again knows nobody: its workers are read without being part of the run, and it keeps its
    # address. They have its old key until they are run (B5-07).
    n1.run("wg-quick", "down", n1.directory / f"{n1.interface}.conf")
    for path in n1.directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert "n1" in changed(fleet.play("--limit", "n1"))
    assert fleet.address("n1") == addresses["n1"]
    assert "n1 has a new key, and n2, n4, outside of this run, still have its old one" in fleet.output
    assert changed(fleet.play()) == {"n2": 1, "n4": 1}
    assert "has a new key" not in fleet.output
    assert n1.run("ping", "-c1", "-W2", fleet.address("n2")).returncode == 0

    # Taken down, nothing is left, the second time neither.
    fleet.members.append("n3")
    assert set(changed(fleet.play("-e", "entry=absent"))) == {"n1", "n2", "n3", "n4"}
    for host in lab.hosts.values():
        assert list(host.directory.iterdir()) == []
        assert host.run("nft", "list", "ruleset").stdout == ""
        assert host.run("ip", "link", "show", "dev", host.interface, check=False).returncode != 0
    assert changed(fleet.play("-e", "entry=absent")) == {}
