# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""rpc_info as a task sees it."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.modules import rpc_info
from ansible_collections.llamafleet.rpc.tests.unit import servers

DEVICES = [(1 << 30, 2 << 30)]


def call(**options: Any) -> dict[str, Any]:
    return servers.run_module(rpc_info.main, options)


def test_one_worker_is_answered_at_the_top_and_in_the_results() -> None:
    with servers.serve(servers.worker((7, 0, 0), DEVICES)) as port:
        result = call(host="127.0.0.1", port=port, expected_protocol="7.0.0")
    assert not result["failed"]
    assert not result["changed"]
    assert (result["status"], result["protocol"], result["client"]) == ("ok", "7.0.0", None)
    assert result["devices"] == [{"index": 0, "total": 2 << 30, "free": 1 << 30}]
    assert result["results"][0]["endpoint"] == f"127.0.0.1:{port}"


def test_a_list_of_workers_is_one_task() -> None:
    with servers.serve(servers.worker((7, 0, 0), DEVICES)) as good, servers.serve(servers.worker((6, 0, 0))) as old:
        asked = [f"127.0.0.1:{port}" for port in (good, old, servers.free_port())]
        result = call(endpoints=asked, expected_protocol="7.0.0")
    assert [(one["endpoint"], one["status"]) for one in result["results"]] == [
        (asked[0], "ok"),
        (asked[1], "incompatible"),
        (asked[2], "refused"),
    ]
    assert not result["failed"]


def test_required_names_the_endpoint_the_status_and_the_remedy() -> None:
    """B2-01: the run stops before the primary is restarted."""
    with servers.serve(servers.worker((7, 0, 0), DEVICES)) as good, servers.serve(servers.worker((6, 0, 0))) as old:
        result = call(endpoints=[f"127.0.0.1:{good}", f"127.0.0.1:{old}"], expected_protocol="7.0.0", required=True)
    assert result["failed"]
    assert f"worker 127.0.0.1:{old} is incompatible" in result["msg"]
    assert "protocol 6.0.0, expected 7.0.0" in result["msg"]
    assert f"127.0.0.1:{good}" not in result["msg"]


def test_the_default_deadline_is_under_five_seconds() -> None:
    """B8-10, with the option's default."""
    with servers.serve(servers.silent) as port:
        start = time.monotonic()
        result = call(host="127.0.0.1", port=port, required=True)
        seconds = time.monotonic() - start
    assert result["failed"]
    assert result["status"] == "timeout"
    assert seconds < 5


def test_the_primary_shows_its_ends_and_the_worker_is_judged_by_them() -> None:
    with servers.serve(servers.silent) as port, socket.create_connection(("127.0.0.1", port)) as primary:
        end = "{}:{}".format(*primary.getsockname()[:2])
        shown = call(endpoints=[f"127.0.0.1:{port}"], connect_only=True)
        asked: dict[str, Any] = {"host": "127.0.0.1", "port": port, "expected_clients": ["127.0.0.1"]}
        ours = call(**asked, primary_sockets=shown["local_ends"], required=True)
        stale = call(**asked, primary_sockets=[], required=True)
    assert shown["local_ends"] == [end]
    assert (ours["failed"], ours["status"], ours["client"]) == (False, "busy_ours", end)
    assert (stale["failed"], stale["status"]) == (True, "busy_stale")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"host": "localhost", "port": 18711}, "not an IPv4 address"),
        ({"endpoints": ["[::1]:18711"]}, "not an IPv4 address"),
        ({"endpoints": ["10.0.0.2"]}, "give an IPv4 address and a port"),
        ({"host": "127.0.0.1", "port": 70000}, "from 1 to 65535"),
        ({"host": "127.0.0.1", "port": 18711, "timeout": 0}, "above 0"),
        ({"host": "127.0.0.1", "port": 18711, "timeout": float("nan")}, "above 0"),
        ({"host": "127.0.0.1", "port": 18711, "timeout": "inf"}, "at most a day"),
        ({"host": "127.0.0.1", "port": 18711, "expected_protocol": "7"}, "such as 7.0.0"),
        ({"host": "127.0.0.1"}, "port"),
        ({}, "endpoints"),
    ],
)
def test_wrong_questions_fail_with_what_is_wrong(options: dict[str, Any], says: str) -> None:
    result = call(**options)
    assert result["failed"]
    assert says in result["msg"]
