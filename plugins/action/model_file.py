# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Progress lines for the module model_file."""

from __future__ import annotations

from typing import Any

from ansible_collections.llamafleet.rpc.plugins.plugin_utils._long_work import LongWork


class ActionModule(LongWork):
    """See LongWork."""

    module = "llamafleet.rpc.model_file"

    def subject(self, args: dict[str, Any]) -> str:
        """See LongWork.subject. Never the URL, which may hold a signature."""
        return "model " + str(args.get("file") or args.get("member") or args.get("path") or "").rpartition("/")[2]
