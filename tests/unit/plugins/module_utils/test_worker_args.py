# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The command line of a worker, and the sandbox that its backend needs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._worker_args import (
    WorkerError,
    checked_instances,
    worker_instances,
)

BUILD = {"bin_dir": "/opt/llamafleet/builds/b11434-x/bin", "worker_binary": "ggml-rpc-server"}
PROGRAM = "/opt/llamafleet/builds/b11434-x/bin/ggml-rpc-server"
FACTS = {
    "backend": "cuda",
    "cpu": {"physical_cores": 6},
    "devices": [
        {"name": "CUDA0", "backend": "cuda"},
        {"name": "CUDA1", "backend": "cuda"},
        {"name": "CPU", "backend": "cpu"},
    ],
}


def instances(entries: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    values = {"facts": FACTS, "build": BUILD, "cluster": "default", "address": "10.0.0.2", "directory": "/s", **more}
    return worker_instances(entries, "h", **values)


def test_devices_are_always_named_and_there_is_no_m() -> None:
    """Law 13: a broken driver is an error and not a silent CPU; -m ends a worker of today with status 0."""
    (one,) = instances([{"name": "default", "port": 50052}])
    assert one["service"]["argv"] == [PROGRAM, "-H", "10.0.0.2", "-p", "50052", "-d", "CUDA0,CUDA1"]
    assert one["endpoint"] == "10.0.0.2:50052"
    assert one["service"]["name"] == "llama-rpc-default-default"
    assert one["service"]["backend"] == "cuda"


@pytest.mark.real
def test_a_worker_whose_device_is_not_there_yet_ends(llama_bin: Path) -> None:
    """Case B4-01: a boot faster than the driver. It ends, so that Restart= applies, and does not serve a CPU."""
    argv = [str(llama_bin / "ggml-rpc-server"), "-H", "127.0.0.1", "-p", "1", "-d", "CUDA0"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1 and "unknown device: CUDA0" in done.stderr


def test_numbering_of_cards_and_the_tunnel_are_fixed_in_the_environment() -> None:
    """Cases B3-19, B4-07; law 14."""
    (one,) = instances([{"name": "g", "port": 5, "env": {"X": 1}}])
    environment = one["service"]["environment"]
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert environment["GGML_RPC_NO_RDMA"] == "1"
    assert environment["HOME"] == "/s/run" and environment["LLAMA_CACHE"].startswith("/s/run/")
    assert environment["X"] == "1"


def test_a_device_brings_the_environment_that_it_is_seen_in() -> None:
    """Case B3-17: under WSL the driver's library lies where no service looks."""
    wsl = {"name": "CUDA0", "backend": "cuda", "environment": {"LD_LIBRARY_PATH": "/usr/lib/wsl/lib"}}
    (one,) = instances([{"name": "g", "port": 5}], facts={**FACTS, "devices": [wsl]})
    assert one["service"]["environment"]["LD_LIBRARY_PATH"] == "/usr/lib/wsl/lib"


def test_the_tensor_cache_is_off() -> None:
    """Case B8-02: it never evicts, is not checked when read, and grew to 2 TB; so -c is never passed."""
    entries: list[dict[str, Any]] = [{"name": "g", "port": 5}, {"name": "c", "port": 6, "devices": ["CPU"]}]
    for entry in entries:
        (one,) = instances([entry])
        assert not {"-c", "--cache"} & set(one["service"]["argv"])


def test_a_cpu_worker_uses_the_physical_cores_and_sees_no_device_nodes() -> None:
    (one,) = instances([{"name": "c", "port": 5, "devices": ["CPU"]}])
    assert one["service"]["argv"][-4:] == ["-d", "CPU", "-t", "6"]
    assert one["service"]["backend"] == "cpu"  # case B4-06


def test_two_backends_in_one_instance_are_refused() -> None:
    with pytest.raises(WorkerError, match="make one instance for each"):
        instances([{"name": "m", "port": 5, "devices": ["CUDA0", "CPU"]}])


def test_a_backend_without_devices_is_refused() -> None:
    with pytest.raises(WorkerError, match="no device of backend rocm"):
        instances([{"name": "m", "port": 5, "backend": "rocm"}])


@pytest.mark.parametrize("address", ["localhost", "::1", "0.0.0.0", "10.0.0.2:5", ""])
def test_addresses_that_end_a_worker_with_status_0_are_refused(address: str) -> None:
    """Cases B4-15, B4-25, B5-13."""
    with pytest.raises(WorkerError, match="h: llama_worker_address"):
        instances([{"name": "c", "port": 5}], address=address)


def test_names_alone_need_neither_facts_nor_build() -> None:
    (one,) = instances([{"name": "c", "port": 5}], facts=None, build=None)
    assert one["service"] == {"name": "llama-rpc-default-c"}


@pytest.mark.parametrize(
    ("memory", "entry", "mib"),
    [
        # A reserve of a quarter, half of which is never given: 512 - 64.
        ({"total": 512 << 20}, {}, 448),
        ({"total": 512 << 20}, {"memory_limit": "300MiB"}, 352),  # and 64, in steps of 16
        ({"total": 64 << 30}, {"memory_limit": "32GiB"}, 36 << 10),  # and an eighth
        ({"total": 64 << 30, "limit": 512 << 20}, {}, 448),  # the limit of a container
        ({"total": 512 << 20}, {"memory_limit": "50%"}, 256),  # of what may be lent
        ({}, {}, None),
        ({"total": 512 << 20}, {"devices": ["CUDA0"]}, None),  # a driver's memory is not counted
    ],
)
def test_a_cpu_worker_ends_before_its_host_is_out_of_memory(
    memory: dict[str, int], entry: dict[str, Any], mib: int | None
) -> None:
    """Case B4-24: the kernel ends this service, and nothing else."""
    facts: dict[str, Any] = dict(FACTS, memory={**memory, "available": 1, "usable": 1})
    (one,) = instances([{"name": "c", "port": 5, "devices": ["CPU"], **entry}], facts=facts)
    assert one["service"]["memory_max"] == (mib if mib is None else mib << 20)


def test_cards_of_two_makers_run_two_builds() -> None:
    """CUDA and AMD in one box: an instance and a build for each, and the processor runs the host's own."""
    both = {**FACTS, "devices": [*FACTS["devices"], {"name": "ROCm0", "backend": "rocm"}]}
    rocm = {"bin_dir": "/opt/llamafleet/builds/b11434-y/bin", "worker_binary": "ggml-rpc-server"}
    entries: list[dict[str, Any]] = [
        {"name": "nvidia", "port": 5},
        {"name": "amd", "port": 6, "backend": "rocm"},
        {"name": "cpu", "port": 7, "devices": ["CPU"]},
    ]
    found = instances(entries, facts=both, builds={"cuda": BUILD, "rocm": rocm})
    programs = [one["service"]["argv"][0] for one in found]
    assert programs == [PROGRAM, PROGRAM.replace("b11434-x", "b11434-y"), PROGRAM]
    assert [one["service"]["argv"][-1] for one in found][:2] == ["CUDA0,CUDA1", "ROCm0"]


MIG = [
    {"name": "CUDA0", "backend": "cuda", "uuid": f"MIG-{one}", "environment": {"CUDA_VISIBLE_DEVICES": f"MIG-{one}"}}
    for one in ("bbbb", "cccc")
]


def test_each_mig_slice_is_cuda0_of_an_instance_of_its_own() -> None:
    """B3-07: two units, each with one device and its slice; without a choice the first slice, and no CUDA0,CUDA0."""
    facts = {**FACTS, "devices": [*MIG, {"name": "CPU", "backend": "cpu"}]}
    entries = [
        {"name": "large", "port": 5, "env": {"CUDA_VISIBLE_DEVICES": "MIG-bbbb"}},
        {"name": "small", "port": 6, "env": {"CUDA_VISIBLE_DEVICES": "MIG-cccc"}},
        {"name": "any", "port": 7},
    ]
    both = {"name": "both", "port": 8, "env": {"CUDA_VISIBLE_DEVICES": "MIG-bbbb,MIG-cccc"}}
    assert instances([both], facts=facts)[0]["devices"] == ["CUDA0"], "CUDA gives a process one slice, whatever it asks"
    found = instances(entries, facts=facts)
    assert [one["service"]["argv"][-2:] for one in found] == [["-d", "CUDA0"]] * 3
    assert [one["service"]["environment"]["CUDA_VISIBLE_DEVICES"] for one in found] == [
        "MIG-bbbb",
        "MIG-cccc",
        "MIG-bbbb",
    ]


def test_hidden_cards_are_not_offered_and_the_rest_is_renumbered() -> None:
    """B3-19: -d names what the process sees, not what its host has."""
    cards = [{"name": f"CUDA{n}", "backend": "cuda", "uuid": f"GPU-{n}00"} for n in range(3)]
    facts = {**FACTS, "devices": cards}

    def offered(visible: str) -> str:
        entry = {"name": "g", "port": 5, "env": {"CUDA_VISIBLE_DEVICES": visible}}
        return str(instances([entry], facts=facts)[0]["service"]["argv"][-1])

    assert offered("2") == "CUDA0"
    assert offered("GPU-1,0") == "CUDA0,CUDA1"
    assert offered("0,7,1") == "CUDA0", "CUDA sees nothing of what follows a card that is not there"
    with pytest.raises(WorkerError, match="its env hides them all"):
        offered("")


def test_null_in_an_instance_is_the_same_as_absent() -> None:
    """As YAML has it for a key without a value; max_units null once meant 0, and refused any min_units."""
    nothing = dict.fromkeys(("name", "port", "devices", "backend", "env", "max_units"))
    (found,) = checked_instances([{**nothing, "min_units": 3}], "box")
    assert (found["name"], found["port"]) == ("default", 50052)
    with pytest.raises(WorkerError, match="min_units 3 is more than max_units 2"):
        checked_instances([{"min_units": 3, "max_units": 2}], "box")
