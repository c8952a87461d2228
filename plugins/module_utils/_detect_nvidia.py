# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""NVIDIA devices from the text of nvidia-smi: cards, MIG slices, vGPU guests, parts that share the RAM.

Core fields are asked for first and compute_cap in a second call, because drivers up to 470 refuse a whole query over
one field they do not know. Sizes that nvidia-smi prints without units are MiB.
"""

from __future__ import annotations

import csv
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_cpu import Memory
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import (
    MIB,
    Device,
    Finding,
    card_size,
    clamp_free,
    crowded,
    gpu_pool,
    lend_card,
    lend_ram,
    mib_text,
    ram_pool,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._pci import NVIDIA, bus_id, pci_cards
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import NOT_FOUND, TIMED_OUT, Result, Runner

CORE = ("index", "uuid", "name", "pci.bus_id", "driver_version", "memory.total", "memory.used", "memory.free")
CAPABILITY = ("uuid", "compute_cap")
PROCESSES = ("gpu_uuid", "pid", "used_memory")

WSL_LIB = "/usr/lib/wsl/lib"

# Parts whose GPU uses the RAM. Their driver says [N/A] for memory, or (N1X) a wrong 8128 MiB: the name decides, not
# the figure.
INTEGRATED = re.compile(r"\b(GB10|Thor|Orin|Xavier|N1X|nvgpu|Tegra)\b", re.IGNORECASE)
# 'GRID A100-10C', 'NVIDIA H100L-1-12C MIG 1g.12gb': the profile of a virtual GPU ends in its size and a series letter.
VGPU = re.compile(r"^GRID |-\d+[ABCQ]\b")
# Profiles for application streaming: their driver has CUDA switched off (vgpu_unlock issue 70).
VGPU_NO_CUDA = re.compile(r"-\d+A\b")
# Grace with a card's own HBM: in NUMA mode the kernel counts that HBM as RAM, too.
GRACE = re.compile(r"\bG[BH](200|300)\b")
# Tegra boards without nvidia-smi (JetPack before 5): the chip in the device tree tells the compute capability.
TEGRA_CHIPS = {"tegra210": "5.3", "tegra186": "6.2", "tegra194": "7.2", "tegra234": "8.7", "tegra264": "11.0"}

# Cards whose driver may be too old for compute_cap, and parts whose driver says [N/A]. First match wins.
CAPABILITY_BY_NAME = (
    (r"\bOrin\b", "8.7"),
    (r"\bXavier\b", "7.2"),
    (r"\bThor\b", "11.0"),
    (r"\bGB10\b", "12.1"),
    (r"\bAda\b|RTX 40\d\d\b", "8.9"),  # before Turing: there is an RTX 2000 Ada, too
    (r"\bT4\b|RTX 20\d\d|GTX 16\d\d|TITAN RTX|Quadro RTX|\bT\d{3,4}\b", "7.5"),
    (r"\bA100\b|\bA30\b", "8.0"),
    (r"RTX 30\d\d|\bA(2|10|16|40)\b|RTX A\d{4}", "8.6"),
    (r"V100|TITAN V\b|Quadro GV100", "7.0"),
    (r"P100|Quadro GP100", "6.0"),
    (r"GTX 10\d\d|\bP(4|6|40)\b|TITAN X[Pp]|Quadro P\d+", "6.1"),
    (r"GTX 9\d\d|\bM(4|6|40|60)\b|Quadro M\d+", "5.2"),
)

# nvmlReturn_t is nvidia-smi's exit status; its text comes on stdout.
REMEDIES = {
    4: "run the detection with the rights to open /dev/nvidia*",
    8: "a card lacks its power cable",
    9: "load or reinstall the driver (modprobe nvidia; dkms status; secure boot?)",
    12: "libnvidia-ml.so is missing: reinstall the driver's user-space part",
    13: "driver library and nvidia-smi are of different versions",
    15: "the GPU has fallen off the bus: reboot, check power and risers",
    16: "the GPU needs a reset or a reboot",
    17: "the container's device rules block it: restart the container",
    18: "the driver was updated while the old one is loaded: reboot",
    28: "the GPU has fallen off the bus: reboot, check power and risers",
}


def parse_rows(text: str, fields: Sequence[str]) -> tuple[list[dict[str, str | None]], list[str]]:
    """Rows of `--format=csv,noheader,nounits` as {field: text, or None for no answer}, and complaints."""
    rows: list[dict[str, str | None]] = []
    complaints = []
    for line in text.splitlines():
        if not line.strip():
            continue
        try:
            cells = next(csv.reader([line], skipinitialspace=True), [])
        except csv.Error:
            cells = []
        if len(cells) != len(fields):
            complaints.append(f"nvidia-smi: line not understood: {line.strip()[:120]!r}")
            continue
        rows.append({field: _answer(cell) for field, cell in zip(fields, cells)})
    return rows, complaints


_NO_ANSWER = re.compile(
    r"\[?\s*(n/a|not (supported|available|found)|insufficient permissions|unknown error|gpu is lost"
    r"|requested functionality has been deprecated)\s*\]?\Z",
    re.IGNORECASE,
)


def _answer(cell: str) -> str | None:
    cell = cell.strip()
    return None if not cell or _NO_ANSWER.match(cell) else cell


def mib(text: str | None) -> int | None:
    """Bytes of '24564' or '24564 MiB'; None for anything else, and for more than any card has."""
    match = re.match(r"([0-9]{1,9})(?:\s*MiB)?\Z", text or "", re.ASCII)
    size = int(match.group(1)) * MIB if match else None
    return size if not size else card_size(size)


def capability(text: str | None, name: str) -> str | None:
    """Compute capability '8.6' as the driver says it, else by the card's name; None when neither tells."""
    if text and re.match(r"[0-9]{1,2}\.[0-9]\Z", text):
        return text
    return next((cap for pattern, cap in CAPABILITY_BY_NAME if re.search(pattern, name)), None)


