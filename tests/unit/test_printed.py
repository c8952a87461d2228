# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What people copy from the terminal stands there as it is to be pasted: in one line, and no quote doubled."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "roles" / "llama_primary" / "tasks"
URL = "http://127.0.0.1:8080"


def lines(tmp_path: Path, *arguments: str) -> list[str]:
    """What a run prints on a terminal of 80 columns, without the indent."""
    ran = subprocess.run(
        [sys.executable, "-m", "ansible", "playbook", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80", "ANSIBLE_HOME": str(tmp_path / "ansible")},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return [line.strip() for line in ran.stdout.splitlines()]


def shows(filter_name: str) -> list[dict[str, Any]]:
    """The tasks of the role that print what this filter makes."""
    tasks = [task for path in (TASKS / "start.yml", TASKS / "status.yml") for task in yaml.safe_load(path.read_text())]
    return [task for task in tasks if filter_name in str(task.get("ansible.builtin.debug"))]


@pytest.mark.parametrize("verbose", [(), ("-v",)], ids=["usual", "verbose"])
def test_the_curl_line_can_be_pasted(tmp_path: Path, verbose: tuple[str, ...]) -> None:
    """Also after an answer that would make YAML quote the whole: a tab, and spaces before line breaks."""
    proof = {
        "table": [],
        "proof": {"prompt": "The capital is", "text": " Paris. \n\tThe river  \nis", "tokens_per_s": 4.0},
    }
    asked = {"llama_primary__proof": proof, "llama_primary__url": URL}
    tasks = shows("proof_report")
    play = {"hosts": "localhost", "gather_facts": False, "vars": asked, "tasks": tasks}
    assert len(tasks) == 2  # at the end of site.yml, and in status.yml
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    printed = lines(tmp_path, "-i", "localhost,", *verbose, str(tmp_path / "play.yml"))
    pasted = [shlex.split(line.partition("try: ")[2]) for line in printed if line.startswith("try: ")]
    body = '{"messages": [{"role": "user", "content": "Hello"}]}'
    wanted = ["curl", f"{URL}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body]
    assert pasted == [wanted, wanted]
    assert "answer: The capital is Paris." in printed


def test_the_options_of_a_plan_stand_in_one_line(tmp_path: Path) -> None:
    """The homelab's plan, as README.md invites to run it: nothing is wrapped, and numbers stay beside what they are."""
    printed = lines(tmp_path, "-i", "inventories/homelab", "playbooks/plan.yml")
    (options,) = [line for line in printed if line.startswith("--rpc ")]
    assert " -dev " in options and " --tensor-split " in options
    assert any(line.startswith("predicted ") and line.endswith(" bytes on the wire per token") for line in printed)
    assert any(line.startswith("largest context that fits: ") for line in printed)
