# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""playbooks/place.yml: two models over the homelab without a connection, and what it writes as an inventory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.llamafleet.rpc.plugins.module_utils._worker_record import Inputs, build_record

ROOT = Path(__file__).resolve().parents[2]
HOMELAB = ROOT / "inventories" / "homelab" / "hosts.yml"
TWO_MODELS = ROOT / "inventories" / "models" / "two-models.yml"
SMALL = ROOT / "inventories" / "models" / "llama-8b-q4.json"


def printed(tmp_path: Path, name: str, *arguments: str) -> tuple[int, str]:
    """Exit status and all output of a playbook that somebody runs in ``tmp_path``."""
    python = f"ansible_python_interpreter={sys.executable}"
    ran = subprocess.run(
        [sys.executable, "-m", "ansible", "playbook", "-e", python, str(ROOT / "playbooks" / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_HOME": str(tmp_path / "ansible"), "PWD": str(tmp_path)},
    )
    return ran.returncode, ran.stdout + ran.stderr


def play(tmp_path: Path, name: str, *arguments: str) -> tuple[int, str]:
    """The same in one line: what people read is wrapped."""
    status, said = printed(tmp_path, name, *arguments)
    return status, " ".join(said.replace("''", "'").split())


def documented() -> list[str]:
    """The lines that docs/planning.md shows of this example."""
    page = (ROOT / "docs" / "planning.md").read_text()
    return page.partition("For the example:\n\n```\n")[2].partition("```")[0].splitlines()


def machines(inventory: dict[str, Any]) -> dict[str, Any]:
    """An inventory's hosts without groups, settings and declarations: machines that only have a name."""
    found: dict[str, Any] = {}
    for group in inventory["all"]["children"]["llama_fleet"]["children"].values():
        found.update({name: {"ansible_host": values["ansible_host"]} for name, values in group["hosts"].items()})
    return {"all": {"hosts": found}}


def test_two_models_over_the_homelab(tmp_path: Path) -> None:
    """As docs/planning.md shows it. What is written is an inventory that plan.yml plans the same with."""
    fragment = tmp_path / "clusters.yml"
    asked = ("-i", str(HOMELAB), "-e", f"@{TWO_MODELS}", "-e", f"fragment={fragment}")
    status, said = play(tmp_path, "place.yml", *asked, "--check", "--diff")
    assert (status, fragment.exists()) == (0, False), said
    assert "+ llama_fleet_cluster: large-1" in said
    status, said = printed(tmp_path, "place.yml", *asked)
    assert status == 0 and "changed=1" in said, said
    assert len(documented()) > 4 and max(map(len, documented())) > 130
    assert {line.strip() for line in documented()} <= {line.strip() for line in said.splitlines()}  # none is wrapped
    first = fragment.read_text()
    asked = (*asked[:-1], "fragment=clusters.yml")  # the same file, by its name in the folder where it is run
    assert "changed=0" in play(tmp_path, "place.yml", *asked)[1]
    assert fragment.read_text() == first and not (ROOT / "playbooks" / fragment.name).exists()

    groups = yaml.safe_load(first)["llama_fleet"]["children"]
    primaries, workers = groups["llama_primary"]["hosts"], groups["llama_workers"]["hosts"]
    assert {values["llama_fleet_cluster"] for values in primaries.values()} == {"large-1", "small-1", "small-2"}
    assert {values["llama_fleet_cluster"] for values in workers.values()} == {"large-1"}
    (tmp_path / "machines.yml").write_text(yaml.safe_dump(machines(yaml.safe_load(HOMELAB.read_text()))))
    status, planned = play(tmp_path, "plan.yml", "-i", str(tmp_path / "machines.yml"), "-i", str(fragment))
    assert status == 0, planned
    rows = [line.split("  ") for line in documented() if re.match(r"(large|small)-\d ", line)]
    for row in rows:
        speed, ms = [cell.strip() for cell in row if cell.strip()][3:5]
        assert f"predicted {speed} tokens/s ({ms} ms per token" in planned


def test_records_that_hosts_keep_are_read(tmp_path: Path) -> None:
    """Of a machine that declares nothing the record is read; without one the run stops by name, or leaves it out."""
    local = {"ansible_connection": "local", "llama_fleet_state_dir": str(tmp_path / "state")}
    declared = {"llama_worker_devices_declared": [{"device": "CUDA0", "usable": "2GiB"}]}
    hosts = {"real": local, "gone": local, "little": {**declared, "llama_worker_address": "10.77.0.9"}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    devices = [{"device": "CUDA0", "usable": "23GiB"}, {"device": "CPU", "usable": "28GiB"}]
    instances = [{"name": "own", "devices": devices}]
    record = build_record(Inputs(host="real", cluster="default", instances=instances, primary=True))
    folder = tmp_path / "state" / "default" / "real"
    folder.mkdir(parents=True)
    (folder / "worker.json").write_text(json.dumps(record))
    models = [{"name": "small", "model": str(SMALL), "n_ctx": 8192}]
    asked = ("-i", str(tmp_path / "hosts.yml"), "-e", json.dumps({"models": models}))
    status, said = play(tmp_path, "place.yml", *asked)
    assert status == 2 and "No record of gone could be had." in said
    status, said = play(tmp_path, "place.yml", *asked, "-e", "llama_fleet_missing_worker=drop")
    assert status == 0, said
    assert "small-1 real -" in said and "unused: little: not needed" in said
    twice = json.dumps({"models": [{**models[0], "replicas": 2}]})
    status, said = play(tmp_path, "place.yml", *asked, "-e", twice, "-e", "llama_fleet_missing_worker=drop")
    assert status == 2 and "not placed: 1 x small: a copy needs" in said


@pytest.mark.parametrize("given", ["{}", '{"models": "chat"}', '{"models": [], "machines": "ungrouped"}'])
def test_without_models_or_machines_it_says_what_to_give(tmp_path: Path, given: str) -> None:
    status, said = play(tmp_path, "place.yml", "-i", str(HOMELAB), "-e", given)
    assert status == 2 and "Give models, a list, for example with -e @models.yml" in said
