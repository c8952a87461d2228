# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One host: its disk, its boot, its end, and a command run in it."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from . import cgroups, common, images, network
from .common import FleetError, run
from .state import Fleet, Host

_NSPAWN = Path("/run/systemd/nspawn")


def directory(name: str) -> Path:
    return common.HOSTS / name


def root(name: str) -> Path:
    """The host's file system, as long as it is mounted."""
    return directory(name) / "merged"


def console(name: str) -> Path:
    return directory(name) / "console.log"


def start(fleet: Fleet, host: Host) -> None:
    """Switch a host on. Its disk is made if it has none, and else is as it was."""
    _mount(host)
    if not (directory(host.name) / "prepared").exists():
        _prepare(fleet, host)
        (directory(host.name) / "prepared").touch()
    names = "".join(f"{other.address} {other.name}\n" for other in fleet.hosts.values())
    (root(host.name) / "etc/hosts").write_text(f"127.0.0.1 localhost\n{names}")
    network.plug(host, fleet.egress)
    cgroups.create(host.name)
    cgroups.limit_memory(host.name, host.mem)
    if host.cpu:
        cgroups.limit_cpu(host.name, host.cpu)
    write_meminfo(host.name)
    _boot(fleet, host)


def _mount(host: Host) -> None:
    """The base below, and above it a disk of its own size, where everything the host writes goes.

    A file system in a sparse file, not tmpfs: pages of tmpfs would count as the host's memory.
    """
    place, disk, merged = directory(host.name), directory(host.name) / "disk", root(host.name)
    if merged.is_mount():
        return
    for path in (disk, merged):
        path.mkdir(parents=True, exist_ok=True)
    image = place / "disk.img"
    if not image.exists():
        new = place / "disk.new"
        with new.open("wb") as file:
            file.truncate(host.disk)
        run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", new)
        new.rename(image)
    if not disk.is_mount():
        run("mount", "-o", "loop", image, disk)
    for path in (disk / "upper", disk / "work"):
        path.mkdir(exist_ok=True)
    layers = f"lowerdir={images.path_of(host.image)},upperdir={disk}/upper,workdir={disk}/work"
    run("mount", "-t", "overlay", network.namespace(host.name), "-o", layers, merged)


def _prepare(fleet: Fleet, host: Host) -> None:
    """What makes one host differ from another, before its first boot."""
    etc = root(host.name) / "etc"
    (etc / "hostname").write_text(f"{host.name}\n")
    (etc / "machine-id").write_text(f"{secrets.token_hex(16)}\n")
    (etc / "resolv.conf").unlink(missing_ok=True)
    if fleet.egress:
        # Behind a local stub of systemd-resolved are the servers that a host can reach as well.
        servers = Path("/run/systemd/resolve/resolv.conf")
        shutil.copy(servers if servers.exists() else "/etc/resolv.conf", etc / "resolv.conf")
    else:
        (etc / "resolv.conf").touch()
    # The account's own systemd stays when its last session ends. On version 1 of cgroups a host is not told that a
    # group is empty, so that the end of one may take its whole timeout, and who logs in meanwhile waits for that.
    # Where logins do not start it (no libpam-systemd), it cannot start at all: no XDG_RUNTIME_DIR.
    if next((root(host.name) / "usr/lib").glob("*/security/pam_systemd.so"), None):
        linger = root(host.name) / "var/lib/systemd/linger"
        linger.mkdir(mode=0o755, exist_ok=True)
        (linger / "deploy").touch()
    for kind in ("ed25519", "rsa"):
        (etc / f"ssh/ssh_host_{kind}_key").unlink(missing_ok=True)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", host.name, "-f", etc / "ssh/ssh_host_ed25519_key")
    public = common.KEY.with_suffix(".pub").read_text()
    for home in (root(host.name) / "root", root(host.name) / "home/deploy"):
        owner = home.stat()
        folder = home / ".ssh"
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / "authorized_keys").write_text(public)
        for path in (folder, folder / "authorized_keys"):
            os.chown(path, owner.st_uid, owner.st_gid)


