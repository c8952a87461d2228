# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""llama-worker: whoever owns a machine takes it back from the fleet, at once or outside of certain hours.

The installed command gives the first two arguments, and nobody else can: it may run as root.

A host is paused while the file paused.json lies in its state directory. Its systemd units or launchd jobs are disabled
then, our supervisor does not see their sections, and site.yml leaves the cluster alone: so a pause outlives reboots and
runs. The primary needs no word of it: it loses the worker, ends, and waits for it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import fcntl
import glob
import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MARKER = "paused.json"
#: What the name of a supervisor section ends with while it is out of supervisor's sight (it includes conf.d/*.conf).
ASIDE = ".paused"


class RefusedError(Exception):
    """What was asked cannot be done; the text says why and what to do."""


def run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A command with its output. Stopping a worker takes at most the 20 s after which its manager kills it."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        raise RefusedError(f"{argv[0]} is not there, and it runs the workers of this machine") from None
    except subprocess.TimeoutExpired:
        raise RefusedError(f"{' '.join(argv)} did not end within 120 s") from None


def must(argv: Sequence[str]) -> None:
    """The same, for a command that has to succeed."""
    result = run(argv)
    if result.returncode != 0:
        said = result.stderr.strip() or result.stdout.strip()
        raise RefusedError(f"{' '.join(argv)} ended with status {result.returncode}: {said}")


class Systemd:
    """Units of the system or of the account. A paused one is disabled, so that no boot starts it."""

    def __init__(self, scope: str, wait: bool) -> None:
        self._systemctl = ["systemctl"] if scope == "system" else ["systemctl", "--user"]
        self._wait = [] if wait else ["--no-block"]

    def running(self, service: str) -> bool:
        return run([*self._systemctl, "is-active", "--quiet", service + ".service"]).returncode == 0

    def stop(self, service: str) -> None:
        must([*self._systemctl, "disable", "--quiet", service + ".service"])
        must([*self._systemctl, "stop", *self._wait, service + ".service"])

    def start(self, service: str) -> None:
        must([*self._systemctl, "enable", "--quiet", service + ".service"])
        must([*self._systemctl, "start", *self._wait, service + ".service"])