class Slice(NamedTuple):
    """A MIG slice: number on its card, profile ('3g.40gb') and UUID."""

    number: int
    profile: str
    uuid: str


def parse_gpu_list(text: str) -> dict[str, list[Slice]]:
    """`nvidia-smi -L`: UUID of each card -> its MIG slices."""
    cards: dict[str, list[Slice]] = {}
    current: list[Slice] | None = None
    for line in text.splitlines():
        card = re.match(r"GPU \d+: .*\(UUID: ([^)\s]+)\)", line)
        part = re.match(r"\s+MIG (\S+)\s+Device\s+(\d{1,3}): \(UUID: ([^)\s]+)\)", line)
        if card:
            current = cards.setdefault(card.group(1), [])
        elif part and current is not None:
            current.append(Slice(int(part.group(2)), part.group(1), part.group(3)))
    return cards


def parse_mig_memory(xml: str) -> dict[tuple[str, int], tuple[int | None, int | None]]:
    """`nvidia-smi -q -x`: (card UUID, slice number) -> (total, free) bytes; empty when the text is no XML."""
    try:
        root = ET.fromstring(xml)  # noqa: S314 the text is the host's own nvidia-smi's, read on that host
    except (ET.ParseError, ValueError):
        return {}
    found = {}
    for card in root.iter("gpu"):
        for part in card.iter("mig_device"):
            index = part.findtext("index", "").strip()
            if re.match(r"\d{1,3}\Z", index, re.ASCII):
                total = mib(part.findtext("fb_memory_usage/total", "").strip())
                free = mib(part.findtext("fb_memory_usage/free", "").strip())
                found[(card.findtext("uuid", "").strip(), int(index))] = (total, clamp_free(total, free))
    return found


def profile_bytes(profile: str) -> int | None:
    """Nominal size of a MIG profile: '3g.40gb' -> 40e9 bytes."""
    match = re.match(r"\d+g\.(\d{1,4})gb", profile)
    return card_size(int(match.group(1)) * 10**9) if match else None


def own_bytes(text: str, pids: Iterable[int]) -> dict[str, int]:
    """`--query-compute-apps`: bytes that our own processes hold, by card UUID."""
    ours = {str(pid) for pid in pids}
    held: dict[str, int] = {}
    for row in parse_rows(text, PROCESSES)[0]:
        uuid, size = row["gpu_uuid"], mib(row["used_memory"])
        if uuid and size and row["pid"] in ours:
            held[uuid] = held.get(uuid, 0) + size
    return held


def failure(result: Result) -> str:
    """What a failed nvidia-smi means, with the cure where one is known."""
    if result.rc == TIMED_OUT:
        return "nvidia-smi did not answer in time; a hung driver needs a reboot"
    said = next(
        (line.strip() for line in (result.stdout + "\n" + result.stderr).splitlines() if line.strip()), "no text"
    )
    cure = REMEDIES.get(result.rc)
    return f"nvidia-smi failed with status {result.rc} ({said[:200]})" + (f": {cure}" if cure else "")


def toolkit(text: str) -> str | None:
    """CUDA release in `nvcc --version`: 'release 12.4, V12.4.131' -> '12.4'."""
    match = re.search(r"release (\d{1,2}\.\d{1,2})\b", text)
    return match.group(1) if match else None


