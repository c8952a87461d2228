# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What llama-server says of itself in its log: where the memory went, what crashed, and how that compares to the plan.

The lines are those of b11434 (recorded in tests/unit/recordings/llama-server); memory is only logged at verbosity 4 and
up (`-lv 4`), the device of each layer at 5. Buffers are named by the device's index *within its endpoint*,
"RPC1[10.0.0.3:18711]", while `-dev` counts over all endpoints ("RPC2"): they are matched by endpoint and index.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MIB = 1 << 20
_HALF_DIGIT = 0.005  # the log prints two decimals of a MiB
_FINDINGS_LIMIT = 20

# A start of the server. The second form is that of builds before the log had levels.
_START = re.compile(r"llama_server: initializing|\bbuild: \d+ \(")
_BUILD = re.compile(r"\bbuild:? (\d+) \(([^)]*)\)")
_BUFFER = re.compile(r"(\S+) +(model|KV|RS|output|compute|DSV4 .+ state) buffer size = +([0-9.]+) MiB")
_REMOTE = re.compile(r"RPC(\d+)\[([^\]]+)\]")
_OFFLOADED = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")
_LAYER = re.compile(r"layer +(\d+) assigned to device (\S+?),")
_CONTEXT = "constructing llama_context"
_PROJECTOR = "reserve_compute_meta"  # a projector's compute buffer: a context of its own, that no line announces
_PROJECTOR_WEIGHTS = re.compile(r"load_hparams: model size: +([0-9.]+) MiB")
_LISTENING = re.compile(r"listening on (http\S+)")
# Buffers in the primary's own memory: plain, mapped from the file, repacked, or pinned for a GPU (CUDA_Host).
_HOST_BUFFER = re.compile(r"CPU(_.+)?|.+_Host")
_PLANNED = ("weights", "kv", "compute")
_KINDS = {"model": "weights", "KV": "kv", "RS": "kv", "compute": "compute", "output": "output"}

# What a crash says -> what it means and what to do. The texts are those of b11434.
_DIAGNOSES: tuple[tuple[str, str, str], ...] = (
    (
        "unsupported_op",
        r"op not supported|unsupported op\b",
        "a worker's backend cannot run an operation of this model (the RPC device claims to support all of them): use "
        "another backend on that worker, leave the worker out, switch backend sampling off, or take a newer build",
    ),
    (
        "connect_failed",
        r"Failed to connect to |Cannot resolve host",
        "a worker could not be reached: probe each endpoint (rpc_info) and start the primary only when all answer",
    ),
    (
        "version_mismatch",
        r"RPC server version mismatch|HELLO request size mismatch|Expected HELLO command",
        "primary and worker are of different builds: restart the workers with the pinned build, then the primary",
    ),
    (
        "handshake_failed",
        r"RPC handshake failed",
        "what answers at that endpoint is no worker of this build: see the line before",
    ),
    (
        "worker_gone",
        r"Remote RPC server crashed or returned malformed response",
        "a worker died, was stopped or ran out of memory; right at the start: it is of another build, or no worker at "
        "all. Read the worker's log, restart it, then the primary",
    ),
    (
        "out_of_memory",
        # Pinned memory and upload buffers are only tried for; the log mentions them at verbosity 5.
        r"out of memory|unable to allocate .+ buffer|[Ff]ailed to allocate (?!.*pinned|host buffer)|OutOfDeviceMemory",
        "the memory of a device was not enough: plan with a smaller context or n_ubatch, or lower what that worker "
        "lends",
    ),
    (
        "not_a_model",
        r"invalid magic",
        "the file is no GGUF model (a web page or a pointer file in its place?): fetch it again and check its sha256",
    ),
    (
        "wrong_shard",
        r"illegal split file idx",
        "the path names a later shard: pass the first one, -00001-of-0000N.gguf",
    ),
    (
        "model_truncated",
        r"data is not within the file bounds|failed to read key-value pairs|failed to read tensor",
        "the model file is incomplete: fetch it again and check its size and sha256",
    ),
    (
        "api_port_taken",
        r"couldn't bind HTTP server socket",
        "another program holds the API port: ask who (port_owner_info), or choose another port",
    ),
    (
        "too_many_devices",
        r"n_backends <= GGML_SCHED_MAX_BACKENDS",
        "more than 15 devices were listed in -dev: plan again, with fewer devices or in several clusters",
    ),
    (
        "bad_endpoint",
        r"Failed to parse endpoint",
        "an endpoint in --rpc is not IPv4:port (IPv6, blanks and a trailing comma are not understood): plan again",
    ),
    (
        "no_gpu",
        r"failed to initialize (?:CUDA|ROCm|HIP|MUSA)\b",
        "the driver of a GPU was not ready or is broken, and llama.cpp goes on without it: see nvidia-smi or rocminfo, "
        "then start the service again",
    ),
    (
        "cache_types",
        r"Unsupported KV type combination",
        "this build has no kernel for a K cache and a V cache of these types: set type_k and type_v to the same type",
    ),
    (
        "unknown_option",
        r"error: invalid argument",
        "the program does not know an option: it is of another build, or was built without RPC; build the pinned one",
    ),
    (
        "model_not_loaded",
        r"error loading model|failed to load model",
        "the model could not be loaded: see the lines before",
    ),
)
_PATTERNS = tuple((code, re.compile(pattern), advice) for code, pattern, advice in _DIAGNOSES)


