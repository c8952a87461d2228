# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What every room of the harness shares: names, places, the door to commands, sizes."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path


class FleetError(Exception):
    """Something a person can act on; the text says what, where and what to do."""


# Prefix of everything that is visible outside FLEET_DIR: namespaces, links, cgroups, the nft table, machine names.
NAME = os.environ.get("FLEET_NAME", "lf")
DIR = Path(os.environ.get("FLEET_DIR", "/var/tmp/llamafleet-fleet"))
# RFC 2544 test addresses: nothing on a real network uses them. They exist in the fleet's own namespaces only.
NETWORK = ipaddress.ip_network("198.18.0.0/24")
GATEWAY = NETWORK[1]
# With --egress only: the two ends of the link between the fleet and the machine.
EGRESS = ipaddress.ip_network("198.19.255.0/30")

HOSTS = DIR / "hosts"
BASES = DIR / "base"
KEY = DIR / "id_ed25519"
INVENTORY = DIR / "inventory.yml"
SSH_CONFIG = DIR / "ssh_config"
KNOWN_HOSTS = DIR / "known_hosts"
CONNECTIONS = DIR / "cp"

# Command that must work -> Debian package that has it.
_COMMANDS = {
    "ip": "iproute2",
    "mkfs.ext4": "e2fsprogs",
    "mmdebstrap": "mmdebstrap",
    "nft": "nftables",
    "nsenter": "util-linux",
    "ssh-keygen": "openssh-client",
    "systemd-nspawn": "systemd-container",
    "tc": "iproute2",
}


def check_machine() -> None:
    """Raise FleetError unless this machine can carry a fleet: root, the commands, the devices, a safe FLEET_DIR."""
    if os.geteuid() != 0:
        raise FleetError("needs root (namespaces, mounts and cgroups): run it with sudo")
    missing = sorted({package for command, package in _COMMANDS.items() if shutil.which(command) is None})
    if missing:
        raise FleetError(
            f"missing on this machine: {', '.join(missing)}. Install with: "
            f"apt-get install --no-install-recommends {' '.join(missing)}"
        )
    if not re.fullmatch(r"[a-z]{1,6}", NAME):
        raise FleetError(f"FLEET_NAME={NAME}: must be 1 to 6 lower-case letters (link names have 15 bytes)")
    # overlayfs splits its options at these characters.
    if not re.fullmatch(r"(/[\w.+-]+)+", str(DIR)):
        raise FleetError(f"FLEET_DIR={DIR}: must be an absolute path of letters, digits and . _ + -")
    if not Path("/dev/net/tun").exists():
        raise FleetError("/dev/net/tun is missing here (kernel module tun): WireGuard in the hosts needs it")
    DIR.mkdir(mode=0o700, parents=True, exist_ok=True)
    if DIR.is_symlink() or DIR.stat().st_uid != 0:
        raise FleetError(f"FLEET_DIR={DIR} is a link or not root's: remove it, or name another")


def run(*argv: object, stdin: str | None = None) -> str:
    """Run a command and return its standard output; FleetError with what it said when it fails."""
    done = subprocess.run([str(word) for word in argv], input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        command = " ".join(str(word) for word in argv)
        raise FleetError(f"`{command}` failed with {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def attempt(*argv: object) -> bool:
    """Run a command whose failure is fine, because what it removes may not be there; whether it worked."""
    return subprocess.run([str(word) for word in argv], capture_output=True, check=False).returncode == 0


def parse_size(text: str) -> int:
    """Bytes of ``700M``, ``1.5G``, ``4096``; K, M and G are powers of 1024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text)
    if not found:
        raise FleetError(f"size {text!r}: write a number and K, M or G, for example 700M")
    return int(float(found[1]) * 1024 ** ("KMG".find(found[2]) + 1 if found[2] else 0))


def wait_for(seconds: float, pause: float = 0.05) -> Iterator[float]:
    """Yield what is left of the time, again and again, until it is over; at least once."""
    end = time.monotonic() + seconds
    yield seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(pause)
        yield left


def mounts_below(path: Path) -> list[str]:
    """Mount points at or below a path, the deepest first."""
    # Field 5 of mountinfo; a blank in a path is written \\040, and FLEET_DIR has none.
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return sorted((p for p in points if p == str(path) or p.startswith(f"{path}/")), key=len, reverse=True)


def remove_tree(path: Path) -> None:
    """Delete a directory tree of ours, unless something is still mounted in it: that would be deleted as well."""
    if mounted := mounts_below(path):
        raise FleetError(f"{path} is not deleted: still mounted are {', '.join(mounted)}")
    if path.exists():
        shutil.rmtree(path)


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.chmod(mode)
    new.replace(path)
