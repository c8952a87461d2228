# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a build needs, checked before it: switches, toolkit and compiler limits, packages, class ids."""

from __future__ import annotations

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._backends import (
    HostError,
    choose,
    one_each,
    several_builds,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._builds import BuildError, merge_switches
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import GIB, Device, Finding
from ansible_collections.llamafleet.rpc.plugins.module_utils._hosts import collect
from ansible_collections.llamafleet.rpc.plugins.module_utils._toolchains import (
    FAMILIES,
    Compilers,
    class_id,
    cuda_architectures,
    cuda_problems,
    cuda_supports,
    family,
    find_compilers,
    gcc_major,
    hip_problems,
    how_to_get,
    packages,
    switches,
)
from ansible_collections.llamafleet.rpc.tests.unit.fakes import FakeRunner
from ansible_collections.llamafleet.rpc.tests.unit.recorded import RECORDINGS, identity, linux, smi, text


def device(arch: str | None, backend: str = "cuda", name: str = "a card", slot: str | None = None) -> Device:
    return Device(f"{backend.upper()}0", backend, name, "dedicated", "m/gpu/x", GIB, GIB, GIB, arch, slot)


# --- CUDA


@pytest.mark.parametrize(
    ("toolkit", "capability", "fits"),
    [
        ((11, 8), 61, True),
        ((11, 8), 90, True),
        ((11, 8), 120, False),
        ((12, 4), 37, False),
        ((12, 4), 61, True),
        ((12, 8), 120, True),
        ((12, 8), 121, False),
        ((12, 9), 121, True),
        ((12, 9), 61, True),
        ((13, 0), 70, False),
        ((13, 0), 75, True),
        ((13, 0), 110, True),
        ((13, 2), 121, True),
        ((13, 9), 120, True),
    ],
)
def test_which_toolkit_compiles_for_which_card(toolkit: tuple[int, int], capability: int, fits: bool) -> None:
    assert cuda_supports(toolkit, capability) == fits


@pytest.mark.parametrize(
    ("arch", "toolkit", "gcc", "driver", "others", "says"),
    [
        ("sm_89", None, None, "570.1", (), "no CUDA toolkit"),
        ("sm_61", "13.0", 12, "580.1", (), "capability 6.1: it needs a toolkit before 13.0"),
        ("sm_121", "12.8", 12, "570.1", (), "capability 12.1: it needs 12.9 or later"),
        ("sm_89", "12.0", 13, "570.1", (), "takes gcc up to 12, and this host has gcc 13"),
        ("sm_89", "12.4", 14, "570.1", (15,), "install g++-13"),
        ("sm_89", "13.0", 12, "570.133.07", (), "driver 570.133.07 is too old"),
        ("sm_89", "12.4", 14, "570.1", (12, 13), None),
        ("sm_89", "12.4", 13, "570.1", (), None),
        ("sm_75", "13.5", 16, "600.1", (), None),
        (None, "12.4", None, None, (), None),
    ],
)
def test_what_would_fail_after_twenty_minutes_fails_now(
    arch: str | None,
    toolkit: str | None,
    gcc: int | None,
    driver: str | None,
    others: tuple[int, ...],
    says: str | None,
) -> None:
    found = cuda_problems([device(arch)], toolkit, gcc, driver, others)
    assert len(found) == (1 if says else 0)
    assert says is None or says in found[0]


def test_an_older_compiler_that_is_there_is_used() -> None:
    flags = switches("cuda", [device("sm_89")], "Linux", "12.4", Compilers(14, (12, 13)))
    assert "-DCMAKE_CUDA_HOST_COMPILER=g++-13" in flags
    assert not any(
        "HOST_COMPILER" in flag for flag in switches("cuda", [device("sm_89")], "Linux", "12.4", Compilers(13))
    )


def test_compilers_of_a_host() -> None:
    runner = FakeRunner(commands={}, programs={"c++": "/usr/bin/c++", "g++-12": "/usr/bin/g++-12"})
    assert find_compilers(runner, 1.0) == Compilers(None, (12,))
    majors = {name: gcc_major(text(f"toolchain/{name}.txt")) for name in ("gxx_debian_12", "gxx_fedora_15", "clang_19")}
    assert majors == {"gxx_debian_12": 12, "gxx_fedora_15": 15, "clang_19": None}


def test_the_compiler_of_ubuntu_24_04_is_too_new_for_its_own_toolkit() -> None:
    """nvidia-cuda-toolkit 12.0 and gcc 13: the problem is in the facts before anything is built."""
    commands = smi("core_4090_570.csv", "compute_cap_4090_570.csv")
    commands["nvcc --version"] = "Cuda compilation tools, release 12.0, V12.0.140\n"
    commands["c++ --version"] = text("toolchain/gxx_ubuntu_13.txt")
    host = collect(linux("sysfs/nvidia_two_cards", commands=commands), identity()).to_dict()
    problem = host["candidates"][0]["problems"][0]
    assert "takes gcc up to 12" in problem
    assert problem in host["warnings"]


# --- other backends


@pytest.mark.parametrize(
    ("arch", "toolkit", "says"),
    [
        ("gfx1100", "5.2", "ROCm 5.2 is too old: llama.cpp needs 6.1"),
        ("gfx1151", "6.2", "does not know gfx1151: it needs 6.4"),
        ("gfx1151", "7.1", None),
        ("gfx1100", None, "no ROCm toolkit"),
    ],
)
def test_limits_of_rocm(arch: str, toolkit: str | None, says: str | None) -> None:
    found = hip_problems([device(arch, "rocm")], toolkit)
    assert len(found) == (1 if says else 0)
    assert says is None or says in found[0]


@pytest.mark.parametrize(
    ("backend", "archs", "system", "expected"),
    [
        ("cuda", ["sm_86", "sm_120"], "Linux", "-DCMAKE_CUDA_ARCHITECTURES=86;120a"),
        ("rocm", ["gfx1151", "gfx1100"], "Linux", "-DGPU_TARGETS=gfx1100;gfx1151"),
        ("vulkan", [None], "Linux", "-DGGML_VULKAN=ON"),
        ("sycl", [None], "Linux", "-DCMAKE_CXX_COMPILER=icpx"),
        ("metal", [None], "Darwin", "-DGGML_METAL_EMBED_LIBRARY=ON"),
        ("cpu", [None], "Darwin", "-DGGML_METAL=OFF"),
    ],
)
def test_switches_of_each_backend(backend: str, archs: list[str | None], system: str, expected: str) -> None:
    flags = switches(backend, [device(arch, backend) for arch in archs], system)
    assert expected in flags
    assert merge_switches(flags)


def test_architectures_are_the_union_of_the_cards_and_never_native() -> None:
    """B2-07: on a machine without a GPU "native" becomes an error text. 12.0 is 120a, as ggml itself writes it."""
    cards = [device(arch) for arch in ("sm_120", "sm_86", "sm_61", "sm_86")]
    assert cuda_architectures(cards) == ["61", "86", "120a"]
    flags = switches("cuda", cards, "Linux")
    assert "-DCMAKE_CUDA_ARCHITECTURES=61;86;120a" in flags and not any("native" in flag for flag in flags)
    with pytest.raises(BuildError, match="native is refused"):
        merge_switches(flags, ["-DCMAKE_CUDA_ARCHITECTURES=native"])


def test_a_cpu_build_on_linux_has_no_switches_and_unknown_cards_no_architectures() -> None:
    assert switches("cpu", [], "Linux") == ()
    assert switches("rocm", [device(None, "rocm")], "Linux") == ("-DGGML_HIP=ON",)


def test_class_ids_tell_hosts_that_may_share_a_binary() -> None:
    def name(finding: Finding, isa: str = "x86-64-v3") -> str:
        return class_id("Linux", "x86_64", "glibc2.36", finding, isa)

    cuda = Finding("cuda", (device("sm_89"),), toolkit="12.4")
    assert name(cuda) == "linux-x86_64-glibc2.36-cuda12-sm89-x86-64-v3"
    assert name(cuda) == name(Finding("cuda", (device("sm_89", name="another"),), toolkit="12.9"))
    others = [
        name(cuda, "x86-64-v4"),
        name(Finding("cuda", (device("sm_86"),), toolkit="12.4")),
        name(Finding("cuda", (device("sm_89"),), toolkit="13.0")),
        name(Finding("rocm", (device("gfx1100", "rocm"),), toolkit="6.4")),
        name(Finding("cpu")),
    ]
    assert len({name(cuda), *others}) == 6


# --- packages


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("debian_12", "debian"),
        ("ubuntu_24.04", "debian"),
        ("raspios_12", "debian"),
        ("fedora_42", "redhat"),
        ("rocky_9", "redhat"),
        ("arch", "arch"),
        ("opensuse_tumbleweed", "suse"),
        ("alpine_3.21", None),
    ],
)
def test_families_of_distributions(release: str, expected: str | None) -> None:
    assert family("Linux", text(f"os_release/{release}")) == expected
    assert family("Darwin") == "darwin"


