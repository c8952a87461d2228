# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tests marked ``fleet`` need root and a machine that may carry hosts: they run only when asked for, `-m fleet`."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fleet: starts real hosts on this machine, as root (`make fleet`)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "fleet" in config.getoption("markexpr"):
        return
    unasked = [item for item in items if item.get_closest_marker("fleet")]
    items[:] = [item for item in items if item not in unasked]
    config.hook.pytest_deselected(items=unasked)
