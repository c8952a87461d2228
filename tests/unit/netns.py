# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hosts made of network namespaces on a bridge of their own, for tests of the mesh and the packet filter. Needs root.

The root namespace gets nothing: no address, no route, no rule. Everything is called lfm-<number>-<name>, and taken away
at the end together with the processes that still run in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("ip", "ping", "wg", "wg-quick", "wireguard-go", "nft")
COLLECTIONS = Path(__file__).resolve().parents[2] / ".collections"

# Without pytest, which takes longer to load than the module takes to run.
_RUN_MODULE = """
import contextlib, io, json, sys
from importlib import import_module
from ansible.module_utils.testing import patch_module_args
module = import_module("ansible_collections.llamafleet.rpc.plugins.modules." + sys.argv[1])
output = io.StringIO()
with patch_module_args(json.load(sys.stdin)):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(output):
        module.main()
print(json.dumps({"failed": False, **json.loads(output.getvalue())}))
"""


def call(
    argv: Sequence[object], check: bool = True, timeout: float = 60.0, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command with `text` as its input; its output is text."""
    words = [str(word) for word in argv]
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, input=text, check=False)
    assert not check or done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@dataclass
class Host:
    """One namespace. ``interface`` is the name of its mesh interface, which all of one machine share the names of."""

    name: str
    namespace: str
    address: str
    interface: str
    directory: Path

    def argv(self, *argv: object) -> list[str]:
        """A command as it is run on this host, for Popen."""
        return ["ip", "netns", "exec", self.namespace, *map(str, argv)]

    def run(self, *argv: object, check: bool = True, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command on this host."""
        return call(self.argv(*argv), check, text=text)

    def python(self, code: str, *argv: object, check: bool = True, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run Python code on this host."""
        environment = f"PYTHONPATH={COLLECTIONS}"
        return self.run("env", environment, sys.executable, "-c", code, *argv, check=check, text=text)

    def module(self, module_name: str, /, check_mode: bool = False, **options: Any) -> dict[str, Any]:
        """What a module of the collection answers on this host."""
        options = dict(options, _ansible_check_mode=check_mode, _ansible_diff=True)
        output = self.python(_RUN_MODULE, module_name, text=json.dumps(options)).stdout
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
        return result

    @contextlib.contextmanager
    def listener(self, port: int, address: str = "0.0.0.0") -> Iterator[None]:
        """Something that accepts connections on a TCP port of this host and sends a byte to each."""
        code = (
            "import socket, sys\n"
            "s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
            "s.bind((sys.argv[1], int(sys.argv[2]))); s.listen(8); print('ready', flush=True)\n"
            "held = []\n"
            "while True:\n    c, _ = s.accept(); c.sendall(b'x'); held.append(c)\n"
        )
        argv = self.argv(sys.executable, "-c", code, address, port)
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
                yield
            finally:
                process.kill()

    def connects(self, address: str, port: int, source: str = "") -> str:
        """open, refused or timeout: what a connection attempt from this host, and from this address of it, meets."""
        code = (
            "import socket, sys\n"
            "try:\n"
            "    c = socket.create_connection((sys.argv[1], int(sys.argv[2])), 1.5, (sys.argv[3], 0))\n"
            "    print('open' if c.recv(1) == b'x' else 'closed')\n"
            "except ConnectionRefusedError:\n    print('refused')\n"
            "except OSError:\n    print('timeout')\n"
        )
        return self.python(code, address, port, source).stdout.strip()


@dataclass
class Lab:
    """Hosts on one bridge."""

    mark: str
    directory: Path
    hosts: dict[str, Host] = field(default_factory=dict)

    @property
    def core(self) -> str:
        """The namespace of the bridge."""
        return f"lfm-{self.mark}-core"

    def add(self, name: str, mtu: int = 1500, address: str = "") -> Host:
        """One more host."""
        number = len(self.hosts) + 11
        host = Host(
            name=name,
            namespace=f"lfm-{self.mark}-{name}",
            address=address or f"198.18.1.{number}",
            interface=f"lfm{self.mark}{name}",
            directory=self.directory / name,
        )
        host.directory.mkdir(mode=0o700)
        self.hosts[name] = host
        call(["ip", "netns", "add", host.namespace])
        port = f"p{number}"
        call(
            [
                "ip",
                "-n",
                self.core,
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                host.namespace,
            ]
        )
        call(["ip", "-n", self.core, "link", "set", port, "master", "br0", "mtu", mtu, "up"])
        call(["ip", "-n", host.namespace, "link", "set", "lo", "up"])
        call(["ip", "-n", host.namespace, "link", "set", "eth0", "mtu", mtu, "up"])
        call(["ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0"])
        return host


@contextlib.contextmanager
def lab(directory: Path) -> Iterator[Lab]:
    """A bridge without hosts; at the end, whatever happened, nothing of it is left."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if os.geteuid() != 0 or lacking:
        pytest.fail(
            f"these tests need root and {', '.join(PROGRAMS)} (lacking: {', '.join(lacking) or 'root'}): install "
            "iproute2 iputils-ping wireguard-tools wireguard-go nftables, or deselect them with -m 'not real'",
            pytrace=False,
        )
    made = Lab(mark=str(random.randint(1000, 9999)), directory=directory)
    try:
        call(["ip", "netns", "add", made.core])
        call(["ip", "-n", made.core, "link", "add", "br0", "type", "bridge"])
        call(["ip", "-n", made.core, "link", "set", "br0", "mtu", 9000, "up"], check=False)
        yield made
    finally:
        _take_down(made)


def _take_down(made: Lab) -> None:
    names = [host.namespace for host in made.hosts.values()] + [made.core]
    for sign in (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL):
        for name in names:
            for pid in call(["ip", "netns", "pids", name], check=False).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), sign)
        time.sleep(0.1)
    for name in names:
        call(["ip", "netns", "del", name], check=False)
    for host in made.hosts.values():
        Path(f"/var/run/wireguard/{host.interface}.sock").unlink(missing_ok=True)


def wait_until(what: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)
