# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How people name a model: a path, a URL, or a file of a repository on a model hub.

The hub's spelling is that of its own tools: ``hf:owner/repo/file.gguf``, ``hf://owner/repo@revision/dir/file.gguf``, or
plain ``owner/repo/file.gguf`` where no such path exists. ``HF_ENDPOINT`` names another hub, ``HF_TOKEN`` a permission.
"""

from __future__ import annotations

import os
import re
import urllib.parse
from collections.abc import Callable
from typing import NamedTuple

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._http import is_web, redacted, same_server

HUB = "https://huggingface.co"

_NAMED = re.compile(r"(?:hf:(?://)?)?(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[^/@]+))?/(?P<file>[^?#]+\.gguf)")


class HubError(FleetError):
    """A name that is no path, no URL and no file of a hub; the message says how each is written."""


class Place(NamedTuple):
    """Where a model is: ``path`` or ``url``, the other is None. ``of_hub``: the hub's token may be sent there."""

    path: str | None
    url: str | None
    of_hub: bool


def hub_url(endpoint: str, repo: str, file: str, revision: str = "main") -> str:
    """Address of a file of a repository (``owner/name``) on the hub at ``endpoint``."""
    return f"{endpoint.rstrip('/')}/{repo}/resolve/{urllib.parse.quote(revision, safe='')}/{urllib.parse.quote(file)}"


def place_of(source: str, endpoint: str, exists: Callable[[str], bool]) -> Place:
    """What ``source`` means. ``exists`` tells whether there is a file of a name, which wins over the hub."""
    if source.startswith(("http://", "https://")):
        of_hub = same_server(source, endpoint)
        # The page of a file, as a browser shows it, is one word away from the file.
        return Place(None, re.sub(r"(//[^/]+/[^/]+/[^/]+)/blob/", r"\1/resolve/", source) if of_hub else source, of_hub)
    wants_hub = source.startswith("hf:")
    if not wants_hub and (exists(source) or source.startswith(("/", ".", "~"))):
        return Place(os.path.expanduser(source), None, False)
    match = _NAMED.fullmatch(source)
    if match:
        if not is_web(endpoint):
            raise HubError(f"endpoint {redacted(endpoint)!r} is no http or https address; the hub's is {HUB}")
        url = hub_url(endpoint, match.group("repo"), match.group("file"), match.group("revision") or "main")
        return Place(None, url, True)
    if wants_hub or "://" in source or not source:
        raise HubError(
            f"{redacted(source) if '://' in source else source!r} names no model; give a path, an http or https URL, or"
            " hf:owner/repo/file.gguf (with hf:owner/repo@revision/... for a branch, tag or commit)"
        )
    return Place(source, None, False)
