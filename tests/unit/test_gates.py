# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The gates themselves: nothing that failed, skipped or did not run is ever counted as passed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from ansible_collections.llamafleet.rpc.tests.tools import gates, tree

ROOT = Path(__file__).resolve().parents[2]


def report(folder: Path, cases: str) -> Path:
    path = folder / "report.xml"
    path.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>", encoding="utf-8")
    return path


GOOD = '<testcase classname="a" name="good"/>'
BAD = '<testcase classname="a" name="bad"><failure message="no"/></testcase>'
BROKEN = '<testcase classname="a" name="broken"><error message="no fixture"/></testcase>'
LEFT_OUT = '<testcase classname="a" name="left_out"><skipped message="not today"/></testcase>'


@pytest.mark.parametrize(
    ("cases", "status", "expected"),
    [
        (GOOD + GOOD, 0, (2, 0)),
        (GOOD + BAD + BROKEN, 1, (1, 2)),
        (GOOD + LEFT_OUT, 0, (1, 1)),
        (GOOD, 2, (1, 1)),
        ("", 0, (0, 1)),
    ],
    ids=["all good", "failures and errors", "a skip", "pytest itself failed", "no test ran"],
)
def test_counts_of_a_report(tmp_path: Path, cases: str, status: int, expected: tuple[int, int]) -> None:
    outcome = gates.junit(status, [report(tmp_path, cases)])
    assert (outcome.passed, outcome.failed) == expected


def test_a_run_without_a_report_has_failed() -> None:
    assert gates.junit(0, []).failed == 1


def test_an_explained_skip_is_told_and_another_fails() -> None:
    outcome = gates.skips(
        [
            'Skipping sanity test "import" on Python 3.14 because it could not be found.',
            "All targets skipped.",
        ]
    )
    assert outcome.failed == 1
    assert outcome.notes == [
        'skipped: Skipping sanity test "import" on Python 3.14 because it could not be found. '
        "(no such interpreter on this machine)",
        "UNEXPLAINED SKIP: All targets skipped.",
    ]


def test_every_gate_runs_and_the_last_line_has_the_sum(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def falls() -> gates.Outcome:
        return gates.Outcome(failed=1, notes=["exit status 3"])

    def stands() -> gates.Outcome:
        return gates.Outcome(passed=5)

    monkeypatch.setattr(gates, "GROUPS", {"first": (falls,), "second": (stands,)})
    assert gates.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "5 passed, 1 failed"
    assert gates.main(["second"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "5 passed, 0 failed"


def test_a_mistyped_group_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gates.main(["lnt"])
    assert "unknown group lnt: known are lint, " in capsys.readouterr().err


def test_each_checkout_has_a_place_of_its_own_outside(tmp_path: Path) -> None:
    """`make clean` in one of them must not take what the tests of another one use."""
    script = tmp_path / "tests" / "tools" / "prefix.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "tools" / "prefix.sh", script)
    other = subprocess.run(["sh", script], check=True, capture_output=True, text=True).stdout.strip()
    assert re.fullmatch(r"/opt/llamafleet-test-\d+", other)
    assert gates.outside() != Path(other) and gates.outside() == gates.outside()
    assert re.fullmatch(r"/opt/llamafleet-test-\d+", str(gates.outside()))
    clean = subprocess.run(["make", "-n", "clean"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    removed = [line for line in clean.splitlines() if line.startswith("rm -rf ")]
    assert removed and "/opt/" not in "".join(removed) and "tests/tools/prefix.sh" in "".join(removed)


def test_a_python_that_is_found_but_does_not_run_is_passed_over(tmp_path: Path) -> None:
    shim = tmp_path / "python3.14"
    shim.write_text("#!/bin/sh\nexit 127\n", encoding="utf-8")
    shim.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    found = subprocess.run(
        ["sh", ROOT / "tests" / "tools" / "find_python.sh"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        check=True,
        text=True,
    ).stdout.strip()
    assert Path(found) != shim
    assert subprocess.run([found, "-c", "import venv"], check=False).returncode == 0


def test_a_get_pip_script_that_is_there_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    tree.provide_pip()
    scripts = list((tmp_path / ".ansible" / "test" / "cache").glob("get_pip_*.py"))
    assert len(scripts) == 1
    scripts[0].write_text("theirs", encoding="utf-8")
    tree.provide_pip()
    assert scripts[0].read_text(encoding="utf-8") == "theirs"
