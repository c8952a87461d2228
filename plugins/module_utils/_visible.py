# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which devices of a host a process sees under which names, as its environment chooses among them.

An instance with CUDA_VISIBLE_DEVICES=1 calls CUDA0 what the facts of its host call CUDA1, and each MIG slice is CUDA0
of a process of its own. Its name, its environment, its budget and what llama.cpp lists for it must all mean the same
device, so they all ask here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# Stem of llama.cpp's names, and the variables that choose and renumber, in the order in which they apply.
_CHOOSERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "cuda": ("CUDA", ("CUDA_VISIBLE_DEVICES",)),
    "rocm": ("ROCm", ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")),
    "vulkan": ("Vulkan", ("GGML_VK_VISIBLE_DEVICES",)),
}
# oneAPI's selector is a language of its own: it is not read, but a listing of the whole host does not hold with it.
_VARIABLES = (*(name for _stem, names in _CHOOSERS.values() for name in names), "ONEAPI_DEVICE_SELECTOR")


def chooses(environment: Mapping[str, Any]) -> bool:
    """Whether a process with this environment may see other devices than one without."""
    return any(name in environment for name in _VARIABLES)


def seen_devices(devices: Sequence[Mapping[str, Any]], environment: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Name inside the process -> the device (an entry of host_facts' ``devices``) with that name.

    Entries of a variable are numbers as the facts have them or starts of UUIDs; what follows one that is not there is
    not seen, as CUDA has it. A CUDA process sees one MIG slice at most, without a choice the first (B3-07).
    """
    found: dict[str, dict[str, Any]] = {}
    for backend in dict.fromkeys(str(device.get("backend")) for device in devices):
        those = [dict(device) for device in devices if str(device.get("backend")) == backend]
        stem, variables = _CHOOSERS.get(backend, ("", ()))
        for variable in variables:
            if variable in environment:
                those = _renumbered(_picked(those, stem, str(environment[variable])), stem)
        slices = [device for device in those if _is_slice(device)]
        for device in those:
            if device not in slices[1:]:
                found.setdefault(str(device["name"]), device)
    return found


def _is_slice(device: Mapping[str, Any]) -> bool:
    return str(device.get("uuid") or "").startswith("MIG-")


def _picked(devices: Sequence[dict[str, Any]], stem: str, text: str) -> list[dict[str, Any]]:
    chosen: list[dict[str, Any]] = []
    for word in re.split(r"\s*,\s*", text.strip()):
        device = next((one for one in devices if _is_called(one, stem, word)), None)
        if device is None:
            break
        chosen.append(device)
    return chosen


def _is_called(device: Mapping[str, Any], stem: str, word: str) -> bool:
    if word.isdigit():
        return not _is_slice(device) and device.get("name") == stem + word
    return bool(re.match(r"(GPU|MIG)-.", word)) and str(device.get("uuid") or "").startswith(word)


def _renumbered(devices: Sequence[dict[str, Any]], stem: str) -> list[dict[str, Any]]:
    return [{**device, "name": f"{stem}{number}"} for number, device in enumerate(devices)]
