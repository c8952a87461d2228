# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The one base of all errors that the core raises on purpose.

A message names what is wrong, where, which value, and what to do next. The edge (modules, filters)
turns a FleetError into the failure of its task; anything else is a defect and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Sequence


class FleetError(Exception):
    """Base of every intentional error of the core; ``str(error)`` is fit for an operator."""


def kind_of(value: object) -> str:
    """Name of the type of a value for a message: str or dict, also for what Ansible makes of them in a template."""
    return next(kind.__name__ for kind in type(value).__mro__ if kind.__module__ == "builtins")


def listed(names: Sequence[str], most: int = 5) -> str:
    """The names for a message, but no more than ``most`` of them, and how many are left."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
