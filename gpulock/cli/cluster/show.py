# SPDX-License-Identifier: Apache-2.0
"""`gpulock status --cluster`: the whole of it as tables, and as JSON. Pure but for `observe`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gpulock.alloc import states
from gpulock.cli.cluster.devices import DAY, QUERIES, ClusterNode, build_cluster_nodes
from gpulock.cli.cluster.prometheus_api import (
    parse_prometheus_url,
    query_prometheus,
    redact_prometheus_url,
)
from gpulock.cli.cluster.sums import (
    ClusterSum,
    sum_by_model,
    sum_by_node,
    sum_by_user,
    sum_cluster_nodes,
    sum_cluster_places,
)
from gpulock.cli.session import CommandRefusedError
from gpulock.text import table
from gpulock.text.table import Cell, Column
from gpulock.text.words import format_count

VERSION = 1
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


def observe_cluster(url: str) -> list[ClusterNode]:
    """Return all nodes that a Prometheus server knows; raise Refused."""
    nodes = build_cluster_nodes(query_prometheus(url, QUERIES))
    if not nodes:
        raise CommandRefusedError(
            f"Prometheus at {redact_prometheus_url(parse_prometheus_url(url))}"
            f" has no series of gpulock within {DAY}",
            "let it scrape the nodes' gpulock-exporter (port 9465)",
        )
    return nodes


def select_nodes_with_free(nodes: Sequence[ClusterNode]) -> list[ClusterNode]:
    """Return the nodes that have a free device."""
    return [node for node in nodes if node.up and node.states and node.states[states.FREE]]


def format_cluster_tables(
    nodes: Sequence[ClusterNode], shown: Sequence[ClusterNode], width: int, whole: bool = False
) -> list[str]:
    """Return the tables: by node of `shown`, by model and by user of all, and what is wrong."""
    result: list[str] = []
    if shown:
        sums = {one.name: cluster_count_cells(one) for one in sum_by_node(shown)}
        rows = [[Cell(node.name), *sums.get(node.name, unknown_node_cells(node))] for node in shown]
        result += table.render_table((Column("NODE", least=12), *COUNTS), rows, width, whole)
    if len(shown) == len(nodes):
        models = [[Cell(one.name), *cluster_count_cells(one)] for one in sum_by_model(nodes)]
        users = [cluster_user_cells(one) for one in sum_by_user(nodes)]
        if models:
            columns = (Column("MODEL", least=12), *COUNTS)
            result += ["", *table.render_table(columns, models, width, whole)]
        if users:
            result += ["", *table.render_table(USERS, users, width, whole)]
        result.append("")
    return [
        *result,
        *format_cluster_totals(nodes, width),
        *table.render_facts([*describe_cluster_places(nodes), *find_cluster_faults(nodes)], width),
    ]


def cluster_count_cells(one: ClusterSum) -> list[Cell]:
    """Return the cells of COUNTS."""
    others = ", ".join(
        f"{format_parts(n)} {table.state_cell(name).text}" for name, n in one.others.items()
    )
    colours = [table.COLOURS[name] for name in one.others]
    return [
        Cell(format_parts(one.devices)),
        state_count_cell(one.states[states.FREE], states.FREE),
        state_count_cell(one.states[states.HELD], states.HELD),
        state_count_cell(one.states[states.HELD_IDLE], states.HELD_IDLE),
        cluster_percent_cell(one.utilization),
        Cell(others, colours[0] if colours else None),
    ]


def unknown_node_cells(node: ClusterNode) -> list[Cell]:
    """Return the cells of a node of which nothing is known."""
    why = "exporter down" if not node.up else "locks not readable"
    return [*[Cell("-")] * 5, Cell(why, "red")]


def cluster_user_cells(one: ClusterSum) -> list[Cell]:
    """Return the cells of USERS."""
    return [
        Cell(one.name),
        Cell(format_parts(one.devices) if one.devices else "-"),
        state_count_cell(one.states[states.HELD_IDLE], states.HELD_IDLE),
        cluster_percent_cell(one.utilization),
        Cell(str(one.jobs)),
        Cell(str(one.nodes)),
    ]


def state_count_cell(count: float, name: str) -> Cell:
    """Return a count in the colour of its state, 0 in none."""
    return Cell(format_parts(count), table.COLOURS[name] if count else None)


def format_parts(count: float) -> str:
    """Return `2`, or `1.25` of what has shares in it."""
    return f"{count:.2f}".rstrip("0").rstrip(".")


def cluster_percent_cell(ratio: float | None) -> Cell:
    """Return `87%`."""
    return Cell("-" if ratio is None else f"{ratio:.0%}")


def format_cluster_totals(nodes: Sequence[ClusterNode], width: int) -> list[str]:
    """Return `3 nodes, 24 GPUs: 10 free, 12 held, 2 held (idle)`."""
    whole = sum_cluster_nodes(sum_by_node(nodes))
    split = any(device.profile for node in nodes for device in node.devices.values())
    names = [
        table.paint_text(f"{count:.0f} {table.state_cell(name).text}", table.COLOURS[name])
        for name in reversed(states.STATES)
        if (count := whole.states[name]) or name == states.FREE
    ]
    what = format_count(int(whole.devices), "device" if split else "GPU")
    return table.wrap_word_list(f"{format_count(len(nodes), 'node')}, {what}", names, width)


def describe_cluster_places(nodes: Sequence[ClusterNode]) -> list[tuple[str, str]]:
    """Return how many shares of GPUs are held, nothing where no node gives any."""
    places, held = sum_cluster_places(nodes)
    return [("shares", f"{held} of {format_count(places, 'place')} held")] if places else []


def find_cluster_faults(nodes: Sequence[ClusterNode]) -> list[tuple[str, str]]:
    """Return what is not known, and of which nodes."""
    groups = (
        (
            "down",
            [node for node in nodes if not node.up],
            "Prometheus does not reach the exporter, nothing is known of the GPUs",
        ),
        (
            "locks",
            [node for node in nodes if node.up and node.states is None],
            "the exporter cannot read the locks: see gpulock_collector_success",
        ),
        (
            "driver",
            [node for node in nodes if node.up and node.driver is False],
            "the driver does not answer the exporter, use is not known",
        ),
    )
    return [
        (label, f"{', '.join(node.name for node in found)}: {why}")
        for label, found, why in groups
        if found
    ]


def format_cluster_json(
    url: str, nodes: Sequence[ClusterNode], shown: Sequence[ClusterNode]
) -> str:
    """Return the JSON document (docs/status-json.md)."""
    whole = sum_cluster_nodes(sum_by_node(nodes))
    places, held = sum_cluster_places(nodes)
    sums = {one.name: one for one in sum_by_node(shown)}
    document = {
        "version": VERSION,
        "prometheus": redact_prometheus_url(parse_prometheus_url(url)),
        "totals": {
            **{name: int(count) for name, count in whole.states.items()},
            "devices": int(whole.devices),
            "nodes": len(nodes),
            "nodes_down": sum(not node.up for node in nodes),
            "places": places,
            "places_held": held,
        },
        "nodes": [cluster_node_entry(node, sums.get(node.name)) for node in shown],
        "models": [cluster_sum_entry("model", one) for one in sum_by_model(nodes)],
        "users": [
            {
                **cluster_sum_entry("user", one),
                "devices": whole_or_parts(one.devices) or None,
                "jobs": one.jobs,
                "nodes": one.nodes,
            }
            for one in sum_by_user(nodes)
        ],
    }
    return json.dumps(document, indent=2)


def cluster_node_entry(node: ClusterNode, of: ClusterSum | None) -> dict[str, object]:
    """Return one node; what is not known is null."""
    rest = (
        cluster_sum_entry("node", of)
        if of
        else {"states": None, "devices": None, "utilization": None}
    )
    own = {"node": node.name, "instance": node.instance, "up": node.up, "driver": node.driver}
    return {**own, **rest, "node": node.name}


def cluster_sum_entry(what: str, one: ClusterSum) -> dict[str, object]:
    """Return one sum."""
    use = round(one.utilization, 4) if one.utilization is not None else None
    counts = {name: whole_or_parts(count) for name, count in one.states.items()}
    return {
        what: one.name,
        "devices": whole_or_parts(one.devices),
        "states": counts,
        "utilization": use,
    }


def whole_or_parts(count: float) -> float:
    """Return a count as a whole number where it is one."""
    rounded = round(count, 4)
    return int(rounded) if rounded == int(rounded) else rounded