def detect_nvidia(
    runner: Runner,
    machine_id: str,
    memory: Memory,
    traits: Iterable[str] = (),
    own_pids: Sequence[int] = (),
    timeout: float = 30.0,
) -> Finding:
    """All NVIDIA devices of this host, named as llama.cpp names them under CUDA_DEVICE_ORDER=PCI_BUS_ID.

    `memory` is the host's RAM (parts that share it take their size from there), `traits` the host's ('wsl', 'tegra'),
    `own_pids` the processes of our own services, whose memory counts as free.
    """
    traits = tuple(traits)
    cards = pci_cards(runner, NVIDIA)
    smi = runner.which("nvidia-smi")
    if smi is None:
        return _without_smi(runner, machine_id, memory, traits, cards)

    def query(fields: Sequence[str], what: str = "gpu") -> Result:
        return runner.run([smi, f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"], timeout)

    with ThreadPoolExecutor(max_workers=5) as pool:
        core_job = pool.submit(query, CORE)
        capability_job = pool.submit(query, CAPABILITY)
        list_job = pool.submit(runner.run, [smi, "-L"], timeout)
        own_job = pool.submit(query, PROCESSES, "compute-apps") if own_pids else None
        nvcc = runner.which("nvcc")
        nvcc_job = pool.submit(runner.run, [nvcc, "--version"], timeout) if nvcc else None
    core = core_job.result()
    if core.rc != 0:
        text = failure(core)
        if core.rc == NOT_FOUND:
            text = f"{smi} is there but cannot be run: {core.stderr.strip()[:200]}"
        return Finding("cuda", note=text, warnings=(text,) if cards or core.rc not in (6, 9) else ())
    rows, complaints = parse_rows(core.stdout, CORE)
    if not rows:
        note = "the NVIDIA driver is loaded, but there is no card"
        return Finding("cuda", note=note, warnings=(note + f", though PCI shows {', '.join(cards)}",) if cards else ())
    listed = list_job.result()
    slices = parse_gpu_list(listed.stdout) if listed.rc == 0 else {}
    mig_memory = {}
    if any(slices.values()):
        mig_memory = parse_mig_memory(runner.run([smi, "-q", "-x"], timeout).stdout)
    caps = capability_job.result()
    capabilities = (
        {row["uuid"]: row["compute_cap"] for row in parse_rows(caps.stdout, CAPABILITY)[0]} if caps.rc == 0 else {}
    )
    own = own_bytes(own_job.result().stdout, own_pids) if own_job else {}

    devices: list[Device] = []
    for position, row in enumerate(rows):
        uuid = row["uuid"]
        cap = capability(capabilities.get(uuid) if uuid else None, row["name"] or "")
        if uuid and slices.get(uuid):
            devices.extend(_mig_device(row, cap, part, mig_memory, machine_id, traits) for part in slices[uuid])
        else:
            devices.append(_device(row, position, cap, machine_id, memory, traits, own.get(uuid or "", 0)))
    names = [part.uuid for parts in slices.values() for part in parts]
    if len(names) > 1:
        complaints.append(
            f"{len(names)} MIG slices, of which a process sees one: give each an instance of its own, with env: "
            f"{{CUDA_VISIBLE_DEVICES: {names[0]}}} and so on ({', '.join(names[1:])})"
        )
    if runner.exists("/dev/nvidiactl") and not runner.exists("/dev/nvidia-uvm"):
        complaints.append(
            "/dev/nvidia-uvm is missing, so CUDA cannot start: run nvidia-modprobe -c0 -u as root, or nvidia-smi -L "
            "once before the worker"
        )
    release = toolkit(nvcc_job.result().stdout) if nvcc_job else None
    driver = next((row["driver_version"] for row in rows if row["driver_version"]), None)
    return Finding(
        "cuda",
        tuple(devices),
        warnings=tuple(complaints),
        toolkit=release,
        ready=release is not None,
        driver=driver,
    )


def _without_smi(
    runner: Runner, machine_id: str, memory: Memory, traits: Sequence[str], cards: Sequence[str]
) -> Finding:
    chips = [
        part.split(",")[-1]
        for part in (runner.read("/proc/device-tree/compatible") or "").split("\0")
        if part.startswith("nvidia,tegra")
    ]
    if "tegra" in traits:
        cap = next((TEGRA_CHIPS[chip] for chip in chips if chip in TEGRA_CHIPS), None)
        row: dict[str, str | None] = dict.fromkeys(CORE)
        row["name"] = f"Tegra {chips[0] if chips else ''} (nvgpu)"
        device = _device(row, 0, cap, machine_id, memory, traits, 0)
        return Finding("cuda", (device,), ready=runner.which("nvcc") is not None)
    if not cards:
        return Finding("cuda", note="no NVIDIA card")
    driver = "its kernel driver is loaded" if runner.exists("/proc/driver/nvidia/version") else "no driver is loaded"
    note = f"NVIDIA card at {', '.join(cards)}, but there is no nvidia-smi ({driver}); install the driver's utilities"
    return Finding("cuda", note=note, warnings=(note,))


def _environment(traits: Sequence[str], visible: str | None = None) -> Mapping[str, str]:
    # nvidia-smi counts by PCI address, CUDA by speed unless told otherwise (B3-19).
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if visible:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    if "wsl" in traits:
        environment["LD_LIBRARY_PATH"] = WSL_LIB  # libcuda lies there and nowhere else (B3-17)
    return environment


def _device(
    row: Mapping[str, str | None],
    position: int,
    cap: str | None,
    machine_id: str,
    memory: Memory,
    traits: Sequence[str],
    own: int,
) -> Device:
    name, uuid, slot = row["name"] or "NVIDIA GPU", row["uuid"], bus_id(row["pci.bus_id"])
    total, used = mib(row["memory.total"]), mib(row["memory.used"])
    free = clamp_free(total, mib(row["memory.free"]))
    warnings: tuple[str, ...] = ()
    usable: int | None
    unified = bool(INTEGRATED.search(name)) or ("tegra" in traits and total is None)
    if unified:
        kind, pool, source = "unified", ram_pool(machine_id), "/proc/meminfo"
        total, free, usable = lend_ram(kind, None, memory.ram, own)
        if memory.hugepages:
            warnings = (
                f"{name}: with huge pages set aside llama.cpp reports only them as free "
                f"({mib_text(memory.hugepages_free)}); set vm.nr_hugepages to 0",
            )
    else:
        kind, pool, source = "dedicated", gpu_pool(machine_id, slot or uuid or str(position)), "nvidia-smi"
        if free is None and total is not None and used is not None:
            free = max(0, total - used)
        if total is None:
            usable = None
            warnings = (
                f"{name}: the driver does not say how much memory it has (card lost, or MIG mode without slices)",
            )
        else:
            usable = lend_card(kind, total, free, own)
            warnings = crowded(total, free, own, name)
        warnings += _cautions(name)
        if VGPU_NO_CUDA.search(name):
            usable = None
    if cap is None:
        warnings += (f"{name}: compute capability unknown (driver {row['driver_version'] or 'unknown'})",)
    return Device(
        name=f"CUDA{position}",
        backend="cuda",
        description=name,
        kind=kind,
        pool=pool,
        total=total,
        free=free,
        usable=usable,
        arch=f"sm_{cap.replace('.', '')}" if cap else None,
        pci_bus_id=slot,
        uuid=uuid,
        source=source,
        environment=_environment(traits),
        warnings=warnings,
    )


def _cautions(name: str) -> tuple[str, ...]:
    """What is special about parts that report their memory well."""
    if VGPU_NO_CUDA.search(name):
        return (f"{name}: this vGPU profile has CUDA switched off; give the guest a C or Q profile",)
    if VGPU.search(name):
        return (f"{name}: a virtual GPU; nobody has run a worker on one, and without a licence it slows down",)
    if GRACE.search(name):
        return (f"{name}: if the kernel shows its memory as RAM (NUMA mode), lend it by CUDA only, not by CPU",)
    return ()


def _mig_device(
    row: Mapping[str, str | None],
    cap: str | None,
    part: Slice,
    sizes: Mapping[tuple[str, int], tuple[int | None, int | None]],
    machine_id: str,
    traits: Sequence[str],
) -> Device:
    """A slice.

    A CUDA process sees one slice only, so each is CUDA0 of a worker of its own, chosen by its UUID (B3-07).
    """
    slot = bus_id(row["pci.bus_id"])
    total, free = sizes.get((row["uuid"] or "", part.number), (None, None))
    source = "nvidia-smi -q -x"
    warnings: tuple[str, ...] = ()
    spare = 0
    if total is None:
        total, source = profile_bytes(part.profile), "nvidia-smi -L"
        # Names are rounded: 1g.18gb of an H200 has 16.00 GiB, 4.6 % less than its name.
        spare = (total or 0) // 10
        warnings = (f"MIG {part.profile}: size taken from the profile's name, less 10 %",)
    whole = mib(row["memory.total"])
    if total is not None and whole is not None:
        total = min(total, whole)  # a slice is never more than its card
    free = clamp_free(total, free)
    return Device(
        name="CUDA0",
        backend="cuda",
        description=f"{row['name'] or 'NVIDIA GPU'} MIG {part.profile}",
        kind="dedicated",
        pool=gpu_pool(machine_id, f"{slot or row['uuid']}/{part.uuid}"),
        total=total,
        free=free,
        usable=lend_card("dedicated", max(0, total - spare), free) if total else None,
        arch=f"sm_{cap.replace('.', '')}" if cap else None,
        pci_bus_id=slot,
        uuid=part.uuid,
        source=source,
        environment=_environment(traits, part.uuid),
        warnings=warnings,
    )
