# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The harness itself: what it promises the tests that use it, and that it leaves the machine as it was."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from ansible_collections.llamafleet.rpc.tests.fleet.harness import cgroups, common, packets, state

FLEET = Path(__file__).with_name("fleet")
ANSIBLE = Path(sys.executable).with_name("ansible")
HOSTS = ["p1", "w1:mem=512M,disk=600M", "w2", "w3:image=trixie", "x1:image=bare,role=outsider"]


def fleet(*words: object, ok: bool = True, env: Mapping[str, str] | None = None) -> str:
    """What a verb prints; with ``ok=False`` it must fail, and what it complains about is returned."""
    argv = [str(word) for word in (FLEET, *words)]
    done = subprocess.run(
        argv,
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **(env or {})},
    )
    assert (done.returncode == 0) is ok, f"{' '.join(argv)}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout if ok else done.stdout + done.stderr


def ssh(host: str, command: str, ok: bool = True) -> str:
    return fleet("in", "ssh", "-F", common.SSH_CONFIG, host, command, ok=ok)


def address(host: str) -> str:
    return state.load().host(host).address


def traces() -> dict[str, set[str]]:
    """Everything on the machine that a fleet makes something of, whoever made it.

    Of namespaces only those named like the fleet's: other tests make some of their own at any time.
    """
    ours = f"{common.NAME}-"

    def listed(*argv: str) -> set[str]:
        return set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines())

    def processes() -> Iterator[str]:
        for path in Path("/proc").glob("[0-9]*"):
            try:
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                groups = (path / "cgroup").read_text()
            except OSError:
                continue
            if not command:
                continue  # ended, and not yet collected by its new parent, which is the machine's init
            if f"/{common.NAME}/" in groups or "systemd-nspawn" in command or "mmdebstrap" in command:
                yield f"{path.name} {command}"

    forwarding = Path("/proc/sys/net/ipv4").glob("conf/*/forwarding")
    return {
        "namespaces": {name for name in listed("ip", "netns", "list") if name.startswith(ours)},
        "links": set(re.findall(r"^\d+: ([^:]+):", "\n".join(listed("ip", "link", "show")), re.MULTILINE)),
        "addresses": listed("ip", "-4", "-brief", "address", "show"),
        "routes": listed("ip", "-4", "route", "show", "table", "all"),
        "rules": listed("nft", "list", "ruleset"),
        "forwarding": {f"{path} {path.read_text()}" for path in [Path("/proc/sys/net/ipv4/ip_forward"), *forwarding]},
        "mounts": {
            point
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
            if (point := line.split(" ", 4)[4]).startswith(f"/run/netns/{ours}") or not point.startswith("/run/netns/")
        },
        "loop devices": listed("losetup", "--list", "--noheadings", "--output", "NAME,BACK-FILE"),
        "cgroups": {str(path) for path in Path("/sys/fs/cgroup").glob(f"**/{common.NAME}")},
        "nspawn": {str(path) for path in Path("/run/systemd/nspawn").glob("*/*")},
        "processes": set(processes()),
    }


def assert_same(before: dict[str, set[str]]) -> None:
    after = traces()
    changes = {kind: before[kind] ^ after[kind] for kind in before if before[kind] != after[kind]}
    assert not changes, f"before and after differ: {changes}"


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


@pytest.fixture
def clean() -> Iterator[dict[str, set[str]]]:
    """No fleet before, none after; what the machine looked like."""
    fleet("down")
    yield traces()
    fleet("down")


# --- nothing is left behind; these come first, the others share one fleet ---


@pytest.mark.fleet
def test_down_leaves_the_machine_as_it_was(clean: dict[str, set[str]]) -> None:
    fleet("up", "p1", "w1", "--egress")
    fleet("exec", "w1", "apt-get", "update", "-o", "APT::Update::Error-Mode=any")
    fleet("link", "p1", "delay=1", "50mbit")
    fleet("limit", "w1", "free=10M")
    # An ssh that stays, as Ansible's ControlPersist does.
    ssh("p1", "true")
    persist = ("-o", "ControlMaster=auto", "-o", "ControlPersist=600", "-o", f"ControlPath={common.DIR}/%n")
    subprocess.run(
        [FLEET, "in", "ssh", "-F", common.SSH_CONFIG, *persist, "p1", "true"], check=True, stderr=subprocess.DEVNULL
    )
    fleet("cut", "w1")
    fleet("down")
    assert_same(clean)
    fleet("down")  # once more does no harm
    assert_same(clean)