def test_every_family_and_backend_says_what_to_install() -> None:
    for where in FAMILIES:
        for backend in ("cpu", "vulkan", "cuda", "rocm", "sycl", "metal"):
            found = packages(backend, where)
            assert any(name.startswith("cmake") for name in found.build)
            assert len(set(found.build)) == len(found.build)
            if where != "darwin" and backend not in ("cpu", "metal"):
                assert len(found.build) > len(packages("cpu", where).build) or found.note
    assert "glslc" in packages("vulkan", "debian").build
    assert packages("cpu", None).note


def test_what_lacks_is_told_with_the_way_to_get_it() -> None:
    said = how_to_get(packages("vulkan", "debian").to_dict())
    assert "install git build-essential cmake" in said and "glslc" in said
    assert "llama_build_install_packages" in said
    assert "NVIDIA's own repository" in how_to_get(packages("cuda", "redhat").to_dict())
    assert how_to_get({}) == how_to_get({"build": [], "run": [], "note": None}) == ""


# --- one device, several backends


def test_a_card_that_two_backends_see_is_one_device() -> None:
    cuda = Finding("cuda", (device("sm_89", slot="0000:01:00.0"),))
    vulkan = Finding(
        "vulkan", (device(None, "vulkan", slot="0000:01:00.0"), device(None, "vulkan", slot="0000:02:00.0"))
    )
    kept, same = one_each((cuda, vulkan), cuda)
    assert [(d.backend, d.pci_bus_id) for d in kept] == [("cuda", "0000:01:00.0"), ("vulkan", "0000:02:00.0")]
    assert same == {"vulkan": {"VULKAN0": "CUDA0"}}
    kept, same = one_each((cuda, vulkan), vulkan)
    assert {d.backend for d in kept} == {"vulkan"}
    assert same == {"cuda": {"CUDA0": "VULKAN0"}}


