# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The owner's command and the primary's launcher, up to a whole fleet under the real supervisor."""

from __future__ import annotations

import contextlib
import datetime as dt
import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._hours import parse_hours
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner
from ansible_collections.llamafleet.rpc.plugins.module_utils._service import Supervisor, converge
from ansible_collections.llamafleet.rpc.plugins.module_utils._units import Service
from ansible_collections.llamafleet.rpc.tests.unit.servers import free_port

ROLES = Path(__file__).parents[2] / "roles"
OWNER = ROLES / "llama_worker/files/llama_worker_owner.py"
LAUNCH = ROLES / "llama_primary/files/launch.py"


def program(path: Path) -> ModuleType:
    """A program that roles install, as a module."""
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module
    specification.loader.exec_module(module)
    return module


owner = program(OWNER)
launch = program(LAUNCH)


def within(seconds: float, condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.2)
    return value


def described(state_dir: Path, name: str, **facts: Any) -> Path:
    """The directory of a host as the role leaves it."""
    directory = state_dir / "default" / name
    directory.mkdir(parents=True)
    host = {"host": name, "cluster": "default", "manager": "systemd", "scope": "system", "services": [], **facts}
    (directory / "owner.json").write_text(json.dumps(host))
    return directory


def command(state_dir: Path, *words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """llama-worker as its owner runs it."""
    environment = {**os.environ, "PATH": path + os.pathsep + os.environ["PATH"]} if path else None
    return subprocess.run(
        [sys.executable, "-I", str(OWNER), str(state_dir), "/usr/local/bin/llama-worker", *words],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


# ------------------------------------------------------------------------------------------------------- systemd


@pytest.fixture
def systemctl(tmp_path: Path) -> Path:
    """A directory with a systemctl that writes down what it is asked."""
    directory = tmp_path / "bin"
    directory.mkdir()
    fake = directory / "systemctl"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    fake.chmod(0o755)
    return directory


UNIT = [{"name": "llama-rpc-default-gpu", "endpoint": "10.98.0.2:18711"}]


def test_a_paused_unit_is_stopped_and_does_not_start_at_boot(tmp_path: Path, systemctl: Path) -> None:
    directory = described(tmp_path / "state", "deskbox", services=UNIT)
    done = command(tmp_path / "state", "pause", path=str(systemctl))
    assert done.returncode == 0 and "deskbox is paused" in done.stdout
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [
        "disable --quiet llama-rpc-default-gpu.service",
        "stop llama-rpc-default-gpu.service",
    ]
    marker = json.loads((directory / "paused.json").read_text())
    assert marker["by"] == "owner" and "deskbox is paused by its owner (" in marker["reason"]
    again = command(tmp_path / "state", "pause", path=str(systemctl))
    assert marker["reason"] in again.stdout, "a second pause keeps the time of the first"
    (tmp_path / "calls").unlink()
    assert command(tmp_path / "state", "resume", path=str(systemctl)).returncode == 0
    assert not (directory / "paused.json").exists()
    assert (tmp_path / "calls").read_text().splitlines() == [
        "enable --quiet llama-rpc-default-gpu.service",
        "start llama-rpc-default-gpu.service",
    ]


def test_only_the_named_host_of_a_machine_is_paused(tmp_path: Path, systemctl: Path) -> None:
    one, two = (described(tmp_path / "state", name, services=UNIT) for name in ("one", "two"))
    assert command(tmp_path / "state", "pause", "two", path=str(systemctl)).returncode == 0
    assert not (one / "paused.json").exists() and (two / "paused.json").exists()
    wrong = command(tmp_path / "state", "pause", "three")
    assert wrong.returncode == 1 and "no worker three" in wrong.stderr and "one, two" in wrong.stderr


def test_a_service_that_does_not_stop_is_an_error_and_stays_marked(tmp_path: Path, systemctl: Path) -> None:
    directory = described(tmp_path / "state", "deskbox", services=UNIT)
    (systemctl / "systemctl").write_text("#!/bin/sh\necho no bus >&2; exit 1\n")
    done = command(tmp_path / "state", "pause", path=str(systemctl))
    assert done.returncode == 1 and "no bus" in done.stderr and "Traceback" not in done.stderr
    assert (directory / "paused.json").exists()


def test_nobody_can_name_another_state_directory(tmp_path: Path) -> None:
    """The command may run as root for a group: what it believes must be given by the installed file alone."""
    described(tmp_path / "mine", "evil", manager="supervisor", supervisor=str(tmp_path))
    (tmp_path / "state").mkdir()
    for words in (["status", str(tmp_path / "mine")], [str(tmp_path / "mine"), "status"], ["status", "--state-dir=x"]):
        done = command(tmp_path / "state", *words)
        assert done.returncode != 0 and "evil" not in done.stdout


# ------------------------------------------------------------------------------------------------------- launchd


@pytest.fixture
def launchctl(tmp_path: Path) -> Path:
    """A directory with a launchctl that keeps which jobs it has, and takes two looks to let go of one."""
    directory = tmp_path / "bin"
    directory.mkdir()
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    script = f"""
        echo "$@" >> {tmp_path}/calls; job={jobs}/${{2##*/}}
        case $1 in
        print) [ ! -e $job.dying ] || {{ rm $job.dying; printf "\tstate = SIGTERMed\n"; exit 0; }}
               [ -e $job ] || {{ echo "Could not find service" >&2; exit 113; }}; printf "\tpid = 4711\n" ;;
        bootout) [ -e $job ] || exit 3; rm $job; touch $job.dying; exit 36 ;;
        bootstrap) path=${{3##*/}}; touch {jobs}/${{path%.plist}} ;;
        esac"""
    fake = directory / "launchctl"
    fake.write_text("#!/bin/sh\n" + script + "\n")
    fake.chmod(0o755)
    return directory


def test_a_paused_job_of_a_mac_is_unloaded_and_does_not_start_at_boot(tmp_path: Path, launchctl: Path) -> None:
    (tmp_path / "jobs" / "llamafleet.llama-rpc-default-gpu").touch()
    directory = described(tmp_path / "state", "studio", manager="launchd", services=UNIT)
    done = command(tmp_path / "state", "pause", path=str(launchctl))
    assert done.returncode == 0 and "studio is paused" in done.stdout and (directory / "paused.json").exists()
    target = "system/llamafleet.llama-rpc-default-gpu"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [f"disable {target}", f"bootout {target}", f"print {target}", f"print {target}"], "waited for"
    (tmp_path / "calls").unlink()
    assert command(tmp_path / "state", "resume", path=str(launchctl)).returncode == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == f"enable {target}"
    assert calls[-1] == "bootstrap system /Library/LaunchDaemons/llamafleet.llama-rpc-default-gpu.plist"
    assert command(tmp_path / "state", "resume", path=str(launchctl)).returncode == 0, "a second one is no mistake"
    status = command(tmp_path / "state", "status", path=str(launchctl))
    assert "10.98.0.2:18711: running" in status.stdout


def test_who_uses_the_worker_of_a_mac() -> None:
    table = (Path(__file__).parent / "recordings/macos/netstat_an_studio").read_text()
    assert owner.mac_clients("10.9.0.4:18711", table) == ["10.9.0.1"]
    assert owner.mac_clients("10.9.0.4:1871", table) == []


# --------------------------------------------------------------------------------------------------------- hours

SATURDAY_23 = dt.datetime(2026, 11, 28, 23, 0)
SUNDAY_NOON = dt.datetime(2026, 11, 29, 12, 0)
MONDAY_0759 = dt.datetime(2026, 11, 30, 7, 59)


def with_hours(tmp_path: Path, *hours: str) -> Any:
    windows = [list(window) for window in parse_hours(list(hours)).windows]
    directory = described(tmp_path / "state", "deskbox", windows=windows, hours=list(hours))
    return owner.Host(str(directory), json.loads((directory / "owner.json").read_text()))


@pytest.mark.parametrize(
    ("moment", "lends"),
    [(SATURDAY_23, True), (SUNDAY_NOON, False), (MONDAY_0759, True), (MONDAY_0759.replace(hour=8, minute=0), False)],
)
def test_hours_over_midnight_and_over_the_week(tmp_path: Path, moment: dt.datetime, lends: bool) -> None:
    assert with_hours(tmp_path, "22:00-08:00").open_at(moment) is lends


def test_the_end_of_the_hours_pauses_and_their_begin_resumes(tmp_path: Path) -> None:
    host = with_hours(tmp_path, "22:00-08:00")
    assert "paused" in owner.keep_hours(host, SUNDAY_NOON) and host.marker["by"] == "hours"
    assert "nothing to change" in owner.keep_hours(host, SUNDAY_NOON)
    assert "lends" in owner.keep_hours(host, SATURDAY_23) and host.marker is None
    assert "nothing to change" in owner.keep_hours(host, SATURDAY_23)


def test_hours_do_not_end_a_pause_of_the_owner(tmp_path: Path) -> None:
    host = with_hours(tmp_path, "22:00-08:00")
    owner.pause(host)
    owner.keep_hours(host, SATURDAY_23)
    assert host.marker["by"] == "owner"


def test_an_owner_who_pauses_outside_of_the_hours_stays_paused_when_they_begin(tmp_path: Path) -> None:
    host = with_hours(tmp_path, "22:00-08:00")
    owner.keep_hours(host, SUNDAY_NOON)
    owner.pause(host)
    owner.keep_hours(host, SATURDAY_23)
    assert host.marker["by"] == "owner"


def test_hours_that_were_taken_away_no_longer_hold_the_worker(tmp_path: Path) -> None:
    host = with_hours(tmp_path, "22:00-08:00")
    owner.keep_hours(host, SUNDAY_NOON)
    owner.keep_hours(owner.Host(host.directory, {**host.facts, "windows": [], "hours": []}), SUNDAY_NOON)
    assert host.marker is None


def test_at_boot_nothing_waits_for_a_unit_that_waits_for_us(tmp_path: Path, systemctl: Path) -> None:
    """The workers are ordered after the hours: a systemctl start that waits would never end."""
    described(tmp_path / "state", "deskbox", services=UNIT, windows=[[0, 0]])
    assert command(tmp_path / "state", "hours", "deskbox", path=str(systemctl)).returncode == 0
    assert "stop --no-block llama-rpc-default-gpu.service" in (tmp_path / "calls").read_text()
    facts = json.loads((tmp_path / "state/default/deskbox/owner.json").read_text())
    (tmp_path / "state/default/deskbox/owner.json").write_text(json.dumps({**facts, "windows": [[0, 7 * 24 * 60]]}))
    assert command(tmp_path / "state", "hours", "deskbox", path=str(systemctl)).returncode == 0
    assert "start --no-block llama-rpc-default-gpu.service" in (tmp_path / "calls").read_text()


# -------------------------------------------------------------------------------------------------- who uses it


def test_status_knows_the_clients_without_asking_the_worker() -> None:
    """One connection through a real socket pair, seen in the table of this machine."""
    with socket.create_server(("127.0.0.1", free_port())) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        assert owner.clients(endpoint, Path("/proc/net/tcp").read_text()) == []
        with socket.create_connection(listener.getsockname()), listener.accept()[0]:
            assert owner.clients(endpoint, Path("/proc/net/tcp").read_text()) == ["127.0.0.1"]


# ------------------------------------------------------------------------------------------------------ launcher


def test_the_launcher_knows_a_worker_that_hung_up_from_one_that_it_left() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        table = Path("/proc/net/tcp")
        client = socket.create_connection(listener.getsockname())
        server = listener.accept()[0]
        assert launch.hung_up([endpoint], table.read_text()) == set()
        server.close()
        within(5, lambda: launch.hung_up([endpoint], table.read_text()) == {endpoint}, "the worker's end is seen")
        client.close()
        within(5, lambda: launch.hung_up([endpoint], table.read_text()) == set(), "both ends are closed")
        client = socket.create_connection(listener.getsockname())
        server = listener.accept()[0]
        client.close()
        time.sleep(0.3)
        assert launch.hung_up([endpoint], table.read_text()) == set(), "a probe that left is not a worker that ended"
        server.close()


def test_the_launcher_names_the_worker_it_waits_for_and_why(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    program_copy = tmp_path / "launch.py"
    program_copy.write_text(LAUNCH.read_text())
    plan = {"devices": [{"endpoint": None, "host": "primary"}, {"endpoint": endpoint, "host": "deskbox"}]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with subprocess.Popen(
        [sys.executable, str(program_copy), endpoint, "/bin/echo", "serving"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr and process.stdout
        line = process.stderr.readline()
        assert f"Waiting for deskbox ({endpoint})" in line and "paused by its owner" in line
        host, port = endpoint.split(":")
        with socket.create_server((host, int(port))):
            assert process.stdout.read() == "serving\n"
        assert "All workers are there after" in process.stderr.read()


def test_a_server_that_does_not_end_is_killed_and_the_watcher_ends_with_it(tmp_path: Path) -> None:
    """A server that ignores SIGTERM, as one that hangs on a frozen worker does, is out of the way in the end."""
    with socket.create_server(("127.0.0.1", free_port())) as listener:
        port = listener.getsockname()[1]
        script = (
            "import signal, socket, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
            f"s = socket.create_connection(('127.0.0.1', {port})); print('up', flush=True); time.sleep(600)"
        )
        with subprocess.Popen(
            [sys.executable, str(LAUNCH), f"127.0.0.1:{port}", sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            listener.accept()[0].close()  # the launcher's own look
            worker = listener.accept()[0]
            assert process.stdout and process.stderr and process.stdout.readline() == "up\n"
            worker.close()
            assert "has ended its connection" in process.stderr.readline()
            assert process.wait(30) == -signal.SIGKILL
            # The pipe closes when the watcher has gone as well.
            assert process.stderr.read() == ""


# ------------------------------------------------------------------------------------------- the whole, for real


@pytest.fixture
def supervisor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    directory = tmp_path_factory.mktemp("s")
    yield Supervisor(SystemRunner(), str(directory))
    pid = directory / "supervisord.pid"
    if pid.exists():
        number = int(pid.read_text())
        os.kill(number, signal.SIGTERM)
        within(30, lambda: not Path(f"/proc/{number}").exists(), "supervisor ends")


def ask(port: int, **options: Any) -> http.client.HTTPResponse:
    """A prompt at temperature 0."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/completion", json.dumps({"temperature": 0, "cache_prompt": False, **options}))
    return connection.getresponse()


def completion(port: int) -> str | None:
    """The text of an answer, or None where there is none."""
    try:
        return str(json.load(ask(port, prompt="The capital of France is", n_predict=8))["content"]) or None
    except (OSError, ValueError, KeyError, http.client.HTTPException):
        return None


@pytest.mark.real
def test_pause_and_resume_of_a_serving_fleet(
    supervisor: Supervisor, tmp_path: Path, llama_bin: Path, demo_model: Path
) -> None:
    """Idle and in the middle of an answer: the primary ends, says for whom it waits, and comes back by itself."""
    directory = Path(os.path.dirname(supervisor.path("x"))).parent
    ports = [free_port() for _number in range(3)]
    endpoints = [f"127.0.0.1:{port}" for port in ports[1:]]
    hosts = ["deskbox", "rack"]
    services = []
    for name, endpoint in zip(hosts, endpoints):
        argv = (
            str(llama_bin / "ggml-rpc-server"),
            "-H",
            "127.0.0.1",
            "-p",
            endpoint.split(":")[1],
            "-d",
            "CPU",
            "-t",
            "1",
        )
        services.append(Service(f"llama-rpc-default-{name}", name, argv, {"GGML_NO_BACKTRACE": "1"}))
        described(
            tmp_path,
            name,
            manager="supervisor",
            supervisor=str(directory),
            services=[{"name": services[-1].name, "endpoint": endpoint}],
        )
    primary_dir = tmp_path / "default" / "head"
    primary_dir.mkdir()
    (primary_dir / "launch.py").write_text(LAUNCH.read_text())
    plan = {"devices": [{"endpoint": endpoint, "host": host} for endpoint, host in zip(endpoints, hosts)]}
    (primary_dir / "plan.json").write_text(json.dumps(plan))
    log = primary_dir / "head.log"
    serve = (
        *(str(llama_bin / "llama-server"), "-m", str(demo_model), "--rpc", ",".join(endpoints), "-dev", "RPC0,RPC1"),
        *("-ts", "16,15", "-ngl", "31", "-sm", "layer", "-fit", "off", "-c", "2048", "-np", "1", "-t", "1"),
        *("--host", "127.0.0.1", "--port", str(ports[0]), "--no-warmup"),
    )
    launcher = (sys.executable, str(primary_dir / "launch.py"), ",".join(endpoints))
    primary = Service("llama-server-default", "head", launcher + serve, {"GGML_NO_BACKTRACE": "1"}, log_path=str(log))
    for service in (*services, primary):
        converge(supervisor, service, "started", check=False)
    first = within(120, lambda: completion(ports[0]), "the fleet answers")

    # Idle: nothing would tell llama-server before the next prompt.
    assert "in use by 127.0.0.1" in command(tmp_path, "status", "deskbox").stdout
    before = supervisor.pid(primary.name)
    done = command(tmp_path, "pause", "deskbox")
    assert done.returncode == 0, done.stderr
    waiting = f"Waiting for deskbox ({endpoints[0]})"
    within(20, lambda: waiting in log.read_text(), "the primary waits and says for whom")
    assert "deskbox" in log.read_text() and "has ended its connection" in log.read_text()
    assert supervisor.pid(primary.name) not in (None, before) and completion(ports[0]) is None
    status = command(tmp_path, "status").stdout
    assert "deskbox is paused by its owner" in status and "not running" in status and "rack lends" in status

    # A run of the playbook and a reboot leave it alone.
    assert not converge(supervisor, services[0], "stopped", check=False).changed
    supervisor_pid = int((directory / "supervisord.pid").read_text())
    os.kill(supervisor_pid, signal.SIGTERM)
    within(30, lambda: not Path(f"/proc/{supervisor_pid}").exists(), "supervisor ends")
    refused = command(tmp_path, "resume", "rack")
    assert refused.returncode == 1 and "supervisor does not run, start it" in refused.stderr
    converge(supervisor, services[1], "started", check=False)  # starts supervisor, which starts all that it knows
    within(20, lambda: "not running" not in command(tmp_path, "status", "rack").stdout, "the other worker runs")
    assert "not running" in command(tmp_path, "status", "deskbox").stdout

    done = command(tmp_path, "resume", "deskbox")
    assert done.returncode == 0 and "lends again" in done.stdout, done.stderr
    assert within(120, lambda: completion(ports[0]), "the fleet answers again") == first

    # In the middle of an answer: llama-server aborts by itself at the next token.
    said = log.read_text().count(waiting)
    answer = ask(ports[0], prompt="Once upon a time", n_predict=1500, ignore_eos=True, stream=True)
    assert answer.readline().startswith(b"data:")
    assert command(tmp_path, "pause", "deskbox").returncode == 0
    with contextlib.suppress(OSError, http.client.HTTPException):
        answer.read()
    within(20, lambda: log.read_text().count(waiting) > said, "the primary waits again")
    ends = [line for line in (directory / "supervisord.log").read_text().splitlines() if "exited: llama-server" in line]
    assert "SIGABRT" in ends[-1], "status 134, as facts say of b11434"
    assert command(tmp_path, "resume").returncode == 0
    assert within(120, lambda: completion(ports[0]), "the fleet answers again") == first
    for service in (primary, *services):
        converge(supervisor, service, "absent", check=False)
