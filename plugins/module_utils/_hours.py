# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hours as people write them ("mon-fri 22:00-08:00") -> minutes of a week, and calendars of systemd and launchd.

Times are local to the machine that lends. A window that ends before it begins ends on the next day.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError

DAY = 24 * 60
WEEK = 7 * DAY

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_WINDOW = re.compile(r"(?:([a-z, -]+?) +)?(\d{1,2}):(\d{2}) *- *(\d{1,2}):(\d{2})")


class HoursError(FleetError):
    """Hours that cannot be understood."""


@dataclass(frozen=True)
class Hours:
    """``windows``: [start, end) in minutes of the week from Monday 00:00, in order, none touching another; no window
    crosses the end of the week. ``calendars``: OnCalendar= values (systemd.time(7)) of each moment when lending begins
    or ends; none where that never happens. ``intervals``: the same as StartCalendarInterval values (launchd.plist(5)).
    """

    windows: tuple[tuple[int, int], ...]
    calendars: tuple[str, ...]
    intervals: tuple[Mapping[str, int], ...] = ()


def parse_hours(entries: object, what: str = "llama_worker_hours") -> Hours:
    """Entries such as ``22:00-08:00`` (every day) or ``sat,sun 00:00-24:00``; they add up, days are when one begins.

    No entries: no windows, which means at any time. Raises HoursError naming ``what`` and the entry.
    """
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise HoursError(f"{what}: {entries!r} is not a list of hours such as ['22:00-08:00', 'sat,sun 00:00-24:00']")
    minutes = [False] * WEEK
    for entry in entries:
        days, begin, length = _window(entry, what)
        for day in days:
            for minute in range(begin, begin + length):
                minutes[(day * DAY + minute) % WEEK] = True
    edges = [minute for minute in range(WEEK) if minutes[minute] != minutes[minute - 1]]
    seams = sorted({0, *edges})
    windows = tuple((start, end) for start, end in zip(seams, [*seams[1:], WEEK]) if minutes[start])
    return Hours(windows if entries else (), _calendars(edges), _intervals(edges))


def _window(entry: object, what: str) -> tuple[list[int], int, int]:
    """Days (0 is Monday), first minute of the day and length in minutes of one entry."""
    text = str(entry).strip().lower()
    found = _WINDOW.fullmatch(text)
    if not found:
        raise HoursError(
            f"{what}: {entry!r} is not understood; write HH:MM-HH:MM, with days before it if not for all: "
            "22:00-08:00, mon-fri 22:00-08:00, sat,sun 00:00-24:00"
        )
    begin = _minute(found.group(2), found.group(3), what, entry)
    end = _minute(found.group(4), found.group(5), what, entry)
    if begin in (end, DAY):
        raise HoursError(f"{what}: {entry!r} has no length; the whole day is 00:00-24:00")
    return _days(found.group(1), what, entry), begin, (end - begin) % DAY or DAY


def _minute(hour: str, minute: str, what: str, entry: object) -> int:
    value = int(hour) * 60 + int(minute)
    if int(minute) > 59 or value > DAY:
        raise HoursError(f"{what}: {entry!r}: {hour}:{minute} is no time of day from 00:00 to 24:00")
    return value


def _days(text: str | None, what: str, entry: object) -> list[int]:
    if text is None:
        return list(range(7))
    days: set[int] = set()
    for part in text.split(","):
        ends = [name.strip() for name in part.split("-")]
        if len(ends) > 2 or any(name not in _DAYS for name in ends):
            raise HoursError(f"{what}: {entry!r}: {part.strip()!r} is no day or range of {', '.join(_DAYS)}")
        first, last = _DAYS.index(ends[0]), _DAYS.index(ends[-1])
        days |= {(first + step) % 7 for step in range((last - first) % 7 + 1)}
    return sorted(days)


def _calendars(edges: Sequence[int]) -> tuple[str, ...]:
    times: dict[int, list[int]] = {}
    for edge in edges:
        times.setdefault(edge % DAY, []).append(edge // DAY)
    lines = []
    for minute, days in sorted(times.items()):
        names = "" if len(days) == 7 else ",".join(_DAYS[day].capitalize() for day in days) + " "
        lines.append(f"{names}*-*-* {minute // 60:02d}:{minute % 60:02d}:00")
    return tuple(lines)


def _intervals(edges: Sequence[int]) -> tuple[Mapping[str, int], ...]:
    """Weekday 1 is Monday and 7 Sunday; a Mac that slept then runs the job when it wakes."""
    return tuple({"Weekday": edge // DAY + 1, "Hour": edge % DAY // 60, "Minute": edge % 60} for edge in sorted(edges))
