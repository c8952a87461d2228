# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writing files so that a crash leaves the old file or the new one, never half of either."""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any


def write_atomic(path: str, text: str, mode: int = 0o644) -> None:
    """Replace ``path`` by ``text``: temporary name in the same directory, fsync, rename, fsync of the directory."""
    directory = os.path.dirname(path) or "."
    handle, temporary = tempfile.mkstemp(prefix="." + os.path.basename(path) + ".", dir=directory)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    directory_handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(directory_handle)
    finally:
        os.close(directory_handle)


def read_text(path: str) -> str | None:
    """The text of ``path``, or None where there is no such file, nor a directory for it."""
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_json(path: str) -> Any:
    """The value kept at ``path``; None where there is none or where it cannot be read as JSON.

    A file that is no JSON is treated as absent: what we keep there can be made anew, and a run must not stop on it.
    """
    try:
        text = read_text(path)
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None


def write_json(path: str, value: Any, mode: int = 0o644) -> None:
    """Keep ``value`` at ``path`` as stable, readable JSON (sorted keys)."""
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True) + "\n", mode)
