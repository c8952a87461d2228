# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Base file systems, built of Debian packages once and shared by all hosts."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from . import common
from .common import FleetError, run


@dataclass(frozen=True)
class Image:
    """A Debian release and the packages on top of its essential ones."""

    suite: str
    packages: str


_HOST = """systemd-sysv libpam-systemd dbus dbus-user-session openssh-server sudo python3 python3-apt python3-venv
    ca-certificates iproute2 iputils-ping kmod procps nftables wireguard-tools wireguard-go libgomp1"""

IMAGES = {
    "bookworm": Image("bookworm", _HOST),
    "trixie": Image("trixie", _HOST),
    "firewalls": Image("bookworm", f"{_HOST} ufw firewalld"),
    # What a role meets on a machine it has never seen: just enough for ssh, sudo and a module.
    "bare": Image("bookworm", "systemd-sysv dbus openssh-server sudo python3"),
}

# Units that cost boot time or that would reach out of the host. timesyncd also must not try the machine's clock.
_MASKED = """apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service
    fstrim.timer systemd-timesyncd.service getty.target console-getty.service firewalld.service"""

# Directory in a host with what only the harness uses.
INSIDE = "usr/local/lib/fleet"
# nspawn mounts the cgroup v1 controllers read-only, and systemd then ignores MemoryMax=, CPUQuota=, TasksMax= and
# DeviceAllow= without a word: make them writable before it starts. On cgroup v2 there is nothing to do.
_INIT = f"""#!/bin/sh
for hierarchy in /sys/fs/cgroup/*/; do mount -o remount,rw,bind "$hierarchy"; done 2>/dev/null
mount --bind /{INSIDE}/meminfo /proc/meminfo
exec /sbin/init "$@"
"""


def path_of(name: str) -> Path:
    """Where the base of an image lies; its name changes with the packages and with this recipe."""
    image = IMAGES[name]
    text = f"{image.suite} {' '.join(image.packages.split())} {Path(__file__).read_text()}"
    return common.BASES / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _mirror() -> list[str]:
    """The archive to build from: FLEET_MIRROR, else the one of this machine's apt, else mmdebstrap's own default."""
    if mirror := os.environ.get("FLEET_MIRROR"):
        return [mirror]
    if shutil.which("apt-get"):
        uris = run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages").split()
        return [uri for uri in uris if re.search(r"/debian/?$", uri)][:1]
    return []


def _apt_settings() -> str:
    """How this machine's apt reaches its archives (proxies, time-outs, checks), as text of an apt.conf file."""
    if not shutil.which("apt-config"):
        return ""
    wanted = re.compile(r"Acquire::(https?|Retries|Check-Valid-Until|Check-Date)\b.* \".+\";")
    return "".join(f"{line}\n" for line in run("apt-config", "dump").splitlines() if wanted.match(line))


def clear() -> None:
    """Remove what an interrupted build left."""
    for path in common.BASES.glob(".*"):
        common.remove_tree(path)


def build(name: str) -> Path:
    """Build the base of an image unless it is there; its path. An interrupted build leaves no base behind."""
    base = path_of(name)
    if base.exists():
        return base
    started = time.monotonic()
    print(f"building {base.name} (once) ...", flush=True)
    clear()
    for old in common.BASES.glob(f"{name}-*"):
        common.remove_tree(old)
    new, scratch = common.BASES / f".{base.name}", common.BASES / ".scratch"
    scratch.mkdir(parents=True)
    settings = scratch / "apt.conf"
    common.write(settings, _apt_settings() + 'APT::Install-Recommends "false";\n')
    image = IMAGES[name]
    done = subprocess.run(
        [
            *("mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory", "--quiet"),
            *("--dpkgopt=force-unsafe-io", "--dpkgopt=path-exclude=/usr/share/man/*"),
            *("--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/locale/*"),
            *(f"--aptopt={settings}", f"--include={','.join(image.packages.split())}"),
            *(image.suite, str(new), *_mirror()),
        ],
        env={**os.environ, "TMPDIR": str(scratch), "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise FleetError(f"mmdebstrap could not build {name}: {done.stderr.strip()[-2000:]}")
    _customise(new)
    new.rename(base)
    clear()
    print(f"built {base.name} in {time.monotonic() - started:.0f} s", flush=True)
    return base


def _customise(base: Path) -> None:
    for key in (base / "etc/ssh").glob("ssh_host_*"):  # each host makes its own
        key.unlink()
    # Password "*": no password, but not locked either, else sshd refuses the key.
    run("chroot", base, "useradd", "--create-home", "--shell", "/bin/bash", "--password", "*", "deploy")
    common.write(base / "etc/sudoers.d/deploy", "deploy ALL=(ALL) NOPASSWD: ALL\n", 0o440)
    for unit in _MASKED.split():
        link = base / "etc/systemd/system" / unit
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
    common.write(base / "etc/systemd/system.conf.d/fleet.conf", "[Manager]\nDefaultTimeoutStopSec=10s\n")
    common.write(base / INSIDE / "init", _INIT, 0o755)
    common.write(base / INSIDE / "meminfo", "")
    # Where packages come from is this machine's own business: its certificate authorities and its pip settings.
    authorities = Path("/usr/local/share/ca-certificates")
    if authorities.is_dir() and (base / "usr/sbin/update-ca-certificates").exists():
        shutil.copytree(authorities, base / authorities.relative_to("/"), dirs_exist_ok=True)
        run("chroot", base, "update-ca-certificates")
    if Path("/etc/pip.conf").exists():
        shutil.copy("/etc/pip.conf", base / "etc/pip.conf")
