# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What ansible-test needs around it: a real collection directory, a pip, and interpreters that run.

The checkout itself is reached as a collection through the link ``.collections``; ansible-test resolves
links and then refuses to work outside ``ansible_collections/NAMESPACE/NAME``, so it gets a copy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import ansible_test
from ansible_test._util.target.common.constants import CONTROLLER_PYTHON_VERSIONS, REMOTE_ONLY_PYTHON_VERSIONS

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
COPY = CACHE / "ansible-test" / "ansible_collections" / "llamafleet" / "rpc"
# Left out of the copy: the link into the checkout, which only the checkout needs.
LINK = ".collections"
# The Pythons of managed hosts that this ansible-test knows, oldest first. 3.8, which 2.19 still knows, is left out
# here and in tests/config.yml.
TARGET_PYTHONS = tuple(
    version for version in (*REMOTE_ONLY_PYTHON_VERSIONS, *CONTROLLER_PYTHON_VERSIONS) if version != "3.8"
)


def own_files(root: Path = ROOT) -> list[str]:
    """Paths, relative to ``root``, of all files that belong to the collection: tracked, or new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    names = sorted({name for name in listed.split("\0") if name and not name.startswith(f"{LINK}/")})
    return [name for name in names if (root / name).is_file() or (root / name).is_symlink()]


def refresh_copy() -> Path:
    """Bring the copy for ansible-test up to date and return its directory.

    It is a repository of its own, for ansible-test asks the nearest one above which files count, and the
    checkout's ignores ``.cache``. ``tests/output`` stays: there lies what makes a second run quick.
    """
    names = own_files()
    wanted = set(names)
    kept = {COPY / ".git", COPY / "tests" / "output"}
    for path in sorted(COPY.rglob("*"), reverse=True):
        if path in kept or not kept.isdisjoint(path.parents):
            continue
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif str(path.relative_to(COPY)) not in wanted:
            path.unlink()
    for name in names:
        target = COPY / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    subprocess.run(["git", "init", "--quiet"], cwd=COPY, check=True)
    return COPY


def provide_pip() -> None:
    """Put our stand-in where ansible-test keeps the get-pip script that it downloads; an existing one is kept."""
    source = Path(ansible_test.__path__[0], "_internal", "python_requirements.py").read_text(encoding="utf-8")
    cache = Path.home() / ".ansible" / "test" / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    for version in re.findall(r"\bpip='([\d.]+)'", source):
        target = cache / f"get_pip_{version.replace('.', '_')}.py"
        if not target.exists():
            shutil.copy(ROOT / "tests" / "tools" / "get_pip_shim.py", target)


def _runs(python: Path, version: str) -> bool:
    try:
        reply = subprocess.run(
            [python, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            check=False,
            text=True,
            timeout=20,
        )
    except OSError:
        return False
    return reply.returncode == 0 and reply.stdout.strip() == version


def interpreters(versions: Iterable[str] = TARGET_PYTHONS) -> dict[str, Path]:
    """The Pythons of ``versions`` that really run here, as version -> program.

    A pyenv shim is not one: it exists for every version that pyenv knows, and most of them exit 127.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found: dict[str, Path] = {}
    for version in versions:
        places = [Path(folder) / f"python{version}" for folder in path_without_shims()]
        places += sorted(pyenv.glob(f"{version}.*/bin/python{version}"))
        for place in places:
            if place.exists() and _runs(place, version):
                found[version] = place
                break
    return found


def path_without_shims() -> list[str]:
    """The folders of PATH, less those of pyenv's shims."""
    return [folder for folder in os.get_exec_path() if "shims" not in Path(folder).parts]


def search_path(extra: Iterable[Path]) -> str:
    """A PATH for ansible-test: what works here, then the folders of the interpreters it could not find itself."""
    return os.pathsep.join(dict.fromkeys([*path_without_shims(), *(str(folder) for folder in extra)]))
