# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Several models, or copies of one, on clusters of a fleet that one plan is too small for (15 devices, law 5).

The algorithm: models of a smaller ``priority`` come first, and of equal ones each gets its first copy before any gets a
second, the largest model first. For a copy, candidates are made of the hosts that are left, one for each number of
hosts k: the primary that is fastest with 1/k of the model, and the k-1 fastest hosts that hold their share of the rest
(for the objective ``memory`` the roomiest ones). The candidate with the fewest milliseconds, all devices filled fastest
first (for ``memory``, with the fewest hosts), for which plan_split finds a plan becomes the cluster; hosts that this
plan leaves empty are given back. If not all copies found a place, the whole is done again with the smallest hosts that
will do, and the better of the two is kept: by copies placed, the most urgent priority first, then by tokens/s. This is
greedy: what can be had at most is said by the bound (_place_bound), and what each cluster does is its exact plan.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError, listed
from ansible_collections.llamafleet.rpc.plugins.module_utils._explain import mib
from ansible_collections.llamafleet.rpc.plugins.module_utils._place_bound import bounds
from ansible_collections.llamafleet.rpc.plugins.module_utils._place_hosts import (
    CLUSTER,
    Host,
    Lane,
    PlaceError,
    read_hosts,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._place_report import fragment, report_lines
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan import plan_split
from ansible_collections.llamafleet.rpc.plugins.module_utils._plan_input import (
    DEFAULT_PRIORITY,
    MAX_DEVICES,
    Request,
    make_request,
)
from ansible_collections.llamafleet.rpc.plugins.module_utils._records import check_whole, fleet_devices

_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
_LONGEST_CLUSTER = 31  # _fleet: llama_fleet_cluster is 1 to 31 of a-z, 0-9 and '-'
_KEYS = {"name", "model", "replicas", "n_ctx", "n_parallel", "type_k", "type_v", "objective", "priority", "variables"}
_PLANNED = ("n_ctx", "n_parallel", "type_k", "type_v", "objective")
#: What plan_split takes for granted and a request has to be told.
_DEFAULTS: Mapping[str, Any] = {
    "n_parallel": 1,
    "type_k": "f16",
    "type_v": "f16",
    "n_batch": 2048,
    "n_ubatch": 512,
    "flash_attn": "auto",
    "kv_unified": True,
    "swa_full": False,
}
_TRIES = 3  # numbers of the roomiest hosts to try where no candidate had a plan; the last one takes all it can
_LEADS = 8  # primaries that are tried with all others before a copy is given up
_WARNED = 5  # hosts that a warning names one by one


@dataclass(frozen=True)
class Wish:
    """A model that is asked for ``replicas`` times. ``options``: those of plan_split. ``need``: bytes of one copy."""

    name: str
    model: Any
    replicas: int
    priority: int
    options: Mapping[str, Any]
    variables: Mapping[str, Any]
    request: Request
    need: int

    @property
    def objective(self) -> str:
        """As of plan_split."""
        return self.request.objective


@dataclass(frozen=True)
class Cluster:
    """A copy of a model, the hosts that serve it, and its plan."""

    wish: Wish
    copy: int
    primary: Host
    workers: tuple[Host, ...]
    plan: Plan

    @property
    def name(self) -> str:
        """Of the cluster."""
        return f"{self.wish.name}-{self.copy}"


Plan = Mapping[str, Any]
#: Of one model: the plan and the names of its hosts, None where there is no plan, by the likeness of the devices.
_Plans = dict[tuple[Any, ...], Optional[tuple[Plan, list[str]]]]


class Room(NamedTuple):
    """What a host holds of a model: (lane, bytes) of whole average layers, fastest first, and the sums of the bytes."""

    lanes: tuple[tuple[Lane, int], ...]
    total: int
    without_cpu: int


class Placed(NamedTuple):
    """The outcome of one pass: clusters, the hosts left, and for a model why no more copies have a place."""

    clusters: list[Cluster]
    left: list[Host]
    reasons: Mapping[str, str]


def place_models(records: object, models: object, primaries: object = None) -> dict[str, Any]:
    """Clusters for ``models`` on the hosts of ``records`` (see read_hosts, also for ``primaries``).

    ``models``: ``[{name, model (of gguf_info), n_ctx, replicas=1, n_parallel=1, type_k, type_v, objective, priority=50,
    variables={}}]``. The result has ``clusters``, ``unplaced``, ``unused``, ``bound``, ``inventory``, ``warnings`` and
    ``lines``, sizes in bytes. The same for whatever order of records and models. Raises a FleetError that names the
    value.
    """
    hosts = read_hosts(records, primaries)
    wishes = _wishes(models, hosts)
    plans: dict[str, _Plans] = {wish.name: {} for wish in wishes}
    placed = _fill(wishes, hosts, plans, tight=False)
    if len(placed.clusters) < sum(wish.replicas for wish in wishes):
        placed = max(placed, _fill(wishes, hosts, plans, tight=True), key=lambda each: _worth(wishes, each))
    result = {
        "clusters": [_shown(cluster) for cluster in placed.clusters],
        "unplaced": _unplaced(wishes, placed),
        "unused": _unused(hosts, placed),
        "bound": _bound(wishes, hosts, placed),
        "inventory": fragment(placed.clusters),
        "warnings": _warnings(placed),
    }
    return {**result, "lines": report_lines(result)}


# --- Input -----------------------------------------------------------------------------------------------------------


def _wishes(models: object, hosts: Sequence[Host]) -> list[Wish]:
    """The models in the order in which they are served."""
    if not isinstance(models, Sequence) or isinstance(models, (str, bytes)) or not models:
        raise PlaceError(
            f"models is {_short(models)}; give a list of at least one model, each with name, model and n_ctx"
        )
    devices = fleet_devices([host.lends for host in hosts], CLUSTER)  # an endpoint that two hosts have is an error
    found: dict[str, Wish] = {}
    for number, item in enumerate(models):
        wish = _wish(item, f"models[{number}]", devices)
        if wish.name in found:
            raise PlaceError(f"two models are called {wish.name}; rename one, or ask for it with replicas: 2")
        found[wish.name] = wish
    return sorted(found.values(), key=lambda wish: (wish.priority, -wish.need, wish.name))


def _wish(item: object, where: str, devices: Sequence[Mapping[str, Any]]) -> Wish:
    if not isinstance(item, Mapping):
        raise PlaceError(f"{where} is {_short(item)}; it must be a mapping with name, model and n_ctx")
    unknown = sorted(set(map(str, item)) - _KEYS)
    if unknown:
        raise PlaceError(f"{where} has unknown keys {', '.join(unknown)}; known are {', '.join(sorted(_KEYS))}")
    name = item.get("name")
    replicas = check_whole(item.get("replicas", 1), f"{where}: replicas", least=1) or 1
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(f"{name}-{replicas}") > _LONGEST_CLUSTER:
        raise PlaceError(
            f"{where}: name is {name!r}; clusters are called <name>-<number>, which must be 1 to {_LONGEST_CLUSTER} of "
            "a-z, 0-9 and '-'"
        )
    if item.get("n_ctx") is None:
        raise PlaceError(f"{where} ({name}): n_ctx is missing; say for how many tokens to plan")
    variables = item.get("variables") or {}
    if not isinstance(variables, Mapping):
        raise PlaceError(f"{where} ({name}): variables is {_short(variables)}; it must be a mapping for the primary")
    options = {key: item[key] for key in _PLANNED if item.get(key) is not None}
    params = {**_DEFAULTS, **{key: value for key, value in options.items() if key != "objective"}}
    priority = check_whole(item.get("priority"), f"{where} ({name}): priority", optional=True)
    try:
        request = make_request(item.get("model"), devices, params, options.get("objective", "latency"), None, None)
    except FleetError as error:
        raise PlaceError(f"{where} ({name}): {error}") from error
    return Wish(
        name=str(name),
        model=request.model.to_dict(),  # plain: Ansible looks at what it wraps each time that it is read
        replicas=replicas,
        priority=DEFAULT_PRIORITY if priority is None else priority,
        options=options,
        variables=variables,
        request=request,
        need=sum(request.sizes.weights) + sum(request.sizes.context),
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- The two passes --------------------------------------------------------------------------------------------------


def _fill(wishes: Sequence[Wish], hosts: Sequence[Host], plans: Mapping[str, _Plans], tight: bool) -> Placed:
    """One pass; ``tight`` takes the smallest hosts that will do instead of the best ones."""
    free = {host.name: host for host in hosts}
    searches = {wish.name: _Search(wish, hosts, tight, plans[wish.name]) for wish in wishes}
    clusters: list[Cluster] = []
    reasons: dict[str, str] = {}
    for copy, wish in _turns(wishes, len(hosts) + 1):
        if wish.name in reasons:
            continue
        found = searches[wish.name].best(free, copy)
        if isinstance(found, str):
            reasons[wish.name] = found
            continue
        clusters.append(found)
        taken = {host.machine for host in (found.primary, *found.workers)}
        free = {name: host for name, host in free.items() if host.machine not in taken}
    return Placed(clusters, list(free.values()), reasons)


def _turns(wishes: Sequence[Wish], most: int) -> Iterator[tuple[int, Wish]]:
    """(number of the copy, at most ``most``; model), in the order in which copies get their hosts."""
    copies = ((copy, wish) for wish in wishes for copy in range(1, min(wish.replicas, most) + 1))
    yield from sorted(copies, key=lambda turn: (turn[1].priority, turn[0]))  # stable: the largest first


def _worth(wishes: Sequence[Wish], placed: Placed) -> tuple[tuple[int, ...], float]:
    levels = sorted({wish.priority for wish in wishes})
    counts = [sum(cluster.wish.priority == level for cluster in placed.clusters) for level in levels]
    return tuple(counts), sum(_speed(cluster.plan) for cluster in placed.clusters)


def _speed(plan: Plan) -> float:
    return float(plan["predicted"]["tokens_per_s"] or 0)


class _Search:
    """Finds hosts for one copy of a model after the other."""

    def __init__(self, wish: Wish, hosts: Sequence[Host], tight: bool, plans: _Plans) -> None:
        self.wish, self.tight, self.plans = wish, tight, plans
        self.unit = max(1, wish.need // len(wish.request.sizes.weights))
        self.own = wish.request.host_bytes(pipelining=False)
        able = (host for host in hosts if host.may_lead and self._can_lead(host.leads_lanes))
        self.leads = {host.name: self._room(host.leads_lanes) for host in able}
        self.lends = {host.name: self._room(host.lends_lanes) for host in hosts}
        self.most = {name: max(room.total, self.leads.get(name, room).total) for name, room in self.lends.items()}
        self.read = (sum(wish.request.sizes.active) + sum(wish.request.sizes.context)) / max(1, wish.need)
        self.order = sorted(hosts, key=lambda host: self._rank(host, self.lends[host.name]))
        self.leaders = [self._leaders(hosts, wish.need / count) for count in range(1, MAX_DEVICES + 1)]

    def _leaders(self, hosts: Sequence[Host], share: float) -> deque[Host]:
        """Those that can be primary and hold so many bytes, the best first."""
        able = [host for host in hosts if host.name in self.leads and self.leads[host.name].total >= share]
        return deque(sorted(able, key=lambda host: self._rank(host, self.leads[host.name], share)))

    def _can_lead(self, lanes: Sequence[Lane]) -> bool:
        """Whether the CPU, if one is recorded, holds the primary's own buffers."""
        budget = self.wish.request.budget
        return all(min(budget(lane.usable), budget(lane.pool_usable)) >= self.own for lane in lanes if lane.cpu)

    def _room(self, lanes: Sequence[Lane]) -> Room:
        """An estimate: what does not fit will be found out by the plan."""
        request, found = self.wish.request, []
        left = {lane.pool: request.budget(lane.pool_usable) for lane in lanes}
        for lane in lanes:
            if lane.cpu:
                left[lane.pool] -= self.own
        for lane in lanes:
            beside = request.buffers.cpu_layers if lane.cpu else request.buffers.work_plain[1]
            room = min(request.budget(lane.usable) - (self.own if lane.cpu else 0), left[lane.pool]) - beside
            units = max(0, room) // self.unit
            units = units if lane.most is None else min(units, lane.most)
            if units:
                found.append((lane, units * self.unit))
                left[lane.pool] -= units * self.unit + beside
        without_cpu = sum(size for lane, size in found if not lane.cpu)
        return Room(tuple(found), sum(size for _lane, size in found), without_cpu)

    def _rank(self, host: Host, room: Room, share: float = math.inf) -> tuple[Any, ...]:
        """The best hosts first, if they hold ``share`` bytes; those of a larger priority last."""
        if self.tight:
            return host.priority, self.most[host.name], host.name
        if self.wish.objective == "memory":
            return host.priority, -room.total, host.name
        held, seconds = 0.0, 0.0
        for lane, size in room.lanes:
            part = min(size, share - held)
            held, seconds = held + part, seconds + part / lane.bandwidth
        return host.priority, round(seconds / held, 15) if held else 0.0, room.total, host.name

    def best(self, free: Mapping[str, Host], copy: int) -> Cluster | str:
        """A cluster for the next copy, or why there is none."""
        hosts = [host for host in self.order if host.name in free]
        needs = f"a copy needs {mib(self.wish.need)} for weights and context"
        if not any(host.name in self.leads for host in hosts):
            if not hosts:
                return f"{needs}, and no host is left"
            return (
                f"{needs} and {mib(self.own)} in the memory of its primary; none of the {len(hosts)} hosts left may be "
                "a primary and has that"
            )
        tried: set[tuple[str, ...]] = set()
        for members in (*sorted(self._candidates(hosts, free), key=self._value), *self._roomiest(hosts)):
            names = tuple(host.name for host in members)
            if names not in tried:
                tried.add(names)
                plan = self._plan(members)
                if plan is not None:
                    return self._cluster(members, plan, copy)
        reason = plan_split(self.wish.model, _devices(members), **self.wish.options)["reason"]
        total = sum(self.most[host.name] for host in hosts)
        return (
            f"{needs}, the {len(hosts)} hosts left hold {mib(total)} in whole layers; of the {len(members)} roomiest: "
            f"{reason}"
        )

    def _candidates(self, hosts: Sequence[Host], free: Mapping[str, Host]) -> Iterator[tuple[Host, ...]]:
        """For each number of hosts the first ones that have room for their share, the primary first."""
        need, most = self.wish.need, max(self.lends[host.name].total for host in hosts)
        roomiest = self._roomiest_lead(hosts)
        for count, leaders in enumerate(self.leaders, 1):
            while leaders and leaders[0].name not in free:
                leaders.popleft()
            lead = leaders[0] if leaders else roomiest
            room = self.leads[lead.name]
            if count == 1 and room.total >= need:
                yield (lead,)
            for held in dict.fromkeys((room.total, room.without_cpu)):  # helpers may be faster than the primary's CPU
                if 0 < need - held <= most * (count - 1):
                    share = (need - held) / (count - 1)
                    able = (host for host in hosts if host is not lead and self.lends[host.name].total >= share)
                    workers = tuple(itertools.islice(able, count - 1))
                    if len(workers) == count - 1:
                        yield (lead, *workers)

    def _roomiest_lead(self, hosts: Sequence[Host]) -> Host:
        return max((host for host in hosts if host.name in self.leads), key=lambda host: self.leads[host.name].total)

    def _roomiest(self, hosts: Sequence[Host]) -> Iterator[tuple[Host, ...]]:
        """As few of the roomiest hosts as may do, then some more, then as many as a plan can use, whoever leads."""
        lead = self._roomiest_lead(hosts)
        by_room = sorted(hosts, key=lambda host: -self.lends[host.name].total)
        others = [host for host in by_room if host is not lead][:MAX_DEVICES]
        total, count = self.leads[lead.name].total, 0
        while total < self.wish.need and count < len(others):
            total += self.lends[others[count].name].total
            count += 1
        for more in range(_TRIES - 1):
            if count + more < len(others):
                yield (lead, *others[: count + more])
        # All that a plan can use. Layers may be left over where the roomiest leads, and not where another one does.
        leads = sorted((host for host in hosts if host.name in self.leads), key=lambda h: -self.leads[h.name].total)
        for lead in leads[:_LEADS]:
            yield (lead, *[host for host in by_room if host is not lead][:MAX_DEVICES])

    def _value(self, members: Sequence[Host]) -> tuple[Any, ...]:
        """The smaller the better."""
        lead, *workers = members
        rooms = [self.leads[lead.name], *(self.lends[host.name] for host in workers)]
        priority = max(host.priority for host in members)
        if self.tight:
            return priority, sum(self.most[host.name] for host in members), len(members)
        if self.wish.objective == "memory":
            return priority, len(members)
        lanes = sorted((lane for room in rooms for lane in room.lanes), key=lambda each: -each[0].bandwidth)
        left, ms = self.wish.need, 0.0
        for lane, size in lanes:
            if left <= 0:
                break
            ms += min(left, size) * self.read / lane.bandwidth * 1000 + lane.hop_ms
            left -= size
        return priority, ms, len(members)

    def _plan(self, members: Sequence[Host]) -> Plan | None:
        """The plan of plan_split, None if it is not feasible. Hosts that are alike are planned once."""
        devices = _devices(members)
        likeness = _likeness(devices)
        if likeness not in self.plans:
            found = plan_split(self.wish.model, devices, **self.wish.options)
            self.plans[likeness] = (found, [host.name for host in members]) if found["feasible"] else None
        kept = self.plans[likeness]
        if kept is None:
            return None
        plan, names = kept
        now = dict(zip(names, (host.name for host in members)))
        return {**plan, "devices": [{**device, "host": now[device["host"]]} for device in plan["devices"]]}

    def _cluster(self, members: Sequence[Host], plan: Plan, copy: int) -> Cluster:
        """The cluster without the workers that the plan leaves empty."""
        lead, *workers = members
        used = {device["host"] for device in plan["devices"]}
        kept = tuple(host for host in workers if host.name in used)
        fewer = self._plan((lead, *kept)) if len(kept) < len(workers) else plan
        if fewer is None:  # the planner's effort has an end, so that fewer devices might be worse
            return Cluster(self.wish, copy, lead, tuple(workers), plan)
        return Cluster(self.wish, copy, lead, kept, fewer)


def _devices(members: Sequence[Host]) -> list[dict[str, Any]]:
    """The devices of a cluster for plan_split, the primary's host first."""
    lead, *workers = members
    return fleet_devices([lead.leads, *(host.lends for host in workers)], CLUSTER)


def _likeness(devices: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """All that plan_split sees of devices, with numbers in the place of names."""
    numbers: dict[Any, int] = {}
    found: list[Any] = []
    for device in devices:
        for key in ("host", "endpoint", "pool"):
            found.append(None if device[key] is None else numbers.setdefault((key, device[key]), len(numbers)))
        found.extend(value for key, value in device.items() if key not in ("host", "endpoint", "pool"))
        found.append(device.get("link_mbps"))
    return tuple(found)


# --- The result ------------------------------------------------------------------------------------------------------


def _shown(cluster: Cluster) -> dict[str, Any]:
    plan = cluster.plan
    own = plan["primary_host"]
    spare = [device["headroom"] for device in plan["devices"]]
    if own["usable"] is not None:
        spare.append(own["usable"] - own["total"])
    kept = ("ms_per_token", "tokens_per_s", "lower_bound_ms", "round_trips")
    return {
        "cluster": cluster.name,
        "model": cluster.wish.name,
        "primary": cluster.primary.name,
        "workers": [host.name for host in cluster.workers],
        "plan": {
            "feasible": plan["feasible"],
            "objective": plan["objective"],
            "n_ctx": plan["n_ctx"],
            **{key: plan["predicted"][key] for key in kept},
            "devices": [
                {key: device[key] for key in ("host", "device", "units", "total", "headroom")}
                for device in plan["devices"]
            ],
        },
        "headroom": min(spare),
    }


def _unplaced(wishes: Iterable[Wish], placed: Placed) -> list[dict[str, Any]]:
    found = []
    for wish in wishes:
        if wish.name in placed.reasons:
            count = wish.replicas - sum(cluster.wish.name == wish.name for cluster in placed.clusters)
            found.append({"model": wish.name, "replicas": count, "reason": placed.reasons[wish.name]})
    return found


def _unused(hosts: Sequence[Host], placed: Placed) -> list[dict[str, Any]]:
    left = {host.name for host in placed.left}
    serving = {host.name: cluster for cluster in placed.clusters for host in (cluster.primary, *cluster.workers)}
    by_machine = {host.machine: (host, serving[host.name]) for host in hosts if host.name in serving}
    found = []
    for host in hosts:
        if host.name in left:
            why = "what is left is too little for another copy" if placed.reasons else "not needed"
            found.append({"host": host.name, "why": why})
        elif host.name not in serving:
            other, cluster = by_machine[host.machine]
            found.append({"host": host.name, "why": f"shares memory with {other.name} of cluster {cluster.name}"})
    return found


def _bound(wishes: Sequence[Wish], hosts: Sequence[Host], placed: Placed) -> dict[str, Any]:
    most = bounds([(wish.request, wish.replicas) for wish in wishes], hosts)
    return {
        "asked": sum(wish.replicas for wish in wishes),
        "placed": len(placed.clusters),
        "replicas": most.replicas,
        "predicted_tokens_per_s": round(sum(_speed(cluster.plan) for cluster in placed.clusters), 3),
        "tokens_per_s": most.tokens_per_s,
    }


def _warnings(placed: Placed) -> list[str]:
    """One line for each kind, however many clusters it concerns."""
    blind = [cluster for cluster in placed.clusters if cluster.plan["primary_host"]["usable"] is None]
    lost = [
        f"{host.name} (worker of {cluster.name})"
        for cluster in placed.clusters
        for host in cluster.workers
        if host.declared and host.address is None
    ]
    found = []
    if blind:
        own = mib(max(cluster.plan["primary_host"]["total"] for cluster in blind))
        names = listed([f"{cluster.primary.name} (primary of {cluster.name})" for cluster in blind], _WARNED)
        found.append(
            f"{names}: nothing is recorded of the CPU's memory, which is to hold up to {own} of a primary's own; "
            "declare a CPU among the devices"
        )
    if lost:
        found.append(
            f"{listed(lost, _WARNED)}: no address is known, so that plan.yml cannot tell workers apart; "
            "give llama_worker_address"
        )
    return found
