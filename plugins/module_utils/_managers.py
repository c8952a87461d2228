# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The service manager that a module's options name: the one place where that is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._launchd import Launchd
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Runner
from ansible_collections.llamafleet.rpc.plugins.module_utils._service import Manager, Supervisor, Systemd


def manager_of(runner: Runner, options: Mapping[str, Any]) -> Manager:
    """``options``: manager (systemd, launchd, supervisor), scope for systemd, directory for supervisor."""
    if options["manager"] == "systemd":
        return Systemd(runner, options["scope"])
    if options["manager"] == "launchd":
        return Launchd(runner)
    return Supervisor(runner, options["directory"])
