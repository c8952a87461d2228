# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The packet filter before the worker ports: one nftables table of our own, and nothing else.

Whoever reaches a worker port can run code on its host, so it is open to the one primary, by address and by the
interface that the packet came in on. Binding to the mesh address alone does not do that: a neighbour on the LAN with a
static route to it connects in clear (measured). An accept of ours ends our chain only; another table may still drop the
packet (nft(8), "policy"), so the firewalls of the host are looked at, too.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._files import read_text, write_atomic
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Result, Runner
from ansible_collections.llamafleet.rpc.plugins.module_utils._units import MANAGED

TABLE = "llamafleet"
RULES_PATH = "/etc/llamafleet/firewall.nft"
UNIT = "llamafleet-firewall.service"
UNIT_PATH = f"/etc/systemd/system/{UNIT}"


class FirewallError(FleetError):
    """The worker ports cannot be protected on this host; the message says why and what can be done."""


@dataclass(frozen=True)
class Door:
    """A worker port, and the one address that may come in. None: nobody from outside."""

    port: int
    source: str | None


@dataclass(frozen=True)
class Rules:
    """What the table shall say. ``interface`` empty: the mesh is a trusted LAN without an interface of its own.

    ``endpoints`` are worker ports of other hosts that this one calls as their primary. ``users`` are the numeric ids of
    the accounts that may connect to worker ports from this host; empty: all may.
    """

    interface: str
    doors: tuple[Door, ...]
    endpoints: tuple[tuple[str, int], ...] = ()
    users: tuple[int, ...] = ()


def statements(rules: Rules) -> tuple[list[str], list[str]]:
    """The rules of the input and of the output chain, in order. Values are checked by the caller."""
    ports = sorted({door.port for door in rules.doors})
    listed = "{ " + ", ".join(map(str, ports)) + " }"
    inward: list[str] = []
    if ports:
        arrival = f'iifname "{rules.interface}" ' if rules.interface else ""
        for door in sorted(rules.doors, key=lambda one: one.port):
            if door.source is not None:
                inward.append(f"{arrival}ip saddr {door.source} tcp dport {door.port} accept")
        inward.append(f'iifname "lo" tcp dport {listed} accept')
        # Answers to a connection that went out from such a port, which may lie in the range of outgoing ports.
        inward.append(f"tcp dport {listed} ct direction reply accept")
        inward.append(f"tcp dport {listed} drop")
    outward: list[str] = []
    if rules.users:
        allowed = "{ " + ", ".join(str(user) for user in sorted({0, *rules.users})) + " }"
        refuse = f"meta skuid != {allowed} reject with tcp reset"
        if ports:
            outward.append(f'oifname "lo" tcp dport {listed} {refuse}')
        for address, port in sorted(set(rules.endpoints)):
            outward.append(f"ip daddr {address} tcp dport {port} {refuse}")
    return inward, outward


def _tagged(statement: str) -> str:
    """A rule with a comment that stands for its text: nft prints rules in its own words, comments as they are."""
    return f'{statement} comment "{TABLE} {hashlib.sha256(statement.encode()).hexdigest()[:12]}"'


def render(rules: Rules) -> str:
    """The file that nft loads, as one transaction; empty when there is nothing to protect."""
    inward, outward = statements(rules)
    if not inward and not outward:
        return ""
    lines = [f"# {MANAGED}", f"table inet {TABLE}", f"delete table inet {TABLE}", f"table inet {TABLE} {{"]
    for chain, hook, body in (("input", "input", inward), ("output", "output", outward)):
        if body:
            lines += [f"\tchain {chain} {{", f"\t\ttype filter hook {hook} priority -10; policy accept;"]
            lines += [f"\t\t{_tagged(statement)}" for statement in body]
            lines.append("\t}")
    return "\n".join([*lines, "}", ""])


def unit_text(nft: str, path: str) -> str:
    """The unit that loads the table before the network is up. nftables.service flushes all tables when it (re)starts,
    reloads or stops, so ours is loaded again with it."""
    return f"""# {MANAGED}
[Unit]
Description=Packet filter before the llama.cpp workers
DefaultDependencies=no
Wants=network-pre.target
Before=network-pre.target shutdown.target
Conflicts=shutdown.target
After=nftables.service
PartOf=nftables.service
ReloadPropagatedFrom=nftables.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart={nft} -f {path}
ExecReload={nft} -f {path}
ExecStop=-{nft} delete table inet {TABLE}

[Install]
WantedBy=sysinit.target
"""


def loaded(listing: str) -> list[str]:
    """Our comments of the rules in the output of ``nft list table``; a rule without one shows as its text."""
    found = []
    for line in listing.splitlines():
        text = line.strip()
        if not text or text.startswith(("#", "table ", "delete ", "chain ", "type ", "}")):
            continue
        comment = re.search(rf'comment "({TABLE} [0-9a-f]{{12}})"$', text)
        found.append(comment.group(1) if comment else text)
    return found


