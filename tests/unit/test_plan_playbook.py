# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""playbooks/plan.yml as somebody runs it who owns nothing yet: declared machines, a model on a hub, no connection."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.llamafleet.rpc.plugins.module_utils._companions import plan_with
from ansible_collections.llamafleet.rpc.plugins.module_utils._gguf import read_model
from ansible_collections.llamafleet.rpc.plugins.module_utils._model import model_from_header
from ansible_collections.llamafleet.rpc.plugins.module_utils._worker_record import Inputs, build_record
from ansible_collections.llamafleet.rpc.tests.unit.plan_world import GIB, device
from ansible_collections.llamafleet.rpc.tests.unit.web import Server, serve

ROOT = Path(__file__).resolve().parents[2]
SMALL = ROOT / "inventories" / "models" / "llama-8b-q4.json"
TOKEN = "hf_s3cretOfAUser"


def inventory(memory: str, **variables: Any) -> dict[str, Any]:
    """A primary with a CPU and one declared worker, at addresses that are nobody's."""
    own = [{"name": "own", "max_units": 0, "devices": [{"device": "CPU", "usable": "1GiB"}]}]
    head = {"ansible_host": "192.0.2.10", "llama_primary_instances": own, **variables}
    worker = {
        "ansible_host": "192.0.2.11",
        "llama_worker_address": "10.77.0.11",
        "llama_worker_devices_declared": [{"device": "CUDA0", "usable": memory, "bandwidth": 100_000_000_000}],
    }
    groups = {"llama_primary": {"hosts": {"head": head}}, "llama_workers": {"hosts": {"box": worker}}}
    return {"all": {"children": {"llama_fleet": {"children": groups}}}}


def plan(tmp_path: Path, hosts: dict[str, Any], *arguments: str, endpoint: str = "") -> tuple[int, str]:
    """Exit status and all output, in one line: what people read is wrapped. It runs in ``tmp_path``."""
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(hosts))
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "ansible", "playbook", "-vvv", "-i", str(tmp_path / "hosts.yml")),
            *("-e", f"ansible_python_interpreter={sys.executable}", str(ROOT / "playbooks" / "plan.yml"), *arguments),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=tmp_path,
        env={
            **os.environ,
            "PWD": str(tmp_path),
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_HOME": f"{tmp_path}/ansible",
            "HF_ENDPOINT": endpoint,
            "HF_TOKEN": TOKEN,
        },
    )
    return ran.returncode, " ".join((ran.stdout + ran.stderr).split())


@pytest.mark.real
def test_what_a_model_on_a_hub_would_take_before_it_is_fetched(demo_model: Path, tmp_path: Path) -> None:
    """SmolLM2 caches 2.8 GiB for 131072 tokens, 1.5 GiB with q8_0. What is printed as the cure is tried as well."""
    asked = ("-e", "model=hf:owner/repo/" + demo_model.name, "-e", "llama_primary_n_ctx=131072")
    hub = Server(tmp_path / "hub", ranges=True, token=TOKEN)
    folder = hub.root / "owner/repo/resolve/main"
    folder.mkdir(parents=True)
    (folder / demo_model.name).symlink_to(demo_model)
    with serve(hub):
        short, said = plan(tmp_path, inventory("2200MiB"), *asked, endpoint=hub.url(""))
        cure = {"llama_primary_type_k": "q8_0", "llama_primary_type_v": "q8_0"}
        cured, promised = plan(tmp_path, inventory("2200MiB", **cure), *asked, endpoint=hub.url(""))
    assert (short, cured) == (2, 0), promised
    assert "no plan: " in said
    assert "cheapest change that would make it fit: type_k and type_v q8_0, predicted" in said
    assert "or: n_ctx " in said
    assert "more for box CUDA0" in said
    assert "largest context that fits: 1" in promised
    assert "tokens/s" in promised
    assert hub.sent < demo_model.stat().st_size / 4
    assert TOKEN not in said + promised


