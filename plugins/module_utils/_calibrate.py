# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How fast a device and the way to it really are: llama-bench over two stand-ins of a model, few layers and many.

Both lie on the device as a whole, so what the second takes longer is layers, and what is left of the first is all that
a token costs besides them: launching, the hops of the RPC protocol, the round trip. The same difference of the whole
runs, which differ by the loading of those layers, is what the link carries. Numbers that moved less than a tenth since
the last time are kept: jitter moves no layers.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Runner
from ansible_collections.llamafleet.rpc.plugins.module_utils._twin import Shape

TOKENS = 32
REPETITIONS = 5
_MIB = 1 << 20
#: Of what a device lends, so much is filled at most; the rest is for its compute buffers.
_SHARE = 3
_MOST_BYTES = 512 * _MIB
_MOST_LAYERS = 48
_LEAST_DIFFERENCE = 16 * _MIB  # loading less than this says nothing of a link
_STABLE = 0.1
#: Bytes of a token of a stand-in on the wire, both ways, besides 8 for each element of its width (b11434: eight tensors
#: of 314 bytes and more are sent, a mask, and the logits of 512 tokens come back).
_WIRE = 6000
KEYS = ("bandwidth", "overhead_ms", "rtt_ms", "link_mbps")


class CalibrationError(FleetError):
    """A device could not be measured; the message names it and has llama-bench's last words."""


@dataclass(frozen=True)
class Target:
    """One device as llama-bench is told of it: ``name`` is RPC0, CUDA0 or empty for the primary's CPU."""

    name: str
    endpoint: str | None


def layer_counts(shape: Shape, usable: int) -> tuple[int, int]:
    """(few, many) layers for a device that lends ``usable`` bytes."""
    most = min(_MOST_LAYERS, min(_MOST_BYTES, usable // _SHARE) // shape.layer_bytes)
    if most < 2:
        raise CalibrationError(
            f"two layers of the model ({2 * shape.layer_bytes / _MIB:.0f} MiB) are more than a third of the "
            f"{usable / _MIB:.0f} MiB that it lends: nothing to measure with"
        )
    return max(1, most // 4), most


def bench_argv(program: str, model: str, target: Target, extra: Sequence[str] = ()) -> list[str]:
    """The command line for one stand-in on one device, whole."""
    argv = [program, "-m", model, "-p", "0", "-n", str(TOKENS), "-r", str(REPETITIONS), "-o", "json", *extra]
    if not target.name:
        return [*argv, "-ngl", "0", "-dev", "none"]
    rpc = ["--rpc", target.endpoint] if target.endpoint else []
    return [*argv, "-ngl", "99", *rpc, "-dev", target.name]


def threads(arguments: Sequence[object]) -> list[str]:
    """``-t N`` out of what llama-server gets, so that the primary's CPU is measured as it will compute."""
    words = [str(word) for word in arguments]
    found = [words[at + 1 : at + 2] for at, word in enumerate(words) if word in ("-t", "--threads")]
    return ["-t", *found[-1]] if found and found[-1] else []


def parse_bench(text: str) -> float:
    """Milliseconds for a token, the median of the repetitions, of the JSON that llama-bench prints."""
    try:
        rows = [row for row in json.loads(text) if row["n_gen"]]
        samples = [sample / row["n_gen"] / 1e6 for row in rows for sample in row["samples_ns"]]
        return float(statistics.median(samples))
    except (ValueError, KeyError, TypeError, statistics.StatisticsError) as error:
        raise CalibrationError(f"llama-bench printed no figures: {text[:200]!r}") from error


def measure(
    runner: Runner,
    program: str,
    target: Target,
    shape: Shape,
    stand_ins: Mapping[int, tuple[str, int]],
    rtt: float | None,
    timeout: float,
    extra: Sequence[str] = (),
) -> dict[str, float | None]:
    """``{bandwidth (bytes/s), overhead_ms, rtt_ms, link_mbps}`` of a device; what cannot be told is None.

    ``stand_ins``: number of layers -> (file, its bytes), two of them. ``rtt``: round trip in ms. ``timeout``: seconds
    for each run. ``extra``: more arguments for llama-bench.
    """
    figures = []
    for layers, (path, size) in sorted(stand_ins.items()):
        started = time.monotonic()
        result = runner.run(bench_argv(program, path, target, extra), timeout)
        if result.rc != 0:
            words = " / ".join(line.strip() for line in result.stderr.splitlines()[-3:])
            raise CalibrationError(f"llama-bench ended with status {result.rc}: {words[:400] or '-'}")
        token_ms = parse_bench(result.stdout)
        # All runs of a repetition, and the one that warms up, are not loading.
        loading = time.monotonic() - started - token_ms * (TOKENS * REPETITIONS + 1) / 1000
        figures.append((layers, size, token_ms, loading))
    (few, small, first, short), (many, large, second, long) = figures
    per_layer = (second - first) / (many - few)
    if per_layer <= 0:
        raise CalibrationError(
            f"{many} layers took {second:.3f} ms and {few} took {first:.3f} ms for a token: the host is too busy to "
            "be measured; try again"
        )
    carried = large - small
    link = None
    if target.endpoint and carried >= _LEAST_DIFFERENCE and long > short:
        link = carried * 8 / (long - short) / 1e6
    wire_ms = (8 * shape.width + _WIRE) * 8 / (link * 1000) if link else 0.0  # the plan counts these bytes itself
    return {
        "bandwidth": shape.layer_bytes / per_layer * 1000,
        "overhead_ms": max(0.0, first - few * per_layer - (rtt or 0.0) - wire_ms),
        "rtt_ms": rtt,
        "link_mbps": link,
    }


def settled(new: Mapping[str, float | None], old: Mapping[str, Any] | None) -> dict[str, float | None]:
    """What is kept: rounded to three digits, and the old number where the new one is within a tenth of it."""
    kept: dict[str, float | None] = {}
    for key in KEYS:
        value, before = new.get(key), (old or {}).get(key)
        if value is not None and before and abs(value - before) <= _STABLE * before:
            value = before
        kept[key] = None if value is None else float(f"{value:.3g}")
    return kept


def merge(measured: Sequence[Mapping[str, Any]], kept: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The list to keep: each measured device, with the old numbers where they still hold; others go.

    An element is ``{host, endpoint, index, device, bandwidth, overhead_ms, rtt_ms, link_mbps}``.
    """
    before = {identity(entry): entry for entry in kept}
    return [
        {**{key: entry.get(key) for key in IDENTITY}, **settled(entry, before.get(identity(entry)))}
        for entry in measured
    ]


def speed_lines(measured: Sequence[Mapping[str, Any]], problems: Sequence[str]) -> list[str]:
    """What was measured, for people."""
    lines = ["measured, and kept while the build stays"]
    for entry in measured:
        words = [f"{entry['bandwidth'] / 1e9:.1f} GB/s of weights, {entry['overhead_ms']:.2f} ms a token besides"]
        words += [f"round trip {entry['rtt_ms']:.2f} ms"] if entry["rtt_ms"] is not None else []
        words += [f"link {entry['link_mbps']:.0f} Mbit/s"] if entry["link_mbps"] is not None else []
        lines.append(f"{entry['host']} {entry['device']}: {', '.join(words)}")
    return [*lines, *(f"not measured: {problem}" for problem in problems)]


IDENTITY = ("host", "endpoint", "index", "device")


def identity(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells one device from another."""
    return tuple(entry.get(key) for key in IDENTITY)
