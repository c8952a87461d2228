# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The script for machines with a card, as far as a machine without one can run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "gpu" / "check"
SMI = Path(__file__).parent / "recordings" / "nvidia_smi"


def check(tmp_path: Path, *arguments: str, **environment: str) -> tuple[int, dict[str, Any]]:
    output = tmp_path / "gpu.json"
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "ANSIBLE_COLLECTIONS_PATH")}
    done = subprocess.run(
        [str(SCRIPT), "--output", str(output), *arguments],
        capture_output=True,
        text=True,
        env={**clean, "PYTHON": sys.executable, **environment},
        timeout=400,
        check=False,
    )
    return done.returncode, json.loads(output.read_text()) if output.exists() else {"error": done.stderr}


@pytest.mark.real
def test_a_dry_run_goes_through_every_step(tmp_path: Path, llama_bin: Path, demo_model: Path) -> None:
    status, report = check(tmp_path, "--dry-run-cpu", "--model", str(demo_model), LLAMAFLEET_TEST_BIN=str(llama_bin))
    assert status == 0, report["traceback"]
    assert report["ok"] and report["dry_run"] and all(step["ok"] for step in report["steps"].values())
    lent = report["steps"]["lent_card_and_cpu"]["result"]
    assert lent["plan"]["device_order"] == ["RPC0", "RPC1"] and "Paris" in lent["answer"]["text"]
    assert {probe["status"] for part in ("idle", "after") for probe in lent[part].values()} == {"ok"}
    rows = [row for row in lent["promised_and_measured"] if row["device"] != "host"]
    assert [row["equal_to_printed_digit"] for row in rows] == [True, True] and lent["problems"] == []
    own = report["steps"]["own_card_and_lent_cpu"]["result"]
    assert own["plan"]["devices"][0]["endpoint"] is None and own["answer"]["text"]


def test_what_fails_is_in_the_report(tmp_path: Path) -> None:
    """Here: a machine without an NVIDIA card, or sources that are none."""
    (tmp_path / "model").write_bytes(b"no model")
    (tmp_path / "source").write_bytes(b"no archive")
    status, report = check(
        tmp_path, "--source", str(tmp_path / "source"), "--model", str(tmp_path / "model"), "--deadline", "60"
    )
    assert status == 1 and not report["ok"] and report["error"]
    assert report["steps"]["machine"]["ok"] and "cpus" in report["steps"]["machine"]["result"]
    assert not all(step["ok"] for step in report["steps"].values())


@pytest.mark.real
def test_up_to_the_card_with_a_toolkit_that_is_none(tmp_path: Path, llama_bin: Path, demo_model: Path) -> None:
    """nvidia-smi, nvcc and cmake are stand-ins, the programs are those of the CPU: so the worker finds no CUDA0."""
    (tmp_path / "llama" / "ggml" / "src" / "ggml-rpc").mkdir(parents=True)
    with tarfile.open(tmp_path / "source.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "llama", "llama.cpp-x")
    smi = f'f=core_4090_570; case "$1" in *compute_cap*) f=compute_cap_4090_570;; esac; cat {SMI}/$f.csv'
    make = f'[ "$1" != -S ] || mkdir "$4"; [ "$1" != --build ] || ln -s {llama_bin} "$2"/bin'
    tools = {"nvidia-smi": smi, "nvcc": f"cat {SMI}/nvcc_12.4.txt", "cmake": f'echo "$@" >> {tmp_path}/asked; {make}'}
    for name, script in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    status, report = check(
        tmp_path,
        *("--source", str(tmp_path / "source.tar.gz"), "--model", str(demo_model)),
        PATH=f"{tmp_path}:{os.environ['PATH']}",
    )
    assert status == 1 and report["steps"]["build"]["ok"], report["error"]
    configure, build = (tmp_path / "asked").read_text().splitlines()[-2:]
    assert "-DGGML_CUDA=ON" in configure and f"-DCMAKE_CUDA_COMPILER={tmp_path}/nvcc" in configure
    assert "/source/llama.cpp-x -B " in configure and build.endswith("--target ggml-rpc-server llama-server")
    assert "unknown device: CUDA0" in report["error"]
