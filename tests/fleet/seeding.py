# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""llama.cpp is built once, on the machine that carries the fleet, and handed to hosts as if each had built it.

A host's class names its C library, so that a newer release of Debian would build anew. These programs need nothing of
a newer library and run there (tried, with b11434), and what is under test is not the compiler: the manifest that such a
host gets is the collection's own for its class, over the files of the class of this machine. `make build` and the
loopback scenario are where the builds themselves are tested.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils import _builds


def prepare(prefix: Path, target: Path, libraries: set[str]) -> None:
    """Copies to ``target`` the build and the model below ``prefix``: the build once for each C library, as in '2.41'.

    A library older than this machine's is an error: its hosts cannot run the programs.
    """
    (source,) = (prefix / "builds").iterdir()
    manifest: dict[str, Any] = json.loads((source / "manifest.json").read_text(encoding="utf-8"))
    own = re.search(r"-glibc([0-9.]+)-", manifest["class_id"])
    assert own, f"{source}: the class {manifest['class_id']} names no glibc"
    for library in libraries:
        assert _number(library) >= _number(own[1]), (
            f"hosts of the fleet have glibc {library}, and llama.cpp was built here with {own[1]}: it would not start"
        )
        class_id = manifest["class_id"].replace(own[0], f"-glibc{library}-")
        inputs = {**manifest["inputs"], "class_id": class_id}
        number = _builds.manifest_id(inputs)
        copy = target / library / "builds" / f"{inputs['build']}-{number}"
        shutil.copytree(source / "bin", copy / "bin")
        changed = {**manifest, "inputs": inputs, "class_id": class_id, "manifest_id": number}
        (copy / "manifest.json").write_text(json.dumps(changed), encoding="utf-8")
        shutil.copytree(prefix / "models", target / library / "models")


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
