# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Long work on a host that outlives the connection that asked for it.

A job is a process of its own, detached, with one directory ``<prefix>/jobs/<key>/``: ``lock`` (held by the job and its
children for as long as one of them lives), ``status.json`` (what it does, how far it is, how it ended), ``log``,
``spec.json`` and ``job.pyz`` (its code). Whoever asks for the same key joins the job that runs; a job that was killed
is begun again by the next who asks, and its work function goes on from what it finds. So several inventory hosts on one
machine make one build, and a lost connection loses nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import io
import json
import os
import pwd
import shlex
import signal
import subprocess
import sys
import time
import uuid
import zipfile
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._files import read_json, write_json
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import KNOWN_PLACES, SystemRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_ROOT = __name__.rpartition(".")[0]
_DEATHS = 3  # a job that ended this often without a result (out of memory, power) is reported, not begun again
_LOOK = 0.2  # seconds between two looks at a job
_WRITE = 0.5  # seconds between two writes of its status
_RESERVE = 64 << 10  # bytes that are kept for the outcome, for a disk that is full by then


class JobError(FleetError):
    """A job could not be started, failed, or died."""


# --- the account that children run as --------------------------------------------------------------------------------


class Account(NamedTuple):
    """Whom root's children become."""

    name: str
    uid: int
    gid: int
    home: str


def runner_for(account: Account | None) -> SystemRunner:
    """A Runner whose commands run as the account."""
    return SystemRunner(None if account is None else (account.uid, account.gid))


def hand_over(directory: str, account: Account | None) -> None:
    """Give a directory and the files in it to the account; nothing where that is whoever runs this."""
    if account is not None:
        for path in (directory, *(os.path.join(directory, name) for name in os.listdir(directory))):
            os.chown(path, account.uid, account.gid)


def account_for(user: str) -> Account | None:
    """The account that compilers and downloaders run as; None when that is whoever runs this.

    Only root can become another: anybody else must leave ``user`` empty or name themselves.
    """
    if not user:
        return None
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise JobError(
            f"there is no account {user!r} on this host to build and download as; create it, or set user to an "
            "existing one, or to '' for the connecting user"
        ) from None
    if entry.pw_uid == os.geteuid():
        return None
    if os.geteuid() != 0:
        me = pwd.getpwuid(os.geteuid()).pw_name
        raise JobError(
            f"cannot work as {user!r}: only root can become another user, this is {me}; use become, or user ''"
        )
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, entry.pw_dir)


# --- start, join, look -----------------------------------------------------------------------------------------------


def advance(
    directory: str,
    work: str,
    args: Mapping[str, Any],
    secrets: Mapping[str, str] | None = None,
    follow: str | None = None,
    poll: float | None = None,
) -> dict[str, Any]:
    """Start or join the job of ``directory`` and watch it for at most ``poll`` seconds (None: until it ends).

    ``work``: ``package.module:function``, called in the job as ``function(job, args, secrets)``; its result (JSON)
    ends up as ``status["result"]``. ``secrets`` reach the job through a pipe, never a file, an argument or the
    environment. ``follow``: ``status["run"]`` of an earlier call, so that the end of that very run is reported and
    not a new run begun.

    Gives the status: ``{run, state: running|done, phase, done, total, message, started_at, result}``. Raises
    JobError with the job's own words when it failed.
    """
    os.makedirs(directory, mode=0o755, exist_ok=True)
    run, until = follow, None if poll is None else time.monotonic() + poll
    while True:
        status = _status(directory)
        handle = _take(directory)
        if handle is None:
            if status.get("state") == "running":
                run = status["run"]
        else:
            with contextlib.closing(handle):
                status = _status(directory)
                ended = status.get("run") == run and run is not None
                if ended and status.get("state") == "done":
                    return status
                if ended and status.get("state") == "failed":
                    raise JobError(str(status.get("error")))
                deaths = int(status.get("deaths", 0)) + 1 if ended else 0
                if deaths >= _DEATHS:
                    raise JobError(
                        f"the job in {directory} was killed {deaths} times, last at {status.get('phase')!r} "
                        f"(out of memory?); its log is {directory}/log"
                    )
                try:
                    run = _start(directory, handle, work, args, secrets or {}, deaths)
                except OSError as error:
                    raise JobError(
                        f"a job could not be started in {directory}: {error.strerror or error}; make room there, or "
                        "choose another prefix"
                    ) from error
                status = _status(directory)
        if until is not None and time.monotonic() >= until:
            return status
        time.sleep(_LOOK)


