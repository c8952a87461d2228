# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""gguf_info as a task sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.modules import gguf_info
from ansible_collections.llamafleet.rpc.tests.unit import measured, servers


def call(**options: Any) -> dict[str, Any]:
    return servers.run_module(gguf_info.main, options)


@pytest.mark.real
def test_the_demo_model(demo_model: Path) -> None:
    result = call(path=str(demo_model))
    assert not result["changed"]
    model = result["model"]
    expected = measured.model("smol-header-only").to_dict()
    assert model["layers"] == expected["layers"]
    for key in ("n_layer", "n_embd", "n_vocab", "input_bytes", "output_bytes", "per_device_bytes", "tied"):
        assert model[key] == expected[key], key
    assert model["path"] == str(demo_model)
    assert model["shards"] == [str(demo_model)]
    assert (model["architecture"], model["quantization"], model["file_bytes"]) == ("llama", "Q4_1", 98362432)


def test_a_broken_file_fails_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("<html>Sign in</html>")
    result = call(path=str(path))
    assert result["failed"]
    assert result["msg"].startswith(f"{path}: is an HTML page, not a model")


def test_a_url_that_nobody_serves_fails_without_its_secrets() -> None:
    result = call(url=f"http://user:pw@127.0.0.1:{servers.free_port()}/m.gguf?key=s3cret", timeout=2)
    assert result["failed"]
    assert "cannot be fetched" in result["msg"]
    assert "s3cret" not in result["msg"]
    assert "pw" not in result["msg"]


def test_a_file_of_a_hub_is_read_from_the_hub_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No connection to the real hub: the address is the one in HF_ENDPOINT, and the token is not shown."""
    port = servers.free_port()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("HF_TOKEN", "hf_s3cret")
    monkeypatch.chdir(tmp_path)
    result = call(source="owner/repo/m.gguf", timeout=2)
    assert result["failed"]
    assert result["msg"].startswith(f"http://127.0.0.1:{port}/owner/repo/resolve/main/m.gguf: cannot be fetched")
    assert "hf_s3cret" not in str(result)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "one of the following is required: path, url, source"),
        ({"path": "/m.gguf", "url": "http://127.0.0.1/m.gguf"}, "mutually exclusive"),
        ({"path": "/m.gguf", "timeout": 0}, "timeout is 0 seconds"),
        ({"path": "/m.gguf", "timeout": "nan"}, "timeout is nan seconds"),
        ({"source": ""}, "'' names no model"),
        ({"url": ""}, "'' names no model"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], expected: str) -> None:
    result = call(**options)
    assert result["failed"]
    assert expected in result["msg"]
