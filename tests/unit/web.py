# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A web server over a directory, with and without byte ranges, and odd in the ways that servers of models are."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Server:
    """A web server over one directory that counts what it hands out, and may be odd.

    ``cut``: most bytes of an answer, whatever was promised; ``coding``: its Content-Encoding; ``store``: where it
    redirects to (a directory that ends in /); ``token``: what it wants to see.
    """

    def __init__(
        self,
        root: Path,
        *,
        ranges: bool,
        length: bool = True,
        pause: float = 0.0,
        cut: int | None = None,
        coding: str | None = None,
        store: str | None = None,
        token: str | None = None,
    ) -> None:
        self.root, self.ranges, self.length, self.pause = root, ranges, length, pause
        self.cut, self.coding, self.store, self.token = cut, coding, store, token
        self.sent = 0
        self.seen: list[str | None] = []
        self.requests = 0
        self.port = 0

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/{name}"


@contextmanager
def serve(server: Server) -> Iterator[Server]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.requests += 1
            server.seen.append(self.headers.get("Authorization"))
            if server.token and self.headers.get("Authorization") != f"Bearer {server.token}":
                self.send_error(401)
                return
            if server.store:
                self.send_response(302)
                self.send_header("Location", server.store + self.path.rpartition("/")[2])
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            path = server.root / self.path.partition("?")[0].lstrip("/")
            if not path.is_file():
                self.send_error(404)
                return
            size = path.stat().st_size
            first, last = 0, size - 1
            wanted = self.headers.get("Range") if server.ranges else None
            if wanted and size:
                first, last = (int(value) for value in wanted.partition("=")[2].split("-"))
                last = min(last, size - 1)
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            else:
                self.send_response(200)
            if server.length:
                self.send_header("Content-Length", str(last - first + 1))
            if server.coding:
                self.send_header("Content-Encoding", server.coding)
            self.end_headers()
            with path.open("rb") as file:
                file.seek(first)
                left = min(last - first + 1, server.cut or size)
                while left:
                    piece = file.read(min(left, 1 << 16))
                    time.sleep(server.pause)
                    try:
                        self.wfile.write(piece)
                    except OSError:
                        return
                    server.sent += len(piece)
                    left -= len(piece)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        listener.daemon_threads = True
        server.port = listener.server_address[1]
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join()
