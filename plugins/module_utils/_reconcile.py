# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What llama.cpp itself says of a device, against what was detected: the smaller figure holds, a gap is a warning.

llama.cpp is the authority once it is built (`llama-server --list-devices`, or a worker's answer while idle): drivers
give some parts half of what sysfs shows (B3-13), and Metal's limit is only estimated before (B3-25). A CPU's report is
its whole RAM whatever else runs, and never believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import (
    Device,
    DeviceError,
    Listed,
    clamp_free,
    mib_text,
    parse_list_devices,
)

# Detection and llama.cpp count the same memory in unlike ways (what the driver keeps for itself); more is a gap.
GAP_PERCENT = 5


class Verdict(NamedTuple):
    """What holds of a device: what may be lent, what is free (None: unknown), and what a person should know."""

    usable: int | None
    free: int | None
    warnings: tuple[str, ...]


def reconcile(device: Device, total: int | None, free: int | None, who: str = "llama-server") -> Verdict:
    """Detected `device` against the `total` and `free` bytes that `who` reports (None: no report).

    Where the detection is an estimate (device.ceiling), the report may raise it, up to that ceiling.
    """
    if device.backend == "cpu" or total is None:
        return Verdict(device.usable, None, ())
    bound = device.usable if device.ceiling is None else device.ceiling
    usable = total if bound is None else min(bound, total)
    free = clamp_free(total, free)
    if device.backend == "sycl" and free == total:
        free = None  # Level Zero's way to say that it does not know (B3-22)
    return Verdict(usable, free, _gap(device, total, who))


def _gap(device: Device, total: int, who: str) -> tuple[str, ...]:
    """A warning when the report is below what was to be lent, or above what was found, by more than GAP_PERCENT."""
    low = device.usable is not None and total * 100 < device.usable * (100 - GAP_PERCENT)
    high = device.total is not None and total * 100 > device.total * (100 + GAP_PERCENT)
    if not (low or high):
        return ()
    held = f"{mib_text(device.total)} ({mib_text(device.usable)} to lend, from {device.source or 'detection'})"
    return (f"{device.name} ({device.description}): {who} reports {mib_text(total)}, detected were {held}",)


def listing(value: str | Sequence[str] | None, what: str = "listed_devices") -> dict[str, Listed] | None:
    """Devices by name of the output of `llama-server --list-devices`, as text or lines; None when nothing is given.

    DeviceError for a text that is not that output, such as a log of a program that did not start.
    """
    if value is None:
        return None
    if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(line, str) for line in value)):
        raise DeviceError(
            f"{what}: {value!r} is neither text nor lines; give the output of llama-server --list-devices"
        )
    text = value if isinstance(value, str) else "\n".join(value)
    if "Available devices" not in text:
        start = text.strip()[:120]
        raise DeviceError(
            f"{what}: {start!r} is not the output of llama-server --list-devices; run it, and see its error"
        )
    return {entry.name.lower(): entry for entry in parse_list_devices(text)}
