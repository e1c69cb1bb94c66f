# SPDX-License-Identifier: Apache-2.0
"""`gpulock status --cluster`: all nodes, of the exporters' series that Prometheus knows.

A device is in the state that its exporter says.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpulock.alloc import states
from gpulock.cli.cluster.prometheus_api import Series, query_prometheus
from gpulock.cli.session import CommandRefusedError
from gpulock.text import table
from gpulock.text.table import Cell, Column
from gpulock.text.words import format_count, short_model

DAY = "the last day"  # what the query of targets looks back
RECENT = "last_over_time(gpulock_exporter_build_info[1d:10m]) or gpulock_exporter_build_info"
FACTS = "lock_info|utilization_ratio|share_info|share_ratio"
QUERIES = (
    f'{{__name__=~"gpulock_(gpus|nvml_up|gpu_({FACTS}))"}} or gpulock_gpu_state == 1',
    "last_over_time(gpulock_gpu_info[1h])",
    f"up == 0 and on(job) group by(job) ({RECENT})",
)
PORT = ":9465"  # of an exporter, unless a site chose another
WHOLE = ""  # the share of a claim that has a device alone
USUAL = (states.FREE, states.HELD, states.HELD_IDLE)
COUNTS = (
    Column("GPUS", right=True),
    Column("FREE", right=True),
    Column("HELD", right=True),
    Column("IDLE", right=True),
    Column("UTIL", right=True, spare=True),
    Column("OTHER", least=10),
)
USERS = (
    Column("USER", least=8),
    Column("GPUS", right=True),
    Column("IDLE", right=True),
    Column("UTIL", right=True, spare=True),
    Column("JOBS", right=True),
    Column("NODES", right=True),
)


@dataclass
class ClusterDevice:
    """One device; what is None is not told. `model` ends with the profile of a MIG instance.

    `holders` are the labels that name each claim on it, `parts` which part of it that holds: by
    share, WHOLE of a claim that has it alone. `use` is how busy all of it is.
    """

    model: str = ""
    split: bool = False
    state: str | None = None
    holders: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    parts: dict[str, float] = field(default_factory=lambda: {WHOLE: 1.0})
    use: float | None = None


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
    device = node.devices.setdefault(one.labels.get("uuid", ""), ClusterDevice())
    share = one.labels.get("share", WHOLE)
    if fact == "state":
        name = one.labels.get("state")
        device.state = name if name in states.STATES else None
    elif fact in ("lock_info", "share_info"):
        device.holders[share] = one.labels
    elif fact == "share_ratio":
        device.parts[share] = one.value
    elif fact == "utilization_ratio":
        device.use = one.value


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
        if share == WHOLE and device.use is not None:  # what all holders do is none's own
            self.uses.append(device.use)


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
    for node in nodes:
        for device in node.devices.values():
            if device.state is not None:
                name = device.model or "not known"
                found.setdefault(name, ClusterSum(name)).add(device)
    return sorted(found.values(), key=lambda one: (-one.devices, one.name))


def sum_by_user(nodes: Sequence[ClusterNode]) -> list[ClusterSum]:
    """Return one sum a user who holds something, most devices first."""
    found: dict[str, ClusterSum] = {}
    for node in nodes:
        for device in node.devices.values():
            for share, labels in device.holders.items():
                name = labels.get("user") or "not told"
                one = found.setdefault(name, ClusterSum(name))
                one.add(device, share)
                one.nodes.add(node.name)
                local = node.name if labels.get("scheduler") in ("process", "admin") else ""
                job = [labels.get(key, "") for key in ("scheduler", "job_id", "task_id")]
                one.jobs.add((local, *job))
    return sorted(found.values(), key=lambda one: (-one.devices, one.name))


def observe_cluster(url: str) -> list[ClusterNode]:
    """Return all nodes that a Prometheus server knows; raise Refused."""
    nodes = build_cluster_nodes(query_prometheus(url, QUERIES))
    if not nodes:
        raise CommandRefusedError(
            f"the Prometheus at PROMETHEUS_URL has no series of gpulock within {DAY}",
            "let it scrape the nodes' gpulock-exporter (port 9465)",
        )
    return nodes


def format_cluster_tables(
    nodes: Sequence[ClusterNode], only_free: bool, width: int
) -> tuple[list[str], bool]:
    """Return the tables by node, model and user, and what is wrong; and whether none is shown.

    With `only_free` the nodes that have a free device, and of all what is wrong.
    """
    result: list[str] = []
    counted = [node for node in nodes if node.counts and node.counts[states.FREE]]
    shown = counted if only_free else nodes
    if shown:
        rows = [node_cells(node) for node in shown]
        result += table.render_table((Column("NODE", least=12), *COUNTS), rows, width)
    if not only_free:
        if models := [count_cells(one) for one in sum_by_model(nodes)]:
            columns = (Column("MODEL", least=12), *COUNTS)
            result += ["", *table.render_table(columns, models, width)]
        if users := [user_cells(one) for one in sum_by_user(nodes)]:
            result += ["", *table.render_table(USERS, users, width)]
        result.append("")
    result += format_cluster_totals(nodes, width)
    return [*result, *table.render_facts(find_cluster_faults(nodes), width)], not shown


def node_cells(node: ClusterNode) -> list[Cell]:
    """Return the row of a node, of which nothing may be known."""
    if node.counts is not None:
        return count_cells(sum_node(node))
    why = "locks not readable" if node.up else "exporter down"
    return [Cell(node.name), *[Cell("-")] * 5, Cell(why, "red")]


def count_cells(one: ClusterSum) -> list[Cell]:
    """Return a name and the cells of COUNTS."""
    others = [name for name in one.states if name not in USUAL and one.states[name]]
    words = [f"{one.states[name]:g} {table.state_cell(name).text}" for name in others]
    return [
        Cell(one.name),
        Cell(f"{one.devices:g}"),
        *(state_count_cell(one, name) for name in USUAL),
        table.percent_cell(one.utilization),
        Cell(", ".join(words), table.COLOURS[others[0]] if others else None),
    ]


def user_cells(one: ClusterSum) -> list[Cell]:
    """Return the cells of USERS: `1.25` GPUs where shares are in it."""
    return [
        Cell(one.name),
        Cell(f"{round(one.devices, 2):g}" if one.devices else "-"),
        state_count_cell(one, states.HELD_IDLE),
        table.percent_cell(one.utilization),
        Cell(str(len(one.jobs))),
        Cell(str(len(one.nodes))),
    ]


def state_count_cell(one: ClusterSum, name: str) -> Cell:
    """Return a count in the colour of its state, 0 in none."""
    return Cell(
        f"{round(one.states[name], 2):g}", table.COLOURS[name] if one.states[name] else None
    )


def format_cluster_totals(nodes: Sequence[ClusterNode], width: int) -> list[str]:
    """Return `3 nodes, 24 GPUs: 10 free, 12 held, 2 held (idle)`."""
    counted = [node.counts for node in nodes if node.counts is not None]
    found = {name: sum(one[name] for one in counted) for name in states.STATES}
    split = any(device.split for node in nodes for device in node.devices.values())
    what = format_count(sum(found.values()), "device" if split else "GPU")
    return table.format_state_counts(f"{format_count(len(nodes), 'node')}, {what}", found, width)


def find_cluster_faults(nodes: Sequence[ClusterNode]) -> list[tuple[str, str]]:
    """Return what is not known, and of which nodes."""
    down = [node.name for node in nodes if not node.up]
    unread = [node.name for node in nodes if node.up and node.counts is None]
    deaf = [node.name for node in nodes if node.up and node.driver is False]
    groups = (
        ("down", down, "Prometheus does not reach the exporter, nothing is known of the GPUs"),
        ("locks", unread, "the exporter cannot read the locks: see gpulock_collector_success"),
        ("driver", deaf, "the driver does not answer the exporter, use is not known"),
    )
    return [(label, f"{', '.join(names)}: {why}") for label, names, why in groups if names]
