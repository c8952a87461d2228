# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The verbs of the command `fleet`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from . import cgroups, common, hosts, images, lifecycle, network, packets, state
from .common import FleetError, parse_size

_DEFAULT = ["p1", "w1", "w2", "w3:image=trixie"]


def _build(arguments: argparse.Namespace) -> None:
    with state.locked():
        if state.find():
            raise FleetError("a fleet is up, perhaps on the bases that would go: `fleet down` first")
        try:
            with cgroups.entered(cgroups.CONTROL):
                for name in arguments.image or images.IMAGES:
                    print(images.build(name))
        finally:
            lifecycle.sweep()


def _up(arguments: argparse.Namespace) -> None:
    wanted = state.parse_hosts(arguments.host or _DEFAULT)
    # Taken back like any other failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with state.locked():
        lifecycle.up(wanted, arguments.bind_ro, arguments.egress)


def _down(arguments: argparse.Namespace) -> None:
    with state.locked():
        lifecycle.down()


def _purge(arguments: argparse.Namespace) -> None:
    with state.locked():
        lifecycle.purge()


def _exec(arguments: argparse.Namespace) -> None:
    host = state.load().host(arguments.host)
    argv = hosts.exec_argv(host.name, arguments.command)
    os.execvp(argv[0], argv)


def _in(arguments: argparse.Namespace) -> None:
    state.load()
    argv = network.command_inside(cgroups.entering(cgroups.CONTROL, arguments.command))
    os.execvp(argv[0], argv)


def _cut(arguments: argparse.Namespace) -> None:
    with state.locked():
        hosts.cut(state.load().host(arguments.host).name)


def _start(arguments: argparse.Namespace) -> None:
    with state.locked():
        fleet = state.load()
        host = fleet.host(arguments.host)
        if cgroups.members(host.name):
            raise FleetError(f"{host.name} is on")
        hosts.start(fleet, host)
        hosts.wait([host])


def _link(arguments: argparse.Namespace) -> None:
    with state.locked():
        fleet = state.load()
        host = fleet.host(arguments.host)
        host = dataclasses.replace(host, link=host.link.changed(arguments.setting))
        state.save(fleet.with_host(host))
        if cgroups.members(host.name):  # else it is so from its next start
            network.set_link(host)


def _limit(arguments: argparse.Namespace) -> None:
    with state.locked():
        fleet = state.load()
        host = fleet.host(arguments.host)
        on = bool(cgroups.members(host.name))
        for word in arguments.limit:
            key, _equals, value = word.partition("=")
            if key == "mem":
                host = dataclasses.replace(host, mem=parse_size(value))
                if on:
                    cgroups.limit_memory(host.name, host.mem)
                    hosts.write_meminfo(host.name)
            elif key == "cpu":
                host = dataclasses.replace(host, cpu=state.parse_cpu(value))
                if on:
                    cgroups.limit_cpu(host.name, state.parse_cpu(value))
            elif key == "free":
                hosts.free_disk(host.name, None if value == "all" else parse_size(value))
            else:
                raise FleetError(f"limit {word!r}: write mem=SIZE, cpu=NUMBER, or free=SIZE|all (of the disk)")
        state.save(fleet.with_host(host))


def _status(arguments: argparse.Namespace) -> None:
    fleet = state.load()
    rows = []
    for host in fleet.hosts.values():
        on = cgroups.leader(host.name) is not None
        disk = hosts.directory(host.name) / "disk"
        rows.append(
            {
                **dataclasses.asdict(host),
                "on": on,
                "mem_used": cgroups.memory(host.name)[1] if on else 0,
                "disk_free": shutil.disk_usage(disk).free if disk.is_mount() else host.disk,
            }
        )
    if arguments.json:
        print(json.dumps({"complete": fleet.complete, "egress": fleet.egress, "hosts": rows}, indent=1))
        return
    for row in rows:
        changes = {key: value for key, value in row["link"].items() if value}
        print(
            f"{row['name']:<13}{'on' if row['on'] else 'OFF':<5}{row['address']:<15}{row['role']:<10}{row['image']:<10}"
            f"memory {row['mem_used'] >> 20}/{row['mem'] >> 20} MiB  disk {row['disk_free'] >> 20}/{row['disk'] >> 20} "
            f"MiB free  {' '.join(f'{key}={value}' for key, value in changes.items())}"
        )


def _inventory(arguments: argparse.Namespace) -> None:
    lifecycle.write_access(state.load())
    print(common.INVENTORY)


