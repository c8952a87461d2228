# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Builds the collection, installs the archive into an empty path and asks there for everything it should bring."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ansible_collections.llamafleet.rpc.tests.tools import tree

NAME = "llamafleet.rpc"
BIN = Path(sys.executable).parent
# All that a user of the installed collection needs or reads; anything else was packed by mistake.
PACKED = {
    *("CHANGELOG.md", "CHANGELOG.rst", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "LICENSE", "README.md"),
    *("FILES.json", "MANIFEST.json", "changelogs", "docs", "meta", "playbooks", "plugins", "roles"),
}


def offered() -> dict[str, list[str]]:
    """Everything that the checkout offers, as kind -> full names."""
    plugins = tree.ROOT / "plugins"

    def names(folder: Path, pattern: str) -> list[str]:
        return sorted(f"{NAME}.{path.stem}" for path in folder.glob(pattern) if not path.name.startswith("_"))

    return {
        "module": names(plugins / "modules", "*.py"),
        "filter": names(plugins / "filter", "*.py"),
        "role": names(tree.ROOT / "roles", "*/"),
    }


def ansible(argv: Sequence[str], where: Path) -> str:
    """Run one of Ansible's programs as someone without the checkout would, and return what it prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "PYTHONPATH"))}
    env["ANSIBLE_COLLECTIONS_PATH"] = str(where)
    done = subprocess.run([BIN / argv[0], *argv[1:]], cwd=where, env=env, capture_output=True, check=False, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(argv)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def packed_by_mistake(archive: Path) -> list[str]:
    with tarfile.open(archive) as tar:
        return sorted(member.name for member in tar if member.name.split("/")[0] not in PACKED or member.issym())


def main() -> int:
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="llamafleet-package-") as temporary:
        built, installed = Path(temporary, "built"), Path(temporary, "installed")
        built.mkdir()
        installed.mkdir()
        galaxy = "ansible-galaxy", "collection"
        ansible([*galaxy, "build", str(tree.ROOT), "--output-path", str(built)], built)
        (archive,) = built.glob("*.tar.gz")
        problems += [f"packed by mistake: {name}" for name in packed_by_mistake(archive)]
        ansible([*galaxy, "install", "--offline", "-p", str(installed), str(archive)], installed)
        for kind, names in offered().items():
            told = json.loads(ansible(["ansible-doc", "--json", "--type", kind, *names], installed)) if names else {}
            problems += [f"{kind} {name}: not documented once installed" for name in names if not told.get(name)]
            print(f"{kind}: {len(names)} documented")
        for playbook in sorted((tree.ROOT / "playbooks").glob("*.yml")):
            play = f"{NAME}.{playbook.stem}"
            ansible(["ansible-playbook", "--syntax-check", "-i", "localhost,", play], installed)
            print(f"playbook: {play} loads")
    for problem in problems:
        print(problem)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