@dataclass(frozen=True)
class Finding:
    """A line that explains a failure: `code` for programs, `line` as logged, `advice` what to do."""

    code: str
    line: str
    advice: str


@dataclass
class Amount:
    """Printed MiB of one kind of memory on one device, and how many lines they were summed from."""

    mib: float = 0.0
    lines: int = 0

    def add(self, mib: float) -> None:
        """Add one printed figure."""
        self.mib += mib
        self.lines += 1

    def equals(self, promised: int) -> bool:
        """Whether a promise in bytes is what was printed, to the last digit of each line."""
        return abs(promised / MIB - self.mib) <= _HALF_DIGIT * self.lines + 1e-9

    @property
    def bytes(self) -> int | None:
        """The sum in bytes, as exact as it was printed; None when nothing was."""
        return round(self.mib * MIB) if self.lines else None


@dataclass
class ServerLog:
    """The last start that a log holds. `memory` is keyed by (place, kind): place is "host", "10.0.0.2:18711#0"
    (endpoint and index) or a local device ("CUDA0"); kind is weights, kv (recurrent state included), compute or output.
    """

    started: bool = False
    build: str | None = None
    commit: str | None = None
    url: str | None = None
    offloaded: tuple[int, int] | None = None
    layers: dict[int, str] = field(default_factory=dict)
    memory: dict[tuple[str, str], Amount] = field(default_factory=dict)
    host_mapped: bool = False
    projector: float | None = None
    findings: list[Finding] = field(default_factory=list)

    def amount(self, place: str, kind: str) -> Amount:
        """The memory of one kind at one place; empty when the log has none."""
        return self.memory.get((place, kind), Amount())

    def places(self) -> set[str]:
        """Every place that got model, cache or compute memory."""
        return {place for place, _kind in self.memory}


def parse(lines: Iterable[str]) -> ServerLog:
    """The last start in a log, read line by line (a log may be large); earlier starts are forgotten.

    Any prefix is allowed before the text of a line (time stamps, those of journald or supervisor). A crash while the
    options are read comes before the line that marks a start, so it counts to the start before it.
    """
    log = ServerLog()
    compute: dict[tuple[int, str], float] = {}
    contexts = 0
    for line in lines:
        if _START.search(line):
            log, compute, contexts = ServerLog(started=True), {}, 0
        if " buffer size = " in line:
            _read_buffer(log, compute, -1 if _PROJECTOR in line else contexts, line)
        elif _CONTEXT in line:
            contexts += 1
        else:
            _read_line(log, line)
    for (_context, name), mib in compute.items():
        _add(log, name, "compute", mib)
    return log


def diagnose(lines: Iterable[str]) -> list[Finding]:
    """Every line that a known failure wrote, with its meaning; for logs of the primary and of workers. At most 20."""
    found: list[Finding] = []
    for line in lines:
        finding = _diagnose_line(line)
        if finding is not None and len(found) < _FINDINGS_LIMIT:
            found.append(finding)
    return found


