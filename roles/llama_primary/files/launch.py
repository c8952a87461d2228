# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wait until every worker takes connections, then become the program that follows, and end it when a worker has gone.

Usage: launch.py ENDPOINT,ENDPOINT,... PROGRAM ARGUMENT ...

llama-server aborts at once when one of its workers is not there (b11434), so a primary that starts together with its
workers would end again and again. A worker is only connected to and left; it is never spoken to (a worker serves one
client at a time, and one that gives up in the middle of a message does harm).

Once it runs, an idle llama-server does not notice that a worker ended: it says that it is healthy until the next
prompt, and aborts in the middle of that, also when the worker is back by then (measured on b11434). A child looks at
the connections from outside and ends the server, so that its manager starts this again, which waits and says for whom.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

#: Connections of this network namespace, on Linux.
TABLE = "/proc/net/tcp"
CLOSE_WAIT = "08"

#: Seconds after which a wait is told again, so that the end of a log says why there is no answer.
REPEAT = 300.0


def hosts(path: str) -> dict[str, str]:
    """Endpoint -> inventory host, out of the plan that is kept beside this file; nothing where there is none yet."""
    try:
        with open(path, encoding="utf-8") as stream:
            return {device["endpoint"]: device["host"] for device in json.load(stream)["devices"] if device["endpoint"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def missing(endpoints: list[str]) -> dict[str, str]:
    """The endpoints that take no connection now, each with the reason."""
    found = {}
    for endpoint in endpoints:
        host, port = endpoint.rsplit(":", 1)
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except ConnectionRefusedError:
            found[endpoint] = (
                "nothing listens there: the worker is stopped, or paused by its owner "
                "(llama-worker status on it tells, llama-worker resume ends it)"
            )
        except OSError as error:
            found[endpoint] = f"no connection: {error.strerror or error}"
    return found


def hung_up(endpoints: list[str], table: str) -> set[str]:
    """The endpoints that have closed a connection which this host still holds, by the text of /proc/net/tcp."""
    wanted = {}
    for endpoint in endpoints:
        host, port = endpoint.rsplit(":", 1)
        wanted[f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{int(port):04X}"] = endpoint
    rows = [line.split() for line in table.splitlines()[1:]]
    return {wanted[row[2]] for row in rows if row[3] == CLOSE_WAIT and row[2] in wanted}


def environment(inherited: dict[str, str]) -> dict[str, str]:
    """What the server gets of the environment: nothing that would change what was planned.

    Each option of llama-server has a variable (LLAMA_ARG_RPC, LLAMA_ARG_OVERRIDE_TENSOR; b11434), and one that somebody
    set for the whole session or machine would hold wherever the arguments say nothing.
    """
    refused = ("LLAMA_ARG_", "LLAMA_API_KEY", "MTMD_BACKEND_DEVICE")
    return {name: value for name, value in inherited.items() if not name.startswith(refused)}


def say(text: str) -> None:
    """A line in the service's log."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def watch(endpoints: list[str], server: int, plan: str) -> None:
    """End the process ``server``, whose child this is, once a worker has hung up on it."""
    before: set[str] = set()
    while os.getppid() == server:
        time.sleep(1)
        with open(TABLE, encoding="utf-8") as stream:
            now = hung_up(endpoints, stream.read())
        # Seen twice: it is not a probe that is just about to close its end as well.
        if now & before:
            names = hosts(plan)
            gone = ", ".join(f"{names.get(endpoint, 'worker')} ({endpoint})" for endpoint in sorted(now & before))
            say(f"{gone} has ended its connection. llama-server cannot go on without it and is ended.")
            end(server)
            return
        before = now


def end(server: int) -> None:
    """SIGTERM, and SIGKILL for a server that does not end of it (it may hang on yet another worker)."""
    os.kill(server, signal.SIGTERM)
    for _second in range(15):
        time.sleep(1)
        if os.getppid() != server:
            return
    os.kill(server, signal.SIGKILL)


def wait(endpoints: list[str], plan: str) -> None:
    """Return once all workers take connections; say for whom we wait when that changes, and now and then."""
    said: dict[str, str] = {}
    begin, told = time.monotonic(), 0.0
    while absent := missing(endpoints):
        if absent != said or time.monotonic() - told > REPEAT:
            names = hosts(plan)
            for endpoint, reason in absent.items():
                say(f"Waiting for {names.get(endpoint, 'worker')} ({endpoint}): {reason}.")
            said, told = absent, time.monotonic()
        time.sleep(1)
    if said:
        say(f"All workers are there after {time.monotonic() - begin:.0f} s.")


def main() -> None:
    endpoints = [endpoint for endpoint in sys.argv[1].split(",") if endpoint]
    program = sys.argv[2:]
    plan = os.path.join(os.path.dirname(os.path.abspath(__file__)), "plan.json")
    wait(endpoints, plan)
    server = os.getpid()
    # The child watches and the parent becomes the server, so that the manager's process is the server itself.
    if endpoints and os.path.exists(TABLE) and os.fork() == 0:
        watch(endpoints, server, plan)
        os._exit(0)
    os.execve(program[0], program, environment(dict(os.environ)))


if __name__ == "__main__":
    main()
