# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: worker_hours
short_description: Hours of a worker as minutes of the week and as calendar events of systemd and launchd
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - Checks the hours in which a worker may lend, and says when that begins and ends. Times are local to the worker.
positional: _input
options:
  _input:
    description:
      - Hours such as V(22:00-08:00), V(mon-fri 22:00-08:00) or V(sat,sun 00:00-24:00). They add up. Days are those on
        which a window begins.
    type: list
    elements: str
    required: true
"""

EXAMPLES = r"""
- name: When lending begins and ends
  ansible.builtin.debug:
    msg: "{{ (['22:00-08:00'] | llamafleet.rpc.worker_hours).calendars }}"
"""

RETURN = r"""
_value:
  description:
    - C(windows), pairs of the first minute of the week (from Monday 00:00) and the first minute after; none means
      always. C(calendars), the C(OnCalendar=) values of each begin and end. C(intervals), the same for launchd, as
      C(StartCalendarInterval).
  type: dict
"""

from typing import Any, Callable

from ansible.errors import AnsibleFilterError
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._hours import parse_hours


def worker_hours(entries: Any) -> dict[str, list[Any]]:
    try:
        hours = parse_hours(entries)
    except FleetError as error:
        raise AnsibleFilterError(f"llamafleet.rpc.worker_hours: {error}") from error
    return {
        "windows": [list(window) for window in hours.windows],
        "calendars": list(hours.calendars),
        "intervals": [dict(interval) for interval in hours.intervals],
    }


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"worker_hours": worker_hours}