def compare(plan: Mapping[str, Any], log: ServerLog) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """(rows, problems): the plan's promise against the log's last start.

    A row per device that has units, in the plan's order, then one for the primary's own memory ("host": the plan's
    primary_host, blocks on its CPU included): {device, host, endpoint, layers, units, units_measured, output, and for
    weights, kv and compute <kind>_promised and <kind>_measured, total_promised, total_measured, usable, headroom,
    equal_to_printed_digit}. Bytes; None where the log does not say. `equal_to_printed_digit` is about weights and
    cache, which are exact; compute is an upper bound. It is None where nothing was measured, and for mapped host
    weights that differ: there the log prints a range of the file. A problem is {severity: error|warning, code, text}.
    """
    cpu = [device for device in plan["devices"] if _is_cpu(device) and device["units"]]
    remote = [device for device in plan["devices"] if not _is_cpu(device) and device["units"]]
    remote = [_with_companions(device, plan) for device in remote] + _companions_alone(plan, remote)
    rows = [_device_row(device, log) for device in remote]
    rows.append(_host_row(_host_with_companions(plan), cpu, log))
    if log.projector is not None:
        _add_projector(rows, plan, log.projector)
    return rows, _problems(rows, remote, log)


def _with_companions(device: Mapping[str, Any], plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """A device of the primary's own, with what else was planned for it."""
    beside = [item for item in plan.get("companions") or [] if item["device"] == device["device"]]
    if device["endpoint"] is not None or not beside:
        return device
    return {**device, **{kind: device[kind] + sum(item[kind] for item in beside) for kind in _PLANNED}}


def _companions_alone(plan: Mapping[str, Any], held: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Devices of the primary's own that hold companions and no layer, as entries of a plan."""
    taken = {device["device"] for device in held if device["endpoint"] is None} | {"CPU"}
    found: dict[str, dict[str, Any]] = {}
    for item in plan.get("companions") or []:
        if item["device"] not in taken:
            entry = found.setdefault(item["device"], {"weights": 0, "kv": 0, "compute": 0})
            entry.update({kind: entry[kind] + item[kind] for kind in _PLANNED})
    return [
        {"host": None, "endpoint": None, "index": 0, "device": name, "rpc_name": name, "units": 0, **sizes}
        for name, sizes in found.items()
    ]


def _host_with_companions(plan: Mapping[str, Any]) -> dict[str, Any]:
    host = dict(plan.get("primary_host") or {})
    for item in plan.get("companions") or []:
        if item["device"] == "CPU":
            host.update({kind: int(host.get(kind) or 0) + item[kind] for kind in _PLANNED})
        host["compute"] = int(host.get("compute") or 0) + item["beside"]
    return host


def _add_projector(rows: Sequence[dict[str, Any]], plan: Mapping[str, Any], mib: float) -> None:
    """A projector's weights are logged in a line of their own, which names no device: the plan does."""
    for item in plan.get("companions") or []:
        for row in rows:
            name = "host" if item["device"] == "CPU" else item["device"]
            if item["what"] == "projector" and row["device"] == name:
                row["weights_measured"] = (row["weights_measured"] or 0) + round(mib * MIB)
                row["total_measured"] = (row["total_measured"] or 0) + round(mib * MIB)
                near = abs(row["weights_measured"] - row["weights_promised"]) <= 2 * _HALF_DIGIT * MIB * 2
                row["equal_to_printed_digit"] = near if row["equal_to_printed_digit"] is not None else None
                if row["headroom"] is not None:
                    row["headroom"] -= round(mib * MIB)


def _read_buffer(log: ServerLog, compute: dict[tuple[int, str], float], context: int, line: str) -> None:
    found = _BUFFER.search(line)
    if found is None:
        return
    name, kind, mib = found.group(1), found.group(2), float(found.group(3))
    if kind == "compute":
        # A context may reserve again (then the last figure holds); a second context has buffers of its own.
        compute[(context, name)] = mib
    else:
        _add(log, name, _KINDS.get(kind, "kv"), mib)
    if _HOST_BUFFER.fullmatch(name) and name.endswith("_Mapped"):
        log.host_mapped = True


def _add(log: ServerLog, name: str, kind: str, mib: float) -> None:
    remote = _REMOTE.fullmatch(name)
    if remote:
        place = f"{remote.group(2)}#{remote.group(1)}"
    elif _HOST_BUFFER.fullmatch(name):
        place = "host"
    else:
        # Metal splits one device into MTL0_Mapped and MTL0_Private.
        place = re.sub(r"_(Mapped|Private)$", "", name)
    log.memory.setdefault((place, kind), Amount()).add(mib)


def _read_line(log: ServerLog, line: str) -> None:
    found = _BUILD.search(line)
    if found:
        log.build, log.commit = found.group(1), found.group(2)
        return
    found = _LAYER.search(line)
    if found:
        log.layers[int(found.group(1))] = found.group(2)
        return
    found = _PROJECTOR_WEIGHTS.search(line)
    if found:
        log.projector = float(found.group(1))
        return
    found = _OFFLOADED.search(line)
    if found and log.offloaded is None:  # a draft model says so as well, later
        log.offloaded = (int(found.group(1)), int(found.group(2)))
        return
    found = _LISTENING.search(line)
    if found:
        log.url = found.group(1)
        return
    finding = _diagnose_line(line)
    if finding is not None and len(log.findings) < _FINDINGS_LIMIT:
        log.findings.append(finding)


def _diagnose_line(line: str) -> Finding | None:
    for code, pattern, advice in _PATTERNS:
        if pattern.search(line):
            return Finding(code, line.strip()[:400], advice)
    return None


def _is_cpu(device: Mapping[str, Any]) -> bool:
    return device["endpoint"] is None and device["device"] == "CPU"


def _place(device: Mapping[str, Any]) -> str:
    return str(device["device"]) if device["endpoint"] is None else f"{device['endpoint']}#{device['index']}"


def _device_row(device: Mapping[str, Any], log: ServerLog) -> dict[str, Any]:
    place = _place(device)
    exact = [log.amount(place, kind).equals(device[kind]) for kind in ("weights", "kv")]
    row = _row(
        device["rpc_name"],
        {kind: int(device[kind]) for kind in ("weights", "kv", "compute")},
        {kind: log.amount(place, kind).bytes for kind in ("weights", "kv", "compute")},
        device.get("usable"),
    )
    row.update(
        host=device["host"],
        endpoint=device["endpoint"],
        layers=_layers(device),
        units=device["units"],
        units_measured=_units_measured(log, device["rpc_name"]),
        output=bool(device.get("output")),
        equal_to_printed_digit=all(exact) if row["weights_measured"] is not None else None,
    )
    return row


def _host_row(host: Mapping[str, Any], cpu: Sequence[Mapping[str, Any]], log: ServerLog) -> dict[str, Any]:
    promised = {kind: int(host.get(kind) or 0) for kind in ("weights", "kv", "compute")}
    measured = {kind: log.amount("host", kind).bytes for kind in ("weights", "kv", "compute")}
    # The buffer of the results (logits) is memory of the primary too; the plan counts it with its compute memory.
    output = log.amount("host", "output").bytes
    if output is not None:
        measured["compute"] = (measured["compute"] or 0) + output
    # The prompt cache fills while the server works: it is promised, and never in the log of a start.
    row = _row("host", promised, measured, host.get("usable"), int(host.get("cache_ram") or 0))
    equal: bool | None = all(log.amount("host", kind).equals(promised[kind]) for kind in ("weights", "kv"))
    if not equal and log.host_mapped and row["headroom"] is not None:
        # The mapped range of the file may cover tensors of other devices, which take no memory here.
        row["headroom"] += max(0, (row["weights_measured"] or 0) - promised["weights"])
    row.update(
        host=cpu[0]["host"] if cpu else None,
        endpoint=None,
        layers=_layers(cpu[0]) if cpu else "",
        units=sum(device["units"] for device in cpu),
        units_measured=_units_measured(log, "CPU"),
        output=False,
        equal_to_printed_digit=None if not equal and (log.host_mapped or row["weights_measured"] is None) else equal,
    )
    return row


def _row(
    name: str, promised: Mapping[str, int], measured: Mapping[str, int | None], usable: int | None, reserved: int = 0
) -> dict[str, Any]:
    row: dict[str, Any] = {"device": name, "usable": usable}
    for kind in ("weights", "kv", "compute"):
        row[f"{kind}_promised"], row[f"{kind}_measured"] = promised[kind], measured[kind]
    known = [value for value in measured.values() if value is not None]
    row["total_promised"] = sum(promised.values()) + reserved
    row["total_measured"] = sum(known) if known else None
    row["headroom"] = usable - row["total_measured"] - reserved if usable is not None and known else None
    return row


def _layers(device: Mapping[str, Any]) -> str:
    first, last = device.get("first_layer"), device.get("last_layer")
    if first is None or last is None:
        return ""
    return str(first) if first == last else f"{first}-{last}"


def _units_measured(log: ServerLog, name: str) -> int | None:
    return sum(1 for device in log.layers.values() if device == name) if log.layers else None


def _problems(
    rows: Sequence[Mapping[str, Any]], remote: Sequence[Mapping[str, Any]], log: ServerLog
) -> list[dict[str, str]]:
    if not log.started and not log.memory:
        text = (
            "the log holds no start of llama-server (rotated away, or another file): nothing to compare with the plan"
        )
        return [{"severity": "warning", "code": "no_start_in_log", "text": text}]
    if not log.memory:
        text = "the log names no buffers: start llama-server with -lv 4, which prints them"
        return [{"severity": "warning", "code": "no_buffers_in_log", "text": text}]
    problems = []
    promised = sum(int(device["units"]) for device in remote)
    if log.offloaded is not None and log.offloaded[0] != promised:
        text = (
            f"llama-server offloaded {log.offloaded[0]}/{log.offloaded[1]} layers, the plan has {promised} on its "
            "devices: check -ngl, --rpc and -dev in its command line"
        )
        problems.append({"severity": "error", "code": "offload_differs", "text": text})
    for row in rows:
        problems.extend(_row_problems(row))
    planned = {_place(device) for device in remote}
    for place in sorted(log.places() - planned - {"host"}):
        text = f"{place} holds memory of the model, but the plan gives it no layers: check -dev and --tensor-split"
        problems.append({"severity": "error", "code": "device_not_planned", "text": text})
    return problems


def _row_problems(row: Mapping[str, Any]) -> list[dict[str, str]]:
    name = row["device"]
    if row["total_measured"] is None:
        text = f"{name} got no memory of the model, the plan gives it {row['units']} units: it takes no part"
        return [{"severity": "error", "code": "device_without_memory", "text": text}] if row["units"] else []
    problems = []
    if row["units_measured"] not in (None, row["units"]):
        text = f"{name} got {row['units_measured']} units, the plan has {row['units']}"
        problems.append({"severity": "error", "code": "units_differ", "text": text})
    if row["equal_to_printed_digit"] is False:
        for kind in ("weights", "kv"):
            problems.extend(_difference(name, kind, row[f"{kind}_promised"], row[f"{kind}_measured"] or 0))
    if (row["compute_measured"] or 0) > row["compute_promised"] + _HALF_DIGIT * 2 * MIB:
        text = (
            f"{name} took {_mib(row['compute_measured'])} for compute, the plan allowed {_mib(row['compute_promised'])}"
        )
        problems.append({"severity": "warning", "code": "compute_over_plan", "text": text})
    if row["headroom"] is not None and row["headroom"] < 0:
        text = (
            f"{name} took {_mib(row['total_measured'])}, {_mib(-row['headroom'])} more than it may lend: plan with less"
        )
        problems.append({"severity": "error", "code": "over_budget", "text": text})
    return problems


def _difference(name: str, kind: str, promised: int, measured: int) -> list[dict[str, str]]:
    # GPUs pad quantised rows (to 512 elements on CUDA), which moves a figure by a fraction of a per cent; a split that
    # went elsewhere moves it by a layer.
    off = abs(measured - promised)
    if off <= _HALF_DIGIT * 2 * MIB:
        return []
    severity = "error" if off > max(MIB, promised // 50) else "warning"
    text = f"{name} took {_mib(measured)} for {kind}, the plan promised {_mib(promised)}"
    return [{"severity": severity, "code": f"{kind}_differ", "text": text}]


def _mib(size: int) -> str:
    return f"{size / MIB:.2f} MiB"
