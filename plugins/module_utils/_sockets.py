# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who holds a TCP port and who is connected to it, read from the socket table: no byte is sent to a busy worker.

Linux: /proc/net/tcp, /proc/net/tcp6 and /proc/<pid>. Elsewhere (macOS): the output of lsof and ps.
Works without root: then the process behind another user's socket is unknown (None), its user is not.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Runner

LISTEN = "LISTEN"
ESTABLISHED = "ESTABLISHED"
CLOSE_WAIT = "CLOSE_WAIT"

# include/net/tcp_states.h of Linux, as /proc/net/tcp prints them.
_STATES = {
    "01": ESTABLISHED,
    "02": "SYN_SENT",
    "03": "SYN_RECV",
    "04": "FIN_WAIT1",
    "05": "FIN_WAIT2",
    "06": "TIME_WAIT",
    "07": "CLOSE",
    "08": CLOSE_WAIT,
    "09": "LAST_ACK",
    "0A": LISTEN,
    "0B": "CLOSING",
}
# What a socket that is bound to every address shows.
_ANY_V4, _ANY_V6 = str(ipaddress.IPv4Address(0)), str(ipaddress.IPv6Address(0))
_TABLE_LIMIT = 64 << 20  # about 400,000 sockets
_HIDDEN = "********"
# llama-server reads --api_key as --api-key (common/arg.cpp).
_HIDDEN_NAMES = r"(?:(?:api|private|preshared)[-_]?key|token|secret|password|passwd)"
_SECRET_OPTION = re.compile(rf"^-{{1,2}}(hft|[\w-]*{_HIDDEN_NAMES}s?)$", re.IGNORECASE)
_SECRET_ASSIGNMENT = re.compile(rf"^([\w-]*{_HIDDEN_NAMES})=", re.IGNORECASE)
_BEARER = re.compile(r"(bearer\s+|://[^/@\s]*:)[^\s@]+", re.IGNORECASE)


class SocketError(FleetError):
    """The socket table of this host cannot be read."""


@dataclass(frozen=True)
class Socket:
    """One row of the table. Addresses are literals; an IPv4 address mapped into IPv6 appears as IPv4.

    `inode` is 0 for a connection that the listening program has not accepted yet (Linux), None where unknown (lsof).
    """

    state: str
    local_address: str
    local_port: int
    remote_address: str
    remote_port: int
    inode: int | None = None
    uid: int | None = None
    pid: int | None = None

    @property
    def waiting(self) -> bool:
        """True for a connection in the accept queue: nobody serves it yet."""
        return self.inode == 0


@dataclass(frozen=True)
class Process:
    """A process as an operator wants to see it; every field but the pid may be unknown (None).

    `started_at` is "<boot id>:<start ticks>" (Linux): equal strings mean the very same process.
    `unit` is the systemd service it runs in, `supervisor_program` the supervisor program whose direct child it is.
    """

    pid: int
    exe: str | None = None
    exe_deleted: bool | None = None
    cmdline: tuple[str, ...] | None = None
    user: str | None = None
    started_at: str | None = None
    unit: str | None = None
    supervisor_program: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a module's result."""
        return {
            "pid": self.pid,
            "exe": self.exe,
            "exe_deleted": self.exe_deleted,
            "cmdline": None if self.cmdline is None else list(self.cmdline),
            "user": self.user,
            "started_at": self.started_at,
            "unit": self.unit,
            "supervisor_program": self.supervisor_program,
        }


def parse_proc_net(text: str) -> list[Socket]:
    """Rows of /proc/net/tcp or /proc/net/tcp6 (addresses are hex words in host order, little-endian here)."""
    rows = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        # The last line of a table that was cut off by the read limit may be incomplete.
        if len(fields) < 10 or fields[3] not in _STATES:
            continue
        try:
            local, remote = _hex_endpoint(fields[1]), _hex_endpoint(fields[2])
        except ValueError:
            continue  # no row of this kernel's
        rows.append(Socket(_STATES[fields[3]], *local, *remote, inode=_whole(fields[9]), uid=_whole(fields[7])))
    return rows


