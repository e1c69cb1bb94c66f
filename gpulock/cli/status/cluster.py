# SPDX-License-Identifier: Apache-2.0
"""`gpulock status --cluster`: all nodes, of the exporters' series that Prometheus knows.

A device is in the state that its exporter says.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpulock.alloc import states
from gpulock.cli.session import CommandRefusedError
from gpulock.cli.status.prometheus_api import Series, query_prometheus
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
    *(COUNTS[0], *COUNTS[3:5]),
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
    # `gpu9` before `gpu10`
    natural = {name: re.sub("[0-9]+", lambda number: number[0].zfill(9), name) for name in nodes}
    return sorted(nodes.values(), key=lambda node: natural[node.name])


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


@dataclass
class ClusterSum:
    """Devices that have something in common: how many in each state, and how busy they are.

    Of a user a share counts as its part of a device; `jobs` and `nodes` are a user's.
    """

    states: dict[str, float] = field(default_factory=lambda: dict.fromkeys(states.STATES, 0.0))
    uses: list[float] = field(default_factory=list[float])
    jobs: set[tuple[str, ...]] = field(default_factory=set[tuple[str, ...]])
    nodes: set[str] = field(default_factory=set[str])

    @property
    def devices(self) -> float:
        """Return how many there are; 0 of a user the parts of whose shares nobody knows."""
        return sum(self.states.values())

    def add(self, device: ClusterDevice, share: str = WHOLE) -> None:
        """Count a device, or the part of it that a share is."""
        if device.state is not None:
            self.states[device.state] += device.parts.get(share, 0.0)
        if share == WHOLE and device.use is not None:  # what all holders do is none's own
            self.uses.append(device.use)


Sums = dict[str, ClusterSum]  # by name


def sum_cluster(nodes: Sequence[ClusterNode]) -> tuple[Sums, Sums, Sums]:
    """Return the sums by node, by model and by user who holds something.

    A node is in the states that its exporter counted; a card that no driver shows has no model.
    """
    by_node: Sums = {node.name: ClusterSum() for node in nodes}
    models, users = (
        defaultdict[str, ClusterSum](ClusterSum),
        defaultdict[str, ClusterSum](ClusterSum),
    )
    for node in nodes:
        for device in node.devices.values():
            by_node[node.name].add(device)
            if device.state is not None:
                models[device.model or "not known"].add(device)
            for share, labels in device.holders.items():
                one = users[labels.get("user") or "not told"]
                one.add(device, share)
                one.nodes.add(node.name)
                local = node.name if labels.get("scheduler") in ("process", "admin") else ""
                job = [labels.get(key, "") for key in ("scheduler", "job_id", "task_id")]
                one.jobs.add((local, *job))
        by_node[node.name].states = {name: float(n) for name, n in (node.counts or {}).items()}
    return by_node, models, users


def observe_cluster(url: str) -> list[ClusterNode]:
    """Return all nodes that a Prometheus server knows; raise Refusal."""
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
    by_node, models, users = sum_cluster(nodes)
    counted = [node for node in nodes if node.counts and node.counts[states.FREE]]
    shown = counted if only_free else nodes
    tables: list[tuple[str, Sequence[Column], list[list[Cell]]]]
    tables = [("NODE", COUNTS, [node_cells(node, by_node[node.name]) for node in shown])]
    if not only_free:
        tables.append(("MODEL", COUNTS, [count_cells(*one) for one in list_largest(models)]))
        tables.append(("USER", USERS, [user_cells(*one) for one in list_largest(users)]))
    result: list[str] = []
    for title, columns, rows in tables:
        if rows:
            result += table.render_table((Column(title, least=8), *columns), rows, width)
            result += [] if only_free else [""]
    result += format_cluster_totals(nodes, width)
    return [*result, *table.render_facts(find_cluster_faults(nodes), width)], not shown


def list_largest(sums: Sums) -> list[tuple[str, ClusterSum]]:
    """Return sums with their names, most devices first."""
    return sorted(sums.items(), key=lambda one: (-one[1].devices, one[0]))


def node_cells(node: ClusterNode, one: ClusterSum) -> list[Cell]:
    """Return the row of a node, of which nothing may be known."""
    if node.counts is not None:
        return count_cells(node.name, one)
    why = "locks not readable" if node.up else "exporter down"
    return [Cell(node.name), *[Cell("-")] * 5, Cell(why, "red")]


def count_cells(name: str, one: ClusterSum) -> list[Cell]:
    """Return a name and the cells of COUNTS."""
    others = [state for state in one.states if state not in USUAL and one.states[state]]
    words = [f"{one.states[state]:g} {table.state_cell(state).text}" for state in others]
    return [
        Cell(name),
        Cell(f"{one.devices:g}"),
        *(state_count_cell(one, state) for state in USUAL),
        mean_use_cell(one),
        Cell(", ".join(words), table.COLOURS[others[0]] if others else None),
    ]


def user_cells(name: str, one: ClusterSum) -> list[Cell]:
    """Return a name and the cells of USERS: `1.25` GPUs where shares are in it."""
    return [
        Cell(name),
        Cell(f"{round(one.devices, 2):g}" if one.devices else "-"),
        state_count_cell(one, states.HELD_IDLE),
        mean_use_cell(one),
        Cell(str(len(one.jobs))),
        Cell(str(len(one.nodes))),
    ]


def mean_use_cell(one: ClusterSum) -> Cell:
    """Return the mean of the devices that tell it, `-` where none does."""
    return table.percent_cell(sum(one.uses) / len(one.uses) if one.uses else None)


def state_count_cell(one: ClusterSum, name: str) -> Cell:
    """Return a count in the colour of its state, 0 in none."""
    return Cell(
        f"{round(one.states[name], 2):g}", table.COLOURS[name] if one.states[name] else None
    )


def format_cluster_totals(nodes: Sequence[ClusterNode], width: int) -> list[str]:
    """Return `3 nodes, 24 GPUs: 10 free, 12 held, 2 held (idle)`."""
    counted = [node.counts for node in nodes if node.counts is not None]
    totals = {name: sum(one[name] for one in counted) for name in states.STATES}
    split = any(device.split for node in nodes for device in node.devices.values())
    what = format_count(sum(totals.values()), "device" if split else "GPU")
    return table.format_state_counts(f"{format_count(len(nodes), 'node')}, {what}", totals, width)


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
