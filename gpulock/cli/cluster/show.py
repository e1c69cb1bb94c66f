# SPDX-License-Identifier: Apache-2.0
"""`gpulock status --cluster`: tables by node, by model and by user, and what is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from gpulock.alloc import states
from gpulock.cli.cluster import devices
from gpulock.cli.cluster.devices import ClusterNode, ClusterSum
from gpulock.cli.cluster.prometheus_api import query_prometheus
from gpulock.cli.session import CommandRefusedError
from gpulock.text import table
from gpulock.text.table import Cell, Column
from gpulock.text.words import format_count

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


def observe_cluster(url: str) -> list[ClusterNode]:
    """Return all nodes that a Prometheus server knows; raise Refused."""
    nodes = devices.build_cluster_nodes(query_prometheus(url, devices.QUERIES))
    if not nodes:
        raise CommandRefusedError(
            f"the Prometheus at PROMETHEUS_URL has no series of gpulock within {devices.DAY}",
            "let it scrape the nodes' gpulock-exporter (port 9465)",
        )
    return nodes


def select_nodes_with_free(nodes: Sequence[ClusterNode]) -> list[ClusterNode]:
    """Return the nodes that have a free device."""
    return [node for node in nodes if node.counts and node.counts[states.FREE]]


def format_cluster_tables(
    nodes: Sequence[ClusterNode], shown: Sequence[ClusterNode], width: int
) -> list[str]:
    """Return the tables: by node of `shown`, by model and by user of all, and what is wrong."""
    result: list[str] = []
    if shown:
        rows = [node_cells(node) for node in shown]
        result += table.render_table((Column("NODE", least=12), *COUNTS), rows, width)
    if len(shown) == len(nodes):
        if models := [count_cells(one) for one in devices.sum_by_model(nodes)]:
            columns = (Column("MODEL", least=12), *COUNTS)
            result += ["", *table.render_table(columns, models, width)]
        if users := [user_cells(one) for one in devices.sum_by_user(nodes)]:
            result += ["", *table.render_table(USERS, users, width)]
        result.append("")
    result += format_cluster_totals(nodes, width)
    return [*result, *table.render_facts(find_cluster_faults(nodes), width)]


def node_cells(node: ClusterNode) -> list[Cell]:
    """Return the row of a node, of which nothing may be known."""
    if node.counts is not None:
        return count_cells(devices.sum_node(node))
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
    split = any(device.split for device in devices.all_devices(nodes))
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
