# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an operator adds must not undo the plan, download at start, or show a secret."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.llamafleet.rpc.plugins.filter.extra_args import extra_args
from ansible_collections.llamafleet.rpc.plugins.module_utils._extra_args import REFUSED


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-ts", "1,1"], "the plan decides it"),
        (["--rpc=10.0.0.2:5"], "the plan decides it"),
        (["--cpu-moe"], "costs a round trip"),
        (["-ot", "x=CPU"], "costs a round trip"),
        (["-sm", "tensor"], "slower over RPC"),
        (["--api-key", "s3cret"], "llama_primary_api_key_file"),
        (["-hf", "a/b"], "never download at start"),
        (["--port", 9], "llama_primary_port"),
        ("--metrics", "not a list"),
    ],
)
def test_what_undoes_the_plan_is_refused_with_the_remedy(arguments: object, message: str) -> None:
    """Cases B1-16, B7-04."""
    with pytest.raises(AnsibleFilterError, match=message) as error:
        extra_args(arguments)
    assert "s3cret" not in str(error.value)


def test_the_rest_passes_unchanged() -> None:
    assert extra_args(["--metrics", "--alias", "big", "-t", 4]) == ["--metrics", "--alias", "big", "-t", "4"]


@pytest.mark.real
def test_every_refused_option_exists(llama_bin: Path) -> None:
    """A name that llama-server does not know would guard nothing."""
    text = subprocess.run([llama_bin / "llama-server", "--help"], check=True, capture_output=True, text=True).stdout
    known = set(re.findall(r"(?<![\w-])-{1,2}[a-z][\w-]*", text))
    assert set(REFUSED) <= known
