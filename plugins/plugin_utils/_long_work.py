# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The controller's side of long work: call the module again and again, and say how far it is.

The work is a job of its own on the host (module_utils/_jobs.py), so a lost connection costs a call, not the work.
"""

from __future__ import annotations

import time
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

_POLL = 10  # seconds that a call on the host waits before it tells how far it is
_LOST = 6  # calls in a row that found no connection
_PAUSE = 10  # seconds between these

display = Display()


class LongWork(ActionBase):
    """Base of the action plugins: ``module`` is called until its result says ``done``."""

    module = ""
    _supports_check_mode = True
    _supports_async = False
    _supports_diff = True

    def subject(self, args: dict[str, Any]) -> str:
        """What is being made, for the progress line."""
        raise NotImplementedError

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """One call per ten seconds of work; a line per call."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        args = dict(self._task.args)
        host = (task_vars or {}).get("inventory_hostname", self._play_context.remote_addr)
        follow, lost = None, 0
        while True:
            call = dict(args, poll=_POLL)
            if follow is not None:
                call["follow"] = follow
            try:
                answer: dict[str, Any] = self._execute_module(
                    module_name=self.module, module_args=call, task_vars=task_vars
                )
            except AnsibleConnectionFailure as error:
                lost += 1
                if follow is None or lost >= _LOST:  # a host that was never there is not waited for
                    raise
                display.display(f"{host}: connection lost ({error.message}); the work goes on there, asking again")
                time.sleep(_PAUSE)
                continue
            lost = 0
            if answer.get("failed") or answer.get("done", True):
                result.update(answer)
                return result
            progress = answer.get("progress") or {}
            follow = progress.get("run")
            display.display(progress_line(str(host), self.subject(args), progress))


def progress_line(host: str, subject: str, progress: dict[str, Any]) -> str:
    """``host: llama.cpp b11434: compile 41 %, step 91/221, 95 s``: one line, fit for a log."""
    share = progress.get("percent")
    words = [str(progress.get("phase")) + (f" {share} %" if share is not None else "")]
    if progress.get("message"):
        words.append(str(progress["message"]))
    words.append(f"{progress.get('seconds', 0)} s")
    return f"{host}: {subject}: " + ", ".join(words)
