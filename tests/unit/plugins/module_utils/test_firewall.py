# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The packet filter: rules, recognising a loaded table, other firewalls. Real packets: see test_worker_firewall."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._firewall import (
    Door,
    FirewallError,
    Place,
    Rules,
    converge,
    dropping_chains,
    loaded,
    parse_ufw,
    render,
    statements,
    ufw_rules,
    unit_text,
    usable,
    user_ids,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Result
from ansible_collections.llamafleet.rpc.tests.unit.fakes import FakeRunner

RULES = Rules("wg-llama", (Door(50052, "10.98.0.1"), Door(50053, None)))
# Printed by ufw 0.36.2 (Debian 12), which wrote down what worker_firewall had asked it for.
UFW_ADDED = """Added user rules (see 'ufw status' for running firewall):
ufw allow 22/tcp
ufw allow 51820/udp comment 'llamafleet'
ufw allow in on wg-llama from 10.98.0.1 to any port 50052 proto tcp comment 'llamafleet'
ufw allow from 10.0.0.0/8 to any port 50052 proto tcp comment 'my own'
"""
# Printed by nft 1.0.6 for ufw's chains and a table of the operator's.
CHAINS = """table ip filter {
    chain INPUT {
        type filter hook input priority filter; policy drop;
    }
    chain FORWARD {
        type filter hook forward priority filter; policy drop;
    }
}
table inet llamafleet {
    chain input {
        type filter hook input priority filter - 10; policy accept;
    }
}
""".replace("    ", "\t")


def test_a_port_is_open_to_the_primary_on_the_mesh_and_then_dropped() -> None:
    inward, outward = statements(RULES)
    assert inward[0] == 'iifname "wg-llama" ip saddr 10.98.0.1 tcp dport 50052 accept'
    assert inward[-1] == "tcp dport { 50052, 50053 } drop"
    assert not any("saddr" in line for line in inward[1:])
    assert outward == []


def test_local_users_are_kept_from_own_and_from_distant_workers_when_asked() -> None:
    _inward, outward = statements(Rules("wg-llama", (Door(50052, None),), (("10.98.0.2", 50052),), (998,)))
    refuse = "meta skuid != { 0, 998 } reject with tcp reset"
    assert outward == [
        f'oifname "lo" tcp dport {{ 50052 }} {refuse}',
        f"ip daddr 10.98.0.2 tcp dport 50052 {refuse}",
    ]


def test_nothing_to_protect_is_no_table() -> None:
    assert render(Rules("wg-llama", (), (("10.98.0.2", 50052),))) == ""


def test_the_file_touches_no_other_table() -> None:
    text = render(RULES)
    assert "flush" not in text
    assert all("inet llamafleet" in line for line in text.splitlines() if line.startswith(("table", "delete")))


def test_a_loaded_table_is_recognised_and_a_changed_one_is_not() -> None:
    text = render(RULES)
    # nft prints rules in its own words, and comments as they are.
    printed = text.replace("priority -10", "priority filter - 10").replace("{ 50052, 50053 }", "{ 50052-50053 }")
    assert loaded(printed) == loaded(text)
    assert len(loaded(text)) == 4
    lines = printed.splitlines()
    assert loaded("\n".join(line for line in lines if " drop " not in line)) != loaded(text)
    assert loaded(printed.replace("\t\tiifname", "\t\taccept\n\t\tiifname", 1)) != loaded(text)
    assert loaded(render(Rules("wg-llama", (Door(50052, "10.98.0.9"), Door(50053, None))))) != loaded(text)


def test_the_unit_loads_before_the_network_and_after_every_flush_of_nftables() -> None:
    unit = unit_text("/usr/sbin/nft", "/etc/llamafleet/firewall.nft")
    for line in ("Before=network-pre.target shutdown.target", "PartOf=nftables.service", "After=nftables.service"):
        assert line in unit.splitlines()