def _members(host: str) -> Callable[[], bool]:
    return lambda: bool(cgroups.members(host))


@pytest.mark.fleet
@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(lambda: Path(f"/run/netns/{common.NAME}-core").exists(), id="network"),
        pytest.param((common.HOSTS / "p1/merged").is_mount, id="disk"),
        pytest.param(_members("w1"), id="boot"),
        pytest.param(common.INVENTORY.exists, id="inventory"),
    ],
)
@pytest.mark.parametrize("next_verb", ["down", "up"])
def test_killed_up_is_recovered(clean: dict[str, set[str]], stage: Callable[[], bool], next_verb: str) -> None:
    victim = subprocess.Popen([FLEET, "up", "p1", "w1", "--egress"], stdout=subprocess.DEVNULL)
    until(stage)
    victim.kill()
    victim.wait()
    if next_verb == "up":
        fleet("up", "p1", "w1")
        assert ssh("w1", "hostname") == "w1\n"
    fleet("down")
    assert_same(clean)


@pytest.mark.fleet
def test_killed_down_is_recovered(clean: dict[str, set[str]]) -> None:
    fleet("up", "p1", "w1")
    victim = subprocess.Popen([FLEET, "down"], stdout=subprocess.DEVNULL)
    until(lambda: not cgroups.members("p1"))
    victim.kill()
    victim.wait()
    fleet("down")
    assert_same(clean)


@pytest.mark.fleet
def test_a_lost_state_is_recovered(clean: dict[str, set[str]]) -> None:
    fleet("up", "p1", "--egress")
    (common.DIR / "state.json").unlink()
    fleet("down")
    assert_same(clean)


@pytest.mark.fleet
def test_killed_build_leaves_no_half_base(clean: dict[str, set[str]], tmp_path: Path) -> None:
    own = {"FLEET_DIR": str(tmp_path / "fleet")}
    victim = subprocess.Popen([FLEET, "build", "bare"], env={**os.environ, **own}, stdout=subprocess.DEVNULL)
    until(lambda: bool(list(tmp_path.glob("fleet/base/.bare-*/usr"))))
    victim.kill()
    victim.wait()
    fleet("down", env=own)
    assert_same(clean)
    assert not list((tmp_path / "fleet/base").iterdir())
    fleet("purge", env=own)
    assert not list(tmp_path.iterdir())


@pytest.mark.fleet
def test_terminated_up_clears_up_after_itself(clean: dict[str, set[str]]) -> None:
    victim = subprocess.Popen([FLEET, "up", "p1", "w1"], stdout=subprocess.DEVNULL)
    until(_members("w1"))
    victim.send_signal(signal.SIGTERM)
    assert victim.wait(30) != 0
    assert_same(clean)


# --- what a fleet can do ---


@pytest.fixture(scope="module")
def up() -> Iterator[None]:
    fleet("down")
    fleet("up", *HOSTS)
    yield
    fleet("down")