def _boot(fleet: Fleet, host: Host) -> None:
    meminfo = directory(host.name) / "meminfo"
    command = [
        *("systemd-nspawn", "--quiet", "--settings=no", "--register=no", "--keep-unit", "--console=pipe"),
        *("--kill-signal=SIGRTMIN+3", "--link-journal=no", "--resolv-conf=off", "--timezone=off"),
        *(f"--directory={root(host.name)}", f"--machine={network.namespace(host.name)}", f"--hostname={host.name}"),
        f"--network-namespace-path={network.path_of(network.namespace(host.name))}",
        # NET_ADMIN and NET_RAW for the host's own namespace, IPC_LOCK for mlock. Never SYS_TIME: there is one clock.
        *("--capability=CAP_NET_ADMIN,CAP_NET_RAW,CAP_IPC_LOCK", "--bind=/dev/net/tun"),
        # On version 2 DeviceAllow= and IPAddressDeny= are programs that the host's systemd loads.
        *(("--capability=CAP_BPF,CAP_PERFMON", "--system-call-filter=bpf") if cgroups.V2 else ()),
        *(f"--bind-ro={meminfo}:/{images.INSIDE}/meminfo", *(f"--bind-ro={path}" for path in fleet.bind_ro)),
        *(f"/{images.INSIDE}/init", "systemd.show_status=no"),
    ]
    environment = {
        "PATH": os.environ["PATH"],
        "SYSTEMD_LOG_LEVEL": "warning",
        "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": str(int(cgroups.V2)),
        "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network",  # of /proc/sys only net, which is the namespace's own
    }
    with console(host.name).open("ab") as log:
        nspawn = subprocess.Popen(
            cgroups.entering(host.name, command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    # From here on a group without members means a host that is off.
    for _left in common.wait_for(5, pause=0.01):
        if nspawn.poll() is not None or cgroups.members(host.name):
            return


def wait(hosts: Iterable[Host], seconds: float = 90) -> None:
    """Return when ssh answers on all of them; FleetError with the end of its console for one that does not."""
    end = time.monotonic() + seconds
    for host in hosts:
        for _left in common.wait_for(max(1, end - time.monotonic())):
            if network.listens(host.address):
                break
            if not cgroups.members(host.name):
                raise FleetError(f"{host.name} has ended while it booted. Its console:\n{_tail(host.name)}")
        else:
            raise FleetError(f"{host.name} does not answer on ssh ({host.address}). Its console:\n{_tail(host.name)}")


def _tail(name: str) -> str:
    return console(name).read_text(errors="replace")[-2000:].strip() or "(nothing)"


def cut(name: str) -> None:
    """Power cut: everything ends at once, nothing is told. Pages not yet on disk survive, unlike in a real one."""
    cgroups.end(name)
    network.unplug(name)
    _forget_nspawn(name)


def _forget_nspawn(name: str) -> None:
    """Remove what nspawn leaves in /run when it is killed."""
    if root(name).is_dir():
        status = root(name).stat()
        (_NSPAWN / "locks" / f"inode-{status.st_dev}:{status.st_ino}").unlink(missing_ok=True)
    for path in _NSPAWN.glob(f"*/{network.namespace(name)}"):
        common.remove_tree(path)


def free_disk(name: str, size: int | None) -> None:
    """Leave a host ``size`` bytes of free disk; None gives all of it back.

    A file beside the host's own files takes the rest: the host sees a full disk, but nothing to delete.
    """
    disk = directory(name) / "disk"
    if not disk.is_mount():
        raise FleetError(f"{name} has no disk yet: it was never on")
    ballast = disk / "ballast"
    ballast.unlink(missing_ok=True)
    if size is None:
        return
    room = os.statvfs(disk)
    surplus = room.f_bavail * room.f_frsize - size
    if surplus < 0:
        raise FleetError(f"{name} has {surplus + size} bytes free, fewer than {size}")
    if surplus:
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, surplus)


def write_meminfo(name: str) -> None:
    """Bring a host's /proc/meminfo up to date with its cgroup. One write of constant length: no reader sees half."""
    machine = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {key: int(machine[key].split()[0]) for key in ("MemTotal", "MemAvailable")}
    limit, used, cache, shared = (value // 1024 for value in cgroups.memory(name))
    total = min(limit, kib["MemTotal"])
    free = max(0, total - used)
    values = {
        "MemTotal": total,
        "MemFree": free,
        "MemAvailable": min(free + max(0, cache - shared), kib["MemAvailable"]),
        "Buffers": 0,
        "Cached": cache,
        "SwapCached": 0,
        "Shmem": shared,
        "SwapTotal": 0,
        "SwapFree": 0,
    }
    text = "".join(f"{key + ':':<16}{value:>12} kB\n" for key, value in values.items())
    file = os.open(directory(name) / "meminfo", os.O_WRONLY | os.O_CREAT, 0o644)
    os.pwrite(file, text.encode(), 0)
    os.close(file)


def keep_meminfo() -> None:
    """Do so for every host that is on, for ever."""
    while True:
        for path in common.HOSTS.glob("*/meminfo"):
            try:
                write_meminfo(path.parent.name)
            except OSError:  # off, or being switched off
                continue
        time.sleep(0.5)


def exec_argv(name: str, command: Sequence[str]) -> list[str]:
    """A command line that runs a command in a host, as a unit of the host's own systemd.

    Not by nsenter alone: that would run with the machine's capabilities (`date -s` would set the one clock there
    is) and outside of the host's memory limit.
    """
    pid = cgroups.leader(name)
    if pid is None:
        raise FleetError(f"{name} is off: `fleet start {name}` first")
    return [
        *("nsenter", f"--target={pid}", "--mount", "--uts", "--ipc", "--net", "--pid"),
        *(f"--root=/proc/{pid}/root", f"--wd=/proc/{pid}/root", "env", "-i"),
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        *("systemd-run", "--quiet", "--wait", "--pipe", "--collect", "--service-type=exec"),
        *("--property=WorkingDirectory=/root", "--setenv=HOME=/root", "--setenv=LC_ALL=C.UTF-8", "--", *command),
    ]


def down() -> None:
    """Unmount and delete every host's disk. Processes and namespaces are gone by now."""
    for path in common.HOSTS.glob("*"):
        _forget_nspawn(path.name)
    _forget_nspawn("*")  # of hosts whose directory is gone
    for point in common.mounts_below(common.DIR):
        for _left in common.wait_for(5):
            if common.attempt("umount", point):
                break
        else:
            run("umount", "--lazy", point)
    common.remove_tree(common.HOSTS)
