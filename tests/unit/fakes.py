# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host made of dictionaries, for tests of the core."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence

from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import NOT_FOUND, Result


class FakeRunner:
    """A Runner over given files, links and commands; `ran` keeps every argv that was asked for.

    `commands` maps an argv as one string ("nvidia-smi -L") or a program's name to a Result; the longest match wins.
    A program is found by `which` when a command starts with its name, or when `programs` gives its path.
    """

    def __init__(
        self,
        files: Mapping[str, str] | None = None,
        commands: Mapping[str, Result] | None = None,
        links: Mapping[str, str] | None = None,
        programs: Mapping[str, str] | None = None,
    ) -> None:
        self.files = dict(files or {})
        self.links = dict(links or {})
        self.commands = dict(commands or {})
        self.programs = dict(programs or {})
        self.ran: list[list[str]] = []

    def run(self, argv: Sequence[str], timeout: float = 30.0) -> Result:
        self.ran.append(list(argv))
        line = " ".join([posixpath.basename(argv[0]), *argv[1:]])
        fits = [key for key in self.commands if line == key or line.startswith(key + " ")]
        if not fits:
            return Result(NOT_FOUND, "", f"{argv[0]}: not found")
        return self.commands[max(fits, key=len)]

    def read(self, path: str, limit: int = 1 << 20) -> str | None:
        text = self.files.get(path)
        return None if text is None else text[:limit]

    def listdir(self, path: str) -> list[str]:
        head = path.rstrip("/") + "/"
        return sorted(
            {known[len(head) :].split("/")[0] for known in [*self.files, *self.links] if known.startswith(head)}
        )

    def readlink(self, path: str) -> str | None:
        return self.links.get(path)

    def exists(self, path: str) -> bool:
        return path in self.files or path in self.links or bool(self.listdir(path))

    def which(self, name: str) -> str | None:
        if name in self.programs:
            return self.programs[name]
        return f"/usr/bin/{name}" if any(key.split(" ")[0] == name for key in self.commands) else None
