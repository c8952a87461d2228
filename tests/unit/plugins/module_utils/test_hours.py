# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hours as people write them."""

from __future__ import annotations

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._hours import DAY, WEEK, HoursError, parse_hours


def test_every_night_begins_and_ends_daily() -> None:
    hours = parse_hours(["22:00-08:00"])
    assert hours.calendars == ("*-*-* 08:00:00", "*-*-* 22:00:00")
    assert sum(end - start for start, end in hours.windows) == 7 * 10 * 60


def test_days_are_those_on_which_a_window_begins() -> None:
    """Sunday's night ends on Monday, over the end of the week."""
    hours = parse_hours(["sun 22:00-08:00"])
    assert hours.windows == ((0, 8 * 60), (6 * DAY + 22 * 60, WEEK))
    assert hours.calendars == ("Mon *-*-* 08:00:00", "Sun *-*-* 22:00:00")


def test_entries_add_up_and_nothing_happens_where_they_touch() -> None:
    hours = parse_hours(["fri 18:00-24:00", "Sat,Sun 00:00-24:00"])
    assert hours.windows == ((4 * DAY + 18 * 60, WEEK),)
    assert hours.calendars == ("Mon *-*-* 00:00:00", "Fri *-*-* 18:00:00")


def test_a_range_of_days_may_cross_the_end_of_the_week() -> None:
    assert parse_hours(["fri-mon 10:00-11:00"]).calendars[0].startswith("Mon,Fri,Sat,Sun ")


def test_no_hours_and_all_hours_never_begin_or_end() -> None:
    assert parse_hours([]).windows == () and parse_hours([]).calendars == ()
    assert parse_hours(["0:00-24:00"]).windows == ((0, WEEK),) and parse_hours(["0:00-24:00"]).calendars == ()


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ("22:00-08:00", "is not a list"),
        (["22-8"], "write HH:MM-HH:MM"),
        (["25:00-08:00"], "25:00 is no time of day"),
        (["22:60-08:00"], "22:60 is no time of day"),
        (["08:00-08:00"], "whole day is 00:00-24:00"),
        (["24:00-08:00"], "whole day is 00:00-24:00"),
        (["someday 22:00-08:00"], "'someday' is no day"),
        (["mon-wed-fri 22:00-08:00"], "'mon-wed-fri' is no day"),
    ],
)
def test_what_is_not_understood_is_named_with_a_remedy(entries: object, says: str) -> None:
    with pytest.raises(HoursError, match="llama_worker_hours") as error:
        parse_hours(entries)
    assert says in str(error.value)


def test_launchd_is_told_the_same_moments() -> None:
    """Weekday 1 is Monday, 7 Sunday (launchd.plist(5) takes 0 and 7 for Sunday)."""
    hours = parse_hours(["sun 22:30-08:00"])
    assert hours.intervals == (
        {"Weekday": 1, "Hour": 8, "Minute": 0},
        {"Weekday": 7, "Hour": 22, "Minute": 30},
    )
    assert len(parse_hours(["22:00-08:00"]).intervals) == 14
    assert parse_hours(["00:00-24:00"]).intervals == parse_hours([]).intervals == ()