@pytest.mark.real
def test_diff_tells_what_would_move_from_the_plan_that_runs(demo_model: Path, tmp_path: Path) -> None:
    """The kept plan has all layers on a machine that lends less today; a second run after that one moves nothing."""
    known = model_from_header(read_model(str(demo_model))).to_dict()
    asked = ("-e", f"model={demo_model}", "--diff")
    lent = {"llama_fleet_state_dir": str(tmp_path / "state"), "ansible_connection": "local"}
    hosts = inventory("2200MiB", **lent)
    workers = hosts["all"]["children"]["llama_fleet"]["children"]["llama_workers"]["hosts"]
    workers["mac"] = {
        "llama_worker_address": "10.77.0.12",
        "llama_worker_devices_declared": [{"device": "MTL0", "usable": "2200MiB", "bandwidth": 300_000_000_000}],
    }
    kept = plan_with(known, [device("head", GIB, name="CPU", max_units=0), device("box", GIB, "10.77.0.11:50052")],
                     n_ctx=4096)  # fmt: skip
    folder = tmp_path / "state" / "default" / "head"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(kept))
    (folder / "primary.json").write_text(json.dumps({"model_path": f"/srv/{demo_model.name}"}))
    status, said = plan(tmp_path, hosts, *asked)
    assert status == 0, said[-3000:]
    assert "layers 0-29 and the output would move from box CUDA0 to mac MTL0: 92.1 MiB" in said
    assert "ms per token predicted, a gain of" in said
    (folder / "primary.json").write_text(json.dumps({"model_path": "/srv/other.gguf"}))
    assert "the primary was started with another model: /srv/other.gguf" in plan(tmp_path, hosts, *asked)[1]


def workers_of(hosts: dict[str, Any]) -> dict[str, Any]:
    """The workers of an inventory, by name."""
    found: dict[str, Any] = hosts["all"]["children"]["llama_fleet"]["children"]["llama_workers"]["hosts"]
    return found


def test_a_relative_path_counts_from_where_it_is_run(tmp_path: Path) -> None:
    """A model that is not there is named by its whole path."""
    shutil.copy(SMALL, tmp_path / "head.json")
    status, said = plan(tmp_path, inventory("16GiB"), "-e", "model=head.json")
    assert (status, "tokens/s" in said) == (0, True), said
    status, said = plan(tmp_path, inventory("16GiB"), "-e", "model=models/none.gguf")
    assert status == 2, said
    assert f"{tmp_path}/models/none.gguf: cannot be read" in said


@pytest.mark.parametrize(
    ("worker", "arguments", "cure"),
    [
        (
            {},
            (),
            "head: which model? Its devices are declared, so it is not asked what it serves; give one with -e model=",
        ),
        (
            {"llama_worker_devices_declared": [{"device": "CUDA0", "usable": "8 gigs"}]},
            ("-e", f"model={SMALL}"),
            "box, instance default, CUDA0: usable",
        ),
        (
            {"llama_worker_address": "127.0.0.1"},
            ("-e", f"model={SMALL}"),
            "box, mac: declared workers, all at 127.0.0.1:50052, so that a plan cannot tell them apart; give each "
            "llama_worker_address",
        ),
    ],
    ids=["no model", "no size", "no address"],
)
def test_what_is_declared_wrongly_is_named_without_a_connection(
    tmp_path: Path, worker: dict[str, Any], arguments: tuple[str, ...], cure: str
) -> None:
    """Nobody is at these addresses: a try to connect ends as UNREACHABLE."""
    hosts = inventory("16GiB")
    workers_of(hosts)["box"].update(worker)
    declared = [{"device": "MTL0", "usable": "8GiB"}]
    workers_of(hosts)["mac"] = {"ansible_host": "192.0.2.12", "llama_worker_devices_declared": declared}
    status, said = plan(tmp_path, hosts, *arguments)
    assert status == 2, said
    assert cure in said
    assert "unreachable=1" not in said and "UNREACHABLE" not in said


def test_declared_beside_real_members(tmp_path: Path) -> None:
    """A real member is read from its kept record; without one the cures are named, declaring it among them.

    Devices for all hosts in llama_primary_instances are those of a primary, and no worker's.
    """
    hosts = inventory("3GiB")
    fleet = hosts["all"]["children"]["llama_fleet"]
    fleet["vars"] = {
        "llama_primary_instances": fleet["children"]["llama_primary"]["hosts"]["head"]["llama_primary_instances"]
    }
    workers_of(hosts)["real"] = {"ansible_connection": "local", "llama_fleet_state_dir": str(tmp_path / "state")}
    fleet["vars"]["llama_fleet_state_dir"] = str(tmp_path / "state")
    asked = ("-e", f"model={SMALL}")
    status, said = plan(tmp_path, hosts, *asked)
    assert status == 2, said
    assert "No record of real could be had. Run site.yml with them in the limit first, declare their devices" in said
    lent = [{"name": "default", "address": "10.77.0.12", "devices": [{"device": "CUDA0", "usable": "3GiB"}]}]
    kept = tmp_path / "state" / "default" / "real" / "worker.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps(build_record(Inputs(host="real", cluster="default", instances=lent))))
    status, said = plan(tmp_path, hosts, *asked)
    assert status == 0, said
    assert "--rpc 10.77.0.11:50052,10.77.0.12:50052" in said
