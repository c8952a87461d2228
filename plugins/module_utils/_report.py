# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What people read: the plan, and promised against measured, as lines of text. Sizes are MiB here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._companions import companion_lines

MIB = 1 << 20


def mib(size: int | None) -> str:
    """Bytes as MiB with two digits, the way llama-server prints them; - where unknown."""
    return "-" if size is None else f"{size / MIB:.2f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns under their heads: the first to the left, the others, which are numbers, to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _where(device: Mapping[str, Any]) -> str:
    name = f"{device['host']} {device['device']}"
    return f"{name} ({device['rpc_name']}, {device['endpoint']})" if device.get("endpoint") else name


def _layers(device: Mapping[str, Any]) -> str:
    first, last = device.get("first_layer"), device.get("last_layer")
    span = "" if first is None else f"{first}-{last}"
    return " + ".join(part for part in (span, "output" if device.get("output") else "") if part) or "none"


def _rate(predicted: Mapping[str, Any]) -> list[str]:
    if not predicted.get("tokens_per_s"):
        return []
    trips = predicted["round_trips"]
    return [
        f"predicted {predicted['tokens_per_s']:.1f} tokens/s ({predicted['ms_per_token']:.1f} ms per token, "
        f"no plan below {predicted['lower_bound_ms']:.1f}), {trips} round trip{'' if trips == 1 else 's'} "
        f"and {predicted['wire_bytes_per_token']} bytes on the wire per token"
    ]


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """The plan as text: who holds which layers and what that takes, why others hold none, warnings."""
    if not plan["feasible"]:
        return ["no plan: " + str(plan["reason"])]
    head = ("device", "layers", "units", "weights", "KV", "compute", "total", "usable", "headroom")
    rows = [
        (
            _where(device),
            _layers(device),
            str(device["units"]),
            *(mib(device.get(key)) for key in ("weights", "kv", "compute", "total", "usable", "headroom")),
        )
        for device in plan["devices"]
    ]
    own = plan.get("primary_host") or {}
    if own:
        sizes = [own.get(key) for key in ("weights", "kv", "compute", "total", "usable")]
        usable, total = own.get("usable"), own.get("total")
        beside = own.get("companions", 0)
        headroom = usable - total - beside if isinstance(usable, int) and isinstance(total, int) else None
        rows.append(("primary's own memory", "", "", *(mib(size) for size in sizes), mib(headroom)))
    lines = [f"objective {plan['objective']}, context {plan['n_ctx']} tokens, sizes in MiB"]
    lines += table(head, rows)
    lines += companion_lines(plan)
    lines += _rate(plan.get("predicted") or {})
    lines += _certificate(plan.get("certificate"))
    lines.append(_options(plan))
    lines += [f"left out: {_dropped(entry)}: {entry['why']}" for entry in plan.get("dropped") or []]
    lines += _alternatives(plan)
    lines += [f"warning: {entry['text']}" for entry in plan.get("warnings") or []]
    return lines


def _options(plan: Mapping[str, Any]) -> str:
    """What llama-server is told of the split. Without a device all is on the primary's CPU, without any option."""
    if not plan["device_order"]:
        return "no worker is used, nor a GPU: all layers are on the primary's CPU"
    devices = f"-dev {','.join(plan['device_order'])}  --tensor-split {plan['tensor_split']}"
    return f"--rpc {plan['rpc']}  {devices}" if plan["rpc"] else f"no worker is used: {devices}"


def _certificate(certificate: Mapping[str, Any] | None) -> list[str]:
    if not certificate:
        return []
    if certificate["proved"]:
        return ["proved: no plan of these devices is better in this cost model"]
    return [f"not proved to be the best plan; none is better by more than {certificate['gap']:.1%}"]


def _alternatives(plan: Mapping[str, Any]) -> list[str]:
    """What each device is good for, the second-best choice of devices, and what the loss of a worker would leave."""
    lines = [f"{_dropped(entry)} {entry['text']}" for entry in plan.get("devices_compared") or []]
    other = plan.get("second_best")
    if other:
        held = ", ".join(f"{entry['units']} on {_dropped(entry)}" for entry in other["units"])
        lines.append(f"second-best choice: {other['ms_per_token']:.1f} ms per token ({held})")
    for loss in plan.get("without") or []:
        if loss["feasible"]:
            lines.append(
                f"without the workers of {loss['host']}: {loss['ms_per_token']:.1f} ms per token, "
                f"{loss['units_moved']} units move, {mib(loss['bytes_moved'])} MiB"
            )
        else:
            lines.append(f"without the workers of {loss['host']}: the model does not fit")
    return lines


def _dropped(entry: Mapping[str, Any]) -> str:
    return f"{entry['device']} of {entry.get('endpoint') or 'the primary'}"


def proof_lines(proof: Mapping[str, Any], url: str) -> list[str]:
    """Promised against measured for each device, the answer, and how to ask for more.

    ``proof`` is the result of primary_proof: ``table`` rows with weights, kv and compute promised and measured.
    """
    head = ("device", "layers", "weights", "measured", "KV", "measured", "compute", "measured", "headroom")
    rows = [
        (
            str(row["device"]) + (f" ({row['endpoint']})" if row.get("endpoint") else ""),
            str(row.get("layers") or ""),
            *(
                mib(row.get(f"{kind}_{side}"))
                for kind in ("weights", "kv", "compute")
                for side in ("promised", "measured")
            ),
            mib(row.get("headroom")),
        )
        for row in proof.get("table") or []
    ]
    lines = ["promised and measured, MiB", *table(head, rows)]
    for problem in proof.get("problems") or []:
        lines.append(f"{problem['severity']}: {problem['text']}")
    answer = proof.get("proof") or {}
    if answer.get("text") is not None:
        lines.append(f"answer: {answer.get('prompt', '')}{answer['text']}")
    if answer.get("tokens_per_s"):
        lines.append(f"measured {answer['tokens_per_s']:.1f} tokens/s")
    lines.append(f"API: {url}/v1")
    lines.append(
        f"try: curl {url}/v1/chat/completions -H 'Content-Type: application/json' "
        """-d '{"messages": [{"role": "user", "content": "Hello"}]}'"""
    )
    return lines


def worker_lines(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """What rpc_info found out about each worker: state, client, protocol, devices, and what to do if it is not well."""
    lines = []
    for result in results:
        parts = [f"{result['endpoint']} {result['status']}"]
        if result.get("client"):
            parts.append(f"serves {result['client']}")
        if result.get("protocol"):
            parts.append(f"protocol {result['protocol']}")
        parts += [
            f"device {device['index']}: {mib(device['free'])} of {mib(device['total'])} MiB free, as it claims"
            for device in result.get("devices") or []
        ]
        if result.get("hint"):
            parts.append(str(result["hint"]))
        lines.append(", ".join(parts))
    return lines
