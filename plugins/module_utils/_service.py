# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One abstraction over the managers of long-running services: systemd (system or user scope) and supervisor.

A manager knows where a definition lives, how it is written (``_units``), and how to start, stop and forget it. What
has to happen for a wanted state is decided once, in ``converge``, for all managers alike.
"""

from __future__ import annotations

import fcntl
import glob
import grp
import os
import re
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._files import read_text, write_atomic
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Result, Runner
from ansible_collections.llamafleet.rpc.plugins.module_utils._units import (
    DEVICE_NODES,
    Service,
    supervisor_main,
    supervisor_program,
    systemd_unit,
)

#: The one package that a host without an init needs; it has no dependencies, and pip refuses any other file.
SUPERVISOR_REQUIREMENT = (
    "supervisor==4.3.0 --hash=sha256:0bcb763fddafba410f35cbde226aa7f8514b9fb82eb05a0c85f6588d1c13f8db\n"
)


class ServiceError(FleetError):
    """A service manager refused or did not do what was asked."""


class Manager(Protocol):
    """What ``converge`` needs of a service manager."""

    def path(self, name: str) -> str: ...

    def text(self, service: Service) -> str: ...

    def check(self, name: str, text: str) -> None: ...

    def pid(self, name: str) -> int | None: ...

    def load(self, name: str) -> None: ...

    def start(self, name: str) -> None: ...

    def stop(self, name: str) -> None: ...

    def restart(self, name: str) -> None: ...

    def waiting(self, name: str) -> bool: ...

    def forget(self, name: str) -> None: ...


def _must(result: Result, what: str) -> Result:
    if result.rc != 0:
        said = (result.stderr.strip() or result.stdout.strip())[-600:]
        raise ServiceError(f"{what} failed with status {result.rc}: {said or 'no message'}")
    return result


def device_groups(backend: str, root: str = "/") -> list[str]:
    """Groups that may open the device nodes of a backend, where not everybody may: the ones that own them on this host.

    The render group has another number, or no name at all, in a container. ``root`` is where the nodes lie, for tests.
    """
    found = set()
    for pattern in DEVICE_NODES.get(backend, ()):
        for path in glob.glob(os.path.join(root, pattern.lstrip("/"))):
            status = os.stat(path)
            if stat.S_ISDIR(status.st_mode) or status.st_mode & 0o006 == 0o006 or status.st_mode & 0o060 != 0o060:
                continue
            try:
                found.add(grp.getgrgid(status.st_gid).gr_name)
            except KeyError:
                found.add(str(status.st_gid))
    return sorted(found)


class Systemd:
    """systemd, by systemctl. ``scope`` system keeps units in /etc, user below the account's configuration."""

    def __init__(self, runner: Runner, scope: str, home: str = "") -> None:
        self._runner = runner
        self._scope = scope
        self._directory = "/etc/systemd/system" if scope == "system" else os.path.join(home, ".config/systemd/user")
        self._systemctl = ["systemctl"] if scope == "system" else ["systemctl", "--user"]

    def _call(self, *words: str) -> Result:
        return self._runner.run([*self._systemctl, *words], timeout=90.0)

    def path(self, name: str) -> str:
        return os.path.join(self._directory, name + ".service")

    def text(self, service: Service) -> str:
        # The first line is "systemd 252 (252.39-1~deb12u1)".
        version = re.match(r"systemd (\d+)", self._runner.run(["systemctl", "--version"]).stdout)
        return systemd_unit(service, self._scope, rising=version is not None and int(version.group(1)) >= 254)

    def check(self, name: str, text: str) -> None:
        """Refuse a unit that this host's systemd would, before it is put in place. What it loads beside is not ours."""
        with tempfile.TemporaryDirectory(prefix="llamafleet-") as directory:
            path = os.path.join(directory, name + ".service")
            write_atomic(path, text)
            scope = ["--user"] if self._scope == "user" else []
            result = self._runner.run(["systemd-analyze", *scope, "--man=no", "verify", path], timeout=60.0)
        said = [line for line in (result.stdout + result.stderr).splitlines() if name in line]
        if result.rc not in (0, 127) and said:
            raise ServiceError(f"systemd would not load the unit {name}: {' '.join(said)[-600:]}")

    def foreign(self, name: str) -> list[str]:
        """Drop-ins that somebody added to the unit, which may change all that it says."""
        result = self._call("show", "--property=DropInPaths", "--value", name + ".service")
        return [path for path in result.stdout.split() if re.search(rf"/{re.escape(name)}\.service\.d/", path)]

    def pid(self, name: str) -> int | None:
        result = self._call("show", "--property=MainPID", "--value", name + ".service")
        value = result.stdout.strip()
        return int(value) if result.rc == 0 and value.isdigit() and value != "0" else None

    def load(self, name: str) -> None:  # noqa: ARG002  systemd loads all definitions at once
        _must(self._call("daemon-reload"), "systemctl daemon-reload")

    def start(self, name: str) -> None:
        # A unit that once hit a start limit refuses to start until its counter is reset.
        self._call("reset-failed", name + ".service")
        _must(self._call("enable", name + ".service"), f"systemctl enable {name}")
        _must(self._call("start", name + ".service"), f"systemctl start {name}")

    def stop(self, name: str) -> None:
        _must(self._call("stop", name + ".service"), f"systemctl stop {name}")

    def restart(self, name: str) -> None:
        self.stop(name)
        self.start(name)

    def waiting(self, name: str) -> bool:
        # Between two runs of a program that ends by itself a unit has no process, and is not stopped either.
        return self._call("show", "--property=ActiveState", "--value", name + ".service").stdout.strip() == "activating"

    def forget(self, name: str) -> None:
        self._call("disable", name + ".service")
        if os.path.exists(self.path(name)):
            os.unlink(self.path(name))
        _must(self._call("daemon-reload"), "systemctl daemon-reload")
        self._call("reset-failed", name + ".service")


