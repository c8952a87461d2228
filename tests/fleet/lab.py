# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the tests of the collection on real hosts share: a fleet with llama.cpp on it, inventories, plays, prompts."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.llamafleet.rpc.tests.fleet import seeding
from ansible_collections.llamafleet.rpc.tests.fleet.harness import common, state

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FLEET = HERE / "fleet"
PLAYBOOK = Path(sys.executable).with_name("ansible-playbook")
WORKERS = ("w1", "w2", "w3")
PORT = 18711
MESH_PORT = 51820
HOSTS = ("p1:mem=1G", "w1:mem=512M", "w2:mem=512M", "w3:mem=512M,image=trixie", "x1:role=outsider")


def fleet(*words: object, ok: bool = True, text: str = "", seconds: float = 120) -> str:
    """What a verb of the harness prints; with ``ok=False`` it must fail, and what it complains about is returned."""
    argv = [str(word) for word in (FLEET, *words)]
    done = subprocess.run(argv, check=False, input=text, capture_output=True, text=True, timeout=seconds)
    assert (done.returncode == 0) is ok, f"{shlex.join(argv)}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout if ok else done.stdout + done.stderr


def sh(host: str, script: str, ok: bool = True) -> str:
    """What a shell script prints, as root in a host."""
    return fleet("exec", host, "sh", "-c", script, ok=ok)


def address(host: str) -> str:
    return state.load().host(host).address


@contextmanager
def hosts(seed: Path, wanted: Sequence[str] = HOSTS) -> Iterator[None]:
    """Hosts (the four and an outsider) without a way out, with the build and the model that the tests share."""
    prefix = os.environ.get("LLAMAFLEET_TEST_PREFIX", "")
    assert prefix, "LLAMAFLEET_TEST_PREFIX must name a prefix with builds/ and models/ (`make fleet` sets it)"
    seed.mkdir(parents=True, exist_ok=True)
    fleet("down")
    images = {re.sub(r".*image=([a-z]+).*|.*", r"\1", host) or "bookworm" for host in wanted}
    fleet("build", *sorted(images), seconds=1200)  # once; most of it is fetching packages
    fleet("up", *wanted, "--bind-ro", f"{seed}:/seed")
    try:
        members = [host.partition(":")[0] for host in wanted if "role=outsider" not in host]
        libraries = {host: sh(host, "getconf GNU_LIBC_VERSION").split()[1] for host in members}
        seeding.prepare(Path(prefix), seed, set(libraries.values()))
        for host in members:
            what = "builds models" if host.startswith("p") else "builds"
            sh(host, f"mkdir -p /opt/llamafleet && cd /seed/{libraries[host]} && cp -a {what} /opt/llamafleet/")
        yield
    finally:
        fleet("down")


