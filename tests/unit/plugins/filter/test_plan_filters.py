# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The planning filters as a playbook meets them: errors that name the filter, and values that Ansible wraps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible.template import trust_as_template
from ansible_collections.llamafleet.rpc.plugins.filter.declared_records import declared_records
from ansible_collections.llamafleet.rpc.plugins.filter.fleet_devices import fleet_devices
from ansible_collections.llamafleet.rpc.plugins.filter.fleet_topology import fleet_topology
from ansible_collections.llamafleet.rpc.plugins.filter.plan_split import plan_split
from ansible_collections.llamafleet.rpc.plugins.filter.rpc_servers import rpc_servers
from ansible_collections.llamafleet.rpc.plugins.filter.server_args import server_args
from ansible_collections.llamafleet.rpc.plugins.filter.tensor_split import tensor_split
from ansible_collections.llamafleet.rpc.tests.unit import plan_world
from ansible_collections.llamafleet.rpc.tests.unit.plan_world import GIB, MIB, model, workers

COLLECTIONS = str(Path(plan_world.__file__).parents[5])
RECORDS = [
    {
        "schema": 1,
        "host": host,
        "cluster": "default",
        "instances": [
            {
                "name": "default",
                "endpoint": endpoint,
                "devices": [{"index": 0, "device": name, "pool": f"{host}/m", "usable": size, "budget": None}],
            }
        ],
    }
    for host, endpoint, name, size in (
        ("a", "10.0.0.2:18711", "CUDA0", 800 * MIB),
        ("b", "10.0.0.3:18711", "CUDA0", 800 * MIB),
        ("head", None, "CPU", 300 * MIB),
    )
]

MEMBER = {
    "inventory_hostname": "box",
    "group_names": ["llama_workers"],
    "llama_worker_devices_declared": [{"device": "CUDA0", "usable": "8GiB"}],
}


def test_from_records_to_arguments() -> None:
    plan = plan_split(model(), fleet_devices(RECORDS), 2048, n_ubatch=64)
    assert rpc_servers(plan) == "10.0.0.2:18711,10.0.0.3:18711"
    assert tensor_split(plan, consumer="llama-bench") == tensor_split(plan).replace(",", "/")
    assert server_args(plan, model())[:4] == ["-m", "/srv/m.gguf", "--rpc", "10.0.0.2:18711,10.0.0.3:18711"]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: fleet_devices(7), "llamafleet.rpc.fleet_devices: records are a int; give a list"),
        (lambda: fleet_devices(RECORDS, ""), "llamafleet.rpc.fleet_devices: cluster is ''"),
        (lambda: plan_split(model(), workers(1, GIB)), "llamafleet.rpc.plan_split: n_ctx is missing"),
        (lambda: plan_split(model(), workers(1, GIB), n_ctx="8k"), "llamafleet.rpc.plan_split: n_ctx is '8k'"),
        (
            lambda: plan_split(model(), workers(1, GIB), n_ctx=trust_as_template("4096")),
            "n_ctx is '4096', a str; it must be a whole number, and this is text: write it in digits without quotes, or"
            " pass it through int",
        ),
        (lambda: plan_split(model(), n_ctx=1), "llamafleet.rpc.plan_split: devices are a NoneType; give the list"),
        (
            lambda: server_args(plan_split(model(), workers(1, 9 * GIB), n_ctx=1)),
            "llamafleet.rpc.server_args: the model's path is None; give what gguf_info returned",
        ),
        (
            lambda: plan_split(model(), workers(1, GIB), n_ctx=1, n_batches=1),
            "llamafleet.rpc.plan_split: unknown option n_batches; there are alternatives, cache_ram",
        ),
        (lambda: plan_split({}, workers(1, GIB), n_ctx=1), "llamafleet.rpc.plan_split: model"),
        (lambda: rpc_servers(None), "llamafleet.rpc.rpc_servers: the plan is None"),
        (
            lambda: fleet_topology([{**MEMBER, "llama_worker_instances": [{"port": 0}]}]),
            "llamafleet.rpc.fleet_topology: box: llama_worker_instances[0]: port 0 is not a number from 1 to 65535",
        ),
        (
            lambda: declared_records([{**MEMBER, "llama_worker_instances": True}]),
            "llamafleet.rpc.declared_records: box: llama_worker_instances is True; it must be a list of mappings",
        ),
        (
            lambda: declared_records([{**MEMBER, "llama_primary_instances": [{"devices": True}]}]),
            "llamafleet.rpc.declared_records: llama_primary_instances: devices is True; it must be a list of devices",
        ),
        (
            lambda: declared_records([{**MEMBER, "inventory_hostname": "mac"}, MEMBER], "head"),
            "llamafleet.rpc.declared_records: box, mac: declared workers, all at 127.0.0.1:50052, so that a plan",
        ),
        (lambda: tensor_split({}), "llamafleet.rpc.tensor_split: the plan is {}"),
        (lambda: server_args([], model()), "llamafleet.rpc.server_args: the plan is []"),
    ],
)
def test_errors_name_filter_value_and_remedy(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(AnsibleFilterError) as caught:
        call()
    assert text in str(caught.value)


def test_the_members_of_a_cluster_lend_what_they_declare_as_workers() -> None:
    """Own devices declared for a whole group are those of the primary; a port tells workers of one address apart."""
    own = {"llama_primary_instances": [{"name": "own", "devices": [{"device": "CPU", "usable": "1GiB"}]}]}
    head = {**own, "inventory_hostname": "head"}
    second = {**own, **MEMBER, "inventory_hostname": "mac", "llama_worker_instances": [{"port": 50053}]}
    records = declared_records([head, {**own, **MEMBER}, second], "head")
    assert [(record["host"], record["instances"][0]["endpoint"]) for record in records] == [
        ("head", None),
        ("box", "127.0.0.1:50052"),
        ("mac", "127.0.0.1:50053"),
    ]
    assert {record["instances"][0]["endpoint"] for record in declared_records([head, {**own, **MEMBER}])} == {None}


def test_in_a_real_playbook(tmp_path: Path) -> None:
    """Templates hand over wrapped containers, strings and numbers; the result is plain data for a module."""
    play = {
        "hosts": "localhost",
        "gather_facts": False,
        "vars": {
            "records": RECORDS,
            "model": model(),
            "ctx": 2048,
            "small": "{{ ctx // 32 }}",
            "ansible_python_interpreter": sys.executable,
        },
        "tasks": [
            {
                "ansible.builtin.set_fact": {
                    "plan": "{{ model | llamafleet.rpc.plan_split(records | llamafleet.rpc.fleet_devices, n_ctx=ctx,"
                    " n_ubatch=small, objective='memory') }}"
                }
            },
            {
                "ansible.builtin.copy": {
                    "dest": str(tmp_path / "out.json"),
                    "mode": "0600",
                    "content": "{{ {'plan': plan, 'args': plan | llamafleet.rpc.server_args(model),"
                    " 'rpc': plan | llamafleet.rpc.rpc_servers,"
                    " 'split': plan | llamafleet.rpc.tensor_split} | to_json }}",
                }
            },
        ],
    }
    (tmp_path / "play.yml").write_text(json.dumps([play]))
    ran = subprocess.run(
        [sys.executable, "-m", "ansible", "playbook", "-i", "localhost,", "-c", "local", str(tmp_path / "play.yml")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": COLLECTIONS},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["plan"] == plan_split(model(), fleet_devices(RECORDS), 2048, n_ubatch=64, objective="memory")
    assert found["rpc"] == "10.0.0.2:18711,10.0.0.3:18711"
    assert found["args"][found["args"].index("-ts") + 1] == found["split"]
