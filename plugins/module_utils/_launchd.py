# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Jobs of launchd in the system domain, by the verbs that launchctl has had since macOS 10.10.

launchctl answers before the work is done, and its statuses tell little: 5 is said for a job that is loaded already, for
one that is still being torn down, for a disabled one and for a bad property list. So every verb is followed by a look
at the job (``print``) with a bounded wait. Sources: launchctl(1), launchd.plist(5), and the reports of rc 3, 5, 36, 37,
64, 113 and 125 gathered in the project's notes on detection; none of this has run on a Mac yet.
"""

from __future__ import annotations

import os
import plistlib
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable
from xml.parsers.expat import ExpatError

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._files import read_text, write_atomic
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Result, Runner
from ansible_collections.llamafleet.rpc.plugins.module_utils._units import (
    Service,
    launchd_bytes,
    launchd_label,
    launchd_plist,
)

DAEMONS = "/Library/LaunchDaemons"
OWNER = (0, 0)  # root:wheel; launchd refuses a job that anybody else may write to

NO_SUCH_PROCESS = 3
INPUT_OUTPUT = 5
IN_PROGRESS = 36
ALREADY_IN_PROGRESS = 37
NOT_FOUND = 113
#: What ``bootout`` may say of a job that is on its way out, or was never there.
_GONE_OR_GOING = (0, NO_SUCH_PROCESS, INPUT_OUTPUT, IN_PROGRESS, NOT_FOUND)
#: What ``bootstrap`` says while the label is still taken.
_TAKEN = (INPUT_OUTPUT, ALREADY_IN_PROGRESS)
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,220}")

_MEANING = {
    INPUT_OUTPUT: "launchd took it for loaded, disabled or damaged, and does not say which; see "
    "`log show --last 2m --predicate 'process == \"launchd\"'`, and check the file with `plutil -lint`",
    64: "this launchctl does not know the verb; macOS 10.11 or later is needed",
    125: "this domain does not take jobs; run as root",
    1: "only root may do that; set ansible_become: true",
}


class LaunchdError(FleetError):
    """launchd refused, or did not do in time what was asked."""


@dataclass(frozen=True)
class Loaded:
    """A job as ``launchctl print`` shows it. Its output is no stable interface, so any part may be unknown (None)."""

    path: str | None = None
    state: str | None = None
    pid: int | None = None
    last_exit: str | None = None
    arguments: tuple[str, ...] | None = None


def parse_print(text: str) -> Loaded:
    """The parts that we use of ``launchctl print system/LABEL``: lines of one tab, and the block ``arguments``."""
    found: dict[str, str] = {}
    arguments: list[str] | None = None
    block = ""
    for line in text.splitlines():
        opened = re.fullmatch(r"\t([a-z][a-z ]*) = \{", line)
        if opened:
            block = opened.group(1)
            arguments = [] if block == "arguments" else arguments
        elif line == "\t}":
            block = ""
        elif block == "arguments" and arguments is not None and line.startswith("\t\t"):
            arguments.append(line[2:])
        elif not block:
            pair = re.fullmatch(r"\t([a-z][a-z ]*) = (.*)", line)
            if pair:
                found.setdefault(pair.group(1), pair.group(2).strip())
    pid = found.get("pid", "")
    return Loaded(
        path=found.get("path"),
        state=found.get("state"),
        pid=int(pid) if pid.isdecimal() and pid.isascii() and int(pid) else None,
        last_exit=found.get("last exit code"),
        arguments=None if arguments is None else tuple(arguments),
    )


def checked_label(label: str) -> str:
    """``label``, or LaunchdError when it is none that can be a file name."""
    if not _LABEL.fullmatch(label):
        raise LaunchdError(f"label {label!r}: only letters, digits, '_', '.' and '-' are allowed (at most 221)")
    return label


class Launchctl:
    """The verbs, each with the look and the wait that make it an answer. ``patience`` in seconds bounds each wait."""

    def __init__(
        self,
        runner: Runner,
        patience: float = 40.0,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._patience = patience
        self._sleep = sleep
        self._clock = clock
        self._program = runner.which("launchctl") or "/bin/launchctl"

    def _call(self, *words: str) -> Result:
        return self._runner.run([self._program, *words], timeout=60.0)

    def look(self, label: str) -> Loaded | None:
        """The job, or None when launchd does not have it. A job that is being torn down is still there."""
        result = self._call("print", f"system/{label}")
        if result.rc == 0:
            return parse_print(result.stdout)
        if result.rc == NOT_FOUND:
            return None
        raise LaunchdError(self._said("print", label, result))

    def enabled(self, label: str) -> bool:
        """Whether launchd may start it; ``disable`` outlives both the file and a boot."""
        text = self._call("print-disabled", "system").stdout
        # macOS 13 and before say true and false of "disabled".
        return re.search(rf'"{re.escape(label)}" => (disabled|true)\b', text) is None

    def enable(self, label: str) -> None:
        """Take it out of the list of disabled jobs."""
        self._must("enable", label, self._call("enable", f"system/{label}"))

    def bootstrap(self, label: str, path: str) -> None:
        """Load the job from ``path``; while the label is still taken, try again."""
        end = self._clock() + self._patience
        while True:
            result = self._call("bootstrap", "system", path)
            if result.rc == 0:
                return
            if result.rc not in _TAKEN or self._clock() >= end:
                raise LaunchdError(self._said("bootstrap", label, result))
            job = self.look(label)
            if job is not None and job.path == path and job.state in ("running", "waiting", "spawn scheduled"):
                return  # it is in, whatever launchctl said
            self._sleep(0.5)

    def bootout(self, label: str) -> None:
        """Unload the job and wait until its label is free."""
        result = self._call("bootout", f"system/{label}")
        if result.rc not in _GONE_OR_GOING:
            raise LaunchdError(self._said("bootout", label, result))
        end = self._clock() + self._patience
        while self.look(label) is not None:
            if self._clock() >= end:
                raise LaunchdError(
                    f"launchd still has {label} {self._patience:g} s after bootout: its process does not end"
                )
            self._sleep(0.5)

    def kickstart(self, label: str) -> None:
        """End the process of a loaded job and start it again, in one step. The property list is not read again."""
        self._must("kickstart", label, self._call("kickstart", "-k", f"system/{label}"))

    def wait_for_pid(self, label: str) -> int | None:
        """The process of a job that was just started; None when none shows up within 5 s (launchd may throttle it)."""
        end = self._clock() + 5.0
        while True:
            job = self.look(label)
            if job is not None and job.pid is not None:
                return job.pid
            if self._clock() >= end:
                return None
            self._sleep(0.2)

    def _must(self, verb: str, label: str, result: Result) -> None:
        if result.rc != 0:
            raise LaunchdError(self._said(verb, label, result))

    def _said(self, verb: str, label: str, result: Result) -> str:
        said = (result.stderr.strip() or result.stdout.strip())[-400:] or "no message"
        meaning = _MEANING.get(result.rc)
        return f"launchctl {verb} {label} failed with status {result.rc}: {said}" + (f" ({meaning})" if meaning else "")


# ---------------------------------------------------------------------------------------------------- one job


@dataclass(frozen=True)
class Outcome:
    """What ``converge`` did, or in check mode would do."""

    changed: bool
    before: str
    after: str
    actions: list[str]
    pid: int | None


@dataclass(frozen=True)
class Place:
    """Where files of jobs lie and whose they are: uid and gid."""

    directory: str = DAEMONS
    owner: tuple[int, int] = OWNER

    def path(self, label: str) -> str:
        """The file of a job."""
        return os.path.join(self.directory, label + ".plist")


def file_is_right(path: str, owner: tuple[int, int]) -> bool:
    """Whether launchd would take the file: its owner and group, mode 0644, and no link."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return (found.st_uid, found.st_gid) == owner and found.st_mode == 0o100644


