# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One control group per host and per helper: what limits them, and how all their processes are found and ended.

Both layouts: cgroup v2, and version 1 with a hierarchy per controller. A group is there before the first process
of its host, in every hierarchy: hosts that share one would manage each other's services.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from . import common
from .common import FleetError

_ROOT = Path("/sys/fs/cgroup")
V2 = (_ROOT / "cgroup.controllers").exists()
_CONTROLLERS = ("cpu", "memory", "pids")
# What systemd uses of version 1, and the two hierarchies it keeps its own books in.
_V1 = ("blkio", "cpu", "cpuacct", "devices", "freezer", "memory", "pids", "systemd", "unified")

# Controllers of version 2 that the machine's root group did not hand on before.
_HANDED_ON = common.DIR / "handed-on"

# The groups that are no host's; a host's name has no underscore.
CONTROL = "_control"

# Enters the groups first, so that no process of a host is ever outside of them.
_ENTER = 'while [ "$1" != -- ]; do echo $$ >"$1" || exit 1; shift; done; shift; exec "$@"'


def _hierarchies() -> list[Path]:
    return [_ROOT] if V2 else [_ROOT / name for name in _V1 if (_ROOT / name).is_dir()]


def _ours() -> list[Path]:
    return [path for hierarchy in _hierarchies() if (path := hierarchy / common.NAME).is_dir()]


def group(name: str, controller: str) -> Path:
    """Directory of a group where a controller's files are."""
    return _ROOT / ("" if V2 else controller) / common.NAME / name


def create(name: str) -> list[Path]:
    """Make a group; its directories."""
    if V2:
        _hand_on()
    paths = [hierarchy / common.NAME / name for hierarchy in _hierarchies()]
    if not paths:
        raise FleetError(f"no cgroups at {_ROOT}: mount them first")
    for path in paths:
        path.mkdir(parents=True, exist_ok=True)
    return paths


def entering(name: str, command: Sequence[object]) -> list[str]:
    """The command, as one that enters the group before it starts."""
    files = [str(path / "cgroup.procs") for path in create(name)]
    return ["sh", "-c", _ENTER, "sh", *files, "--", *(str(word) for word in command)]


def _hand_on() -> None:
    """Have the machine's root group, and ours, hand the controllers on; what the root did not, is taken back."""
    ours = _ROOT / common.NAME
    ours.mkdir(exist_ok=True)
    for parent in (_ROOT, ours):
        control = parent / "cgroup.subtree_control"
        missing = sorted(set(_CONTROLLERS) - set(control.read_text().split()))
        if not missing:
            continue
        if parent == _ROOT:
            common.write(_HANDED_ON, " ".join(missing))
        try:
            control.write_text(" ".join(f"+{name}" for name in missing))
        except OSError as error:
            raise FleetError(f"{control}: cannot hand on {', '.join(missing)}: {error.strerror}") from error


@contextlib.contextmanager
def entered(name: str) -> Iterator[None]:
    """Be in a group, with everything that is started meanwhile."""
    before = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _number, controllers, path = line.split(":", 2)
        # A version 1 hierarchy of several controllers has a link for each.
        place = controllers.removeprefix("name=").split(",")[0] or ("" if V2 else "unified")
        before.append(_ROOT / place / path.lstrip("/"))
    _join(create(name))
    try:
        yield
    finally:
        _join([path for path in before if path.is_dir()])


def _join(paths: Iterable[Path]) -> None:
    for path in paths:
        (path / "cgroup.procs").write_text("0")


def members(name: str = "") -> list[int]:
    """Processes of a group, of all groups by default."""
    found: set[int] = set()
    for ours in _ours():
        for path, _below, _files in os.walk(ours / name):
            with contextlib.suppress(OSError):  # the group went while we looked; walk() knows that, rglob() does not
                found.update(int(word) for word in Path(path, "cgroup.procs").read_text().split())
    return sorted(found)


def inside() -> bool:
    """Whether this process is in a group of the fleet, as everything that `fleet in` starts is."""
    return os.getpid() in members()


def leader(name: str) -> int | None:
    """PID 1 of a host, as the machine numbers it, or None when the host is off."""
    for pid in members(name):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            ids = next(line.split()[1:] for line in status if line.startswith("NSpid:"))
            if len(ids) > 1 and ids[-1] == "1":
                return pid
    return None


def end(name: str = "") -> None:
    """Kill all processes of a group at once (a power cut, for a host) and remove it; all groups by default."""
    for _left in common.wait_for(20, pause=0.02):
        # In order of age: a host's PID 1 is among the first, and the kernel ends the rest of its namespace with it.
        for pid in members(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        left = [path for ours in _ours() for path, _below, _files in os.walk(ours / name, topdown=False)]
        for path in left:
            with contextlib.suppress(OSError):  # something in it still ends
                os.rmdir(path)
        if not left:
            break
    else:
        raise FleetError(f"cgroup {common.NAME}/{name} does not end; its processes: {members(name)}")
    if not name and _HANDED_ON.exists():
        for controller in _HANDED_ON.read_text().split():
            with contextlib.suppress(OSError):  # somebody else uses it by now
                (_ROOT / "cgroup.subtree_control").write_text(f"-{controller}")
        _HANDED_ON.unlink()


def limit_memory(name: str, size: int) -> None:
    file = group(name, "memory") / ("memory.max" if V2 else "memory.limit_in_bytes")
    try:
        file.write_text(str(size))
        if V2:
            (group(name, "memory") / "memory.swap.max").write_text("0")
    except OSError as error:  # version 1 refuses to go below what is in use
        raise FleetError(f"{file}: {size} is not accepted ({error.strerror}); is more than that in use?") from error


def limit_cpu(name: str, processors: float) -> None:
    microseconds = int(processors * 100_000)
    if V2:
        (group(name, "cpu") / "cpu.max").write_text(f"{microseconds} 100000")
    else:
        (group(name, "cpu") / "cpu.cfs_quota_us").write_text(str(microseconds))


def memory(name: str) -> tuple[int, int, int, int]:
    """Bytes of a host: limit, in use, of these page cache, of these shared memory (which cannot be dropped)."""
    path = group(name, "memory")
    limit, used = ("memory.max", "memory.current") if V2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    stat = dict(line.split() for line in (path / "memory.stat").read_text().splitlines())
    cache, shared = ("file", "shmem") if V2 else ("total_cache", "total_shmem")
    text = (path / limit).read_text().strip()
    # No limit: the kernel writes max, or a number beyond any memory.
    return (
        1 << 62 if text == "max" else int(text),
        int((path / used).read_text()),
        int(stat[cache]),
        int(stat.get(shared, 0)),
    )