def parse_lsof(text: str) -> list[Socket]:
    """Rows of `lsof -nP -iTCP -FpufnT` (fields: p pid, u uid, f descriptor, n name, TST= state)."""
    rows: list[Socket] = []
    pid = uid = None
    name = ""
    for line in text.splitlines():
        kind, value = line[:1], line[1:]
        if kind == "p":
            pid, uid = _whole(value), None
        elif kind == "u":
            uid = _whole(value)
        elif kind == "f":
            name = ""
        elif kind == "n":
            name = value
        elif kind == "T" and value.startswith("ST=") and name:
            local, _arrow, remote = name.partition("->")
            ends = (*_lsof_endpoint(local), *(_lsof_endpoint(remote) if remote else (_ANY_V4, 0)))
            rows.append(Socket(value[3:], *ends, uid=uid, pid=pid))
    return rows


def read_table(runner: Runner) -> list[Socket]:
    """All TCP sockets of this host (of this network namespace). Raises SocketError where they cannot be seen."""
    texts = [runner.read(f"/proc/net/{name}", _TABLE_LIMIT) for name in ("tcp", "tcp6")]
    if texts[0] is not None:
        return [row for text in texts if text is not None for row in parse_proc_net(text)]
    lsof = runner.which("lsof")
    if lsof is None:
        raise SocketError("cannot see who is connected: no /proc/net/tcp and no lsof on this host; install lsof")
    result = runner.run([lsof, "-nP", "-iTCP", "-FpufnT"])
    # lsof ends with 1 both when nothing matched and when it could not look at some process.
    if result.rc not in (0, 1):
        raise SocketError(f"cannot see who is connected: {lsof} ended with {result.rc}: {result.stderr.strip()[:200]}")
    return parse_lsof(result.stdout)


def listeners(table: Iterable[Socket], port: int, address: str | None = None) -> list[Socket]:
    """Listening sockets of a port; with an address only those that answer on it (bound to it or to every address)."""
    return [
        row
        for row in table
        if row.state == LISTEN
        and row.local_port == port
        and (address is None or row.local_address in (address, _ANY_V4, _ANY_V6))
    ]


def clients(table: Iterable[Socket], address: str, port: int) -> list[Socket]:
    """Connections to address:port, seen from the server's end: the one being served first, then those that wait.

    On the server's own host these are the accepted (or waiting) connections, CLOSE_WAIT included: the client has gone,
    the server has not noticed yet. A server bound to every address is one server: its clients on any address count.
    A connection made from this host to that endpoint counts as well; where both ends are on this host it is one
    connection and appears once.
    """
    rows = list(table)
    everywhere = any(row.local_address in (_ANY_V4, _ANY_V6) for row in listeners(rows, port, address))
    served = [
        row
        for row in rows
        if row.state in (ESTABLISHED, CLOSE_WAIT)
        and row.local_port == port
        and (everywhere or row.local_address == address)
    ]
    known = {(row.remote_address, row.remote_port) for row in served}
    for row in rows:
        to_it = (row.remote_address, row.remote_port) == (address, port) and row.state == ESTABLISHED
        if to_it and (row.local_address, row.local_port) not in known:
            # The inode and pid of this row are the client's, not the server's: drop them.
            served.append(Socket(row.state, row.remote_address, row.remote_port, row.local_address, row.local_port))
    return sorted(served, key=lambda row: (row.waiting, row.state != ESTABLISHED))


def local_ends(table: Iterable[Socket], address: str, port: int) -> list[str]:
    """This host's own ends ("ip:port") of live connections to address:port: what the primary shows of itself."""
    return sorted(
        f"{row.local_address}:{row.local_port}"
        for row in table
        if (row.remote_address, row.remote_port) == (address, port) and row.state == ESTABLISHED
    )


