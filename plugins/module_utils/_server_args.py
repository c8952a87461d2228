# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A plan as arguments of llama-server, llama-bench and llama-fit-params.

What a plan does not decide (address, port, keys, logging) is not in here, and neither is a secret. ``--rpc`` stands
before ``-dev``: llama.cpp acts on its options in order (measured on b11434).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils import _builds
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._memory import CACHE_TYPES
from ansible_collections.llamafleet.rpc.plugins.module_utils._records import (
    RecordError,
    check_device_name,
    check_whole,
    parse_endpoint,
)

TOOLS = ("llama-server", "llama-bench", "llama-fit-params")
OLDEST = 10151  # first sampled build that takes every argument used here (--load-mode marks it in _builds)
_MIB = 1 << 20
_MAX_VALUES = 15  # --tensor-split takes 15 values, the scheduler 15 devices beside the CPU
# Tensor names are searched for the pattern before the =; without the ^, attn_output.weight of every layer would match.
_OVERRIDES = ("^output.weight=CPU", "^token_embd.weight=CPU")
_DEFAULTS: dict[str, Any] = {
    "n_parallel": 1,
    "type_k": "f16",
    "type_v": "f16",
    "n_batch": 2048,
    "n_ubatch": 512,
    "flash_attn": "auto",
    "kv_unified": True,
    "swa_full": False,
}


class ServerArgsError(FleetError):
    """A plan, model, build or tool that no arguments can be made of; the message names the value and the remedy."""


def rpc_servers(plan: object) -> str:
    """The ``--rpc`` string of a feasible plan: endpoints of used devices, each once, no blanks; "" if all is local."""
    text = _feasible(plan).get("rpc")
    if not isinstance(text, str):
        raise ServerArgsError(f"plan.rpc is {text!r}; it must be text, as plan_split makes it")
    if text:
        endpoints = [parse_endpoint(part, "plan.rpc") for part in text.split(",")]
        for endpoint in endpoints:
            if endpoints.count(endpoint) > 1:
                raise ServerArgsError(f"plan.rpc names {endpoint} twice, which llama.cpp merges; list it once")
    return str(text)


def tensor_split(plan: object, consumer: object = "llama-server") -> str:
    """Units per device of ``-dev``, for ``consumer``: ``20,11``, or ``20/11`` for llama-bench. "" without devices."""
    separator = "/" if _tool(consumer) == "llama-bench" else ","
    return separator.join(str(count) for count in _counts(_feasible(plan)))


def server_args(
    plan: object, model: object, build: object = _builds.DEFAULT_BUILD, tool: object = "llama-server"
) -> list[str]:
    """Arguments (without the program) that make ``tool`` of ``build`` run ``model`` as ``plan`` says.

    ``model``: what gguf_info returned, or the path of the file. Raises ServerArgsError, RecordError or BuildError.
    """
    values, name, path = _feasible(plan), _tool(tool), _path(model)
    params = _params(values)
    counts, devices = _counts(values), _devices(values)
    offloaded = check_whole(values.get("n_gpu_layers"), "plan.n_gpu_layers")
    if sum(counts) != offloaded or len(counts) != len(devices):
        raise ServerArgsError(
            f"plan.tensor_split {values.get('tensor_split')!r} has {len(counts)} numbers with the sum {sum(counts)}, "
            f"but there are {len(devices)} devices in device_order and n_gpu_layers is {offloaded}; plan again"
        )
    bench = name == "llama-bench"
    servers = rpc_servers(plan)
    args = ["-m", path]
    if servers:
        args += ["--rpc", servers]
    # "none": else llama.cpp would list, and keep contexts on, local GPUs that hold nothing.
    args += ["-dev", ("/" if bench else ",").join(devices) or "none", "-ngl", str(offloaded), "-sm", "layer"]
    if counts:
        args += ["-ts", tensor_split(plan, name)]
    args += _override(values)
    if not bench:
        args += ["-fit", "off", "-c", str(check_whole(values.get("n_ctx"), "plan.n_ctx", least=1))]
        args += ["-np", str(params["n_parallel"])]
    if name == "llama-server":
        args += ["--kv-unified" if params["kv_unified"] else "--no-kv-unified"]
    args += ["-b", str(params["n_batch"]), "-ub", str(params["n_ubatch"])]
    args += ["-ctk", params["type_k"], "-ctv", params["type_v"], "-fa", params["flash_attn"]]
    if params["swa_full"] and not bench:
        args += ["--swa-full"]
    if name == "llama-server":
        args += _cache_ram(values) + _companions(values, params)
    if name == "llama-fit-params":
        args += ["-fitp", "on"]
    _check_build(build, name, args)
    return args


def _feasible(plan: object) -> Mapping[str, Any]:
    if not isinstance(plan, Mapping) or "feasible" not in plan:
        raise ServerArgsError(f"the plan is {_short(plan)}; it must be what plan_split returned")
    if plan["feasible"] is not True:
        raise ServerArgsError(f"the plan is not feasible: {plan.get('reason') or 'no reason given'}")
    return plan


def _tool(tool: object) -> str:
    if tool not in TOOLS:
        raise ServerArgsError(f"{tool!r} is no program that runs a plan; it must be one of {', '.join(TOOLS)}")
    return str(tool)


