# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The switch in a namespace of its own, one cable per host, and what can be wrong with a cable.

::

    lf-core (controller, 198.18.0.1)            lf-<host>
      br0 ── v-<host> ════════════════════════ eth0 (198.18.0.11, ...)
      br0 ── x-<host> ══ w-<host> ~wire~ v-<host> ══ eth0      with delay, jitter or loss

The machine's own namespace sees nothing of it. With --egress it holds one veth end and one nft table more.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import cgroups, common, packets
from .common import FleetError, attempt, run
from .state import Host

CORE = f"{common.NAME}-core"
_RUN_NETNS = Path("/run/netns")
_UPLINK, _DOWNLINK = f"{common.NAME}-up0", f"{common.NAME}-up1"
_CLONE_NEWNET = 0x40000000


def namespace(host: str) -> str:
    return f"{common.NAME}-{host}"


def path_of(name: str) -> Path:
    return _RUN_NETNS / name


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """Open sockets in a network namespace: they stay there, this process comes back."""
    # os.setns is in Python 3.12, Debian 12 has 3.11.
    setns = ctypes.CDLL(None, use_errno=True).setns
    try:
        target = os.open(path_of(name), os.O_RDONLY)
    except FileNotFoundError as error:
        raise FleetError(f"no network namespace {name}: is the fleet up, and this host on?") from error
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        if setns(target, _CLONE_NEWNET):
            raise FleetError(f"cannot enter network namespace {name}: {os.strerror(ctypes.get_errno())}")
        yield
    finally:
        setns(home, _CLONE_NEWNET)
        os.close(target)
        os.close(home)


def command_inside(command: Sequence[object]) -> list[str]:
    """The command, as one that runs beside the switch.

    Not `ip netns exec`: that mounts a /sys of its own and so hides the cgroups.
    """
    return ["nsenter", f"--net={path_of(CORE)}", "--", *(str(word) for word in command)]


def core_up(egress: bool) -> None:
    """Make the switch, and the way to the package archives if wanted."""
    run("ip", "netns", "add", CORE)
    run("ip", "-n", CORE, "link", "set", "lo", "up")
    run("ip", "-n", CORE, "link", "add", "br0", "type", "bridge", "stp_state", "0", "forward_delay", "0")
    run("ip", "-n", CORE, "addr", "add", f"{common.GATEWAY}/{common.NETWORK.prefixlen}", "dev", "br0")
    run("ip", "-n", CORE, "link", "set", "br0", "up")
    if egress:
        _egress_up()


def _forwarding(device: str) -> Path:
    """Whether what comes in here may go on. Per device: the machine's net.ipv4.ip_forward is left alone."""
    return Path(f"/proc/sys/net/ipv4/conf/{device}/forwarding")


def _egress_up() -> None:
    """Translate twice, in the core and in the machine: so the machine needs no route to the fleet."""
    routes = json.loads(run("ip", "-j", "-4", "route", "show", "default"))
    if not routes:
        raise FleetError("--egress: this machine has no IPv4 default route")
    device = routes[0]["dev"]
    before = _forwarding(device).read_text().strip()
    # The table comes first and says how things were: taking it back needs nothing else.
    table = (
        'add table ip {name} {{ comment "{comment}"; }}\n'
        "add chain ip {name} post {{ type nat hook postrouting priority srcnat; }}\n"
        'add rule ip {name} post ip saddr {source} oifname "{out}" masquerade\n'
    )
    run(
        "nft",
        "-f",
        "-",
        stdin=table.format(
            name=common.NAME, comment=f"fleet: {device} forwarding {before}", source=EGRESS_FLEET, out=device
        ),
    )
    run("ip", "link", "add", _UPLINK, "type", "veth", "peer", "name", _DOWNLINK, "netns", CORE)
    run("ip", "addr", "add", f"{EGRESS_MACHINE}/{common.EGRESS.prefixlen}", "dev", _UPLINK)
    run("ip", "link", "set", _UPLINK, "up")
    run("ip", "-n", CORE, "addr", "add", f"{EGRESS_FLEET}/{common.EGRESS.prefixlen}", "dev", _DOWNLINK)
    run("ip", "-n", CORE, "link", "set", _DOWNLINK, "up")
    run("ip", "-n", CORE, "route", "add", "default", "via", EGRESS_MACHINE)
    run(
        *command_inside(["nft", "-f", "-"]),
        stdin=table.format(name=common.NAME, comment="fleet", source=common.NETWORK, out=_DOWNLINK),
    )
    run(*command_inside(["sysctl", "-qw", "net.ipv4.ip_forward=1"]))
    for name in (_UPLINK, device):
        _forwarding(name).write_text("1")


def _egress_down() -> None:
    attempt("ip", "link", "del", _UPLINK)
    if not attempt("nft", "list", "table", "ip", common.NAME):
        return
    comment = re.search(r'comment "fleet: (\S+) forwarding ([01])"', run("nft", "list", "table", "ip", common.NAME))
    if comment is None:
        return  # somebody else's table of that name
    with contextlib.suppress(FileNotFoundError):  # the device is gone
        _forwarding(comment[1]).write_text(comment[2])
    run("nft", "delete", "table", "ip", common.NAME)


