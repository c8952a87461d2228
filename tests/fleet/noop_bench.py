# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long site.yml takes where nothing is left to do, and how many tasks each host then runs: 4 hosts and 50.

The 50 are real systemd hosts of one machine, in clusters of at most twelve workers, so that the time is that of the
machine's processors and no lower bound. What counts for others are the tasks, each a round trip of ssh. Judges nothing.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from ansible_collections.llamafleet.rpc.tests.fleet.lab import Inventory, hosts, play

_WORKERS = 12


def names(count: int) -> dict[str, list[str]]:
    """Hosts of a fleet of that many, by cluster: its primary, then its workers."""
    clusters: dict[str, list[str]] = {}
    for number in range(count):
        cluster, place = divmod(number, _WORKERS + 1)
        role = "w" if place else "p"
        clusters.setdefault(f"c{cluster}", []).append(f"{role}{cluster}x{place}")
    return clusters


def measure(count: int, directory: Path) -> None:
    clusters = names(count)
    limits = {"p": "role=primary,mem=1G", "w": "role=worker,mem=512M"}
    wanted = [f"{host}:{limits[host[0]]}" for members in clusters.values() for host in members]
    with hosts(directory / f"seed{count}", wanted):
        inventory = Inventory(directory / f"inventory{count}")
        inventory.change(
            hosts={host: {"llama_fleet_cluster": name} for name, members in clusters.items() for host in members}
        )
        first = play(inventory, "site", seconds=3600)
        second = play(inventory, "site", seconds=3600)
    assert not any(second.changed.values()), second.changed
    primaries = {count for host, count in second.tasks.items() if host.startswith("p")}
    workers = {count for host, count in second.tasks.items() if host.startswith("w")}
    print(
        f"{count} hosts in {len(clusters)} cluster(s), {os.cpu_count()} processors: first run {first.seconds:.0f} s, "
        f"nothing to do {second.seconds:.1f} s ({second.seconds / count:.2f} s a host); tasks that ran: "
        f"{max(primaries)} on a primary, {max(workers)} on a worker",
        flush=True,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        for count in [int(word) for word in sys.argv[1:]] or [4, 50]:
            measure(count, Path(directory))


if __name__ == "__main__":
    main()
