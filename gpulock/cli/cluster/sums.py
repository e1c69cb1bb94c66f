# SPDX-License-Identifier: Apache-2.0
"""The devices of all nodes, summed: by node, by model, by user. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gpulock.alloc import states
from gpulock.cli.cluster.devices import (
    ClusterDevice,
    ClusterHolder,
    ClusterNode,
)

NO_MODEL, NO_USER = "not known", "not told"
TAKEN = (states.HELD, states.HELD_IDLE, states.NOT_KNOWN, states.STALE)


@dataclass
class ClusterSum:
    """Devices that have something in common: how many in each state, and how busy they are.

    Of a user a share counts as its part of a device; `jobs` and `nodes` are a user's.
    `utilization` is the mean of those that tell it, None where none does.
    """

    name: str
    states: dict[str, float] = field(default_factory=lambda: dict.fromkeys(states.STATES, 0.0))
    utilization: float | None = None
    jobs: int = 0
    nodes: int = 0

    @property
    def devices(self) -> float:
        """Return how many there are; 0 of a user the parts of whose shares nobody knows."""
        return sum(self.states.values())

    @property
    def others(self) -> dict[str, float]:
        """Return those that are neither free nor held, by state."""
        usual = (states.FREE, states.HELD, states.HELD_IDLE)
        return {name: n for name, n in self.states.items() if n and name not in usual}


def sum_by_node(nodes: Iterable[ClusterNode]) -> list[ClusterSum]:
    """Return one sum a node whose exporter tells its states, as that counted them."""
    found: list[ClusterSum] = []
    for node in nodes:
        if node.up and node.states is not None:
            one = sum_cluster_devices(node.name, list(node.devices.values()))
            one.states = dict(node.states)
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
        for name, number in node.states.items():
            told = sum(device.state == name for device in node.devices.values())
            unnamed.states[name] += max(0, number - told)
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
    groups: dict[str, list[tuple[ClusterDevice, ClusterHolder]]] = {}
    for node in nodes:
        for device in node.devices.values():
            for holder in device.holders() if device.state in TAKEN else ():
                user = holder.labels.get("user") or NO_USER
                groups.setdefault(user, []).append((device, holder))
    found = [sum_user_holdings(name, holdings) for name, holdings in groups.items()]
    return sorted(found, key=lambda one: (-one.devices, one.name))


def sum_user_holdings(
    name: str, holdings: Sequence[tuple[ClusterDevice, ClusterHolder]]
) -> ClusterSum:
    """Return what a user holds: a share is its part of the device."""
    result = ClusterSum(name)
    jobs: set[tuple[str, ...]] = set()
    for device, holder in holdings:
        if device.state is not None:
            result.states[device.state] += holder.part or 0.0
        keys = ("scheduler", "job_id", "task_id")
        local = device.node if holder.labels.get("scheduler") in ("process", "admin") else ""
        jobs.add((local, *(holder.labels.get(key, "") for key in keys)))
    result.utilization = mean_ratio([holder.use for _, holder in holdings])
    result.jobs, result.nodes = len(jobs), len({device.node for device, _ in holdings})
    return result


def mean_ratio(values: Sequence[float | None]) -> float | None:
    """Return the mean of those that are told, None where none is."""
    told = [value for value in values if value is not None]
    return sum(told) / len(told) if told else None


def sum_cluster_nodes(sums: Iterable[ClusterSum]) -> ClusterSum:
    """Return the sum of sums of nodes."""
    whole = ClusterSum("total")
    for one in sums:
        for name, count in one.states.items():
            whole.states[name] += count
    return whole


def sum_cluster_places(nodes: Iterable[ClusterNode]) -> tuple[int, int]:
    """Return how many shares all cards give out, and how many of those are held."""
    found = [device.places() for node in nodes for device in node.devices.values()]
    return sum(given for given, _ in found), sum(held for _, held in found)


def sum_cluster_devices(name: str, devices: Sequence[ClusterDevice]) -> ClusterSum:
    """Return the sum of some devices."""
    result = ClusterSum(name)
    for one in devices:
        if one.state is not None:
            result.states[one.state] += 1
    result.utilization = mean_ratio([one.utilization for one in devices])
    return result
