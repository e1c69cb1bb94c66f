# SPDX-License-Identifier: Apache-2.0
"""All nodes as Prometheus knows them: what each device is doing, made of the exporters' series.

Pure. The states are those that each exporter counted. A device's own
series give its state as far as they go. They do not say which held devices are idle; those that
were busy longest ago count as idle.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from gpulock.alloc import states as state
from gpulock.cli.cluster.prometheus_api import Series
from gpulock.text.words import short_model

OF_SHARE = "share_"  # begins the name of a fact of one share
FACTS = (
    *(
        "locked",
        "lock_info",
        f"{OF_SHARE}info",
        f"{OF_SHARE}places",
        f"{OF_SHARE}ratio",
        f"{OF_SHARE}utilization_ratio",
        "lock_stale",
        "quarantined",
        "missing",
        "foreign_processes",
    ),
    *("last_busy_timestamp_seconds", "lock_acquired_timestamp_seconds"),
    *("observed_seconds_total", "utilization_ratio"),
)
RECENT_NODES_QUERY = (
    "last_over_time(gpulock_exporter_build_info[1d:10m]) or gpulock_exporter_build_info"
)
QUERIES = (
    f'{{__name__=~"gpulock_(gpus|nvml_up|(gpu|mig)_({"|".join(FACTS)}))"}}',
    'last_over_time({__name__=~"gpulock_(gpu|mig)_info"}[1h])',
    RECENT_NODES_QUERY,
    f"up and on(job) group by(job) ({RECENT_NODES_QUERY})",
)
MOST = 1e6  # devices of a node: a server may say anything
DIGITS = 18  # of a number in a name
DAY = "the last day"  # what SEEN looks back

_K = TypeVar("_K")


@dataclass
class ClusterHolder:
    """Who holds a device, or a share of it: the labels that name the job.

    `part` is which part of the device it holds, `use` how busy that is; None is not told.
    """

    labels: dict[str, str]
    part: float | None
    use: float | None


@dataclass
class ClusterDevice:
    """One device; what is None is not told.

    `lock` names who holds it alone, `sharers` those that share it, by share; `share_facts` has what
    is told of a share.
    """

    node: str
    uuid: str
    mig: bool
    facts: dict[str, float] = field(default_factory=dict[str, float])
    lock: dict[str, str] | None = None
    sharers: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    share_facts: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    model: str = ""
    state: str | None = None

    def is_fact_set(self, name: str) -> bool:
        """Return whether a fact is told and not 0."""
        return bool(self.facts.get(name))

    def holders(self) -> list[ClusterHolder]:
        """Return who holds it: nobody, one, or an entry a share."""
        if self.lock is not None:
            return [ClusterHolder(self.lock, 1.0, ratio_or_none(self.facts, "utilization_ratio"))]
        return [
            ClusterHolder(
                labels,
                ratio_or_none(self.share_facts, (share, "ratio")) or None,
                ratio_or_none(self.share_facts, (share, "utilization_ratio")),
            )
            for share, labels in self.sharers.items()
        ]

    def places(self) -> tuple[int, int]:
        """Return how many shares it gives out, and how many are held; (0, 0) where none are."""
        given = self.share_facts.get(("", "places"), 0.0)
        return (int(given), len(self.sharers)) if 0 < given <= MOST else (0, 0)

    def last_active_time(self) -> float:
        """Return when its holder was last seen at work with it, or took it."""
        names = ("last_busy_timestamp_seconds", "lock_acquired_timestamp_seconds")
        return max(self.facts.get(name, 0.0) for name in names)


def ratio_or_none(facts: Mapping[_K, float], name: _K) -> float | None:
    """Return a fact that is a ratio, None where it is not told or cannot be."""
    found = facts.get(name, -1.0)
    return found if 0 <= found <= 1 else None


@dataclass
class ClusterNode:
    """One node; `up` is whether Prometheus reaches its exporter, `driver` whether that hears NVML.

    `states` has how many devices are in each, None where the exporter cannot tell.
    """

    instance: str
    name: str
    up: bool = True
    driver: bool | None = None
    states: dict[str, int] | None = None
    devices: dict[str, ClusterDevice] = field(default_factory=dict[str, ClusterDevice])


def build_cluster_nodes(answers: Sequence[Sequence[Series]]) -> list[ClusterNode]:
    """Return all nodes by name from the answers to QUERIES; none where there is no gpulock."""
    told, infos, seen, targets = answers
    nodes: dict[str, ClusterNode] = {}
    for one in told:
        add_node_series(nodes, one)
    parents = {
        (one.labels.get("instance", ""), one.labels.get("uuid", "")): one.labels.get("name", "")
        for one in infos
        if one.name == "gpulock_gpu_info"
    }
    for one in infos:
        add_device_model(nodes, one, parents)
    for instance in find_down_exporters(targets, nodes, seen):
        nodes[instance] = ClusterNode(instance, instance, up=False)
    for node in nodes.values():
        assign_device_states(node)
    return name_cluster_nodes(nodes.values())


def add_node_series(nodes: dict[str, ClusterNode], one: Series) -> None:
    """Take one series of a node."""
    instance = one.labels.get("instance", "")
    node = nodes.setdefault(instance, ClusterNode(instance, instance))
    what = one.name.removeprefix("gpulock_")
    if what == "gpus":
        node.states = node.states or dict.fromkeys(state.STATES, 0)
        if one.labels.get("state") in node.states:
            node.states[one.labels["state"]] = int(min(max(0.0, one.value), MOST))
        return
    if what == "nvml_up":
        node.driver = one.value == 1
        return
    kind, _, fact = what.partition("_")
    uuid = one.labels.get("uuid", "")
    device = node.devices.setdefault(uuid, ClusterDevice(instance, uuid, kind == "mig"))
    share = one.labels.get("share", "")
    if fact == "lock_info":
        device.lock = one.labels
    elif fact == f"{OF_SHARE}info":
        device.sharers[share] = one.labels
    elif fact.startswith(OF_SHARE):
        device.share_facts[share, fact.removeprefix(OF_SHARE)] = one.value
    else:
        device.facts[fact] = one.value


def add_device_model(
    nodes: dict[str, ClusterNode], one: Series, parents: dict[tuple[str, str], str]
) -> None:
    """Take what a device is; an instance is of its card's model, with its profile."""
    node = nodes.get(one.labels.get("instance", ""))
    device = node.devices.get(one.labels.get("uuid", "")) if node else None
    if node is None or device is None:
        return
    name = one.labels.get("name", "")
    if device.mig:
        name = parents.get((node.instance, one.labels.get("parent_uuid", "")), "")
    device.model = f"{short_model(name)} {one.labels.get('profile', '')}".strip()


