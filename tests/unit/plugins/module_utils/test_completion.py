# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What counts as an answer of a primary, and what each kind of silence is called."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils import _completion
from ansible_collections.llamafleet.rpc.plugins.module_utils._completion import Answer, Api, ProofError
from ansible_collections.llamafleet.rpc.tests.unit import servers

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

PLAN: dict[str, Any] = {
    "n_ctx": 2048,
    "n_gpu_layers": 31,
    "rpc": "127.0.0.1:18711",
    "tensor_split": "31",
    "device_order": ["RPC0"],
    "devices": [{"host": "a", "device": "CPU", "units": 31, "usable": 1 << 30, "headroom": 5}],
}


def at(port: int, key: str | None = None) -> Api:
    return Api("127.0.0.1", port, "", key)


def answer(text: str, tokens: tuple[int, ...] = ()) -> Answer:
    return Answer(text, tokens, len(tokens), None, None)


def test_an_answer_comes_with_its_speed() -> None:
    with servers.serve(servers.api(loading=2)) as port:
        assert _completion.wait_until_ready(at(port), 10) > 0.5
        got = _completion.complete(at(port), "The capital of France is", 24, 5)
    assert got == Answer(" Paris.\n\nThe United States", (1, 2, 3, 4, 5), 5, 50.5, 100.5)
    _completion.judge(got)


def test_the_key_is_sent_and_a_wrong_one_is_named_without_being_shown() -> None:
    with servers.serve(servers.api(key="right")) as port:
        assert _completion.complete(at(port, "right"), "x", 8, 5).text
        with pytest.raises(ProofError, match="refuses the API key") as failure:
            _completion.complete(at(port, "wrong-secret"), "x", 8, 5)
    assert "secret" not in str(failure.value)


def test_an_error_of_the_server_is_passed_on() -> None:
    with servers.serve(servers.api(status=500)) as port, pytest.raises(ProofError, match="500: the model is on strike"):
        _completion.complete(at(port), "x", 8, 5)


@pytest.mark.parametrize(
    ("completion", "code", "says"),
    [
        (servers.silent, "no_answer", "a worker is frozen, cut off or without power"),
        (servers.dripping_web, "no_answer", "a worker is frozen, cut off or without power"),
        (servers.broken_web, "died", "llama-server died while it answered"),
        (lambda connection: None, "died", "llama-server died while it answered"),
    ],
)
def test_health_ok_is_no_proof(completion: Callable[[socket.socket], None], code: str, says: str) -> None:
    """Law 10: /health says ok, the completion hangs, drips or breaks off; the deadline holds over all of it."""
    with servers.serve(servers.healthy_only(completion)) as port:
        _completion.wait_until_ready(at(port), 5)
        start = time.monotonic()
        with pytest.raises(ProofError, match=says) as failure:
            _completion.complete(at(port), "x", 8, 1)
    assert failure.value.code == code
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    ("talk", "says"),
    [
        (servers.api(loading=1000), "503, Loading model"),
        (servers.silent, "accepts connections but does not answer"),
        (servers.closing, "the connection broke"),
        (servers.web, "/health says 400"),
    ],
)
def test_a_server_that_does_not_get_ready_is_described(talk: Callable[[socket.socket], None], says: str) -> None:
    with servers.serve(talk) as port:
        start = time.monotonic()
        with pytest.raises(ProofError, match=says) as failure:
            _completion.wait_until_ready(at(port), 1)
    assert failure.value.code == "not_ready"
    assert time.monotonic() - start < 2


def test_nobody_there_is_described() -> None:
    with pytest.raises(ProofError, match="nothing listens there"):
        _completion.wait_until_ready(at(servers.free_port()), 0.3)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (answer(""), "empty"),
        (answer(" \n\n"), "empty"),
        (answer("GGGGGGGGGGGG"), "repeated"),
        (answer(" the the the the the"), "repeated"),
        (answer("????", (30, 30, 30, 30)), "repeated"),
    ],
)
def test_what_is_no_answer(given: Answer, code: str) -> None:
    with pytest.raises(ProofError) as failure:
        _completion.judge(given)
    assert failure.value.code == code


@pytest.mark.parametrize("given", [answer(" Paris.", (1, 2)), answer("4", (7,)), answer("no no, it is"), answer("aaa")])
def test_what_is_an_answer(given: Answer) -> None:
    _completion.judge(given)


def key(plan: dict[str, Any] | None, model: str = "m", build: str = "b", arguments: tuple[str, ...] = ()) -> str:
    return _completion.proof_key(model, build, plan, arguments, "p", 24)


def test_the_key_follows_decisions_and_not_readings() -> None:
    """Law 4: another reading of free memory is the same plan; another split, model, build or flag is not."""
    again = json.loads(json.dumps(PLAN))
    again["devices"][0].update(usable=7, headroom=1)
    again["warnings"] = [{"code": "x", "text": "y"}]
    assert key(again) == key(PLAN)
    other = json.loads(json.dumps(PLAN))
    other["devices"][0]["units"] = 30
    different = [
        key(other),
        key(None),
        key(PLAN, model="n"),
        key(PLAN, build="c"),
        key(PLAN, arguments=("-fa", "off")),
        key(PLAN),
    ]
    assert len(set(different)) == len(different)


def test_answers_are_kept_beside_each_other(tmp_path: Path) -> None:
    path = str(tmp_path / "proof.json")
    assert _completion.recorded_text(path, "k1") is None
    _completion.record_text(path, "k1", "one", {"model": "m"})
    _completion.record_text(path, "k2", "two", {"model": "n"})
    assert [_completion.recorded_text(path, name) for name in ("k1", "k2", "k3")] == ["one", "two", None]
    _completion.check_recorded(path, "one", "one")
    with pytest.raises(ProofError, match="'two' instead of 'one'") as failure:
        _completion.check_recorded(path, "one", "two")
    assert failure.value.code == "changed"
    assert path in str(failure.value)


def test_a_damaged_record_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    path.write_text('{"answers": [1')
    assert _completion.recorded_text(str(path), "k1") is None


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "https://a:1", "http://:80", "http://a:x", "http://ada:key@a:1", ""])
def test_an_url_that_is_none_is_an_error(url: str) -> None:
    with pytest.raises(ProofError, match="give the address of llama-server"):
        _completion.parse_url(url)


def test_an_url_may_have_a_prefix() -> None:
    assert _completion.parse_url("http://10.0.0.1/llama/").url == "http://10.0.0.1:80/llama"
