# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""WireGuard on one host: texts, diagnoses and the MTU. What needs an interface is in tests of the modules."""

from __future__ import annotations

import base64
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._mesh import MeshError
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Result
from ansible_collections.llamafleet.rpc.plugins.module_utils._underlay import port_owner, underlay
from ansible_collections.llamafleet.rpc.plugins.module_utils._wireguard import (
    Interface,
    Peer,
    Quick,
    checked_peer,
    ensure_key,
    explain,
    implementation,
    masked,
    missing_packages,
    parse_config,
    parse_dump,
    prove,
    render,
    settle_mtu,
    stripped,
    sync,
)
from ansible_collections.llamafleet.rpc.tests.unit.fakes import FakeRunner

PRIVATE = "cOtrsE5gc3VyZSB0aGlzIGlzIG5vIHJlYWwga2V5ISE="
PRESHARED = "cHJlc2hhcmVkLCBhbmQgbm8gcmVhbCBrZXkgZWl0aGU="
KEY = base64.b64encode(bytes(range(32))).decode()
OTHER = base64.b64encode(bytes(range(1, 33))).decode()

PEERS = (
    Peer("n1", KEY, "10.98.0.1", "198.18.1.11:51820", None, 1500, "n2"),
    Peer("n3", OTHER, "10.98.0.3", None, 25, None, "n3"),
)
INTERFACE = Interface("wg-llama", "10.98.0.2", 20, 51820, 1420, PEERS)


def test_the_configuration_has_no_endpoint_line_for_a_peer_without_one() -> None:
    """B5-08: an empty Endpoint line is a syntax error for wg."""
    text = render(INTERFACE, KEY, PRIVATE, {"n2": PRESHARED})
    assert text.count("Endpoint = ") == 1
    assert text.count("PersistentKeepalive = 25") == 1
    assert text.count("PresharedKey = ") == 1
    assert "MTU = 1420" in text


def test_what_is_shown_holds_no_secret_but_says_which_is_new() -> None:
    before = render(INTERFACE, KEY, PRIVATE, {})
    after = render(INTERFACE, KEY, PRIVATE, {"n2": PRESHARED})
    shown = masked(before) + masked(after, before)
    assert PRIVATE not in shown
    assert PRESHARED not in shown
    assert "PresharedKey = (hidden, new)" in shown
    assert "PrivateKey = (hidden)" in masked(after, before)
    assert "privatekey = (hidden)" in masked("privatekey = " + PRIVATE)


def test_the_kept_configuration_is_read_back() -> None:
    kept = parse_config(render(INTERFACE, KEY, PRIVATE, {"n2": PRESHARED}))
    assert kept == {
        "address": "10.98.0.2",
        "mtu": 1420,
        "public_key": KEY,
        "peers": {
            "n1": {"public_key": KEY, "address": "10.98.0.1", "endpoint": "198.18.1.11:51820"},
            "n3": {"public_key": OTHER, "address": "10.98.0.3", "endpoint": None},
        },
    }
    assert PRIVATE not in str(kept)
    assert parse_config("") == {"address": None, "mtu": None, "public_key": None, "peers": {}}


def test_what_wg_itself_reads_has_no_line_of_wg_quick() -> None:
    plain = stripped(render(INTERFACE, KEY, PRIVATE, {}))
    assert "Address" not in plain
    assert "MTU" not in plain
    assert PRIVATE in plain


@pytest.mark.parametrize(
    "field",
    [
        {"host": "n1\nPostUp = reboot"},
        {"public_key": "short"},
        {"public_key": KEY + "\nPostUp = reboot"},
        {"address": "10.0.0.1/0"},
        {"address": "0.0.0.0"},
        {"endpoint": "n1.example.org:51820"},
        {"keepalive": 70000},
    ],
)
def test_what_another_host_says_is_checked_before_it_is_written(field: dict[str, object]) -> None:
    """Law 16: these words become part of a file that root's tools read."""
    fine = {"host": "n1", "public_key": KEY, "address": "10.98.0.1", "endpoint": None, "keepalive": None}
    checked_peer(fine, 51820)
    with pytest.raises(Exception, match="peer"):
        checked_peer({**fine, **field}, 51820)