def pids_of(runner: Runner, inodes: Iterable[int]) -> dict[int, int]:
    """Socket inode -> pid, as far as /proc/*/fd may be read. A shared socket goes to the lowest pid: the parent."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes if inode}
    found: dict[int, int] = {}
    if not wanted:
        return found
    for pid in sorted(int(name) for name in runner.listdir("/proc") if name.isdigit()):
        for descriptor in runner.listdir(f"/proc/{pid}/fd"):
            inode = wanted.get(runner.readlink(f"/proc/{pid}/fd/{descriptor}") or "")
            if inode is not None:
                found.setdefault(inode, pid)
        if len(found) == len(wanted):
            break
    return found


def with_pids(runner: Runner, rows: Sequence[Socket]) -> list[Socket]:
    """The same rows with `pid` filled in where it can be known."""
    known = pids_of(runner, [row.inode for row in rows if row.pid is None and row.inode])
    return [row if row.pid is not None else replace(row, pid=known.get(row.inode or 0)) for row in rows]


def describe_process(runner: Runner, pid: int) -> Process | None:
    """What is known about a process; None when it does not exist (any more) or is a zombie."""
    stat = runner.read(f"/proc/{pid}/stat")
    if stat is None:
        return None if runner.exists("/proc/self/stat") else _describe_with_ps(runner, pid)
    # The second field is the name in parentheses and may hold blanks and parentheses itself.
    fields = stat[stat.rfind(")") + 1 :].split()
    if len(fields) < 20 or fields[0] in ("Z", "X"):
        return None
    exe = runner.readlink(f"/proc/{pid}/exe")
    deleted = " (deleted)"
    raw = runner.read(f"/proc/{pid}/cmdline")
    boot_id = (runner.read("/proc/sys/kernel/random/boot_id") or "").strip()
    uid = re.search(r"^Uid:\s+(\d+)", runner.read(f"/proc/{pid}/status") or "", re.MULTILINE)
    return Process(
        pid=pid,
        exe=exe[: -len(deleted)] if exe and exe.endswith(deleted) else exe,
        exe_deleted=None if exe is None else exe.endswith(deleted),
        cmdline=None if raw is None else redact(raw.rstrip("\0").split("\0") if raw else []),
        user=user_name(int(uid.group(1))) if uid else None,
        started_at=f"{boot_id}:{fields[19]}" if boot_id else None,
        unit=unit_of_cgroup(runner.read(f"/proc/{pid}/cgroup") or ""),
        supervisor_program=_supervisor_program(runner, pid, int(fields[1])),
    )


def unit_of_cgroup(text: str) -> str | None:
    """The innermost systemd service in the text of /proc/<pid>/cgroup; None outside a service (a login, a container).

    user@1000.service is the manager of a user, not a service of anybody's making: only what lies below it counts.
    """
    for line in text.splitlines():
        hierarchy = line.split(":", 2)
        if len(hierarchy) != 3 or not (hierarchy[1] == "" or hierarchy[1] == "name=systemd"):
            continue
        parts = [part for part in hierarchy[2].split("/") if part.endswith(".service") and not part.startswith("user@")]
        if parts:
            return re.sub(r"\\x([0-9a-f]{2})", lambda found: chr(int(found.group(1), 16)), parts[-1])
    return None


def redact(arguments: Sequence[str]) -> tuple[str, ...]:
    """The command line without the values of --api-key, --hf-token and the like (in both spellings), bearer tokens and
    passwords in URLs. Names of files that hold a secret (--api-key-file) stay."""
    shown: list[str] = []
    hide = False
    for argument in arguments:
        name, equals, _value = argument.partition("=")
        if hide:
            shown.append(_HIDDEN)
            hide = False
        elif equals and (_SECRET_OPTION.match(name) or _SECRET_ASSIGNMENT.match(argument)):
            shown.append(f"{name}={_HIDDEN}")
        else:
            hide = bool(_SECRET_OPTION.match(argument))
            shown.append(_BEARER.sub(lambda found: found.group(1) + _HIDDEN, argument))
    return tuple(shown)


def port_owners(runner: Runner, ports: Sequence[int]) -> list[dict[str, Any]]:
    """Who keeps each port from being bound: [{port, kind, address, remote, uid_user, ...the fields of Process}].

    `kind` is "listener", or "connection" for an outgoing connection that happens to use the port as its local end (only
    looked for where nobody listens): that makes a worker's bind fail as well, which it reports with exit status 0
    (measured on b11434; ports from 32768 to 60999 are handed out for outgoing connections).
    """
    table = read_table(runner)
    chosen: list[tuple[str, Socket]] = []
    for port in ports:
        listening = listeners(table, port)
        kind = "listener" if listening else "connection"
        # A connection in TIME_WAIT does not hinder a server that sets SO_REUSEADDR, as ggml-rpc-server does.
        chosen.extend(
            (kind, row)
            for row in listening or [row for row in table if row.local_port == port and row.state != "TIME_WAIT"]
        )
    located = with_pids(runner, [row for _kind, row in chosen])
    owners = []
    for (kind, _row), row in zip(chosen, located):
        process = None if row.pid is None else describe_process(runner, row.pid)
        facts = Process(pid=0).to_dict() if process is None else process.to_dict()
        facts["pid"] = row.pid
        facts["user"] = facts["user"] or (None if row.uid is None else user_name(row.uid))
        remote = None if kind == "listener" else f"{row.remote_address}:{row.remote_port}"
        owners.append(dict(facts, port=row.local_port, kind=kind, address=row.local_address, remote=remote))
    return owners


def executable_name(exe: str | None) -> str:
    """File name of an executable, "" when unknown."""
    return os.path.basename(exe) if exe else ""


def user_name(uid: int) -> str:
    """Name of a user, or the number as text where the number has no name here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _hex_endpoint(field: str) -> tuple[str, int]:
    digits, _colon, port = field.partition(":")
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    return _literal(ipaddress.ip_address(b"".join(words))), int(port, 16)


