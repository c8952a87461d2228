# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The molecule scenario `fleet` on real hosts, which are no part of it: they are there before it and gone after it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.llamafleet.rpc.tests.fleet.lab import FLEET, ROOT, Inventory, environment, hosts

pytestmark = pytest.mark.fleet


def test_the_scenario_on_real_hosts(tmp_path: Path) -> None:
    with hosts(tmp_path / "seed"):
        inventory = Inventory(tmp_path / "inventory")
        molecule = Path(sys.executable).with_name("molecule")
        done = subprocess.run(
            [FLEET, "in", molecule, "test", "-s", "fleet", "--no-command-borders"],
            cwd=ROOT,
            env={
                **environment(),
                "LLAMAFLEET_FLEET_INVENTORY": str(inventory.directory),
                "NO_COLOR": "1",
                "PATH": f"{molecule.parent}:{environment()['PATH']}",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-8000:]
    # molecule calls a scenario a success that met no host, or whose playbooks are missing.
    assert re.search(r"fleet +: actions=4 +successful=4 +disabled=0 +skipped=0 +missing=0 +failed=0", done.stdout)
    for host in ("p1", "w1", "w2", "w3"):
        assert len(re.findall(rf"^{host} +: ok=[1-9]", done.stdout, re.M)) >= 4
