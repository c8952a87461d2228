# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What it takes to build llama.cpp for a backend on a host: switches, limits of toolkits and compilers, packages.

All that can be known before a build is checked before it: a CUDA build fails after twenty minutes over a compiler that
is too new. Which hosts may share a binary is the class id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import Device, Finding
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Runner

# --- CUDA -------------------------------------------------------------------------------------------------------------


class Cuda(NamedTuple):
    """A CUDA toolkit from this release on: architectures it compiles for, newest gcc, oldest driver."""

    release: tuple[int, int]
    lowest: int
    added: tuple[int, ...]
    gcc: int
    driver: int


# Read from ptxas and host_config.h of the toolkits (12.0: its documentation). `added` is new with that release; what
# is not in it holds on. Drivers: the first of the toolkit's major release (minor releases are compatible since 11).
CUDA = (
    Cuda((11, 8), 35, (35, 37, 50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90), 11, 450),
    Cuda((12, 0), 50, (), 12, 525),
    Cuda((12, 4), 50, (), 13, 525),
    Cuda((12, 8), 50, (100, 101, 120), 14, 525),
    Cuda((12, 9), 50, (103, 121), 14, 525),
    Cuda((13, 0), 75, (88, 110), 15, 580),
    Cuda((13, 5), 75, (107,), 16, 580),
)


def release_of(text: str | None) -> tuple[int, int] | None:
    """(12, 4) of '12.4'."""
    match = re.match(r"(\d{1,4})\.(\d{1,3})", text or "")
    return (int(match.group(1)), int(match.group(2))) if match else None


def cuda_row(release: tuple[int, int]) -> Cuda:
    """The row that holds for a release: the newest that is not newer; the first one for all before it."""
    return next((row for row in reversed(CUDA) if row.release <= release), CUDA[0])


def cuda_supports(release: tuple[int, int], capability: int) -> bool:
    """Whether this toolkit compiles for a compute capability (89 for 8.9). 13.0 dropped what is older than Turing."""
    row = cuda_row(release)
    known = {number for other in CUDA if other.release <= row.release for number in other.added}
    if release >= (13, 0):
        known.discard(101)  # it is 110 since
    return capability >= row.lowest and capability in known


def cuda_first(capability: int) -> tuple[int, int] | None:
    """The first toolkit for a compute capability."""
    return next((row.release for row in CUDA if capability in row.added), None)


def cuda_numbers(devices: Iterable[Device]) -> list[int]:
    """Compute capabilities of the devices as numbers: 89 for sm_89."""
    return sorted({int(d.arch[3:]) for d in devices if d.arch and re.match(r"sm_\d{2,3}\Z", d.arch)})


