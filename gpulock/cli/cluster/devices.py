# SPDX-License-Identifier: Apache-2.0
"""All nodes as Prometheus knows them: what each device is doing, made of the exporters' series.

Pure. The states are those that each exporter counted. Which device is in which is told by its own
series, as far as they go: which of the held ones idle is not, so that it is said of those that
were busy longest ago.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gpulock.alloc import states as state
from gpulock.cli.cluster.prometheus_api import Series
from gpulock.text.words import short_model

FACTS = (
    *("locked", "lock_info", "lock_stale", "quarantined", "missing", "foreign_processes"),
    *("last_busy_timestamp_seconds", "lock_acquired_timestamp_seconds"),
    *("observed_seconds_total", "utilization_ratio"),
)
SEEN = "last_over_time(gpulock_exporter_build_info[1d:10m]) or gpulock_exporter_build_info"
QUERIES = (
    f'{{__name__=~"gpulock_(gpus|nvml_up|(gpu|mig)_({"|".join(FACTS)}))"}}',
    'last_over_time({__name__=~"gpulock_(gpu|mig)_info"}[1h])',
    SEEN,
    f"up and on(job) group by(job) ({SEEN})",
)
MOST = 1e6  # devices of a node: a server may say anything
DIGITS = 18  # of a number in a name
DAY = "the last day"  # what SEEN looks back


@dataclass
class Device:
    """One device; what is None is not told."""

    node: str
    uuid: str
    mig: bool
    facts: dict[str, float] = field(default_factory=dict[str, float])
    holder: dict[str, str] | None = None
    model: str = ""
    state: str | None = None

    def is_(self, name: str) -> bool:
        """Return whether a fact is told and not 0."""
        return bool(self.facts.get(name))

    def at_rest_since(self) -> float:
        """Return when its holder was last seen at work with it, or took it."""
        names = ("last_busy_timestamp_seconds", "lock_acquired_timestamp_seconds")
        return max(self.facts.get(name, 0.0) for name in names)


@dataclass
class Node:
    """One node; `up` is whether Prometheus reaches its exporter, `driver` whether that hears NVML.

    `states` has how many devices are in each, None where the exporter cannot tell.
    """

    instance: str
    name: str
    up: bool = True
    driver: bool | None = None
    states: dict[str, int] | None = None
    devices: dict[str, Device] = field(default_factory=dict[str, Device])


def cluster(answers: Sequence[Sequence[Series]]) -> list[Node]:
    """Return all nodes by name from the answers to QUERIES; none where there is no gpulock."""
    told, infos, seen, targets = answers
    nodes: dict[str, Node] = {}
    for one in told:
        take(nodes, one)
    parents = {
        (one.labels.get("instance", ""), one.labels.get("uuid", "")): one.labels.get("name", "")
        for one in infos
        if one.name == "gpulock_gpu_info"
    }
    for one in infos:
        take_model(nodes, one, parents)
    for instance in down(targets, frozenset(nodes), instances(seen)):
        nodes[instance] = Node(instance, instance, up=False)
    for node in nodes.values():
        assign(node)
    return named(nodes.values())


def take(nodes: dict[str, Node], one: Series) -> None:
    """Take one series of a node."""
    instance = one.labels.get("instance", "")
    node = nodes.setdefault(instance, Node(instance, instance))
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
    device = node.devices.setdefault(uuid, Device(instance, uuid, kind == "mig"))
    if fact == "lock_info":
        device.holder = one.labels
    else:
        device.facts[fact] = one.value


def take_model(nodes: dict[str, Node], one: Series, parents: dict[tuple[str, str], str]) -> None:
    """Take what a device is; an instance is of its card's model, with its profile."""
    node = nodes.get(one.labels.get("instance", ""))
    device = node.devices.get(one.labels.get("uuid", "")) if node else None
    if node is None or device is None:
        return
    name = one.labels.get("name", "")
    if device.mig:
        name = parents.get((node.instance, one.labels.get("parent_uuid", "")), "")
    device.model = f"{short_model(name)} {one.labels.get('profile', '')}".strip()


def instances(seen: Iterable[Series]) -> frozenset[str]:
    """Return the targets that series came from."""
    return frozenset(one.labels.get("instance", "") for one in seen)


def down(targets: Iterable[Series], heard: frozenset[str], seen: frozenset[str]) -> list[str]:
    """Return the exporters that do not answer.

    A job that scrapes something else besides says nothing of a target that was never heard.
    """
    every = list(targets)
    mixed = {
        one.labels.get("job", "")
        for one in every
        if one.value == 1 and one.labels.get("instance", "") not in heard
    }
    return [
        instance
        for one in every
        if one.value == 0
        and (instance := one.labels.get("instance", "")) not in heard
        and (instance in seen or one.labels.get("job", "") not in mixed)
    ]


def assign(node: Node) -> None:
    """Find out which of a node's devices is in which of the states that it counted."""
    if node.states is None:
        return
    held: list[Device] = []
    for device in node.devices.values():
        if "locked" not in device.facts:
            continue  # a card in MIG mode: nobody can be granted it
        for name, fact in (
            (state.MISSING, "missing"),
            (state.QUARANTINED, "quarantined"),
            (state.STALE, "lock_stale"),
        ):
            if device.is_(fact):
                device.state = name
                break
        else:
            if device.is_("locked"):
                held.append(device)
            else:
                strange = device.is_("foreign_processes")
                device.state = state.FOREIGN if strange else state.FREE
    judge(held, node.states)


def judge(held: list[Device], states: dict[str, int]) -> None:
    """Tell the unknown and the idle among the held devices by how many there are of each."""
    # one that a reconcile judged has a lock_stale of 0, so it is not unknown
    doubt = [one for one in held if "lock_stale" not in one.facts]
    doubt.sort(key=lambda one: one.holder is not None)
    for one in doubt[: states[state.NOT_KNOWN]]:
        one.state = state.NOT_KNOWN
    rest = [one for one in held if one.state is None and "observed_seconds_total" in one.facts]
    rest.sort(key=Device.at_rest_since)
    for one in rest[: states[state.HELD_IDLE]]:
        one.state = state.HELD_IDLE
    for one in held:
        one.state = one.state or state.HELD


def named(nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes by name: the instance without its port, where that is nobody else's."""
    every = list(nodes)
    short = Counter(host(one.instance) for one in every)
    for one in every:
        name = host(one.instance)
        one.name = name if short[name] == 1 else one.instance
    return sorted(every, key=lambda one: natural(one.name))


def host(instance: str) -> str:
    """Return the host of `gpu07:9465`."""
    name, colon, port = instance.rpartition(":")
    return name if colon and port.isdigit() and name else instance


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return what sorts `gpu9` before `gpu10`."""
    parts: list[tuple[int, int, str]] = []
    word = ""
    for character in name:
        if word and character.isdecimal() != word[-1].isdecimal():
            parts.append(key_of(word))
            word = ""
        word += character
    return [*parts, key_of(word)] if word else parts


def key_of(word: str) -> tuple[int, int, str]:
    """Return a number before a word."""
    return (0, int(word), "") if word.isdecimal() and len(word) <= DIGITS else (1, 0, word)
