# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Processor and memory of Linux hosts, from recorded /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_cpu import (
    DetectError,
    anonymous_bytes,
    arc_reclaimable,
    cpu_device,
    cpu_quota,
    detect_cpu,
    detect_memory,
    isa_level,
    memory_rooms,
    parse_cpu_list,
    parse_cpuinfo,
    parse_meminfo,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import GIB, MIB, reserve_bytes
from ansible_collections.llamafleet.rpc.tests.unit.fakes import FakeRunner
from hypothesis import given
from hypothesis import strategies as st

RECORDINGS = Path(__file__).parents[2] / "recordings" / "proc"
MEMINFO = (RECORDINGS / "meminfo_24g").read_text()
TOTAL = 24684092 * 1024
AVAILABLE = 24213480 * 1024
XEON = (RECORDINGS / "cpuinfo_sapphire_rapids_vm").read_text()


def meminfo(total_kib: int, available_kib: int) -> str:
    return f"MemTotal: {total_kib} kB\nMemAvailable: {available_kib} kB\n"


def topology(cores: list[tuple[int, int]]) -> dict[str, str]:
    """Files of /sys for CPUs that belong to (package, core)."""
    files = {}
    for cpu, (package, core) in enumerate(cores):
        where = f"/sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = ",".join(str(other) for other, place in enumerate(cores) if place == (package, core))
        files[f"{where}/physical_package_id"] = f"{package}\n"
        files[f"{where}/core_id"] = f"{core}\n"
        files[f"{where}/thread_siblings_list"] = siblings + "\n"
    return files


# --- memory


def test_a_host_without_limits_lends_what_is_there_less_the_reserve() -> None:
    memory = detect_memory(FakeRunner({"/proc/meminfo": MEMINFO}))
    assert memory.to_dict() == {
        "total": TOTAL,
        "available": AVAILABLE,
        "limit": None,
        "usable": AVAILABLE - reserve_bytes("system_ram", TOTAL),
    }
    assert memory.warnings == ()


def test_an_uncapped_container_does_not_count_page_cache_as_used() -> None:
    """B3-20: memory.max says max, and memory.current is nearly all page cache of model files."""
    files = {
        "/proc/meminfo": meminfo(32768000, 31600000),
        "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/memory.max": "max\n",
        "/sys/fs/cgroup/memory.current": "27584460390\n",
        "/sys/fs/cgroup/memory.stat": "anon 472446402\nfile 26875861278\ninactive_file 11499724431\n",
    }
    memory = detect_memory(FakeRunner(files))
    assert memory.limit is None
    assert memory.available == 31600000 * 1024


def test_a_capped_container_counts_only_what_cannot_be_given_back() -> None:
    files = {
        "/proc/meminfo": MEMINFO,
        "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
        "/sys/fs/cgroup/memory.current": f"{7 * GIB}\n",
        "/sys/fs/cgroup/memory.stat": (
            f"anon {GIB}\nfile {6 * GIB}\ninactive_file {4 * GIB}\nactive_file {GIB}\nslab_reclaimable {MIB}\n"
        ),
    }
    memory = detect_memory(FakeRunner(files))
    assert memory.limit == 8 * GIB
    assert memory.available == 6 * GIB + MIB
    assert memory.usable == memory.available - reserve_bytes("system_ram", 8 * GIB)
    assert any("limited to 8192 MiB of 24105 MiB" in text for text in memory.warnings)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("1073741824", 1024 * MIB),
        ("9223372036854771712", None),
        ("9223372036854710272", None),
        ("-1", None),
        ("", None),
    ],
)
def test_cgroup_v1_limits_and_their_way_to_say_none(limit: str, expected: int | None) -> None:
    """B3-21: unlimited is the greatest multiple of the page size (4 KiB and 64 KiB pages here)."""
    files = {
        "/proc/meminfo": MEMINFO,
        "/proc/self/cgroup": "4:memory:/docker/abc\n1:name=systemd:/docker/abc\n0::/\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": limit + "\n",
    }
    memory = detect_memory(FakeRunner(files))
    assert memory.limit == expected
    assert (memory.available == AVAILABLE) == (expected is None)


def test_the_least_limit_up_the_tree_counts_and_a_throttle_is_a_limit() -> None:
    files = {
        "/proc/meminfo": MEMINFO,
        "/proc/self/cgroup": "0::/user.slice/user-1000.slice/session-2.scope\n",
        "/sys/fs/cgroup/user.slice/user-1000.slice/session-2.scope/memory.max": "max\n",
        "/sys/fs/cgroup/user.slice/user-1000.slice/memory.max": f"{6 * GIB}\n",
        "/sys/fs/cgroup/user.slice/user-1000.slice/memory.current": f"{GIB}\n",
        "/sys/fs/cgroup/user.slice/memory.max": f"{8 * GIB}\n",
        "/sys/fs/cgroup/user.slice/memory.high": f"{5 * GIB}\n",
        "/sys/fs/cgroup/user.slice/memory.current": f"{4 * GIB}\n",
    }
    memory = detect_memory(FakeRunner(files))
    assert memory.limit == 5 * GIB
    assert memory.available == 1 * GIB


