# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Up and down of the whole fleet."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from . import cgroups, common, hosts, images, network, state
from .common import FleetError, run
from .state import Fleet, Host

# Set beside the state, because it must outlive a state that was lost half-way.
_MADE_NETNS_DIRECTORY = common.DIR / "made-run-netns"


def up(wanted: Mapping[str, Host], bind_ro: Sequence[str], egress: bool) -> None:
    """Build what is missing and start all hosts. Whatever stops it takes back what it made."""
    started = time.monotonic()
    found = state.find()
    if found and found.complete:
        raise FleetError(f"a fleet is up: {', '.join(found.hosts)}; `fleet down` first")
    sweep()  # what a killed one left
    fleet = Fleet(wanted, bind_ro=bind_ro, egress=egress)
    try:
        # So that a later `down` finds this, and mmdebstrap, if it is still at work.
        with cgroups.entered(cgroups.CONTROL):
            state.save(fleet)
            for image in dict.fromkeys(host.image for host in wanted.values()):
                images.build(image)
            started_hosts = time.monotonic()
            _start_all(fleet)
        fleet = replace(fleet, complete=True)
        state.save(fleet)
    finally:
        if not fleet.complete:
            sweep()
    now = time.monotonic()
    print(f"{len(wanted)} hosts up in {now - started_hosts:.1f} s ({now - started:.1f} s in all)")
    print(f"inventory: {common.INVENTORY}")


def _start_all(fleet: Fleet) -> None:
    if not common.KEY.exists():
        common.KEY.with_suffix(".pub").unlink(missing_ok=True)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "fleet", "-f", common.KEY)
    if network.made_by_us():
        _MADE_NETNS_DIRECTORY.touch()
    network.core_up(fleet.egress)
    for host in fleet.hosts.values():
        hosts.start(fleet, host)
    network.helper("_meminfo", "_meminfo")
    write_access(fleet)
    hosts.wait(fleet.hosts.values())


def write_access(fleet: Fleet) -> None:
    """Write how to reach the hosts: known host keys, ssh's configuration, Ansible's static inventory."""
    keys = ((host, hosts.root(host.name) / "etc/ssh/ssh_host_ed25519_key.pub") for host in fleet.hosts.values())
    common.write(
        common.KNOWN_HOSTS, "".join(f"{host.name},{host.address} {key.read_text().strip()}\n" for host, key in keys)
    )
    common.write(
        common.SSH_CONFIG,
        "".join(f"Host {host.name}\n  HostName {host.address}\n" for host in fleet.hosts.values())
        + f"Host *\n  User deploy\n  IdentityFile {common.KEY}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {common.KNOWN_HOSTS}\n  StrictHostKeyChecking yes\n"
        # A host that is off answers "no route" after 3 s or, while its address is still remembered, not at all.
        "  ConnectTimeout 10\n",
    )

    def members(role: str) -> dict[str, dict[str, dict[str, str]]]:
        chosen = (host for host in fleet.hosts.values() if host.role == role)
        return {"hosts": {host.name: {"ansible_host": host.address} for host in chosen}}

    # JSON is YAML.
    inventory = {
        "all": {
            "vars": {
                "ansible_user": "deploy",
                "ansible_ssh_common_args": f"-F {common.SSH_CONFIG}",
                # Connections that Ansible keeps go by address, and the hosts of another fleet have the same ones.
                "ansible_control_path_dir": str(common.CONNECTIONS),
                "ansible_python_interpreter": "/usr/bin/python3",
            },
            "children": {
                "llama_fleet": {"children": {"llama_primary": members("primary"), "llama_workers": members("worker")}},
                "outsiders": members("outsider"),
            },
        }
    }
    common.write(common.INVENTORY, json.dumps(inventory, indent=2) + "\n")


def sweep() -> None:
    """Remove everything that bears the fleet's name, whether the state knows of it or not; no harm in repeating."""
    _refuse_another()
    if cgroups.inside():
        raise FleetError("this command, started by `fleet in`, would end itself: run it outside")
    cgroups.end()
    network.down()
    hosts.down()
    images.clear()
    if _MADE_NETNS_DIRECTORY.exists():
        network.forget_directory()
        _MADE_NETNS_DIRECTORY.unlink()
    shutil.rmtree(common.CONNECTIONS, ignore_errors=True)
    for path in (common.INVENTORY, common.SSH_CONFIG, common.KNOWN_HOSTS, common.DIR / "helpers.log"):
        path.unlink(missing_ok=True)
    state.forget()


def _refuse_another() -> None:
    """A fleet of the same name, but of another FLEET_DIR, is not ours to remove."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        source, point = fields[fields.index("-") + 2], Path(fields[4])
        if source.startswith(f"{common.NAME}-") and point.name == "merged" and common.HOSTS not in point.parents:
            raise FleetError(
                f"a fleet named {common.NAME} is up in {point.parents[2]}: "
                f"end it with FLEET_DIR={point.parents[2]}, or choose another FLEET_NAME"
            )


def down() -> None:
    """End the fleet, and what an interrupted `up` left of one."""
    started = time.monotonic()
    sweep()
    print(f"down in {time.monotonic() - started:.1f} s")


def purge() -> None:
    """Remove the base images and the key too."""
    if state.find():
        raise FleetError("a fleet is up: `fleet down` first")
    sweep()
    common.remove_tree(common.DIR)