class Supervisor:
    """A supervisor of our own below ``directory``, for hosts without an init: containers, rented pods, loopback.

    Several inventory hosts may be one machine and share it, so everything that changes it happens under a lock.
    """

    def __init__(self, runner: Runner, directory: str) -> None:
        self._runner = runner
        self._directory = directory
        self._configuration = os.path.join(directory, "supervisord.conf")
        self._bin = os.path.join(directory, "venv", "bin")

    def check(self, name: str, text: str) -> None:
        """Supervisor has nothing to check a program with before it is loaded."""

    def _call(self, *words: str) -> Result:
        return self._runner.run(
            [os.path.join(self._bin, "supervisorctl"), "-c", self._configuration, *words], timeout=90.0
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        os.makedirs(self._directory, exist_ok=True)
        with open(os.path.join(self._directory, "lock"), "w", encoding="utf-8") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    def _running(self) -> bool:
        return self._call("pid").rc == 0

    def _ensure_installed(self) -> None:
        if os.path.exists(os.path.join(self._bin, "supervisord")):
            return
        environment = os.path.join(self._directory, "venv")
        _must(
            self._runner.run([sys.executable, "-m", "venv", environment], timeout=120.0),
            f"creating a virtual environment for supervisor in {environment} (on Debian it needs python3-venv)",
        )
        requirements = os.path.join(self._directory, "requirements.txt")
        write_atomic(requirements, SUPERVISOR_REQUIREMENT)
        pip = [os.path.join(self._bin, "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        _must(
            self._runner.run([*pip, "--only-binary", ":all:", "--require-hashes", "-r", requirements], timeout=300.0),
            f"installing supervisor into {environment}",
        )

    def _ensure_running(self) -> None:
        os.makedirs(os.path.join(self._directory, "conf.d"), exist_ok=True)
        self._ensure_installed()
        wanted = supervisor_main(self._directory)
        if read_text(self._configuration) != wanted:
            write_atomic(self._configuration, wanted)
        if self._running():
            return
        self._end_orphans()
        # An environment of its own: what the run that starts it has there (tokens, agent sockets) must not live on.
        clean = ["/usr/bin/env", "-i", f"PATH={os.defpath}", f"HOME={self._directory}"]
        _must(
            self._runner.run([*clean, os.path.join(self._bin, "supervisord"), "-c", self._configuration]),
            f"starting supervisord in {self._directory}",
        )
        deadline = time.monotonic() + 15
        while not self._running():
            if time.monotonic() > deadline:
                raise ServiceError(
                    f"supervisord in {self._directory} does not answer after 15 s; see supervisord.log there"
                )
            time.sleep(0.1)

    def _end_orphans(self) -> None:
        """End what a supervisor that was killed left behind: nobody looks after it, and it holds its port."""
        mark = f"SUPERVISOR_SERVER_URL=unix://{self._directory}/s.sock"
        deadline = time.monotonic() + 20
        number = signal.SIGTERM
        while True:
            left = [
                int(entry)
                for entry in self._runner.listdir("/proc")
                if entry.isdigit() and mark in (self._runner.read(f"/proc/{entry}/environ") or "").split("\0")
            ]
            if not left or (number == signal.SIGKILL and time.monotonic() > deadline + 5):
                return
            if time.monotonic() > deadline:
                number = signal.SIGKILL
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(0.2)

    def path(self, name: str) -> str:
        return os.path.join(self._directory, "conf.d", name + ".conf")

    def text(self, service: Service) -> str:
        return supervisor_program(service)

    def pid(self, name: str) -> int | None:
        value = self._call("pid", name).stdout.strip()
        return int(value) if value.isdigit() and value != "0" else None

    def load(self, name: str) -> None:
        with self._locked():
            self._ensure_running()
            _must(self._call("reread"), "supervisorctl reread")
            # update starts a program that is new and replaces one whose section changed; others are left alone.
            _must(self._call("update", name), f"supervisorctl update {name}")

    def start(self, name: str) -> None:
        with self._locked():
            self._ensure_running()
            if self.pid(name) is None:
                self._call("reread")
                self._call("update", name)
            if self.pid(name) is None:
                _must(self._call("start", name), f"supervisorctl start {name}")

    def stop(self, name: str) -> None:
        with self._locked():
            if self._running() and self.pid(name) is not None:
                _must(self._call("stop", name), f"supervisorctl stop {name}")

    def restart(self, name: str) -> None:
        self.stop(name)
        self.start(name)

    def waiting(self, name: str) -> bool:  # noqa: ARG002  startsecs=0: what ends is started again at once
        return False

    def forget(self, name: str) -> None:
        with self._locked():
            if os.path.exists(self.path(name)):
                os.unlink(self.path(name))
            if not self._running():
                return
            self._call("reread")
            self._call("update", name)
            left = [entry for entry in os.listdir(os.path.join(self._directory, "conf.d")) if entry.endswith(".conf")]
            if not left:
                self._shut_down()

    def _shut_down(self) -> None:
        """End the supervisor itself once it has nothing left to look after."""
        pid_text = self._call("pid").stdout.strip()
        _must(self._call("shutdown"), f"supervisorctl shutdown in {self._directory}")
        deadline = time.monotonic() + 30
        while pid_text.isdigit() and os.path.exists(f"/proc/{pid_text}"):
            if time.monotonic() > deadline:
                raise ServiceError(f"supervisord (pid {pid_text}) is still there 30 s after its shutdown")
            time.sleep(0.1)


@dataclass(frozen=True)
class Outcome:
    """What ``converge`` did, or in check mode would do."""

    changed: bool
    restarted: bool
    before: str
    after: str
    pid: int | None
    actions: list[str]


def converge(manager: Manager, service: Service, state: str, check: bool) -> Outcome:
    """Bring ``service`` to ``state``: started, restarted, stopped (definition kept) or absent.

    A running service is replaced iff its definition changed, its program was deleted under it, or a restart was asked
    for. Returns what was done; with ``check`` nothing is.
    """
    path = manager.path(service.name)
    before = read_text(path)
    pid = manager.pid(service.name) if before is not None else None
    actions: list[str] = []
    if state == "absent":
        if before is None:
            return Outcome(False, False, "", "", None, actions)
        alive = pid is not None or manager.waiting(service.name)
        actions = (["stop"] if alive else []) + ["remove"]
        if not check:
            if alive:
                manager.stop(service.name)
            manager.forget(service.name)
        return Outcome(True, False, before, "", None, actions)
    if state == "stopped":
        alive = pid is not None or (before is not None and manager.waiting(service.name))
        actions = ["stop"] if alive else []
        if alive and not check:
            manager.stop(service.name)
        return Outcome(bool(actions), False, before or "", before or "", None, actions)

    after = manager.text(service)
    rewritten = before != after
    stale = pid is not None and _program_deleted(pid)
    replaced = pid is not None and (rewritten or stale or state == "restarted")
    if rewritten:
        actions.append("write")
    if replaced:
        actions.append("restart")
    elif pid is None:
        actions.append("start")
    if not check and actions:
        if rewritten:
            manager.check(service.name, after)
        if replaced and rewritten:
            manager.stop(service.name)
        if rewritten:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_atomic(path, after)
            manager.load(service.name)
        if replaced and not rewritten:
            manager.restart(service.name)
        else:
            manager.start(service.name)
        pid = _wait_for_pid(manager, service.name)
    return Outcome(bool(actions), replaced or "start" in actions, before or "", after, pid, actions)


def _program_deleted(pid: int) -> bool:
    """Whether the running program's file was replaced or removed: the process still runs the old one."""
    try:
        return os.readlink(f"/proc/{pid}/exe").endswith(" (deleted)")
    except OSError:
        return False


def _wait_for_pid(manager: Manager, name: str) -> int | None:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        pid = manager.pid(name)
        if pid is not None:
            return pid
        time.sleep(0.1)
    return None


_EXAMPLE = "llama-rpc-x"  # any name: how a manager names the file of a service shows in it


def strays(manager: Manager, marker: str, keep: Sequence[str]) -> list[str]:
    """Names of worker services whose definition holds ``marker`` (the state directory of their host) and that are not
    to be kept: instances that were renamed or taken out of the inventory."""
    directory, example = os.path.split(manager.path(_EXAMPLE))
    if not os.path.isdir(directory):
        return []
    before, _name, after = example.partition(_EXAMPLE)
    names = [
        entry[len(before) : len(entry) - len(after)]
        for entry in sorted(os.listdir(directory))
        if entry.startswith(before) and entry.endswith(after)
    ]
    return [
        name
        for name in names
        if name.startswith("llama-rpc-") and name not in keep and marker in (read_text(manager.path(name)) or "")
    ]
