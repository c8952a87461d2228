# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""site.yml over two clusters, one of which loses a host: who goes on, and who does not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: What a host without Python looks like to Ansible.
LOST = {"ansible_python_interpreter": "/nonexistent/python3"}


def check(tmp_path: Path, model: Path, lost: str, *arguments: str) -> tuple[dict[str, bool], str]:
    """Who did not fail in a check of site.yml, and all output, in one line."""
    groups: dict[str, dict[str, dict[str, object]]] = {"llama_primary": {}, "llama_workers": {}}
    for place, (name, port) in enumerate({"pa": 18720, "wa": 18721, "pb": 18722, "wb1": 18723, "wb2": 18724}.items()):
        host: dict[str, object] = {"llama_fleet_cluster": name[1], **(LOST if name == lost else {})}
        if name.startswith("p"):
            groups["llama_primary"][name] = {**host, "llama_primary_port": port}
        else:
            instance = {"name": f"i{place}", "port": port, "backend": "cpu"}
            groups["llama_workers"][name] = {**host, "llama_worker_instances": [instance]}
    shared = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "llama_fleet_scope": "user",
        "llama_fleet_user": "nobody" if os.geteuid() == 0 else "",
        "llama_fleet_service_manager": "supervisor",
        "llama_fleet_prefix": str(tmp_path / "prefix"),
        "llama_model_kind": "path",
        "llama_model_path": str(model),
    }
    children = {name: {"hosts": hosts} for name, hosts in groups.items()}
    inventory = {"all": {"vars": shared, "children": {"llama_fleet": {"children": children}}}}
    (tmp_path / "hosts.json").write_text(json.dumps(inventory))
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "ansible", "playbook", "-i", str(tmp_path / "hosts.json"), "--check"),
            *(str(ROOT / "playbooks" / "site.yml"), *arguments),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_HOME": str(tmp_path / "ansible")},
    )
    assert ran.returncode != 0, ran.stdout  # somebody was lost, whatever became of the others
    recap = re.findall(r"^(\w+) +: .*unreachable=(\d+) +failed=(\d+)", ran.stdout, re.M)
    whole = {name: (unreachable, failed) == ("0", "0") for name, unreachable, failed in recap if name != "localhost"}
    assert len(whole) == 5, ran.stdout
    return whole, " ".join((ran.stdout + ran.stderr).split())


@pytest.mark.real
def test_a_lost_worker_ends_its_cluster_and_no_other(demo_model: Path, tmp_path: Path) -> None:
    whole, said = check(tmp_path, demo_model, "wb1")
    assert whole == {"pa": True, "wa": True, "pb": False, "wb1": False, "wb2": False}
    assert "wb2: the cluster b ends here, for wb1 failed or cannot be reached" in said
    assert "llama_fleet_missing_worker to drop" in said
    # Before anything is changed on the others of its cluster, and to the end for the other cluster.
    assert re.search(r"PLAY \[Prepare the hosts\](?!.*\[wb2\])", said)
    assert re.search(r"PLAY \[Plan\].*pa CPU.*PLAY \[Start and prove the primaries\].*ok: \[pa\]", said)


@pytest.mark.real
def test_a_cluster_that_may_go_on_without_a_lost_worker_is_planned_without_it(demo_model: Path, tmp_path: Path) -> None:
    whole, said = check(tmp_path, demo_model, "wb1", "-e", "llama_fleet_missing_worker=drop")
    assert whole == {"pa": True, "wa": True, "pb": True, "wb1": False, "wb2": True}
    assert "CPU of 127.0.0.1:18724: not needed" in said and "127.0.0.1:18723" not in said


@pytest.mark.real
def test_no_cluster_goes_on_without_its_primary(demo_model: Path, tmp_path: Path) -> None:
    whole, said = check(tmp_path, demo_model, "pb", "-e", "llama_fleet_missing_worker=drop")
    assert whole == {"pa": True, "wa": True, "pb": False, "wb1": False, "wb2": False}
    assert "for pb failed or cannot be reached" in said and "to drop" not in said