def _capture(arguments: argparse.Namespace) -> int:
    host = state.load().host(arguments.host)
    with network.inside(network.CORE):
        device = packets.listen(f"v-{host.name}")
    status = 0
    if arguments.command:
        # The command's own output is not mixed with the result.
        try:
            process = subprocess.Popen(arguments.command, stdout=sys.stderr)
        except OSError as error:
            raise FleetError(f"capture: cannot run {arguments.command[0]}: {error.strerror}") from error
        seen = packets.capture(device, arguments.port, lambda: process.poll() is not None)
        status = process.wait()
    else:
        end = time.monotonic() + arguments.seconds
        seen = packets.capture(device, arguments.port, lambda: time.monotonic() >= end)
    print(json.dumps(dataclasses.asdict(seen)))
    return status


def _wire(arguments: argparse.Namespace) -> None:
    ends = [socket.socket(fileno=number) for number in arguments.end]
    packets.forward(ends, arguments.delay, arguments.jitter, arguments.loss)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fleet", description=__doc__, epilog=f"FLEET_DIR={common.DIR} FLEET_NAME={common.NAME}"
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, does: object, help_: str | None) -> argparse.ArgumentParser:
        # Without help a verb is not listed: those that the harness calls itself.
        added = verbs.add_parser(name, help=help_) if help_ else verbs.add_parser(name)
        added.set_defaults(does=does)
        return added

    it = verb("build", _build, "build base images (`up` does what it needs)")
    it.add_argument("image", nargs="*", help=f"of {', '.join(images.IMAGES)}; all by default")
    it = verb("up", _up, "start a fleet and write its inventory")
    it.add_argument(
        "host",
        nargs="*",
        help="NAME[:key=value,...] with role=primary|worker|outsider, image=..., mem=2G, disk=4G, cpu=0.5; "
        f"default: {' '.join(_DEFAULT)}",
    )
    it.add_argument("--bind-ro", action="append", default=[], metavar="SOURCE[:TARGET]", help="show it in every host")
    it.add_argument("--egress", action="store_true", help="let the hosts reach the package archives")
    verb("down", _down, "end it all and leave nothing but the base images")
    verb("purge", _purge, "remove the base images too")
    it = verb("exec", _exec, "run a command in a host, as root, without ssh")
    it.add_argument("host")
    it.add_argument("command", nargs=argparse.REMAINDER)
    it = verb("in", _in, "run a command beside the switch: ansible, ssh, curl")
    it.add_argument("command", nargs=argparse.REMAINDER)
    verb("cut", _cut, "power-cut a host").add_argument("host")
    verb("start", _start, "start a host again, with the disk it had").add_argument("host")
    it = verb("link", _link, "change a host's cable")
    it.add_argument("host")
    it.add_argument("setting", nargs="+", help="down, up, 20mbit, delay=MS, jitter=MS, loss=PERCENT, clear")
    it = verb("limit", _limit, "change what a host has")
    it.add_argument("host")
    it.add_argument("limit", nargs="+", help="mem=SIZE, cpu=NUMBER, free=SIZE|all (space left on its disk)")
    verb("status", _status, "show the hosts").add_argument("--json", action="store_true")
    verb("inventory", _inventory, "write the inventory again, print its path")
    it = verb("capture", _capture, "count frames on a host's cable, by port, as JSON")
    it.add_argument("host")
    it.add_argument("port", type=lambda text: [int(word) for word in text.split(",")], help="PORT[,PORT...]")
    it.add_argument("--seconds", type=float, default=5.0, help="how long, without a command (default: 5)")
    it.epilog = "With `-- COMMAND...` at the end: count while this runs, and end with its status."
    it = verb("_wire", _wire, None)
    it.add_argument("end", nargs=2, type=int)
    for name in ("delay", "jitter", "loss"):
        it.add_argument(name, type=float)
    verb("_meminfo", lambda _arguments: hosts.keep_meminfo(), None)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run one verb; the exit status."""
    words = sys.argv[1:] if words is None else words
    # argparse takes options after a remainder for a part of it, so `capture` is split here.
    own = words.index("--") if words[:1] == ["capture"] and "--" in words else len(words)
    arguments = _parser().parse_args(words[:own])
    if arguments.does is _capture:
        arguments.command = words[own + 1 :]
    elif "command" in arguments and arguments.command[:1] == ["--"]:
        arguments.command.pop(0)
    try:
        common.check_machine()
        return arguments.does(arguments) or 0
    except FleetError as error:
        print(f"fleet: {error}", file=sys.stderr)
        return 1
