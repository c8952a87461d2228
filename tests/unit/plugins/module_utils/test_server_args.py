# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A plan as arguments: what is in them, in which order, and what the real programs say of them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan import plan_split
from ansible_collections.llamafleet.rpc.plugins.module_utils._server_args import (
    TOOLS,
    rpc_servers,
    server_args,
    tensor_split,
)
from ansible_collections.llamafleet.rpc.tests.unit.plan_world import GIB, MIB, device, model, workers


def made(**options: Any) -> dict[str, Any]:
    """A plan over two workers."""
    return plan_split(model(), workers(2, 700 * MIB), **{"n_ctx": 2048, "n_ubatch": 64, "cache_ram": 0, **options})


def local(**options: Any) -> dict[str, Any]:
    """A plan on the primary's CPU alone."""
    return plan_split(model(), [device("head", 4 * GIB, None, "CPU")], **{"n_ctx": 2048, "cache_ram": 0, **options})


def test_every_argument_of_the_server() -> None:
    split = made()["tensor_split"]
    assert server_args(made(), model()) == [
        *("-m", "/srv/m.gguf"),
        *("--rpc", "10.0.0.1:18711,10.0.0.2:18711"),
        *("-dev", "RPC0,RPC1"),
        *("-ngl", "11"),
        *("-sm", "layer"),
        *("-ts", split),
        *("-fit", "off"),
        *("-c", "2048"),
        *("-np", "1"),
        "--kv-unified",
        *("-b", "2048"),
        *("-ub", "64"),
        *("-ctk", "f16"),
        *("-ctv", "f16"),
        *("-fa", "auto"),
        *("--cache-ram", "0"),
    ]


def test_options_of_the_plan_are_passed_on() -> None:
    cache = {"type_k": "q8_0", "type_v": "q8_0", "kv_unified": False, "swa_full": True}
    args = server_args(made(n_parallel=3, flash_attn=True, cache_ram=512 * MIB, **cache), "/srv/other.gguf")
    text = " ".join(args)
    for part in (
        "-m /srv/other.gguf",
        "-np 3 --no-kv-unified",
        "-ctk q8_0 -ctv q8_0 -fa on --swa-full --cache-ram 512",
    ):
        assert part in text


@pytest.mark.parametrize("tool", TOOLS)
def test_workers_stand_before_devices(tool: str) -> None:
    """llama.cpp acts on options in order: -dev RPC0 before --rpc is an unknown device."""
    args = server_args(made(), model(), tool=tool)
    assert args.index("--rpc") < args.index("-dev")


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("plan", [made(), local()])
def test_layers_are_always_said(tool: str, plan: dict[str, Any]) -> None:
    """Case B8-08: without -ngl a primary may keep everything; and case B1-16: the mode is layer."""
    args = server_args(plan, model(), tool=tool)
    assert args[args.index("-ngl") + 1] == str(plan["n_gpu_layers"])
    assert args[args.index("-sm") + 1] == "layer"


def test_nothing_remote_and_no_device() -> None:
    """Without devices llama.cpp must be told "none", or it would take local GPUs into its list."""
    plan = local()
    assert rpc_servers(plan) == ""
    assert tensor_split(plan) == ""
    args = server_args(plan, model())
    assert "--rpc" not in args
    assert "-ts" not in args
    assert args[args.index("-dev") + 1] == "none"


def test_llama_bench_wants_slashes() -> None:
    plan = made()
    assert tensor_split(plan, "llama-bench") == plan["tensor_split"].replace(",", "/")
    args = server_args(plan, model(), tool="llama-bench")
    assert args[args.index("-dev") + 1] == "RPC0/RPC1"
    assert args[args.index("-ts") + 1] == tensor_split(plan, "llama-bench")
    assert not {"-c", "-np", "-fit", "--cache-ram", "--kv-unified"} & set(args)


def test_a_plan_with_only_the_keys_of_the_contract_gets_the_defaults() -> None:
    plan = made()
    del plan["params"]
    args = server_args(plan, model())
    assert args[args.index("-ub") + 1] == "512"


def test_no_secret_no_download_no_address() -> None:
    for tool in TOOLS:
        flags = {arg for arg in server_args(made(), model(), tool=tool) if arg.startswith("-")}
        assert not flags & {"--api-key", "--api-key-file", "-hf", "--host", "--port"}


def test_the_rpc_string_is_clean() -> None:
    """Case B8-11: no blank, no trailing comma, no scheme, a port on every part, each once."""
    text = rpc_servers(made())
    assert re.fullmatch(r"[0-9.]+:[0-9]+(,[0-9.]+:[0-9]+)*", text)


