# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Worker ports that the kernel does not hand out as the local end of somebody's outgoing connection.

A worker whose port is taken that way ends with status 0 and waits for a connection of somebody else to end. The kernel
has one list for all (net.ipv4.ip_local_reserved_ports, ip-sysctl.rst): what others reserved stays in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._files import read_text, write_atomic
from ansible_collections.llamafleet.rpc.plugins.module_utils._units import MANAGED

KERNEL = "/proc/sys/net/ipv4/ip_local_reserved_ports"
#: Read after other files (sysctl.d(5)), for the last value of a setting counts, and ours holds theirs.
PATH = "/etc/sysctl.d/90-llamafleet.conf"
_OURS = re.compile(r"^# ports of the workers: ([0-9,-]*)$", re.MULTILINE)


class PortError(FleetError):
    """The list of reserved ports cannot be read or changed."""


@dataclass(frozen=True)
class Outcome:
    """What was done or, in check mode, would be: text of the file and the kernel's list, before and after."""

    changed: bool
    before: str
    after: str


def parse_ports(text: str) -> set[int]:
    """The ports of a list such as ``8080,50000-50010``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            raise PortError(f"{KERNEL} holds {text.strip()[:80]!r}, which is no list of ports")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def format_ports(ports: Iterable[int]) -> str:
    """The shortest list of ``ports``, as the kernel prints it."""
    runs: list[list[int]] = []
    for port in sorted(set(ports)):
        if runs and port == runs[-1][1] + 1:
            runs[-1][1] = port
        else:
            runs.append([port, port])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def converge(ports: Iterable[int], check: bool, path: str = PATH, kernel: str = KERNEL) -> Outcome:
    """Reserve ``ports`` now and at boot, and give back those that we reserved before and are not among them."""
    wanted = set(ports)
    now_text, file_text = read_text(kernel), read_text(path) or ""
    if file_text and MANAGED not in file_text:
        raise PortError(f"{path} is not ours; move it away")
    if now_text is None:
        raise PortError(f"{kernel} is not there: this kernel cannot reserve ports")
    ours = _OURS.search(file_text)
    now = parse_ports(now_text)
    after = (now - parse_ports(ours[1] if ours else "")) | wanted
    text = ""
    if wanted:
        text = (
            f"# {MANAGED}\n# ports of the workers: {format_ports(wanted)}\n"
            f"net.ipv4.ip_local_reserved_ports = {format_ports(after)}\n"
        )
    changed = now != after or file_text != text
    if changed and not check:
        if now != after:
            try:
                with open(kernel, "w", encoding="ascii") as stream:
                    stream.write(format_ports(after) + "\n")
            except OSError as error:
                raise PortError(f"{kernel} cannot be written: {error.strerror}") from None
        if text:
            write_atomic(path, text)
        elif file_text:
            os.unlink(path)
    shown = f"net.ipv4.ip_local_reserved_ports = {format_ports(now)}\n"
    return Outcome(
        changed,
        file_text or (shown if now else ""),
        text or (f"net.ipv4.ip_local_reserved_ports = {format_ports(after)}\n" if after else ""),
    )
