#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: plan_oracle
short_description: Ask llama.cpp itself what a plan takes, before a weight is moved
version_added: 0.1.0
description:
  - Runs C(llama-fit-params) of the build that will serve, with the workers and the split of the plan, and compares what
    it says with what the plan promised. It gets a copy of the model's headers with a hole for the weights.
  - It speaks to the workers as a primary does. Use it only while they are free, which is before the primary starts.
  - A worse figure is a warning with both numbers and never a failure. Neither is a program that is not there or fails.
author:
  - llamafleet contributors (@llamafleet)
extends_documentation_fragment:
  - llamafleet.rpc.attributes
  - llamafleet.rpc.attributes.actiongroup_all
  - llamafleet.rpc.attributes.posix
attributes:
  check_mode:
    support: full
    details:
      - Asks nobody, for workers may be busy then.
  diff_mode:
    support: none
  idempotent:
    support: full
options:
  program:
    description: Path of C(llama-fit-params).
    type: path
    required: true
  path:
    description: File of the model, or any one of its shards.
    type: path
    required: true
  plan:
    description: The plan, as P(llamafleet.rpc.plan_primary#filter) returns it.
    type: dict
    required: true
  build:
    description: The llama.cpp build of O(program).
    type: str
    default: b11434
  user:
    description: Account that the program runs as when the module runs as root. Empty for the connecting account.
    type: str
    default: ''
  timeout:
    description: Seconds that it may take.
    type: int
    default: 120
"""

EXAMPLES = r"""
- name: Is llama.cpp of the same mind?
  llamafleet.rpc.plan_oracle:
    program: /opt/llamafleet/builds/b11434-cpu/bin/llama-fit-params
    path: /opt/llamafleet/models/model.gguf
    plan: "{{ llama_primary__plan }}"
  register: oracle

- name: Show both
  ansible.builtin.debug:
    msg: "{{ oracle.lines }}"
"""

RETURN = r"""
asked:
  description: Whether the program was asked and answered.
  returned: always
  type: bool
rows:
  description:
    - Promised against said of each device, with C(device), C(host), C(endpoint), and for C(weights), C(kv), C(compute)
      C(_promised) and C(_said), in bytes. What is said is rounded down to MiB.
  returned: always
  type: list
  elements: dict
problems:
  description: What is worse than promised, with C(severity), C(code) and C(text).
  returned: always
  type: list
  elements: dict
lines:
  description: The same for people, or why nobody was asked.
  returned: always
  type: list
  elements: str
"""

import os
import tempfile
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils import _oracle
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._gguf import copy_headers, read_model
from ansible_collections.llamafleet.rpc.plugins.module_utils._jobs import account_for, hand_over, runner_for
from ansible_collections.llamafleet.rpc.plugins.module_utils._model import model_from_header
from ansible_collections.llamafleet.rpc.plugins.module_utils._server_args import server_args


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "program": {"type": "path", "required": True},
            "path": {"type": "path", "required": True},
            "plan": {"type": "dict", "required": True},
            "build": {"type": "str", "default": "b11434"},
            "user": {"type": "str", "default": ""},
            "timeout": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    result: dict[str, Any] = {"changed": False, "asked": False, "rows": [], "problems": []}
    if module.check_mode:
        module.exit_json(**result, lines=["llama-fit-params is not asked in check mode: workers may be busy"])
    if not os.access(module.params["program"], os.X_OK):
        text = f"this build has no {module.params['program']}: the plan is not checked before the start"
        module.exit_json(**result, lines=[f"{text} (llama_build_targets leaves llama-fit-params out)"])
    try:
        result["rows"], result["problems"] = consult(module.params)
    except FleetError as error:
        text = f"the plan could not be checked before the start: {error}"
        result["problems"] = [{"severity": "warning", "code": "oracle_failed", "text": text}]
        module.exit_json(**result, lines=[f"warning: {text}"])
    result["asked"] = True
    module.exit_json(**result, lines=_oracle.oracle_lines(result["rows"], result["problems"]))


def consult(options: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Ask with a copy of the headers, as an account that may nothing else."""
    account = account_for(options["user"])
    model = model_from_header(read_model(options["path"]))
    for name in [name for name in os.environ if name.startswith("LLAMA_ARG_")]:
        del os.environ[name]
    with tempfile.TemporaryDirectory(prefix="llamafleet-oracle-") as directory:
        os.environ.update(GGML_NO_BACKTRACE="1", GGML_RPC_NO_RDMA="1", HOME=directory)
        copy = copy_headers(options["path"], directory)
        hand_over(directory, account)
        runner = runner_for(account)
        argv = [options["program"], *server_args(options["plan"], copy, options["build"], "llama-fit-params")]
        return _oracle.compare(options["plan"], model, _oracle.ask(runner, argv, options["timeout"]))


if __name__ == "__main__":
    main()
