# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Puts one host's facts together: identity, processor, memory, devices, the backend to build for, and its links."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import pwd
import re
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_cpu import (
    anonymous_bytes,
    cpu_device,
    detect_cpu,
    detect_memory,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_nvidia import (
    cmake_flags,
    cuda_architectures,
    detect_nvidia,
    pci_cards,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import BACKENDS, Finding, Host
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Runner


class HostError(FleetError):
    """This host cannot be described, or not with the backend asked for."""


@dataclass(frozen=True)
class Identity:
    """What a host's Python knows without reading a file or running a command; made by `identify`, made up in tests."""

    system: str
    arch: str
    libc: str
    hostname: str
    user: Mapping[str, Any]
    psutil: bool = False
    physical_bytes: int | None = None
    addresses: Mapping[str, str] = field(default_factory=dict)
    collected_at: str = ""


@dataclass(frozen=True)
class Own:
    """Which processes are our own services: by number, by unit name in their cgroup, by the prefix of their program."""

    pids: tuple[int, ...] = ()
    units: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()


def identify() -> Identity:
    """The Identity of the host and account this runs on."""
    account = pwd.getpwuid(os.geteuid())
    try:
        physical: int | None = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        physical = None
    return Identity(
        system=platform.system(),
        arch=platform.machine(),
        libc=_libc(),
        hostname=socket.gethostname(),
        user={"name": account.pw_name, "uid": account.pw_uid, "home": account.pw_dir},
        psutil=importlib.util.find_spec("psutil") is not None,
        physical_bytes=physical if physical and physical > 0 else None,
        addresses=_addresses(),
        collected_at=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def _libc() -> str:
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        text = None
    return (text or "musl").replace(" ", "")


def _addresses() -> dict[str, str]:
    """IPv4 address of each interface (SIOCGIFADDR): no `ip` program and no psutil needed."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _index, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, 0x8915, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an address
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def collect(
    runner: Runner, identity: Identity, backend: str = "auto", own: Own | None = None, timeout: float = 30.0
) -> Host:
    """All facts of this host. HostError when it is no Linux, or does not have the `backend` asked for."""
    if identity.system != "Linux":
        raise HostError(
            f"{identity.hostname}: {identity.system} is not detected yet, only Linux is; "
            "describe this machine's devices in llama_worker_devices_declared"
        )
    machine_id, warnings = machine_identity(runner, identity)
    traits = host_traits(runner)
    pids = own_processes(runner, own or Own())
    memory = detect_memory(runner, anonymous_bytes(runner, pids), identity.physical_bytes, "lxc" in traits)
    cpu = detect_cpu(runner, identity.arch)
    findings = (
        detect_nvidia(runner, machine_id, memory, traits, pids, timeout),
        # AMD, Intel, Vulkan and Apple come here, in this order, each with a room of its own.
        Finding("cpu", (cpu_device(cpu, memory, machine_id),)),
    )
    chosen = choose(findings, backend, identity.hostname)
    if "wsl" in traits:
        warnings.append("WSL2: workers are reached from other machines only with mirrored networking")
    warnings.extend(memory.warnings)
    for finding in findings:
        warnings.extend(finding.warnings)
    for device in (device for finding in findings for device in finding.devices):
        warnings.extend(device.warnings)
    return Host(
        machine_id=machine_id,
        boot_id=_line(runner, "/proc/sys/kernel/random/boot_id"),
        collected_at=identity.collected_at,
        system=identity.system,
        arch=identity.arch,
        init=init_system(runner),
        traits=traits,
        cpu=cpu.to_dict(),
        memory=memory.to_dict(),
        devices=tuple(device for finding in findings for device in finding.devices),
        backend=chosen.backend,
        candidates=candidates(runner, findings, chosen),
        class_id=class_id(identity, chosen, cpu.isa),
        cmake_flags=cmake_flags(chosen.devices) if chosen.backend == "cuda" else (),
        links=tuple(links(runner, identity.addresses)),
        user=identity.user,
        psutil=identity.psutil,
        warnings=tuple(dict.fromkeys(warnings)),
    )


def choose(findings: Sequence[Finding], backend: str, hostname: str) -> Finding:
    """The finding to build for: the first that works, or the one of the `backend` asked for."""
    if backend == "auto":
        return next((finding for finding in findings if finding.works), findings[-1])
    for finding in findings:
        if finding.backend == backend and finding.devices:
            return finding
    if backend not in BACKENDS:
        raise HostError(f"backend {backend!r} is unknown; auto or one of {', '.join(BACKENDS)}")
    seen = "; ".join(f"{f.backend}: {', '.join(d.name for d in f.devices) or f.note}" for f in findings)
    raise HostError(f"{hostname}: no {backend} device was found ({seen}); fix its driver, or set the backend to auto")


def candidates(runner: Runner, findings: Sequence[Finding], chosen: Finding) -> tuple[dict[str, Any], ...]:
    """Every backend that was looked for, with its devices or why there are none; and cards not looked after yet."""
    found = [
        {
            "backend": finding.backend,
            "devices": [device.name for device in finding.devices],
            "chosen": finding is chosen,
            "note": finding.note or None,
        }
        for finding in findings
    ]
    for backend, maker, vendor in (("rocm", "AMD", "0x1002"), ("sycl", "Intel", "0x8086")):
        for slot in pci_cards(runner, vendor):
            note = (
                f"{maker} graphics at {slot}: not detected yet; to use it, declare it in llama_worker_devices_declared"
            )
            found.append({"backend": backend, "devices": [], "chosen": False, "note": note})
    return tuple(found)


def class_id(identity: Identity, chosen: Finding, isa: str) -> str:
    """Hosts of one class may share binaries: system, arch, libc, backend with toolkit major, GPU archs, CPU level."""
    parts = [identity.system, identity.arch, identity.libc]
    major = (chosen.toolkit or "").partition(".")[0]
    parts.append(chosen.backend + major)
    if chosen.backend == "cuda":
        parts.extend(f"sm{number}" for number in cuda_architectures(chosen.devices))
    parts.append(isa)
    return re.sub(r"[^a-z0-9._-]", "_", "-".join(parts).lower())


def machine_identity(runner: Runner, identity: Identity) -> tuple[str, list[str]]:
    """machine-id of the host; without one a digest of host name and hardware addresses, with a warning."""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        text = _line(runner, path)
        if text and re.match(r"[0-9a-f]{32}\Z", text):
            return text, []
    cards = [_line(runner, f"/sys/class/net/{name}/address") or "" for name in runner.listdir("/sys/class/net")]
    digest = hashlib.sha256("\n".join([identity.hostname, *sorted(cards)]).encode()).hexdigest()[:32]
    return digest, [
        "no /etc/machine-id: identity is made of host name and network addresses; two containers of one machine then "
        "look like two machines (systemd-machine-id-setup makes a lasting one)"
    ]


def host_traits(runner: Runner) -> tuple[str, ...]:
    """What kind of host this is: 'wsl', 'tegra', 'lxc' (an LXCFS /proc), 'container'."""
    traits = set()
    if "microsoft" in (runner.read("/proc/sys/kernel/osrelease") or "").lower():
        traits.add("wsl")
    # JetPack moves its marker files between releases, so any one of them will do (B3-05).
    if (
        "nvidia,tegra" in (runner.read("/proc/device-tree/compatible") or "")
        or (_line(runner, "/sys/devices/soc0/family") or "") == "Tegra"
        or runner.exists("/etc/nv_tegra_release")
    ):
        traits.add("tegra")
    if " fuse.lxcfs " in (runner.read("/proc/mounts") or ""):
        traits.update(("lxc", "container"))
    if any(runner.exists(path) for path in ("/.dockerenv", "/run/.containerenv", "/run/systemd/container")):
        traits.add("container")
    return tuple(sorted(traits))


def init_system(runner: Runner) -> str:
    """'systemd' when it is PID 1 and running (not just installed), else 'none'."""
    if not runner.exists("/run/systemd/system"):
        return "none"
    names = (_line(runner, "/proc/1/comm") or "", (runner.readlink("/proc/1/exe") or "").rpartition("/")[2])
    return "systemd" if "systemd" in names else "none"


def own_processes(runner: Runner, own: Own) -> tuple[int, ...]:
    """Numbers of the running processes that are our own services."""
    units = {name for unit in own.units for name in (unit, f"{unit}.service")}
    prefixes = tuple(prefix.rstrip("/") + "/" for prefix in own.prefixes if prefix.strip("/"))
    if not units and not prefixes:
        return own.pids
    pids = set(own.pids)
    for name in runner.listdir("/proc"):
        if not name.isdigit():
            continue
        below = prefixes and (runner.readlink(f"/proc/{name}/exe") or "").startswith(prefixes)
        if below or (units and units & set(re.split(r"[/\n]", runner.read(f"/proc/{name}/cgroup") or ""))):
            pids.add(int(name))
    return tuple(sorted(pids))


def links(runner: Runner, addresses: Mapping[str, str]) -> list[dict[str, Any]]:
    """Network interfaces that have an address or a device: [{interface, address, speed_mbps, mtu, medium}].

    speed_mbps is null where the kernel does not know it (virtio, WireGuard, a cable that is out);
    medium is wired, wireless, wireguard or virtual.
    """
    found = []
    for name in runner.listdir("/sys/class/net"):
        root = f"/sys/class/net/{name}"
        device = runner.exists(f"{root}/device")
        if name == "lo" or not (device or name in addresses):
            continue
        uevent = runner.read(f"{root}/uevent") or ""
        if runner.exists(f"{root}/wireless") or runner.exists(f"{root}/phy80211"):
            medium = "wireless"
        elif "DEVTYPE=wireguard" in uevent.splitlines():
            medium = "wireguard"
        else:
            medium = "wired" if device else "virtual"
        speed = _line(runner, f"{root}/speed") or ""
        mtu = _line(runner, f"{root}/mtu") or ""
        found.append(
            {
                "interface": name,
                "address": addresses.get(name),
                "speed_mbps": int(speed) if re.match(r"[1-9]\d{0,8}\Z", speed, re.ASCII) else None,
                "mtu": int(mtu) if re.match(r"[1-9]\d{0,8}\Z", mtu, re.ASCII) else None,
                "medium": medium,
            }
        )
    return found


def _line(runner: Runner, path: str) -> str | None:
    """First line of a small file, stripped; None when it is absent or empty."""
    text = (runner.read(path, 4096) or "").strip()
    return text.splitlines()[0].strip() if text else None
