# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""AMD cards as amd-smi and rocm-smi tell them, in both generations of their JSON; asked where sysfs says nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import MIB, card_size, number
from ansible_collections.llamafleet.rpc.plugins.module_utils._pci import bus_id, json_values
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import TIMED_OUT, Result, Runner

# Parts that are processor and GPU in one, by their KFD target and, where there is no KFD, by their PCI id (kernel
# amdgpu driver). The KFD's cpu_cores_count is no test: kernels differ (B3-09).
APU_TARGETS = frozenset(
    f"gfx{number}" for number in (902, 909, "90c", 1013, 1033, 1035, 1036, 1103, 1150, 1151, 1152, 1153)
)
APU_IDS = frozenset(
    {0x15DD, 0x15D8, 0x1636, 0x1638, 0x164C, 0x163F, 0x164D, 0x1681, 0x164E, 0x13C0, 0x15BF, 0x15C8, 0x1900, 0x1901}
    | {0x150E, 0x1586, 0x1114, 0x1435}
)


@dataclass(frozen=True)
class Card:
    """An AMD GPU, from whatever source; sizes in bytes, unknown None."""

    slot: str | None
    name: str = "AMD GPU"
    target: str | None = None
    vram: int | None = None
    vram_used: int | None = None
    gtt: int | None = None
    gtt_used: int | None = None
    device: int = 0
    simds: int = 0
    node: int | None = None
    gpu_id: int = 0
    driver: str | None = None
    source: str = "sysfs"

    @property
    def integrated(self) -> bool:
        """Whether it is part of a processor. Without a target a GTT of eight times the VRAM decides (LocalAI)."""
        if self.device in APU_IDS or self.target in APU_TARGETS:
            return True
        return self.target is None and self.device == 0 and bool(self.vram and self.gtt and self.gtt >= 8 * self.vram)


def _folded(entry: Mapping[Any, Any]) -> dict[str, Any]:
    """Keys without case, blanks and marks: 'Card series' and 'Card Series', 'VRAM Total Memory (B)' (B3-16)."""
    return {re.sub(r"[^a-z0-9]", "", str(key).lower()): value for key, value in entry.items()}


def _size(value: Any) -> int | None:
    """Bytes of '17163091968', of 24560 MB in amd-smi's {"value": 24560, "unit": "MB"} (it counts by 1024), or None."""
    unit = 1
    if isinstance(value, Mapping):
        unit = {"B": 1, "KB": 1 << 10, "MB": MIB, "GB": 1 << 30}.get(str(value.get("unit")), 0)
        value = value.get("value")
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return None
    size = number(str(value))
    return size * unit if size is not None and unit else None


def _text(value: Any) -> str:
    text = str(value).strip() if isinstance(value, (str, int)) else ""
    return "" if text.lower() in ("n/a", "none", "unknown") else text


def _target(value: Any) -> str | None:
    text = _text(value).lower()
    return text if re.match(r"gfx[0-9a-f]{3,5}\Z", text) else None


def _code(value: Any) -> int:
    text = _text(value).lower()
    return int(text, 16) if re.match(r"0x[0-9a-f]{1,4}\Z", text) else 0


def parse_rocm_smi(text: str) -> list[Card]:
    """Cards in `rocm-smi --showproductname --showbus --showmeminfo all --json`, ROCm 4 to 6; [] for other text."""
    cards = []
    for found in json_values(text):
        if not isinstance(found, Mapping):
            continue
        for name in sorted(found, key=lambda key: number(str(key)[4:]) or 0):
            if not re.match(r"card\d{1,3}\Z", str(name)) or not isinstance(found[name], Mapping):
                continue
            values = _folded(found[name])
            cards.append(
                Card(
                    slot=bus_id(_text(values.get("pcibus"))),
                    name=_text(values.get("cardseries")) or _text(values.get("cardmodel")) or "AMD GPU",
                    target=_target(values.get("gfxversion")),
                    vram=card_size(_size(values.get("vramtotalmemoryb"))),
                    vram_used=_size(values.get("vramtotalusedmemoryb")),
                    gtt=_size(values.get("gtttotalmemoryb")),
                    gtt_used=_size(values.get("gtttotalusedmemoryb")),
                    device=_code(values.get("deviceid") or values.get("gpuid")),
                    source="rocm-smi",
                )
            )
    return cards


