# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Facts of whole hosts, put together from recordings."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._hosts import (
    HostError,
    Identity,
    Own,
    collect,
    host_traits,
    identify,
    init_system,
    links,
    own_processes,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Result, SystemRunner
from ansible_collections.llamafleet.rpc.tests.unit.fakes import FakeRunner

RECORDINGS = Path(__file__).parents[2] / "recordings"
MACHINE = "0123456789abcdef0123456789abcdef"
IDENTITY = Identity(
    system="Linux",
    arch="x86_64",
    libc="glibc2.36",
    hostname="box",
    user={"name": "deploy", "uid": 1000, "home": "/home/deploy"},
    addresses={"eth0": "10.0.0.2", "lo": "127.0.0.1", "wg0": "10.9.0.2"},
    collected_at="2026-11-29T19:30:00Z",
)
FILES = {
    "/etc/machine-id": MACHINE + "\n",
    "/proc/sys/kernel/random/boot_id": "1c9e3c1e-0000-4000-8000-000000000000\n",
    "/proc/meminfo": (RECORDINGS / "proc" / "meminfo_24g").read_text(),
    "/proc/cpuinfo": (RECORDINGS / "proc" / "cpuinfo_sapphire_rapids_vm").read_text(),
}
CONTRACT = [
    "schema", "machine_id", "boot_id", "collected_at", "system", "arch", "init", "cpu", "memory", "devices", "backend",
    "candidates", "class_id", "cmake_flags", "links", "warnings", "user", "psutil",
]  # fmt: skip
DEVICE = [
    "name", "backend", "description", "kind", "pool", "total", "free", "usable", "arch", "pci_bus_id", "source",
    "warnings",
]  # fmt: skip


def with_cards(files: dict[str, str] | None = None) -> FakeRunner:
    smi = RECORDINGS / "nvidia_smi"
    core = "index,uuid,name,pci.bus_id,driver_version,memory.total,memory.used,memory.free"
    return FakeRunner(
        {**FILES, **(files or {})},
        {
            f"nvidia-smi --query-gpu={core}": Result(0, (smi / "core_two_cards_570.csv").read_text(), ""),
            "nvidia-smi --query-gpu=uuid,compute_cap": Result(
                0, (smi / "compute_cap_two_cards_570.csv").read_text(), ""
            ),
            "nvidia-smi -L": Result(0, (smi / "list_two_cards_570.txt").read_text(), ""),
            "nvcc --version": Result(0, (smi / "nvcc_12.4.txt").read_text(), ""),
        },
    )


def facts(runner: FakeRunner, **options: Any) -> dict[str, Any]:
    return collect(runner, IDENTITY, **options).to_dict()


def test_a_cpu_host_has_every_key_of_the_contract() -> None:
    found = facts(FakeRunner(FILES))
    assert [key for key in CONTRACT if key not in found] == []
    assert [key for key in DEVICE if key not in found["devices"][0]] == []
    assert (found["schema"], found["machine_id"], found["backend"], found["init"]) == (1, MACHINE, "cpu", "none")
    assert set(found["memory"]) == {"total", "available", "limit", "usable"}
    assert found["class_id"] == "linux-x86_64-glibc2.36-cpu-x86-64-v4"
    assert found["cmake_flags"] == []
    assert found["user"]["home"] == "/home/deploy"
    assert [entry["backend"] for entry in found["candidates"]] == ["cuda", "rocm", "sycl", "vulkan", "cpu"]
    assert json.loads(json.dumps(found)) == found


def test_a_cuda_host_keeps_its_cpu_as_a_device_and_names_its_class() -> None:
    found = facts(with_cards())
    assert [device["name"] for device in found["devices"]] == ["CUDA0", "CUDA1", "CPU"]
    assert found["backend"] == "cuda"
    assert found["class_id"] == "linux-x86_64-glibc2.36-cuda12-sm86-sm89-x86-64-v4"
    assert found["cmake_flags"][0] == "-DGGML_CUDA=ON"
    first = found["candidates"][0]
    assert (first["backend"], first["devices"], first["chosen"], first["note"]) == (
        "cuda",
        ["CUDA0", "CUDA1"],
        True,
        None,
    )
    assert (first["class_id"], first["cmake_flags"]) == (found["class_id"], found["cmake_flags"])


