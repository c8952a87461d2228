# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""WireGuard on one host: its key, its configuration, its interface, and whether the tunnels work.

The private key is made here and stays here: in a file of mode 0600 and in the configuration of wg-quick. No function
returns it, no command gets it as an argument, and every text that leaves this file is masked.
Sources: wg(8), wg-quick(8) and the wg-quick script of wireguard-tools 1.0.20210914; traps measured with wireguard-go.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import os
import re
import secrets
import signal
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ansible_collections.llamafleet.rpc.plugins.module_utils._echo import echo
from ansible_collections.llamafleet.rpc.plugins.module_utils._files import read_text, write_atomic
from ansible_collections.llamafleet.rpc.plugins.module_utils._mac_network import (
    is_mac,
    mac_route,
    mac_tunnel,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._mesh import (
    OVERHEAD,
    MeshError,
    checked_endpoint,
    checked_key,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import NOT_FOUND, Result, Runner
from ansible_collections.llamafleet.rpc.plugins.module_utils._units import MANAGED
from ansible_collections.llamafleet.rpc.plugins.module_utils._worker_args import checked_address

CONFIG_DIRECTORY = "/etc/wireguard"
DEFAULT_PORT = 51820
UNIT_DIRECTORY = "/etc/systemd/system"
ETHERNET_MTU = 1500
#: Path MTUs that are tried, in bytes: Ethernet, PPPoE, common tunnels and clouds, and the least that IPv6 allows + 80.
_PATHS = (1500, 1492, 1480, 1460, 1450, 1440, 1420, 1400, 1360)
_ABSENT = "(made on the host)"


@dataclass(frozen=True)
class Peer:
    """One peer as it stands in the configuration. ``endpoint`` None: it calls us. ``keepalive`` in seconds."""

    host: str
    public_key: str | None
    address: str
    endpoint: str | None = None
    keepalive: int | None = None
    path_mtu: int | None = None
    link: str = ""


@dataclass(frozen=True)
class Interface:
    """What the interface of this host shall be. ``mtu`` in bytes."""

    name: str
    address: str
    prefix: int
    port: int
    mtu: int
    peers: tuple[Peer, ...]


@dataclass(frozen=True)
class Live:
    """What runs. ``peers``: public key -> (allowed addresses, keepalive seconds or None, has a preshared key).

    ``device`` is what wg and the routes call the interface: its name on Linux, the utunN of this start on a Mac.
    """

    present: bool
    device: str = ""
    answers: bool = False
    port: int | None = None
    address: str | None = None
    mtu: int | None = None
    public_key: str | None = None
    peers: Mapping[str, tuple[str, int | None, bool]] = field(default_factory=dict)


def checked_peer(given: Mapping[str, Any], default_port: int) -> Peer:
    """One element of mesh_peers as a Peer; every value goes into a file that root's tools read, so all are checked."""
    host = str(given.get("host") or "")
    if not re.fullmatch(r"[A-Za-z0-9_.:-]{1,253}", host):
        raise MeshError(f"peer {host!r}: a host name is made of letters, digits and _ . : -")
    key, endpoint, keepalive = given.get("public_key"), given.get("endpoint"), given.get("keepalive")
    if keepalive is not None and not 1 <= int(keepalive) <= 65535:
        raise MeshError(f"peer {host}: keepalive {keepalive!r} is not 1 to 65535 seconds")
    return Peer(
        host=host,
        public_key=None if key is None else checked_key(key, f"peer {host}: public_key"),
        address=checked_address(given.get("address"), f"peer {host}: address"),
        endpoint=None if endpoint is None else checked_endpoint(endpoint, default_port, f"peer {host}: endpoint"),
        keepalive=None if keepalive is None else int(keepalive),
        path_mtu=int(given["path_mtu"]) if given.get("path_mtu") else None,
        link=str(given.get("link") or ""),
    )


# ---------------------------------------------------------------------------------------------------------- texts


def render(interface: Interface, public_key: str | None, private_key: str, preshared: Mapping[str, str]) -> str:
    """The configuration that wg-quick reads. Comments carry what the next run wants to know: names, our public key."""
    lines = [
        f"# {MANAGED}",
        f"# Public key: {public_key or _ABSENT}",
        "[Interface]",
        f"Address = {interface.address}/{interface.prefix}",
        f"ListenPort = {interface.port}",
        f"MTU = {interface.mtu}",
        f"PrivateKey = {private_key}",
    ]
    for peer in sorted(interface.peers, key=lambda one: one.host):
        lines += ["", f"# Host: {peer.host}", "[Peer]", f"PublicKey = {peer.public_key or _ABSENT}"]
        if peer.link in preshared:
            lines.append(f"PresharedKey = {preshared[peer.link]}")
        lines.append(f"AllowedIPs = {peer.address}/32")
        if peer.endpoint:
            lines.append(f"Endpoint = {peer.endpoint}")
        if peer.keepalive:
            lines.append(f"PersistentKeepalive = {peer.keepalive}")
    return "\n".join([*lines, ""])


def masked(text: str, known: str | None = None) -> str:
    """A configuration without its secrets, for people. A secret that ``known`` does not hold shows as a new one."""

    def hide(found: re.Match[str]) -> str:
        new = known is not None and found.group(0) not in known.splitlines()
        return f"{found.group(1)} {'(hidden, new)' if new else '(hidden)'}"

    return re.sub(r"(?im)^(\s*(?:PrivateKey|PresharedKey)\s*=).*$", hide, text)


def stripped(text: str) -> str:
    """What wg(8) itself takes: without the lines that only wg-quick knows."""
    return re.sub(r"(?im)^\s*(?:Address|MTU|DNS|Table|PreUp|PostUp|PreDown|PostDown|SaveConfig)\s*=.*\n", "", text)


def parse_config(text: str) -> dict[str, Any]:
    """What our configuration keeps: ``{address, mtu, public_key, peers: {host: {public_key, address, endpoint}}}``.

    Secrets are passed over. Anything that is missing is None.
    """
    found: dict[str, Any] = {"address": None, "mtu": None, "public_key": None, "peers": {}}
    peer: dict[str, Any] | None = None
    for line in text.splitlines():
        key, _sign, value = (part.strip() for part in line.partition("=" if not line.startswith("#") else ":"))
        if key == "# Public key":
            found["public_key"] = value
        elif key == "# Host":
            peer = found["peers"][value] = {"public_key": None, "address": None, "endpoint": None}
        elif key == "Address":
            found["address"] = value.partition("/")[0]
        elif key == "MTU" and value.isdigit():
            found["mtu"] = int(value)
        elif peer is not None and key in ("PublicKey", "AllowedIPs", "Endpoint"):
            name = {"PublicKey": "public_key", "AllowedIPs": "address", "Endpoint": "endpoint"}[key]
            peer[name] = value.partition("/")[0] if key == "AllowedIPs" else value
    found["peers"] = {host: entry for host, entry in found["peers"].items() if entry["public_key"] and entry["address"]}
    return found


def with_preshared(text: str) -> set[str]:
    """Public keys of the peers whose section has a preshared key."""
    sections = text.split("[Peer]")[1:]
    found = (re.search(r"^PublicKey = (\S+)", part, re.M) for part in sections if "\nPresharedKey = " in part)
    return {one.group(1) for one in found if one}


def drop_in(userspace: bool) -> str:
    """The drop-in of wg-quick@, empty for none: without a kernel module it names what takes its place."""
    if not userspace:
        return ""
    return f"# {MANAGED}\n[Service]\nEnvironment=WG_QUICK_USERSPACE_IMPLEMENTATION=wireguard-go\n"


def parse_dump(text: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Output of ``wg show IF dump``: ``({public_key, port}, {key: peer})`` with public keys as keys of the second.

    A peer is ``{endpoint, allowed, handshake, received, keepalive, psk}``. ``handshake`` is in seconds since 1970, None
    for never, ``received`` in bytes; ``psk`` only says whether there is one.
    """
    rows = [line.split("\t") for line in text.splitlines() if line]
    if not rows or len(rows[0]) != 4:
        raise MeshError(f"wg show dump printed {len(rows)} lines of an unknown form; is this wireguard-tools?")
    own = {"public_key": rows[0][1], "port": int(rows[0][2])}
    peers = {
        row[0]: {
            "psk": row[1] != "(none)",
            "endpoint": None if row[2] == "(none)" else row[2],
            "allowed": "" if row[3] == "(none)" else row[3],
            "handshake": int(row[4]) or None,
            "received": int(row[5]),
            "keepalive": None if row[7] == "off" else int(row[7]),
        }
        for row in rows[1:]
        if len(row) == 8
    }
    return own, peers


def explain(text: str) -> tuple[str, str]:
    """A code and a remedy for what wg-quick or ip said on stderr (B5-11, B5-12); code ``failed`` if unknown."""
    lowered = text.lower()
    if "operation not supported" in lowered or "unknown device type" in lowered or "protocol not supported" in lowered:
        return "no_wireguard_module", (
            "the running kernel has no WireGuard. Reboot if a newer kernel was installed, install wireguard-go where "
            "modules cannot be loaded (containers), or use llama_mesh_mode existing"
        )
    if "address already in use" in lowered:
        return "port_in_use", "the UDP port is taken by another service; set llama_mesh_port for the whole fleet"
    if "/dev/net/tun" in lowered or "failed to create tun device" in lowered:
        return "no_tun", "wireguard-go needs /dev/net/tun; give the container that device and CAP_NET_ADMIN"
    if "operation not permitted" in lowered or "permission denied" in lowered:
        return "not_permitted", "it needs root and CAP_NET_ADMIN"
    return "failed", "see the message"


# ------------------------------------------------------------------------------------------------------ the host


def implementation(runner: Runner) -> tuple[str | None, str]:
    """``kernel``, ``userspace`` or None, and why. A module that is only not loaded yet is loaded by its first use."""
    if is_mac(runner):
        return "userspace", "macOS has no WireGuard of its own, wireguard-go runs on its utun interfaces"
    if runner.exists("/sys/module/wireguard"):
        return "kernel", "the kernel has WireGuard"
    modprobe = runner.which("modprobe")
    # -n only looks: a check changes nothing.
    if modprobe and runner.run([modprobe, "-n", "-q", "wireguard"]).rc == 0:
        return "kernel", "the module can be loaded"
    release = (runner.read("/proc/sys/kernel/osrelease") or "").strip()
    others = [name for name in runner.listdir("/lib/modules") if name != release]
    reboot = (
        f"; the running kernel {release} is not installed any more, {', '.join(others)} is: a reboot is due"
        if others and not runner.exists(f"/lib/modules/{release}")
        else ""
    )
    if not runner.exists("/dev/net/tun"):
        return None, f"no_wireguard_module: neither a kernel module nor /dev/net/tun for wireguard-go{reboot}"
    return "userspace", f"the kernel has no WireGuard module, wireguard-go takes its place{reboot}"


def missing_packages(runner: Runner, kind: str | None, firewall: bool) -> list[str]:
    """Packages (Debian's names) that this host lacks for the mesh (``kind`` as of implementation) and the firewall."""
    if is_mac(runner):  # formulae of Homebrew there, which the role llama_mesh installs; pf is a part of macOS
        lacking = [name for name in ("wg", "wireguard-go") if kind is not None and runner.which(name) is None]
        return ["wireguard-tools" if name == "wg" else name for name in lacking]
    wanted: dict[str, tuple[str, ...]] = {"iproute2": ("ip",)}
    if kind is not None:
        wanted["wireguard-tools"] = ("wg", "wg-quick")
    if firewall:
        wanted["nftables"] = ("nft",)
    if kind == "userspace":
        wanted["wireguard-go"] = ("wireguard-go",)
    return [package for package, names in wanted.items() if not all(runner.which(name) for name in names)]


def ip_json(runner: Runner, *words: str) -> list[dict[str, Any]]:
    """What ``ip -j`` says; nothing where there is no ip, as on a bare host in check mode (see missing_packages)."""
    result = runner.run(["ip", "-j", *words], timeout=10.0)
    if result.rc == NOT_FOUND:
        return []
    if result.rc != 0:
        raise MeshError(f"ip {' '.join(words)} failed with status {result.rc}: {_said(result)}")
    return [entry for entry in json.loads(result.stdout or "[]") if entry]


def _said(result: Result) -> str:
    # wg quotes what it cannot read, and that may be a key.
    text = result.stderr.strip() or result.stdout.strip() or "no message"
    return re.sub(r"[A-Za-z0-9+/]{40,}=*", "(key)", text)[-500:]


def _wg(runner: Runner) -> str:
    """The program; Homebrew's is in nobody's PATH."""
    return runner.which("wg") or "wg"


def key_path(directory: str, interface: str) -> str:
    """File of the private key of an interface."""
    return os.path.join(directory, interface + ".key")


def config_path(directory: str, interface: str) -> str:
    """Configuration file of an interface."""
    return os.path.join(directory, interface + ".conf")


def ensure_key(runner: Runner, path: str, rotate: bool, check: bool) -> tuple[str | None, bool]:
    """The public key of this host, and whether its key was made (or its file's mode mended) now.

    None in check mode, where there is no key yet. The private one is written straight to ``path``, mode 0600.
    """
    there = os.path.exists(path)
    if there and not rotate:
        loose = stat.S_IMODE(os.stat(path).st_mode) != 0o600
        if loose and not check:
            os.chmod(path, 0o600)
        return public_key(runner, path), loose
    if check:
        return (public_key(runner, path) if there else None), True
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    raw = bytearray(secrets.token_bytes(32))
    # Curve25519 wants these bits so (RFC 7748, section 5); `wg genkey` sets them too.
    raw[0] &= 248
    raw[31] = (raw[31] & 127) | 64
    write_atomic(path, base64.b64encode(bytes(raw)).decode() + "\n", 0o600)
    return public_key(runner, path), True


def public_key(runner: Runner, path: str) -> str | None:
    """The public key to the private one in ``path``; None where wireguard-tools is not installed (yet)."""
    if runner.which("wg") is None:
        return None
    # The key goes from file to program: it is in no argument, no environment and not in this process.
    result = runner.run(["/bin/sh", "-c", 'exec "$2" pubkey < "$1"', "sh", path, _wg(runner)])
    if result.rc != 0:
        raise MeshError(f"{path} holds no WireGuard key; remove it, and the next run makes a new one")
    return result.stdout.strip()


def look(runner: Runner, name: str) -> Live:
    """What runs under the name of our interface. A wireguard-go that hangs counts as present and not answering."""
    link = mac_tunnel(runner, name) if is_mac(runner) else _linux_link(runner, name)
    if link is None:
        return Live(present=False)
    device, address, mtu = link
    result = runner.run([_wg(runner), "show", device, "dump"], timeout=5.0)
    if result.rc != 0:
        return Live(present=True, device=device, answers=False, address=address, mtu=mtu)
    own, peers = parse_dump(result.stdout)
    return Live(
        present=True,
        device=device,
        answers=True,
        port=own["port"],
        address=address,
        mtu=mtu,
        public_key=own["public_key"],
        peers={key: (peer["allowed"], peer["keepalive"], peer["psk"]) for key, peer in peers.items()},
    )


def _linux_link(runner: Runner, name: str) -> tuple[str, str | None, int | None] | None:
    """(name, address with prefix, MTU) of an interface; None where it is not."""
    entries = [entry for entry in ip_json(runner, "-4", "addr", "show") if entry.get("ifname") == name]
    if not entries:
        listed = runner.run(["ip", "link", "show", "dev", name], timeout=5.0)
        if listed.rc != 0:
            return None
        mtu = re.search(r"\bmtu (\d+)", listed.stdout)
        entries = [{"mtu": mtu and mtu.group(1), "addr_info": []}]
    address = next((f"{one['local']}/{one['prefixlen']}" for one in entries[0].get("addr_info", [])), None)
    return name, address, int(entries[0]["mtu"]) if entries[0].get("mtu") else None


# ------------------------------------------------------------------------------------------------------------ MTU

Probe = Callable[[Sequence[str], int], "set[str]"]


def endpoint_mtus(peers: Sequence[Peer]) -> dict[str, int | None]:
    """IPv4 endpoint -> what the links at both ends carry (bytes, None unknown): the paths that can be probed."""
    found = {}
    for peer in peers:
        address = (peer.endpoint or "").rpartition(":")[0]
        if address and not address.startswith("["):
            found[address] = peer.path_mtu
    return found


def settle_mtu(paths: Mapping[str, int | None], kept: int | None, probe: Probe = echo) -> int:
    """The MTU of the tunnel interface (bytes): what every path to a peer carries whole, less OVERHEAD.

    ``paths``: address of a peer below the mesh -> the MTU of the links at both ends, which is only an upper bound: a
    jumbo card behind a plain switch loses big packets without a word (B5-01). So more than 1500 is believed only when a
    packet of that size comes back. A kept MTU that still passes, or that nobody contradicts, stays: readings must not
    make a second run change something. Where no host answers a ping it is at most 1420.
    """
    known = [mtu for mtu in paths.values() if mtu]
    ceiling = min(known) if known else ETHERNET_MTU
    alive = set(probe(sorted(paths), 84)) if paths else set()
    if (
        kept is not None
        and kept + OVERHEAD <= ceiling
        and (not alive or alive <= set(probe(sorted(alive), kept + OVERHEAD)))
    ):
        return kept
    silent = len(alive) < len(paths) or not paths
    found = [min(ceiling, ETHERNET_MTU) if silent else ceiling]
    for size in [ceiling, *(size for size in _PATHS if size < ceiling)]:
        if not alive:
            break
        passed = set(probe(sorted(alive), size))
        if passed:
            found.append(size)
            alive -= passed
    if alive:  # they answer small packets, and none of these
        found.append(min(ceiling, *_PATHS))
    return min(found) - OVERHEAD


# ------------------------------------------------------------------------------------------------------- converge


@dataclass(frozen=True)
class Outcome:
    """What ``converge`` did, or in check mode would do; ``before`` and ``after`` are masked."""

    changed: bool
    before: str
    after: str
    actions: list[str]


class Starter(Protocol):
    """Who starts and stops the interface: Quick on Linux, _mac_wireguard.Daemon on a Mac. All else is the same.

    ``unit_restarts``: whether the interface starts anew when its unit, or job, was written.
    """

    unit: str
    unit_restarts: bool

    def enabled(self) -> bool:
        """Whether the interface comes back at boot."""

    def drop_in_differs(self, userspace: bool, /) -> bool:
        """Whether its unit, or job, has to be written."""

    def write_drop_in(self, userspace: bool, /) -> None:
        """Write it."""

    def enable(self) -> None:
        """Have the interface come back at boot."""

    def set_mtu(self, live: Live, mtu: int) -> None:
        """Change the MTU of the running interface."""

    def restart(self, live: Live, /) -> None:
        """(Re)start the interface."""

    def remove(self, live: Live, /) -> None:
        """Stop it and forget its unit."""


class Quick:
    """Starting and stopping by wg-quick: through its systemd unit, or by itself on hosts without an init."""

    unit_restarts = False

    def __init__(self, runner: Runner, manager: str, directory: str, name: str) -> None:
        if manager == "systemd" and directory != CONFIG_DIRECTORY:
            raise MeshError(
                f"directory {directory}: wg-quick@ reads {CONFIG_DIRECTORY}; another one needs manager none"
            )
        self._runner = runner
        self._systemd = manager == "systemd"
        self._name = name
        self._config = config_path(directory, name)
        self.unit = f"wg-quick@{name}.service"
        self._drop_in = os.path.join(UNIT_DIRECTORY, self.unit + ".d", "llamafleet.conf")

    def _must(self, *argv: str) -> None:
        result = self._runner.run(list(argv), timeout=60.0)
        if result.rc == 0:
            return
        said = _said(result)
        if self._systemd:
            journal = self._runner.run(["journalctl", "-q", "--no-pager", "-n", "15", "-o", "cat", "-u", self.unit])
            said = f"{said}\n{_said(journal)}"
        code, remedy = explain(said)
        raise MeshError(f"{' '.join(argv)} failed with status {result.rc}: {code}: {remedy}\n{said}")

    def enabled(self) -> bool:
        """Whether the interface comes back at boot; without systemd nothing can see to that."""
        if not self._systemd:
            return True
        return self._runner.run(["systemctl", "is-enabled", self.unit]).stdout.strip() == "enabled"

    def drop_in_differs(self, userspace: bool) -> bool:
        """Whether the drop-in of the unit has to be written or removed."""
        return self._systemd and (read_text(self._drop_in) or "") != drop_in(userspace)

    def write_drop_in(self, userspace: bool) -> None:
        """Write or remove it."""
        text = drop_in(userspace)
        if text:
            os.makedirs(os.path.dirname(self._drop_in), exist_ok=True)
            write_atomic(self._drop_in, text)
        else:
            self._remove_drop_in()
        self._must("systemctl", "daemon-reload")

    def _remove_drop_in(self) -> None:
        if os.path.exists(self._drop_in):
            os.unlink(self._drop_in)
            if not os.listdir(os.path.dirname(self._drop_in)):
                os.rmdir(os.path.dirname(self._drop_in))

    def enable(self) -> None:
        """Have it started at boot."""
        if self._systemd:
            self._must("systemctl", "enable", self.unit)

    def set_mtu(self, live: Live, mtu: int) -> None:
        """Change the MTU of the running interface."""
        result = self._runner.run(["ip", "link", "set", "dev", live.device, "mtu", str(mtu)], timeout=5.0)
        if result.rc != 0:
            raise MeshError(f"{self._name} does not take an MTU of {mtu}: {_said(result)}")

    def restart(self, live: Live) -> None:
        """(Re)start the interface. systemd's unit stays active after wireguard-go died, so it is always a restart."""
        self._stop(live)
        if self._systemd:
            self._runner.run(["systemctl", "reset-failed", self.unit])
            self._must("systemctl", "restart", self.unit)
        else:
            self._must("wg-quick", "up", self._config)

    def _stop(self, live: Live) -> None:
        if live.present and not live.answers:
            # Everything that asks a hanging wireguard-go would hang as well, wg-quick included.
            self._kill_userspace()
        if self._systemd:
            self._runner.run(["systemctl", "stop", self.unit], timeout=60.0)
        elif live.answers:
            self._runner.run(["wg-quick", "down", self._config], timeout=60.0)
        if self._there():
            self._must("ip", "link", "delete", "dev", self._name)

    def _there(self) -> bool:
        return self._runner.run(["ip", "link", "show", "dev", self._name], timeout=5.0).rc == 0

    def _kill_userspace(self) -> None:
        """End the wireguard-go of this interface, and only of this one: containers have theirs in other namespaces."""
        here = self._runner.readlink("/proc/self/ns/net")
        for pid in filter(str.isdigit, self._runner.listdir("/proc")):
            words = (self._runner.read(f"/proc/{pid}/cmdline") or "").split("\0")
            if os.path.basename(words[0]) != "wireguard-go" or self._name not in words[1:]:
                continue
            if self._runner.readlink(f"/proc/{pid}/ns/net") == here:
                os.kill(int(pid), signal.SIGKILL)
        deadline = time.monotonic() + 5
        while self._there() and time.monotonic() < deadline:
            time.sleep(0.1)

    def remove(self, live: Live) -> None:
        """Stop it and forget the unit."""
        self._stop(live)
        if self._systemd:
            self._runner.run(["systemctl", "disable", self.unit])
            self._runner.run(["systemctl", "reset-failed", self.unit])
        if self._systemd:
            self._remove_drop_in()
            self._must("systemctl", "daemon-reload")


def sync(runner: Runner, device: str, text: str, n_peers: int, directory: str) -> None:
    """Load a configuration into the running interface by ``wg syncconf``: tunnels that stay are not interrupted.

    The text is counted before (B5-06: an empty one would remove all peers) and the interface after. wg reads the whole
    text before it changes anything, so after a syntax error the running interface is what it was.
    """
    plain = stripped(text)
    if plain.count("[Peer]") != n_peers or "[Interface]" not in plain:
        raise MeshError(
            f"{device}: the configuration to load has not the {n_peers} peers it should have; nothing changed"
        )
    temporary = os.path.join(directory, f".{device}.sync")
    write_atomic(temporary, plain, 0o600)
    try:
        result = runner.run([_wg(runner), "syncconf", device, temporary], timeout=20.0)
    finally:
        os.unlink(temporary)
    if result.rc != 0:
        # wg quotes the line that it could not read, and that line may be a key.
        raise MeshError(f"wg syncconf {device} failed with status {result.rc}; the running interface is unchanged")
    listed = parse_dump(runner.run([_wg(runner), "show", device, "dump"], timeout=5.0).stdout)[1]
    if len(listed) != n_peers:
        raise MeshError(f"{device} has {len(listed)} peers after loading {n_peers}; another program changes it")
    # A peer that stays keeps its preshared key when its section has none any more (wireguard-tools 1.0.20210914).
    for key in (key for key, peer in listed.items() if peer["psk"] and key not in with_preshared(plain)):
        result = runner.run([_wg(runner), "set", device, "peer", key, "preshared-key", "/dev/null"], timeout=5.0)
        if result.rc != 0:
            raise MeshError(f"{device}: the preshared key of peer {key} could not be removed: {_said(result)}")


def converge(
    runner: Runner,
    quick: Starter,
    interface: Interface,
    preshared: Mapping[str, str],
    directory: str,
    userspace: bool,
    check: bool,
) -> Outcome:
    """Bring the interface of this host to what it shall be, with the least that does it: nothing, sync, or restart."""
    path, keys = config_path(directory, interface.name), key_path(directory, interface.name)
    before = read_text(path)
    if before is not None and MANAGED not in before:
        raise MeshError(f"{path} is not ours; set llama_mesh_interface to another name, or remove that file")
    live = look(runner, interface.name)
    if live.present and before is None and live.answers:
        raise MeshError(
            f"interface {interface.name} runs, but there is no {path}: it is not ours; set llama_mesh_interface"
        )
    private = (read_text(keys) or "").strip()
    own = public_key(runner, keys) if private else None
    nameless = [peer.host for peer in interface.peers if peer.public_key is None]
    if not check and (not private or nameless):
        raise MeshError(f"no key of {', '.join(nameless) or 'this host'}; run mesh_node on it before")
    text = render(interface, own, private or _ABSENT, preshared)
    actions = _actions(interface, live, own, preshared, before, text)
    if quick.drop_in_differs(userspace):
        actions.append("unit")
        if quick.unit_restarts and not {"start", "restart"} & set(actions):
            actions.append("restart")
    if not quick.enabled():
        actions.append("enable")
    if actions and not check:
        _act(runner, quick, interface, live, before, text, actions, directory, userspace)
    state = "" if live.present else "# not running\n"
    return Outcome(bool(actions), state + masked(before or ""), masked(text, before), actions)


def _actions(
    interface: Interface,
    live: Live,
    own: str | None,
    preshared: Mapping[str, str],
    before: str | None,
    text: str,
) -> list[str]:
    actions = ["write"] if before != text else []
    if not live.present:
        return [*actions, "start"]
    if not live.answers or live.address != f"{interface.address}/{interface.prefix}":
        return [*actions, "restart"]
    wanted = {
        peer.public_key: (f"{peer.address}/32", peer.keepalive, peer.link in preshared) for peer in interface.peers
    }
    same = live.peers == wanted and live.port == interface.port and live.public_key == own
    if not same or _needs_sync(before or "", text):
        actions.append("sync")
    if live.mtu != interface.mtu:
        actions.append("mtu")
    return actions


def _needs_sync(before: str, after: str) -> bool:
    """Whether the texts differ in what wg itself reads."""
    return [line for line in stripped(before).splitlines() if not line.startswith("#")] != [
        line for line in stripped(after).splitlines() if not line.startswith("#")
    ]


def _act(
    runner: Runner,
    quick: Starter,
    interface: Interface,
    live: Live,
    before: str | None,
    text: str,
    actions: Sequence[str],
    directory: str,
    userspace: bool,
) -> None:
    path = config_path(directory, interface.name)
    if "sync" in actions:
        # First the interface, then the file: a text that wg does not take never becomes the one of the next boot.
        sync(runner, live.device, text, len(interface.peers), directory)
    if "write" in actions:
        write_atomic(path, text, 0o600)
    if "unit" in actions:
        quick.write_drop_in(userspace)
    if "mtu" in actions:
        quick.set_mtu(live, interface.mtu)
    if "enable" in actions:
        quick.enable()
    if "start" in actions or "restart" in actions:
        try:
            quick.restart(live)
        except MeshError:
            if "write" in actions and before is not None:
                write_atomic(path, before, 0o600)
            raise


def remove(runner: Runner, quick: Starter, name: str, directory: str, check: bool) -> Outcome:
    """Take the interface, its configuration and its key away. What is not ours stays."""
    path, keys = config_path(directory, name), key_path(directory, name)
    before = read_text(path)
    ours = before is not None and MANAGED in before
    if before is not None and not ours:
        raise MeshError(f"{path} is not ours, so it is not removed; set llama_mesh_interface to the name of the mesh")
    actions = (["stop", "remove"] if ours else []) + (["forget key"] if os.path.exists(keys) else [])
    if actions and not check:
        if ours:
            quick.remove(look(runner, name))
            os.unlink(path)
        if os.path.exists(keys):
            os.unlink(keys)
    return Outcome(bool(actions), masked(before or ""), "", actions)


# ---------------------------------------------------------------------------------------------------------- proof

_HINTS = {
    "ok": "",
    "wrong_route": "traffic to it does not enter the tunnel; another route is more specific, see `ip route get`",
    "no_answer": (
        "nothing comes back: its UDP port is blocked or its endpoint is wrong, it is off, or it has another key for us"
    ),
    "big_packets_lost": (
        "small packets pass and big ones vanish: the path carries less than the MTU says; lower llama_mesh_mtu"
    ),
    "silent": "the tunnel is up, but nothing answers a ping through it: ICMP may be blocked on that host",
    "not_running": "the interface is gone or wireguard-go died, which its unit does not notice; run site.yml again",
}


def prove(
    runner: Runner, name: str, peers: Sequence[Peer], required: Sequence[str], wait: float, probe: Probe = echo
) -> list[dict[str, Any]]:
    """For each peer ``{host, address, status, handshake_age, hint}``; status is a key of _HINTS.

    A packet through the tunnel makes the handshake happen; then one of the full MTU must come back (B5-01), and the
    route must lead into the tunnel (B5-17). ``wait`` seconds are given to the ``required`` hosts: when one end was
    restarted, the other goes on with the old session for up to 15 s (protocol: KEEPALIVE_TIMEOUT + REKEY_TIMEOUT).
    ``handshake_age`` is in seconds, None for never.
    """
    deadline = time.monotonic() + wait
    live = look(runner, name)
    if not live.answers:
        return [_verdict(peer, "not_running", None) for peer in peers]
    routed = {peer.address for peer in peers if _route_device(runner, peer.address) == live.device}
    needed = {peer.address for peer in peers if peer.host in required} & routed
    keys = {peer.address: peer.public_key for peer in peers}
    before = _dumped(runner, live.device)
    small = set(probe(sorted(routed), 84))
    heard: set[str] = set()
    while not needed <= small | heard and time.monotonic() < deadline:
        small |= set(probe(sorted(needed - small), 84))
        heard = _heard(before, _dumped(runner, live.device), keys)
    big = set(probe(sorted(small), live.mtu or ETHERNET_MTU - OVERHEAD))
    dumped = _dumped(runner, live.device)
    heard = _heard(before, dumped, keys)
    found = []
    for peer in peers:
        last = dumped.get(peer.public_key or "", {}).get("handshake")
        age = max(0, int(time.time()) - last) if last else None
        if peer.address not in routed:
            status = "wrong_route"
        elif peer.address in big:
            status = "ok"
        elif peer.address in small:
            status = "big_packets_lost"
        else:
            status = "silent" if peer.address in heard else "no_answer"
        found.append(_verdict(peer, status, age))
    return found


def _dumped(runner: Runner, device: str) -> dict[str, dict[str, Any]]:
    result = runner.run([_wg(runner), "show", device, "dump"], timeout=5.0)
    return parse_dump(result.stdout)[1] if result.rc == 0 else {}


def _heard(
    before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]], keys: Mapping[str, str | None]
) -> set[str]:
    """Addresses of peers that something was received from in between. Who cannot answer a ping still sends a keepalive
    within 10 s (protocol: KEEPALIVE_TIMEOUT), while an old handshake says nothing about who is there now."""
    return {
        address
        for address, key in keys.items()
        if key is not None and key in now and now[key]["received"] > before.get(key, {}).get("received", 0)
    }


def _verdict(peer: Peer, status: str, age: int | None) -> dict[str, Any]:
    return {
        "host": peer.host,
        "address": peer.address,
        "status": status,
        "handshake_age": age,
        "hint": _HINTS[status],
    }


def _route_device(runner: Runner, address: str) -> str | None:
    if is_mac(runner):
        return mac_route(runner, address)
    result = runner.run(["ip", "-j", "route", "get", str(ipaddress.IPv4Address(address))], timeout=5.0)
    if result.rc != 0:
        return None
    return next((str(entry["dev"]) for entry in json.loads(result.stdout or "[]") if entry.get("dev")), None)
