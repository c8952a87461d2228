# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wait until every worker takes connections, then become the program that follows.

Usage: launch.py ENDPOINT,ENDPOINT,... PROGRAM ARGUMENT ...

llama-server aborts at once when one of its workers is not there (b11434), so a primary that starts together with its
workers would end again and again. A worker is only connected to and left; it is never spoken to (a worker serves one
client at a time, and one that gives up in the middle of a message does harm).
"""

from __future__ import annotations

import os
import socket
import sys
import time


def missing(endpoints: list[str]) -> list[str]:
    """The endpoints that take no connection now, each with the reason."""
    found = []
    for endpoint in endpoints:
        host, port = endpoint.rsplit(":", 1)
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            found.append(f"{endpoint} ({error.strerror or error})")
    return found


def say(text: str) -> None:
    """A line in the service's log."""
    sys.stderr.write(text + "\n")


def main() -> None:
    endpoints = [endpoint for endpoint in sys.argv[1].split(",") if endpoint]
    program = sys.argv[2:]
    said: list[str] = []
    while absent := missing(endpoints):
        if absent != said:
            said = absent
        time.sleep(1)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
