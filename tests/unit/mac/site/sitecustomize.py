# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read by each Python of a recorded Mac as it starts: says what platform says on one."""

from __future__ import annotations

import platform

platform.system = lambda: "Darwin"
platform.machine = lambda: "arm64"
platform.mac_ver = lambda release="", versioninfo=("", "", ""), machine="": ("15.6", ("", "", ""), "arm64")
