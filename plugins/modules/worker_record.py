#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: worker_record
short_description: Record what a host lends to a cluster
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - Makes the record that plans are made of, out of the facts of a host, its instances, and what its workers answered.
    It is kept as JSON on the host and returned.
  - The memory of a device is agreed once and then kept, so that a second run plans the same. It is agreed anew when it
    moved by more than 10 % for reasons other than our own services, when the host booted and has less, or when
    O(remeasure=true).
  - What a worker on a CPU reports is never believed, because llama.cpp reports all RAM as free there.
  - A task is changed when a decision differs (endpoints, devices, memory, build), never because of a reading or a time.
extends_documentation_fragment:
  - llamafleet.rpc.attributes
  - llamafleet.rpc.attributes.state_module
  - llamafleet.rpc.attributes.actiongroup_all
options:
  path:
    description:
      - File that keeps the record. Its directory is made where it is missing.
      - Without it nothing is kept, which serves machines that are declared and not reached.
    type: path
  state:
    description: V(absent) removes the file at O(path).
    type: str
    choices: [present, absent]
    default: present
  host:
    description: Inventory name of the host. Required when O(state=present).
    type: str
  cluster:
    description: The cluster of the host. An instance may name another one that it serves.
    type: str
    default: default
  facts:
    description: The facts of M(llamafleet.rpc.host_facts). Not needed when every device is declared.
    type: dict
  instances:
    description:
      - "What the host runs. Each has a C(name) (V(default)), an C(endpoint) (or an C(address) and a C(port); the
        address of O(mesh) without one), and C(devices), a list of llama.cpp names. Without devices those of its
        C(backend), or of the backend of O(facts), are taken."
      - "Optional: C(memory_limit) (for each of its devices; bytes, V(4GiB) or V(80%) of what is usable), C(env),
        C(cluster), C(bandwidth) (bytes per second), C(overhead_ms), C(rtt_ms), C(link_mbps), C(priority),
        C(min_units), C(max_units)."
      - "A device may be declared as a mapping, with C(device) and either C(usable) or C(total) (bytes or V(24GiB)), and
        optionally C(backend), C(kind), C(pool), C(bandwidth), C(overhead_ms), C(priority), C(min_units), C(max_units)."
      - With O(primary=true) the default is one instance with the devices of the backend and the CPU.
    type: list
    elements: dict
    default: []
  build:
    description: The installed build, of which C(build), C(manifest_id) and C(protocol) are recorded.
    type: dict
    default: {}
  mesh:
    description: C(address) and C(public_key) of the host in the mesh.
    type: dict
    default: {}
  probes:
    description: Results of M(llamafleet.rpc.rpc_info) for the workers of this host, found by their C(endpoint).
    type: list
    elements: dict
    default: []
  pids:
    description:
      - Process numbers of the instances, in the order of O(instances); none for one that does not run. They
        identify the processes, so that a primary can tell that its worker was restarted. An instance may also have
        a C(pid) of its own.
    type: list
    elements: raw
    default: []
  listed_devices:
    description:
      - Output of C(llama-server --list-devices) on this host, as text or as a list of lines. The smaller of what it and
        O(facts) say is lent. Where the facts are an estimate (Metal), it takes their place. A gap of more than 5 %
        is a warning. A device that it does not list is an error.
      - Give it on each run. What was reported once is kept, and used on runs without it.
      - An instance whose C(env) chooses devices needs an output of its own, because its devices have other numbers.
        So this may also be a mapping from names of instances to their outputs.
    type: raw
  primary:
    description: Record the own devices of a primary. They have no endpoint.
    type: bool
    default: false
  measured:
    description:
      - What was measured of the devices of the cluster, as C({build, at, devices}) with the list that
        M(llamafleet.rpc.calibrate) returns. For the record of a primary, which keeps it as long as the build stays.
    type: dict
  remeasure:
    description: Agree all memory and round-trip times anew.
    type: bool
    default: false
seealso:
  - module: llamafleet.rpc.host_facts
  - module: llamafleet.rpc.worker_record_info
  - plugin: llamafleet.rpc.fleet_devices
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Record what this host lends
  llamafleet.rpc.worker_record:
    path: /var/lib/llamafleet/default/box/worker.json
    host: "{{ inventory_hostname }}"
    facts: "{{ ansible_facts['llamafleet'] }}"
    build: "{{ ansible_facts['llamafleet_build'] }}"
    instances:
      - name: default
        endpoint: 127.0.0.1:18711
        devices: [CPU]
        memory_limit: 200MiB
    probes: "{{ workers.results }}"

- name: Record what the primary has itself
  llamafleet.rpc.worker_record:
    path: /var/lib/llamafleet/default/head/worker.json
    host: "{{ inventory_hostname }}"
    facts: "{{ ansible_facts['llamafleet'] }}"
    primary: true

