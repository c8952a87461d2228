# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the gates of ``make test``, all of them even when one fails, and closes with ``N passed, N failed``.

A gate is one command or one small check. Gates that run pytest count each test, the others count as one.
A test that skips fails its gate unless EXPLAINED_SKIPS knows the reason; explained ones are listed at the end.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ansible_collections.llamafleet.rpc.tests.tools import tree

BIN = Path(sys.executable).parent
LOGS = tree.CACHE / "gates"
COLLECTION = "ansible_collections.llamafleet.rpc"


def prefix() -> Path:
    """Where `make build` puts llama.cpp and the demo model, for every test that runs them.

    As root, builds and services run as another account, which must be able to get there: in a checkout that only
    root may enter, the place is outside, and named by prefix.sh (`make clean` removes it too).
    """
    closed = any(not folder.stat().st_mode & 0o001 for folder in tree.CACHE.parents)
    return outside() if os.geteuid() == 0 and closed else tree.CACHE / "llama"


def outside() -> Path:
    """The place outside that is of this checkout alone."""
    argv = ["sh", str(tree.ROOT / "tests" / "tools" / "prefix.sh")]
    return Path(subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip())


# Reasons for which a test or a part of one may be left out, as a pattern of the line that says so.
EXPLAINED_SKIPS: Mapping[str, str] = {
    r"Skipping sanity test .* because it could not be found": "no such interpreter on this machine",
    r'Required program "pwsh" not found': "the collection has no PowerShell",
}


@dataclass
class Outcome:
    """What one gate found."""

    passed: int = 0
    failed: int = 0
    notes: list[str] = field(default_factory=list)


def environment(**extra: str) -> dict[str, str]:
    """The environment of a gate: the checkout as a collection, and the tools of this virtual environment first."""
    collections = str(tree.ROOT / tree.LINK)
    return {
        **os.environ,
        "ANSIBLE_COLLECTIONS_PATH": collections,
        "ANSIBLE_CONFIG": str(tree.ROOT / "ansible.cfg"),
        "ANSIBLE_NOCOLOR": "1",
        "NO_COLOR": "1",
        "PATH": os.pathsep.join([str(BIN), os.environ["PATH"]]),
        "PYTHONPATH": collections,
        **extra,
    }