def cuda_architectures(devices: Iterable[Device]) -> list[str]:
    """CMAKE_CUDA_ARCHITECTURES for these devices; Blackwell (12.x) needs its 'a' variant (ggml-cuda/CMakeLists.txt)."""
    return [f"{number}a" if number // 10 == 12 else str(number) for number in cuda_numbers(devices)]


def cuda_problems(
    devices: Sequence[Device], toolkit: str | None, gcc: int | None, driver: str | None, hosts: Sequence[int] = ()
) -> list[str]:
    """Why a CUDA build for these devices would fail, with the cure.

    `gcc`: major of the default compiler; `hosts`: majors of the g++-N that are there as well; `driver` as nvidia-smi
    says it.
    """
    release = release_of(toolkit)
    if release is None:
        return ["no CUDA toolkit (nvcc) found: llama.cpp cannot be built on this host for its NVIDIA card"]
    row, problems = cuda_row(release), []
    for number in cuda_numbers(devices):
        if cuda_supports(release, number):
            continue
        first = cuda_first(number)
        if number < row.lowest:
            cure = f"it needs a toolkit before {row.release[0]}.0 (12.9 is the last one for cards older than Turing)"
        else:
            cure = f"it needs {first[0]}.{first[1]} or later" if first else "no known toolkit does"
        problems.append(f"CUDA toolkit {toolkit} does not compile for compute capability {number / 10:.1f}: {cure}")
    if gcc is not None and gcc > row.gcc and not usable_gcc(release, hosts):
        problems.append(
            f"CUDA toolkit {toolkit} takes gcc up to {row.gcc}, and this host has gcc {gcc} ('unsupported GNU "
            f"version'): install g++-{row.gcc}, or a newer toolkit"
        )
    major = re.match(r"\d{1,4}", driver or "")
    if major and int(major.group()) < row.driver:
        problems.append(
            f"driver {driver} is too old for programs of CUDA toolkit {toolkit} (it needs {row.driver}): update the "
            f"driver, or use a toolkit before {row.release[0]}.0"
        )
    return problems


def usable_gcc(release: tuple[int, int], hosts: Iterable[int]) -> int | None:
    """The newest g++-N that a toolkit takes."""
    return max((major for major in hosts if major <= cuda_row(release).gcc), default=None)


def gcc_major(text: str) -> int | None:
    """Major release of `c++ --version` when it is GNU's: 'c++ (Debian 12.2.0-14) 12.2.0' -> 12."""
    match = re.match(r"\S*(?:g\+\+|c\+\+|gcc|cc)\S* \(.*?\) (\d{1,2})\.\d", text)
    return int(match.group(1)) if match else None


# --- ROCm -------------------------------------------------------------------------------------------------------------

# ggml-hip/CMakeLists.txt stops below it. The others: first release that names the target (estimate).
HIP_LOWEST = (6, 1)
HIP_TARGETS = {"gfx1150": (6, 4), "gfx1151": (6, 4), "gfx1200": (6, 4), "gfx1201": (6, 4), "gfx950": (7, 0)}
# Targets that rocBLAS has no kernels for, and the sibling whose kernels they run (docs/build.md of llama.cpp).
HIP_SIBLINGS = {"gfx1103": "11.0.0", "gfx1033": "10.3.0", "gfx1035": "10.3.0", "gfx1031": "10.3.0", "gfx1032": "10.3.0"}


def hip_targets(devices: Iterable[Device]) -> list[str]:
    """GPU_TARGETS for these devices."""
    return sorted({device.arch for device in devices if device.arch and device.arch.startswith("gfx")})


def hip_note(devices: Iterable[Device]) -> str:
    """What to try when the libraries of ROCm have no kernels for a target; empty where they have."""
    for target in hip_targets(devices):
        if target in HIP_SIBLINGS:
            version = HIP_SIBLINGS[target]
            sibling = "gfx" + version.replace(".", "")
            return (
                f"if a worker ends with a rocBLAS error, build with GPU_TARGETS={sibling} and run it with "
                f"HSA_OVERRIDE_GFX_VERSION={version}: not every ROCm has kernels for {target}"
            )
    return ""


def hip_problems(devices: Sequence[Device], toolkit: str | None) -> list[str]:
    """Why a ROCm build for these devices would fail, with the cure."""
    release = release_of(toolkit)
    if release is None:
        return ["no ROCm toolkit (hipconfig) found: llama.cpp cannot be built on this host for its AMD card"]
    if release < HIP_LOWEST:
        return [f"ROCm {toolkit} is too old: llama.cpp needs 6.1; take AMD's own packages, or the vulkan backend"]
    problems = []
    for target in hip_targets(devices):
        first = HIP_TARGETS.get(target, HIP_LOWEST)
        if release < first:
            problems.append(f"ROCm {toolkit} does not know {target}: it needs {first[0]}.{first[1]} or later")
    return problems


# --- switches ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compilers:
    """C++ compilers of a host: major of the default one when it is GNU's, and majors of every g++-N."""

    gcc: int | None = None
    others: tuple[int, ...] = ()


def find_compilers(runner: Runner, timeout: float) -> Compilers:
    """The compilers that a CUDA build could use. Runs one command."""
    default = next((path for path in map(runner.which, ("c++", "g++")) if path), None)
    major = gcc_major(runner.run([default, "--version"], timeout).stdout) if default else None
    return Compilers(major, tuple(number for number in range(9, 20) if runner.which(f"g++-{number}")))


# Tegra and vGPU guests lack the driver's virtual memory calls (node-llama-cpp issue 560).
_NO_VMM = re.compile(r"\b(Orin|Xavier|nvgpu|Tegra)\b|^GRID |-\d+[ABCQ]\b")


def switches(
    backend: str, devices: Sequence[Device], system: str, toolkit: str | None = None, compilers: Compilers | None = None
) -> tuple[str, ...]:
    """CMake switches a build for these devices needs beyond those of every build.

    No architectures when one is unknown: CMake then looks at the card itself. NCCL is found by chance on some build
    hosts and changes the binary. Metal is on by default on a Mac and does not work on Intel ones or in a VM.
    """
    flags: list[str] = []
    known = bool(devices) and all(device.arch for device in devices)
    if backend == "cuda":
        flags = ["-DGGML_CUDA=ON", "-DGGML_CUDA_NCCL=OFF"]
        if known:
            flags.append("-DCMAKE_CUDA_ARCHITECTURES=" + ";".join(cuda_architectures(devices)))
        if any(_NO_VMM.search(device.description) for device in devices):
            flags.append("-DGGML_CUDA_NO_VMM=ON")
        release = release_of(toolkit)
        if release and compilers and compilers.gcc and compilers.gcc > cuda_row(release).gcc:
            older = usable_gcc(release, compilers.others)
            if older:
                flags.append(f"-DCMAKE_CUDA_HOST_COMPILER=g++-{older}")
    elif backend == "rocm":
        flags = ["-DGGML_HIP=ON"]
        if known:
            flags.append("-DGPU_TARGETS=" + ";".join(hip_targets(devices)))
    elif backend == "vulkan":
        flags = ["-DGGML_VULKAN=ON"]
    elif backend == "sycl":
        flags = ["-DGGML_SYCL=ON", "-DCMAKE_C_COMPILER=icx", "-DCMAKE_CXX_COMPILER=icpx"]
    elif backend == "metal":
        flags = ["-DGGML_METAL=ON", "-DGGML_METAL_EMBED_LIBRARY=ON"]
    elif system == "Darwin":
        flags = ["-DGGML_METAL=OFF"]
    return tuple(flags)


def problems_of(finding: Finding, compilers: Compilers) -> tuple[str, ...]:
    """Why a build for this finding's devices would fail on this host."""
    if not finding.devices:
        return ()
    if finding.backend == "cuda":
        found = cuda_problems(finding.devices, finding.toolkit, compilers.gcc, finding.driver, compilers.others)
    elif finding.backend == "rocm":
        found = hip_problems(finding.devices, finding.toolkit)
    elif not finding.ready and finding.backend == "vulkan":
        found = ["no shader compiler (glslc) found: install the packages of the vulkan backend"]
    elif not finding.ready and finding.backend == "sycl":
        found = ["no oneAPI compiler (icpx) found: install oneAPI, or use the vulkan backend"]
    else:
        found = []
    return tuple(found)


def class_id(system: str, arch: str, libc: str, finding: Finding, isa: str) -> str:
    """Name of the hosts that may share a binary: equal system, C library, backend, GPU architectures and CPU level."""
    major = (finding.toolkit or "").partition(".")[0]
    parts = [system, arch, libc, finding.backend + major]
    if finding.backend == "cuda":
        parts.extend(f"sm{number}" for number in cuda_architectures(finding.devices))
    elif finding.backend == "rocm":
        parts.extend(hip_targets(finding.devices))
    parts.append(isa)
    return re.sub(r"[^a-z0-9._-]", "_", "-".join(part for part in parts if part).lower())


# --- packages ---------------------------------------------------------------------------------------------------------

FAMILIES = ("debian", "redhat", "arch", "suse", "darwin")


@dataclass(frozen=True)
class Packages:
    """Packages of a distribution family for one backend: to build, to run, and what has to be done by hand first."""

    build: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    note: str = ""

    def to_dict(self) -> dict[str, object]:
        """The packages as plain JSON types."""
        return {"build": list(self.build), "run": list(self.run), "note": self.note or None}


_ROCM = "ROCm 6.1 or later from AMD's own repository (repo.radeon.com); many distributions carry an older one"
_CUDA = "the CUDA toolkit from NVIDIA's own repository, of a release that the driver and the compiler go with"
_ONEAPI = "oneAPI's compilers from Intel's own repository; units need the environment of setvars.sh"
_BASE: Mapping[str, Packages] = {
    "debian": Packages(("git", "build-essential", "cmake", "ninja-build")),
    "redhat": Packages(("git", "gcc", "gcc-c++", "make", "cmake", "ninja-build"), note="RHEL: ninja-build is in CRB"),
    "arch": Packages(("git", "base-devel", "cmake", "ninja")),
    "suse": Packages(("git", "gcc", "gcc-c++", "make", "cmake", "ninja")),
    "darwin": Packages(("cmake", "ninja"), note="the command line tools (xcode-select --install)"),
}
_BACKEND: Mapping[tuple[str, str], Packages] = {
    ("vulkan", "debian"): Packages(
        ("libvulkan-dev", "glslc", "spirv-headers"),
        ("libvulkan1", "mesa-vulkan-drivers", "vulkan-tools"),
        "glslc is packaged since Debian 12 and Ubuntu 24.04; before, take the Vulkan SDK",
    ),
    ("vulkan", "redhat"): Packages(
        ("vulkan-loader-devel", "vulkan-headers", "glslc", "spirv-headers-devel"),
        ("vulkan-loader", "mesa-vulkan-drivers", "vulkan-tools"),
        "RHEL: glslc is in EPEL",
    ),
    ("vulkan", "arch"): Packages(
        ("vulkan-headers", "shaderc", "spirv-headers"),
        ("vulkan-icd-loader", "vulkan-radeon", "vulkan-intel", "vulkan-tools"),
    ),
    ("vulkan", "suse"): Packages(
        ("vulkan-devel", "shaderc", "spirv-headers"),
        ("libvulkan1", "libvulkan_radeon", "libvulkan_intel", "vulkan-tools"),
    ),
    ("cuda", "debian"): Packages(note=f"{_CUDA}; nvidia-cuda-toolkit of Debian and Ubuntu where its limits fit"),
    ("cuda", "redhat"): Packages(note=_CUDA),
    ("cuda", "arch"): Packages(("cuda",), note="nvcc lies in /opt/cuda/bin"),
    ("cuda", "suse"): Packages(note=_CUDA),
    ("rocm", "debian"): Packages(note=_ROCM),
    ("rocm", "redhat"): Packages(
        note=f"Fedora: hipcc, rocm-hip-devel, hipblas-devel, rocblas-devel, where they are 6.1 or later; else {_ROCM}"
    ),
    ("rocm", "arch"): Packages(("rocm-hip-sdk",)),
    ("rocm", "suse"): Packages(note=_ROCM),
    ("sycl", "debian"): Packages(note=_ONEAPI),
    ("sycl", "redhat"): Packages(note=_ONEAPI),
    ("sycl", "arch"): Packages(("intel-oneapi-basekit", "level-zero-headers"), ("level-zero-loader",)),
    ("sycl", "suse"): Packages(note=_ONEAPI),
}


def parse_os_release(text: str) -> dict[str, str]:
    """`NAME=value` lines of /etc/os-release, without quotes."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {key.strip(): value.strip().strip("\"'") for key, _equals, value in pairs}


def family(system: str, os_release: str = "") -> str | None:
    """One of FAMILIES by ID and ID_LIKE; None for a distribution that packages are not known of."""
    if system == "Darwin":
        return "darwin"
    values = parse_os_release(os_release)
    words = f"{values.get('ID', '')} {values.get('ID_LIKE', '')}".lower().split()
    names = {"debian": "debian", "ubuntu": "debian", "fedora": "redhat", "rhel": "redhat", "centos": "redhat"}
    names.update({"arch": "arch", "archlinux": "arch", "manjaro": "arch", "suse": "suse"})
    for word in words:
        if word in names:
            return names[word]
        if word.startswith(("opensuse", "sles", "sled")):
            return "suse"
    return None


def packages(backend: str, where: str | None) -> Packages:
    """What to install to build llama.cpp for a backend on a distribution family (None: unknown)."""
    if where is None or where not in _BASE:
        return Packages(note="install git, a C++ compiler, CMake, and the development files of the backend")
    base, extra = _BASE[where], _BACKEND.get((backend, where), Packages())
    note = "; ".join(text for text in (base.note, extra.note) if text)
    return Packages(base.build + extra.build, base.run + extra.run, note)


def how_to_get(listed: Mapping[str, object]) -> str:
    """What to do where something for a build lacks, to follow a message; "" where nothing is known.

    `listed`: Packages.to_dict, as host_facts told it.
    """
    names = " ".join(str(name) for key in ("build", "run") for name in _names(listed.get(key)))
    parts = [f"install {names}, or let llama_build_install_packages: true do it"] if names else []
    parts += [str(listed["note"])] if listed.get("note") else []
    return f". For this backend on this system: {'; '.join(parts)}" if parts else ""


def _names(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else ()


@dataclass(frozen=True)
class Site:
    """What every backend's build on a host has in common."""

    system: str
    arch: str
    libc: str
    isa: str
    family: str | None
    compilers: Compilers = field(default_factory=Compilers)
