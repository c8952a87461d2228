# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Puts one host's facts together: identity, processor, memory, devices, the backend to build for, and its links.

Makers' tools run side by side and end by one deadline, so that a hanging one costs no more than the time-out.
"""

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
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._backends import (
    HostError,
    candidates,
    choose,
    flags_of,
    one_each,
    several_builds,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_amd import detect_amd
from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_apple import mac_traits, metal_finding
from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_cpu import (
    Cpu,
    Memory,
    anonymous_bytes,
    cpu_device,
    detect_cpu,
    detect_memory,
    memory_control_off,
    numa_note,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_intel import detect_intel
from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_nvidia import detect_nvidia
from ansible_collections.llamafleet.rpc.plugins.module_utils._detect_vulkan import vulkan_finding
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import Finding, Host
from ansible_collections.llamafleet.rpc.plugins.module_utils._mac import MacTools, ask_mac
from ansible_collections.llamafleet.rpc.plugins.module_utils._pci import drm_held, pci_ids
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import DeadlineRunner, Runner
from ansible_collections.llamafleet.rpc.plugins.module_utils._toolchains import (
    Compilers,
    Site,
    class_id,
    family,
    find_compilers,
    problems_of,
)

__all__ = [
    "HostError",
    "Identity",
    "Own",
    "collect",
    "host_traits",
    "identify",
    "init_system",
    "links",
    "own_processes",
]


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
    if platform.system() == "Darwin":
        # Libraries and the Metal compiler go with the major release, so binaries do, too.
        return "macos" + platform.mac_ver()[0].partition(".")[0]
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        text = None
    return (text or "musl").replace(" ", "")


def _addresses() -> dict[str, str]:
    """IPv4 address of each interface (SIOCGIFADDR of Linux): no `ip` program and no psutil needed."""
    found: dict[str, str] = {}
    if platform.system() != "Linux":
        return found  # ifconfig tells there
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _index, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, 0x8915, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an address
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


@dataclass(frozen=True)
class _Parts:
    """What differs between systems, ready to be put together."""

    machine_id: str
    boot_id: str | None
    init: str
    traits: tuple[str, ...]
    cpu: Cpu
    memory: Memory
    findings: tuple[Finding, ...]
    links: tuple[Mapping[str, Any], ...]
    warnings: tuple[str, ...]
    family: str | None
    arch: str


def collect(
    runner: Runner, identity: Identity, backend: str = "auto", own: Own | None = None, timeout: float = 30.0
) -> Host:
    """All facts of this host. HostError when it is neither Linux nor a Mac, or does not have the `backend` asked for.

    All programs together take `timeout` seconds at most.
    """
    bounded = DeadlineRunner(runner, timeout)
    if identity.system == "Linux":
        parts = _linux(bounded, identity, own or Own(), timeout)
    elif identity.system == "Darwin":
        parts = _darwin(ask_mac(bounded, timeout), identity, own or Own())
    else:
        raise HostError(
            f"{identity.hostname}: {identity.system} is not detected, only Linux and macOS are; "
            "describe this machine's devices in llama_worker_devices_declared"
        )
    chosen = choose(parts.findings, backend, identity.hostname)
    compilers = Compilers()
    if any(finding.backend == "cuda" and finding.devices and finding.toolkit for finding in parts.findings):
        compilers = find_compilers(bounded, timeout)
    site = Site(identity.system, parts.arch, identity.libc, parts.cpu.isa, parts.family, compilers)
    devices, same = one_each(parts.findings, chosen)
    warnings = [*parts.warnings, *parts.memory.warnings]
    for finding in parts.findings:
        warnings.extend(finding.warnings)
    for device in devices:
        warnings.extend(device.warnings)
    warnings.extend(problems_of(chosen, compilers))
    if chosen.backend == "cpu" and backend == "auto" and any(finding.seen for finding in parts.findings):
        # A card that stays idle is no secret: why each backend cannot have it.
        warnings.extend(f.note for f in parts.findings if f.note and (f.seen or f.backend == "vulkan"))
    advice = several_builds(parts.findings)
    return Host(
        machine_id=parts.machine_id,
        boot_id=parts.boot_id,
        collected_at=identity.collected_at,
        system=identity.system,
        arch=parts.arch,
        init=parts.init,
        traits=parts.traits,
        cpu=parts.cpu.to_dict(),
        memory=parts.memory.to_dict(),
        devices=devices,
        backend=chosen.backend,
        candidates=candidates(parts.findings, chosen, same, site),
        class_id=class_id(site.system, site.arch, site.libc, chosen, site.isa),
        cmake_flags=flags_of(chosen, site),
        links=parts.links,
        user=identity.user,
        psutil=identity.psutil,
        warnings=tuple(dict.fromkeys([*warnings, advice] if advice else warnings)),
    )


def _linux(runner: Runner, identity: Identity, own: Own, timeout: float) -> _Parts:
    machine_id, warnings = machine_identity(runner, identity)
    traits = host_traits(runner)
    pids = own_processes(runner, own)
    ids = pci_ids(runner)
    # What a driver took from the RAM for our services is in no process's own memory, but comes back with its end.
    borrowed = sum(held.ram for held in drm_held(runner, pids).values()) if ids and pids else 0
    held = anonymous_bytes(runner, pids) + borrowed
    memory = detect_memory(runner, held, identity.physical_bytes, "lxc" in traits)
    cpu = detect_cpu(runner, identity.arch)
    vulkaninfo = runner.which("vulkaninfo") if ids or runner.exists("/dev/dri") else None
    with ThreadPoolExecutor(max_workers=4) as pool:
        jobs = (
            pool.submit(detect_nvidia, runner, machine_id, memory, traits, pids, timeout),
            pool.submit(detect_amd, runner, machine_id, memory, pids, timeout),
            pool.submit(detect_intel, runner, machine_id, memory, pids, timeout),
        )
        vulkan_job = pool.submit(runner.run, [vulkaninfo], timeout) if vulkaninfo else None
        findings = [job.result() for job in jobs]
    known = [device for finding in findings for device in (finding.seen or finding.devices)]
    findings.append(
        vulkan_finding(
            vulkan_job.result() if vulkan_job else None,
            known,
            ids,
            machine_id,
            memory,
            glslc=bool(ids) and runner.which("glslc") is not None,
        )
    )
    findings.append(Finding("cpu", (cpu_device(cpu, memory, machine_id),), note=numa_note(cpu)))
    if memory_control_off(runner):
        warnings.append(
            "the kernel ignores memory limits of services (cgroup_disable=memory); append cgroup_enable=memory "
            "cgroup_memory=1 to the one line of /boot/firmware/cmdline.txt and reboot"
        )
    if "wsl" in traits:
        warnings.append(
            "WSL2: workers are reached from other machines only with mirrored networking, and RAM is what .wslconfig "
            "gives (half of the PC's by default)"
        )
    return _Parts(
        machine_id=machine_id,
        boot_id=_line(runner, "/proc/sys/kernel/random/boot_id"),
        init=init_system(runner),
        traits=traits,
        cpu=cpu,
        memory=memory,
        findings=tuple(findings),
        links=tuple(links(runner, identity.addresses)),
        warnings=tuple(warnings),
        family=family("Linux", runner.read("/etc/os-release") or ""),
        arch=identity.arch,
    )


def _darwin(tools: MacTools, identity: Identity, own: Own) -> _Parts:
    mac = tools.mac
    machine_id, warnings = tools.machine_id, list(tools.warnings)
    if machine_id is None:
        machine_id = hashlib.sha256(identity.hostname.encode()).hexdigest()[:32]
        warnings.append("ioreg does not tell the machine's identity: it is made of the host name")
    held = tools.own_bytes(own.pids, own.prefixes)
    memory = tools.memory(held)
    arch = "arm64" if mac.values.get("hw.optional.arm64") == "1" else identity.arch
    cpu = tools.cpu(arch)
    return _Parts(
        machine_id=machine_id,
        boot_id=mac.values.get("kern.bootsessionuuid"),
        init="launchd",
        traits=mac_traits(mac.values),
        cpu=cpu,
        memory=memory,
        findings=(
            metal_finding(mac, arch, machine_id, held),
            Finding("cpu", (cpu_device(cpu, memory, machine_id, "sysctl, vm_stat"),)),
        ),
        links=tuple(tools.links),
        warnings=tuple(warnings),
        family="darwin",
        arch=arch,
    )


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
