# SPDX-License-Identifier: Apache-2.0
"""All nodes as Prometheus knows them: what each device is doing, made of the exporters' series.

Pure. A device is in the state that its exporter says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gpulock.alloc import states
from gpulock.cli.cluster.prometheus_api import Series
from gpulock.text.words import short_model

DAY = "the last day"  # what the query of targets looks back
RECENT = "last_over_time(gpulock_exporter_build_info[1d:10m]) or gpulock_exporter_build_info"
FACTS = "lock_info|utilization_ratio|share_info|share_ratio|share_utilization_ratio"
QUERIES = (
    f'{{__name__=~"gpulock_(gpus|nvml_up|gpu_({FACTS}))"}} or gpulock_gpu_state == 1',
    "last_over_time(gpulock_gpu_info[1h])",
    f"up == 0 and on(job) group by(job) ({RECENT})",
)
PORT = ":9465"  # of an exporter, unless a site chose another
WHOLE = ""  # the share of a claim that has a device alone


@dataclass
class ClusterDevice:
    """One device; what is None is not told. `model` ends with the profile of a MIG instance.

    `holders` are the labels that name each claim on it, `parts` and `uses` which part of it that
    holds and how busy the part is: by share, WHOLE of a claim that has it alone.
    """

    node: str
    model: str = ""
    split: bool = False
    state: str | None = None
    holders: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    parts: dict[str, float] = field(default_factory=lambda: {WHOLE: 1.0})
    uses: dict[str, float] = field(default_factory=dict[str, float])


@dataclass
class ClusterNode:
    """One node; `up` is whether Prometheus reaches its exporter, `driver` whether that hears NVML.

    `counts` has how many devices are in each state, None where the exporter cannot tell.
    """

    name: str
    up: bool = True
    driver: bool | None = None
    counts: dict[str, int] | None = None
    devices: dict[str, ClusterDevice] = field(default_factory=dict[str, ClusterDevice])


def build_cluster_nodes(answers: Sequence[Sequence[Series]]) -> list[ClusterNode]:
    """Return all nodes by name from the answers to QUERIES; none where there is no gpulock."""
    facts, infos, down = answers
    nodes: dict[str, ClusterNode] = {}
    for one in facts:
        add_node_series(nodes, one)
    for one in infos:
        node = nodes.get(node_name(one))
        device = node.devices.get(one.labels.get("uuid", "")) if node else None
        if device is not None:
            profile = one.labels.get("profile", "")
            device.split = bool(profile)
            device.model = f"{short_model(one.labels.get('name', ''))} {profile}".strip()
    for one in down:
        nodes.setdefault(node_name(one), ClusterNode(node_name(one), up=False))
    return sorted(nodes.values(), key=lambda node: natural_sort_key(node.name))


def add_node_series(nodes: dict[str, ClusterNode], one: Series) -> None:
    """Take one series of a node."""
    node = nodes.setdefault(node_name(one), ClusterNode(node_name(one)))
    fact = one.name.removeprefix("gpulock_").removeprefix("gpu_")
    if fact == "gpus":
        node.counts = node.counts or dict.fromkeys(states.STATES, 0)
        if one.labels.get("state") in node.counts:
            node.counts[one.labels["state"]] = int(one.value)
        return
    if fact == "nvml_up":
        node.driver = one.value == 1
        return
    device = node.devices.setdefault(one.labels.get("uuid", ""), ClusterDevice(node.name))
    share = one.labels.get("share", WHOLE)
    if fact == "state":
        name = one.labels.get("state")
        device.state = name if name in states.STATES else None
    elif fact in ("lock_info", "share_info"):
        device.holders[share] = one.labels
    elif fact == "share_ratio":
        device.parts[share] = one.value
    elif fact.endswith("utilization_ratio"):
        device.uses[share] = one.value


def node_name(one: Series) -> str:
    """Return the host of an exporter at the usual port, of another its target."""
    return one.labels.get("instance", "").removesuffix(PORT)


def natural_sort_key(name: str) -> str:
    """Return what sorts `gpu9` before `gpu10`."""
    return re.sub("[0-9]+", lambda found: found[0].zfill(9), name)


@dataclass
class ClusterSum:
    """Devices that have something in common: how many in each state, and how busy they are.

    Of a user a share counts as its part of a device; `jobs` and `nodes` are a user's.
    """

    name: str
    states: dict[str, float] = field(default_factory=lambda: dict.fromkeys(states.STATES, 0.0))
    uses: list[float] = field(default_factory=list[float])
    jobs: set[tuple[str, ...]] = field(default_factory=set[tuple[str, ...]])
    nodes: set[str] = field(default_factory=set[str])

    @property
    def devices(self) -> float:
        """Return how many there are; 0 of a user the parts of whose shares nobody knows."""
        return sum(self.states.values())

    @property
    def utilization(self) -> float | None:
        """Return the mean of the devices that tell it, None where none does."""
        return sum(self.uses) / len(self.uses) if self.uses else None

    def add(self, device: ClusterDevice, share: str = WHOLE) -> None:
        """Count a device, or the part of it that a share is."""
        if device.state is not None:
            self.states[device.state] += device.parts.get(share, 0.0)
        if share in device.uses:
            self.uses.append(device.uses[share])


def sum_node(node: ClusterNode) -> ClusterSum:
    """Return the sum of a node, in the states that its exporter counted."""
    found = ClusterSum(node.name)
    for device in node.devices.values():
        found.add(device)
    found.states = {name: float(count) for name, count in (node.counts or {}).items()}
    return found


def sum_by_model(nodes: Sequence[ClusterNode]) -> list[ClusterSum]:
    """Return one sum a model, most devices first; a card that no driver shows is of none."""
    found: dict[str, ClusterSum] = {}
    for device in all_devices(nodes):
        if device.state is not None:
            name = device.model or "not known"
            found.setdefault(name, ClusterSum(name)).add(device)
    return largest_first(found)


def sum_by_user(nodes: Sequence[ClusterNode]) -> list[ClusterSum]:
    """Return one sum a user who holds something, most devices first."""
    found: dict[str, ClusterSum] = {}
    for device in all_devices(nodes):
        for share, labels in device.holders.items():
            name = labels.get("user") or "not told"
            one = found.setdefault(name, ClusterSum(name))
            one.add(device, share)
            one.nodes.add(device.node)
            local = device.node if labels.get("scheduler") in ("process", "admin") else ""
            job = [labels.get(key, "") for key in ("scheduler", "job_id", "task_id")]
            one.jobs.add((local, *job))
    return largest_first(found)


def all_devices(nodes: Sequence[ClusterNode]) -> Iterator[ClusterDevice]:
    """Yield the devices of all nodes."""
    for node in nodes:
        yield from node.devices.values()


def largest_first(found: dict[str, ClusterSum]) -> list[ClusterSum]:
    """Return sums by their number of devices, then by name."""
    return sorted(found.values(), key=lambda one: (-one.devices, one.name))
