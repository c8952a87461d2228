# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An instance of a worker as its operator wrote it -> the ggml-rpc-server that has to run.

Rules and their sources (llama.cpp b11434, measured): the bind address must be a dotted IPv4; the device list is always
given, so that a broken driver is an error and not a silent fall-back to the CPU with all its memory; there is no
``-m``; the thread default is half the hardware threads, so it is set to the physical cores.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import BACKENDS, parse_size, reserve_bytes
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._visible import seen_devices

_INSTANCE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_DEVICE_NAME = re.compile(r"[A-Za-z]+[0-9]*")
_KEYS = {
    "name", "port", "devices", "backend", "memory_limit", "env", "cluster", "numa_node", "threads",
    "priority", "min_units", "max_units",
}  # fmt: skip

DEFAULT_INSTANCES: list[dict[str, Any]] = [{"name": "default", "port": 50052}]

_BACKEND_ENVIRONMENT = {
    # CUDA numbers cards fastest first unless told; nvidia-smi and we number them by PCI bus.
    "cuda": {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    # Without it the free memory of an Intel GPU is reported as its total.
    "sycl": {"ZES_ENABLE_SYSMAN": "1"},
}


class WorkerError(FleetError):
    """A worker instance is not described in a way that can work."""


def checked_address(value: object, what: str) -> str:
    """``value`` as the dotted IPv4 address that ggml-rpc-server takes; else an error that names ``what``."""
    try:
        address = ipaddress.IPv4Address(str(value))
    except ValueError:
        raise WorkerError(
            f"{what}: {value!r} is no IPv4 address. ggml-rpc-server takes neither names nor IPv6; give a dotted address"
        ) from None
    if address.is_unspecified:
        raise WorkerError(f"{what}: {value} would listen on every interface; give the address of one interface")
    return str(address)


def checked_port(value: object, what: str) -> int:
    """``value`` as a TCP port, or an error that names ``what``."""
    if isinstance(value, bool) or not str(value).isdigit() or not 1 <= int(str(value)) <= 65535:
        raise WorkerError(f"{what}: port {value!r} is not a number from 1 to 65535")
    return int(str(value))


def checked_instances(instances: object, host: str) -> list[dict[str, Any]]:
    """The instances of ``host`` with checked names, ports, devices and keys, as new dicts in their order."""
    if not isinstance(instances, Sequence) or isinstance(instances, str) or not instances:
        raise WorkerError(f"{host}: llama_worker_instances must be a list with at least one instance")
    checked: list[dict[str, Any]] = []
    for position, entry in enumerate(instances):
        where = f"{host}: llama_worker_instances[{position}]"
        if not isinstance(entry, Mapping):
            raise WorkerError(f"{where} is {entry!r}, not a mapping with name and port")
        unknown = sorted(set(map(str, entry)) - _KEYS)
        if unknown:
            raise WorkerError(f"{where} has unknown keys {', '.join(unknown)}; known are {', '.join(sorted(_KEYS))}")
        name = "default" if entry.get("name") is None else str(entry["name"])
        if not _INSTANCE_NAME.fullmatch(name):
            raise WorkerError(f"{where}: name {name!r} must be 1 to 31 of a-z, 0-9 and '-'")
        if any(other["name"] == name for other in checked):
            raise WorkerError(f"{where}: the name {name!r} is taken by another instance of this host")
        port = checked_port(50052 if entry.get("port") is None else entry["port"], where)
        if any(other["port"] == port for other in checked):
            raise WorkerError(f"{where}: port {port} is taken by another instance of this host")
        _check_values(entry, where)
        checked.append({**entry, "name": name, "port": port})
    return checked


def _check_values(entry: Mapping[str, Any], where: str) -> None:
    """What an instance says beside its name and port, so far as it can be judged without its host."""
    devices = entry.get("devices") or []
    if isinstance(devices, (str, Mapping)) or not isinstance(devices, Sequence):
        raise WorkerError(f"{where}: devices is {devices!r}, not a list such as [CUDA0]")
    for device in devices:
        if not _DEVICE_NAME.fullmatch(str(device)):
            raise WorkerError(f"{where}: device {device!r} is no llama.cpp device name such as CUDA0, MTL0 or CPU")
    if entry.get("backend") not in (None, *BACKENDS):
        raise WorkerError(f"{where}: backend {entry['backend']!r} is not one of {', '.join(BACKENDS)}")
    for key, least in (("threads", 1), ("numa_node", 0), ("priority", 0), ("min_units", 0), ("max_units", 0)):
        value = entry.get(key)
        if value is not None and (isinstance(value, bool) or not str(value).isdigit() or int(value) < least):
            raise WorkerError(f"{where}: {key} is {value!r}, not a whole number of at least {least}")
    least_units, most_units = entry.get("min_units"), entry.get("max_units")
    if least_units is not None and most_units is not None and int(least_units) > int(most_units):
        raise WorkerError(f"{where}: min_units {entry['min_units']} is more than max_units {entry['max_units']}")
    environment = entry.get("env") or {}
    if not isinstance(environment, Mapping):
        raise WorkerError(f"{where}: env is {environment!r}, not a mapping of variables")
    for key, value in environment.items():
        if not _VARIABLE.fullmatch(str(key)) or _CONTROL.search(str(value)):
            raise WorkerError(f"{where}: env {key!r}: {value!r} can be no environment variable of a service")
    if entry.get("cluster") is not None and not _INSTANCE_NAME.fullmatch(str(entry["cluster"])):
        raise WorkerError(f"{where}: cluster {entry['cluster']!r} must be 1 to 31 of a-z, 0-9 and '-'")
    if entry.get("memory_limit") is not None:
        try:
            parse_size(entry["memory_limit"], 1 << 60, "memory_limit")
        except FleetError as error:
            raise WorkerError(f"{where}: {error}") from None


def instance_devices(instance: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """llama.cpp names of the devices that ``instance`` lends: as written, else all of its backend, else the CPU."""
    if instance.get("devices"):
        return [str(name) for name in instance["devices"]]
    backend = instance.get("backend") or facts.get("backend") or "cpu"
    names = [name for name, device in _seen(instance, facts).items() if device.get("backend") == backend]
    if not names:
        raise WorkerError(
            f"instance {instance.get('name')}: no device of backend {backend} was detected on this host, or its env "
            "hides them all; set its devices, backend or env in llama_worker_instances"
        )
    return names


def _seen(instance: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return seen_devices(facts.get("devices", []), instance.get("env") or {})


def service_name(kind: str, cluster: str, name: str = "") -> str:
    """Name of a service of ours: llama-rpc-<cluster>-<instance> or llama-server-<cluster>."""
    return "-".join(part for part in (kind, cluster, name) if part)


def memory_max(instance: Mapping[str, Any], devices: Sequence[str], facts: Mapping[str, Any]) -> int | None:
    """Bytes after which the kernel ends this worker rather than something else of its host; None with a GPU.

    What may be lent (the capacity less its reserve, or memory_limit) and an eighth of it, 64 MiB at least, for the
    program and the largest tensor in transit, which it holds twice (b11434: set_tensor receives it whole). Half of the
    reserve is never given. Capacities only and no readings, in steps of 16 MiB: a unit is not rewritten, and its worker
    not restarted, because something else took memory or a new kernel counts a little differently. The memory of a
    driver is not counted by the kernel's limit, so that a GPU's worker has none.
    """
    memory = facts.get("memory") or {}
    sizes = [int(memory[key]) for key in ("total", "limit") if memory.get(key)]
    if set(devices) != {"CPU"} or not sizes:
        return None
    capacity = min(sizes)
    reserve = reserve_bytes("system_ram", capacity)
    lent = capacity - reserve
    limit = instance.get("memory_limit")
    if limit is not None:
        lent = min(lent, parse_size(limit, lent, f"instance {instance.get('name')}: memory_limit"))
    most = min(lent + max(64 << 20, lent // 8), capacity - reserve // 2)
    return most - most % (16 << 20)


def worker_service(
    instance: Mapping[str, Any],
    facts: Mapping[str, Any],
    build: Mapping[str, Any],
    cluster: str,
    address: str,
    user: str,
    directory: str,
    builds: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Options of the managed_service module for one instance.

    ``facts`` are those of host_facts, ``build`` that of the llama_build role (bin_dir, worker_binary), ``builds`` those
    beside it by backend (a box with cards of two makers has an instance and a build for each), ``directory``
    the state directory of the host: the service may write to its ``run`` below it, its log lies beside that, out of
    its reach.
    """
    devices = instance_devices(instance, facts)
    backend = str(instance.get("backend") or _backend_of(devices, instance, facts))
    build = (builds or {}).get(backend, build)
    run = directory + "/run"
    port = int(instance["port"])
    # The versioned directory and not the link to the current one: a new build then is a new definition, and a restart.
    argv = [f"{build['bin_dir']}/{build['worker_binary']}", "-H", address, "-p", str(port), "-d", ",".join(devices)]
    if "CPU" in devices:
        argv += ["-t", str(instance.get("threads") or facts.get("cpu", {}).get("physical_cores") or 1)]
    environment = {
        "GGML_NO_BACKTRACE": "1",  # an abort in 0.04 s instead of 0.6 s under a debugger
        "GGML_RPC_NO_RDMA": "1",  # verbs would bypass tunnel and firewall
        "HOME": run,
        "LLAMA_CACHE": run + "/cache",
        **_BACKEND_ENVIRONMENT.get(backend, {}),
        **_device_environment(devices, instance, facts),
        **{str(key): str(value) for key, value in (instance.get("env") or {}).items()},
    }
    name = service_name("llama-rpc", cluster, str(instance["name"]))
    return {
        "name": name,
        "description": f"llama.cpp RPC worker {instance['name']} of cluster {cluster}",
        "argv": argv,
        "environment": environment,
        "user": user,
        "working_directory": run,
        "writable_paths": [run],
        "log_path": f"{directory}/{name}.log",
        "memory_max": memory_max(instance, devices, facts),
        "backend": backend,
    }


def _device_environment(
    devices: Sequence[str], instance: Mapping[str, Any], facts: Mapping[str, Any]
) -> dict[str, str]:
    """What a process needs to see these devices under these names, as host_facts found out (WSL libraries, say)."""
    found: dict[str, str] = {}
    for name, device in _seen(instance, facts).items():
        if name in devices:
            found.update(device.get("environment") or {})
    return found


def worker_instances(
    instances: object,
    host: str,
    facts: Mapping[str, Any] | None,
    build: Mapping[str, Any] | None,
    cluster: str,
    address: str,
    directory: str,
    user: str = "",
    builds: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Each checked instance of ``host`` with its cluster, endpoint, devices, backend and ``service`` (worker_service).

    Without ``facts`` or ``build`` only what the inventory alone tells: of the service its name, as for a removal.
    """
    listen = checked_address(address, f"{host}: llama_worker_address")
    found: list[dict[str, Any]] = []
    for instance in checked_instances(instances, host):
        serves = str(instance.get("cluster") or cluster)
        known = {**instance, "cluster": serves, "endpoint": f"{listen}:{instance['port']}"}
        if not facts or not build:
            name = service_name("llama-rpc", serves, str(instance["name"]))
            found.append({**known, "service": {"name": name}})
            continue
        devices = instance_devices(instance, facts)
        found.append(
            {
                **known,
                "devices": devices,
                "backend": str(instance.get("backend") or _backend_of(devices, instance, facts)),
                "service": worker_service(instance, facts, build, serves, listen, user, directory, builds),
            }
        )
    return found


def _backend_of(devices: Sequence[str], instance: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    backends = {name: str(device["backend"]) for name, device in _seen(instance, facts).items()}
    found = {backends.get(name, "cpu" if name == "CPU" else "unknown") for name in devices}
    if len(found) > 1:
        raise WorkerError(
            f"devices {', '.join(devices)} belong to several backends ({', '.join(sorted(found))}); "
            "make one instance for each"
        )
    return found.pop()
