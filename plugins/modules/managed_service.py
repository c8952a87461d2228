#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: managed_service
short_description: Bring one long-running service to a wanted state under systemd, launchd or supervisor
version_added: 0.1.0
description:
  - Writes the definition of a service, loads it, and starts, restarts, stops or removes the service.
    Worker and primary use it alike; one call is one SSH round trip.
  - A running service is replaced only if its definition changed, if its program was deleted under it, or if
    O(state=restarted).
  - A unit of systemd is checked with C(systemd-analyze verify) before it is put in place.
  - All managers bring the service back whenever it ends, also with status 0, and never park it.
author:
  - llamafleet contributors (@llamafleet)
extends_documentation_fragment:
  - llamafleet.rpc.attributes
  - llamafleet.rpc.attributes.actiongroup_all
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
  idempotent:
    support: partial
    details:
      - O(state=restarted) always replaces a running service.
options:
  name:
    description: Name of the service.
    type: str
    required: true
  state:
    description:
      - V(started) and V(restarted) also write the definition. V(stopped) keeps it. V(absent) removes it.
    type: str
    choices: [started, restarted, stopped, absent]
    default: started
  manager:
    description:
      - The service manager. V(supervisor) is one of our own below O(directory), for hosts without an init.
        V(launchd) makes a daemon of the system, for macOS.
    type: str
    choices: [systemd, launchd, supervisor]
    required: true
  scope:
    description: Whether units belong to the system or to the connecting account. Only for O(manager=systemd).
    type: str
    choices: [system, user]
    default: system
  directory:
    description:
      - Directory of our supervisor, which is installed into it where it is missing. Only for O(manager=supervisor).
    type: path
  description:
    description: One line for people.
    type: str
    default: ''
  argv:
    description: Program (an absolute path) and arguments. Needed for V(started) and V(restarted).
    type: list
    elements: str
    default: []
  environment:
    description: Environment variables.
    type: dict
    default: {}
  user:
    description: Account that the service runs as. Empty for the account of the manager itself.
    type: str
    default: ''
  groups:
    description:
      - Supplementary groups, in system scope of systemd. launchd takes the first as the group of the process.
      - Without any those that own the device nodes of O(backend) on this host, whatever they are called there.
    type: list
    elements: str
    default: []
  working_directory:
    description: Directory that the service starts in.
    type: path
    default: /
  writable_paths:
    description: What a sandboxed unit may write to.
    type: list
    elements: path
    default: []
  log_path:
    description: File that supervisor or launchd writes the output to. systemd keeps it in the journal.
    type: path
    default: ''
  memory_max:
    description: Memory limit of the unit in bytes. Only for O(manager=systemd).
    type: int
  backend:
    description:
      - Backend of llama.cpp that the program uses, for the sandbox of a system unit. V(cpu) hides all device nodes,
        those of a GPU leave the nodes of that backend. Without it there is no sandbox.
    type: str
    choices: ['', cpu, cuda, rocm, metal, vulkan, sycl]
    default: ''
  after:
    description: Units that are wanted and started before.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Run a worker under supervisor
  llamafleet.rpc.managed_service:
    name: llama-rpc-default-cpu
    manager: supervisor
    directory: /opt/llamafleet/supervisor
    argv: [/opt/llamafleet/current/bin/ggml-rpc-server, -H, 127.0.0.1, -p, "18711", -d, CPU]
    log_path: /var/lib/llamafleet/llama-rpc-default-cpu.log

- name: Remove it
  llamafleet.rpc.managed_service:
    name: llama-rpc-default-cpu
    manager: supervisor
    directory: /opt/llamafleet/supervisor
    state: absent
"""

RETURN = r"""
actions:
  description: What was done, or in check mode would be, out of C(write), C(start), C(restart), C(stop), C(remove).
  returned: always
  type: list
  elements: str
restarted:
  description: Whether the service was started or replaced, so that its clients have lost it.
  returned: always
  type: bool
path:
  description: Path of the definition.
  returned: always
  type: str
pid:
  description: Process of the running service, or none.
  returned: always
  type: int
started_at:
  description: Identity of that process, its boot id and start tick. It changes with each start.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import BACKENDS
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._managers import manager_of
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner
from ansible_collections.llamafleet.rpc.plugins.module_utils._service import Systemd, converge, device_groups
from ansible_collections.llamafleet.rpc.plugins.module_utils._sockets import describe_process
from ansible_collections.llamafleet.rpc.plugins.module_utils._units import Service


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["started", "restarted", "stopped", "absent"], "default": "started"},
            "manager": {"type": "str", "choices": ["systemd", "launchd", "supervisor"], "required": True},
            "scope": {"type": "str", "choices": ["system", "user"], "default": "system"},
            "directory": {"type": "path"},
            "description": {"type": "str", "default": ""},
            "argv": {"type": "list", "elements": "str", "default": []},
            "environment": {"type": "dict", "default": {}},
            "user": {"type": "str", "default": ""},
            "groups": {"type": "list", "elements": "str", "default": []},
            "working_directory": {"type": "path", "default": "/"},
            "writable_paths": {"type": "list", "elements": "path", "default": []},
            "log_path": {"type": "path", "default": ""},
            "memory_max": {"type": "int"},
            "backend": {"type": "str", "choices": ["", *BACKENDS], "default": ""},
            "after": {"type": "list", "elements": "str", "default": []},
        },
        required_if=[
            ("manager", "supervisor", ("directory",)),
            ("state", "started", ("argv",)),
            ("state", "restarted", ("argv",)),
        ],
        supports_check_mode=True,
    )
    options = module.params
    runner = SystemRunner()
    manager = manager_of(runner, options)
    try:
        service = Service(
            name=options["name"],
            description=options["description"] or options["name"],
            argv=tuple(options["argv"]) or ("/nothing",),
            environment={key: str(value) for key, value in options["environment"].items()},
            user=options["user"],
            groups=tuple(options["groups"] or device_groups(options["backend"])),
            working_directory=options["working_directory"],
            writable_paths=tuple(options["writable_paths"]),
            log_path=options["log_path"],
            memory_max=options["memory_max"],
            backend=options["backend"],
            after=tuple(options["after"]),
        )
        outcome = converge(manager, service, options["state"], module.check_mode)
    except FleetError as error:
        module.fail_json(msg=str(error))
    path = manager.path(options["name"])
    if isinstance(manager, Systemd) and options["state"] in ("started", "restarted"):
        for drop_in in manager.foreign(options["name"]):
            module.warn(f"{drop_in} changes what the unit {options['name']} says; remove it unless it is meant")
    process = describe_process(runner, outcome.pid) if outcome.pid else None
    module.exit_json(
        changed=outcome.changed,
        actions=outcome.actions,
        restarted=outcome.restarted,
        path=path,
        pid=outcome.pid,
        started_at=process.started_at if process else None,
        diff={"before": outcome.before, "after": outcome.after, "before_header": path, "after_header": path},
    )


if __name__ == "__main__":
    main()