@pytest.mark.fleet
@pytest.mark.usefixtures("up")
class TestFleet:
    def test_every_host_has_booted_without_a_failed_unit(self) -> None:
        for host, release in {"p1": "12", "w2": "12", "w3": "13", "x1": "12"}.items():
            assert fleet("exec", host, "systemctl", "is-system-running", "--wait") == "running\n"
            assert f'VERSION_ID="{release}"' in fleet("exec", host, "cat", "/etc/os-release")

    def test_ansible_reaches_them_by_the_inventory(self) -> None:
        output = fleet("in", ANSIBLE, "-i", common.INVENTORY, "all", "-b", "-m", "ping")
        assert output.count("SUCCESS") == len(HOSTS)
        groups = {
            name: fleet("in", ANSIBLE, "-i", common.INVENTORY, name, "--list-hosts").split()[2:]
            for name in ("llama_primary", "llama_workers", "llama_fleet", "outsiders")
        }
        assert groups == {
            "llama_primary": ["p1"],
            "llama_workers": ["w1", "w2", "w3"],
            "llama_fleet": ["p1", "w1", "w2", "w3"],
            "outsiders": ["x1"],
        }

    def test_hosts_are_different_machines(self) -> None:
        ids = {
            fleet("exec", host, "cat", "/etc/machine-id", "/etc/ssh/ssh_host_ed25519_key.pub") for host in ("p1", "w1")
        }
        assert len(ids) == 2

    def test_a_power_cut_keeps_the_disk_and_nothing_else(self) -> None:
        identity = fleet("exec", "w2", "cat", "/etc/machine-id")
        fleet("exec", "w2", "sh", "-c", "echo kept > /srv/file; nft add table ip gone; systemd-run -q sleep 1000")
        fleet("cut", "w2")
        assert [row["on"] for row in json.loads(fleet("status", "--json"))["hosts"] if row["name"] == "w2"] == [False]
        assert "is off" in fleet("exec", "w2", "true", ok=False)
        ssh("w2", "true", ok=False)
        fleet("start", "w2")
        assert ssh("w2", "sudo cat /srv/file") == "kept\n"
        assert fleet("exec", "w2", "cat", "/etc/machine-id") == identity
        assert fleet("exec", "w2", "nft", "list", "tables") == ""
        assert fleet("exec", "w2", "sh", "-c", "pgrep -x sleep || echo none") == "none\n"
        assert fleet("exec", "w2", "systemctl", "is-system-running", "--wait") == "running\n"

    def test_a_cable_is_cut_and_mended(self) -> None:
        fleet("link", "w2", "down")
        try:
            assert fleet("exec", "w2", "cat", "/sys/class/net/eth0/carrier") == "0\n"
            fleet("exec", "p1", "ping", "-c1", "-W1", address("w2"), ok=False)
        finally:
            fleet("link", "w2", "up")
        fleet("exec", "p1", "ping", "-c1", "-W2", address("w2"))

    def test_a_delayed_cable_is_late_even_after_a_power_cut(self) -> None:
        def fastest() -> float:
            output = fleet("exec", "p1", "ping", "-q", "-c5", "-i0.2", address("w2"))
            return float(re.findall(r"= ([\d.]+)/", output)[0])

        assert fastest() < 5
        fleet("link", "w2", "delay=15")
        try:
            assert 30 <= fastest() < 40
            fleet("cut", "w2")
            fleet("start", "w2")
            assert 30 <= fastest() < 40
        finally:
            fleet("link", "w2", "clear")
        assert fastest() < 5

    def test_a_lossy_cable_loses(self) -> None:
        fleet("link", "w2", "loss=40")
        try:
            output = fleet("exec", "p1", "sh", "-c", f"ping -q -c50 -i0.02 -W1 {address('w2')}; true")
        finally:
            fleet("link", "w2", "clear")
        # Both ways: 36 of 100 come back.
        assert 5 <= int(re.findall(r"(\d+) received", output)[0]) <= 32

    def test_a_slow_cable_is_slow_with_and_without_delay(self) -> None:
        def seconds() -> float:
            started = time.monotonic()
            ssh("w2", "head -c 3M /dev/zero")
            return time.monotonic() - started

        # 3 MiB take 2.5 s at 10 Mbit/s, less the first 64 KiB. A busy machine only makes it longer.
        free = seconds()
        try:
            fleet("link", "w2", "10mbit")
            assert seconds() > max(2.4, free)
            fleet("link", "w2", "delay=5")
            assert seconds() > max(2.4, free)
        finally:
            fleet("link", "w2", "clear")

    def test_memory_is_limited_and_seen_to_be(self) -> None:
        def meminfo() -> dict[str, int]:
            lines = fleet("exec", "w1", "cat", "/proc/meminfo").splitlines()
            return {line.split(":")[0]: int(line.split()[1]) for line in lines}

        idle = meminfo()
        assert idle["MemTotal"] == 512 * 1024
        fill = "import sys, time; b = bytearray(int(sys.argv[1]) << 20); time.sleep(float(sys.argv[2]))"
        fleet("exec", "w1", "systemd-run", "-q", "--unit=fill", "python3", "-c", fill, "200", "60")
        until(lambda: meminfo()["MemAvailable"] < idle["MemAvailable"] - 190 * 1024, 10)
        fleet("exec", "w1", "python3", "-c", fill, "600", "0", ok=False)
        fleet("exec", "w1", "systemctl", "stop", "fill")
        fleet("exec", "w1", "python3", "-c", fill, "300", "0")
        fleet("limit", "w1", "mem=256M")
        try:
            assert meminfo()["MemTotal"] == 256 * 1024
            fleet("exec", "w1", "python3", "-c", fill, "300", "0", ok=False)
        finally:
            fleet("limit", "w1", "mem=512M")

    @pytest.mark.parametrize("host", ["w2", "w3"])
    def test_limits_of_units_are_enforced_by_the_hosts_own_systemd(self, host: str) -> None:
        unit = ("systemd-run", "-q", "--wait", "-p", "MemoryMax=64M", "python3", "-c")
        fleet("exec", host, *unit, "b = bytearray(32 << 20)")
        fleet("exec", host, *unit, "b = bytearray(128 << 20)", ok=False)

    def test_a_processor_limit_holds(self) -> None:
        spin = "import time; e = time.monotonic() + 1\nwhile time.monotonic() < e: pass\nprint(time.process_time())"
        fleet("limit", "w2", "cpu=0.2")
        try:
            assert float(fleet("exec", "w2", "python3", "-c", spin)) < 0.5
        finally:
            fleet("limit", "w2", "cpu=64")

    def test_a_disk_runs_full(self) -> None:
        size = int(fleet("exec", "w1", "stat", "--file-system", "--format=%b", "/")) * 4096
        assert 500 << 20 < size <= 600 << 20
        fleet("limit", "w1", "free=4M")
        try:
            complaint = fleet("exec", "w1", "dd", "if=/dev/zero", "of=/srv/big", "bs=1M", "count=8", ok=False)
            assert "No space left on device" in complaint
            assert fleet("exec", "w1", "systemctl", "is-system-running") == "running\n"
        finally:
            fleet("limit", "w1", "free=all")
        fleet("exec", "w1", "dd", "if=/dev/zero", "of=/srv/big", "bs=1M", "count=8")

    def test_no_host_sets_the_clock(self) -> None:
        attempts = [
            fleet("exec", "p1", "date", "-s", "2020-01-01", ok=False),
            ssh("p1", "sudo date -s 2020-01-01", ok=False),
        ]
        assert all("Operation not permitted" in complaint for complaint in attempts)

    def test_capture_counts_a_port_on_the_cable(self) -> None:
        knock = f"import socket; print(socket.socket().connect_ex(('{address('w2')}', 50052)))"
        quiet = json.loads(
            fleet("capture", "w2", "22,50052", "--", FLEET, "in", "ssh", "-F", common.SSH_CONFIG, "w2", "true")
        )
        assert quiet["ports"]["22"]["frames"] > 10
        assert (quiet["ports"]["50052"]["frames"], quiet["missed"], quiet["fragments"]) == (0, 0, 0)
        # A port that is closed: SYN, RST, each once.
        loud = json.loads(fleet("capture", "w2", "50052", "--", FLEET, "exec", "p1", "python3", "-c", knock))
        assert loud["ports"]["50052"]["frames"] == 2
        started = time.monotonic()
        assert json.loads(fleet("capture", "w2", "22,50052", "--seconds", "0.5"))["ports"]["50052"]["frames"] == 0
        assert time.monotonic() - started > 0.5
        assert "cannot run no-such" in fleet("capture", "w2", "22", "--", "no-such", ok=False)

    def test_capture_misses_nothing_of_a_fast_stream(self) -> None:
        stream = (FLEET, "in", "ssh", "-F", common.SSH_CONFIG, "w2", "head -c 50M /dev/zero")
        fast = json.loads(fleet("capture", "w2", "22", "--", "sh", "-c", '"$@" >/dev/null', "sh", *stream))
        assert fast["missed"] == 0
        assert fast["ports"]["22"]["bytes"] > 50 << 20

    def test_without_egress_there_is_no_way_out(self) -> None:
        assert "Network is unreachable" in fleet("exec", "p1", "ping", "-c1", "192.0.2.1", ok=False)

    def test_no_second_fleet_and_no_down_from_inside(self, tmp_path: Path) -> None:
        assert "a fleet is up" in fleet("up", "other", ok=False)
        assert "end it with FLEET_DIR=" in fleet("down", ok=False, env={"FLEET_DIR": str(tmp_path / "x")})
        assert "run it outside" in fleet("in", FLEET, "down", ok=False)