def test_an_empty_configuration_is_never_loaded(tmp_path: Path) -> None:
    """B5-06: loading the output of a strip that failed would remove all peers."""
    runner = FakeRunner()
    for text in ("", "[Interface]\nListenPort = 1\n"):
        with pytest.raises(MeshError, match="nothing changed"):
            sync(runner, "wg-llama", text, 2, str(tmp_path))
    assert runner.ran == []
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_wg_cannot_read_is_not_quoted(tmp_path: Path) -> None:
    runner = FakeRunner(commands={"wg syncconf": Result(1, "", f"Key is not the correct length: `{PRIVATE}'")})
    with pytest.raises(MeshError, match="unchanged") as caught:
        sync(runner, "wg-llama", render(INTERFACE, KEY, PRIVATE, {}), 2, str(tmp_path))
    assert PRIVATE not in str(caught.value)


# ------------------------------------------------------------------------------------------------------ diagnosis


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("RTNETLINK answers: Operation not supported", "no_wireguard_module"),
        ("Error: Unknown device type.\nUnable to access interface: Protocol not supported", "no_wireguard_module"),
        ("RTNETLINK answers: Address already in use", "port_in_use"),
        ('Failed to create TUN device: CreateTUN("wg0") failed; /dev/net/tun does not exist', "no_tun"),
        ("RTNETLINK answers: Operation not permitted", "not_permitted"),
        ("something new", "failed"),
    ],
)
def test_what_wg_quick_says_is_understood(said: str, code: str) -> None:
    """B5-11, B5-12."""
    assert explain(said)[0] == code


def test_the_kernel_module_is_taken_where_there_is_one() -> None:
    assert implementation(FakeRunner(files={"/sys/module/wireguard/version": "1"}))[0] == "kernel"
    assert implementation(FakeRunner(commands={"modprobe -n -q wireguard": Result(0, "", "")}))[0] == "kernel"


def test_without_a_module_wireguard_go_takes_its_place_and_a_due_reboot_is_named() -> None:
    """B5-11: the running kernel differs from the installed one after an update without a reboot."""
    files = {"/dev/net/tun": "", "/proc/sys/kernel/osrelease": "6.1.0-9\n", "/lib/modules/6.1.0-22/modules.dep": ""}
    kind, why = implementation(FakeRunner(files=files, commands={"modprobe": Result(1, "", "")}))
    assert kind == "userspace"
    assert "6.1.0-9 is not installed any more, 6.1.0-22 is: a reboot is due" in why
    assert missing_packages(FakeRunner(), "userspace", True) == [
        "iproute2",
        "wireguard-tools",
        "nftables",
        "wireguard-go",
    ]


def test_a_container_without_tun_cannot_have_a_mesh_of_ours() -> None:
    """B5-11."""
    kind, why = implementation(FakeRunner())
    assert kind is None
    assert why.startswith("no_wireguard_module")


def test_the_owner_of_the_udp_port_is_named() -> None:
    """B5-12: another service has the port of the mesh."""
    head = "  sl  local_address rem_address   st (and so on)\n"
    row = "  9: 00000000:{port:04X} 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 4711 2 0 0\n"
    files = {
        "/proc/net/udp": head + row.format(port=51820),
        "/proc/812/stat": "812 (openvpn) S 1 " + "0 " * 40,
        "/proc/812/cgroup": "0::/system.slice/openvpn@home.service",
    }
    links = {"/proc/812/fd/5": "socket:[4711]", "/proc/812/exe": "/usr/sbin/openvpn"}
    runner = FakeRunner(files=files, links=links)
    assert port_owner(runner, 51820) == "/usr/sbin/openvpn (pid 812, openvpn@home.service)"
    assert port_owner(runner, 51821) is None
    assert "kernel" in (port_owner(FakeRunner(files={"/proc/net/udp6": files["/proc/net/udp"]}), 51820) or "")


