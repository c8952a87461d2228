# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The interface of the mesh on a Mac: a job of launchd that runs wireguard-go, and gives it keys, address and route.

wireguard-go stays in the foreground below the job's shell, so that its end is the end of the job and launchd starts
both again; wg-quick would go on running without it. The kernel numbers the interface anew with each start (utunN);
wireguard-go writes that name to /var/run/wireguard/NAME.name, where the packet filter's job and we read it. Key,
configuration, peers and their checks are those of _wireguard. Sources: wireguard-go's README (-f, WG_TUN_NAME_FILE),
wg(8), and the darwin script of wg-quick for the spelling of ifconfig and route. None of this has run on a Mac yet.
"""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._files import read_text
from ansible_collections.llamafleet.rpc.plugins.module_utils._launchd import (
    Launchctl,
    Place,
    converge,
    file_is_right,
    write_job,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._mac_network import mac_route
from ansible_collections.llamafleet.rpc.plugins.module_utils._macos import TUNNELS
from ansible_collections.llamafleet.rpc.plugins.module_utils._mesh import MeshError
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import Runner
from ansible_collections.llamafleet.rpc.plugins.module_utils._units import launchd_bytes, launchd_label
from ansible_collections.llamafleet.rpc.plugins.module_utils._wireguard import Live, config_path, explain, look

# $1 wireguard-go, $2 wg, $3 name, $4 configuration, $5 address with prefix, $6 network. No key is in an argument or in
# a file that others can read.
_RUN = f"""umask 077
file={TUNNELS}/$3.name
mkdir -p {TUNNELS}
rm -f "$file"
WG_TUN_NAME_FILE=$file "$1" -f utun &
go=$!
trap 'kill "$go" 2>/dev/null; rm -f "$file"' EXIT
trap 'exit 0' TERM INT HUP
tries=0
until [ -s "$file" ] && [ -S "{TUNNELS}/$(cat "$file").sock" ]; do
  tries=$((tries + 1))
  kill -0 "$go" 2>/dev/null && [ "$tries" -lt 100 ] || exit 1
  sleep 0.1
done
device=$(cat "$file")
sed '/^Address = /d; /^MTU = /d' "$4" > "$4.start" && "$2" setconf "$device" "$4.start"
set_up=$?
rm -f "$4.start"
[ "$set_up" = 0 ] || exit 1
ifconfig "$device" inet "$5" "${{5%/*}}" alias || exit 1
ifconfig "$device" mtu "$(sed -n 's/^MTU = //p' "$4")" up || exit 1
route -q -n add -inet "$6" -interface "$device"
wait "$go"
"""


class Daemon:
    """Starting and stopping by launchd (_wireguard.Starter). ``address`` may be unknown for a removal."""

    unit_restarts = True

    def __init__(
        self,
        runner: Runner,
        directory: str,
        name: str,
        address: str | None = None,
        prefix: int = 32,
        place: Place | None = None,
        launchctl: Launchctl | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._runner = runner
        self._name = name
        self._config = config_path(directory, name)
        self._address = address
        self._prefix = prefix
        self._place = place or Place()
        self._launchctl = launchctl or Launchctl(runner)
        self._sleep = sleep
        self.unit = launchd_label(name)
        self._log = f"/var/log/{self.unit}.log"

    def definition(self) -> Mapping[str, Any]:
        """The job, without its label."""
        own = f"{self._address}/{self._prefix}"
        programs = [self._runner.which(name) or name for name in ("wireguard-go", "wg")]
        network = str(ipaddress.IPv4Network(own, strict=False))
        return {
            "ProgramArguments": ["/bin/sh", "-c", _RUN, "sh", *programs, self._name, self._config, own, network],
            "RunAtLoad": True,
            "KeepAlive": True,
            "ProcessType": "Interactive",
            "ExitTimeOut": 5,
            "StandardErrorPath": self._log,
        }

    def _text(self) -> str:
        return launchd_bytes({**self.definition(), "Label": self.unit}).decode()

    def _path(self) -> str:
        return self._place.path(self.unit)

    def enabled(self) -> bool:
        """Whether launchd would start it at boot."""
        return self._launchctl.enabled(self.unit)

    def enable(self) -> None:
        """Have it started at boot."""
        self._launchctl.enable(self.unit)

    def drop_in_differs(self, _userspace: bool) -> bool:
        """Whether the file of the job has to be written; wireguard-go is all that there is on a Mac."""
        return read_text(self._path()) != self._text() or not file_is_right(self._path(), self._place.owner)

    def write_drop_in(self, _userspace: bool) -> None:
        """Write it. launchd goes on with what it read before until the restart that follows (``unit_restarts``)."""
        write_job(self._path(), self._text(), self._place.owner)

    def set_mtu(self, live: Live, mtu: int) -> None:
        """Change the MTU of the running interface."""
        result = self._runner.run(["ifconfig", live.device, "mtu", str(mtu)], timeout=5.0)
        if result.rc != 0:
            raise MeshError(f"{self._name} does not take an MTU of {mtu}: {result.stderr.strip()[-300:]}")

    def restart(self, _live: Live) -> None:
        """(Re)start the job, and wait until the interface is there; launchd ends one that hangs by force."""
        if self._launchctl.look(self.unit) is not None:
            self._launchctl.bootout(self.unit)
        if os.path.exists(self._log):
            os.truncate(self._log, 0)
        self._launchctl.bootstrap(self.unit, self._path())
        network = ipaddress.IPv4Network(f"{self._address}/{self._prefix}", strict=False)
        other = next(str(host) for host in network if str(host) not in (str(network[0]), self._address))
        for _number in range(60):
            now = look(self._runner, self._name)
            # The route is the last thing that the job does.
            if now.answers and mac_route(self._runner, other) == now.device:
                return
            self._sleep(0.25)
        said = (read_text(self._log) or "no message").strip()[-500:]
        code, remedy = explain(said)
        raise MeshError(
            f"the tunnel {self._name} is not up 15 s after the start of {self.unit}: {code}: {remedy}\n{said}"
        )

    def remove(self, _live: Live) -> None:
        """Stop it and forget the job."""
        converge(self._launchctl, self._place, self.unit, {}, "absent", False)
        if os.path.exists(self._log):
            os.unlink(self._log)
