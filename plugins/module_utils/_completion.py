# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The proof that a primary works: one answer at temperature 0, judged, and the same as last time.

/health says ok while a worker is frozen or dead and only the next token would tell (measured on b11434), and a damaged
cache file on a worker gives status 200 with an empty text. So nothing less than a completion counts, under one
deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import socket
import threading
import time
import urllib.parse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._files import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROMPT = "The capital of France is"
_ANSWER_LIMIT = 4 << 20
_HEALTH_TIMEOUT = 5.0
_REPEATS = 4  # this many tokens, all the same, are no answer

_FROZEN = (
    "a worker is frozen, cut off or without power: llama-server waits for it for ever, and its /health stays ok. Probe "
    "the workers (rpc_info), restart them, then the primary. If they answer, see whether other programs keep the "
    "processors of a worker busy: threads of llama.cpp wait for each other by spinning, so set `threads` to fewer"
)
_DIED = (
    "llama-server died while it answered, most often because a worker did. Read its log and the workers' logs, restart "
    "the workers, then the primary"
)


class ProofError(FleetError):
    """The primary is not proved; `code` is one of not_ready, no_answer, died, refused, empty, repeated, changed, and
    wrong_input where the question itself is at fault."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Api:
    """Where llama-server listens, and the key it asks for (never shown)."""

    host: str
    port: int
    path: str
    key: str | None = None

    @property
    def url(self) -> str:
        """The address without the key."""
        return f"http://{self.host}:{self.port}{self.path}"


@dataclass(frozen=True)
class Answer:
    """A completion: text, token numbers (empty from a server that does not return them), count, speeds in tokens/s."""

    text: str
    tokens: tuple[int, ...]
    n_tokens: int | None
    tokens_per_s: float | None
    prompt_tokens_per_s: float | None


class _ClosedError(Exception):
    """The connection broke, or what came is not HTTP."""


def parse_url(url: str, key: str | None = None) -> Api:
    """The parts of http://host:port[/prefix]; raises ProofError for anything else."""
    parts = urllib.parse.urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or port == 0 or parts.query or parts.username:
        raise ProofError("wrong_input", f"url {url!r}: give the address of llama-server, such as http://127.0.0.1:8080")
    return Api(parts.hostname, port or 80, parts.path.rstrip("/"), key)


def wait_until_ready(api: Api, timeout: float) -> float:
    """Wait until the model is loaded; seconds that took. Raises ProofError("not_ready") with the likely cause.

    Status 503 ("Loading model") and refused connections are waited for: a server of b11434 listens before it loads, but
    not yet while it connects to its workers.
    """
    start = time.monotonic()
    end = start + timeout
    last = "nothing listens there: llama-server is not running, or starts and ends again and again; read its log"
    while True:
        left = end - time.monotonic()
        if left <= 0:
            raise ProofError("not_ready", f"{api.url} is not ready after {timeout:g} s: {last}")
        try:
            status, body = _request(api, "GET", "/health", None, min(left, _HEALTH_TIMEOUT))
        except ConnectionRefusedError:
            last = (
                "nothing listens there: llama-server is not running, or starts and ends again and again; read its log"
            )
        except TimeoutError:
            last = (
                "it accepts connections but does not answer: llama-server is frozen, or another program holds the port"
            )
        except (_ClosedError, OSError) as error:
            last = (
                f"the connection broke ({error}): llama-server ended as it started, or another program holds the port"
            )
        else:
            if status == 200:
                return time.monotonic() - start
            last = (
                f"/health says {status}, {_message(body)}: the model is still being sent to the workers, or hangs there"
            )
            if status != 503:
                last = f"/health says {status}, {_message(body)}: another program may hold the port"
        time.sleep(max(0.0, min(0.5, end - time.monotonic())))


def complete(api: Api, prompt: str, n_predict: int, timeout: float) -> Answer:
    """One completion at temperature 0, nothing taken from the prompt cache. Raises ProofError with the likely cause."""
    question = {
        "prompt": prompt,
        "n_predict": n_predict,
        "temperature": 0,
        "seed": 1,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": False,
    }
    try:
        status, body = _request(api, "POST", "/completion", json.dumps(question).encode(), timeout)
    except TimeoutError:
        raise ProofError("no_answer", f"{api.url} gave no answer within {timeout:g} s: {_FROZEN}") from None
    except (_ClosedError, OSError) as error:
        raise ProofError("died", f"{api.url} gave no answer ({error}): {_DIED}") from None
    if status in (401, 403):
        raise ProofError("refused", f"{api.url} refuses the API key ({status}): give the file that llama-server reads")
    if status != 200:
        raise ProofError("refused", f"{api.url}/completion says {status}: {_message(body)}")
    try:
        data = json.loads(body)
        timings = data.get("timings") or {}
        return Answer(
            text=str(data["content"]),
            tokens=tuple(int(token) for token in data.get("tokens") or ()),
            n_tokens=data.get("tokens_predicted"),
            tokens_per_s=timings.get("predicted_per_second"),
            prompt_tokens_per_s=timings.get("prompt_per_second"),
        )
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ProofError("refused", f"{api.url} answered, but not as llama-server does: {_shown(body)}") from None