def test_links_and_routes_of_a_host() -> None:
    addresses = (
        '[{"ifname":"lo","mtu":65536,"addr_info":[{"family":"inet","local":"127.0.0.1","prefixlen":8}]},'
        '{"ifname":"eth0","mtu":9000,"addr_info":[{"family":"inet","local":"192.168.0.7","prefixlen":24}]},{}]'
    )
    routes = (
        '[{"dst":"default","gateway":"192.168.0.1","dev":"eth0"},{"dst":"192.168.0.0/24","dev":"eth0"},'
        '{"dst":"10.1.0.0/16","dev":"tun0"},{"type":"blackhole","dst":"10.2.0.0/16"}]'
    )
    runner = FakeRunner(
        files={"/sys/class/net/eth0/device/x": "", "/sys/class/net/eth0/speed": "10000\n"},
        commands={"ip -j -4 addr show": Result(0, addresses, ""), "ip -j -4 route show": Result(0, routes, "")},
    )
    found = underlay(runner)
    assert found["links"] == [
        {
            "interface": "eth0",
            "address": "192.168.0.7",
            "prefix": 24,
            "mtu": 9000,
            "speed_mbps": 10000,
            "medium": "wired",
        }
    ]
    assert found["default_address"] == "192.168.0.7"
    assert [route["to"] for route in found["routes"]] == ["192.168.0.0/24", "10.1.0.0/16"]


# ------------------------------------------------------------------------------------------------------------ MTU


def path(limits: dict[str, int]) -> object:
    """A network that carries packets of at most so many bytes to each address; 0 answers nothing."""
    return lambda addresses, size: {address for address in addresses if size <= limits.get(address, 0)}


@pytest.mark.parametrize(
    ("paths", "kept", "real", "mtu"),
    [
        ({}, None, {}, 1420),
        ({"a": 1500}, None, {"a": 1500}, 1420),
        ({"a": 9000}, None, {"a": 1500}, 1420),
        ({"a": 9000}, None, {"a": 9000}, 8920),
        ({"a": 9000}, None, {}, 1420),
        ({"a": 9000, "b": 1500}, None, {"a": 9000, "b": 1500}, 1420),
        ({"a": 9000, "b": 9000}, None, {"a": 9000}, 1420),
        ({"a": 1500}, None, {"a": 1492}, 1412),
        ({"a": 1500}, None, {"a": 1399}, 1280),
        ({"a": 1500}, None, {"a": 100}, 1280),
        ({"a": 1280}, None, {"a": 1280}, 1200),
        ({"a": 9000}, 8920, {"a": 1500}, 1420),
        ({"a": 9000}, 8920, {"a": 9000}, 8920),
        ({"a": 9000}, 8920, {}, 8920),
        ({"a": 9000}, 1420, {"a": 9000}, 1420),
        ({"a": 1500}, 8920, {"a": 1500}, 1420),
        ({"a": None}, None, {"a": 9000}, 1420),
    ],
)
def test_the_mtu_is_that_of_the_real_path(
    paths: dict[str, int | None], kept: int | None, real: dict[str, int], mtu: int
) -> None:
    """B5-01: a jumbo card is believed only when packets of its size come back; what was settled stays."""
    asked: list[int] = []

    def probe(addresses: Sequence[str], size: int) -> set[str]:
        asked.append(size)
        return {address for address in addresses if size <= real.get(address, 0)}

    assert settle_mtu(paths, kept, probe) == mtu
    assert len(asked) <= 12


# ----------------------------------------------------------------------------------------------------------- keys


