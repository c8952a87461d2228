# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""host_facts as a task sees it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.modules import host_facts
from ansible_collections.llamafleet.rpc.tests.unit import servers

HOLD = """
import sys, time
held = bytearray(int(sys.argv[1]))
held[::4096] = b"x" * len(held[::4096])
print("holding", flush=True)
time.sleep(60)
"""


def call(check_mode: bool = False, **options: Any) -> dict[str, Any]:
    return servers.run_module(host_facts.main, options, check_mode)


def test_facts_are_the_same_in_check_mode() -> None:
    first, second = call(), call(check_mode=True)
    assert not first["changed"]
    assert set(first["ansible_facts"]) == {"llamafleet"}
    assert first["ansible_facts"]["llamafleet"].keys() == second["ansible_facts"]["llamafleet"].keys()
    assert first["ansible_facts"]["llamafleet"]["class_id"] == second["ansible_facts"]["llamafleet"]["class_id"]


def test_memory_of_our_own_process_stays_usable() -> None:
    """Law 18, for real: a process of ours that holds 300 MB takes nothing from the capacity."""
    size = 300_000_000
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(size)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        # Other programs of this machine allocate and free meanwhile, so the better of a few looks counts.
        gains = []
        for _look in range(5):
            foreign, own = (
                call(own_pids=pids)["ansible_facts"]["llamafleet"]["memory"] for pids in ([], [process.pid])
            )
            gains.append((own["usable"] - own["available"]) - (foreign["usable"] - foreign["available"]))
            time.sleep(0.1)
        assert max(gains) >= size
        prefix = os.path.dirname(os.path.realpath(sys.executable))
        by_prefix = call(own_prefixes=[prefix])["ansible_facts"]["llamafleet"]["memory"]
        assert by_prefix["usable"] - by_prefix["available"] >= own["usable"] - own["available"]
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"backend": "metal"}, "no metal device was found"),
        ({"backend": "abacus"}, "value of backend must be one of"),
        ({"timeout": 0}, "timeout: 0 is no time"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], says: str) -> None:
    result = call(**options)
    assert result["failed"]
    assert says in result["msg"]
