# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a worker answers over the wire: HELLO, DEVICE_COUNT and GET_DEVICE_MEMORY under one deadline.

A ggml-rpc-server serves one client at a time and has no time-outs: whoever speaks to a busy one waits for ever, and a
HELLO that was given up kills a worker later (it answers a dead socket: SIGPIPE; measured on b11434). So the socket
table is read first, and nothing is sent while anybody is connected. Framing (ggml-rpc.cpp of b11434): request =
command u8, size u64, payload; answer = size u64, payload; little-endian.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ansible_collections.llamafleet.rpc.plugins.module_utils import _sockets
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Runner

_GET_DEVICE_MEMORY, _HELLO, _DEVICE_COUNT = 11, 14, 15
_HELLO_CAPS = 24  # bytes of connection capabilities in a HELLO of protocol 4.0.0 and later; all zero = plain TCP
_HELLO_ANSWER, _OLD_HELLO_ANSWER = 4 + _HELLO_CAPS, 3
_DEVICES_LIMIT = 256  # a primary can use 15; a bigger claim is not a worker's
_SETTLE = 1.0  # seconds that a worker gets to notice that its last client has gone (measured: milliseconds)
# Python 3.9 has a socket.timeout of its own; from 3.10 on it is TimeoutError.
_TIMEOUTS = (TimeoutError, socket.timeout)

# Errors of connect() that mean "no way there". ENOKEY and EDESTADDRREQ come from a WireGuard interface without a peer
# (or without its endpoint) for the address; EPERM and EACCES from a packet filter on this side.
_UNREACHABLE = {
    errno.EHOSTUNREACH: "no route to the host, or a firewall there that rejects",
    errno.ENETUNREACH: "no route to the network",
    errno.ENETDOWN: "the network interface is down",
    errno.EADDRNOTAVAIL: "this host has no address to send from",
    errno.EPERM: "a packet filter on this host forbids it",
    errno.EACCES: "a packet filter on this host forbids it",
    errno.EDESTADDRREQ: "the WireGuard peer has no endpoint",
    126: "no WireGuard peer has that address",  # ENOKEY of Linux; absent from errno on other systems
}


class WireError(FleetError):
    """The question itself is wrong: an endpoint that is no IPv4:port, a protocol that is no x.y.z."""


@dataclass(frozen=True)
class Probe:
    """What is known about one endpoint. `status` is one of ok, busy_ours, busy_stale, busy_foreign, refused, timeout,
    unreachable, not_rpc, incompatible; `client` "ip:port" of the connection it serves; `protocol` "7.0.0" or None;
    `devices` [{index, total, free}] in bytes, as the worker claims them, free at most total (a CPU worker claims free
    = total: never plan with that); `latency_ms` the round trip of the HELLO; `hint` what to do next, or "".
    """

    endpoint: str
    status: str
    client: str | None = None
    protocol: str | None = None
    devices: tuple[dict[str, int], ...] = ()
    latency_ms: float | None = None
    hint: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a module's result."""
        return {
            "endpoint": self.endpoint,
            "status": self.status,
            "client": self.client,
            "protocol": self.protocol,
            "devices": [dict(device) for device in self.devices],
            "latency_ms": self.latency_ms,
            "hint": self.hint,
        }


class _PeerClosedError(Exception):
    """The peer ended the connection."""