def _amd_smi_entries(text: str) -> dict[int, dict[str, Any]]:
    """GPU number -> its sections, of both generations: a list (ROCm 6) or {"gpu_data": list} (ROCm 7)."""
    entries: dict[int, dict[str, Any]] = {}
    for found in json_values(text):
        listed = found.get("gpu_data") if isinstance(found, Mapping) else found
        if isinstance(found, Mapping) and "gpu" in found:
            listed = [found]
        for entry in listed if isinstance(listed, list) else []:
            index = entry.get("gpu") if isinstance(entry, Mapping) else None
            if isinstance(index, int) and not isinstance(index, bool) and 0 <= index < 1000:
                entries.setdefault(index, {}).update(entry)
    return entries


def parse_amd_smi(static: str, metric: str) -> list[Card]:
    """Cards in `amd-smi static --asic --vram --bus --board --json` and `amd-smi metric --mem-usage --json`."""

    def part(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        value = entry.get(name)
        return value if isinstance(value, Mapping) else {}

    usage = _amd_smi_entries(metric)
    cards = []
    for index, entry in sorted(_amd_smi_entries(static).items()):
        asic, memory = part(entry, "asic"), part(usage.get(index, {}), "mem_usage")
        total = _size(memory.get("total_vram"))
        cards.append(
            Card(
                slot=bus_id(_text(part(entry, "bus").get("bdf"))),
                name=_text(part(entry, "board").get("product_name")) or _text(asic.get("market_name")) or "AMD GPU",
                target=_target(asic.get("target_graphics_version")),
                vram=card_size(_size(part(entry, "vram").get("size")) if total is None else total),
                vram_used=_size(memory.get("used_vram")),
                gtt=_size(memory.get("total_gtt")),
                gtt_used=_size(memory.get("used_gtt")),
                device=_code(asic.get("device_id")),
                source="amd-smi",
            )
        )
    return cards


def completed(cards: Sequence[Card], told: Sequence[Card]) -> list[Card]:
    """`cards` of sysfs with what the tools `told`, by PCI address; those of the tools alone where sysfs shows none."""
    if not cards:
        return [replace(card, node=position) for position, card in enumerate(told)]
    by_slot = {card.slot: card for card in told if card.slot}
    found = []
    for card in cards:
        other = by_slot.get(card.slot or "")
        if other is None and len(cards) == len(told) == 1:
            other = told[0]
        if other is None:
            found.append(card)
            continue
        keys = ("target", "vram", "vram_used", "gtt", "gtt_used")
        missing = {key: getattr(other, key) for key in keys if getattr(card, key) is None}
        found.append(replace(card, name=other.name, source=other.source if missing else card.source, **missing))
    return found


def ask_tools(runner: Runner, timeout: float) -> tuple[list[Card], list[str]]:
    """What amd-smi says, else rocm-smi; and why neither says anything."""
    amd_smi, rocm_smi = runner.which("amd-smi"), runner.which("rocm-smi")
    with ThreadPoolExecutor(max_workers=3) as pool:
        jobs = {}
        if amd_smi:
            options = ["--asic", "--vram", "--bus", "--board", "--json"]
            jobs["static"] = pool.submit(runner.run, [amd_smi, "static", *options], timeout)
            jobs["metric"] = pool.submit(runner.run, [amd_smi, "metric", "--mem-usage", "--json"], timeout)
        if rocm_smi:
            options = ["--showproductname", "--showbus", "--showmeminfo", "all", "--json"]
            jobs["rocm"] = pool.submit(runner.run, [rocm_smi, *options], timeout)
        answers = {name: job.result() for name, job in jobs.items()}
    empty = Result(0, "", "")
    cards = parse_amd_smi(answers.get("static", empty).stdout, answers.get("metric", empty).stdout)
    if not any(card.vram for card in cards):
        cards = parse_rocm_smi(answers.get("rocm", empty).stdout) or cards
    complaints = []
    if not any(card.vram for card in cards):
        complaints = [_failure(name, result) for name, result in answers.items()]
    return cards, complaints


def _failure(name: str, result: Result) -> str:
    tool = "rocm-smi" if name == "rocm" else f"amd-smi {name}"
    if result.rc == TIMED_OUT:
        return f"{tool} did not answer in time; a hung driver needs a reboot"
    lines = (result.stderr + "\n" + result.stdout).splitlines()
    said = next((line.strip() for line in lines if line.strip()), "no text")
    return f"{tool} names no card (status {result.rc}, {said[:200]}): load amdgpu; join groups video and render"
