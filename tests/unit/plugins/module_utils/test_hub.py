# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How people name a model, and what is taken of it."""

from __future__ import annotations

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._hub import HUB, HubError, Place, place_of

FILE = "owner/Some-70B-GGUF/Q4/some-70b-00001-of-00002.gguf"
URL = f"{HUB}/owner/Some-70B-GGUF/resolve/main/Q4/some-70b-00001-of-00002.gguf"


@pytest.mark.parametrize(
    ("source", "place"),
    [
        (f"hf:{FILE}", Place(None, URL, True)),
        (f"hf://{FILE}", Place(None, URL, True)),
        (FILE, Place(None, URL, True)),
        ("hf:a/b@v1.0/c d.gguf", Place(None, f"{HUB}/a/b/resolve/v1.0/c%20d.gguf", True)),
        (URL.replace("/resolve/", "/blob/"), Place(None, URL, True)),
        ("https://example.com/a/b/blob/main/m.gguf", Place(None, "https://example.com/a/b/blob/main/m.gguf", False)),
        ("models/here/m.gguf", Place("models/here/m.gguf", None, False)),
        ("/srv/models/m.gguf", Place("/srv/models/m.gguf", None, False)),
        ("./a/b/m.gguf", Place("./a/b/m.gguf", None, False)),
        ("m.gguf", Place("m.gguf", None, False)),
    ],
)
def test_each_spelling_is_what_its_tools_take_it_for(source: str, place: Place) -> None:
    assert place_of(source, HUB, lambda path: path == "models/here/m.gguf") == place


def test_a_file_that_is_there_wins_over_the_hub() -> None:
    assert place_of(FILE, HUB, lambda path: path == FILE) == Place(FILE, None, False)
    assert place_of(f"hf:{FILE}", HUB, lambda _path: True).url == URL


def test_another_hub() -> None:
    assert place_of("hf:a/b/c.gguf", "http://127.0.0.1:9/hub/", lambda _path: False) == Place(
        None, "http://127.0.0.1:9/hub/a/b/resolve/main/c.gguf", True
    )
    assert not place_of(URL, "https://mirror.example", lambda _path: False).of_hub


@pytest.mark.parametrize("source", ["hf:owner/repo", "hf:m.gguf", "hf:owner/repo/readme.md", "s3://bucket/m.gguf"])
def test_a_name_of_no_model_tells_how_one_is_written(source: str) -> None:
    with pytest.raises(HubError, match=r"hf:owner/repo/file\.gguf"):
        place_of(source, HUB, lambda _path: False)


def test_an_endpoint_that_is_no_address_is_refused() -> None:
    with pytest.raises(HubError, match="is no http or https address"):
        place_of("hf:a/b/c.gguf", "mirror", lambda _path: False)
