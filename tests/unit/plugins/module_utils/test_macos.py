# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What only a Mac needs, against tools that keep state and answer with re-typed output."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils import _macos
from ansible_collections.llamafleet.rpc.plugins.module_utils._firewall import Door
from ansible_collections.llamafleet.rpc.plugins.module_utils._launchd import Launchctl, Place
from ansible_collections.llamafleet.rpc.plugins.module_utils._macos import GIB, MIB, MacError, Wall
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Result
from ansible_collections.llamafleet.rpc.tests.unit.fakes import FakeRunner
from ansible_collections.llamafleet.rpc.tests.unit.launchd import Launchd as FakeLaunchd


class Mac(FakeRunner):
    """sysctl, pfctl and pmset with state; pf prints one rule per port, with what it adds itself."""

    def __init__(self, tunnel: str | None = "utun7", wired: int = 0, ram: int = 128 * GIB) -> None:
        super().__init__({"/var/run/wireguard/wg-llama.name": tunnel + "\n"} if tunnel else {})
        self.sysctls = {"hw.memsize": ram, "iogpu.wired_limit_mb": wired}
        self.rules: list[str] = []
        self.pf_on = False
        self.pf_refuses = False

    def which(self, name: str) -> str | None:
        return f"/sbin/{name}"

    def run(self, argv: Sequence[str], timeout: float = 30.0) -> Result:
        self.ran.append(list(argv))
        name, words = os.path.basename(argv[0]), list(argv[1:])
        if name == "sysctl" and words[0] == "-n":
            known = self.sysctls.get(words[1])
            if known is None:
                return Result(1, "", f"sysctl: unknown oid '{words[1]}'")
            return Result(0, f"{known}\n", "")
        if name == "sysctl":
            key, _equals, value = words[0].partition("=")
            self.sysctls[key] = int(value)
            return Result(0, "", "")
        if name == "pfctl":
            return self._pfctl([word for word in words if word != "-q"])
        return super().run(argv, timeout)

    def _pfctl(self, words: list[str]) -> Result:
        if words == ["-s", "info"]:
            return Result(0, f"Status: {'Enabled' if self.pf_on else 'Disabled'} for 0 days 00:00:01\n", "")
        if words == ["-E"]:
            self.pf_on = True
            return Result(0, "", "Token : 123\n")
        assert words.pop(0) in ("-a", "-n")
        assert _macos.ANCHOR in words
        if "-s" in words:
            return Result(0, "".join(rule + "\n" for rule in self.rules), "No ALTQ support in kernel\n")
        if "-F" in words:
            self.rules = []
            return Result(0, "", "rules cleared\n")
        if self.pf_refuses:
            return Result(1, "", "x:2: syntax error\n")
        tunnel = next(word for word in words if word.startswith("mesh=")).removeprefix("mesh=")
        if "-a" in words:  # -n came first, and only reads
            return Result(0, "", "")
        self.rules = []
        for line in Path(words[-1]).read_text().splitlines():
            ports = re.search(r"\{ (.*) \}", line)
            for port in ports.group(1).split(", ") if ports else [""]:
                rule = re.sub(r"port \{.*\}", f"port = {port}", line)
                rule = rule.replace("$mesh", tunnel)
                if not rule.startswith("#"):
                    self.rules.append(rule.replace(" label", " flags S/SA keep state label"))
        return Result(0, "", "")


@pytest.fixture
def launchd() -> FakeLaunchd:
    return FakeLaunchd()


@pytest.fixture
def wall(tmp_path: Path) -> Wall:
    (tmp_path / "jobs").mkdir()
    owner = (os.getuid(), (tmp_path / "jobs").stat().st_gid)
    return Wall(str(tmp_path / "pf" / "llamafleet"), Place(str(tmp_path / "jobs"), owner))


def launchctl(fake: FakeLaunchd) -> Launchctl:
    return Launchctl(fake, 30.0, fake.sleep, fake.clock)


# ------------------------------------------------------------------------------------------------- wired limit


