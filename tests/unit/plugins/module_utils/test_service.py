# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Services under the real supervisor, and systemctl's part against a systemctl that keeps state."""

from __future__ import annotations

import grp
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Result, SystemRunner
from ansible_collections.llamafleet.rpc.plugins.module_utils._service import (
    ServiceError,
    Supervisor,
    Systemd,
    converge,
    device_groups,
    strays,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._units import Service


def program(*script: str, name: str = "llama-t") -> Service:
    return Service(name, "t", ("/bin/sh", "-c", *script))


@pytest.fixture(scope="module")
def supervisor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    directory = tmp_path_factory.mktemp("s")
    manager = Supervisor(SystemRunner(), str(directory))
    yield manager
    pid = directory / "supervisord.pid"
    if pid.exists():
        os.kill(int(pid.read_text()), signal.SIGTERM)


def runs(pid: int | None) -> bool:
    """Whether a process runs; one that nobody reaped does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def wait_for(condition: object, seconds: float = 10) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.1)


@pytest.mark.real
def test_start_second_run_change_restart_stop_remove(supervisor: Supervisor) -> None:
    service = program("exec sleep 600")
    dry = converge(supervisor, service, "started", check=True)
    assert dry.changed and dry.restarted and not os.path.exists(supervisor.path(service.name))
    first = converge(supervisor, service, "started", check=False)
    assert first.changed and first.pid and first.restarted
    second = converge(supervisor, service, "started", check=False)
    assert not second.changed and second.pid == first.pid
    changed = converge(supervisor, program("exec sleep 601"), "started", check=False)
    assert changed.actions == ["write", "restart"] and changed.pid not in (None, first.pid)
    again = converge(supervisor, program("exec sleep 601"), "restarted", check=False)
    assert again.changed and again.pid not in (None, changed.pid)
    stopped = converge(supervisor, service, "stopped", check=False)
    assert stopped.changed and supervisor.pid(service.name) is None
    assert not converge(supervisor, service, "stopped", check=False).changed
    back = converge(supervisor, program("exec sleep 601"), "started", check=False)
    assert back.actions == ["start"] and back.pid
    main_pid = int(Path(os.path.dirname(supervisor.path("x")), "..", "supervisord.pid").read_text())
    assert converge(supervisor, service, "absent", check=False).changed
    assert not os.path.exists(f"/proc/{back.pid}") and not os.path.exists(supervisor.path(service.name))
    assert not os.path.exists(f"/proc/{main_pid}"), "the last service takes the supervisor with it"
    assert not converge(supervisor, service, "absent", check=False).changed


@pytest.mark.real
def test_exit_status_0_is_a_failure_and_sigpipe_is_ignored(supervisor: Supervisor, tmp_path: Path) -> None:
    """Laws 7 and 8."""
    count = tmp_path / "count"
    service = program(f"grep SigIgn /proc/self/status > {tmp_path}/mask; echo x >> {count}; exit 0", name="llama-z")
    converge(supervisor, service, "started", check=False)
    wait_for(lambda: count.exists() and len(count.read_text().split()) >= 3)
    mask = int((tmp_path / "mask").read_text().split()[1], 16)
    assert mask & (1 << (signal.SIGPIPE - 1)), "a worker must survive a probe that gave up"
    converge(supervisor, service, "absent", check=False)


class Systemctl(SystemRunner):
    """systemctl as far as we use it, with the state of one unit."""

    def __init__(self, version: str = "252 (252.39-1~deb12u1)") -> None:
        self.calls: list[str] = []
        self.running = False
        self.version = version

    def run(self, argv: Sequence[str], timeout: float = 30.0) -> Result:
        if argv[1:] == ["--version"]:
            return Result(0, f"systemd {self.version}\n+PAM +AUDIT\n", "")
        verb = next(word for word in argv[1:] if not word.startswith("--"))
        self.calls.append(verb)
        if verb == "show":
            return Result(0, f"{os.getpid() if self.running else 0}\n", "")
        if verb in ("start", "stop"):
            self.running = verb == "start"
        if verb == "verify" and "exec bad" in Path(argv[-1]).read_text(encoding="utf-8"):
            return Result(1, "", f"{argv[-1]}:9: no such program\nother.service: not ours\n")
        return Result(0, "", "")


def test_systemd_loads_before_it_starts_and_clears_an_old_start_limit(tmp_path: Path) -> None:
    """Case B4-19: a unit that once hit its start limit starts again."""
    systemctl = Systemctl()
    manager = Systemd(systemctl, "user", str(tmp_path))
    outcome = converge(manager, program("exec sleep 1"), "started", check=False)
    assert outcome.actions == ["write", "start"]
    assert systemctl.calls[:5] == ["verify", "daemon-reload", "reset-failed", "enable", "start"]
    systemctl.calls.clear()
    assert not converge(manager, program("exec sleep 1"), "started", check=False).changed
    assert systemctl.calls == ["show"]
    assert converge(manager, program("exec sleep 2"), "started", check=False).actions == ["write", "restart"]
    assert converge(manager, program("exec sleep 2"), "absent", check=False).changed
    assert not list((tmp_path / ".config/systemd/user").iterdir())


def test_a_unit_that_systemd_refuses_is_not_put_in_place(tmp_path: Path) -> None:
    systemctl = Systemctl()
    manager = Systemd(systemctl, "user", str(tmp_path))
    good = program("exec sleep 1")
    converge(manager, good, "started", check=False)
    systemctl.calls.clear()
    with pytest.raises(ServiceError, match=r"would not load the unit llama-t: .*no such program$"):
        converge(manager, program("exec bad"), "started", check=False)
    assert not {"stop", "start", "daemon-reload"} & set(systemctl.calls), "the running service is left alone"
    assert not converge(manager, good, "started", check=False).changed


@pytest.mark.parametrize(
    ("version", "rises"), [("252 (252.39-1~deb12u1)", False), ("254 (254.16-1.fc39)", True), ("1000", True)]
)
def test_pauses_grow_where_systemd_can_do_it(version: str, rises: bool, tmp_path: Path) -> None:
    """Law 8."""
    text = Systemd(Systemctl(version), "user", str(tmp_path)).text(program("exec sleep 1"))
    assert ("RestartMaxDelaySec=60" in text) is rises


@pytest.mark.real
def test_what_a_killed_supervisor_left_behind_is_ended_and_started_anew(
    supervisor: Supervisor, tmp_path_factory: pytest.TempPathFactory
) -> None:
    service = program("exec sleep 605", name="llama-rpc-default-o")
    first = converge(supervisor, service, "started", check=False)
    main_pid = Path(os.path.dirname(supervisor.path("x")), "..", "supervisord.pid")
    os.kill(int(main_pid.read_text()), signal.SIGKILL)
    wait_for(lambda: supervisor.pid(service.name) is None)
    assert os.path.exists(f"/proc/{first.pid}"), "the program outlives its supervisor"
    again = converge(supervisor, service, "started", check=False)
    assert again.restarted and again.pid not in (None, first.pid)
    assert not runs(first.pid)
    converge(supervisor, service, "absent", check=False)


@pytest.mark.real
def test_a_renamed_instance_is_found_by_its_host_directory(supervisor: Supervisor) -> None:
    old = Service("llama-rpc-default-old", "t", ("/bin/sleep", "600"), log_path="")
    ours = Service("llama-rpc-default-new", "t", ("/bin/sleep", "600"), working_directory="/")
    for service, where in ((old, "/state/default/a/run"), (ours, "/state/default/a/run")):
        converge(supervisor, Service(service.name, where, (*service.argv,), {"HOME": where}), "started", check=False)
    assert strays(supervisor, "/state/default/a/", ["llama-rpc-default-new"]) == ["llama-rpc-default-old"]
    assert strays(supervisor, "/state/default/b/", []) == []
    for service in (old, ours):
        converge(supervisor, service, "absent", check=False)


def test_groups_are_those_that_own_the_device_nodes(tmp_path: Path) -> None:
    """Cases B4-04: the render group has one number on the host and another in the container."""
    (tmp_path / "dev/dri").mkdir(parents=True)
    modes = {"kfd": 0o660, "dri/renderD128": 0o660, "nvidia0": 0o666, "dri/card0": 0o660, "dxg": 0o600}
    for name, mode in modes.items():
        (tmp_path / "dev" / name).touch()
        (tmp_path / "dev" / name).chmod(mode)
    if os.geteuid() == 0:
        os.chown(tmp_path / "dev/kfd", 0, 54321)
    own = grp.getgrgid(os.getegid()).gr_name
    assert device_groups("rocm", str(tmp_path)) == sorted({own, "54321" if os.geteuid() == 0 else own})
    assert device_groups("vulkan", str(tmp_path)) == [own]
    assert device_groups("cuda", str(tmp_path)) == []  # open to all, or to root alone
    assert device_groups("cpu", str(tmp_path)) == device_groups("", str(tmp_path)) == []