def test_a_key_is_made_once_and_only_readable_by_root(tmp_path: Path) -> None:
    """B5-04: a second run keeps the key."""
    runner = FakeRunner(commands={"sh -c": Result(0, KEY + "\n", ""), "wg": Result(0, "", "")})
    keys = tmp_path / "wireguard" / "wg-llama.key"
    assert ensure_key(runner, str(keys), False, True) == (None, True)
    assert not keys.exists()
    assert ensure_key(runner, str(keys), False, False) == (KEY, True)
    first = keys.read_text()
    assert len(base64.b64decode(first)) == 32
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    assert ensure_key(runner, str(keys), False, False) == (KEY, False)
    keys.chmod(0o644)
    assert ensure_key(runner, str(keys), False, False) == (KEY, True)
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    assert keys.read_text() == first
    assert ensure_key(runner, str(keys), True, True)[1]
    assert keys.read_text() == first
    ensure_key(runner, str(keys), True, False)
    assert keys.read_text() != first
    assert not any(first.strip() in word for argv in runner.ran for word in argv)


# ---------------------------------------------------------------------------------------------------------- proof

ADDR = '[{"ifname":"wg-llama","mtu":1420,"addr_info":[{"family":"inet","local":"10.98.0.2","prefixlen":20}]}]'
DUMP = f"(priv)\t{KEY}\t51820\toff\n{KEY}\t(none)\t198.18.1.11:51820\t10.98.0.1/32\t{{age}}\t{{received}}\t1\toff\n"


class Tunnel(FakeRunner):
    """A tunnel that receives so many bytes with every look at it, and a route to its peer."""

    def __init__(self, received: int, device: str = "wg-llama", up: bool = True) -> None:
        super().__init__(
            commands={
                "ip -j -4 addr show": Result(0, ADDR, ""),
                "ip -j route get": Result(0, f'[{{"dst":"10.98.0.1","dev":"{device}"}}]', ""),
            }
        )
        self.received, self.total, self.up = received, 0, up

    def run(self, argv: Sequence[str], timeout: float = 30.0) -> Result:
        if argv[0] != "wg":
            return super().run(argv, timeout)
        self.total += self.received
        return Result(0, DUMP.format(age=1700000000, received=self.total), "") if self.up else Result(1, "", "gone")


def proof(tunnel: Tunnel, limit: int) -> str:
    """The status of a peer that answers packets of at most `limit` bytes."""

    def probe(addresses: Sequence[str], size: int) -> set[str]:
        return set(addresses) if size <= limit else set()

    (verdict,) = prove(tunnel, "wg-llama", PEERS[:1], ["n1"], 0.1, probe)
    assert bool(verdict["hint"]) == (verdict["status"] != "ok")
    return str(verdict["status"])


def test_a_route_past_the_tunnel_is_found() -> None:
    """B5-17: `ip route get` answers with eth0."""
    assert proof(Tunnel(1, "eth0"), 1500) == "wrong_route"


def test_each_way_a_tunnel_can_fail_has_its_name() -> None:
    assert proof(Tunnel(1), 1500) == "ok"
    assert proof(Tunnel(1), 1400) == "big_packets_lost"
    assert proof(Tunnel(1), 0) == "silent"
    # The last handshake, whenever it was, does not say that the peer still knows us.
    assert proof(Tunnel(0), 0) == "no_answer"
    assert proof(Tunnel(1, up=False), 1500) == "not_running"


def test_the_dump_of_wg() -> None:
    own, peers = parse_dump(DUMP.format(age=1700000000, received=7))
    assert own == {"public_key": KEY, "port": 51820}
    assert peers[KEY]["handshake"] == 1700000000
    assert peers[KEY]["received"] == 7
    assert peers[KEY]["keepalive"] is None
    assert not peers[KEY]["psk"]
    with pytest.raises(MeshError, match="wg show dump"):
        parse_dump("nonsense")


def test_the_unit_of_wg_quick_reads_one_directory_only() -> None:
    with pytest.raises(MeshError, match="/etc/wireguard"):
        Quick(FakeRunner(), "systemd", "/opt/wg", "wg-llama")