def _counts(plan: Mapping[str, Any]) -> list[int]:
    text = plan.get("tensor_split")
    if not isinstance(text, str):
        raise ServerArgsError(f"plan.tensor_split is {text!r}; it must be text such as 20,11")
    parts = text.split(",") if text else []
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ServerArgsError(
            f"plan.tensor_split is {text!r}; it must be whole numbers above 0 with commas, one for each device"
        )
    if len(parts) > _MAX_VALUES:
        raise ServerArgsError(f"plan.tensor_split has {len(parts)} numbers; llama.cpp takes at most {_MAX_VALUES}")
    return [int(part) for part in parts]


def _devices(plan: Mapping[str, Any]) -> list[str]:
    names = plan.get("device_order")
    if not isinstance(names, Sequence) or isinstance(names, (str, bytes)):
        raise ServerArgsError(f"plan.device_order is {_short(names)}; it must be a list of device names")
    return [check_device_name(name, "plan.device_order") for name in names]


def _params(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The context parameters of a plan; what it does not say is plan_split's default."""
    given = plan.get("params", {})
    if not isinstance(given, Mapping):
        raise ServerArgsError(f"plan.params is {_short(given)}; it must be a mapping")
    params = {**_DEFAULTS, **given}
    for key in ("n_parallel", "n_batch", "n_ubatch"):
        params[key] = check_whole(params[key], f"plan.params.{key}", least=1)
    for key in ("kv_unified", "swa_full"):
        if not isinstance(params[key], bool):
            raise ServerArgsError(f"plan.params.{key} is {params[key]!r}; it must be true or false")
    for key, allowed in (("type_k", CACHE_TYPES), ("type_v", CACHE_TYPES), ("flash_attn", ("auto", "on", "off"))):
        if not isinstance(params[key], str) or params[key] not in allowed:
            raise ServerArgsError(f"plan.params.{key} is {params[key]!r}; it must be one of {', '.join(allowed)}")
        params[key] = str(params[key])
    return params


def _cache_ram(plan: Mapping[str, Any]) -> list[str]:
    host = plan.get("primary_host")
    size = host.get("cache_ram") if isinstance(host, Mapping) else None
    if size is None:
        return []
    checked = check_whole(size, "plan.primary_host.cache_ram")
    return ["--cache-ram", str((checked or 0) // _MIB)]


def _companions(plan: Mapping[str, Any], params: Mapping[str, Any]) -> list[str]:
    """What runs beside the model, each on the device that was planned (see _companions.py)."""
    args: list[str] = []
    companions = plan.get("companions") or []
    if not isinstance(companions, Sequence) or not all(isinstance(item, Mapping) for item in companions):
        raise ServerArgsError(f"plan.companions is {_short(companions)}; it must be a list of mappings; plan again")
    for item in companions:
        device = check_device_name(item.get("device"), "plan.companions")
        place = "none" if device == "CPU" else device
        if item.get("what") == "projector":
            args += ["--mmproj", _path(item), "-mmdev", place]
            continue
        draft = item.get("what") == "draft model"
        args += ["--spec-type", "draft-simple" if draft else "draft-mtp"]
        args += ["--spec-draft-n-max", str(check_whole(plan.get("drafted"), "plan.drafted", least=1))]
        args += ["-ctkd", params["type_k"], "-ctvd", params["type_v"]]
        if draft:
            args += ["-md", _path(item), "-devd", place, "-ngld", "0" if place == "none" else "all"]
    return args


def _override(plan: Mapping[str, Any]) -> list[str]:
    """The override that keeps the output matrix on the primary's CPU, if the plan has it there."""
    kept = plan.get("output_on_primary")
    if kept is None:
        return []
    text = kept.get("override") if isinstance(kept, Mapping) else kept
    if text not in _OVERRIDES:
        raise ServerArgsError(f"plan.output_on_primary has {_short(text)}; it must be one of {', '.join(_OVERRIDES)}")
    return ["-ot", str(text)]


def _path(model: object) -> str:
    path = model.get("path") if isinstance(model, Mapping) else model
    remedy = "give what gguf_info returned for the file on the primary, or its path"
    if not isinstance(path, str) or not path:
        raise ServerArgsError(f"the model's path is {path!r}; {remedy}")
    if any(ord(char) < 32 or ord(char) == 127 for char in path):
        raise ServerArgsError(f"the model's path {path!r} contains a control character; rename the file")
    if path.startswith("-") or "://" in path:
        raise ServerArgsError(f"the model's path {path!r} is not the path of a file; {remedy}")
    return str(path)


def _check_build(build: object, tool: str, args: Sequence[str]) -> None:
    """Every option must be known at the build, else the program would stop with its help text."""
    if not isinstance(build, str):
        raise ServerArgsError(f"build is {build!r}; it must be a tag such as {_builds.DEFAULT_BUILD}")
    item = _builds.parse_build(build)
    supported = f"b{OLDEST} to b{_builds.NEWEST} are supported"
    if item.number < OLDEST:
        raise ServerArgsError(f"build {build} does not take the arguments of a plan; {supported}")
    known = _builds.accepted_flags(item, tool)
    used = [arg for arg in args if arg.startswith("-") and not arg[1:].isdigit()]
    unknown = [flag for flag in used if flag not in known and flag not in _ALSO.get(tool, ())]
    if unknown:
        raise ServerArgsError(f"{tool} of build {build} does not take {', '.join(unknown)}; {supported}")


# Read from the help text of b11434; not in the table of _builds, which lists what the roles pass.
_ALSO = {"llama-fit-params": ("-fitp",)}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


__all__ = ["RecordError", "ServerArgsError", "rpc_servers", "server_args", "tensor_split"]