@pytest.mark.parametrize(
    "bad",
    ["10.0.0.1:1, 10.0.0.2:1", "10.0.0.1:1,", "http://10.0.0.1:1", "10.0.0.1", "a:1", "10.0.0.1:1,10.0.0.1:1", None],
)
def test_a_broken_rpc_string_is_refused(bad: Any) -> None:
    """Case B8-11, and B1-10: what llama.cpp would abort on, misread or merge."""
    for call in (rpc_servers, lambda plan: server_args(plan, model())):
        with pytest.raises(FleetError):
            call({**made(), "rpc": bad})


@pytest.mark.parametrize("call", [rpc_servers, tensor_split, lambda plan: server_args(plan, model())])
def test_an_infeasible_plan_raises_with_its_reason(call: Any) -> None:
    plan = plan_split(model(), workers(1, 100 * MIB), n_ctx=2048)
    with pytest.raises(FleetError, match="not feasible: The model needs at least"):
        call(plan)
    with pytest.raises(FleetError, match="must be what plan_split returned"):
        call("20,11")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"tensor_split": "5,5"}, "plan again"),
        ({"tensor_split": "11"}, "plan again"),
        ({"tensor_split": "5,-6"}, "whole numbers"),
        ({"tensor_split": "5.5,5.5"}, "whole numbers"),
        ({"tensor_split": "11,0"}, "whole numbers"),
        ({"tensor_split": ",".join(["1"] * 16)}, "at most 15"),
        ({"device_order": ["RPC0", "RPC1 --verbose"]}, "letters and a number"),
        ({"device_order": "RPC0,RPC1"}, "list of device names"),
        ({"n_gpu_layers": "all"}, "n_gpu_layers is 'all'"),
        ({"n_ctx": 0}, "n_ctx is 0"),
        ({"params": {"type_k": "f16 --verbose"}}, "type_k"),
        ({"params": {"type_k": ["f16"]}}, "type_k"),
        ({"companions": ["draft"]}, "plan.companions"),
        ({"params": {"flash_attn": True}}, "flash_attn"),
        ({"params": {"kv_unified": "no"}}, "kv_unified"),
        ({"params": []}, "must be a mapping"),
        ({"primary_host": {"cache_ram": -1}}, "cache_ram is -1"),
    ],
)
def test_a_tampered_plan_is_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(FleetError, match=re.escape(text)):
        server_args({**made(), **changed}, model())


@pytest.mark.parametrize("path", ["", None, 7, "a\nb.gguf", "a\0.gguf", "--verbose", "https://example.org/m.gguf"])
def test_a_path_that_is_none_is_refused(path: Any) -> None:
    for given in (path, {**model(), "path": path}):
        with pytest.raises(FleetError, match="path"):
            server_args(made(), given)


def test_a_path_with_blanks_stays_one_argument() -> None:
    assert server_args(made(), "/srv/my models/50% m.gguf")[1] == "/srv/my models/50% m.gguf"


@pytest.mark.parametrize("build", ["b10068", "b10150", "master", "11434", 11434, "b99999999", None])
def test_builds_that_are_not_supported_are_named(build: Any) -> None:
    with pytest.raises(FleetError, match="b11434"):
        server_args(made(), model(), build=build)


@pytest.mark.parametrize("build", ["b10151", "b11434"])
def test_supported_builds(build: str) -> None:
    for tool in TOOLS:
        assert server_args(made(), model(), build=build, tool=tool)


def test_an_unknown_tool_is_named() -> None:
    with pytest.raises(FleetError, match="'llama-cli' is no program"):
        server_args(made(), model(), tool="llama-cli")
    with pytest.raises(FleetError, match="'curl' is no program"):
        tensor_split(made(), "curl")


@pytest.mark.real
@pytest.mark.parametrize("tool", TOOLS)
def test_every_flag_is_in_the_help_of_the_real_program(llama_bin: Path, tool: str) -> None:
    shown = subprocess.run([llama_bin / tool, "--help"], capture_output=True, text=True, check=False, timeout=60)
    known = set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", shown.stdout + shown.stderr))
    plan = made(swa_full=True, kv_unified=False)
    for flags in (server_args(plan, model(), tool=tool), server_args(made(), model(), tool=tool)):
        assert {arg for arg in flags if arg.startswith("-")} <= known


@pytest.mark.real
def test_llama_fit_params_takes_a_local_plan(llama_bin: Path, demo_model: Path) -> None:
    """Everything on the primary's CPU: -dev none -ngl 0."""
    args = server_args(local(), str(demo_model), tool="llama-fit-params")
    ran = subprocess.run(
        [llama_bin / "llama-fit-params", *args], capture_output=True, text=True, check=False, timeout=120
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert re.search(r"^Host ", ran.stdout, re.MULTILINE)
    assert not re.search(r"^(RPC|CUDA)", ran.stdout, re.MULTILINE)
