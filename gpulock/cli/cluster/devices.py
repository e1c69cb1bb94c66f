# SPDX-License-Identifier: Apache-2.0
"""All nodes as Prometheus knows them: what each device is doing, made of the exporters' series.

Pure. A device is in the state that its exporter says.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from gpulock.alloc import states as state
from gpulock.cli.cluster.prometheus_api import Series
from gpulock.text.words import short_model

OF_SHARE = "share_"  # begins the name of a fact of one share
FACTS = (
    *("lock_info", "utilization_ratio"),
    *(f"{OF_SHARE}{name}" for name in ("info", "places", "ratio", "utilization_ratio")),
)
RECENT_NODES_QUERY = (
    "last_over_time(gpulock_exporter_build_info[1d:10m]) or gpulock_exporter_build_info"
)
QUERIES = (
    f'{{__name__=~"gpulock_(gpus|nvml_up|gpu_({"|".join(FACTS)}))"}} or gpulock_gpu_state == 1',
    "last_over_time(gpulock_gpu_info[1h])",
    RECENT_NODES_QUERY,
    f"up and on(job) group by(job) ({RECENT_NODES_QUERY})",
)
MOST = 1e6  # devices of a node: a server may say anything
DIGITS = 18  # of a number in a name
DAY = "the last day"  # what SEEN looks back


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
    """One device; what is None is not told. `profile` is that of a MIG instance.

    `lock` names who holds it alone, `sharers` those that share it, by share; `share_facts` has what
    is told of a share.
    """

    node: str
    uuid: str
    utilization: float | None = None
    lock: dict[str, str] | None = None
    sharers: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    share_facts: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    model: str = ""
    profile: str = ""
    state: str | None = None

    def holders(self) -> list[ClusterHolder]:
        """Return who holds it: nobody, one, or an entry a share."""
        if self.lock is not None:
            return [ClusterHolder(self.lock, 1.0, self.utilization)]
        return [
            ClusterHolder(
                labels,
                ratio_or_none(self.share_facts.get((share, "ratio"))) or None,
                ratio_or_none(self.share_facts.get((share, "utilization_ratio"))),
            )
            for share, labels in self.sharers.items()
        ]

    def places(self) -> tuple[int, int]:
        """Return how many shares it gives out, and how many are held; (0, 0) where none are."""
        given = self.share_facts.get(("", "places"), 0.0)
        return (int(given), len(self.sharers)) if 0 < given <= MOST else (0, 0)


def ratio_or_none(value: float | None) -> float | None:
    """Return a ratio, None where it is not told or cannot be."""
    return value if value is not None and 0 <= value <= 1 else None


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
    for one in infos:
        add_device_model(nodes, one)
    for instance in find_down_exporters(targets, nodes, seen):
        nodes[instance] = ClusterNode(instance, instance, up=False)
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
    fact = what.removeprefix("gpu_")
    uuid = one.labels.get("uuid", "")
    device = node.devices.setdefault(uuid, ClusterDevice(instance, uuid))
    share = one.labels.get("share", "")
    if fact == "state":
        name = one.labels.get("state")
        device.state = name if name in state.STATES else None
    elif fact == "lock_info":
        device.lock = one.labels
    elif fact == f"{OF_SHARE}info":
        device.sharers[share] = one.labels
    elif fact.startswith(OF_SHARE):
        device.share_facts[share, fact.removeprefix(OF_SHARE)] = one.value
    elif fact == "utilization_ratio":
        device.utilization = ratio_or_none(one.value)


def add_device_model(nodes: dict[str, ClusterNode], one: Series) -> None:
    """Take what a device is; an instance is of its card's model, with its profile."""
    node = nodes.get(one.labels.get("instance", ""))
    device = node.devices.get(one.labels.get("uuid", "")) if node else None
    if device is not None:
        device.profile = one.labels.get("profile", "")
        device.model = f"{short_model(one.labels.get('name', ''))} {device.profile}".strip()


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