# --- without hosts ---


def test_hosts_are_what_they_were_asked_to_be() -> None:
    hosts = state.parse_hosts(["head", "w1:mem=1.5G,disk=700M,cpu=0.5,image=trixie", "x:role=outsider"])
    assert [(host.role, host.address) for host in hosts.values()] == [
        ("primary", "198.18.0.11"),
        ("worker", "198.18.0.12"),
        ("outsider", "198.18.0.13"),
    ]
    assert (hosts["w1"].mem, hosts["w1"].disk, hosts["w1"].cpu) == (3 << 29, 700 << 20, 0.5)
    assert hosts["w1"].image == "trixie"


@pytest.mark.parametrize(
    "words",
    [["core"], ["Upper"], ["a", "a"], ["thirteen-long"], ["a:mem=x"], ["a:image=sid"], ["a:role=x"], ["a:cpu=0"]],
)
def test_a_wrong_host_is_refused(words: list[str]) -> None:
    with pytest.raises(common.FleetError, match=re.escape(words[-1].split("=")[-1][:4])):
        state.parse_hosts(words)


def test_a_cable_keeps_what_is_not_named() -> None:
    link = state.Link().changed(["20mbit", "delay=10,jitter=2"]).changed(["loss=5"])
    assert link == state.Link(rate="20mbit", delay=10, jitter=2, loss=5)
    assert link.changed(["down"]).down
    assert link.changed(["clear", "delay=1"]) == state.Link(delay=1)
    with pytest.raises(common.FleetError, match="fast"):
        link.changed(["fast"])