def run(name: str, argv: Sequence[str], cwd: Path = tree.ROOT, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a command, showing what it prints and keeping it in .cache/gates/NAME.log; its exit status and output."""
    LOGS.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    with (
        (LOGS / f"{name}.log").open("w", encoding="utf-8") as log,
        subprocess.Popen(
            argv,
            cwd=cwd,
            env=env or environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            log.write(line)
            lines.append(line)
    return process.returncode, "".join(lines)


def skips(lines: Sequence[str]) -> Outcome:
    """Sort lines that tell of something left out: explained ones become notes, each other one a failure."""
    outcome = Outcome()
    for line in dict.fromkeys(lines):
        reason = next((why for pattern, why in EXPLAINED_SKIPS.items() if re.search(pattern, line)), None)
        outcome.notes.append(f"{'skipped' if reason else 'UNEXPLAINED SKIP'}: {line}{f' ({reason})' if reason else ''}")
        outcome.failed += reason is None
    return outcome


def command(name: str, *argv: str, cwd: Path = tree.ROOT, env: Mapping[str, str] | None = None) -> Outcome:
    """A gate that is one command: passed when it exits with 0."""
    status, _output = run(name, argv, cwd, env)
    return Outcome(passed=1) if status == 0 else Outcome(failed=1, notes=[f"exit status {status}"])


def junit(status: int, reports: Sequence[Path]) -> Outcome:
    """Count the tests in pytest's reports; a run that failed without a failed test counts as one failure."""
    outcome = Outcome()
    left_out = []
    for report in reports:
        for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314  our own pytest wrote it
            name = f"{case.get('classname')}::{case.get('name')}"
            skipped = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                outcome.failed += 1
            elif skipped is not None:
                left_out.append(f"{name}: {skipped.get('message')}")
            else:
                outcome.passed += 1
    explained = skips(left_out)
    outcome.failed += explained.failed
    outcome.notes += explained.notes
    if outcome.failed == 0 and (status != 0 or outcome.passed == 0):
        outcome.failed += 1
        outcome.notes.append(f"exit status {status}, {outcome.passed} tests")
    return outcome


# --- lint ---


def yamllint() -> Outcome:
    return command("yamllint", "yamllint", "--strict", ".")


def ansible_lint() -> Outcome:
    return command("ansible-lint", "ansible-lint", "--offline")


def ruff_check() -> Outcome:
    return command("ruff-check", "ruff", "check", ".")


def ruff_format() -> Outcome:
    return command("ruff-format", "ruff", "format", "--check", ".")


def mypy() -> Outcome:
    return command("mypy", "mypy", "-p", f"{COLLECTION}.plugins", "-p", f"{COLLECTION}.tests")


# --- documentation and package ---


def docs() -> Outcome:
    return command(
        "docs",
        *("antsibull-docs", "lint-collection-docs", "--plugin-docs"),
        *("--validate-collection-refs", "self", "."),
    )


def changelog() -> Outcome:
    outcome = command("changelog", "antsibull-changelog", "lint")
    released = tree.ROOT / "changelogs" / "changelog.yaml"
    if outcome.failed == 0 and released.exists():
        outcome = command("changelog", "antsibull-changelog", "lint-changelog-yaml", "--strict", str(released))
    return outcome


def package() -> Outcome:
    return command("package", sys.executable, "-m", f"{COLLECTION}.tests.tools.package")


# --- ansible-test, in its copy ---


def _ansible_test_environment() -> dict[str, str]:
    tree.provide_pip()
    found = tree.interpreters()
    # ansible-test finds the checkout by where it stands, and must not find it twice.
    env = environment(PATH=tree.search_path([BIN, *(python.parent for python in found.values())]))
    for name in ("ANSIBLE_COLLECTIONS_PATH", "ANSIBLE_CONFIG", "PYTHONPATH"):
        env.pop(name)
    return env


def sanity() -> Outcome:
    env = _ansible_test_environment()
    status, output = run("sanity", ["ansible-test", "sanity", "--local", "--color", "no"], tree.refresh_copy(), env)
    outcome = skips(
        re.findall(
            r"^(?:WARNING: )?(Skipping .*|All targets skipped.*|Required program .* not found.*)$", output, re.MULTILINE
        )
    )
    if status != 0:
        outcome.failed += 1
        outcome.notes.append(f"exit status {status}")
    elif outcome.failed == 0:
        outcome.passed = 1
    return outcome


def target_units() -> Outcome:
    """The unit tests as ansible-test runs them, on the oldest Python of a managed host that this machine has."""
    env = _ansible_test_environment()
    copy = tree.refresh_copy()
    version = next(iter(tree.interpreters()))
    reports = copy / "tests" / "output" / "junit"
    for stale in reports.glob("*.xml"):
        stale.unlink()
    argv = ["ansible-test", "units", "--venv", "--python", version, "--color", "no", "--num-workers", "2"]
    status, _output = run("target-units", argv, copy, env)
    outcome = junit(status, sorted(reports.glob(f"python{version}-*-units.xml")))
    older = tree.TARGET_PYTHONS[: tree.TARGET_PYTHONS.index(version)]
    outcome.notes.append(f"on Python {version}" + "".join(f"; no Python {python} on this machine" for python in older))
    return outcome


# --- with the real llama.cpp ---


def build() -> Outcome:
    where = f"llama_fleet_prefix={prefix()}"
    return command("build", "ansible-playbook", "-i", "inventories/loopback", "-e", where, "tests/tools/build.yml")


def _with_llama() -> dict[str, str]:
    built = prefix()
    models = sorted((built / "models").rglob("*.gguf"))
    return environment(
        LLAMAFLEET_TEST_BIN=str(built / "current" / "bin"),
        LLAMAFLEET_TEST_MODEL=str(models[0] if models else built / "models" / "none.gguf"),
        LLAMAFLEET_TEST_PREFIX=str(built),
    )


def pytest() -> Outcome:
    report = LOGS / "pytest.xml"
    report.unlink(missing_ok=True)
    status, _output = run("pytest", ["pytest", "-q", f"--junit-xml={report}"], env=_with_llama())
    outcome = junit(status, [report] if report.exists() else [])
    if os.geteuid() != 0:
        outcome.notes.append("skipped: tests marked privileged, which make network namespaces, need root")
    return outcome


def fleet() -> Outcome:
    """Real systemd hosts in namespaces of this machine. Only root can make them."""
    if os.geteuid() != 0:
        return Outcome(notes=["skipped: the fleet of real hosts needs root (sudo make fleet)"])
    report = LOGS / "fleet.xml"
    report.unlink(missing_ok=True)
    argv = ["pytest", "-q", "-m", "fleet", "tests/fleet", f"--junit-xml={report}"]
    status, _output = run("fleet", argv, env=_with_llama())
    return junit(status, [report] if report.exists() else [])


def fleet_bench() -> Outcome:
    """What is measured on real hosts; nothing is judged."""
    if os.geteuid() != 0:
        return Outcome(notes=["skipped: the fleet of real hosts needs root (sudo make bench)"])
    outcome = Outcome()
    for name in FLEET_BENCHES:
        module = f"ansible_collections.llamafleet.rpc.tests.fleet.{name}"
        one = command(name, "python", "-m", module, env=_with_llama())
        outcome.passed += one.passed
        outcome.failed += one.failed
        outcome.notes += one.notes
    return outcome


def molecule() -> Outcome:
    """The demo; a scenario that met no host is a failure, although molecule itself calls that a success.

    The scenario of real hosts is run beside them, by tests/fleet/test_scenario.py.
    """
    argv = ["molecule", "test", "-s", "loopback", "--no-command-borders"]
    status, output = run("molecule", argv, env=_with_llama())
    recaps = len(re.findall(r"^\S+ +: ok=[1-9]", output, re.MULTILINE))
    problems = [f"exit status {status}"] if status else []
    problems += ["no play met a host"] if recaps == 0 else []
    problems += ["a play matched no host"] if re.search(r"no hosts matched|Could not match supplied", output) else []
    # A playbook that the sequence names and that is not there is only a warning to molecule.
    problems += ["a playbook of a scenario is missing"] if re.search(r"missing=[1-9]", output) else []
    return Outcome(passed=int(not problems), failed=int(bool(problems)), notes=problems)


GROUPS: Mapping[str, Sequence[Callable[[], Outcome]]] = {
    "lint": (yamllint, ansible_lint, ruff_check, ruff_format, mypy),
    "docs": (docs, changelog),
    "package": (package,),
    "sanity": (sanity,),
    "target-units": (target_units,),
    "build": (build,),
    "pytest": (pytest,),
    "molecule": (molecule,),
    "fleet": (fleet,),
    "bench": (fleet_bench,),
}
#: In tests/fleet, and how they take turns: short ones first.
FLEET_BENCHES = ("mesh_bench", "split_bench", "noop_bench")
#: Run by `make bench` only.
ON_REQUEST = ("bench",)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; all when none is given")
    chosen = parser.parse_args(arguments).groups or [name for name in GROUPS if name not in ON_REQUEST]
    unknown = sorted(set(chosen) - set(GROUPS))
    if unknown:
        parser.error(f"unknown group {', '.join(unknown)}: known are {', '.join(GROUPS)}")

    rows: list[tuple[str, float, Outcome]] = []
    for gate in [gate for group in chosen for gate in GROUPS[group]]:
        name = gate.__name__.replace("_", "-")
        print(f"\n=== {name} ===", flush=True)
        start = time.monotonic()
        outcome = gate()
        rows.append((name, time.monotonic() - start, outcome))

    print(f"\n{'gate':<14}{'seconds':>8}{'passed':>8}{'failed':>8}")
    for name, seconds, outcome in rows:
        print(f"{name:<14}{seconds:>8.1f}{outcome.passed:>8}{outcome.failed:>8}")
        for note in outcome.notes:
            print(f"    {note}")
    passed = sum(outcome.passed for _name, _seconds, outcome in rows)
    failed = sum(outcome.failed for _name, _seconds, outcome in rows)
    print(f"{passed} passed, {failed} failed", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