@pytest.mark.parametrize(
    ("ram", "ceiling"), [(8, 8 * 85 // 100 * GIB), (16, None), (64, 59 * GIB), (128, 123 * GIB), (192, 187 * GIB)]
)
def test_the_ceiling_of_the_wired_limit(ram: int, ceiling: int | None) -> None:
    found = _macos.wired_ceiling(ram * GIB)
    assert found == max(ram * GIB * 85 // 100, (ram - 5) * GIB) and found < ram * GIB
    if ram >= 64:
        assert found == ceiling


def test_the_limit_is_bounded_by_the_ceiling_and_by_the_need() -> None:
    assert _macos.wired_limit_mb(128 * GIB, 112 * GIB) == 112 * 1024
    assert _macos.wired_limit_mb(128 * GIB, 112 * GIB, 50 * GIB) == 51 * 1024
    assert _macos.wired_limit_mb(128 * GIB, 112 * GIB, 100 * MIB) == 164
    assert _macos.wired_limit_mb(128 * GIB, 112 * GIB, 111 * GIB) == 112 * 1024
    for wanted in (124 * GIB, 0, -1):
        with pytest.raises(MacError, match="at most 125952 MiB"):
            _macos.wired_limit_mb(128 * GIB, wanted)


def test_the_limit_is_set_now_and_for_every_boot_and_given_back(launchd: FakeLaunchd, wall: Wall) -> None:
    mac, place = Mac(), wall.place
    shown, before = _macos.converge_wired(mac, launchctl(launchd), place, 114688, True)
    assert shown.actions == ["write", "bootstrap", "set"] and before == 0 and mac.sysctls["iogpu.wired_limit_mb"] == 0
    done, _before = _macos.converge_wired(mac, launchctl(launchd), place, 114688, False)
    assert done.changed and mac.sysctls["iogpu.wired_limit_mb"] == 114688
    job = launchd.jobs[_macos.WIRED_LABEL].plist
    assert job["ProgramArguments"] == ["/usr/sbin/sysctl", "iogpu.wired_limit_mb=114688"] and "KeepAlive" not in job
    assert not _macos.converge_wired(mac, launchctl(launchd), place, 114688, False)[0].changed
    mac.sysctls["iogpu.wired_limit_mb"] = 0  # as after a boot whose job failed
    assert _macos.converge_wired(mac, launchctl(launchd), place, 114688, False)[0].actions == ["set"]
    gone, _before = _macos.converge_wired(mac, launchctl(launchd), place, None, False)
    assert gone.changed and mac.sysctls["iogpu.wired_limit_mb"] == 0 and launchd.jobs == {}
    mac.sysctls["iogpu.wired_limit_mb"] = 5000
    assert not _macos.converge_wired(mac, launchctl(launchd), place, None, False)[0].changed, "not ours"


def test_a_mac_without_the_setting_is_told_so(launchd: FakeLaunchd, wall: Wall) -> None:
    mac = Mac()
    del mac.sysctls["iogpu.wired_limit_mb"]
    with pytest.raises(MacError, match="only Apple Silicon"):
        _macos.converge_wired(mac, launchctl(launchd), wall.place, 1000, False)


# --------------------------------------------------------------------------------------------- packet filter

DOORS = (Door(50052, "10.98.0.1"), Door(50053, None))


def test_law_11_the_port_is_open_to_the_primary_on_the_tunnel_only() -> None:
    rules = [line.split(" label")[0] for line in _macos.pf_rules(DOORS, True).splitlines()[1:]]
    assert rules == [
        "pass in quick on lo0 proto tcp from any to any port { 50052, 50053 }",
        "pass in quick on $mesh inet proto tcp from 10.98.0.1 to any port 50052",
        "block drop in quick proto tcp from any to any port { 50052, 50053 }",
    ]
    assert "on $mesh" not in _macos.pf_rules(DOORS, False)
    assert _macos.pf_rules([], True) == ""


def test_the_anchor_is_loaded_once_and_follows_the_tunnel(launchd: FakeLaunchd, wall: Wall) -> None:
    mac = Mac()

    def bring(doors: Sequence[Door] = DOORS, check: bool = False) -> list[str]:
        return _macos.converge_pf(mac, launchctl(launchd), wall, doors, "wg-llama", check).actions

    def on() -> bool:
        return mac.pf_on

    assert bring(check=True) == ["write", "load", "job"]
    assert mac.rules == [] and not on() and not os.path.exists(wall.path) and launchd.jobs == {}
    assert bring() == ["write", "load", "job"]
    assert on() and any(" on utun7 " in rule and "10.98.0.1" in rule for rule in mac.rules)
    assert bring() == []
    mac.files["/var/run/wireguard/wg-llama.name"] = "utun4\n"
    assert bring() == ["load"] and any(" on utun4 " in rule for rule in mac.rules) and bring() == []
    mac.rules.insert(0, "pass in all flags S/SA keep state")
    assert bring() == ["load"]
    mac.pf_on = False
    assert bring() == ["load"] and on()
    mac.files.clear()  # the tunnel is down: nobody from outside comes in
    bring()
    assert not any("10.98.0.1" in rule and " on lo0 " not in rule for rule in mac.rules)
    assert bring([]) == ["write", "remove", "job"] and mac.rules == [] and launchd.jobs == {}
    assert not os.path.exists(wall.path) and bring([]) == []


def test_rules_that_pf_does_not_read_never_replace_those_that_stand(launchd: FakeLaunchd, wall: Wall) -> None:
    mac = Mac()
    _macos.converge_pf(mac, launchctl(launchd), wall, DOORS, "wg-llama", False)
    text, rules = Path(wall.path).read_text(), list(mac.rules)
    mac.pf_refuses = True
    with pytest.raises(MacError, match="syntax error"):
        _macos.converge_pf(mac, launchctl(launchd), wall, DOORS[:1], "wg-llama", False)
    assert (
        Path(wall.path).read_text() == text
        and mac.rules == rules
        and os.listdir(os.path.dirname(wall.path)) == ["llamafleet"]
    )
    Path(wall.path).write_text("somebody's\n")
    with pytest.raises(MacError, match="not ours"):
        _macos.converge_pf(mac, launchctl(launchd), wall, DOORS, "wg-llama", False)


@pytest.mark.parametrize(("name", "mesh"), [("utun9", "utun9"), (None, "lo0")])
def test_at_boot_the_anchor_is_loaded_with_the_tunnel_of_that_boot(tmp_path: Path, name: str | None, mesh: str) -> None:
    """The job's own script, run by a real shell with a pfctl that writes down what it was asked."""
    if name:
        (tmp_path / "wg-llama.name").write_text(name + "\n")
    tool = tmp_path / "pfctl"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    tool.chmod(0o755)
    argv = list(_macos.pf_job("wg-llama", "/etc/pf.anchors/llamafleet")["ProgramArguments"])
    for there, here in (("/sbin/ifconfig", "false"), ("/sbin/pfctl", str(tool)), (_macos.TUNNELS, str(tmp_path))):
        argv[2] = argv[2].replace(there, here)
    subprocess.run(argv, check=True)
    assert (tmp_path / "asked").read_text().splitlines() == [
        f"-q -a com.apple/100.llamafleet -D mesh={mesh} -f /etc/pf.anchors/llamafleet",
        "-q -E",
    ]


# -------------------------------------------------------------------------------------- application firewall

APPS = """ALF: total number of apps = 2

1 :  /opt/llamafleet/builds/b1/bin/ggml-rpc-server
 \t ( Allow incoming connections )

2 :  /Applications/Some Thing.app
 \t ( Block incoming connections )
"""


def test_the_application_firewall_is_told_of_new_builds_only() -> None:
    assert _macos.parse_apps(APPS) == {
        "/opt/llamafleet/builds/b1/bin/ggml-rpc-server": True,
        "/Applications/Some Thing.app": False,
    }
    on = Result(0, "Firewall is enabled. (State = 1)\n", "")
    runner = FakeRunner(
        commands={
            "socketfilterfw": Result(0, "", ""),
            "socketfilterfw --getglobalstate": on,
            "socketfilterfw --listapps": Result(0, APPS, ""),
        }
    )
    new = "/opt/llamafleet/builds/b2/bin/ggml-rpc-server"
    programs = ["/opt/llamafleet/builds/b1/bin/ggml-rpc-server", new]
    assert _macos.converge_apps(runner, programs, True) == [new] and len(runner.ran) == 2
    assert _macos.converge_apps(runner, programs, False) == [new]
    assert [words[1:] for words in runner.ran[-2:]] == [["--add", new], ["--unblockapp", new]]
    runner.commands["socketfilterfw --getglobalstate"] = Result(0, "Firewall is disabled. (State = 0)\n", "")
    assert _macos.converge_apps(runner, programs, False) == []


# ------------------------------------------------------------------------------------------------------- health


def test_b4_11_a_job_without_process_type_shows_in_its_priority() -> None:
    assert _macos.slowed("  501  20\n  502  31\n  503   4\n  504 46\ngarbage\n") == [501, 503]


def test_b4_14_why_a_program_was_killed() -> None:
    assert "sign it again" in (_macos.killed_by_macos(-9, "com.apple.provenance\n") or "")
    assert "quarantine" in (_macos.killed_by_macos(137, "com.apple.quarantine\n") or "")
    assert _macos.killed_by_macos(0, "com.apple.quarantine\n") is None


def test_b4_14_a_new_program_is_freed_once_and_a_hopeless_one_explained() -> None:
    """Killed without a word: out of quarantine, signed anew, tried once more."""
    commands = {
        "xattr": Result(0, "com.apple.quarantine\ncom.apple.provenance\n", ""),
        "xattr -d": Result(0, "", ""),
        "codesign": Result(0, "", ""),
    }
    runner, ends = FakeRunner(commands=commands), [-9, 0]
    assert _macos.freed(runner, lambda: ends.pop(0), "/x/server") is True and ends == []
    assert ["xattr", "-d", "com.apple.quarantine", "/x/server"] in runner.ran
    assert ["codesign", "--force", "--sign", "-", "/x/server"] in runner.ran
    quiet = FakeRunner()
    assert _macos.freed(quiet, lambda: 1, "/x/server") is False and quiet.ran == []
    with pytest.raises(MacError, match=r"kills /x/server as it starts, also .*gatekeeper.*syspolicyd"):
        _macos.freed(
            FakeRunner(commands={**commands, "xattr": Result(0, "com.apple.provenance\n", "")}),
            lambda: 137,
            "/x/server",
        )


@pytest.mark.parametrize(
    ("error", "milliseconds", "ping", "gateway", "found"),
    [
        (errno.EHOSTUNREACH, 0, True, True, True),
        (errno.EHOSTUNREACH, 3000, True, True, False),  # asked the network: the host is off, or a router says so
        (errno.EHOSTUNREACH, 0, False, True, False),
        (errno.EHOSTUNREACH, 0, True, False, False),  # this Mac has no network
        (errno.ECONNREFUSED, 0, True, True, False),
        (0, 0, True, True, False),
    ],
)
def test_b4_13_local_network_privacy(error: int, milliseconds: int, ping: bool, gateway: bool, found: bool) -> None:
    """An agent since macOS 15 gets "No route to host" at once from a host that answers pings."""
    route = "  gateway: 10.0.0.1\n  interface: en0\n"
    runner = FakeRunner(commands={"ping": Result(0 if ping else 2, "", ""), "route": Result(0, route, "")})

    def connect(address: str, _port: int) -> tuple[int, float]:
        if address == "10.0.0.1":
            return (errno.ECONNREFUSED if gateway else errno.ENETUNREACH), 1.0
        return error, milliseconds

    said = _macos.network_problem(runner, "10.0.0.9:50052", connect)
    assert ("local_network_privacy" in (said or "")) is found
    assert (said is None) is (error == 0)


def test_health_says_what_to_do() -> None:
    runner = FakeRunner(
        commands={
            "ps": Result(0, "7 20\n8 31\n", ""),
            "good": Result(0, "version 1", ""),
            "bad": Result(-9, "", ""),
            "xattr": Result(0, "com.apple.provenance\n", ""),
        }
    )
    slow, killed = _macos.health(runner, [7, 8], ["/x/good", "/x/bad"])
    assert "process 7 " in slow and "Interactive" in slow
    assert killed.endswith("codesign --force --sign - /x/bad")
    assert _macos.health(runner, [], []) == []


def test_only_what_differs_of_the_power_settings_is_set() -> None:
    text = "Battery Power:\n sleep              1\n womp           0\nAC Power:\n sleep 0\n womp 1\n autorestart 1\n"
    runner = FakeRunner(commands={"pmset": Result(0, "", ""), "pmset -g custom": Result(0, text, "")})
    wanted = {"sleep": 0, "womp": 1, "autorestart": 1, "powernap": 0}
    assert _macos.converge_power(runner, wanted, True) == {"sleep": 0, "womp": 1} and len(runner.ran) == 1
    _macos.converge_power(runner, wanted, False)
    assert runner.ran[-1] == ["pmset", "-a", "sleep", "0", "womp", "1"]
    runner.commands["pmset -g custom"] = Result(0, text.replace("1\n womp           0", "0\n womp 1"), "")
    assert _macos.converge_power(runner, wanted, False) == {}
