# SPDX-License-Identifier: Apache-2.0
"""The devices of all nodes, summed: by node, by model, by user. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gpulock.alloc import states
from gpulock.cli.cluster.devices import ClusterDevice, ClusterNode

NO_MODEL, NO_USER = "not known", "not told"
TAKEN = (states.HELD, states.HELD_IDLE, states.NOT_KNOWN, states.STALE)


@dataclass
class ClusterSum:
    """Devices that have something in common: how many in each state, and how busy they are.

    `utilization` is the mean of those that tell it, None where none does.
    """

    name: str
    states: dict[str, int] = field(default_factory=lambda: dict.fromkeys(states.STATES, 0))
    jobs: int = 0
    nodes: int = 0
    utilization: float | None = None

    @property
    def devices(self) -> int:
        """Return how many there are."""
        return sum(self.states.values())

    @property
    def others(self) -> dict[str, int]:
        """Return those that are neither free nor held, by state."""
        usual = (states.FREE, states.HELD, states.HELD_IDLE)
        return {name: n for name, n in self.states.items() if n and name not in usual}


def sum_by_node(nodes: Iterable[ClusterNode]) -> list[ClusterSum]:
    """Return one sum a node whose exporter tells its states, as that counted them."""
    found: list[ClusterSum] = []
    for node in nodes:
        if node.up and node.states is not None:
            one = sum_cluster_devices(node.name, list(node.devices.values()))
            one.states = node.states
            found.append(one)
    return found


def sum_by_model(nodes: Iterable[ClusterNode]) -> list[ClusterSum]:
    """Return one sum a model, most devices first; what was never seen has none."""
    groups: dict[str, list[ClusterDevice]] = {}
    unnamed = ClusterSum(NO_MODEL)
    for node in nodes:
        if node.states is None:
            continue
        for device in node.devices.values():
            if device.state is not None:
                groups.setdefault(device.model or NO_MODEL, []).append(device)
        for name, count in node.states.items():
            told = sum(device.state == name for device in node.devices.values())
            unnamed.states[name] += max(0, count - told)
    found = [
        sum_cluster_devices(name, devices) for name, devices in groups.items() if name != NO_MODEL
    ]
    rest = sum_cluster_devices(NO_MODEL, groups.get(NO_MODEL, []))
    for name, count in unnamed.states.items():
        rest.states[name] += count
    found.sort(key=lambda one: (-one.devices, one.name))
    return [*found, rest] if rest.devices else found


def sum_by_user(nodes: Iterable[ClusterNode]) -> list[ClusterSum]:
    """Return one sum a user who holds something, most devices first."""
    groups: dict[str, list[ClusterDevice]] = {}
    for node in nodes:
        for device in node.devices.values():
            if device.holder is not None and device.state in TAKEN:
                user = device.holder.get("user") or NO_USER
                groups.setdefault(user, []).append(device)
    found = [sum_cluster_devices(name, devices) for name, devices in groups.items()]
    return sorted(found, key=lambda one: (-one.devices, one.name))


def sum_cluster_nodes(sums: Iterable[ClusterSum]) -> ClusterSum:
    """Return the sum of sums of nodes."""
    whole = ClusterSum("total")
    for one in sums:
        whole.nodes += 1
        for name, count in one.states.items():
            whole.states[name] += count
    return whole


def sum_cluster_devices(name: str, devices: Sequence[ClusterDevice]) -> ClusterSum:
    """Return the sum of some devices."""
    result = ClusterSum(name)
    jobs: set[tuple[str, ...]] = set()
    for one in devices:
        if one.state is not None:
            result.states[one.state] += 1
        if one.holder is not None:
            keys = ("scheduler", "job_id", "task_id")
            local = one.node if one.holder.get("scheduler") in ("process", "admin") else ""
            jobs.add((local, *(one.holder.get(key, "") for key in keys)))
    told = [one.facts.get("utilization_ratio", -1.0) for one in devices]
    used = [ratio for ratio in told if 0 <= ratio <= 1]
    result.utilization = sum(used) / len(used) if used else None
    result.jobs, result.nodes = len(jobs), len({one.node for one in devices})
    return result
