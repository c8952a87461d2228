# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Jobs as their callers see them: real detached processes that do small work."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._jobs import JobError, account_for, advance, is_running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORK = '''
import os, sys, time
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError

def count(job, args, secrets):
    """Leaves a line per run, then takes args["seconds"]."""
    with open(args["trace"], "a") as stream:
        stream.write("%d\\n" % os.getpid())
    end = time.time() + args["seconds"]
    while time.time() < end:
        job.progress("count", done=1, total=2)
        time.sleep(0.05)
    return {"answer": 42, "secret": len(secrets.get("token", ""))}

def fail(job, args, secrets):
    raise FleetError("the disk of X is full; free 3 GiB")

def defect(job, args, secrets):
    return {}["missing"]

def child(job, args, secrets):
    job.must("sleeping", ["sh", "-c", "echo hello; exec sleep %s" % args["seconds"]], work=job.directory)
    return job.must("failing", ["sh", "-c", "echo why it broke; exit 3"], work=job.directory)

def environment(job, args, secrets):
    os.environ["CXXFLAGS"] = "-march=native"
    out = job.must("env", ["env"], work=job.directory)
    return {"lines": out, "argv": sys.argv}
'''


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a module with work functions, as importable as our own."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "jobs_test_work.py").write_text(WORK)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    yield "jobs_test_work"
    sys.modules.pop("jobs_test_work", None)


def pid_of(directory: Path, seconds: float = 10) -> int:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        status = json.loads((directory / "status.json").read_text())
        if status.get("pid") and status["phase"] != "start":
            return int(status["pid"])
        time.sleep(0.05)
    raise AssertionError(f"no progress after {seconds} s: {status}")


def test_a_job_runs_to_its_end_and_gives_its_result(tmp_path: Path, work: str) -> None:
    args = {"trace": str(tmp_path / "trace"), "seconds": 0}
    status = advance(str(tmp_path / "job"), f"{work}:count", args)
    assert status["state"] == "done"
    assert status["result"]["answer"] == 42
    assert not is_running(str(tmp_path / "job"))


def test_poll_returns_early_and_a_later_call_gets_the_end_of_the_same_run(tmp_path: Path, work: str) -> None:
    args = {"trace": str(tmp_path / "trace"), "seconds": 2}
    directory = str(tmp_path / "job")
    started = time.monotonic()
    status = advance(directory, f"{work}:count", args, poll=0.5)
    assert time.monotonic() - started < 2
    assert status["state"] == "running"
    pid_of(tmp_path / "job")
    again = advance(directory, f"{work}:count", args, follow=status["run"])
    assert again["state"] == "done"
    assert again["run"] == status["run"]
    assert (tmp_path / "trace").read_text().count("\n") == 1


def test_callers_at_the_same_time_join_one_job(tmp_path: Path, work: str) -> None:
    """B2: several inventory hosts on one machine make one build."""
    args = {"trace": str(tmp_path / "trace"), "seconds": 2}
    results: list[dict[str, Any]] = []
    callers = [
        threading.Thread(target=lambda: results.append(advance(str(tmp_path / "job"), f"{work}:count", args)))
        for _number in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert [item["state"] for item in results] == ["done"] * 4
    assert len({item["run"] for item in results}) == 1
    assert (tmp_path / "trace").read_text().count("\n") == 1


def test_a_killed_job_is_begun_again_by_the_next_call(tmp_path: Path, work: str) -> None:
    args = {"trace": str(tmp_path / "trace"), "seconds": 3}
    directory = str(tmp_path / "job")
    status = advance(directory, f"{work}:count", args, poll=0)
    os.kill(pid_of(tmp_path / "job"), signal.SIGKILL)
    again = advance(directory, f"{work}:count", args, follow=status["run"])
    assert again["state"] == "done"
    assert again["run"] != status["run"]
    assert (tmp_path / "trace").read_text().count("\n") == 2


def test_a_job_that_is_killed_again_and_again_is_reported(tmp_path: Path, work: str) -> None:
    args = {"trace": str(tmp_path / "trace"), "seconds": 30}
    directory = str(tmp_path / "job")
    run = None
    for _number in range(3):
        run = advance(directory, f"{work}:count", args, follow=run, poll=0)["run"]
        os.kill(pid_of(tmp_path / "job"), signal.SIGKILL)
        while is_running(directory):
            time.sleep(0.05)
    with pytest.raises(JobError, match=r"killed 3 times.*job/log"):
        advance(directory, f"{work}:count", args, follow=run, poll=0)


def test_a_child_that_a_killed_job_left_keeps_a_second_job_away(tmp_path: Path, work: str) -> None:
    """Two compilers in one build tree would tear it."""
    directory = str(tmp_path / "job")
    advance(directory, f"{work}:child", {"seconds": 2}, poll=0)
    until = time.monotonic() + 10
    while "hello" not in (tmp_path / "job" / "log").read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
    status = json.loads((tmp_path / "job" / "status.json").read_text())
    # the child's pipe to the job breaks, the child itself lives on
    os.kill(job_pid(tmp_path / "job"), signal.SIGKILL)
    assert is_running(directory)
    assert advance(directory, f"{work}:child", {"seconds": 2}, poll=0)["run"] == status["run"]
    while is_running(directory):
        assert time.monotonic() < until
        time.sleep(0.1)


def job_pid(directory: Path) -> int:
    """The job process, found by the code it runs (status has no pid before its first progress)."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                line = (directory.parent.__class__("/proc") / name / "cmdline").read_bytes()
            except OSError:
                continue
            if str(directory / "job.pyz").encode() in line:
                return int(name)
    raise AssertionError("no job process")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("fail", "the disk of X is full; free 3 GiB"),
        ("defect", "defect of its own; the traceback is in .*/job/log"),
        ("child", r"failing failed \(status 3\):\n.*why it broke\n.*log is .*/job/log"),
    ],
)
def test_a_failure_reaches_every_caller_in_the_jobs_own_words(
    tmp_path: Path, work: str, function: str, words: str
) -> None:
    directory = str(tmp_path / "job")
    with pytest.raises(JobError, match=f"(?s){words}"):
        advance(directory, f"{work}:{function}", {"seconds": 0})
    run = json.loads((tmp_path / "job" / "status.json").read_text())["run"]
    with pytest.raises(JobError, match=f"(?s){words}"):
        advance(directory, f"{work}:{function}", {"seconds": 0}, follow=run)
    if function == "defect":
        assert "KeyError: 'missing'" in (tmp_path / "job" / "log").read_text()


def test_a_new_call_after_a_failure_tries_again(tmp_path: Path, work: str) -> None:
    directory = str(tmp_path / "job")
    with pytest.raises(JobError):
        advance(directory, f"{work}:fail", {})
    args = {"trace": str(tmp_path / "trace"), "seconds": 0}
    assert advance(directory, f"{work}:count", args)["state"] == "done"


def test_a_secret_reaches_the_job_and_no_file(tmp_path: Path, work: str) -> None:
    secret = "hf_canary_0123456789"
    args = {"trace": str(tmp_path / "trace"), "seconds": 1}
    status = advance(str(tmp_path / "job"), f"{work}:count", args, secrets={"token": secret}, poll=0)
    pid = pid_of(tmp_path / "job")
    for name in ("cmdline", "environ"):
        assert secret.encode() not in (tmp_path.__class__("/proc") / str(pid) / name).read_bytes()
    status = advance(str(tmp_path / "job"), f"{work}:count", args, follow=status["run"])
    assert status["result"]["secret"] == len(secret)
    for path in (tmp_path / "job").iterdir():
        assert secret.encode() not in path.read_bytes()


def test_children_get_no_inherited_compiler_flags(tmp_path: Path, work: str) -> None:
    """B2-09: CXXFLAGS of a shell made AVX512 code on a Broadwell."""
    status = advance(str(tmp_path / "job"), f"{work}:environment", {})
    assert not [line for line in status["result"]["lines"] if line.startswith("CXXFLAGS")]
    assert stat.S_IMODE(os.stat(tmp_path / "job").st_mode) == 0o755


def test_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert account_for("") is None
    with pytest.raises(JobError, match="no account 'no-such-user'"):
        account_for("no-such-user")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    account = account_for("nobody")
    assert account is not None
    assert account.uid != 0
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    with pytest.raises(JobError, match="only root can become another user"):
        account_for("nobody")