class _NotRpcError(Exception):
    """The peer answered with something that is not the protocol."""


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left; raises TimeoutError when there are none."""
        seconds = self.end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        return seconds


def parse_endpoint(text: str) -> tuple[str, int]:
    """("10.0.0.2", 50052) of "10.0.0.2:50052"; raises WireError for anything that a worker cannot be bound to."""
    host, colon, port = text.rpartition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port):
        raise WireError(f"endpoint {text!r}: give an IPv4 address and a port, such as 10.0.0.2:18711")
    return check_address(host, int(port))


def check_address(host: str, port: int) -> tuple[str, int]:
    """The same pair, checked: a dotted IPv4 address that names one host, and a port from 1 to 65535."""
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        raise WireError(
            f"host {host!r}: not an IPv4 address; ggml-rpc-server takes neither names nor IPv6 (it exits with status 0)"
        ) from None
    if address.is_unspecified or address.is_multicast:
        raise WireError(f"host {host!r}: give the address that the worker answers on, not one for binding to all")
    if not 1 <= port <= 65535:
        raise WireError(f"port {port}: give a number from 1 to 65535")
    return host, port


def check_protocol(text: str) -> str:
    """A protocol version as x.y.z, or WireError."""
    if not re.fullmatch(r"\d{1,3}\.\d{1,3}\.\d{1,3}", text):
        raise WireError(f"expected_protocol {text!r}: give three numbers, such as 7.0.0")
    return text


def probe(
    runner: Runner,
    host: str,
    port: int,
    timeout: float,
    expected_protocol: str | None = None,
    expected_clients: Sequence[str] = (),
    primary_sockets: Sequence[str] | None = None,
) -> Probe:
    """Ask the worker at host:port what it is, within `timeout` seconds in all; to be run on the worker's own host.

    Never speaks while a client is attached. Then the status is busy_ours when the client's address is one of
    `expected_clients` (and, where `primary_sockets` is given, the very "ip:port" is in it), busy_stale when the address
    fits but the primary does not show that connection (or the client has gone and the worker has not noticed), and
    busy_foreign otherwise. `expected_protocol` is compared in all three numbers: the patch encodes the numbering of the
    operations, though llama.cpp itself ignores it. Raises WireError for a wrong question and SocketError where the
    socket table cannot be read; every failure of the worker is a status.
    """
    host, port = check_address(host, port)
    if expected_protocol is not None:
        check_protocol(expected_protocol)
    endpoint = f"{host}:{port}"
    deadline = _Deadline(timeout)
    attached = _attached(runner, host, port, timeout)
    if attached:
        return _busy(endpoint, attached, expected_clients, primary_sockets)
    try:
        try:
            return _ask(endpoint, host, port, deadline, expected_protocol, old=False)
        except _PeerClosedError:
            # A server of protocol 2.x or 3.x closes on a HELLO that has a payload; a new one closes on an empty HELLO.
            return _ask(endpoint, host, port, deadline, expected_protocol, old=True)
    except (_PeerClosedError, _NotRpcError) as error:
        return Probe(endpoint, "not_rpc", hint=_not_rpc_hint(endpoint, str(error)))
    except TimeoutError:
        return Probe(endpoint, "timeout", hint=_silent_hint(endpoint, timeout))
    except _UnconnectedError as failure:
        return failure.probe


def connect_only(runner: Runner, host: str, port: int, timeout: float) -> Probe:
    """Whether the port accepts a connection from here: connect and close, nothing sent.

    Where this host is connected to it already, the status is busy_ours and no attempt is made: a busy worker leaves
    each one in its queue of two until its client goes, and the third times out (listen(fd, 1), measured on b11434).
    """
    host, port = check_address(host, port)
    if _sockets.local_ends(_sockets.read_table(runner), host, port):
        return Probe(f"{host}:{port}", "busy_ours")
    start = time.monotonic()
    try:
        _connect(f"{host}:{port}", host, port, _Deadline(timeout)).close()
    except _UnconnectedError as failure:
        return failure.probe
    return Probe(f"{host}:{port}", "ok", latency_ms=_milliseconds(start))


def round_trip_ms(runner: Runner, endpoint: str, tries: int = 5) -> float | None:
    """The quickest of some connections to an idle worker, in ms: one round trip each. None where it takes none."""
    host, _colon, port = endpoint.rpartition(":")
    answers = [connect_only(runner, host, int(port), 5.0) for _number in range(tries)]
    return min((one.latency_ms for one in answers if one.status == "ok" and one.latency_ms is not None), default=None)


class _UnconnectedError(Exception):
    """connect() failed; carries the finished answer."""

    def __init__(self, answer: Probe) -> None:
        super().__init__(answer.hint)
        self.probe = answer


def _attached(runner: Runner, host: str, port: int, timeout: float) -> list[_sockets.Socket]:
    settled = time.monotonic() + min(_SETTLE, timeout / 2)
    while True:
        rows = _sockets.clients(_sockets.read_table(runner), host, port)
        if not rows or rows[0].state != _sockets.CLOSE_WAIT or time.monotonic() >= settled:
            return rows
        time.sleep(0.05)


def _busy(
    endpoint: str, attached: Sequence[_sockets.Socket], expected: Sequence[str], primary_sockets: Sequence[str] | None
) -> Probe:
    served = attached[0]
    client = f"{served.remote_address}:{served.remote_port}"
    queue = f" {len(attached) - 1} more connection(s) wait behind it." if len(attached) > 1 else ""
    if served.remote_address not in expected:
        whose = f"not one of {', '.join(expected)}" if expected else "and no expected client was named"
        hint = (
            f"{endpoint} serves {client}, {whose}. One worker serves one primary: end that client, or use another port."
        )
        return Probe(endpoint, "busy_foreign", client, hint=hint + queue)
    gone = served.state == _sockets.CLOSE_WAIT
    if gone or (primary_sockets is not None and client not in primary_sockets):
        why = "the client has closed it" if gone else "the primary does not show its other end"
        hint = f"{endpoint} still holds the connection of {client}, but {why}: restart the worker, then its primary."
        return Probe(endpoint, "busy_stale", client, hint=hint + queue)
    return Probe(endpoint, "busy_ours", client, hint=queue.strip())


def _connect(endpoint: str, host: str, port: int, deadline: _Deadline) -> socket.socket:
    try:
        return socket.create_connection((host, port), timeout=deadline.left())
    except ConnectionRefusedError:
        hint = (
            f"nothing listens on {endpoint}: the worker is stopped, still starting, or starts and ends again and again "
            "(it ends with status 0 for an unknown flag, an address this host does not have yet, a taken port). "
            "Read its log, look for a restart loop, ask who holds the port."
        )
        raise _UnconnectedError(Probe(endpoint, "refused", hint=hint)) from None
    except _TIMEOUTS:
        hint = (
            f"{endpoint} does not answer connection attempts: a firewall drops them, the tunnel is down (no recent "
            "handshake), the host is off, or more clients than its queue holds wait for the worker."
        )
        raise _UnconnectedError(Probe(endpoint, "timeout", hint=hint)) from None
    except OSError as error:
        why = _UNREACHABLE.get(error.errno or 0, error.strerror or str(error))
        hint = f"{endpoint} cannot be reached from here: {why}. Check the route, the mesh interface and its peers."
        raise _UnconnectedError(Probe(endpoint, "unreachable", hint=hint)) from None


def _ask(endpoint: str, host: str, port: int, deadline: _Deadline, expected: str | None, old: bool) -> Probe:
    with _connect(endpoint, host, port, deadline) as peer:
        start = time.monotonic()
        payload = b"" if old else bytes(_HELLO_CAPS)
        answer = _call(peer, deadline, _HELLO, payload, (_OLD_HELLO_ANSWER, _HELLO_ANSWER))
        latency = _milliseconds(start)
        protocol = "{}.{}.{}".format(*answer[:3])
        if len(answer) == _OLD_HELLO_ANSWER or answer[0] < 4:
            hint = (
                f"{endpoint} speaks protocol {protocol}, of a llama.cpp from before May 2026"
                f"{'' if expected is None else f'; expected {expected}'}. {_SAME_BUILD}"
            )
            return Probe(endpoint, "incompatible", None, protocol, (), latency, hint)
        if expected is not None and protocol != expected:
            hint = f"{endpoint} speaks protocol {protocol}, expected {expected}. {_SAME_BUILD}"
            return Probe(endpoint, "incompatible", None, protocol, (), latency, hint)
        try:
            devices = _devices(peer, deadline)
        except _PeerClosedError:
            hint = f"{endpoint} answered HELLO and then hung up: the worker crashed or was stopped; read its log."
            return Probe(endpoint, "refused", None, protocol, (), latency, hint)
        return Probe(endpoint, "ok", None, protocol, devices, latency)


_SAME_BUILD = (
    "All machines of a fleet run one build. If the files are the right ones, the running process is older than they "
    "are: restart the workers first, then the primary."
)


def _devices(peer: socket.socket, deadline: _Deadline) -> tuple[dict[str, int], ...]:
    (count,) = struct.unpack("<I", _call(peer, deadline, _DEVICE_COUNT, b"", (4,)))
    if count > _DEVICES_LIMIT:
        raise _NotRpcError(f"it claims {count} devices")
    devices = []
    for index in range(count):
        answer = _call(peer, deadline, _GET_DEVICE_MEMORY, struct.pack("<I", index), (16,))
        free, total = struct.unpack("<QQ", answer)
        # A driver may take the two from different sources: free is never above the total (B1-09).
        devices.append({"index": index, "total": total, "free": min(free, total)})
    return tuple(devices)


def _call(peer: socket.socket, deadline: _Deadline, command: int, payload: bytes, sizes: Sequence[int]) -> bytes:
    """Send one command and return its answer, whose size must be one of `sizes`: a claim of anything else is refused
    before a byte of it is read."""
    try:
        peer.settimeout(deadline.left())
        peer.sendall(struct.pack("<BQ", command, len(payload)) + payload)
        head = _receive(peer, deadline, 8)
        (size,) = struct.unpack("<Q", head)
        if size not in sizes:
            if head.startswith(b"HTTP"):
                raise _NotRpcError("it answers in HTTP")
            raise _NotRpcError(f"it answers command {command} with a message of {size} bytes")
        return _receive(peer, deadline, int(size))
    except _TIMEOUTS:
        raise TimeoutError from None
    except OSError:
        raise _PeerClosedError("it closes the connection on HELLO") from None


def _receive(peer: socket.socket, deadline: _Deadline, size: int) -> bytes:
    data = b""
    while len(data) < size:
        peer.settimeout(deadline.left())
        part = peer.recv(size - len(data))
        if not part:
            if data.startswith(b"HTTP"):
                raise _NotRpcError("it answers in HTTP")
            raise _PeerClosedError("it closes the connection on HELLO")
        data += part
    return data


def _not_rpc_hint(endpoint: str, why: str) -> str:
    return (
        f"{endpoint} is not a worker of this protocol: {why}. Another program holds the port (ask who), or the worker "
        "is of a llama.cpp from before April 2025. Free the port or choose another one."
    )


def _silent_hint(endpoint: str, timeout: float) -> str:
    return (
        f"{endpoint} accepts connections but did not answer within {timeout:g} s: another program holds the port, the "
        "worker is frozen, or a client that this host's socket table does not show keeps it busy. Look at the process "
        "behind the port, then restart the worker and its primary."
    )


def _milliseconds(start: float) -> float:
    return round((time.monotonic() - start) * 1000, 2)
