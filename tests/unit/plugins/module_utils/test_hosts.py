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
from ansible_collections.llamafleet.rpc.tests.unit import recorded
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
    start, work = time.monotonic(), time.process_time()
    found = collect(SystemRunner(), identify()).to_dict()
    assert time.process_time() - work < 0.5, "host_facts takes less than a second, Ansible's own start included"
    assert time.monotonic() - start < 10, "a hang, not a measurement"
    assert found["memory"]["usable"] <= found["memory"]["total"]
    assert found["devices"][-1]["name"] == "CPU"
    assert found["cpu"]["logical_cores"] <= len(os.sched_getaffinity(0))
    assert found["user"]["uid"] == os.geteuid()


# --- recorded hosts as wholes


def recorded_facts(*trees: str, **commands: Result | str) -> dict[str, Any]:
    return collect(recorded.linux(*[f"sysfs/{name}" for name in trees], commands=commands), IDENTITY).to_dict()


def test_wsl_is_found_and_warned_about() -> None:
    """B3-17: WSL2 is known by its kernel's name; nvidia-smi lies outside of every PATH of services."""
    runner = recorded.linux("sysfs/wsl2", commands=recorded.smi("core_wsl_rtx3500_581.csv"))
    runner.programs["nvidia-smi"] = "/usr/lib/wsl/lib/nvidia-smi"
    found = collect(runner, IDENTITY).to_dict()
    assert (found["backend"], found["traits"]) == ("cuda", ["wsl"])
    assert found["devices"][0]["environment"]["LD_LIBRARY_PATH"] == "/usr/lib/wsl/lib"
    assert any("mirrored networking" in text for text in found["warnings"])


def test_jetson_of_a_release_without_its_old_marker_files() -> None:
    """B3-05: no /etc/nv_tegra_release in JetPack 7.2; the device tree is enough."""
    found = recorded_facts("jetson_orin_l4t_r39")
    assert (found["traits"], found["backend"]) == (["tegra"], "cuda")
    device = found["devices"][0]
    assert (device["kind"], device["arch"], device["pool"]) == ("unified", "sm_87", found["devices"][-1]["pool"])
    assert recorded_facts("jetson_thor")["devices"][0]["arch"] == "sm_110"


def test_the_share_of_a_card_goes_to_the_one_that_llama_cpp_will_call_so() -> None:
    """B3-19: the 24576 MiB belong to CUDA1 under PCI order."""
    found = recorded_facts(**recorded.smi("core_1660_3090.csv"))
    assert [(d["name"], d["uuid"], d["total"] >> 20) for d in found["devices"][:2]] == [
        ("CUDA0", "GPU-e1", 6144),
        ("CUDA1", "GPU-e2", 24576),
    ]


def test_a_card_that_cuda_and_vulkan_see_is_one_device() -> None:
    commands = {
        **recorded.smi("core_two_cards_570.csv", "compute_cap_two_cards_570.csv", "list_two_cards_570.txt"),
        "nvcc": recorded.text("nvidia_smi/nvcc_12.4.txt"),
        "vulkaninfo": recorded.text("vulkaninfo/nvidia_and_llvmpipe.txt"),
        "glslc": "",
    }
    runner = recorded.linux("sysfs/nvidia_two_cards", commands=commands)
    found = collect(runner, IDENTITY).to_dict()
    assert [device["name"] for device in found["devices"]] == ["CUDA0", "CUDA1", "CPU"]
    assert found["candidates"][3]["same_as"] == {"Vulkan0": "CUDA0", "Vulkan1": "CUDA1"}
    forced = collect(runner, IDENTITY, backend="vulkan").to_dict()
    assert [device["name"] for device in forced["devices"]] == ["Vulkan0", "Vulkan1", "CPU"]
    # Memory and pool are those of the card, whoever asks: Vulkan counts NVIDIA's BAR as a heap of its own.
    for one, other in zip(found["devices"], forced["devices"]):
        assert (one["pool"], one["total"], one["usable"]) == (other["pool"], other["total"], other["usable"])


def test_a_lost_card_a_missing_module_and_a_blocked_container_say_so() -> None:
    lost = recorded_facts("nvidia_two_cards", **recorded.smi("core_lost_gpu.csv"))
    assert any("does not say how much memory" in text for text in lost["warnings"])
    uvm = recorded_facts("nvidia_uvm_missing", **recorded.smi("core_4090_570.csv"))
    assert any("/dev/nvidia-uvm is missing" in text for text in uvm["warnings"])
    blocked = recorded_facts(
        "nvidia_two_cards", **{"nvidia-smi": Result(17, recorded.text("nvidia_smi/nvml_unknown_rc17.txt"), "")}
    )
    assert (blocked["backend"], "restart the container" in blocked["warnings"][0]) == ("cpu", True)


def test_virtual_gpus_and_grace_are_detected_and_warned_about() -> None:
    guest = recorded_facts(**recorded.smi("core_vgpu_guest.csv"))
    assert any("a virtual GPU" in text for text in guest["warnings"])
    streaming = recorded_facts(**recorded.smi("core_vgpu_a_profile.csv"))
    assert (streaming["backend"], streaming["devices"][0]["usable"]) == ("cpu", None)
    assert any("CUDA switched off" in text for text in streaming["warnings"])
    grace = recorded_facts(**recorded.smi("core_gh200_565.csv"))
    assert grace["devices"][0]["kind"] == "dedicated"
    assert any("NUMA mode" in text for text in grace["warnings"])
    thor = recorded_facts(**recorded.smi("core_thor.csv"))
    assert thor["devices"][0]["kind"] == "unified"


