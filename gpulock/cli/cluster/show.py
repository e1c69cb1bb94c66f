# SPDX-License-Identifier: Apache-2.0
"""`gpulock status --cluster`: the whole of it as tables, and as JSON. Pure but for `observe`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gpulock.alloc import states
from gpulock.cli.cluster.devices import DAY, QUERIES, Node, cluster
from gpulock.cli.cluster.prometheus_api import address, ask, named
from gpulock.cli.cluster.sums import Sum, by_model, by_node, by_user, total
from gpulock.cli.session import Refused
from gpulock.text import table
from gpulock.text.table import Cell, Column
from gpulock.text.words import counted

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


def observe(url: str) -> list[Node]:
    """Return all nodes that a Prometheus server knows; raise Refused."""
    nodes = cluster(ask(url, QUERIES))
    if not nodes:
        raise Refused(
            f"Prometheus at {named(address(url))} has no series of gpulock within {DAY}",
            "let it scrape the nodes' gpulock-exporter (port 9465)",
        )
    return nodes


def having_free(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that have a free device."""
    return [node for node in nodes if node.up and node.states and node.states[states.FREE]]


def lines(nodes: Sequence[Node], shown: Sequence[Node], width: int) -> list[str]:
    """Return the tables: by node of `shown`, by model and by user of all, and what is wrong."""
    result: list[str] = []
    if shown:
        sums = {one.name: count_cells(one) for one in by_node(shown)}
        rows = [[Cell(node.name), *sums.get(node.name, missing_cells(node))] for node in shown]
        result += table.render((Column("NODE", least=12), *COUNTS), rows, width)
    if len(shown) == len(nodes):
        models = [[Cell(one.name), *count_cells(one)] for one in by_model(nodes)]
        users = [user_cells(one) for one in by_user(nodes)]
        if models:
            result += ["", *table.render((Column("MODEL", least=12), *COUNTS), models, width)]
        if users:
            result += ["", *table.render(USERS, users, width)]
        result.append("")
    return [*result, *totals(nodes, width), *table.facts(faults(nodes), width)]


def count_cells(one: Sum) -> list[Cell]:
    """Return the cells of COUNTS."""
    others = ", ".join(f"{n} {table.state_cell(name).text}" for name, n in one.others.items())
    colours = [table.COLOURS[name] for name in one.others]
    return [
        Cell(str(one.devices)),
        number(one.states[states.FREE], states.FREE),
        number(one.states[states.HELD], states.HELD),
        number(one.states[states.HELD_IDLE], states.HELD_IDLE),
        percent(one.utilization),
        Cell(others, colours[0] if colours else None),
    ]


def missing_cells(node: Node) -> list[Cell]:
    """Return the cells of a node of which nothing is known."""
    why = "exporter down" if not node.up else "locks not readable"
    return [*[Cell("-")] * 5, Cell(why, "red")]


def user_cells(one: Sum) -> list[Cell]:
    """Return the cells of USERS."""
    return [
        Cell(one.name),
        Cell(str(one.devices)),
        number(one.states[states.HELD_IDLE], states.HELD_IDLE),
        percent(one.utilization),
        Cell(str(one.jobs)),
        Cell(str(one.nodes)),
    ]


def number(count: int, name: str) -> Cell:
    """Return a count in the colour of its state, 0 in none."""
    return Cell(str(count), table.COLOURS[name] if count else None)


def percent(ratio: float | None) -> Cell:
    """Return `87%`."""
    return Cell("-" if ratio is None else f"{ratio:.0%}")


def totals(nodes: Sequence[Node], width: int) -> list[str]:
    """Return `3 nodes, 24 GPUs: 10 free, 12 held, 2 held (idle)`."""
    whole = total(by_node(nodes))
    split = any(device.mig for node in nodes for device in node.devices.values())
    names = [
        table.paint(f"{count} {table.state_cell(name).text}", table.COLOURS[name])
        for name in reversed(states.STATES)
        if (count := whole.states[name]) or name == states.FREE
    ]
    what = counted(whole.devices, "device" if split else "GPU")
    return table.flow(f"{counted(len(nodes), 'node')}, {what}", names, width)


def faults(nodes: Sequence[Node]) -> list[tuple[str, str]]:
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


def text(url: str, nodes: Sequence[Node], shown: Sequence[Node]) -> str:
    """Return the JSON document (docs/status-json.md)."""
    whole = total(by_node(nodes))
    sums = {one.name: one for one in by_node(shown)}
    document = {
        "version": VERSION,
        "prometheus": named(address(url)),
        "totals": {
            **whole.states,
            "devices": whole.devices,
            "nodes": len(nodes),
            "nodes_down": sum(not node.up for node in nodes),
        },
        "nodes": [node_entry(node, sums.get(node.name)) for node in shown],
        "models": [entry("model", one) for one in by_model(nodes)],
        "users": [
            {**entry("user", one), "jobs": one.jobs, "nodes": one.nodes} for one in by_user(nodes)
        ],
    }
    return json.dumps(document, indent=2)


def node_entry(node: Node, of: Sum | None) -> dict[str, object]:
    """Return one node; what is not known is null."""
    rest = entry("node", of) if of else {"states": None, "devices": None, "utilization": None}
    own = {"node": node.name, "instance": node.instance, "up": node.up, "driver": node.driver}
    return {**own, **rest, "node": node.name}


def entry(what: str, one: Sum) -> dict[str, object]:
    """Return one sum."""
    use = round(one.utilization, 4) if one.utilization is not None else None
    return {what: one.name, "devices": one.devices, "states": one.states, "utilization": use}