def test_the_operator_may_choose_the_backend() -> None:
    found = facts(with_cards(), backend="cpu")
    assert (found["backend"], found["cmake_flags"]) == ("cpu", [])
    with pytest.raises(HostError, match=r"box: no cuda device was found \(cuda: no NVIDIA card; rocm: .*; cpu: CPU\)"):
        facts(FakeRunner(FILES), backend="cuda")
    with pytest.raises(HostError, match="'abacus' is unknown"):
        facts(FakeRunner(FILES), backend="abacus")


def test_a_broken_card_does_not_become_a_silent_cpu() -> None:
    card = "/sys/bus/pci/devices/0000:01:00.0"
    runner = FakeRunner(
        {**FILES, f"{card}/vendor": "0x10de", f"{card}/class": "0x030000"},
        {"nvidia-smi": Result(9, "NVIDIA-SMI has failed because it couldn't communicate with the driver\n", "")},
    )
    found = facts(runner)
    assert found["backend"] == "cpu"
    assert "modprobe nvidia" in found["warnings"][0]


def test_a_card_without_a_driver_is_a_warning_that_says_what_to_do() -> None:
    card = "/sys/bus/pci/devices/0000:03:00.0"
    found = facts(FakeRunner({**FILES, f"{card}/vendor": "0x1002\n", f"{card}/class": "0x038000\n"}))
    assert found["backend"] == "cpu"
    assert found["candidates"][1]["backend"] == "rocm"
    assert any("load amdgpu with compute support" in text for text in found["warnings"])
    assert any("install vulkan-tools" in text for text in found["warnings"])


def test_other_systems_are_told_to_declare_their_devices() -> None:
    other = Identity(system="FreeBSD", arch="amd64", libc="", hostname="beastie", user={})
    with pytest.raises(HostError, match=r"beastie: FreeBSD is not detected.*llama_worker_devices_declared"):
        collect(FakeRunner(), other)


@pytest.mark.parametrize(
    ("files", "links_", "init"),
    [
        ({"/proc/1/comm": "systemd\n", "/run/systemd/system/x": ""}, {}, "systemd"),
        (
            {"/proc/1/comm": "init\n", "/run/systemd/system/x": ""},
            {"/proc/1/exe": "/usr/lib/systemd/systemd"},
            "systemd",
        ),
        ({"/proc/1/comm": "systemd\n"}, {}, "none"),
        ({"/proc/1/comm": "tini\n", "/run/systemd/system/x": ""}, {}, "none"),
        ({}, {}, "none"),
    ],
)
def test_systemd_counts_only_where_it_runs_as_process_1(
    files: dict[str, str], links_: dict[str, str], init: str
) -> None:
    assert init_system(FakeRunner(files, links=links_)) == init


@pytest.mark.parametrize(
    ("files", "traits"),
    [
        ({"/proc/sys/kernel/osrelease": "5.15.167.4-microsoft-standard-WSL2\n"}, ("wsl",)),
        ({"/proc/device-tree/compatible": "nvidia,p3737-0000+p3701-0005\0nvidia,tegra234\0"}, ("tegra",)),
        ({"/sys/devices/soc0/family": "Tegra\n"}, ("tegra",)),
        ({"/proc/mounts": "lxcfs /proc/meminfo fuse.lxcfs rw 0 0\n"}, ("container", "lxc")),
        ({"/.dockerenv": ""}, ("container",)),
        ({}, ()),
    ],
)
def test_traits(files: dict[str, str], traits: tuple[str, ...]) -> None:
    """B3-05 and B3-17: one marker is enough."""
    assert host_traits(FakeRunner(files)) == traits