def write_job(path: str, text: str, owner: tuple[int, int]) -> None:
    """Put the file of a job in its place, as launchd takes it."""
    write_atomic(path, text, 0o644)
    if not file_is_right(path, owner):
        os.chown(path, *owner)  # a directory of BSD hands its group on to new files


def differs(job: Loaded, path: str, arguments: Sequence[str] | None) -> bool:
    """Whether the loaded job is another one than the file's, as far as ``print`` tells: a run that died half-way, or a
    file that somebody put back without loading it."""
    if job.path is not None and os.path.realpath(job.path) != os.path.realpath(path):
        return True
    return job.arguments is not None and arguments is not None and list(job.arguments) != list(arguments)


def converge(
    launchctl: Launchctl, place: Place, label: str, definition: Mapping[str, Any], state: str, check: bool
) -> Outcome:
    """Bring a job to ``state``: started, restarted, stopped (file kept, not loaded) or absent.

    A job whose file or loaded arguments differ is unloaded, written and loaded again, for launchd keeps what it read
    (B4-12). One that only has to restart is kickstarted. Nothing is done with ``check``.
    """
    path = place.path(checked_label(label))
    before = read_text(path)
    job = launchctl.look(label)
    if state in ("stopped", "absent"):
        return _away(launchctl, path, before, label, job is not None, state, check)

    wanted = {**definition, "Label": label}
    after = launchd_bytes(wanted).decode()
    actions = ["write"] if before != after or not file_is_right(path, place.owner) else []
    if not launchctl.enabled(label):
        actions.append("enable")
    if job is None:
        actions.append("bootstrap")
    elif "write" in actions or differs(job, path, wanted.get("ProgramArguments")):
        actions += ["bootout", "bootstrap"]
    elif state == "restarted" or (wanted.get("KeepAlive") is True and job.state == "not running"):
        actions.append("kickstart")
    pid = job.pid if job else None
    if check or not actions:
        return Outcome(bool(actions), before or "", after, actions, pid)
    if "bootout" in actions:
        launchctl.bootout(label)  # before the file changes: a run that dies in between is seen by the next
    if "write" in actions:
        write_job(path, after, place.owner)
    if "enable" in actions:
        launchctl.enable(label)
    if "bootstrap" in actions:
        launchctl.bootstrap(label, path)
    if "kickstart" in actions:
        launchctl.kickstart(label)
    if wanted.get("KeepAlive") is True:
        pid = launchctl.wait_for_pid(label)
    return Outcome(True, before or "", after, actions, pid)