def test_memory_that_our_worker_took_through_a_unified_gpu_stays_usable() -> None:
    """Law 18 on a GB10: what the driver took from the RAM is in no process, but nvidia-smi knows whose it is."""
    commands: dict[str, Result | str] = {
        **recorded.smi("core_gb10_580.csv", "compute_cap_gb10_580.csv"),
        "nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory": recorded.text("nvidia_smi/compute_apps_gb10.csv"),
    }
    total, held = 120 << 30, 60 << 30
    idle = collect(recorded.linux(commands=commands, ram=total, free=115 << 30), IDENTITY).to_dict()
    busy_runner = recorded.linux(commands=commands, ram=total, free=(115 << 30) - held)
    busy = collect(busy_runner, IDENTITY, own=Own(pids=(4242,))).to_dict()
    assert busy["devices"][0]["usable"] == idle["devices"][0]["usable"]
    assert collect(busy_runner, IDENTITY).to_dict()["devices"][0]["usable"] == idle["devices"][0]["usable"] - held


def test_memory_that_our_worker_took_through_gtt_is_added_back_once() -> None:
    """Law 18 on an APU: 60 GiB are ours, 40 GiB are others'; the capacity is that of the idle host, no more."""
    gib = 1 << 30
    name = "sysfs/amd_strix_halo_512m_gtt_96g_gfx1151"
    idle = collect(recorded.linux(name, ram=125 * gib, free=85 * gib), IDENTITY).to_dict()
    busy_runner = recorded.linux(name, ram=125 * gib, free=25 * gib)
    busy_runner.files["/proc/4242/fdinfo/5"] = recorded.text("hip/fdinfo_kernel_6.14")
    busy = collect(busy_runner, IDENTITY, own=Own(pids=(4242,))).to_dict()
    assert [device["usable"] for device in busy["devices"]] == [device["usable"] for device in idle["devices"]]
    assert idle["devices"][0]["usable"] == 81 * gib


def test_limits_of_containers_and_boards() -> None:
    """B3-20 and B3-21, and section 4 of the facts: v1 sentinel, v2 nested, LXC on ZFS, a Raspberry Pi."""
    gib = 1 << 30
    assert recorded_facts("cgroup_v1_sentinel")["memory"]["limit"] is None
    assert recorded_facts("cgroup_v1_limited")["memory"]["limit"] == gib
    nested = recorded_facts("cgroup_v2_nested")["memory"]
    assert (nested["limit"], nested["available"]) == (48 * gib, 46 * gib)
    guest = recorded_facts("lxc_guest")
    assert guest["traits"] == ["container", "lxc"]
    assert (guest["memory"]["limit"], guest["memory"]["available"]) == (16 * gib, 12 * gib)
    runner = recorded.linux("sysfs/raspberry_pi_5")
    runner.files["/proc/meminfo"] = recorded.text("proc/meminfo_raspberry_pi_5")
    runner.files["/proc/cpuinfo"] = recorded.text("proc/cpuinfo_raspberry_pi_5")
    board = collect(runner, recorded.identity(arch="aarch64")).to_dict()
    assert board["cpu"]["model"] == "Raspberry Pi 5 Model B Rev 1.0"
    assert any("cgroup_enable=memory" in text for text in board["warnings"])
    server = recorded_facts("cpu_server_two_sockets")
    assert (server["cpu"]["numa_nodes"], "NUMA" in server["candidates"][-1]["note"]) == (2, True)


TOOLS = ("nvidia-smi", "nvcc", "amd-smi", "rocm-smi", "hipconfig", "dmesg", "xpu-smi", "sycl-ls", "icpx", "vulkaninfo")


class HangingTools(SystemRunner):
    """A host with cards of every maker whose tools all hang; files are recorded, the tools are real processes."""

    def __init__(self, directory: Path) -> None:
        names = ("nvidia_two_cards", "amd_container_without_driver_files", "intel_arc_a380_i915_without_size")
        self.fake = recorded.linux(*[f"sysfs/{name}" for name in names])
        self.directory = directory
        for tool in (*TOOLS, "c++"):
            (directory / tool).write_text("#!/bin/sh\nexec sleep 60\n")
            (directory / tool).chmod(0o755)

    def read(self, path: str, limit: int = 1 << 20) -> str | None:
        return self.fake.read(path, limit)

    def listdir(self, path: str) -> list[str]:
        return self.fake.listdir(path)

    def readlink(self, path: str) -> str | None:
        return self.fake.readlink(path)

    def exists(self, path: str) -> bool:
        return self.fake.exists(path)

    def which(self, name: str) -> str | None:
        path = self.directory / name
        return str(path) if path.exists() else None


def test_every_tool_hanging_costs_one_time_out(tmp_path: Path) -> None:
    start = time.monotonic()
    found = collect(HangingTools(tmp_path), IDENTITY, timeout=1.5).to_dict()
    # One after the other they would take ten times as long.
    assert time.monotonic() - start < 4.5
    assert found["backend"] == "cpu"
    said = " ".join(found["warnings"])
    for tool in ("nvidia-smi", "amd-smi", "rocm-smi", "sycl-ls", "xpu-smi", "vulkaninfo"):
        assert f"{tool} did not answer in time" in said or f"{tool} static did not answer in time" in said
