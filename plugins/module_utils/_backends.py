# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From what the makers' rooms found to one list of devices, the backend to build for, and the candidates beside it.

One physical device is one device, even where two backends see it: a card that CUDA0 and Vulkan0 both are belongs to
the chosen backend, else to the first in the order of preference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import BACKENDS, Device, Finding
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._toolchains import (
    Site,
    class_id,
    hip_note,
    packages,
    problems_of,
    switches,
)


class HostError(FleetError):
    """This host cannot be described, or not with the backend asked for."""


def choose(findings: Sequence[Finding], backend: str, hostname: str) -> Finding:
    """The finding to build for: the first that works, or the one of the `backend` asked for.

    ROCm and SYCL without their compilers give way to Vulkan where that sees a card: its compiler is a package of every
    distribution, theirs are not.
    """
    if backend == "auto":
        working = [finding for finding in findings if finding.works]
        vulkan = any(finding.backend == "vulkan" for finding in working)
        for finding in working:
            if finding.ready or finding.backend not in ("rocm", "sycl") or not vulkan:
                return finding
        return findings[-1]
    for finding in findings:
        if finding.backend == backend and finding.devices:
            return finding
    if backend not in BACKENDS:
        raise HostError(f"backend {backend!r} is unknown; auto or one of {', '.join(BACKENDS)}")
    seen = "; ".join(f"{f.backend}: {', '.join(d.name for d in f.devices) or f.note}" for f in findings)
    raise HostError(f"{hostname}: no {backend} device was found ({seen}); fix its driver, or set the backend to auto")


def _twin(device: Device, others: Sequence[Device]) -> Device | None:
    """The device of another backend that is the same part: the same PCI address."""
    if device.pci_bus_id is None:
        return None
    return next((other for other in others if other.pci_bus_id == device.pci_bus_id), None)


def one_each(findings: Sequence[Finding], chosen: Finding) -> tuple[tuple[Device, ...], dict[str, dict[str, str]]]:
    """(every physical device once, in the order of the findings; backend -> {its name for a device: the name kept})."""
    kept: list[Device] = []
    same: dict[str, dict[str, str]] = {}
    for finding in sorted(findings, key=lambda finding: finding is not chosen):
        before = tuple(kept)  # slices of one card, all of one backend, are devices of their own
        for device in finding.devices:
            twin = _twin(device, before)
            if twin is None:
                kept.append(device)
            else:
                same.setdefault(finding.backend, {})[device.name] = twin.name
    order = [device for finding in findings for device in finding.devices]
    return tuple(device for device in order if any(device is other for other in kept)), same


def several_builds(findings: Sequence[Finding]) -> str | None:
    """Advice for a host with cards of several makers: no build serves two of their backends well (finding 4)."""
    cards = {
        finding.backend: [device.name for device in finding.devices if device.usable]
        for finding in findings
        if finding.backend in ("cuda", "rocm", "sycl")
        and any(device.usable and device.kind != "shared_system" for device in finding.devices)
    }
    if len(cards) < 2:
        return None
    listed = "; ".join(f"{backend}: {', '.join(names)}" for backend, names in cards.items())
    return (
        f"this host has cards of {len(cards)} makers ({listed}): to use them all, run an instance and a build for each "
        "backend, or one of the vulkan backend for all"
    )


def candidates(
    findings: Sequence[Finding], chosen: Finding, same: dict[str, dict[str, str]], site: Site
) -> tuple[dict[str, Any], ...]:
    """Every backend that was looked for: its devices or why there are none, and how to build for it.

    Keys: backend, devices, chosen, note, same_as, class_id, cmake_flags, toolkit, problems, packages; the last five
    are null or empty where there is nothing to build for.
    """
    advice = several_builds(findings)
    found = []
    for finding in findings:
        notes = [finding.note] if finding.note else []
        if advice and finding.devices and finding.backend in ("cuda", "rocm", "sycl"):
            notes.append(advice)
        if finding.backend == "rocm" and hip_note(finding.devices):
            notes.append(hip_note(finding.devices))
        there = bool(finding.devices)
        found.append(
            {
                "backend": finding.backend,
                "devices": [device.name for device in finding.devices],
                "chosen": finding is chosen,
                "note": "; ".join(notes) or None,
                "same_as": same.get(finding.backend, {}),
                "class_id": class_id(site.system, site.arch, site.libc, finding, site.isa) if there else None,
                "cmake_flags": list(flags_of(finding, site)) if there else [],
                "toolkit": finding.toolkit,
                "problems": list(problems_of(finding, site.compilers)),
                "packages": packages(finding.backend, site.family).to_dict() if there else None,
            }
        )
    return tuple(found)


def flags_of(finding: Finding, site: Site) -> tuple[str, ...]:
    """CMake switches for a finding's devices."""
    return switches(finding.backend, finding.devices, site.system, finding.toolkit, site.compilers)