def dropping_chains(listing: str) -> list[str]:
    """Chains of other tables at the input hook that drop what they do not know, from ``nft list chains``."""
    found, table, chain = [], "", ""
    for line in listing.splitlines():
        words = line.split()
        if words[:1] == ["table"]:
            table = " ".join(words[1:3])
        elif words[:1] == ["chain"]:
            chain = words[1]
        elif "hook input" in line and "policy drop" in line and table != f"inet {TABLE}":
            found.append(f"{table} {chain}")
    return found


def usable(runner: Runner) -> str:
    """Absolute path of an nft that works here. FirewallError otherwise (law 11, B5-16)."""
    nft = runner.which("nft")
    if nft is None:
        raise FirewallError("nft is not installed; install the package nftables")
    result = runner.run([nft, "list", "tables"], timeout=10.0)
    if result.rc != 0:
        raise FirewallError(
            f"nft does not work on this host: {_said(result)}. Its kernel lacks nf_tables, or the container has no "
            "CAP_NET_ADMIN"
        )
    return nft


def _said(result: Result) -> str:
    return (result.stderr.strip() or result.stdout.strip() or f"status {result.rc}")[-400:]


def user_ids(names: Sequence[str], check: bool) -> tuple[int, ...]:
    """Numeric ids of accounts. In check mode one that is not there yet is left out."""
    found = []
    for name in names:
        try:
            found.append(int(name) if name.isdigit() else pwd.getpwnam(name).pw_uid)
        except KeyError:
            if not check:
                raise FirewallError(
                    f"there is no account {name} on this host; correct llama_mesh_local_users"
                ) from None
    return tuple(sorted(set(found)))


# ----------------------------------------------------------------------------------------------------------- ufw


def ufw_rules(rules: Rules, listen_port: int | None) -> list[tuple[str, ...]]:
    """What ufw has to allow so that its own drop does not undo our accept: as words after ``ufw``."""
    found: list[tuple[str, ...]] = []
    if listen_port:
        found.append(("allow", f"{listen_port}/udp"))
    for door in sorted(rules.doors, key=lambda one: one.port):
        if door.source is not None:
            arrival = ("in", "on", rules.interface) if rules.interface else ()
            found.append(("allow", *arrival, "from", door.source, "to", "any", "port", str(door.port), "proto", "tcp"))
    return found


def parse_ufw(text: str) -> list[tuple[str, ...]]:
    """Our rules (by their comment) in the output of ``ufw show added``."""
    found = []
    for line in text.splitlines():
        words = shlex.split(line) if line.startswith("ufw ") else []
        if words[-2:] == ["comment", TABLE]:
            found.append(tuple(words[1:-2]))
    return found


def ufw_changes(
    runner: Runner, wanted: Sequence[tuple[str, ...]], absent: bool
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Rules to add to and to delete from ufw; none where it is not there. An inactive ufw only loses rules of ours."""
    if runner.which("ufw") is None:
        return [], []
    known = parse_ufw(runner.run(["ufw", "show", "added"]).stdout)
    active = "Status: active" in runner.run(["ufw", "status"]).stdout
    goal = list(wanted) if active and not absent else []
    return [rule for rule in goal if rule not in known], [rule for rule in known if rule not in goal]


def firewalld_active(runner: Runner) -> bool:
    """Whether firewalld filters on this host."""
    return runner.which("firewall-cmd") is not None and runner.run(["firewall-cmd", "--state"]).rc == 0


# ------------------------------------------------------------------------------------------------------ converge


@dataclass(frozen=True)
class Outcome:
    """What ``converge`` did, or in check mode would do."""

    changed: bool
    before: str
    after: str
    actions: list[str]
    warnings: list[str]


@dataclass(frozen=True)
class Place:
    """Where the table is kept. ``systemd`` false: it is loaded now and gone after a boot."""

    path: str = RULES_PATH
    unit_path: str = UNIT_PATH
    systemd: bool = True


def converge(
    runner: Runner, place: Place, rules: Rules, listen_port: int | None, with_ufw: bool, check: bool
) -> Outcome:
    """Load and keep the table, or take it away where there is nothing to protect; tell ufw what it must not drop."""
    text = render(rules)
    before = read_text(place.path) or ""
    if before and MANAGED not in before:
        raise FirewallError(f"{place.path} is not ours; move it away")
    nft = usable(runner) if text or before else runner.which("nft")
    listing = runner.run([nft, "-s", "list", "table", "inet", TABLE]) if nft else None
    now = loaded(listing.stdout) if listing is not None and listing.rc == 0 else []
    actions = ["write"] if before != text else []
    if now != loaded(text) or (not text and listing is not None and listing.rc == 0):
        actions.append("load" if text else "remove")
    unit = unit_text(nft or "", place.path) if text and place.systemd else ""
    if place.systemd and _unit_differs(runner, place, unit):
        actions.append("unit")
    wanted = ufw_rules(rules, listen_port)
    add, delete = ufw_changes(runner, wanted if with_ufw else [], absent=not with_ufw or not wanted)
    actions += ["ufw"] if add or delete else []
    if actions and not check:
        _apply(runner, place, nft or "", text, unit, actions)
        for rule in delete:
            _must(runner, "ufw", "delete", *rule)
        for rule in add:
            _must(runner, "ufw", *rule, "comment", TABLE)
    shown = (
        "".join(f"# ufw {' '.join(rule)}\n" for rule in delete),
        "".join(f"# ufw {' '.join(rule)}\n" for rule in add),
    )
    return Outcome(
        bool(actions), before + shown[0], text + shown[1], actions, _others(runner, nft, rules, listen_port, with_ufw)
    )


def _unit_differs(runner: Runner, place: Place, unit: str) -> bool:
    if (read_text(place.unit_path) or "") != unit:
        return True
    return bool(unit) and runner.run(["systemctl", "is-enabled", UNIT]).stdout.strip() != "enabled"


def _apply(runner: Runner, place: Place, nft: str, text: str, unit: str, actions: Sequence[str]) -> None:
    if "write" in actions and text:
        os.makedirs(os.path.dirname(place.path), exist_ok=True)
        candidate = place.path + ".new"
        write_atomic(candidate, text)
        try:
            # The whole file is read and checked against the kernel, and nothing is changed.
            _must(runner, nft, "-c", "-f", candidate)
        except FirewallError:
            os.unlink(candidate)
            raise
        os.replace(candidate, place.path)
    if "load" in actions or ("write" in actions and text):
        _must(runner, nft, "-f", place.path)
    if "unit" in actions:
        _apply_unit(runner, place, unit)
    if "remove" in actions:
        runner.run([nft, "delete", "table", "inet", TABLE])
        if runner.run([nft, "list", "table", "inet", TABLE]).rc == 0:
            raise FirewallError(f"table inet {TABLE} cannot be removed")
    if "write" in actions and not text:
        os.unlink(place.path)
        if not os.listdir(os.path.dirname(place.path)):
            os.rmdir(os.path.dirname(place.path))


def _apply_unit(runner: Runner, place: Place, unit: str) -> None:
    if unit:
        write_atomic(place.unit_path, unit)
        _must(runner, "systemctl", "daemon-reload")
        _must(runner, "systemctl", "enable", UNIT)
        _must(runner, "systemctl", "restart", UNIT)
        return
    runner.run(["systemctl", "disable", "--now", UNIT], timeout=60.0)
    if os.path.exists(place.unit_path):
        os.unlink(place.unit_path)
    _must(runner, "systemctl", "daemon-reload")


def _must(runner: Runner, *argv: str) -> None:
    result = runner.run(list(argv), timeout=60.0)
    if result.rc != 0:
        raise FirewallError(f"{' '.join(argv)} failed: {_said(result)}")


def _others(runner: Runner, nft: str | None, rules: Rules, listen_port: int | None, with_ufw: bool) -> list[str]:
    """What other firewalls of this host may drop although our table accepts it, with the commands that mend it."""
    wanted = ufw_rules(rules, listen_port)
    if not wanted:
        return []
    found: list[str] = []
    ufw = runner.which("ufw") is not None and "Status: active" in runner.run(["ufw", "status"]).stdout
    if ufw and not with_ufw:
        found.append(
            "ufw is active, and its drop counts more than our accept. Run: "
            + "; ".join(f"ufw {' '.join(rule)}" for rule in wanted)
        )
    firewalld = firewalld_active(runner)
    if firewalld:
        commands = [f"firewall-cmd --permanent --add-port={listen_port}/udp"] if listen_port else []
        commands += [
            "firewall-cmd --permanent --add-rich-rule='rule family=ipv4 source address="
            f"{door.source}/32 port port={door.port} protocol=tcp accept'"
            for door in rules.doors
            if door.source
        ]
        found.append(
            "firewalld is active, and its reject counts more than our accept. Run: "
            + "; ".join([*commands, "firewall-cmd --reload"])
        )
    chains = dropping_chains(runner.run([nft, "list", "chains"]).stdout) if nft and not (ufw or firewalld) else []
    if chains:
        opened = [f"udp dport {listen_port} accept"] if listen_port else []
        opened += [line for line in statements(rules)[0] if " ip saddr " in f" {line}"]
        found.append(
            f"the chain {', '.join(chains)} drops what it does not know, and that counts more than our accept. If the "
            f"mesh or a worker stays out of reach, add there: {'; '.join(opened)}"
        )
    return found
