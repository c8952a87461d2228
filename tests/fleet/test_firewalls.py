# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Beside the firewall that a host has: ufw on w1, firewalld on w2. A drop of either counts, whoever accepts."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from ansible_collections.llamafleet.rpc.tests.fleet.lab import (
    PORT,
    Inventory,
    address,
    answer,
    connect,
    endpoint,
    hosts,
    play,
    sh,
)

pytestmark = pytest.mark.fleet

HOSTS = ("p1:mem=1G", "w1:mem=512M,image=firewalls", "w2:mem=512M,image=firewalls", "w3:mem=512M,image=trixie")
CLOSED = {"timed out", "Connection refused", "No route to host", "Network is unreachable"}


@pytest.fixture(scope="module")
def inventory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inventory]:
    with hosts(tmp_path_factory.mktemp("seed"), HOSTS):
        sh("w1", "ufw allow 22/tcp && ufw allow 18711/tcp && ufw --force enable")
        sh("w2", "systemctl unmask firewalld && systemctl start firewalld && firewall-cmd --state")
        yield Inventory(tmp_path_factory.mktemp("inventory") / "i")


def test_ufw_gets_its_rules_and_firewalld_is_told_of(inventory: Inventory) -> None:
    """Their drop counts more than our accept: ufw is given the rules, for firewalld the run says them and stops."""
    run = play(inventory, "site", ok=False)
    assert "fatal: [p1]" in run.output and f"{endpoint('w2')}" in run.flat
    said = re.search(r"firewalld is active, and its reject counts more than our accept\. Run: (.*? --reload)", run.flat)
    assert said, run.output[-4000:]
    sh("w2", said[1])
    play(inventory, "site")
    assert "Paris" in answer()
    assert "# llamafleet" in sh("w1", "ufw status")


def test_what_they_accept_is_still_closed_by_us(inventory: Inventory) -> None:
    """The operator's own `ufw allow 18711` opens nothing: our drop counts more than its accept."""
    sh("w2", f"firewall-cmd --add-port={PORT}/tcp")
    for target in ("w1", "w2"):
        mesh, plain = endpoint(target).split(":", maxsplit=1)[0], address(target)
        sh("w3", f"ip route replace {mesh}/32 via {plain}")
        assert {connect("w3", mesh, PORT), connect("w3", plain, PORT)} <= CLOSED
    assert connect("p1", endpoint("w1").split(":", maxsplit=1)[0], PORT) == "connected"


def test_a_teardown_leaves_their_rules_alone(inventory: Inventory) -> None:
    play(inventory, "teardown")
    left = sh("w1", "ufw status")
    assert "18711/tcp" in left and "llamafleet" not in left and "51820" not in left
    assert sh("w2", "firewall-cmd --state 2>&1") == "running\n"
    assert "llamafleet" not in sh("w1", "nft list tables") + sh("w2", "nft list tables")
