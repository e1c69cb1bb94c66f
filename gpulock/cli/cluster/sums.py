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

    `utilization` is the mean of those that tell it, None where none does.
    """

    name: str
    states: dict[str, int] = field(default_factory=lambda: dict.fromkeys(states.STATES, 0))
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


@dataclass
class UserSum:
    """What a user holds: how many devices in each state, a share as its part of one.

    `devices` is None where the part of no share is known.
    """

    name: str
    states: dict[str, float] = field(default_factory=lambda: dict.fromkeys(states.STATES, 0.0))
    devices: float | None = None
    jobs: int = 0
    nodes: int = 0
    utilization: float | None = None


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


def sum_by_user(nodes: Iterable[ClusterNode]) -> list[UserSum]:
    """Return one sum a user who holds something, most devices first."""
    groups: dict[str, list[tuple[ClusterDevice, ClusterHolder]]] = {}
    for node in nodes:
        for device in node.devices.values():
            for holder in device.holders() if device.state in TAKEN else ():
                user = holder.labels.get("user") or NO_USER
                groups.setdefault(user, []).append((device, holder))
    found = [sum_user_holdings(name, holdings) for name, holdings in groups.items()]
    return sorted(found, key=lambda one: (-(one.devices or 0), one.name))


def sum_user_holdings(
    name: str, holdings: Sequence[tuple[ClusterDevice, ClusterHolder]]
) -> UserSum:
    """Return what a user holds: a share is its part of the device."""
    result = UserSum(name)
    jobs: set[tuple[str, ...]] = set()
    for device, holder in holdings:
        if device.state is not None and holder.part is not None:
            result.states[device.state] += holder.part
        keys = ("scheduler", "job_id", "task_id")
        local = device.node if holder.labels.get("scheduler") in ("process", "admin") else ""
        jobs.add((local, *(holder.labels.get(key, "") for key in keys)))
    parts = [holder.part for _, holder in holdings if holder.part is not None]
    result.devices = sum(parts) if parts else None
    used = [holder.use for _, holder in holdings if holder.use is not None]
    result.utilization = sum(used) / len(used) if used else None
    result.jobs, result.nodes = len(jobs), len({device.node for device, _ in holdings})
    return result


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
    used = [one.utilization for one in devices if one.utilization is not None]
    result.utilization = sum(used) / len(used) if used else None
    return result
