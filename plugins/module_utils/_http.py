# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Requests to web servers: what may be asked for, where a token may go, and how addresses are named in messages.

Only http and https, also behind a redirect. A token is sent to the server that was asked and never to another one that
it redirects to (a hub redirects to a store of files, with the permission in the new address).
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import IO

_LOCAL = ("127.0.0.1", "localhost")


def redacted(url: str) -> str:
    """``url`` without what may be secret in it: account, query and fragment."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def is_web(url: str) -> bool:
    """Whether ``url`` is an address that ``send`` takes: http or https, with a host."""
    parts = urllib.parse.urlsplit(url)
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def may_carry_token(url: str) -> bool:
    """Whether nobody on the way would read a token that is sent to ``url``: https, or this machine."""
    parts = urllib.parse.urlsplit(url)
    return parts.scheme == "https" or parts.hostname in _LOCAL


def same_server(url: str, other: str) -> bool:
    """Whether both addresses are of one server: scheme, host and port."""
    first, second = urllib.parse.urlsplit(url), urllib.parse.urlsplit(other)
    return (first.scheme, first.hostname, first.port) == (second.scheme, second.hostname, second.port)


def send(
    url: str, headers: Mapping[str, str], token: str = "", method: str = "GET", timeout: float = 60.0
) -> http.client.HTTPResponse:
    """The server's answer, its body unread. ``timeout``: seconds that each step may take.

    ``url`` must have passed ``is_web``, and ``may_carry_token`` if there is a token. Raises what urllib raises:
    HTTPError for a status from 400 on; URLError, another OSError, HTTPException or ValueError without an answer.
    """
    request = urllib.request.Request(url, headers=dict(headers), method=method)  # noqa: S310 - callers check http(s) by is_web
    request.add_header("User-Agent", "llamafleet.rpc")
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    response: http.client.HTTPResponse = _opener().open(request, timeout=timeout)
    return response


def why_refused(code: int) -> str | None:
    """What to do about a status that will not change by asking again; None where it may."""
    if code in (408, 425, 429) or code >= 500:
        return None
    return {
        401: "the server wants a token: give one that may read this repository",
        403: "the server refuses access: accept the licence of the model there, or give a token that may read it",
        404: "there is no such file: check its name and revision",
    }.get(code, "check the URL")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Keeps the token on the server that was asked (a renamed repository), and knows 308, which Python 3.9 does not."""

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        new = super().redirect_request(req, fp, 307 if code == 308 else code, msg, headers, newurl)
        token = req.unredirected_hdrs.get("Authorization")
        if new is not None and token and same_server(req.full_url, newurl):
            new.add_unredirected_header("Authorization", token)
        return new


def _opener() -> urllib.request.OpenerDirector:
    """An opener that follows a redirect to http and https only; build_opener() would follow one to ftp as well."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        _Redirects(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener
