#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: rpc_process
short_description: End a stray worker (ggml-rpc-server) that no service of ours owns
version_added: 0.1.0
description:
  - Ends one C(ggml-rpc-server) or C(rpc-server), found by its port or its pid, that was started by hand or left over,
    so that a service can have its port.
  - Refuses every other program and everything that is named in O(owned_units), O(owned_programs) or O(owned_pids).
  - Sends SIGTERM, and SIGKILL to the same process if it is still there after O(grace) seconds.
author:
  - llamafleet contributors (@llamafleet)
extends_documentation_fragment:
  - llamafleet.rpc.attributes
  - llamafleet.rpc.attributes.state_module
  - llamafleet.rpc.attributes.actiongroup_all
options:
  port:
    description: The TCP port that the stray worker listens on.
    type: int
  pid:
    description: The process identifier of the stray worker.
    type: int
  state:
    description: The worker is to be gone.
    type: str
    choices: [absent]
    default: absent
  owned_units:
    description: Systemd services of ours, whose processes are never touched.
    type: list
    elements: str
    default: []
  owned_programs:
    description: Supervisor programs of ours, as C(name) or C(group:name), whose processes are never touched.
    type: list
    elements: str
    default: []
  owned_pids:
    description: Processes that are never touched.
    type: list
    elements: int
    default: []
  grace:
    description: Seconds between SIGTERM and SIGKILL.
    type: float
    default: 5
"""

EXAMPLES = r"""
- name: End the worker that somebody started by hand on our port
  llamafleet.rpc.rpc_process:
    port: 18711
    state: absent
    owned_units: [llama-rpc-default-default.service]
"""

RETURN = r"""
processes:
  description: The processes that were ended, or would be in check mode.
  returned: always
  type: list
  elements: dict
  sample: [{"pid": 4242, "exe": "/usr/local/bin/ggml-rpc-server", "user": "ada", "unit": null}]
killed:
  description: The processes among them that did not end on SIGTERM.
  returned: always
  type: list
  elements: int
"""

import os
import signal
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils import _sockets
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner

NAMES = ("ggml-rpc-server", "rpc-server")
RUNNER = SystemRunner()


class ProcessError(FleetError):
    """This process must not or cannot be ended."""


def find(options: dict[str, Any]) -> list[_sockets.Process]:
    """The processes that the options mean; empty when there are none."""
    if options["pid"] is not None:
        pids = {options["pid"]}
    else:
        rows = _sockets.with_pids(RUNNER, _sockets.listeners(_sockets.read_table(RUNNER), options["port"]))
        hidden = [row for row in rows if row.pid is None]
        if hidden:
            owner = "another user" if hidden[0].uid is None else f"user {_sockets.user_name(hidden[0].uid)}"
            raise ProcessError(f"port {options['port']}: held by a process of {owner} that may not be seen; use become")
        pids = {row.pid for row in rows if row.pid is not None}
    described = [_sockets.describe_process(RUNNER, pid) for pid in sorted(pids)]
    return [process for process in described if process is not None]


def check(process: _sockets.Process, options: dict[str, Any]) -> None:
    """Raise unless this process may be ended."""
    what = f"process {process.pid} ({process.exe or 'executable not visible'}, user {process.user})"
    if process.exe is None:
        raise ProcessError(f"{what}: cannot see what it is; use become")
    if _sockets.executable_name(process.exe) not in NAMES:
        raise ProcessError(f"{what}: not a worker ({' or '.join(NAMES)}), so it is left alone; free the port yourself")
    if process.pid in options["owned_pids"]:
        raise ProcessError(f"{what}: listed in owned_pids, so it is left alone")
    units = {name if "." in name else f"{name}.service" for name in options["owned_units"]}
    if process.unit in units:
        raise ProcessError(f"{what}: belongs to our service {process.unit}; stop it through systemd")
    program = process.supervisor_program
    if program and {program, program.split(":")[-1]} & set(options["owned_programs"]):
        raise ProcessError(f"{what}: belongs to our supervisor program {program}; stop it through supervisor")


def alive(process: _sockets.Process) -> bool:
    """Whether the very same process is still there (a pid may be given to another one)."""
    now = _sockets.describe_process(RUNNER, process.pid)
    return now is not None and now.started_at == process.started_at


def end(process: _sockets.Process, grace: float) -> bool:
    """End it; True when it took SIGKILL."""
    for kind, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
        try:
            os.kill(process.pid, kind)
        except ProcessLookupError:
            return kind == signal.SIGKILL
        except PermissionError:
            raise ProcessError(
                f"process {process.pid} belongs to user {process.user}: may not end it; use become"
            ) from None
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if not alive(process):
                return kind == signal.SIGKILL
            time.sleep(0.05)
    raise ProcessError(
        f"process {process.pid} is still there 5 s after SIGKILL: it hangs in the kernel; restart the host"
    )


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "port": {"type": "int"},
            "pid": {"type": "int"},
            "state": {"type": "str", "choices": ["absent"], "default": "absent"},
            "owned_units": {"type": "list", "elements": "str", "default": []},
            "owned_programs": {"type": "list", "elements": "str", "default": []},
            "owned_pids": {"type": "list", "elements": "int", "default": []},
            "grace": {"type": "float", "default": 5},
        },
        required_one_of=[("port", "pid")],
        mutually_exclusive=[("port", "pid")],
        supports_check_mode=True,
    )
    for name, most in (("port", 65535), ("pid", 1 << 22)):  # Linux gives no pid above that
        value = module.params[name]
        if value is not None and not 1 <= value <= most:
            module.fail_json(msg=f"{name}: {value} is no {name}; give a number from 1 to {most}")
    if not 0 <= module.params["grace"] <= 86400:
        module.fail_json(msg=f"grace: {module.params['grace']:g} s; give a number from 0 to a day")
    killed = []
    try:
        processes = find(module.params)
        for process in processes:
            check(process, module.params)
        if not module.check_mode:
            killed = [process.pid for process in processes if end(process, module.params["grace"])]
    except FleetError as error:
        module.fail_json(msg=str(error))
    before = "".join(f"{process.pid} {process.exe}\n" for process in processes)
    module.exit_json(
        changed=bool(processes),
        processes=[process.to_dict() for process in processes],
        killed=killed,
        diff={"before": before, "after": ""},
    )


if __name__ == "__main__":
    main()