def _away(
    launchctl: Launchctl, path: str, before: str | None, label: str, loaded: bool, state: str, check: bool
) -> Outcome:
    remove = state == "absent" and before is not None
    if loaded and not check:
        launchctl.bootout(label)
    if remove and not check:
        os.unlink(path)
    actions = (["bootout"] if loaded else []) + (["remove"] if remove else [])
    return Outcome(bool(actions), before or "", "" if state == "absent" else before or "", actions, None)


def _arguments(text: str | None) -> list[str] | None:
    """The arguments in the text of a property list; None where there are none, or where it is damaged."""
    if text is None:
        return None
    try:
        job = plistlib.loads(text.encode())
    except (plistlib.InvalidFileException, ExpatError, ValueError):
        return None
    found = job.get("ProgramArguments") if isinstance(job, dict) else None
    return [str(word) for word in found] if isinstance(found, list) else None


# ---------------------------------------------------------------------------------------- manager of services


class Launchd:
    """launchd as a manager of services (``_service.Manager``)."""

    def __init__(self, runner: Runner, place: Place | None = None, launchctl: Launchctl | None = None) -> None:
        self._runner = runner
        self._place = place or Place()
        self._launchctl = launchctl or Launchctl(runner)

    def path(self, name: str) -> str:
        """The file of the job."""
        return self._place.path(checked_label(launchd_label(name)))

    def text(self, service: Service) -> str:
        """Its content."""
        return launchd_plist(service).decode()

    def pid(self, name: str) -> int | None:
        """Its process; None when it has none, and when launchd runs something else under its label."""
        job = self._launchctl.look(launchd_label(name))
        if job is None:
            return None
        return None if differs(job, self.path(name), _arguments(read_text(self.path(name)))) else job.pid

    def waiting(self, name: str) -> bool:
        """Whether launchd has the job, and so would start it again."""
        return self._launchctl.look(launchd_label(name)) is not None

    def check(self, name: str, text: str) -> None:
        """Refuse what this host's plutil does not read, before it is put in place."""
        with tempfile.TemporaryDirectory(prefix="llamafleet-") as directory:
            path = os.path.join(directory, launchd_label(name) + ".plist")
            write_atomic(path, text)
            result = self._runner.run(["plutil", "-lint", path])
        if result.rc not in (0, 127):
            raise LaunchdError(f"macOS does not read the job {name}: {(result.stdout + result.stderr).strip()[-400:]}")

    def load(self, name: str) -> None:
        """Have launchd read the file that was just written: what it read before is unloaded."""
        path = self.path(name)
        if not file_is_right(path, self._place.owner):
            os.chown(path, *self._place.owner)
        if self._launchctl.look(launchd_label(name)) is not None:
            self._launchctl.bootout(launchd_label(name))

    def start(self, name: str) -> None:
        """Load the job, which starts it. One that is loaded and has no process is loaded anew, for it may be old."""
        label = launchd_label(name)
        if not self._launchctl.enabled(label):
            self._launchctl.enable(label)
        if self._launchctl.look(label) is not None:
            self._launchctl.bootout(label)
        self._launchctl.bootstrap(label, self.path(name))

    def stop(self, name: str) -> None:
        """Unload it. To end its process would not do: launchd brings it back."""
        self._launchctl.bootout(launchd_label(name))

    def restart(self, name: str) -> None:
        """Replace its process; the file did not change."""
        self._launchctl.kickstart(launchd_label(name))

    def forget(self, name: str) -> None:
        """Remove the file."""
        if self._launchctl.look(launchd_label(name)) is not None:
            self._launchctl.bootout(launchd_label(name))
        if os.path.exists(self.path(name)):
            os.unlink(self.path(name))