@pytest.mark.parametrize(
    ("commands", "what"),
    [
        ({}, "install the package nftables"),
        ({"nft list tables": Result(1, "", "cache initialization failed: Operation not supported")}, "not supported"),
        (
            {"nft list tables": Result(1, "", "Unable to initialize Netlink socket: Protocol not supported")},
            "nf_tables",
        ),
    ],
)
def test_without_a_packet_filter_there_is_an_error(commands: dict[str, Result], what: str) -> None:
    """B5-16: a kernel without the modules of nftables, as on a Jetson."""
    with pytest.raises(FirewallError, match=what):
        usable(FakeRunner(commands=commands))


def test_accounts_become_numbers() -> None:
    assert user_ids(["root", "1234"], False) == (0, 1234)
    with pytest.raises(FirewallError, match="no account no-such-account"):
        user_ids(["no-such-account"], False)
    assert user_ids(["no-such-account"], True) == ()


def test_ufw_gets_what_it_lacks_and_loses_what_is_not_wanted_any_more() -> None:
    ours = parse_ufw(UFW_ADDED)
    assert ours == ufw_rules(RULES, 51820)
    assert ("allow", "from", "10.98.0.1", "to", "any", "port", "50052", "proto", "tcp") in ufw_rules(
        Rules("", RULES.doors), None
    )


def others(commands: dict[str, Result]) -> FakeRunner:
    table = render(RULES)
    return FakeRunner(
        commands={
            "nft list tables": Result(0, "", ""),
            "nft -s list table inet llamafleet": Result(0, table, ""),
            "nft list chains": Result(0, "", ""),
            **commands,
        }
    )


def test_an_active_ufw_is_told_or_the_operator_is(tmp_path: Path) -> None:
    path = tmp_path / "firewall.nft"
    path.write_text(render(RULES))
    place = Place(str(path), str(tmp_path / "unit"), systemd=False)
    empty = {"ufw show added": Result(0, "(None)\n", ""), "ufw status": Result(0, "Status: active\n", "")}
    outcome = converge(others(empty), place, RULES, 51820, True, True)
    assert outcome.actions == ["ufw"]
    assert "# ufw allow in on wg-llama from 10.98.0.1 to any port 50052 proto tcp" in outcome.after
    assert outcome.warnings == []
    outcome = converge(others(empty), place, RULES, 51820, False, True)
    assert not outcome.changed
    assert "ufw allow 51820/udp; ufw allow in on wg-llama" in outcome.warnings[0]
    full = dict(empty, **{"ufw show added": Result(0, UFW_ADDED, "")})
    assert not converge(others(full), place, RULES, 51820, True, True).changed
    off = dict(full, **{"ufw status": Result(0, "Status: inactive\n", "")})
    assert converge(others(off), place, RULES, 51820, True, True).actions == ["ufw"]


def test_firewalld_and_other_dropping_tables_are_told_of_with_what_to_add(tmp_path: Path) -> None:
    path = tmp_path / "firewall.nft"
    path.write_text(render(RULES))
    place = Place(str(path), str(tmp_path / "unit"), systemd=False)
    (warning,) = converge(
        others({"firewall-cmd --state": Result(0, "running\n", "")}), place, RULES, 51820, True, True
    ).warnings
    assert (
        "--add-rich-rule='rule family=ipv4 source address=10.98.0.1/32 port port=50052 protocol=tcp accept'" in warning
    )
    (warning,) = converge(others({"nft list chains": Result(0, CHAINS, "")}), place, RULES, 51820, True, True).warnings
    assert "ip filter INPUT" in warning
    assert "udp dport 51820 accept" in warning
    assert dropping_chains(CHAINS) == ["ip filter INPUT"]


def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "firewall.nft"
    path.write_text("table inet mine {}\n")
    with pytest.raises(FirewallError, match="not ours"):
        converge(others({}), Place(str(path), str(tmp_path / "unit"), False), RULES, None, True, False)
