# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tools and compilers that a host has or lacks. (Building itself: modules/test_build.py.)"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils import _compile
from ansible_collections.llamafleet.rpc.plugins.module_utils._builds import BuildError
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Result
from ansible_collections.llamafleet.rpc.tests.unit.fakes import FakeRunner

if TYPE_CHECKING:
    from pathlib import Path


def programs(**said: str | None) -> FakeRunner:
    """A host with some programs: what each says to --version, None for one that only fails."""
    names = {name.replace("_", "-").replace("cxx", "c++"): text for name, text in said.items()}
    return FakeRunner(
        commands={
            f"{name} --version": Result(1 if text is None else 0, text or "", "") for name, text in names.items()
        },
        programs={name: f"/usr/bin/{name}" for name in names},
    )


GCC = "cc (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright (C) 2022"


def test_compilers_are_named_with_what_they_are() -> None:
    found = _compile.find_compilers(programs(cc=GCC, cxx=GCC), [])
    line = "cc (Debian 12.2.0-14+deb12u1) 12.2.0"
    assert found == {"CMAKE_C_COMPILER": ("/usr/bin/cc", line), "CMAKE_CXX_COMPILER": ("/usr/bin/c++", line)}


@pytest.mark.parametrize("host", [programs(), programs(cc=GCC), programs(cc=None, cxx=None)], ids=["bare", "c", "stub"])
def test_without_a_compiler_that_works_the_package_to_install_is_named(host: FakeRunner) -> None:
    """The compiler of a Mac without developer tools is there and only prints an error."""
    with pytest.raises(BuildError, match=r"no C(\+\+)? compiler that works.*build-essential.*xcode-select --install"):
        _compile.find_compilers(host, [])


def test_a_backend_brings_its_compiler_into_the_build() -> None:
    nvcc = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 12.8, V12.8.93\n"
    found = _compile.find_compilers(programs(cc=GCC, cxx=GCC, nvcc=nvcc), ["-DGGML_CUDA=ON"])
    assert found["nvcc"] == ("/usr/bin/nvcc", "Cuda compilation tools, release 12.8, V12.8.93")
    with pytest.raises(BuildError, match="GGML_VULKAN=ON needs glslc"):
        _compile.find_compilers(programs(cc=GCC, cxx=GCC), ["-DGGML_VULKAN=ON"])


@pytest.mark.parametrize(
    ("host", "switches", "cmake", "generator"),
    [
        (programs(cmake="cmake version 3.25.1", ninja="1"), [], "/usr/bin/cmake", ("Ninja", "/usr/bin/ninja")),
        (programs(cmake="cmake version 3.25.1", make="1"), [], "/usr/bin/cmake", ("Unix Makefiles", "/usr/bin/make")),
        (programs(cmake="cmake version 3.16.3", ninja_build="1"), [], None, ("Ninja", "/usr/bin/ninja-build")),
        (
            programs(cmake="cmake version 3.20.0", make="1"),
            ["-DGGML_HIP=ON"],
            None,
            ("Unix Makefiles", "/usr/bin/make"),
        ),
        (programs(cmake=None), [], None, None),
        (programs(), [], None, None),
    ],
)
def test_tools_of_the_system_are_taken_when_they_are_new_enough(
    host: FakeRunner, switches: list[str], cmake: str | None, generator: tuple[str, str] | None
) -> None:
    assert _compile.find_build_tools(host, switches) == (cmake, generator)


def test_make_does_not_take_half_written_objects_for_whole_ones(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    names = [f"{number}.o" for number in range(6)] + ["lib.a", "bin/llama-server", "CMakeCache.txt"]
    for age, name in enumerate(names):
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, (age, age))
    _compile._drop_newest(str(tmp_path), 4)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["0.o", "1.o", "2.o", "3.o", "CMakeCache.txt"]


def test_a_gpu_build_needs_more_disk() -> None:
    assert _compile.space_needed(["-DGGML_CUDA=ON"]) > _compile.space_needed(["-DGGML_CUDA=OFF"]) == 600 << 20