def find_down_exporters(
    targets: Sequence[Series], heard: Collection[str], seen: Iterable[Series]
) -> list[str]:
    """Return the exporters that do not answer.

    A job that scrapes something else besides says nothing of a target that was never heard.
    """
    known = {one.labels.get("instance", "") for one in seen}
    mixed = {
        one.labels.get("job", "")
        for one in targets
        if one.value == 1 and one.labels.get("instance", "") not in heard
    }
    return [
        instance
        for one in targets
        if one.value == 0
        and (instance := one.labels.get("instance", "")) not in heard
        and (instance in known or one.labels.get("job", "") not in mixed)
    ]


def assign_device_states(node: ClusterNode) -> None:
    """Find out which of a node's devices is in which of the states that it counted."""
    if node.states is None:
        return
    held: list[ClusterDevice] = []
    for device in node.devices.values():
        if "locked" not in device.facts:
            continue  # a card in MIG mode: nobody can be granted it
        for name, fact in (
            (state.MISSING, "missing"),
            (state.QUARANTINED, "quarantined"),
            (state.STALE, "lock_stale"),
        ):
            if device.is_fact_set(fact):
                device.state = name
                break
        else:
            if device.is_fact_set("locked"):
                held.append(device)
            else:
                strange = device.is_fact_set("foreign_processes")
                device.state = state.FOREIGN if strange else state.FREE
    assign_held_states(held, node.states)


def assign_held_states(held: list[ClusterDevice], states: dict[str, int]) -> None:
    """Tell the unknown and the idle among the held devices by how many there are of each."""
    # one that a reconcile judged has a lock_stale of 0, so it is not unknown
    doubt = [one for one in held if "lock_stale" not in one.facts]
    doubt.sort(key=lambda one: bool(one.lock or one.sharers))
    for one in doubt[: states[state.NOT_KNOWN]]:
        one.state = state.NOT_KNOWN
    rest = [one for one in held if one.state is None and "observed_seconds_total" in one.facts]
    rest.sort(key=ClusterDevice.last_active_time)
    for one in rest[: states[state.HELD_IDLE]]:
        one.state = state.HELD_IDLE
    for one in held:
        one.state = one.state or state.HELD


def name_cluster_nodes(nodes: Iterable[ClusterNode]) -> list[ClusterNode]:
    """Return the nodes by name: the instance without its port, where that is nobody else's."""
    every = list(nodes)
    short = Counter(strip_instance_port(one.instance) for one in every)
    for one in every:
        name = strip_instance_port(one.instance)
        one.name = name if short[name] == 1 else one.instance
    return sorted(every, key=lambda one: natural_sort_key(one.name))


def strip_instance_port(instance: str) -> str:
    """Return the host of `gpu07:9465`."""
    name, colon, port = instance.rpartition(":")
    return name if colon and port.isdigit() and name else instance


def natural_sort_key(name: str) -> list[tuple[int, int, str]]:
    """Return what sorts `gpu9` before `gpu10`, and numbers before words."""
    return [
        (0, int(word), "") if word.isdecimal() and len(word) <= DIGITS else (1, 0, word)
        for word in re.findall(r"\d+|\D+", name)
    ]