def test_a_container_without_machine_id_gets_a_lasting_one_and_a_warning() -> None:
    files = {key: text for key, text in FILES.items() if key != "/etc/machine-id"}
    files["/sys/class/net/eth0/address"] = "02:00:00:00:00:01\n"
    first, second = facts(FakeRunner(files)), facts(FakeRunner(files))
    assert first["machine_id"] == second["machine_id"]
    assert len(first["machine_id"]) == 32
    assert "no /etc/machine-id" in first["warnings"][0]
    files["/sys/class/net/eth0/address"] = "02:00:00:00:00:02\n"
    assert facts(FakeRunner(files))["machine_id"] != first["machine_id"]


def test_links_tell_only_what_is_known() -> None:
    net = "/sys/class/net"
    files = {
        f"{net}/eth0/device/vendor": "",
        f"{net}/eth0/speed": "2500\n",
        f"{net}/eth0/mtu": "1500\n",
        f"{net}/lo/mtu": "65536\n",
        f"{net}/veth12/mtu": "1500\n",
        f"{net}/wg0/uevent": "DEVTYPE=wireguard\nINTERFACE=wg0\n",
        f"{net}/wg0/mtu": "1420\n",
        f"{net}/wlan0/device/vendor": "",
        f"{net}/wlan0/wireless/status": "",
        f"{net}/wlan0/speed": "-1\n",
    }
    assert links(FakeRunner(files), IDENTITY.addresses) == [
        {"interface": "eth0", "address": "10.0.0.2", "speed_mbps": 2500, "mtu": 1500, "medium": "wired"},
        {"interface": "wg0", "address": "10.9.0.2", "speed_mbps": None, "mtu": 1420, "medium": "wireguard"},
        {"interface": "wlan0", "address": None, "speed_mbps": None, "mtu": None, "medium": "wireless"},
    ]


def test_our_own_processes_are_known_by_program_unit_or_number() -> None:
    runner = FakeRunner(
        {
            "/proc/7/cgroup": "0::/system.slice/llama-rpc-default-a.service\n",
            "/proc/8/cgroup": "0::/system.slice/ssh.service\n",
            "/proc/9/cgroup": "1:name=systemd:/system.slice/llama-rpc-default-b.service/sub\n",
            "/proc/meminfo": "",
        },
        links={
            "/proc/8/exe": "/opt/llamafleet/builds/b11434-1/bin/ggml-rpc-server (deleted)",
            "/proc/9/exe": "/opt/llamafleet-other/x",
        },
    )
    assert own_processes(runner, Own(prefixes=("/opt/llamafleet/",))) == (8,)
    assert own_processes(runner, Own(units=("llama-rpc-default-a", "llama-rpc-default-b.service"))) == (7, 9)
    assert own_processes(runner, Own(pids=(3,))) == (3,)
    assert own_processes(runner, Own(prefixes=("/",))) == ()


def test_a_running_worker_of_ours_does_not_lower_the_capacity() -> None:
    """Law 18: the second run, with a worker that holds 9 GiB, finds what the first found."""
    held = 9 << 20
    before = facts(FakeRunner(FILES))["memory"]
    files = {
        **FILES,
        "/proc/meminfo": FILES["/proc/meminfo"].replace("24213480", str(24213480 - held)),
        "/proc/42/status": f"Name:\tggml-rpc-server\nRssAnon:\t{held} kB\nRssFile:\t4000 kB\n",
    }
    runner = FakeRunner(files, links={"/proc/42/exe": "/opt/llamafleet/builds/b/bin/ggml-rpc-server"})
    after = facts(runner, own=Own(prefixes=("/opt/llamafleet",)))["memory"]
    assert after["usable"] == before["usable"]
    assert after["available"] == before["available"] - held * 1024
    assert facts(runner)["memory"]["usable"] == before["usable"] - held * 1024


def test_the_host_this_runs_on_is_described_quickly() -> None:
    start = time.monotonic()
    found = collect(SystemRunner(), identify()).to_dict()
    assert time.monotonic() - start < 10, "a hang, not a measurement"
    assert found["memory"]["usable"] <= found["memory"]["total"]
    assert found["devices"][-1]["name"] == "CPU"
    assert found["cpu"]["logical_cores"] <= len(os.sched_getaffinity(0))
    assert found["user"]["uid"] == os.geteuid()