def test_a_limit_in_the_v1_half_of_a_hybrid_tree_is_seen() -> None:
    files = {
        "/proc/self/cgroup": "4:memory:/box\n0::/box\n",
        "/sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{2 * GIB}\n",
        "/sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{GIB}\n",
        "/sys/fs/cgroup/memory/box/memory.stat": f"total_inactive_file {MIB}\ntotal_active_file {MIB}\n",
        "/sys/fs/cgroup/unified/box/memory.max": "max\n",
    }
    assert memory_rooms(FakeRunner(files)) == [("/sys/fs/cgroup/memory/box", 2 * GIB, GIB - 2 * MIB)]


def test_our_own_memory_is_added_back_but_never_above_what_there_is() -> None:
    before = detect_memory(FakeRunner({"/proc/meminfo": MEMINFO}))
    held = 12 * GIB
    files = {
        "/proc/meminfo": meminfo(24684092, 24213480 - held // 1024),
        "/proc/7/status": f"Name:\tx\nVmRSS:\t99999999 kB\nRssAnon:\t{held // 1024} kB\nRssFile:\t9999 kB\n",
    }
    runner = FakeRunner(files)
    after = detect_memory(runner, own=anonymous_bytes(runner, [7, 8]))
    assert after.usable == before.usable
    assert after.available == before.available - held
    assert detect_memory(runner, own=1 << 60).usable == TOTAL - reserve_bytes("system_ram", TOTAL)


def test_the_zfs_cache_counts_as_available_but_not_that_of_an_outer_host() -> None:
    arcstats = (RECORDINGS / "arcstats").read_text()
    assert arc_reclaimable(arcstats) == 7 * GIB
    files = {"/proc/meminfo": meminfo(24684092, 8388608), "/proc/spl/kstat/zfs/arcstats": arcstats}
    assert detect_memory(FakeRunner(files)).available == 15 * GIB
    assert detect_memory(FakeRunner(files), lxc=True).available == 8 * GIB


def test_a_container_that_sees_less_than_a_cpu_worker_will_report_is_told() -> None:
    memory = detect_memory(FakeRunner({"/proc/meminfo": MEMINFO}), physical=4 * TOTAL, lxc=True)
    assert memory.total == TOTAL
    assert "a CPU worker reports 96422 MiB" in memory.warnings[0]


def test_huge_pages_are_a_warning() -> None:
    memory = detect_memory(FakeRunner({"/proc/meminfo": (RECORDINGS / "meminfo_hugepages").read_text()}))
    assert memory.hugepages == 32 * GIB
    assert any("huge pages" in text and "vm.nr_hugepages" in text for text in memory.warnings)


def test_old_kernels_without_memavailable() -> None:
    text = "MemTotal: 1048576 kB\nMemFree: 500000 kB\nBuffers: 1000 kB\nCached: 2000 kB\n"
    assert detect_memory(FakeRunner({"/proc/meminfo": text})).available == 503000 * 1024


def test_no_proc_is_an_error_that_says_so() -> None:
    with pytest.raises(DetectError, match="/proc/meminfo has no MemTotal"):
        detect_memory(FakeRunner())
    with pytest.raises(DetectError, match="/proc/cpuinfo cannot be read"):
        detect_cpu(FakeRunner(), "x86_64")


# --- processor


def test_a_virtual_machine_with_two_cores() -> None:
    cpu = detect_cpu(FakeRunner({"/proc/cpuinfo": XEON}), "x86_64")
    assert (cpu.model, cpu.physical_cores, cpu.logical_cores) == ("Intel(R) Xeon(R) Processor", 2, 2)
    assert (cpu.isa, cpu.numa_nodes, cpu.performance_cores) == ("x86-64-v4", 1, None)
    assert {"avx512f", "avx_vnni", "fma"} <= set(cpu.features)
    assert "fpu" not in cpu.features


def test_a_board_without_model_name() -> None:
    cpu = detect_cpu(FakeRunner({"/proc/cpuinfo": (RECORDINGS / "cpuinfo_raspberry_pi_5").read_text()}), "aarch64")
    assert (cpu.model, cpu.logical_cores, cpu.isa) == ("Raspberry Pi 5 Model B Rev 1.0", 2, "armv8.2-a")


@pytest.mark.parametrize(
    ("arch", "lacks", "level"),
    [
        ("x86_64", set(), "x86-64-v4"),
        ("x86_64", {"avx512vl"}, "x86-64-v3"),
        ("x86_64", {"avx2"}, "x86-64-v2"),
        ("x86_64", {"sse4_2"}, "x86-64-v1"),
        ("riscv64", set(), "riscv64"),
    ],
)
def test_instruction_set_levels(arch: str, lacks: set[str], level: str) -> None:
    flags = set(parse_cpuinfo(XEON)[0]["flags"].split())
    assert isa_level(arch, flags - lacks) == level


def test_threads_of_one_core_and_cores_of_two_packages() -> None:
    files = {"/proc/cpuinfo": XEON, "/proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-7\n"}
    files.update(topology([(0, 0), (0, 1), (1, 0), (1, 1)] * 2))
    cpu = detect_cpu(FakeRunner(files), "x86_64")
    assert (cpu.physical_cores, cpu.logical_cores) == (4, 8)


def test_affinity_and_quota_bound_the_cores() -> None:
    files = {"/proc/cpuinfo": XEON, "/proc/self/status": "Cpus_allowed_list:\t0-5\n", "/proc/self/cgroup": "0::/a/b\n"}
    files.update(topology([(0, core) for core in range(8)]))
    assert detect_cpu(FakeRunner(files), "x86_64").physical_cores == 6
    files["/sys/fs/cgroup/a/cpu.max"] = "250000 100000\n"
    files["/sys/fs/cgroup/a/b/cpu.max"] = "max 100000\n"
    cpu = detect_cpu(FakeRunner(files), "x86_64")
    assert (cpu.physical_cores, cpu.logical_cores) == (2, 3)


def test_a_quota_of_cgroup_v1() -> None:
    files = {
        "/proc/self/cgroup": "3:cpu,cpuacct:/docker/x\n",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    assert cpu_quota(FakeRunner(files)) == 1.5
    files["/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us"] = "-1\n"
    assert cpu_quota(FakeRunner(files)) is None


def test_hybrid_parts_tell_their_fast_cores() -> None:
    files = {
        "/proc/cpuinfo": XEON,
        "/proc/self/status": "Cpus_allowed_list:\t0-7\n",
        "/sys/devices/cpu_core/cpus": "0-3\n",
        **topology([(0, 0), (0, 0), (0, 1), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]),
    }
    cpu = detect_cpu(FakeRunner(files), "x86_64")
    assert (cpu.physical_cores, cpu.performance_cores) == (6, 2)
    del files["/sys/devices/cpu_core/cpus"]
    files.update({f"/sys/devices/system/cpu/cpu{n}/cpu_capacity": "414\n" if n < 6 else "1024\n" for n in range(8)})
    assert detect_cpu(FakeRunner(files), "aarch64").performance_cores == 2


def test_numa_nodes_are_counted() -> None:
    nodes = {f"/sys/devices/system/node/{name}/x": "" for name in ("node0", "node1", "node12", "nodes", "power")}
    assert detect_cpu(FakeRunner({"/proc/cpuinfo": XEON, **nodes}), "x86_64").numa_nodes == 3


def test_the_cpu_is_a_device_of_the_ram_pool() -> None:
    runner = FakeRunner({"/proc/meminfo": MEMINFO, "/proc/cpuinfo": XEON})
    device = cpu_device(detect_cpu(runner, "x86_64"), detect_memory(runner), "m1")
    assert (device.name, device.kind, device.pool, device.total) == ("CPU", "system_ram", "m1/ram", TOTAL)


# --- anything at all

TEXT = st.text(alphabet=st.sampled_from("0123456789 -,:/kBmax\n\tMemTotalAvbilehrdugpzs٣²"), max_size=200)


@given(TEXT, TEXT, TEXT, TEXT, st.integers(0, 1 << 62))
def test_any_text_gives_typed_errors_and_bounded_figures(
    info: str, cgroup: str, limit: str, arc: str, own: int
) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 1000000 kB\n" + info,
        "/proc/self/cgroup": cgroup + "\n0::/x\n",
        "/sys/fs/cgroup/x/memory.max": limit,
        "/sys/fs/cgroup/x/memory.current": arc,
        "/sys/fs/cgroup/x/cpu.max": limit,
        "/proc/spl/kstat/zfs/arcstats": arc,
        "/proc/cpuinfo": info,
        "/proc/self/status": "Cpus_allowed_list:" + limit,
    }
    try:
        memory = detect_memory(FakeRunner(files), own)
        cpu = detect_cpu(FakeRunner(files), "x86_64")
    except DetectError:
        return
    assert 0 <= memory.usable <= (memory.limit if memory.limit is not None else memory.total) <= memory.total
    assert 0 <= memory.available <= memory.total
    assert cpu.physical_cores >= 1
    assert cpu.logical_cores >= 1


@given(TEXT)
def test_any_text_is_a_cpu_list_or_none(text: str) -> None:
    assert all(0 <= cpu < 8192 for cpu in parse_cpu_list(text))
    parse_cpuinfo(text)
    assert all(isinstance(value, int) for value in parse_meminfo(text).values())
