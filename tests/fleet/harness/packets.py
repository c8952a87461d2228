# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Frames: a wire that is late, jittered and lossy, and a counter for proofs of what a cable carries."""

from __future__ import annotations

import random
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_ETH_P_ALL = 3
_NOTHING = 0x88B5  # an experimental protocol: a socket bound to it hears nothing new
_SOL_PACKET, _PACKET_STATISTICS, _PACKET_VNET_HDR = 263, 6, 15
_PACKET_OUTGOING = 4
_TCP, _UDP = 6, 17


def _packet_socket(device: str) -> socket.socket:
    # The protocol comes with bind(): a socket that has it from the start hears every device until then.
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    end.setsockopt(socket.SOL_SOCKET, 33, 32 << 20)  # SO_RCVBUFFORCE
    end.bind((device, _ETH_P_ALL))
    end.setblocking(False)
    return end


def wire_end(device: str) -> socket.socket:
    """A socket for one end of a wire."""
    end = _packet_socket(device)
    # Frames between veths may have no checksum yet and hold many segments (offload). With this header before each
    # frame the kernel tells so, and takes it back as it was; without it, the receiver would drop them.
    end.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    return end


def forward(ends: Sequence[socket.socket], delay: float, jitter: float, loss: float) -> None:
    """Carry frames between two devices for ever: ``delay`` +- ``jitter`` ms late, ``loss`` percent not at all.

    Order is kept. Loss is per frame as the kernel hands it over, which is a datagram for WireGuard and UDP, and up
    to 64 KiB of a plain TCP stream.
    """
    queues: Sequence[deque[tuple[float, bytes]]] = (deque(), deque())  # [i] leaves by ends[i]
    while True:
        due = min((queue[0][0] for queue in queues if queue), default=None)
        select.select(ends, [], [], None if due is None else max(0.0, due - time.monotonic()))
        for number, end in enumerate(ends):
            queue = queues[1 - number]
            for _number in range(256):  # then the other direction
                try:
                    frame, address = end.recvfrom(1 << 17)
                except OSError:  # nothing left, or the device is down
                    break
                if address[2] == _PACKET_OUTGOING or random.random() * 100 < loss:
                    continue
                leaves = time.monotonic() + (delay + random.uniform(-jitter, jitter)) / 1000
                queue.append((max(leaves, queue[-1][0]) if queue else leaves, frame))
        now = time.monotonic()
        for end, queue in zip(ends, queues):
            while queue and queue[0][0] <= now:
                try:
                    end.send(queue.popleft()[1])
                except OSError:  # down, or its queue is full: lost, as on a real wire
                    continue


@dataclass
class Count:
    """What was seen of one port."""

    frames: int = 0
    bytes: int = 0


@dataclass
class Capture:
    """Frames on a cable, both directions, each counted once.

    ``missed`` frames came faster than they were counted, and of ``fragments`` only the first piece shows its port:
    "none was seen" is proved only where both are 0.
    """

    ports: dict[int, Count]
    frames: int = 0
    missed: int = 0
    fragments: int = 0
    protocols: dict[str, int] = field(default_factory=dict)

    def add(self, frame: memoryview, length: int) -> None:
        """Count one frame, of which the beginning is there."""
        self.frames += 1
        protocol, ports, fragment = _look(frame)
        self.protocols[protocol] = self.protocols.get(protocol, 0) + 1
        self.fragments += fragment
        for port in set(ports) & set(self.ports):
            self.ports[port].frames += 1
            self.ports[port].bytes += length


def _look(frame: memoryview) -> tuple[str, tuple[int, ...], bool]:
    """Protocol, TCP or UDP ports, and whether it is a later fragment."""
    kind = int.from_bytes(frame[12:14], "big")
    if kind == 0x0800:
        name, protocol, start = "ipv4", frame[23], 14 + (frame[14] & 15) * 4
        if int.from_bytes(frame[20:22], "big") & 0x1FFF:
            return name, (), True
    elif kind == 0x86DD:
        name, protocol, start = "ipv6", frame[20], 54
    else:
        return {0x0806: "arp"}.get(kind, f"{kind:#06x}"), (), False
    if protocol not in (_TCP, _UDP):
        return f"{name}/{protocol}", (), protocol == 44  # a fragment header of IPv6
    return f"{name}/{'tcp' if protocol == _TCP else 'udp'}", struct.unpack("!HH", frame[start : start + 4]), False


def capture(device: socket.socket, ports: Sequence[int], finished: Callable[[], bool]) -> Capture:
    """Count until ``finished``, and then what had arrived by then; ``device`` is of :func:`listen`."""
    seen = Capture({port: Count() for port in ports})
    buffer = bytearray(128)
    view = memoryview(buffer)
    while True:
        if over := finished():
            device.bind((device.getsockname()[0], _NOTHING))
        select.select([device], [], [], 0 if over else 0.1)
        for _number in range(10_000):  # then look whether it is over
            try:
                # With MSG_TRUNC the length is that of the whole frame.
                length, _address = device.recvfrom_into(buffer, 128, socket.MSG_TRUNC)
            except BlockingIOError:
                if over:
                    _packets, seen.missed = struct.unpack("II", device.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))
                    return seen
                break
            seen.add(view, length)


def listen(device: str) -> socket.socket:
    """A socket that hears a device from now on."""
    return _packet_socket(device)