def progress_of(status: Mapping[str, Any]) -> dict[str, Any]:
    """What a module tells of a status: ``{run, state, phase, percent (None: not known), message, seconds}``."""
    done, total = status.get("done"), status.get("total")
    return {
        "run": status.get("run"),
        "state": status.get("state"),
        "phase": status.get("phase"),
        "percent": min(100, 100 * done // total) if done is not None and total else None,
        "message": status.get("message") or "",
        "seconds": max(0, int(time.time() - status.get("started_at", time.time()))),
    }


def is_running(directory: str) -> bool:
    """Whether a job (or a child it left) holds the directory."""
    if not os.path.isdir(directory):
        return False
    handle = _take(directory)
    if handle is None:
        return True
    handle.close()
    return False


@contextlib.contextmanager
def idle(directory: str) -> Iterator[bool]:
    """Keep jobs out of a directory for a moment: True, or False when one is in it."""
    handle = _take(directory)
    if handle is None:
        yield False
        return
    with contextlib.closing(handle):
        yield True


def _status(directory: str) -> dict[str, Any]:
    value = read_json(os.path.join(directory, "status.json"))
    return value if isinstance(value, dict) else {}


def _take(directory: str) -> io.BufferedRandom | None:
    """The lock of a job directory; None while a job holds it."""
    descriptor = os.open(os.path.join(directory, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    handle = os.fdopen(descriptor, "r+b")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    return handle


def _start(
    directory: str,
    handle: io.BufferedRandom,
    work: str,
    args: Mapping[str, Any],
    secrets: Mapping[str, str],
    deaths: int,
) -> str:
    """Start a job that inherits the lock, so that there is no moment in which nobody holds it."""
    run = uuid.uuid4().hex[:12]
    code = os.path.join(directory, "job.pyz")
    with open(code + ".new", "wb") as stream:
        stream.write(_code(work.partition(":")[0]))
    os.replace(code + ".new", code)
    write_json(os.path.join(directory, "spec.json"), {"work": work, "args": args}, mode=0o600)
    with open(os.path.join(directory, "reserve"), "wb") as stream:
        stream.write(os.urandom(_RESERVE))  # which no file system stores as nothing
    now = time.time()
    status = {
        "run": run,
        "state": "running",
        "phase": "start",
        "done": None,
        "total": None,
        "message": "",
        "error": None,
    }
    write_json(
        os.path.join(directory, "status.json"),
        dict(status, result=None, deaths=deaths, started_at=now, updated_at=now),
    )
    with open(os.path.join(directory, "log"), "wb") as log:
        process = subprocess.Popen(  # pylint: disable=ansible-bad-function # a core file: there is no AnsibleModule
            # -I: neither the caller's PYTHON* variables nor its working directory decide what code runs
            [sys.executable, "-I", code, directory, run, str(handle.fileno())],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[handle.fileno()],
            cwd="/",
            start_new_session=True,
        )
        process.communicate(json.dumps(dict(secrets)).encode())
    if process.returncode != 0:
        raise JobError(f"a job could not be started with {sys.executable}:\n{_tail(os.path.join(directory, 'log'))}")
    return run


def _tail(path: str, lines: int = 20) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return "".join(deque(stream, lines)).rstrip()
    except OSError:
        return ""


def _code(main: str) -> bytes:
    """A zip with the sources of our module_utils: the job outlives the payload that Ansible sent and then deletes."""
    importlib.import_module(main)
    sources = {}
    for name in sorted(sys.modules):
        if name == main or name.startswith(_ROOT + "."):
            loader: Any = getattr(sys.modules[name].__spec__, "loader", None)
            sources[name.replace(".", "/") + ".py"] = loader.get_source(name)
    parts = _ROOT.split(".")
    for depth in range(1, len(parts) + 1):
        sources["/".join([*parts[:depth], "__init__.py"])] = ""
    sources["__main__.py"] = f"import sys\nfrom {__name__} import main\nmain(sys.argv[1:])\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, source in sources.items():
            archive.writestr(path, source)
    return buffer.getvalue()


# --- inside the job --------------------------------------------------------------------------------------------------


class Job:
    """What a work function works with: progress, log, and children."""

    def __init__(self, directory: str, run: str, lock: int) -> None:
        self.directory = directory
        self.account: Account | None = None
        self._lock = lock
        self._status = dict(_status(directory), run=run, pid=os.getpid())
        self._written = 0.0

    @property
    def log_path(self) -> str:
        """Where the output of the children goes."""
        return os.path.join(self.directory, "log")

    def log(self, text: str) -> None:
        """A line into the log; lost on a full disk, which is no reason to leave a child without its parent."""
        with contextlib.suppress(OSError):
            os.write(1, (text + "\n").encode("utf-8", "replace"))  # the job's stdout is its log

    def progress(self, phase: str, done: int | None = None, total: int | None = None, message: str = "") -> None:
        """Tell how far the work is: ``done`` of ``total`` in a unit of its own (bytes, steps), None when not known."""
        new_phase = phase != self._status.get("phase")
        self._status.update(phase=phase, done=done, total=total, message=message)
        if new_phase or time.monotonic() - self._written >= _WRITE:
            with contextlib.suppress(OSError):  # a full disk; the work itself meets it, and says so
                self._write()

    def finish(self, **outcome: Any) -> None:
        """Write the outcome: ``state="done", result=...`` or ``state="failed", error=...``."""
        self._status.update(outcome, deaths=0)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.directory, "reserve"))
        self._write()

    def _write(self) -> None:
        self._status["updated_at"] = time.time()
        write_json(os.path.join(self.directory, "status.json"), self._status)
        self._written = time.monotonic()

    def environment(self, work: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Environment of a child: the host's, in the C locale, with ``work``/tmp and the home of the account."""
        result = dict(os.environ, LC_ALL="C", LANG="C", TMPDIR=os.path.join(work, "tmp"))
        result["PATH"] = os.pathsep.join([result.get("PATH", ""), *KNOWN_PLACES]).strip(os.pathsep)
        for name in ("LANGUAGE", "PYTHONPATH", "PYTHONHOME", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CMAKE_GENERATOR"):
            result.pop(name, None)  # inherited compiler flags would make unlike binaries out of like inputs
        if self.account is not None:
            result["HOME"] = self.account.home if os.path.isdir(self.account.home) else work
            result["USER"] = result["LOGNAME"] = self.account.name
        result.update(extra or {})
        return result

    def own_directory(self, path: str) -> str:
        """Make a directory that the children may write into and nobody else may read."""
        os.makedirs(path, exist_ok=True)
        os.chmod(path, 0o700)
        if self.account is not None:
            os.chown(path, self.account.uid, self.account.gid)
        return path

    def run(
        self,
        argv: Sequence[str],
        *,
        work: str,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> tuple[int, list[str]]:
        """Run a child as the account, its output into the log and line by line to ``on_line``: (rc, last 20 lines).

        The child holds the job's lock too: while one lives that a killed job left behind, no second job begins.
        """
        self.log("$ " + " ".join(shlex.quote(part) for part in argv))
        become: dict[str, Any] = {}
        if self.account is not None:
            become = {"user": self.account.uid, "group": self.account.gid, "extra_groups": []}
        try:
            process = subprocess.Popen(  # pylint: disable=ansible-bad-function # a core file: there is no AnsibleModule
                list(argv),
                cwd=cwd or work,
                env=self.environment(work, env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[self._lock],
                text=True,
                errors="replace",
                **become,
            )
        except OSError as error:
            return 127, [f"{argv[0]}: {error.strerror or error}"]
        last: deque[str] = deque(maxlen=20)
        for line in process.stdout or ():
            text = line.rstrip()
            self.log(text)
            last.append(text)
            if on_line is not None:
                on_line(text)
        return process.wait(), list(last)

    def must(self, what: str, argv: Sequence[str], **options: Any) -> list[str]:
        """run(), and JobError with ``what``, the last lines and the path of the log unless it ended with 0."""
        rc, last = self.run(argv, **options)
        if rc != 0:
            raise JobError(f"{what} failed (status {rc}):\n" + "\n".join(last) + f"\nThe whole log is {self.log_path}")
        return last


def main(argv: Sequence[str]) -> None:
    """Entry of ``job.pyz``: DIRECTORY RUN LOCK-DESCRIPTOR, secrets as JSON on standard input."""
    directory, run, lock = argv[0], argv[1], int(argv[2])
    secrets = json.loads(sys.stdin.read())
    spec = read_json(os.path.join(directory, "spec.json"))
    module, _colon, name = str(spec["work"]).partition(":")
    work = getattr(importlib.import_module(module), name)
    sys.stdout.flush()
    if os.fork():
        os._exit(0)  # the caller learns that the job is up; the job itself is nobody's child
    os.umask(0o022)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    job = Job(directory, run, lock)
    with _outcome(job):
        job.finish(state="done", error=None, result=work(job, spec["args"], secrets))


@contextlib.contextmanager
def _outcome(job: Job) -> Iterator[None]:
    """Whatever ends the work is written down: nobody waits for this process, only for its status."""
    error = f"the job stopped on a defect of its own; the traceback is in {job.log_path}"
    try:
        yield
        error = ""
    except FleetError as failure:
        error = str(failure)
        job.log(error)
    except OSError as failure:
        error = f"{failure.filename or job.directory}: {failure.strerror or failure}"
        job.log(error)
    finally:
        if error:
            job.finish(state="failed", error=error)
