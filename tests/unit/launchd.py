# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A launchctl that keeps jobs, and answers with the statuses that the real one was reported to give."""

from __future__ import annotations

import plistlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Result, SystemRunner

ERRORS = {
    3: "Boot-out failed: 3: No such process",
    5: "Bootstrap failed: 5: Input/output error",
    36: "Boot-out failed: 36: Operation now in progress",
    37: "Bootstrap failed: 37: Operation already in progress",
    113: "Could not find service in domain for system",
}


@dataclass
class Job:
    path: str
    plist: dict[str, Any]
    pid: int | None
    dying: int | None = None  # looks until the label is free, once it is booted out


@dataclass
class Launchd(SystemRunner):
    """``lingers``: how often a job is still seen after its bootout. ``bootout_rc``, ``taken_rc``: statuses, which
    differ between versions of macOS. Time passes by ``sleep`` only.
    """

    lingers: int = 0
    bootout_rc: int = 0
    taken_rc: int = 37
    refuses: int = 0  # bootstraps that fail although the label is free
    says_5_but_loads: bool = False
    jobs: dict[str, Job] = field(default_factory=dict)
    disabled: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    now: float = 0.0
    pids: int = 1000

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def clock(self) -> float:
        return self.now

    def which(self, name: str) -> str | None:
        return f"/bin/{name}"

    @property
    def changes(self) -> list[str]:
        """The calls that were more than a look."""
        return [call for call in self.calls if not call.startswith("print")]

    def run(self, argv: Sequence[str], timeout: float = 30.0) -> Result:
        if argv[:2] == ["plutil", "-lint"]:
            plistlib.loads(Path(argv[2]).read_bytes())
            return Result(0, f"{argv[2]}: OK\n", "")
        assert argv[0] == "/bin/launchctl"
        self.calls.append(" ".join(argv[1:]))
        verb, *rest = argv[1:]
        answer: Result | int = getattr(self, "_" + verb.replace("-", "_"))(*rest)
        return answer if isinstance(answer, Result) else Result(answer, "", ERRORS.get(answer, ""))

    def _job(self, target: str) -> tuple[str, Job | None]:
        domain, _slash, label = target.partition("/")
        assert domain == "system"
        return label, self.jobs.get(label)

    def _print(self, target: str) -> Result | int:
        label, job = self._job(target)
        if job is not None and job.dying is not None:
            job.dying -= 1
            if job.dying < 0:
                del self.jobs[label]
                job = None
        if job is None:
            return 113
        state = "SIGTERMed" if job.dying is not None else "running" if job.pid else "not running"
        words = "".join(f"\t\t{word}\n" for word in job.plist["ProgramArguments"])
        text = (
            f"{target} = {{\n\tactive count = 1\n\tpath = {job.path}\n\ttype = LaunchDaemon\n\tstate = {state}\n\n"
            f"\tprogram = {job.plist['ProgramArguments'][0]}\n\targuments = {{\n{words}\t}}\n\n"
            "\tdefault environment = {\n\t\tPATH => /usr/bin:/bin:/usr/sbin:/sbin\n\t\tpid = 7\n\t}\n\n"
            f"\truns = 1\n{f'	pid = {job.pid}' if job.pid else ''}\n\tlast exit code = (never exited)\n}}\n"
        )
        return Result(0, text, "")

    def _print_disabled(self, domain: str) -> Result:
        lines = "".join(f'\t\t"{label}" => disabled\n' for label in sorted(self.disabled))
        return Result(0, f'disabled services = {{\n\t\t"com.apple.ftpd" => disabled\n{lines}\t}}\n', "")

    def _enable(self, target: str) -> int:
        self.disabled.discard(self._job(target)[0])
        return 0

    def _bootstrap(self, domain: str, path: str) -> int:
        assert domain == "system"
        file = Path(path)
        if not file.is_file() or file.stat().st_mode & 0o022:
            return 5
        plist = plistlib.loads(file.read_bytes())
        label = plist["Label"]
        if label in self.jobs:
            return self.taken_rc
        if label in self.disabled:
            return 5
        if self.refuses:
            self.refuses -= 1
            return 5
        self.pids += 1
        starts = plist.get("RunAtLoad") or plist.get("KeepAlive")
        self.jobs[label] = Job(path, plist, self.pids if starts and plist.get("KeepAlive") else None)
        return 5 if self.says_5_but_loads else 0

    def _bootout(self, target: str) -> int:
        label, job = self._job(target)
        if job is None:
            return 3
        if self.lingers:
            job.dying, job.pid = self.lingers, None
        else:
            del self.jobs[label]
        return self.bootout_rc

    def _kickstart(self, flag: str, target: str) -> int:
        assert flag == "-k"
        _label, job = self._job(target)
        if job is None:
            return 113
        self.pids += 1
        job.pid = self.pids
        return 0
