#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: build_info
short_description: Tell which llama.cpp build is in use below a prefix, and whether it is whole
version_added: 0.1.0
description:
  - Reads the manifest of the build that C(current) below O(prefix) links to, compares its files, and asks the server
    for its version. A build that is missing or damaged is a result, not a failure.
author:
  - llamafleet contributors (@llamafleet)
extends_documentation_fragment:
  - llamafleet.rpc.attributes
  - llamafleet.rpc.attributes.actiongroup_all
  - llamafleet.rpc.attributes.info_module
  - llamafleet.rpc.attributes.posix
options:
  prefix:
    description: Directory of builds, as in M(llamafleet.rpc.build).
    type: path
    required: true
  verify:
    description: Whether to hash each file too. Otherwise their sizes are compared.
    type: bool
    default: false
seealso:
  - module: llamafleet.rpc.build
"""

EXAMPLES = r"""
- name: Look at the build of this host
  llamafleet.rpc.build_info:
    prefix: /opt/llamafleet
    verify: true
  register: installed

- name: Stop if it is damaged
  ansible.builtin.assert:
    that: installed.ok
    fail_msg: "{{ installed.problems | join('; ') }}"
"""

RETURN = r"""
ok:
  description: Whether there is a build and nothing is wrong with it.
  returned: always
  type: bool
problems:
  description: What is wrong.
  returned: always
  type: list
  elements: str
build:
  description: Tag of the build, none when there is none.
  returned: always
  type: str
  sample: b11434
commit:
  description: Commit of the sources, none when it is not known.
  returned: always
  type: str
manifest_id:
  description: Digest of all that decided the bytes of the build.
  returned: always
  type: str
  sample: 0a1b2c3d4e5f
version:
  description: What the server's C(--version) says; its parts are none where it does not know.
  returned: always
  type: dict
  sample: {number: 11434, commit: src-b0a2feb6}
manifest:
  description: The whole manifest, none when there is none.
  returned: always
  type: dict
previous:
  description: Directory name of the build that is kept for a rollback, or none.
  returned: always
  type: str
  sample: b11400-9f8e7d6c5b4a
"""

import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils import _builds, _compile
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "prefix": {"type": "path", "required": True},
            "verify": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(changed=False, **look(module.params["prefix"], module.params["verify"]))
    except FleetError as error:
        module.fail_json(msg=str(error))


def look(prefix: str, verify: bool) -> dict[str, Any]:
    """The result of the module."""
    place = os.path.join(prefix, "current")
    manifest = _compile.read_manifest(place)
    problems: list[str] = []
    version = _builds.Version(None, None)
    if manifest is None:
        problems.append(f"there is no build with a manifest at {place}; the role llama_build makes one")
    else:
        problems += _compile.problems_of(place, manifest, verify)
        server = os.path.join(place, "bin", "llama-server")
        if not problems and "bin/llama-server" in manifest["files"]:
            answer = SystemRunner().run([server, "--version"])
            version = _builds.parse_version(answer.stdout + answer.stderr)
            if answer.rc != 0:
                problems.append(f"{server} --version ended with status {answer.rc}: {answer.stderr.strip()[-300:]}")
            elif version.number is not None and f"b{version.number}" != manifest["build"]:
                problems.append(f"{server} says it is b{version.number}, its manifest says {manifest['build']}")
    known = manifest or {}
    return {
        "ok": not problems,
        "problems": problems,
        "build": known.get("build"),
        "commit": known.get("commit"),
        "manifest_id": known.get("manifest_id"),
        "version": version._asdict(),
        "manifest": manifest,
        "previous": _compile.current_name(prefix, "previous"),
    }


if __name__ == "__main__":
    main()