def _frame(kind: int, body: bytes) -> bytes:
    return bytes(12) + struct.pack("!H", kind) + body


def _ipv4(protocol: int, rest: bytes, offset: int = 0) -> bytes:
    return _frame(0x0800, struct.pack("!BBHHHBBH8x", 0x46, 0, 0, 0, offset, 64, protocol, 0) + bytes(4) + rest)


def test_capture_tells_ports_protocols_and_fragments() -> None:
    ports = struct.pack("!HH", 40000, 50052)
    seen = packets.Capture({50052: packets.Count()})
    for frame in (
        _ipv4(6, ports),
        _ipv4(17, ports),
        _ipv4(17, ports, offset=7),  # no header here: what looks like ports is data
        _frame(0x86DD, struct.pack("!IHBB32x", 6 << 28, 0, 6, 64) + ports),
        _frame(0x86DD, struct.pack("!IHBB32x", 6 << 28, 0, 44, 64) + ports),
        _frame(0x0806, bytes(28)),
    ):
        seen.add(memoryview(frame.ljust(128, b"\0")), len(frame))
    assert seen.frames == 6
    assert seen.ports[50052].frames == 3
    assert seen.fragments == 2
    assert seen.protocols == {"ipv4/tcp": 1, "ipv4/udp": 1, "ipv4": 1, "ipv6/tcp": 1, "ipv6/44": 1, "arp": 1}