- name: Plan with a machine that is not there yet
  llamafleet.rpc.worker_record:
    host: mac
    instances:
      - endpoint: 10.0.0.4:50052
        devices:
          - {device: MTL0, usable: 21GiB}
  delegate_to: localhost
"""

RETURN = r"""
ansible_facts:
  description: The record, under the name C(llamafleet_worker).
  returned: when O(state=present)
  type: dict
  contains:
    llamafleet_worker:
      description: The record. Sizes are bytes, unknown is null.
      returned: when O(state=present)
      type: dict
      sample:
        schema: 1
        host: box
        machine_id: 0123456789abcdef0123456789abcdef
        boot_id: 1c9e3c1e-0000-4000-8000-000000000000
        collected_at: "2026-11-29T19:30:00Z"
        cluster: default
        build: b11434
        manifest_id: 5f0c1a2b
        mesh: {address: null, public_key: null}
        instances:
          - name: default
            cluster: default
            endpoint: 127.0.0.1:18711
            started_at: 1c9e3c1e-0000-4000-8000-000000000000:51234
            protocol: 7.0.0
            devices:
              - index: 0
                device: CPU
                backend: cpu
                pool: 0123456789abcdef0123456789abcdef/ram
                usable: 15000000000
                reported: null
                idle_free: null
                budget: 209715200
                bandwidth: null
                overhead_ms: null
                priority: null
                min_units: null
                max_units: null
            rtt_ms: null
            link_mbps: null
"""

import json
import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._files import read_json, write_json
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner
from ansible_collections.llamafleet.rpc.plugins.module_utils._sockets import describe_process
from ansible_collections.llamafleet.rpc.plugins.module_utils._worker_record import (
    Inputs,
    build_record,
    decisions,
    same_identity,
)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "host": {"type": "str"},
            "cluster": {"type": "str", "default": "default"},
            "facts": {"type": "dict"},
            "instances": {"type": "list", "elements": "dict", "default": []},
            "build": {"type": "dict", "default": {}},
            "mesh": {"type": "dict", "default": {}},
            "probes": {"type": "list", "elements": "dict", "default": []},
            "pids": {"type": "list", "elements": "raw", "default": []},
            "listed_devices": {"type": "raw"},
            "measured": {"type": "dict"},
            "primary": {"type": "bool", "default": False},
            "remeasure": {"type": "bool", "default": False},
        },
        required_if=[("state", "present", ["host"]), ("state", "absent", ["path"])],
        supports_check_mode=True,
    )
    params = module.params
    path = params["path"]
    try:
        previous: Any = read_json(path) if path else None
        before = decisions(previous)
        if params["state"] == "absent":
            present = os.path.exists(path)
            if present and not module.check_mode:
                os.unlink(path)
            module.exit_json(changed=present, diff=_diff(path, before, None))
    except OSError as error:
        module.fail_json(msg=f"{path}: {error.strerror}; run the task as an account that may read and write it")
    instances = params["instances"] or ([{"name": "primary"}] if params["primary"] else [])
    pids = [
        instance.get("pid") or (params["pids"][position] if position < len(params["pids"]) else None)
        for position, instance in enumerate(instances)
    ]
    if not all(pid is None or str(pid).isdigit() for pid in pids):
        module.fail_json(msg=f"pids: {params['pids']!r} must hold process numbers, or none for what does not run")
    processes = [describe_process(SystemRunner(), int(pid)) if pid else None for pid in pids]
    inputs = Inputs(
        host=params["host"],
        cluster=params["cluster"],
        instances=instances,
        facts=params["facts"],
        build=params["build"],
        mesh=params["mesh"],
        probes=params["probes"],
        identities=[process.started_at if process else None for process in processes],
        previous=previous,
        primary=params["primary"],
        remeasure=params["remeasure"],
        listed=params["listed_devices"],
        measured=params["measured"],
    )
    try:
        record = build_record(inputs)
    except FleetError as error:
        module.fail_json(msg=str(error))
    for text in dict.fromkeys(inputs.warnings):
        module.warn(text)
    after = decisions(record)
    changed = path is not None and before != after
    if previous is not None and before == after and same_identity(previous, record):
        record = previous
    elif path and not module.check_mode:
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            write_json(path, record)
        except OSError as error:
            module.fail_json(msg=f"{path}: {error.strerror}; the record cannot be kept there")
    module.exit_json(changed=changed, ansible_facts={"llamafleet_worker": record}, diff=_diff(path, before, after))


def _diff(path: str | None, before: object, after: object) -> dict[str, str]:
    """What --diff shows: decisions only, for the rest moves with every run."""
    texts = ["" if value is None else json.dumps(value, indent=2, sort_keys=True) + "\n" for value in (before, after)]
    return {"before": texts[0], "after": texts[1], "before_header": path or "", "after_header": path or ""}


if __name__ == "__main__":
    main()
