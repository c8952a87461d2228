# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which hosts answer a ping of a given size that must not be split: for path MTUs, and to prove a tunnel. Needs root.

All hosts are asked at once on one socket, so two hundred cost no more time than one. No program is needed: ``ping`` is
not on every host, and its options differ.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import time
from collections.abc import Iterable

# linux/in.h; Python has names for them from 3.14 on only. PROBE sets DF and does not believe the path MTU cache.
_IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE = 10, 3
# netinet/in.h and netinet/ip.h of macOS, which has no option for a raw socket: the DF bit stands in a header of ours.
_IP_HDRINCL, _DF = 2, 0x4000
_MAC = sys.platform == "darwin"
_HEADERS = 28  # IPv4 and ICMP
_ECHO_REQUEST, _ECHO_REPLY = 8, 0


def echo(addresses: Iterable[str], size: int, timeout: float = 0.4, tries: int = 2) -> set[str]:
    """Those of the IPv4 ``addresses`` that answer an unsplit packet of ``size`` bytes (IP header included).

    ``timeout`` in seconds is for all together, per try. PermissionError without root.
    """
    left, answered = set(addresses), set()
    identifier = int.from_bytes(os.urandom(2), "big")
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as sock:
        if _MAC:
            sock.setsockopt(socket.IPPROTO_IP, _IP_HDRINCL, 1)
        else:
            sock.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
        sock.setblocking(False)
        for number in range(tries):
            packet = _request(identifier, number, max(0, size - _HEADERS))
            for address in sorted(left):
                try:
                    sock.sendto(_mac_header(address, len(packet)) + packet if _MAC else packet, (address, 0))
                except OSError:
                    continue  # too long for the interface, no route, no peer: no answer either
            deadline = time.monotonic() + timeout
            while left and (rest := deadline - time.monotonic()) > 0:
                if not select.select([sock], [], [], rest)[0]:
                    break
                data, (sender, _port) = sock.recvfrom(65535)
                body = data[(data[0] & 15) * 4 :]
                if body[:1] == bytes([_ECHO_REPLY]) and body[4:6] == packet[4:6] and sender in left:
                    left.discard(sender)
                    answered.add(sender)
    return answered


def _mac_header(address: str, length: int) -> bytes:
    """An IPv4 header as ping(8) of macOS writes it: length and flags in the order of the machine, the rest filled in by
    the kernel."""
    head = struct.pack("=BBHHHBBH", 0x45, 0, 20 + length, 0, _DF, 64, socket.IPPROTO_ICMP, 0)
    return head + bytes(4) + socket.inet_aton(address)


def _request(identifier: int, number: int, length: int) -> bytes:
    body = struct.pack("!HH", identifier, number) + bytes(length)
    words = body + b"\0" * (len(body) % 2)
    total = sum(struct.unpack(f"!{len(words) // 2}H", words)) + (_ECHO_REQUEST << 8)
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!BBH", _ECHO_REQUEST, 0, ~total & 0xFFFF) + body
