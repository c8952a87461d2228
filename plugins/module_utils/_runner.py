# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The only door to the system: run a command, read a file, find a program. Tests put another Runner in its place."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

NOT_FOUND = 127
TIMED_OUT = 124

# sudo's secure_path and login-less sessions leave these out of PATH; WSL keeps nvidia-smi in a place of its own.
KNOWN_PLACES = (
    "/usr/local/bin",
    "/usr/bin",
    "/bin",
    "/usr/local/sbin",
    "/usr/sbin",
    "/sbin",
    "/usr/lib/wsl/lib",
    "/opt/rocm/bin",
    "/usr/local/cuda/bin",
    "/opt/cuda/bin",
    "/opt/intel/oneapi/compiler/latest/bin",
    "/opt/homebrew/bin",
)


class Result(NamedTuple):
    """What a command gave: its exit status (127 not found or not runnable, 124 timed out) and its two streams."""

    rc: int
    stdout: str
    stderr: str


class Runner(Protocol):
    """What the core may ask of the system. Nothing here raises for what a host may normally lack."""

    def run(self, argv: Sequence[str], timeout: float = 30.0) -> Result:
        """Run argv without a shell, in the C locale, with empty standard input."""

    def read(self, path: str, limit: int = 1 << 20) -> str | None:
        """Text of a file, at most `limit` bytes of it; None when it is absent or unreadable."""

    def listdir(self, path: str) -> list[str]:
        """Sorted names in a directory; empty when it is absent or unreadable."""

    def readlink(self, path: str) -> str | None:
        """Target of a symbolic link; None when there is none or it may not be read."""

    def exists(self, path: str) -> bool:
        """Whether the path exists (a dangling link does not)."""

    def which(self, name: str) -> str | None:
        """Absolute path of a program, from PATH or the known places; None when there is none."""


class SystemRunner:
    """The Runner of a real host. ``account``: (uid, gid) that commands run as, without further groups; None: ours."""

    _account: Mapping[str, Any] = {}

    def __init__(self, account: tuple[int, int] | None = None) -> None:
        if account is not None:
            self._account = {"user": account[0], "group": account[1], "extra_groups": []}

    def run(self, argv: Sequence[str], timeout: float = 30.0) -> Result:
        """See Runner.run. A command that runs too long is killed with its children (they share its process group)."""
        environment = dict(os.environ, LC_ALL="C", LANG="C")
        environment.pop("LANGUAGE", None)
        try:
            process = subprocess.Popen(  # pylint: disable=ansible-bad-function # a core file: there is no AnsibleModule
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
                **self._account,
            )
        except OSError as error:
            return Result(NOT_FOUND, "", f"{argv[0]}: {error.strerror or error}")
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):  # it ended between the time-out and the kill
                os.killpg(process.pid, signal.SIGKILL)
            out, err = _drain(process)
            return Result(TIMED_OUT, _text(out), _text(err) + f"\n{argv[0]}: timed out after {timeout:g} s")
        return Result(process.returncode, _text(out), _text(err))

    def read(self, path: str, limit: int = 1 << 20) -> str | None:
        """See Runner.read."""
        try:
            with open(path, "rb") as handle:
                return _text(handle.read(limit))
        except OSError:
            return None

    def listdir(self, path: str) -> list[str]:
        """See Runner.listdir."""
        try:
            return sorted(os.listdir(path))
        except OSError:
            return []

    def readlink(self, path: str) -> str | None:
        """See Runner.readlink."""
        try:
            return os.readlink(path)
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        """See Runner.exists."""
        return os.path.exists(path)

    def which(self, name: str) -> str | None:
        """See Runner.which."""
        found = shutil.which(name)
        if found is None:
            found = shutil.which(name, path=os.pathsep.join(KNOWN_PLACES))
        return os.path.abspath(found) if found else None


class DeadlineRunner:
    """A Runner over another one whose commands all end by one deadline, whichever of them hang.

    Commands that run side by side, and those that follow them, share the `seconds`.
    """

    def __init__(self, runner: Runner, seconds: float) -> None:
        self._runner = runner
        self._end = time.monotonic() + seconds

    def run(self, argv: Sequence[str], timeout: float = 30.0) -> Result:
        """See Runner.run. A command for which no time is left counts as timed out."""
        left = self._end - time.monotonic()
        if left <= 0:
            return Result(TIMED_OUT, "", f"{argv[0]}: not started, the time is used up")
        return self._runner.run(argv, min(timeout, left))

    def read(self, path: str, limit: int = 1 << 20) -> str | None:
        """See Runner.read."""
        return self._runner.read(path, limit)

    def listdir(self, path: str) -> list[str]:
        """See Runner.listdir."""
        return self._runner.listdir(path)

    def readlink(self, path: str) -> str | None:
        """See Runner.readlink."""
        return self._runner.readlink(path)

    def exists(self, path: str) -> bool:
        """See Runner.exists."""
        return self._runner.exists(path)

    def which(self, name: str) -> str | None:
        """See Runner.which."""
        return self._runner.which(name)


def _drain(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """What a killed command had written.

    A grandchild that left the group may hold the pipe open: wait a second only.
    """
    try:
        return process.communicate(timeout=1.0)
    except subprocess.TimeoutExpired as error:
        return error.stdout or b"", error.stderr or b""


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
