# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an operator adds must not undo the plan, download at start, or show a secret."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.llamafleet.rpc.plugins.filter.extra_args import extra_args
from ansible_collections.llamafleet.rpc.plugins.module_utils._extra_args import REFUSED

LAUNCH = Path(__file__).parents[4] / "roles" / "llama_primary" / "files" / "launch.py"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-ts", "1,1"], "the plan decides it"),
        (["--rpc=10.0.0.2:5"], "the plan decides it"),
        (["-ts 1,1"], "the plan decides it"),
        (["--tensor_split", "1,1"], "--tensor-split is refused: the plan decides it"),
        (["--fit", "on"], "the plan decides it"),
        (["--cpu-moe"], "costs a round trip"),
        (["--n-cpu-moe", 3], "costs a round trip"),
        (["--n_cpu_ffn", 3], "costs a round trip"),
        (["-ot", "x=CPU"], "costs a round trip"),
        (["-sm", "row"], "refused by RPC devices"),
        (["-sm", "tensor"], "slower over RPC"),
        (["-md", "/m.gguf"], "use llama_primary_draft_model"),
        (["--metrics", "--spec-type", "draft-mtp"], "use llama_primary_draft_mtp"),
        (["--spec-type", "ngram-mod,draft-simple"], "use llama_primary_draft_model"),
        (["--mmproj", "/p.gguf"], "use llama_primary_mmproj"),
        (["--lora", "/a.gguf"], "merge it into the model"),
        (["--control-vector-scaled", "/a.gguf:1"], "merge it into the model"),
        (["--override-kv", "llama.context_length=int:1"], "header as it is"),
        (["LLAMA_ARG_TENSOR_SPLIT=1,1"], "variable of the environment"),
        (["--fim-qwen-3b-default"], "never download at start"),
        (["--sleep-idle-seconds", 60], "leaves its workers"),
        (["--models-dir", "/srv"], "give each model a cluster"),
        (["--version"], "and end"),
        (["--ssl-cert-file", "/c"], "reverse proxy"),
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
    welcome = ["--spec-type", "ngram-mod,ngram-cache", "--override-kv", "tokenizer.ggml.add_bos_token=bool:false"]
    assert extra_args(welcome) == welcome


def test_the_environment_of_a_session_does_not_reach_the_server() -> None:
    """Cases B1-16: LLAMA_ARG_OVERRIDE_TENSOR in a shell's profile would hold wherever the arguments say nothing."""
    inherited = {"PATH": "/bin", "LLAMA_ARG_CPU_MOE": "1", "LLAMA_ARG_RPC": "x:1", "GGML_NO_BACKTRACE": "1"}
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    ran = subprocess.run(
        [sys.executable, LAUNCH, "", sys.executable, "-c", show], check=True, capture_output=True, env=inherited
    )
    seen = json.loads(ran.stdout)
    assert {name for name in seen if name.startswith(("LLAMA", "GGML", "PATH"))} == {"PATH", "GGML_NO_BACKTRACE"}


@pytest.mark.real
def test_every_refused_option_exists(llama_bin: Path) -> None:
    """A name that llama-server does not know would guard nothing."""
    text = subprocess.run([llama_bin / "llama-server", "--help"], check=True, capture_output=True, text=True).stdout
    known = set(re.findall(r"(?<![\w-])-{1,2}[a-z][\w-]*", text))
    assert set(REFUSED) <= known
    assert {"--override-kv", "--spec-type"} <= known
