# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A service in words -> the text that a service manager reads.

All escaping lives here, one function per manager; each is tested by reading its text back the way the manager does
(law 16 of the design). Sources: systemd.unit(5), systemd.service(5), systemd.syntax(7) of systemd 252; Supervisor 4.3
configuration file reference and its parser (values are expanded with Python's % operator, the command is split by
shlex, and " ;" or " #" starts a comment).
"""

from __future__ import annotations

import plistlib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from xml.parsers.expat import ExpatError

from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import BACKENDS
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError

#: One constant line, without time or host name, so that two runs give the same bytes.
MANAGED = "Managed by the llamafleet.rpc Ansible collection; changes made here are overwritten."

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


#: Device nodes, or classes of them, that a backend opens. systemd ignores a name that does not exist on a host.
_DEVICE_ALLOW = {
    "cuda": ("char-nvidia*", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/dxg"),
    "rocm": ("char-drm", "char-kfd", "/dev/kfd"),
    "vulkan": ("char-drm",),
    "sycl": ("char-drm",),
}
#: The same as paths, to see which groups may open them.
DEVICE_NODES = {
    "cuda": ("/dev/nvidia*", "/dev/dxg"),
    "rocm": ("/dev/kfd", "/dev/dri/renderD*"),
    "vulkan": ("/dev/dri/renderD*",),
    "sycl": ("/dev/dri/renderD*",),
}


class UnitError(FleetError):
    """A service cannot be written down for its manager."""


@dataclass(frozen=True)
class Service:
    """What is to run, apart from how a manager spells it.

    ``memory_max`` is in bytes. ``backend`` picks the sandbox of system scope: ``cpu`` hides all device nodes, one of a
    GPU leaves the nodes of that backend, none (``""``) is no sandbox.
    """

    name: str
    description: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    groups: tuple[str, ...] = ()
    working_directory: str = "/"
    writable_paths: tuple[str, ...] = ()
    log_path: str = ""
    memory_max: int | None = None
    backend: str = ""
    after: tuple[str, ...] = ()
    stop_timeout: int = 20

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UnitError(
                f"service name {self.name!r}: only letters, digits, '_', '.' and '-' are allowed (at most 200)"
            )
        if not self.argv or not self.argv[0].startswith("/"):
            raise UnitError(f"service {self.name}: the program must be an absolute path, not {list(self.argv)[:1]!r}")
        for what, value in _texts(self):
            if re.search(r"[\x00-\x1f\x7f]", value):
                raise UnitError(f"service {self.name}: {what} {value!r} holds a control character; remove it")
        for key in self.environment:
            if not _VARIABLE.fullmatch(key):
                raise UnitError(f"service {self.name}: {key!r} is no name of an environment variable")
        if self.backend not in ("", *BACKENDS):
            raise UnitError(f"service {self.name}: backend {self.backend!r} is not one of {', '.join(BACKENDS)}")


def _texts(service: Service) -> list[tuple[str, str]]:
    texts = [("argument", value) for value in service.argv]
    texts += [("environment value", value) for value in service.environment.values()]
    texts += [("description", service.description), ("user", service.user), ("log path", service.log_path)]
    texts += [("working directory", service.working_directory)]
    texts += [("writable path", value) for value in service.writable_paths]
    return texts


# --------------------------------------------------------------------------------------------------- systemd


def _systemd_quote(value: str, expands_variables: bool) -> str:
    """One word of a systemd setting: specifiers (%) and, in Exec lines, variables ($) are made literal."""
    value = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    if expands_variables:
        value = value.replace("$", "$$")
    return f'"{value}"'


#: Sandbox of every system unit; systemd-analyze security (252, offline) gives at most 2.0 with the gpu lines and 1.5
#: with the cpu lines.
_SANDBOX = (
    "UMask=0077",
    "NoNewPrivileges=yes",
    "CapabilityBoundingSet=",
    "AmbientCapabilities=",
    "PrivateTmp=yes",
    "PrivateMounts=yes",
    "ProtectSystem=strict",
    "ProtectHome=yes",
    "ProtectClock=yes",
    "ProtectHostname=yes",
    "ProtectControlGroups=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
    "ProtectProc=invisible",
    "LockPersonality=yes",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service",
    "SystemCallFilter=~@privileged @resources",
    "RemoveIPC=yes",
)
_CPU_SANDBOX = (
    "PrivateDevices=yes",
    "PrivateUsers=yes",
    "MemoryDenyWriteExecute=yes",
    "RestrictAddressFamilies=AF_INET AF_UNIX",
)
_GPU_SANDBOX = ("DevicePolicy=closed", "RestrictAddressFamilies=AF_INET AF_UNIX AF_NETLINK")


def systemd_unit(service: Service, scope: str, rising: bool = False) -> str:
    """The unit file of ``service``; ``scope`` is system or user. ``rising``: this systemd (254 and later) knows pauses
    that grow, from 2 to 60 s, where a service ends again and again.

    Restart=always without a start limit and with SIGPIPE ignored (systemd's default, written out): a worker ends with
    status 0 on nearly every failure, and dies of SIGPIPE after a probe that gave up (facts measured on b11434).
    """
    system = scope == "system"
    unit = [f"# {MANAGED}", "[Unit]", f"Description={service.description.replace('%', '%%')}"]
    after = list(service.after) + (["network-online.target"] if system else [])
    if after:
        unit += [f"After={' '.join(after)}", f"Wants={' '.join(after)}"]
    unit += ["StartLimitIntervalSec=0", "", "[Service]", "Type=exec"]
    unit.append("ExecStart=" + " ".join(_systemd_quote(word, True) for word in service.argv))
    unit.append("WorkingDirectory=" + service.working_directory.replace("%", "%%"))
    for key in sorted(service.environment):
        unit.append("Environment=" + _systemd_quote(f"{key}={service.environment[key]}", False))
    if service.user and system:
        unit.append(f"User={service.user}")
    if service.groups and system:
        unit.append(f"SupplementaryGroups={' '.join(service.groups)}")
    unit += ["Restart=always", "RestartSec=2"] + (["RestartSteps=6", "RestartMaxDelaySec=60"] if rising else [])
    unit += ["IgnoreSIGPIPE=yes", "KillMode=control-group"]
    unit += [f"TimeoutStopSec={service.stop_timeout}", "LimitNOFILE=65536", "OOMScoreAdjust=500"]
    if service.memory_max is not None:
        unit.append(f"MemoryMax={service.memory_max}")
    if system and service.backend:
        unit += _SANDBOX
        unit += _CPU_SANDBOX if service.backend == "cpu" else _GPU_SANDBOX
        unit += [f"DeviceAllow={line} rw" for line in _DEVICE_ALLOW.get(service.backend, ())]
        unit += ["ReadWritePaths=" + _systemd_quote(path, False) for path in service.writable_paths]
    unit += ["", "[Install]", f"WantedBy={'multi-user.target' if system else 'default.target'}", ""]
    return "\n".join(unit)


# ------------------------------------------------------------------------------------------------ supervisor


def _supervisor_word(value: str) -> str:
    """One word of a command: quoted for shlex, and with no blank before ; or # (that would start a comment)."""
    quoted = re.sub(r"([ \t])(?=[;#])", r"\1''", shlex.quote(value))
    return quoted.replace("%", "%%")


def supervisor_program(service: Service) -> str:
    """The program section of ``service``. startsecs=0 with autorestart=true never parks a program that ends with 0.

    The environment goes through env(1) in the command: Supervisor's own ``environment`` setting cannot hold both kinds
    of quotes, and two ways of escaping are one too many.
    """
    words = ["/usr/bin/env"] + [f"{key}={service.environment[key]}" for key in sorted(service.environment)]
    lines = [
        f"; {MANAGED}",
        f"[program:{service.name}]",
        "command=" + " ".join(_supervisor_word(word) for word in [*words, *service.argv]),
        "directory=" + service.working_directory.replace("%", "%%"),
        "autostart=true",
        "autorestart=true",
        "startsecs=0",
        "startretries=1000000",
        "stopasgroup=true",
        "killasgroup=true",
        f"stopwaitsecs={service.stop_timeout}",
        "redirect_stderr=true",
        # Supervisor 4.3 expands this one twice.
        "stdout_logfile=" + (service.log_path.replace("%", "%%%%") or "NONE"),
        "stdout_logfile_maxbytes=20MB",
        "stdout_logfile_backups=1",
    ]
    if service.user:
        lines.append(f"user={service.user}")
    return "\n".join([*lines, ""])


def supervisor_main(directory: str) -> str:
    """The configuration of a supervisor of our own below ``directory``; reached by a socket for its account alone."""
    if len(directory) > 85:  # sun_path holds 108 bytes, and supervisor binds a longer temporary name first
        raise UnitError(
            f"supervisor directory {directory!r} is longer than 85 characters, too long for its socket; "
            "choose a shorter llama_fleet_prefix"
        )
    escaped = directory.replace("%", "%%")
    return f"""; {MANAGED}
[supervisord]
logfile={escaped}/supervisord.log
pidfile={escaped}/supervisord.pid
childlogdir={escaped}
nodaemon=false
umask=022

[unix_http_server]
file={escaped}/s.sock
chmod=0700

[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface

[supervisorctl]
serverurl=unix://{escaped}/s.sock

[include]
files={escaped}/conf.d/*.conf
"""


# --------------------------------------------------------------------------------------------------- launchd

#: Runs what follows with SIGPIPE ignored, which launchd itself cannot be told: an ignored signal stays so over exec.
IGNORE_SIGPIPE = ("/bin/sh", "-c", 'trap "" PIPE; exec "$@"', "sh")


def launchd_label(name: str) -> str:
    """The label of the job of a service of ours; the file of the job is called like it."""
    return f"llamafleet.{name}"


def launchd_plist(service: Service) -> bytes:
    """The property list of ``service`` as a daemon (launchd.plist(5)); equal services give equal bytes.

    KeepAlive without conditions, for a worker ends with status 0 on nearly every failure (measured on b11434).
    ProcessType Interactive: Background costs a Metal worker 8 of 9 parts of its speed, and nothing at all some of it
    (facts: 11 against 87 tokens/s on an M4 Max). HOME, for launchd gives a daemon none.
    """
    job: dict[str, object] = {
        "Label": launchd_label(service.name),
        "ProgramArguments": [*IGNORE_SIGPIPE, *service.argv],
        "EnvironmentVariables": {"HOME": service.working_directory, **service.environment},
        "WorkingDirectory": service.working_directory,
        "RunAtLoad": True,
        "KeepAlive": True,
        "ProcessType": "Interactive",
        "ThrottleInterval": 10,
        "ExitTimeOut": service.stop_timeout,
        "SoftResourceLimits": {"NumberOfFiles": 4096},  # 256 by default
    }
    if service.user:
        job["UserName"] = service.user
    if service.groups:
        job["GroupName"] = service.groups[0]
    if service.log_path:
        job["StandardOutPath"] = job["StandardErrorPath"] = service.log_path
    return launchd_bytes(job)


def launchd_bytes(job: Mapping[str, object]) -> bytes:
    """The property list of any job, keys in one order. UnitError for what XML or launchd cannot hold."""
    try:
        data = plistlib.dumps(dict(job), sort_keys=True)
        same = plistlib.loads(data) == job
    except (TypeError, ValueError, OverflowError, ExpatError) as error:
        raise UnitError(f"job {job.get('Label')}: it cannot be written as a property list: {error}") from error
    if not same:
        raise UnitError(f"job {job.get('Label')}: it holds a text that a property list does not keep; remove it")
    return data
