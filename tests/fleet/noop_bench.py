# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long site.yml takes where nothing is left to do, and how many tasks each host then runs: 4 hosts and 50.

The 4 are real ones, over ssh. The 50 are simulated: inventory hosts of this machine, in clusters of at most twelve
workers, with their services under one supervisor, but without ssh, systemd and mesh (a kernel's 128 inotify instances
carry some twenty real ones). All share the processors of this machine with Ansible: times are no lower bound. What
counts elsewhere are the tasks, each of which is a round trip. Judges nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ansible_collections.llamafleet.rpc.tests.fleet.lab import PLAYBOOK, ROOT, Inventory, Run, environment, hosts, play

_WORKERS = 12
_FIRST_PORT = 19000


def report(what: str, count: int, first: Run, second: Run) -> None:
    assert not any(second.changed.values()), second.changed
    tasks = {role: max(ran for host, ran in second.tasks.items() if host.startswith(role)) for role in "pw"}
    print(
        f"{count} {what} hosts, {os.cpu_count()} processors: first run {first.seconds:.0f} s, nothing to do "
        f"{second.seconds:.1f} s ({second.seconds / count:.2f} s a host); tasks that ran: {tasks['p']} on a primary, "
        f"{tasks['w']} on a worker",
        flush=True,
    )


def real(directory: Path) -> None:
    with hosts(directory / "seed"):
        inventory = Inventory(directory / "inventory")
        report("real", 4, play(inventory, "site"), play(inventory, "site"))


def simulated_inventory(count: int, prefix: Path) -> dict[str, Any]:
    """Inventory hosts of this machine: in each cluster a primary, then its workers."""
    groups: dict[str, dict[str, Any]] = {"llama_primary": {}, "llama_workers": {}}
    for number in range(count):
        cluster, place = divmod(number, _WORKERS + 1)
        variables: dict[str, Any] = {"llama_fleet_cluster": f"c{cluster}"}
        port = _FIRST_PORT + number
        if place:
            instance = {"name": f"w{place}", "port": port, "backend": "cpu", "memory_limit": "160MiB", "threads": 1}
            variables["llama_worker_instances"] = [instance]
        else:
            variables["llama_primary_port"] = port
        group = groups["llama_workers" if place else "llama_primary"]
        group[f"{'w' if place else 'p'}{cluster}x{place}"] = variables
    (model,) = (prefix / "models").rglob("*.gguf")
    shared = {
        "ansible_connection": "local",
        "ansible_python_interpreter": "{{ ansible_playbook_python }}",
        "llama_fleet_scope": "user",
        "llama_fleet_user": "nobody",
        "llama_fleet_service_manager": "supervisor",
        "llama_fleet_prefix": str(prefix),
        "llama_primary_n_ctx": 512,
        "llama_primary_objective": "memory",
        "llama_primary_instances": [{"name": "own", "devices": ["CPU"], "max_units": 0}],
        "llama_primary_extra_args": ["-t", "1"],
        "llama_model_kind": "path",
        "llama_model_path": str(model),
    }
    children = {name: {"hosts": members} for name, members in groups.items()}
    return {"all": {"vars": shared, "children": {"llama_fleet": {"children": children}}}}


def simulated(count: int, directory: Path) -> None:
    prefix = directory / "prefix"
    for part in ("builds", "models"):
        shutil.copytree(Path(os.environ["LLAMAFLEET_TEST_PREFIX"]) / part, prefix / part, symlinks=True)
    inventory = directory / "fifty.json"
    inventory.write_text(json.dumps(simulated_inventory(count, prefix)))

    def run(playbook: str) -> Run:
        argv = [str(PLAYBOOK), "-i", str(inventory), str(ROOT / "playbooks" / f"{playbook}.yml")]
        started = time.monotonic()
        done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=7200, env=environment())
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        return Run(done.returncode, done.stdout, time.monotonic() - started)

    try:
        report("simulated", count, run("site"), run("site"))
    finally:
        run("teardown")


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        os.chmod(directory, 0o755)  # noqa: S103  the account of the services has to get in
        real(Path(directory))
        simulated(int(sys.argv[1]) if len(sys.argv) > 1 else 50, Path(directory))


if __name__ == "__main__":
    main()