def judge(answer: Answer) -> None:
    """Raise ProofError unless this is an answer: some text, and not one token over and over."""
    if not answer.text.strip():
        raise ProofError(
            "empty",
            "the answer is empty, though the server says that all is well: a worker computes rubbish. A damaged file "
            "in its cache (-c) does that, or a mix of builds: clear the cache, compare the builds, restart all",
        )
    words = answer.text.split()
    one_token = len(answer.tokens) >= _REPEATS and len(set(answer.tokens)) == 1
    one_word = len(words) >= _REPEATS and len(set(words)) == 1
    one_character = len(words) == 1 and len(words[0]) >= 2 * _REPEATS and len(set(words[0])) == 1
    if one_token or one_word or one_character:
        raise ProofError(
            "repeated",
            f"the answer repeats itself: {answer.text[:80]!r}. A device computes rubbish: compare the builds, try "
            "without flash attention, and leave out one worker at a time",
        )


def proof_key(
    model: str, build: str, plan: Mapping[str, Any] | None, arguments: Sequence[str], prompt: str, n: int
) -> str:
    """One name for everything that the answer depends on. Of the plan only decisions count, no memory readings."""
    decisions = None
    if plan is not None:
        decisions = {
            "n_ctx": plan.get("n_ctx"),
            "n_gpu_layers": plan.get("n_gpu_layers"),
            "rpc": plan.get("rpc"),
            "tensor_split": plan.get("tensor_split"),
            "device_order": plan.get("device_order"),
            "units": [[device.get("host"), device.get("device"), device.get("units")] for device in plan["devices"]],
        }
    text = json.dumps([model, build, decisions, list(arguments), prompt, n], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def recorded_text(path: str, key: str) -> str | None:
    """The answer that was recorded for a key; None when there is none."""
    kept = _answers(path).get(key)
    return kept.get("text") if isinstance(kept, dict) else None


def record_text(path: str, key: str, text: str, about: Mapping[str, Any]) -> None:
    """Add an answer to the record, with what a person wants to know about it; the others are kept."""
    answers = _answers(path)
    answers[key] = dict(about, text=text)
    write_json(path, {"schema": 1, "answers": answers})


def check_recorded(path: str, recorded: str, text: str) -> None:
    """Raise ProofError when an answer is not the recorded one."""
    if text != recorded:
        raise ProofError(
            "changed",
            f"the answer is not the one recorded for the same model, build and plan: {text[:120]!r} instead of "
            f"{recorded[:120]!r}. A worker computes differently than before (cache, driver, hardware). If the new "
            f"answer is right, remove {path} and run again",
        )


def _answers(path: str) -> dict[str, Any]:
    record = read_json(path)
    answers = record.get("answers") if isinstance(record, dict) else None
    return dict(answers) if isinstance(answers, dict) else {}


def _request(api: Api, method: str, path: str, body: bytes | None, timeout: float) -> tuple[int, bytes]:
    """(status, body) within `timeout` seconds in all. A socket's own time-out counts each wait anew, and a peer that
    sends a byte now and then would never end: a timer closes the connection at the deadline."""
    end = time.monotonic() + timeout
    connection = http.client.HTTPConnection(api.host, api.port, timeout=timeout)
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if api.key is not None:
        headers["Authorization"] = f"Bearer {api.key}"
    try:
        connection.connect()
        guard = threading.Timer(max(0.0, end - time.monotonic()), _shut, [connection.sock])
        guard.daemon = True
        guard.start()
        try:
            connection.request(method, api.path + path, body, headers)
            response = connection.getresponse()
            data = response.read(_ANSWER_LIMIT)
            if response.length and len(data) < _ANSWER_LIMIT:
                raise http.client.IncompleteRead(data, response.length)
            return response.status, data
        finally:
            guard.cancel()
    except ConnectionRefusedError:
        raise
    except (OSError, http.client.HTTPException) as error:
        # socket.timeout is a TimeoutError only from Python 3.10 on.
        if isinstance(error, socket.timeout) or time.monotonic() >= end:
            raise TimeoutError from None
        raise _ClosedError(str(error) or type(error).__name__) from None
    finally:
        connection.close()


def _shut(peer: socket.socket) -> None:
    # It may have ended by itself.
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return _shown(body)


def _shown(body: bytes) -> str:
    return repr(body[:200].decode("utf-8", "replace"))
