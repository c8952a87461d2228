# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Jobs under a launchctl that keeps state, and property lists read back."""

from __future__ import annotations

import os
import plistlib
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils import _service
from ansible_collections.llamafleet.rpc.plugins.module_utils._launchd import (
    Launchctl,
    Launchd,
    LaunchdError,
    Outcome,
    Place,
    converge,
    parse_print,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._units import (
    Service,
    UnitError,
    launchd_label,
    launchd_plist,
)
from ansible_collections.llamafleet.rpc.tests.unit.launchd import Launchd as FakeLaunchd
from hypothesis import given
from hypothesis import strategies as st

LABEL = "llamafleet.t"
JOB: dict[str, Any] = {"ProgramArguments": ["/bin/sleep", "600"], "KeepAlive": True, "RunAtLoad": True}
NASTY = ["/opt/a b/x", "a & b", "<x>", "]]>", "%h", "$HOME", '"', "'", "", " lead", "ä€", "\\", "-", "--", "`id`"]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = tmp_path.stat()
    return Place(str(tmp_path), (os.getuid(), made.st_gid))


def bring(fake: FakeLaunchd, place: Place, state: str = "started", check: bool = False, **more: Any) -> Outcome:
    launchctl = Launchctl(fake, 30.0, fake.sleep, fake.clock)
    return converge(launchctl, place, LABEL, {**JOB, **more}, state, check)


# ---------------------------------------------------------------------------------------------- property lists


def test_b4_10_a_service_is_interactive_and_nothing_slows_it_down() -> None:
    job = plistlib.loads(launchd_plist(Service("llama-rpc-default-gpu", "d", ("/opt/x",), user="llamafleet")))
    assert job["ProcessType"] == "Interactive"
    assert not {"LowPriorityIO", "Nice", "LowPriorityBackgroundIO"} & set(job)
    assert job["KeepAlive"] is True and job["RunAtLoad"] is True  # law 8: status 0 is a failure, too
    assert job["UserName"] == "llamafleet" and "GroupName" not in job
    assert (job["ThrottleInterval"], job["ExitTimeOut"]) == (10, 20)


def test_a_service_has_a_home_a_log_and_its_own_environment() -> None:
    service = Service("x", "d", ("/x",), {"HOME": "/h", "A": "1"}, "u", ("g",), "/w", (), "/var/log/x.log")
    job = plistlib.loads(launchd_plist(service))
    assert job["EnvironmentVariables"] == {"HOME": "/h", "A": "1"}
    assert job["StandardOutPath"] == job["StandardErrorPath"] == "/var/log/x.log"
    assert (job["WorkingDirectory"], job["GroupName"]) == ("/w", "g")
    assert plistlib.loads(launchd_plist(Service("x", "d", ("/x",))))["EnvironmentVariables"] == {"HOME": "/"}


@given(
    st.lists(st.text(st.characters(blacklist_categories=("Cc", "Cs")), max_size=20), max_size=5),
    st.text(st.characters(blacklist_categories=("Cc", "Cs")), max_size=20),
)
def test_what_launchd_reads_back_is_what_was_meant(arguments: list[str], value: str) -> None:
    service = Service("x", "d", ("/x", *arguments), {"A": value})
    try:
        data = launchd_plist(service)
    except UnitError:
        assert {"\ufffe", "\uffff"} & set("".join([*arguments, value]))
        return
    job = plistlib.loads(data)
    assert job["ProgramArguments"][-len(arguments) - 1 :] == ["/x", *arguments]
    assert job["EnvironmentVariables"]["A"] == value
    assert launchd_plist(service) == data


def test_the_program_gets_its_arguments_and_ignores_sigpipe() -> None:
    """Law 7, by running what launchd would."""
    script = 'grep SigIgn /proc/self/status; for a; do printf "<%s>\\n" "$a"; done'
    service = Service("x", "d", ("/bin/sh", "-c", script, "sh", *NASTY))
    argv = plistlib.loads(launchd_plist(service))["ProgramArguments"]
    lines = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    assert int(lines[0].split()[1], 16) & (1 << (signal.SIGPIPE - 1))
    assert lines[1:] == [f"<{word}>" for word in NASTY]


# --------------------------------------------------------------------------------------------------------- jobs


def test_start_second_run_stop_and_remove(place: Place) -> None:
    fake = FakeLaunchd()
    assert bring(fake, place, check=True).actions == ["write", "bootstrap"]
    assert not os.path.exists(place.path(LABEL)) and fake.changes == []
    first = bring(fake, place)
    assert first.changed and first.pid and first.before == "" and "/bin/sleep" in first.after
    path = place.path(LABEL)
    assert os.path.basename(path) == LABEL + ".plist" and os.stat(path).st_mode == 0o100644
    assert plistlib.loads(Path(path).read_bytes())["Label"] == LABEL
    second = bring(fake, place)
    assert (second.changed, second.pid) == (False, first.pid)
    assert fake.changes == [f"bootstrap system {path}"]
    assert bring(fake, place, "stopped").actions == ["bootout"] and os.path.exists(path)
    assert not bring(fake, place, "stopped").changed
    assert bring(fake, place).actions == ["bootstrap"]
    assert bring(fake, place, "absent").actions == ["bootout", "remove"] and not os.path.exists(path)
    assert not bring(fake, place, "absent").changed


def test_b4_12_a_changed_plist_is_unloaded_and_loaded_an_unchanged_one_kickstarted(place: Place) -> None:
    fake = FakeLaunchd()
    first = bring(fake, place)
    fake.calls.clear()
    again = bring(fake, place, "restarted")
    assert fake.changes == [f"kickstart -k system/{LABEL}"] and again.pid != first.pid
    fake.calls.clear()
    changed = bring(fake, place, ProgramArguments=["/bin/sleep", "601"])
    assert changed.actions == ["write", "bootout", "bootstrap"]
    assert fake.changes == [f"bootout system/{LABEL}", f"bootstrap system {place.path(LABEL)}"]
    assert fake.jobs[LABEL].plist["ProgramArguments"] == ["/bin/sleep", "601"]


@pytest.mark.parametrize("bootout", [0, 36, 5])
@pytest.mark.parametrize("taken", [37, 5])
def test_a_label_that_is_still_taken_is_waited_for(place: Place, bootout: int, taken: int) -> None:
    fake = FakeLaunchd(lingers=6, bootout_rc=bootout, taken_rc=taken)
    bring(fake, place)
    assert bring(fake, place, ProgramArguments=["/bin/sleep", "601"]).pid
    assert fake.jobs[LABEL].plist["ProgramArguments"] == ["/bin/sleep", "601"]
    assert bring(fake, place, "absent").changed and fake.jobs == {}


def test_a_job_that_never_ends_is_an_error_within_the_patience(place: Place) -> None:
    fake = FakeLaunchd(lingers=10**6)
    bring(fake, place)
    with pytest.raises(LaunchdError, match=r"still has llamafleet.t 30 s after bootout"):
        bring(fake, place, "absent")
    assert 30 <= fake.now < 32
    assert os.path.exists(place.path(LABEL)), "the file stays, so that the next run tries again"


def test_bootstrap_that_fails_for_a_while_is_tried_again_and_one_that_goes_on_failing_explained(place: Place) -> None:
    fake = FakeLaunchd(refuses=3)
    assert bring(fake, place).pid
    fake = FakeLaunchd(refuses=10**6)
    with pytest.raises(LaunchdError, match=r"bootstrap .* status 5: .*Input/output error .*plutil -lint"):
        bring(fake, place)
    assert 30 <= fake.now < 32


def test_status_5_of_a_job_that_is_in_is_success(place: Place) -> None:
    fake = FakeLaunchd(says_5_but_loads=True)
    assert bring(fake, place).pid and len(fake.changes) == 1


def test_a_disabled_job_is_enabled_first(place: Place) -> None:
    """The list of disabled jobs outlives file and boot; bootstrap only says 5 then."""
    fake = FakeLaunchd(disabled={LABEL})
    assert bring(fake, place).actions == ["write", "enable", "bootstrap"]
    assert fake.disabled == set() and LABEL in fake.jobs


def test_a_run_that_died_between_file_and_launchd_is_healed(place: Place) -> None:
    fake = FakeLaunchd()
    bring(fake, place)
    wanted = bring(FakeLaunchd(), Place(place.directory, place.owner), ProgramArguments=["/bin/sleep", "9"])
    assert wanted.changed  # the file now says 9, and launchd still runs 600
    assert bring(fake, place, ProgramArguments=["/bin/sleep", "9"]).actions == ["bootout", "bootstrap"]
    assert not bring(fake, place, ProgramArguments=["/bin/sleep", "9"]).changed


def test_wrong_mode_and_a_link_are_put_right(place: Place, tmp_path: Path) -> None:
    fake = FakeLaunchd()
    bring(fake, place)
    os.chmod(place.path(LABEL), 0o664)
    assert "write" in bring(fake, place).actions
    assert os.stat(place.path(LABEL)).st_mode == 0o100644
    text = Path(place.path(LABEL)).read_text()
    os.unlink(place.path(LABEL))
    (tmp_path / "elsewhere").write_text(text)
    os.symlink(tmp_path / "elsewhere", place.path(LABEL))
    assert "write" in bring(fake, place).actions
    assert not os.path.islink(place.path(LABEL))


def test_a_one_shot_that_ended_is_no_change(place: Place) -> None:
    fake = FakeLaunchd()
    once: dict[str, Any] = {"KeepAlive": False}
    assert bring(fake, place, **once).pid is None
    assert not bring(fake, place, **once).changed


@pytest.mark.parametrize(("status", "says"), [(64, "does not know the verb"), (125, "run as root"), (1, "become")])
def test_other_statuses_are_told_with_a_remedy(place: Place, status: int, says: str) -> None:
    class Refusing(FakeLaunchd):
        def _bootstrap(self, domain: str, path: str) -> int:
            return status

    with pytest.raises(LaunchdError, match=says):
        bring(Refusing(), place)


def test_print_is_read_leniently() -> None:
    assert parse_print("") == parse_print("garbage\n\t}\n")
    job = parse_print(
        "system/x = {\n\tstate = spawn scheduled\n\tpid = 0\n\targuments = {\n\t\t a\n\t\tb = {\n\t}\n}\n"
    )
    assert (job.state, job.pid, job.arguments) == ("spawn scheduled", None, (" a", "b = {"))


@pytest.mark.parametrize("label", ["", "../x", "a/b", "-x", "a b", "x" * 300])
def test_a_label_is_a_file_name(place: Place, label: str) -> None:
    with pytest.raises(LaunchdError, match="label"):
        converge(Launchctl(FakeLaunchd()), place, label, JOB, "started", False)


# --------------------------------------------------------------------------------- as a manager of services


@pytest.fixture
def fake() -> FakeLaunchd:
    return FakeLaunchd(lingers=2)


@pytest.fixture
def manager(fake: FakeLaunchd, place: Place) -> Launchd:
    return Launchd(fake, place, Launchctl(fake, 30.0, fake.sleep, fake.clock))


def service(seconds: int = 600) -> Service:
    return Service("llama-rpc-default-gpu", "d", ("/bin/sleep", str(seconds)))


def test_the_life_of_a_service(fake: FakeLaunchd, manager: Launchd) -> None:
    name = service().name
    first = _service.converge(manager, service(), "started", check=False)
    assert first.actions == ["write", "start"] and first.pid and first.restarted
    assert os.path.basename(manager.path(name)) == "llamafleet.llama-rpc-default-gpu.plist"
    assert not _service.converge(manager, service(), "started", check=False).changed
    fake.calls.clear()
    changed = _service.converge(manager, service(601), "started", check=False)
    assert changed.actions == ["write", "restart"] and changed.pid not in (None, first.pid)
    assert [call.split()[0] for call in fake.changes] == ["bootout", "bootstrap"]
    assert fake.jobs[launchd_label(name)].plist["ProgramArguments"][-1] == "601"
    fake.calls.clear()
    again = _service.converge(manager, service(601), "restarted", check=False)
    assert again.pid != changed.pid and [call.split()[0] for call in fake.changes] == ["kickstart"]
    assert _service.converge(manager, service(601), "stopped", check=False).changed
    assert fake.jobs == {} and not _service.converge(manager, service(601), "stopped", check=False).changed
    assert _service.converge(manager, service(601), "started", check=False).actions == ["start"]
    assert _service.converge(manager, service(601), "absent", check=False).changed
    assert fake.jobs == {} and not os.path.exists(manager.path(name))


def test_a_crashing_service_is_replaced_stopped_and_removed_although_it_has_no_process(
    fake: FakeLaunchd, manager: Launchd
) -> None:
    def crash() -> None:
        fake.jobs[launchd_label(service().name)].pid = None

    _service.converge(manager, service(), "started", check=False)
    crash()
    _service.converge(manager, service(601), "started", check=False)
    assert fake.jobs[launchd_label(service().name)].plist["ProgramArguments"][-1] == "601"
    crash()
    assert _service.converge(manager, service(601), "stopped", check=False).changed and fake.jobs == {}
    _service.converge(manager, service(601), "started", check=False)
    crash()
    _service.converge(manager, service(601), "absent", check=False)
    assert fake.jobs == {}


def test_a_file_that_launchd_has_not_read_is_read(fake: FakeLaunchd, manager: Launchd) -> None:
    _service.converge(manager, service(), "started", check=False)
    Path(manager.path(service().name)).write_bytes(launchd_plist(service(601)))
    assert _service.converge(manager, service(601), "started", check=False).actions == ["start"]
    assert fake.jobs[launchd_label(service().name)].plist["ProgramArguments"][-1] == "601"
    Path(manager.path(service().name)).write_text("damaged")
    assert _service.converge(manager, service(601), "started", check=False).actions[0] == "write"
