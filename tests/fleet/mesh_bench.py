# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the mesh costs: loading and tokens per second over WireGuard and over the plain network, and their ratio.

Needs what the tests of this directory need. Brings up a fleet of its own, runs site.yml, and then the same llama-bench
twice, by the workers of site.yml and by ones that are started by hand on the plain addresses. Judges nothing.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from ansible_collections.llamafleet.rpc.tests.fleet.lab import (
    WORKERS,
    Inventory,
    address,
    endpoint,
    fleet,
    hosts,
    play,
    sh,
)

_BIN = "/opt/llamafleet/current/bin"
_PORT = 18760


def bench(endpoints: list[str]) -> tuple[float, float, float]:
    """(seconds to load and to write one token, prompt tokens per second, generated tokens per second)."""
    model = sh("p1", "ls /opt/llamafleet/models/*.gguf").strip()
    devices = "/".join(f"RPC{number}" for number in range(len(endpoints)))
    common = [
        f"{_BIN}/llama-bench",
        "-m",
        model,
        "-ngl",
        "99",
        "--rpc",
        ",".join(endpoints),
        "-dev",
        devices,
        "-o",
        "json",
    ]
    started = time.monotonic()
    fleet("exec", "p1", *common, "-p", "0", "-n", "1", "-r", "1", "--no-warmup", seconds=600)
    loaded = time.monotonic() - started
    rows = json.loads(fleet("exec", "p1", *common, "-p", "128", "-n", "32", "-r", "3", seconds=600))
    prompt, generated = (next(row["avg_ts"] for row in rows if row[key]) for key in ("n_prompt", "n_gen"))
    return loaded, prompt, generated


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, hosts(Path(directory) / "seed"):
        play(Inventory(Path(directory) / "inventory"), "site", seconds=900)
        sh("p1", "systemctl stop llama-server-default")
        inside = bench([endpoint(host) for host in WORKERS])
        for host in WORKERS:
            server = (f"{_BIN}/ggml-rpc-server", "-H", address(host), "-p", _PORT, "-d", "CPU", "-t", "1")
            fleet("exec", host, "systemd-run", "-q", "--unit=plain", *server)
        time.sleep(1)
        plain = bench([f"{address(host)}:{_PORT}" for host in WORKERS])
    for what, with_mesh, without in zip(("load, s", "prompt, tokens/s", "generation, tokens/s"), inside, plain):
        print(f"{what}: {with_mesh:.2f} in the mesh, {without:.2f} without, ratio {with_mesh / without:.2f}")


if __name__ == "__main__":
    main()
