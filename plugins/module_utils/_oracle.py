# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan against llama.cpp's own estimate (llama-fit-params of the same build), before a weight is moved.

The program loads the model without memory for it, over the real workers, and prints whole MiB (rounded down) of model,
context and compute for each device. It speaks to the workers like a primary, so it runs only while they are idle. What
it says differs from what llama-server takes in ways that are known (measured on b11434, 29 architectures):

* compute: an upper bound. Later devices of a pipeline by 4 copies of an activation, the output device by the logits of
  a whole micro batch; these are allowed for and make no warning.
* context: it has no unified cache. Where that changes sizes (several slots and a sliding window, or a context that the
  slots do not divide), contexts are not compared.
* companions (draft model, MTP layers, projector) are none of its business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamafleet.rpc.plugins.module_utils import _memory
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._model import Model
from ansible_collections.llamafleet.rpc.plugins.module_utils._records import is_primary_cpu
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Runner

_MIB = 1 << 20
_LINE = re.compile(r"([A-Za-z][A-Za-z0-9]*) (\d+) (\d+) (\d+)\s*")
_CELLS = 256


class OracleError(FleetError):
    """llama-fit-params could not be asked; the message has its last words."""


class Figures(NamedTuple):
    """Whole MiB that llama-fit-params printed for one device."""

    weights: int
    kv: int
    compute: int


def ask(runner: Runner, argv: Sequence[str], timeout: float) -> dict[str, Figures]:
    """What llama-fit-params says, by its device names (``RPC0``, ``CUDA0``, ``Host``). ``timeout`` in seconds."""
    result = runner.run(list(argv), timeout)
    found = parse(result.stdout)
    if result.rc != 0 or "Host" not in found:
        said = [line.strip() for line in (result.stderr or result.stdout).splitlines() if line.strip()]
        words = " / ".join(said[-3:])[:400] or "-"
        raise OracleError(f"{argv[0]} ended with status {result.rc} and no estimate; its last words: {words}")
    return found


def parse(text: str) -> dict[str, Figures]:
    """The lines ``RPC0 33 48 43``; anything else is passed over."""
    found = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match:
            found[match.group(1)] = Figures(*(int(match.group(number)) for number in (2, 3, 4)))
    return found


def compare(
    plan: Mapping[str, Any], model: Model, said: Mapping[str, Figures]
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """(rows, problems): the plan's promise and what llama-fit-params said, for each device and the primary ("host").

    A row: {device, host, endpoint, and for weights, kv and compute <kind>_promised and <kind>_said}, in bytes; what is
    said is rounded down to MiB, None where it says nothing. A problem is {severity: warning, code, text}, of a figure
    that is worse than was promised.
    """
    params = _memory.ContextParams(n_ctx=plan["n_ctx"], **plan["params"])
    listed = [entry for entry in plan["devices"] if not is_primary_cpu(entry["endpoint"], entry["device"])]
    pipelined = len(listed) > 1 and len(listed) == len(plan["devices"])
    rows, problems = [], []
    same_context = _same_context(model, params)
    for number, entry in enumerate(listed):
        allowed = _memory.COPIES * _activation(model, params) if pipelined and number else 0
        allowed += 4 * model.n_vocab * params.micro_batch if entry["output"] else 0
        promised = {kind: entry[kind] for kind in ("weights", "kv", "compute")}
        row = _row(entry["rpc_name"], promised, said.get(entry["rpc_name"]))
        rows.append({**row, "host": entry["host"], "endpoint": entry["endpoint"]})
        problems += _problems(row, allowed, same_context)
    host = plan["primary_host"]
    row = _row("Host", {kind: host[kind] for kind in ("weights", "kv", "compute")}, said.get("Host"))
    rows.append({**row, "host": None, "endpoint": None})
    problems += _problems(row, 4 * model.n_vocab * params.micro_batch, same_context)
    return rows, problems


def _activation(model: Model, params: _memory.ContextParams) -> int:
    return params.micro_batch * (model.stream or model.n_embd) * 4


def _same_context(model: Model, params: _memory.ContextParams) -> bool:
    """Whether a cache for each slot, which is all that llama-fit-params has, is as large as the planned one."""
    if params.n_parallel == 1 or not params.kv_unified:
        return True
    plain = all(c.window is None and c.ratio == 1 for layer in model.layers for c in layer.caches)
    return plain and params.padded_ctx % (_CELLS * params.n_parallel) == 0


def _row(name: str, promised: Mapping[str, int], said: Figures | None) -> dict[str, Any]:
    row: dict[str, Any] = {"device": name}
    for kind in ("weights", "kv", "compute"):
        row[f"{kind}_promised"] = promised[kind]
        row[f"{kind}_said"] = None if said is None else getattr(said, kind) * _MIB
    return row


def _problems(row: Mapping[str, Any], compute_allowed: int, same_context: bool) -> list[dict[str, str]]:
    if row["weights_said"] is None:
        text = f"llama-fit-params says nothing of {row['device']}: it does not see that device"
        return [{"severity": "warning", "code": "oracle_silent", "text": text}]
    problems = []
    for kind, allowed in (("weights", 0), ("kv", 0), ("compute", compute_allowed)):
        promised, said = row[f"{kind}_promised"], row[f"{kind}_said"]
        if said > promised + allowed and (kind != "kv" or same_context):
            text = (
                f"{row['device']}: llama.cpp expects at least {said // _MIB} MiB for {kind}, the plan promised "
                f"{promised / _MIB:.1f} MiB"
                + (f" (and up to {allowed / _MIB:.1f} are known excess)" if allowed else "")
            )
            problems.append({"severity": "warning", "code": f"oracle_{kind}", "text": text})
    return problems


def oracle_lines(rows: Sequence[Mapping[str, Any]], problems: Sequence[Mapping[str, Any]]) -> list[str]:
    """Promised against said, in MiB, for people."""
    lines = ["promised, and said by llama-fit-params of the same build, MiB"]
    for row in rows:
        sizes = ", ".join(
            f"{kind} {row[f'{kind}_promised'] / _MIB:.1f} / "
            + ("-" if row[f"{kind}_said"] is None else str(row[f"{kind}_said"] // _MIB))
            for kind in ("weights", "kv", "compute")
        )
        lines.append(f"{row['device']}: {sizes}")
    return lines + [f"{problem['severity']}: {problem['text']}" for problem in problems]