class Inventory:
    """The inventory that the harness wrote, with the group variables of these tests, in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True)
        (directory / "group_vars").symlink_to(HERE / "inventory/group_vars")
        self.change()

    def change(
        self,
        without: Sequence[str] = (),
        hosts: Mapping[str, Any] | None = None,
        fleet: Mapping[str, Any] | None = None,
    ) -> Inventory:
        """The inventory anew: without some hosts, with variables of hosts or of all."""
        data = json.loads(common.INVENTORY.read_text())
        groups = data["all"]["children"]["llama_fleet"]["children"]
        for group in groups.values():
            for name in without:
                group["hosts"].pop(name, None)
            for name, variables in (hosts or {}).items():
                if name in group["hosts"]:
                    group["hosts"][name].update(variables)
        data["all"]["vars"].update(fleet or {})
        (self.directory / "hosts.json").write_text(json.dumps(data, indent=1))
        return self


@dataclass(frozen=True)
class Run:
    """A run of a playbook."""

    rc: int
    output: str
    seconds: float

    @property
    def changed(self) -> dict[str, int]:
        """Changed tasks by host, out of the recap."""
        return {host: int(count) for host, count in re.findall(r"^(\S+)\s+: ok=\d+\s+changed=(\d+)", self.output, re.M)}

    @property
    def tasks(self) -> dict[str, int]:
        """Tasks that ran, by host."""
        return {host: int(count) for host, count in re.findall(r"^(\S+)\s+: ok=(\d+)", self.output, re.M)}

    def task(self, name: str) -> str:
        """The part of the output that belongs to the tasks of a name."""
        parts = re.split(r"^(?=TASK \[|PLAY )", self.output, flags=re.M)
        return "".join(part for part in parts if part.startswith("TASK") and name in part.splitlines()[0])

    @property
    def flat(self) -> str:
        """The output with single blanks: messages are folded in it."""
        return re.sub(r"\s+", " ", self.output)


def environment() -> dict[str, str]:
    """That of a contributor in the checkout: its ansible.cfg, and the collection that it is."""
    return {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_TIMEOUT": "60",  # to log in, on a machine that has other work
        "COLUMNS": "160",
    }


def command(inventory: Inventory, playbook: str, *arguments: str) -> list[str]:
    argv = (FLEET, "in", PLAYBOOK, "-i", inventory.directory, ROOT / "playbooks" / f"{playbook}.yml", *arguments)
    return [str(word) for word in argv]


def play(inventory: Inventory, playbook: str, *arguments: str, ok: bool = True, seconds: float = 400) -> Run:
    """A playbook, run beside the switch of the lab as a person would run it."""
    started = time.monotonic()
    done = subprocess.run(
        command(inventory, playbook, *arguments),
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        env=environment(),
    )
    run = Run(done.returncode, done.stdout, time.monotonic() - started)
    assert (run.rc == 0) is ok, f"{playbook} {shlex.join(arguments)}: {run.rc}\n{run.output[-12000:]}"
    assert "Traceback (most recent call last)" not in run.output, run.output[-12000:]
    return run


#: A prompt by the primary itself: number of tokens, seconds, and perhaps the file of the API key.
ASK = """
import json, os, sys, urllib.request
body = json.dumps({"prompt": "The capital of France is", "max_tokens": int(sys.argv[1]), "temperature": 0})
request = urllib.request.Request("http://127.0.0.1:8080/v1/completions", body.encode())
request.add_header("Content-Type", "application/json")
if len(sys.argv) > 3 and os.path.exists(sys.argv[3]):
    request.add_header("Authorization", "Bearer " + open(sys.argv[3]).readline().strip())
print(json.dumps(json.load(urllib.request.urlopen(request, timeout=float(sys.argv[2])))))
"""


def ask(tokens: int = 8, seconds: float = 60, ok: bool = True) -> dict[str, Any]:
    """The primary's answer to a prompt; with ``ok=False`` there must be none within the time."""
    argv = ("exec", "p1", "python3", "-c", ASK, tokens, seconds, "/etc/llamafleet-api-keys")
    printed = fleet(*argv, ok=ok, seconds=seconds + 30)
    return dict(json.loads(printed)) if ok else {}


def answer(seconds: float = 60) -> str:
    return str(ask(seconds=seconds)["choices"][0]["text"])


def answers(text: str) -> bool:
    """Whether the primary answers by now, and so. It may be loading, or not be there."""
    argv = [str(word) for word in (FLEET, "exec", "p1", "python3", "-c", ASK, 8, 20, "/etc/llamafleet-api-keys")]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    return done.returncode == 0 and json.loads(done.stdout)["choices"][0]["text"] == text


def kept(host: str, name: str) -> Any:
    """What a host keeps under a name: worker, primary, plan, proof."""
    return json.loads(fleet("exec", host, "cat", f"/var/lib/llamafleet/default/{host}/{name}.json"))


def endpoint(host: str) -> str:
    return str(kept(host, "worker")["instances"][0]["endpoint"])


def pid(host: str, unit: str = "llama-rpc-default-cpu") -> int:
    return int(sh(host, f"systemctl show -p MainPID --value {unit}"))


def connect(source: str, target: str, port: int, data: bytes = b"") -> str:
    """How a TCP connection ends: connected, refused, timed out, unreachable."""
    script = (
        "import socket, sys\n"
        "s = socket.socket(); s.settimeout(2)\n"
        "try:\n s.connect((sys.argv[1], int(sys.argv[2]))); s.sendall(bytes.fromhex(sys.argv[3])); print('connected')\n"
        "except socket.timeout: print('timed out')\n"
        "except OSError as e: print(e.strerror)\n"
    )
    return fleet("exec", source, "python3", "-c", script, target, port, data.hex()).strip()


def until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s in vain: {what}"
        time.sleep(0.3)
