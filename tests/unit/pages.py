# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pages of docs/ that are made of the code's own tables and of recordings.

`python -m ansible_collections.llamafleet.rpc.tests.unit.pages` writes them; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import (
    GIB,
    Host,
    kind_table,
    mib_text,
    reserve_table,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._hosts import collect
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan import plan_split
from ansible_collections.llamafleet.rpc.plugins.module_utils._records import fleet_devices
from ansible_collections.llamafleet.rpc.plugins.module_utils._report import plan_lines
from ansible_collections.llamafleet.rpc.plugins.module_utils._worker_record import Inputs, build_record
from ansible_collections.llamafleet.rpc.tests.unit import measured
from ansible_collections.llamafleet.rpc.tests.unit.recorded import identity, linux, mac, smi, text

DOCS = Path(__file__).resolve().parents[2] / "docs"

RULES = """# How much memory a device lends

Made of the tables in the code; to change them, change `plugins/module_utils/_devices.py` and write this page anew with
`python -m ansible_collections.llamafleet.rpc.tests.unit.pages`.

`usable` is a capacity, not a reading: the least of the total and the limits, less a reserve, less what *others* hold.
What our own services hold is added back, so that a second run, with a worker that fills the memory, plans the same.
Sizes are bytes in facts and records; MiB only in what people read. Unknown is null, and then nothing is lent.

## Kinds of memory

{kinds}
The device-local heaps are those of `vulkaninfo`; for the other backends read "what the driver offers". Devices of one
pool share it: a plan keeps the sum of what they get within the pool, whose size is the largest `usable` in it.

## Reserve

Never lent, whatever is free. These are estimates, chosen and not measured; their reasons stand beside them in the code.

{reserve}
## What else bounds it

* **Limits** of control groups, v1 and v2, the least up the tree; page cache and reclaimable slab do not count as used.
  In an LXC guest that shows its own RAM, the ZFS cache of the outer host is not counted.
* **ZFS cache** above its minimum counts as available; **huge pages** set aside do not, for llama.cpp does not use them.
* **Our own services** are known by process number, unit or program path. Added back are the memory of their processes,
  and what they hold through a driver: `nvidia-smi --query-compute-apps`, the KFD's count for each process, and
  `/proc/PID/fdinfo` for amdgpu, xe and i915. On a Mac it is the resident memory that `ps` shows.
* **llama.cpp's own report**, once it is built: `llama-server --list-devices` (option `listed_devices` of
  `worker_record`) and the answer of an idle worker. The smaller figure holds, a gap of more than 5 % is a warning with
  both. Metal's limit is an estimate before that (`ceiling` in the facts) and is replaced. A processor's report is its
  whole RAM, and never believed.
* **`memory_limit`** of an instance, bytes or a share of what is usable, holds for each of its devices. It cannot raise
  anything.
"""

HOMELAB = """# Four unlike machines, one model

A plan over recorded machines: nothing here has run. It shows what detection makes of each, and what the planner makes
of all. Write it anew with `python -m ansible_collections.llamafleet.rpc.tests.unit.pages`.

`gaming` has an RTX 4090 and is the primary, `strix` is a Strix Halo box of 128 GB, `studio` an M4 Max of 128 GB, and
`server` a server of 256 GiB whose services may take 96 GiB. Bandwidths and round trips are declared, not detected.

## What each machine lends

{machines}
`usable` is what detection says before there is a build, `budget` what is agreed once llama.cpp itself was asked.

## Llama 70B, Q4_K_M, 32768 tokens, fewest milliseconds per token

```
{latency}
```

## The same, spread for the most headroom

```
{memory}
```
"""


def _studio() -> Host:
    return collect(mac("sysctl_m4_max_128g", macos="26.1"), identity("Darwin", "arm64", "macos26", "studio"))


def _gaming() -> Host:
    commands = {
        **smi("core_4090_570.csv", "compute_cap_4090_570.csv"),
        "nvcc": text("nvidia_smi/nvcc_12.4.txt"),
        "c++": text("toolchain/gxx_debian_12.txt"),
    }
    return collect(linux("sysfs/nvidia_two_cards", commands=commands), identity(name="gaming"))


def _strix() -> Host:
    runner = linux(
        "sysfs/amd_strix_halo_512m_gtt_96g_gfx1151", commands={"hipconfig": text("hip/hipconfig_7.1.txt"), "dmesg": ""}
    )
    runner.files["/proc/meminfo"] = text("proc/meminfo_strix_halo_128g")
    return collect(runner, identity(name="strix"))


def _server() -> Host:
    return collect(linux("sysfs/cpu_server_two_sockets", ram=256 * GIB), identity(name="server"))


# (name, host, mesh address, --list-devices, bandwidth in bytes/s by device, round trip in ms)
MACHINES: tuple[tuple[str, Callable[[], Host], str, str | None, dict[str, int], float | None], ...] = (
    ("gaming", _gaming, "10.9.0.1", "cuda", {"CUDA0": 1008 * 10**9, "CPU": 60 * 10**9}, None),
    ("strix", _strix, "10.9.0.2", "hip/list_devices_strix_halo.txt", {"ROCm0": 215 * 10**9}, 0.4),
    ("studio", _studio, "10.9.0.3", "metal_m4_max_128g", {"MTL0": 546 * 10**9}, 0.3),
    ("server", _server, "10.9.0.4", None, {"CPU": 90 * 10**9}, 0.3),
)


def homelab() -> tuple[list[dict[str, Any]], list[str]]:
    """(records of the four machines, the lines of the table); the first is the primary."""
    records = []
    rows = [
        "| machine | device | kind | total | usable | budget | build class |",
        "| --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    for position, (name, make, address, listed, bandwidth, rtt) in enumerate(MACHINES):
        host = make()
        path = listed if listed is None or "/" in listed else f"llama_server/list_devices_{listed}.txt"
        instance: dict[str, Any] = {"name": "default", "devices": list(bandwidth), "rtt_ms": rtt}
        record = build_record(
            Inputs(
                host=name,
                cluster="default",
                instances=[instance],
                facts={**host.to_dict(), "machine_id": name, "devices": _at(host, name)},
                mesh={"address": address},
                primary=position == 0,
                listed=text(path) if path else None,
            )
        )
        for entry in record["instances"][0]["devices"]:
            entry["bandwidth"] = bandwidth[entry["device"]]
            device = next(device for device in host.devices if device.name == entry["device"])
            cells = [name, entry["device"], device.kind, mib_text(device.total), mib_text(device.usable)]
            rows.append(f"| {' | '.join([*cells, mib_text(entry['budget']), f'`{host.class_id}`'])} |")
        records.append(record)
    return records, rows


def _at(host: Host, name: str) -> list[dict[str, Any]]:
    """The host's devices, in pools of a machine of its own: the recordings share a machine id."""
    return [{**device.to_dict(), "pool": device.pool.replace(host.machine_id, name)} for device in host.devices]


def memory_rules() -> str:
    """Text of docs/memory-rules.md."""
    return RULES.format(kinds=kind_table(), reserve=reserve_table())


def homelab_plans() -> dict[str, dict[str, Any]]:
    """The two plans of docs/homelab.md, by objective."""
    devices = fleet_devices(homelab()[0])
    model = measured.model("llama-70b-3shards").to_dict()
    return {aim: plan_split(model, devices, n_ctx=32768, objective=aim) for aim in ("latency", "memory")}


def homelab_page() -> str:
    """Text of docs/homelab.md."""
    plans = {aim: "\n".join(plan_lines(plan)) for aim, plan in homelab_plans().items()}
    return HOMELAB.format(machines="\n".join(homelab()[1]) + "\n", **plans)


PAGES: dict[str, Callable[[], str]] = {"memory-rules.md": memory_rules, "homelab.md": homelab_page}


def main() -> None:
    """Write the pages."""
    DOCS.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        (DOCS / name).write_text(make())


if __name__ == "__main__":
    main()
