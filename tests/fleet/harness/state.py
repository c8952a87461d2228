# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is up: the hosts as they were asked for, kept in FLEET_DIR/state.json and written before each step.

Only descriptions live here. What runs is found by looking (cgroups, namespaces, mounts), so `down` needs no state.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from . import common
from .common import FleetError, parse_size
from .images import IMAGES

_STATE = common.DIR / "state.json"

# outsider: on the same network, but no member of the fleet; attempts that must fail come from there.
ROLES = ("primary", "worker", "outsider")


@dataclass(frozen=True)
class Link:
    """What is done to a host's cable. Milliseconds and percent are for each direction."""

    down: bool = False
    rate: str | None = None
    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0

    @property
    def needs_wire(self) -> bool:
        return bool(self.delay or self.jitter or self.loss)

    def changed(self, words: Sequence[str]) -> Link:
        """This link after ``down``, ``up``, ``clear``, ``20mbit`` or ``delay=10,jitter=1,loss=5``."""
        link = self
        for word in ",".join(words).split(","):
            key, _equals, value = word.partition("=")
            if word == "clear":
                link = Link()
            elif word in ("down", "up"):
                link = replace(link, down=word == "down")
            elif re.fullmatch(r"\d+(k|m|g)bit", word):
                link = replace(link, rate=word)
            elif key in ("delay", "jitter", "loss") and re.fullmatch(r"\d+(\.\d+)?", value):
                link = replace(
                    link,
                    delay=float(value) if key == "delay" else link.delay,
                    jitter=float(value) if key == "jitter" else link.jitter,
                    loss=float(value) if key == "loss" else link.loss,
                )
            else:
                raise FleetError(
                    f"link {word!r}: write up, down, clear, a rate like 20mbit, delay=MS, jitter=MS, loss=%"
                )
        return link


@dataclass(frozen=True)
class Host:
    """One host: memory and disk in bytes, cpu in processors (None: no limit)."""

    name: str
    address: str
    role: str
    image: str = "bookworm"
    mem: int = 2 << 30
    disk: int = 4 << 30
    cpu: float | None = None
    link: Link = field(default_factory=Link)


@dataclass(frozen=True)
class Fleet:
    """All of it. ``complete`` is false while `up` is at work, and stays false when it was killed."""

    hosts: Mapping[str, Host]
    bind_ro: Sequence[str] = ()
    egress: bool = False
    complete: bool = False

    def host(self, name: str) -> Host:
        if name not in self.hosts:
            raise FleetError(f"no host {name!r}: there are {', '.join(self.hosts)}")
        return self.hosts[name]

    def with_host(self, host: Host) -> Fleet:
        return replace(self, hosts={**self.hosts, host.name: host})


def parse_hosts(words: Sequence[str]) -> dict[str, Host]:
    """Hosts of ``NAME[:key=value,...]``, keys role, image, mem, disk, cpu; the first is the primary by default."""
    hosts: dict[str, Host] = {}
    for number, word in enumerate(words):
        name, _colon, options = word.partition(":")
        # 12 bytes and a prefix of two make a link name.
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,11}", name) or name == "core" or name in hosts:
            raise FleetError(f"host {name!r}: 1 to 12 of a-z, 0-9 and -, a letter first, not 'core', each name once")
        host = Host(name, str(common.NETWORK[11 + number]), "worker" if number else "primary")
        for option in options.split(",") if options else ():
            key, _equals, value = option.partition("=")
            if key == "role" and value in ROLES:
                host = replace(host, role=value)
            elif key == "image" and value in IMAGES:
                host = replace(host, image=value)
            elif key == "mem":
                host = replace(host, mem=parse_size(value))
            elif key == "disk":
                host = replace(host, disk=parse_size(value))
            elif key == "cpu":
                host = replace(host, cpu=parse_cpu(value))
            else:
                raise FleetError(
                    f"host {word!r}, {option!r}: write role={'|'.join(ROLES)}, image={'|'.join(IMAGES)}, "
                    "mem=SIZE, disk=SIZE or cpu=NUMBER"
                )
        hosts[name] = host
    return hosts


def parse_cpu(text: str) -> float:
    """Processors, 0.5 being half of one."""
    if not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) <= 0:
        raise FleetError(f"cpu {text!r}: write a number of processors, for example 0.5")
    return float(text)


def save(fleet: Fleet) -> None:
    common.write(_STATE, json.dumps(asdict(fleet), indent=1))


def load() -> Fleet:
    """The fleet as last saved; FleetError when there is none."""
    fleet = find()
    if fleet is None:
        raise FleetError(f"no fleet is up (FLEET_DIR={common.DIR}): `fleet up` first")
    return fleet


def find() -> Fleet | None:
    """The fleet as last saved, or None."""
    try:
        data = json.loads(_STATE.read_text())
    except FileNotFoundError:
        return None
    hosts = {name: Host(**{**host, "link": Link(**host["link"])}) for name, host in data.pop("hosts").items()}
    return Fleet(hosts=hosts, **data)


def forget() -> None:
    _STATE.unlink(missing_ok=True)


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """One verb at a time changes the fleet. The lock ends with the process, however that ends."""
    path = common.DIR / "lock"
    with path.open("a+") as file:
        for _left in common.wait_for(60, pause=0.2):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                continue
        else:
            raise FleetError(f"process {path.read_text()} has been changing this fleet for a minute: end it first")
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