EGRESS_MACHINE, EGRESS_FLEET = common.EGRESS[1], common.EGRESS[2]


def plug(host: Host, default_route: bool) -> None:
    """A fresh namespace for a host that boots, so that rules, tunnels and routes end with it as in a real reboot."""
    unplug(host.name)
    space, cable = namespace(host.name), f"v-{host.name}"
    mac = "02:fe:00:00:00:{:02x}".format(int(host.address.rsplit(".", 1)[1]))
    run("ip", "netns", "add", space)
    run("ip", "-n", CORE, "link", "add", cable, "type", "veth",
        "peer", "name", "eth0", "address", mac, "netns", space)  # fmt: skip
    run("ip", "-n", CORE, "link", "set", cable, "master", "br0", "up")
    run("ip", "-n", space, "link", "set", "lo", "up")
    run("ip", "-n", space, "addr", "add", f"{host.address}/{common.NETWORK.prefixlen}", "dev", "eth0")
    run("ip", "-n", space, "link", "set", "eth0", "up")
    if default_route:  # else "network unreachable" at once, rather than a time-out
        run("ip", "-n", space, "route", "add", "default", "via", common.GATEWAY)
    set_link(host)


def unplug(name: str) -> None:
    """Remove a host's namespace; the cable first: a namespace lives until its last socket has gone."""
    cgroups.end(f"_wire-{name}")
    for prefix in ("v", "w"):
        attempt("ip", "-n", CORE, "link", "del", f"{prefix}-{name}")
    attempt("ip", "netns", "del", namespace(name))


def set_link(host: Host) -> None:
    """Make a host's cable what its description says; it holds over a power cut."""
    cable, near, far = f"v-{host.name}", f"w-{host.name}", f"x-{host.name}"
    cgroups.end(f"_wire-{host.name}")
    if attempt("ip", "-n", CORE, "link", "del", near):
        run("ip", "-n", CORE, "link", "set", cable, "master", "br0")
    for space, device in ((CORE, cable), (namespace(host.name), "eth0")):
        attempt("tc", "-n", space, "qdisc", "del", "dev", device, "root")
        if host.link.rate:
            # A burst holds one frame as the kernel hands it over, up to 64 KiB with segmentation offload.
            run("tc", "-n", space, "qdisc", "add", "dev", device, "root",
                "tbf", "rate", host.link.rate, "burst", "64kb", "latency", "50ms")  # fmt: skip
    if host.link.needs_wire:
        # Not netem: not every kernel has it.
        run("ip", "-n", CORE, "link", "set", cable, "nomaster")
        run("ip", "-n", CORE, "link", "add", near, "type", "veth", "peer", "name", far)
        run("ip", "-n", CORE, "link", "set", far, "master", "br0", "up")
        run("ip", "-n", CORE, "link", "set", near, "up")
        with inside(CORE):
            ends = [packets.wire_end(device) for device in (cable, near)]
        numbers = [end.fileno() for end in ends]
        settings = (host.link.delay, host.link.jitter, host.link.loss)
        helper(f"_wire-{host.name}", "_wire", *numbers, *settings, keep=numbers)
        for end in ends:
            end.close()
    run("ip", "-n", CORE, "link", "set", cable, "down" if host.link.down else "up")


def helper(group: str, *words: object, keep: Sequence[int] = ()) -> None:
    """Start a background process of the harness, in a group of its own by which it is found and ended."""
    script = Path(__file__).parents[1] / "fleet"
    with (common.DIR / "helpers.log").open("a") as log:
        subprocess.Popen(
            cgroups.entering(group, [script, *words]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=keep,
            start_new_session=True,
        )


def listens(address: str) -> bool:
    """Whether an ssh server answers there, seen from the switch."""
    with inside(CORE):
        client = socket.socket()
    client.settimeout(1)
    with client, contextlib.suppress(OSError):
        client.connect((address, 22))
        return client.recv(4) == b"SSH-"
    return False


def down() -> None:
    """Remove every namespace and link of the fleet, known to the state or not."""
    _egress_down()
    spaces = sorted(path.name for path in _RUN_NETNS.glob(f"{common.NAME}-*"))
    if CORE in spaces:
        for link in json.loads(run("ip", "-n", CORE, "-j", "link", "show", "type", "veth")):
            attempt("ip", "-n", CORE, "link", "del", link["ifname"])
    for space in spaces:
        run("ip", "netns", "del", space)


def made_by_us() -> bool:
    """Whether /run/netns is not there yet: `ip netns add` makes it a mount, and `down` then takes it back."""
    return not common.mounts_below(_RUN_NETNS)


def forget_directory() -> None:
    """Take back /run/netns, if nobody else uses it by now."""
    if not any(_RUN_NETNS.iterdir()):
        attempt("umount", _RUN_NETNS)
        _RUN_NETNS.rmdir()
