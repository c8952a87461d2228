# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decisions kept between runs: how two of them differ, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def differences(kept: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> list[str]:
    """One line for each decision of ``wanted`` that ``kept`` does not hold alike, and for each that is gone."""
    lines: list[str] = []
    for key in sorted({*kept, *wanted}, key=str):
        name, before, after = f"{prefix}{key}", kept.get(key), wanted.get(key)
        if before == after:
            continue
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differences(before, after, name + ".")
        else:
            lines.append(f"{name}: {_short(before)} -> {_short(after)}")
    return lines


def _short(value: Any) -> str:
    if value is None:
        return "nothing"
    text = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return text if len(text) <= 160 else text[:157] + "..."
