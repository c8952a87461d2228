#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: primary_proof
short_description: Prove a primary (llama-server) by an answer, and compare its memory with the plan
version_added: 0.1.0
description:
  - Waits until the model is loaded, asks for one completion at temperature 0, and fails unless the answer is one. It
    must not be empty, must not repeat one token, and must equal the answer recorded for the same model, build, plan and
    arguments.
  - Then reads llama-server's own log and compares the memory it took on each device with what the plan promised. Layers
    that went elsewhere, devices without any, and more memory than may be lent are failures.
  - Run it on the primary.
author:
  - llamafleet contributors (@llamafleet)
extends_documentation_fragment:
  - llamafleet.rpc.attributes
  - llamafleet.rpc.attributes.state_module
  - llamafleet.rpc.attributes.actiongroup_all
attributes:
  check_mode:
    details:
      - The answer is asked for and judged in check mode too; a new one is not recorded.
options:
  url:
    description: Address of llama-server, such as V(http://127.0.0.1:8080).
    type: str
    required: true
  api_key_file:
    description: File that holds the API key, one key a line as llama-server reads it. The first one is used.
    type: path
  timeout:
    description: Seconds to wait until the model is loaded.
    type: float
    default: 300
  answer_timeout:
    description: Seconds for the answer. A worker that froze makes llama-server wait for ever.
    type: float
    default: 120
  prompt:
    description: What is to be completed.
    type: str
    default: The capital of France is
  n_predict:
    description: Number of tokens to ask for.
    type: int
    default: 24
  model:
    description: What identifies the model file, best its SHA-256.
    type: str
    default: ""
  build:
    description: What identifies the build, such as its tag and manifest.
    type: str
    default: ""
  plan:
    description: The plan that the primary was started with, as C(llamafleet.rpc.plan_split) returns it.
    type: dict
  arguments:
    description: The command line of llama-server. It is only used to tell whether an answer may be compared.
    type: list
    elements: str
    default: []
  record_path:
    description: File that keeps the answers. Without it nothing is compared or recorded.
    type: path
  log_paths:
    description:
      - Log files of llama-server, oldest first. The rotated file of each (with C(.1) added) is read before it. Files
        that are not there are left out.
      - The server must run with C(-lv 4) or more, else the log does not tell about memory.
    type: list
    elements: path
    default: []
  journal_unit:
    description: Systemd service whose journal is llama-server's log.
    type: str
  journal_scope:
    description: Whether that is a service of the system or of the connecting user.
    type: str
    choices: [system, user]
    default: system
"""

EXAMPLES = r"""
- name: Prove the primary
  llamafleet.rpc.primary_proof:
    url: http://127.0.0.1:8080
    model: "{{ llamafleet_model_file.sha256 }}"
    build: "{{ llamafleet_build.manifest_id }}"
    plan: "{{ llamafleet_plan }}"
    record_path: /var/lib/llamafleet/default/proof.json
    log_paths: [/var/lib/llamafleet/default/primary.log]
  register: primary_proof
"""

RETURN = r"""
proof:
  description: The answer and how it was judged.
  returned: when there was an answer
  type: dict
  contains:
    prompt:
      description: What was asked.
      type: str
    text:
      description: What was answered.
      type: str
    tokens:
      description: Number of tokens in the answer.
      type: int
    tokens_per_s:
      description: Speed of the answer as llama-server measured it.
      type: float
    prompt_tokens_per_s:
      description: Speed of reading the prompt.
      type: float
    ready_s:
      description: Seconds that were waited until the model was loaded.
      type: float
    key:
      description: What the answer is recorded under.
      type: str
    known:
      description: Whether an answer was recorded before, which this one then equals.
      type: bool
table:
  description:
    - One row for each device of the plan and one for the primary's own memory, with C(weights), C(kv) and C(compute)
      each as promised and as measured, in bytes (two decimals of a MiB exact), and C(equal_to_printed_digit).
    - Empty without O(plan).
  returned: always
  type: list
  elements: dict
problems:
  description:
    - What differs from the plan, and what the log explains after a failure, each with C(severity), C(code) and C(text).
  returned: always
  type: list
  elements: dict
"""

import os
from typing import TYPE_CHECKING, Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils import _completion, _server_log
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner

if TYPE_CHECKING:
    from collections.abc import Iterator


def log_lines(options: dict[str, Any]) -> Iterator[str]:
    """The lines of all logs, oldest first."""
    for path in options["log_paths"]:
        for name in (f"{path}.1", path):
            if os.path.isfile(name):
                with open(name, encoding="utf-8", errors="replace") as handle:
                    yield from handle
    if options["journal_unit"]:
        scope = ["--user"] if options["journal_scope"] == "user" else []
        argv = ["journalctl", *scope, "--no-pager", "--output=cat", "--lines=20000", "--unit", options["journal_unit"]]
        yield from SystemRunner().run(argv, timeout=60).stdout.splitlines()


def read_key(path: str | None) -> str | None:
    """The first key of an API key file."""
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as handle:
            keys = [line.strip() for line in handle if line.strip()]
    except OSError as error:
        raise _completion.ProofError("wrong_input", f"api_key_file {path}: {error.strerror}") from None
    if not keys:
        raise _completion.ProofError("wrong_input", f"api_key_file {path}: holds no key")
    if not (keys[0].isascii() and keys[0].isprintable()):
        raise _completion.ProofError("wrong_input", f"api_key_file {path}: the key holds what no HTTP header may hold")
    return keys[0]


def prove(module: AnsibleModule, result: dict[str, Any]) -> None:
    """Fill in the result; raises ProofError when the primary is not proved."""
    options = module.params
    api = _completion.parse_url(options["url"], read_key(options["api_key_file"]))
    ready = _completion.wait_until_ready(api, options["timeout"])
    answer = _completion.complete(api, options["prompt"], options["n_predict"], options["answer_timeout"])
    what = {name: options[name] for name in ("model", "build", "prompt", "n_predict")}
    key = _completion.proof_key(
        what["model"], what["build"], options["plan"], options["arguments"], what["prompt"], what["n_predict"]
    )
    path = options["record_path"]
    recorded = _completion.recorded_text(path, key) if path else None
    result["proof"] = {
        "prompt": what["prompt"],
        "text": answer.text,
        "tokens": answer.n_tokens,
        "tokens_per_s": answer.tokens_per_s,
        "prompt_tokens_per_s": answer.prompt_tokens_per_s,
        "ready_s": round(ready, 2),
        "key": key,
        "known": recorded is not None,
    }
    _completion.judge(answer)
    if recorded is not None:
        _completion.check_recorded(path, recorded, answer.text)
    elif path:
        result.update(changed=True, diff={"before": "", "after": answer.text + "\n", "after_header": path})
        if not module.check_mode:
            _completion.record_text(path, key, answer.text, what)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "api_key_file": {"type": "path", "no_log": False},
            "timeout": {"type": "float", "default": 300},
            "answer_timeout": {"type": "float", "default": 120},
            "prompt": {"type": "str", "default": _completion.PROMPT},
            "n_predict": {"type": "int", "default": 24},
            "model": {"type": "str", "default": ""},
            "build": {"type": "str", "default": ""},
            "plan": {"type": "dict"},
            "arguments": {"type": "list", "elements": "str", "default": []},
            "record_path": {"type": "path"},
            "log_paths": {"type": "list", "elements": "path", "default": []},
            "journal_unit": {"type": "str"},
            "journal_scope": {"type": "str", "choices": ["system", "user"], "default": "system"},
        },
        supports_check_mode=True,
    )
    result: dict[str, Any] = {"changed": False, "table": [], "problems": []}
    failure = None
    try:
        prove(module, result)
    except _completion.ProofError as error:
        failure = error
    log = _server_log.parse(log_lines(module.params))
    if module.params["plan"] is not None:
        result["table"], result["problems"] = _server_log.compare(module.params["plan"], log)
    if failure is not None:
        explained = [
            {"severity": "error", "code": found.code, "text": f"{found.line}: {found.advice}"} for found in log.findings
        ]
        result["problems"] = explained + result["problems"]
        says = f" Its log says: {explained[-1]['text']}" if explained else ""
        module.fail_json(msg=f"{failure}.{says}", code=failure.code, **result)
    errors = [problem["text"] for problem in result["problems"] if problem["severity"] == "error"]
    if errors:
        module.fail_json(
            msg="the primary answers, but not as planned: " + "; ".join(errors), code="not_as_planned", **result
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