def _literal(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _whole(text: str) -> int | None:
    return int(text) if 0 < len(text) < 20 and text.isascii() and text.isdecimal() else None


def _lsof_endpoint(text: str) -> tuple[str, int]:
    address, _colon, port = text.rpartition(":")
    if address == "*":
        return _ANY_V4, _whole(port) or 0
    try:
        # The zone of a link-local address (fe80::1%en0) says nothing here.
        literal = _literal(ipaddress.ip_address(address.strip("[]").split("%")[0]))
    except ValueError:
        literal = address
    return literal, _whole(port) or 0


def _supervisor_program(runner: Runner, pid: int, parent: int) -> str | None:
    # Every descendant inherits SUPERVISOR_PROCESS_NAME (a login through an sshd that supervisor runs, too): only a
    # direct child of supervisord is a program of it, or one whose supervisord was killed, which process 1 adopts.
    if parent != 1 and "supervisord" not in (runner.read(f"/proc/{parent}/cmdline") or ""):
        return None
    environment = dict(
        entry.split("=", 1) for entry in (runner.read(f"/proc/{pid}/environ") or "").split("\0") if "=" in entry
    )
    name, group = environment.get("SUPERVISOR_PROCESS_NAME"), environment.get("SUPERVISOR_GROUP_NAME")
    return f"{group}:{name}" if name and group and group != name else name


def _describe_with_ps(runner: Runner, pid: int) -> Process | None:
    head = runner.run(["ps", "-ww", "-p", str(pid), "-o", "user=", "-o", "lstart=", "-o", "comm="])
    fields = head.stdout.split(None, 6)
    if head.rc != 0 or len(fields) < 7:
        return None
    arguments = runner.run(["ps", "-ww", "-p", str(pid), "-o", "args="])
    boot = runner.run(["sysctl", "-n", "kern.bootsessionuuid"])
    return Process(
        pid=pid,
        exe=fields[6].strip(),
        cmdline=redact(arguments.stdout.split()) if arguments.rc == 0 else None,
        user=fields[0],
        started_at=f"{boot.stdout.strip()}:{' '.join(fields[1:6])}" if boot.rc == 0 else None,
    )
