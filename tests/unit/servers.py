# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Small servers that behave like workers, like broken ones and like strangers; and a way to call a module in a test."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import random
import socket
import struct
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from ansible.module_utils.testing import patch_module_args

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def free_port() -> int:
    """A port of 127.0.0.1 that nobody holds, below the range that outgoing connections are given (32768 and up)."""
    while True:
        port = random.randint(20000, 32000)
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


@contextlib.contextmanager
def serve(talk: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that gives each connection to `talk`, in a thread of its own, and then closes it; yields its port."""
    stop = threading.Event()
    connections: list[socket.socket] = []

    def attend(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            talk(connection)

    def accept(listener: socket.socket) -> None:
        while not stop.is_set():
            try:
                connection, _peer = listener.accept()
            except socket.timeout:
                continue
            connections.append(connection)
            threading.Thread(target=attend, args=(connection,), daemon=True).start()

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.settimeout(0.05)
        listener.bind(("127.0.0.1", free_port()))
        listener.listen(8)
        thread = threading.Thread(target=accept, args=(listener,), daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            stop.set()
            thread.join()
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def silent(connection: socket.socket) -> None:
    """Accepts, reads, and never answers."""
    while connection.recv(4096):
        pass


def closing(connection: socket.socket) -> None:
    """Reads what comes first and closes."""
    connection.recv(4096)


def web(connection: socket.socket) -> None:
    """Answers whatever comes as a web server answers nonsense."""
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def patient_web(connection: socket.socket) -> None:
    """A web server that waits for the end of the request line, which never comes."""
    while b"\r\n" not in connection.recv(4096):
        pass


def dripping(connection: socket.socket) -> None:
    """A byte now and then: each single wait is short, the whole never ends."""
    connection.recv(4096)
    for byte in struct.pack("<Q", 28) + bytes(28):
        connection.sendall(bytes([byte]))
        time.sleep(0.2)


def boasting(connection: socket.socket) -> None:
    """Claims an answer of 2^62 bytes."""
    connection.recv(4096)
    connection.sendall(struct.pack("<Q", 1 << 62) + bytes(64))


def api(
    text: str = " Paris.\n\nThe United States",
    tokens: Sequence[int] = (1, 2, 3, 4, 5),
    loading: int = 0,
    key: str | None = None,
    status: int = 200,
) -> Callable[[socket.socket], None]:
    """A llama-server that first says `loading` times that it loads and then answers every completion with `text`."""
    left = [loading]

    def talk(connection: socket.socket) -> None:
        head, _blank, rest = _until(connection, b"\r\n\r\n").partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _colon, value in (line.partition(":") for line in lines[1:])}
        _exactly(connection, int(headers.get("content-length", 0)) - len(rest))
        if lines[0].startswith("GET /health"):
            left[0] -= 1
            reply = (503, {"error": {"message": "Loading model"}}) if left[0] >= 0 else (200, {"status": "ok"})
        elif key is not None and headers.get("authorization") != f"Bearer {key}":
            reply = (401, {"error": {"message": "Invalid API Key"}})
        else:
            timings = {"predicted_per_second": 50.5, "prompt_per_second": 100.5}
            answer: dict[str, Any] = {"content": text, "tokens": list(tokens), "timings": timings}
            answer["tokens_predicted"] = len(tokens)
            reply = (status, answer if status == 200 else {"error": {"message": "the model is on strike"}})
        body = json.dumps(reply[1]).encode()
        connection.sendall(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (reply[0], len(body), body))

    return talk


def healthy_only(completion: Callable[[socket.socket], None]) -> Callable[[socket.socket], None]:
    """A llama-server whose /health is fine, and whose completions go as `completion` does, the question read."""

    def talk(connection: socket.socket) -> None:
        if connection.recv(4096).startswith(b"GET"):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        else:
            completion(connection)

    return talk


def dripping_web(connection: socket.socket) -> None:
    """Promises an answer of 100 bytes and sends one byte now and then."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
    for _count in range(100):
        connection.sendall(b" ")
        time.sleep(0.2)


def broken_web(connection: socket.socket) -> None:
    """Promises an answer of 100 bytes and ends after the first: a llama-server that dies while it answers."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")


def worker(
    version: tuple[int, int, int], devices: Sequence[tuple[int, int]] = (), count: int | None = None
) -> Callable[[socket.socket], None]:
    """A worker of protocol 4.x and up, with (free, total) bytes per device; `count` lies about their number."""

    def talk(connection: socket.socket) -> None:
        while True:
            command, payload = _request(connection)
            if command == 14:
                if len(payload) != 24:
                    return
                _answer(connection, bytes([*version, 0]) + bytes(24))
            elif command == 15:
                _answer(connection, struct.pack("<I", len(devices) if count is None else count))
            elif command == 11:
                _answer(connection, struct.pack("<QQ", *devices[struct.unpack("<I", payload)[0]]))
            else:
                return

    return talk


def crashing_worker(connection: socket.socket) -> None:
    """A worker that dies right after a proper HELLO."""
    _request(connection)
    _answer(connection, bytes([7, 0, 0, 0]) + bytes(24))


def old_worker(version: tuple[int, int, int]) -> Callable[[socket.socket], None]:
    """A worker of protocol 2.x or 3.x: an empty HELLO, an answer of three bytes; anything else closes."""

    def talk(connection: socket.socket) -> None:
        command, payload = _request(connection)
        if command == 14 and not payload:
            _answer(connection, bytes(version))
            connection.recv(1)

    return talk


def _request(connection: socket.socket) -> tuple[int, bytes]:
    command, size = struct.unpack("<BQ", _exactly(connection, 9))
    return command, _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError
        data += part
    return data


def _until(connection: socket.socket, end: bytes) -> bytes:
    data = b""
    while end not in data:
        part = connection.recv(4096)
        if not part:
            raise ConnectionError
        data += part
    return data


def _answer(connection: socket.socket, payload: bytes) -> None:
    connection.sendall(struct.pack("<Q", len(payload)) + payload)


@contextlib.contextmanager
def program(argv: Sequence[object], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A real program, ended by its own pid whatever happens in the test."""
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([str(item) for item in argv], **{**quiet, **options})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_port(port: int, seconds: float = 10.0) -> None:
    """Wait until something accepts connections on a port of 127.0.0.1 (a bare connect does not disturb a worker)."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
        else:
            return


def wait_until_healthy(port: int, seconds: float = 60.0) -> None:
    """Wait until llama-server on a port of 127.0.0.1 says that it has loaded its model."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)
    pytest.fail(f"llama-server on port {port} did not get ready within {seconds:g} s")


def run_module(main: Callable[[], None], options: dict[str, Any], check_mode: bool = False) -> dict[str, Any]:
    """What a module prints when it is called with these options; `failed` is always present."""
    arguments = dict(options, _ansible_check_mode=check_mode, _ansible_diff=True)
    output = io.StringIO()
    with patch_module_args(arguments), contextlib.redirect_stdout(output), pytest.raises(SystemExit):
        main()
    result: dict[str, Any] = json.loads(output.getvalue())
    result.setdefault("failed", False)
    return result