def test_rocm_without_its_compiler_gives_way_to_vulkan_only_where_that_works() -> None:
    rocm = Finding("rocm", (device("gfx1100", "rocm"),), ready=False)
    vulkan, cpu = Finding("vulkan", (device(None, "vulkan"),)), Finding("cpu", (device(None, "cpu"),))
    assert choose((rocm, vulkan, cpu), "auto", "box") is vulkan
    assert choose((rocm, Finding("vulkan"), cpu), "auto", "box") is rocm
    assert choose((Finding("rocm", rocm.devices), vulkan, cpu), "auto", "box").backend == "rocm"
    assert choose((rocm, vulkan, cpu), "rocm", "box") is rocm
    with pytest.raises(HostError, match="no sycl device"):
        choose((rocm, vulkan, cpu), "sycl", "box")


def test_cards_of_two_makers_need_two_builds() -> None:
    commands = smi("core_4090_570.csv", "compute_cap_4090_570.csv")
    commands.update({"nvcc --version": text("nvidia_smi/nvcc_12.4.txt"), "hipconfig": text("hip/hipconfig_7.1.txt")})
    host = collect(linux("sysfs/nvidia_4090_and_amd_7900", commands=commands), identity()).to_dict()
    assert [d["name"] for d in host["devices"]] == ["CUDA0", "ROCm0", "CPU"]
    cuda, rocm = host["candidates"][:2]
    assert "an instance and a build for each backend" in cuda["note"]
    assert cuda["note"] == rocm["note"]
    assert cuda["class_id"] != rocm["class_id"]
    assert "-DGGML_HIP=ON" in rocm["cmake_flags"]
    integrated = Device("SYCL0", "sycl", "iGPU", "shared_system", "m/ram", GIB, GIB, GIB)
    assert several_builds((Finding("cuda", (device("sm_89"),)), Finding("sycl", (integrated,)))) is None


def test_the_recordings_are_many_and_in_the_form_that_their_readme_tells() -> None:
    files = [path for path in RECORDINGS.rglob("*") if path.is_file() and path.name != "README.md"]
    detection = [path for path in files if path.parent.name not in ("llama-server", "sockets")]
    assert len(detection) >= 60
    assert all(path.stat().st_size for path in detection)