class Supervisor:
    """Programs of our own supervisor. A paused one's section is put aside, for supervisor starts all that it sees."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def _call(self, *words: str) -> list[str]:
        configuration = os.path.join(self._directory, "supervisord.conf")
        return [os.path.join(self._directory, "venv", "bin", "supervisorctl"), "-c", configuration, *words]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # The same lock as that of the module managed_service.
        with open(os.path.join(self._directory, "lock"), "w", encoding="utf-8") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    def _section(self, service: str) -> str:
        return os.path.join(self._directory, "conf.d", service + ".conf")

    def running(self, service: str) -> bool:
        return "RUNNING" in run(self._call("status", service)).stdout

    def stop(self, service: str) -> None:
        with self._locked():
            section = self._section(service)
            if os.path.exists(section):
                os.replace(section, section + ASIDE)
            # Where supervisor itself does not run there is nothing to stop.
            if run(self._call("pid")).returncode == 0:
                must(self._call("update", service))

    def start(self, service: str) -> None:
        with self._locked():
            section = self._section(service)
            if os.path.exists(section + ASIDE):
                os.replace(section + ASIDE, section)
            if run(self._call("pid")).returncode != 0:
                program = os.path.join(self._directory, "venv", "bin", "supervisord")
                configuration = os.path.join(self._directory, "supervisord.conf")
                raise RefusedError(f"our supervisor does not run, start it: {program} -c {configuration}")
            must(self._call("update", service))
            # It starts a section that is new, so that this one may come too late; what counts is that it runs.
            started = run(self._call("start", service))
            if not self.running(service):
                raise RefusedError(f"{service} does not start: {started.stdout.strip()}")


class Launchd:
    """Daemons of a Mac. A paused one is disabled, which outlives a boot, and not loaded, for KeepAlive revives it."""

    #: What bootout may say of a job that is ending or is not there; the look afterwards decides.
    _ENDING = (0, 3, 5, 36, 113)
    _WAIT = 40.0  # twice the time after which launchd kills

    def _target(self, service: str) -> str:
        return f"system/llamafleet.{service}"

    def _look(self, service: str) -> str | None:
        """What launchd says of a job; None when it does not have it."""
        shown = run(["launchctl", "print", self._target(service)])
        return shown.stdout if shown.returncode == 0 else None

    def running(self, service: str) -> bool:
        return re.search(r"^\tpid = [1-9]", self._look(service) or "", re.MULTILINE) is not None

    def stop(self, service: str) -> None:
        must(["launchctl", "disable", self._target(service)])
        ended = run(["launchctl", "bootout", self._target(service)])
        if ended.returncode not in self._ENDING:
            raise RefusedError(f"launchctl bootout {service} ended with {ended.returncode}: {ended.stderr.strip()}")
        self._wait_for(lambda: self._look(service) is None, f"{service} does not end")

    def start(self, service: str) -> None:
        must(["launchctl", "enable", self._target(service)])
        path = f"/Library/LaunchDaemons/llamafleet.{service}.plist"

        def is_in() -> bool:
            # A label that is still being torn down is refused for some seconds (status 5 or 37).
            return self._look(service) is not None or run(["launchctl", "bootstrap", "system", path]).returncode == 0

        self._wait_for(is_in, f"launchd does not take {path}")

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + self._WAIT
        while not condition():
            if time.monotonic() > end:
                raise RefusedError(f"{what}, after {self._WAIT:g} s; see launchctl print-disabled system")
            time.sleep(0.5)


@dataclass(frozen=True)
class Host:
    """One inventory host on this machine, as the role wrote it into owner.json; several may be one machine."""

    directory: str
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.facts["host"])

    @property
    def services(self) -> list[dict[str, str]]:
        return list(self.facts["services"])

    def manager(self, wait: bool = True) -> Systemd | Launchd | Supervisor:
        """The manager of the services; systemd need not wait until they have started or stopped."""
        if self.facts["manager"] == "systemd":
            return Systemd(self.facts["scope"], wait)
        if self.facts["manager"] == "launchd":
            return Launchd()
        return Supervisor(self.facts["supervisor"])

    @property
    def marker(self) -> dict[str, Any] | None:
        path = os.path.join(self.directory, MARKER)
        try:
            with open(path, encoding="utf-8") as stream:
                return dict(json.load(stream))
        except FileNotFoundError:
            return None
        except ValueError:
            # Whoever made an unreadable one wants the worker to stay away.
            return {"by": "owner", "reason": f"{self.name} is paused ({path} cannot be read)"}

    def pause(self, by: str, reason: str, wait: bool = True) -> None:
        """Mark first: then nothing starts the services again behind our back. The text is shown by site.yml as well."""
        since = dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        marker = {"by": by, "since": since, "reason": f"{self.name} is {reason} since {since}"}
        handle, temporary = tempfile.mkstemp(dir=self.directory, prefix="." + MARKER)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(marker, stream, indent=2, sort_keys=True)
            stream.write("\n")
            stream.flush()
            os.fchmod(stream.fileno(), 0o644)
            os.fsync(stream.fileno())
        os.replace(temporary, os.path.join(self.directory, MARKER))
        self.stop(wait)

    def stop(self, wait: bool = True) -> None:
        for service in self.services:
            self.manager(wait).stop(service["name"])

    def resume(self, wait: bool = True) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.directory, MARKER))
        for service in self.services:
            self.manager(wait).start(service["name"])

    def open_at(self, moment: dt.datetime) -> bool:
        """Whether the host may lend at ``moment`` (local time). Without hours it always may."""
        windows = self.facts.get("windows") or []
        minute = (moment.weekday() * 24 + moment.hour) * 60 + moment.minute
        return not windows or any(start <= minute < end for start, end in windows)


def hosts_below(state_dir: str) -> list[Host]:
    """The hosts that the role set up on this machine, in order of their names."""
    found = []
    for path in sorted(glob.glob(os.path.join(glob.escape(state_dir), "*", "*", "owner.json"))):
        with open(path, encoding="utf-8") as stream:
            found.append(Host(os.path.dirname(path), json.load(stream)))
    return found


def clients(endpoint: str, table: str) -> list[str]:
    """Who is attached to a worker, by the text of /proc/net/tcp; the worker itself is not asked, as it may be busy."""
    address, port = endpoint.rsplit(":", 1)
    local = f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}:{int(port):04X}"
    found = []
    for line in table.splitlines()[1:]:
        words = line.split()
        if words[1] == local and words[3] == "01":  # established
            remote = int(words[2].split(":")[0], 16).to_bytes(4, sys.byteorder)
            found.append(socket.inet_ntoa(remote))
    return sorted(set(found))


def mac_clients(endpoint: str, table: str) -> list[str]:
    """The same by the text of netstat -an of a Mac, which ends an address with a dot and the port."""
    local = endpoint.replace(":", ".")
    rows = [line.split() for line in table.splitlines() if line.startswith("tcp4")]
    return sorted({row[4].rpartition(".")[0] for row in rows if row[3] == local and row[-1] == "ESTABLISHED"})


def attached(endpoints: Sequence[str]) -> dict[str, list[str]]:
    """Who is attached to each of the workers."""
    if sys.platform == "darwin" or not os.path.exists("/proc/net/tcp"):
        shown = run(["netstat", "-an", "-f", "inet", "-p", "tcp"]).stdout
        return {endpoint: mac_clients(endpoint, shown) for endpoint in endpoints}
    with open("/proc/net/tcp", encoding="utf-8") as stream:
        table = stream.read()
    return {endpoint: clients(endpoint, table) for endpoint in endpoints}


def describe(host: Host) -> list[str]:
    """The state of one host in lines for its owner."""
    marker = host.marker
    state = str(marker["reason"]) if marker else f"{host.name} lends"
    lines = [f"{state} (cluster {host.facts['cluster']})"]
    if host.facts.get("hours"):
        lines.append(f"  hours: {'; '.join(host.facts['hours'])}")
    users_of = attached([service["endpoint"] for service in host.services])
    for service in host.services:
        state = "running" if host.manager().running(service["name"]) else "not running"
        users = users_of[service["endpoint"]]
        in_use = f", in use by {', '.join(users)}" if users else ""
        lines.append(f"  {service['name']} on {service['endpoint']}: {state}{in_use}")
    return lines


def person() -> str:
    """Who asks, also through sudo."""
    return os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name


def pause(host: Host) -> str:
    """Take the machine back until resume."""
    marker = host.marker
    if marker and marker.get("by") == "owner":
        host.stop()
        return str(marker["reason"])
    host.pause("owner", f"paused by its owner ({person()})")
    return f"{host.name} is paused. The primary of cluster {host.facts['cluster']} waits until llama-worker resume."


def resume(host: Host) -> str:
    """Lend again; outside of the hours until they end next."""
    paused = host.marker is not None
    host.resume()
    return f"{host.name} " + ("lends again, and its primary comes back by itself." if paused else "was not paused.")


def keep_hours(host: Host, now: dt.datetime) -> str:
    """What the timer does when hours begin or end, and the boot: an owner's own pause stays as it is.

    Nothing is waited for: at boot the services are ordered after this.
    """
    marker = host.marker
    if host.open_at(now):
        if marker and marker.get("by") == "hours":
            host.resume(wait=False)
            return f"{host.name} lends, its hours begin."
    elif not marker:
        host.pause("hours", "outside of its hours (llama_worker_hours)", wait=False)
        return f"{host.name} is paused, its hours end."
    return f"{host.name}: nothing to change."


def chosen(state_dir: str, names: Sequence[str]) -> list[Host]:
    """The named hosts of this machine, or all of them."""
    hosts = hosts_below(state_dir)
    unknown = sorted(set(names) - {host.name for host in hosts})
    if unknown or not hosts:
        known = ", ".join(host.name for host in hosts) or "none"
        wanted = ", ".join(unknown) or "at all"
        raise RefusedError(f"no worker {wanted} on this machine (below {state_dir}); known: {known}")
    return [host for host in hosts if not names or host.name in names]


def act(command: str, action: str, hosts: Sequence[Host], arguments: Sequence[str]) -> list[str]:
    """Do what was asked; where the account may not, become root through sudo."""
    if action == "status":
        return [line for host in hosts for line in describe(host)]
    if not all(os.access(host.directory, os.W_OK) for host in hosts):
        if os.geteuid() == 0 or shutil.which("sudo") is None:
            raise RefusedError(f"{hosts[0].directory} cannot be written; run it as root")
        os.execvp("sudo", ["sudo", command, *arguments])
    if action == "hours":
        now = dt.datetime.now()
        return [keep_hours(host, now) for host in hosts]
    return [pause(host) if action == "pause" else resume(host) for host in hosts]


def main() -> int:
    state_dir, command, arguments = sys.argv[1], sys.argv[2], sys.argv[3:]
    parser = argparse.ArgumentParser(prog="llama-worker", description="Take this machine back from its fleet.")
    parser.add_argument(
        "action",
        choices=["pause", "resume", "status", "hours"],
        help="pause: stop lending until resume, reboots included. resume: lend again. status: show what lends, and to "
        "whom. hours: do what the hours ask for now (a timer calls this).",
    )
    parser.add_argument("host", nargs="*", help="name of a worker on this machine; all of them if none is given")
    options = parser.parse_args(arguments)
    try:
        lines = act(command, options.action, chosen(state_dir, options.host), arguments)
    except (RefusedError, OSError) as error:
        sys.stderr.write(f"llama-worker: {error}\n")
        return 1
    sys.stdout.write("".join(line + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
