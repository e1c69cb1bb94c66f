# SPDX-License-Identifier: Apache-2.0
"""`gpulock inventory`: the devices as gpulock sees them."""

from __future__ import annotations

import click

from gpulock.cli.session import Session
from gpulock.errors import Refusal
from gpulock.job.environment import loaded_driver_version
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.node.kinds import format_device_kinds
from gpulock.text import table
from gpulock.text.table import Cell, Column
from gpulock.text.words import format_count, short_model

COLUMNS = (
    Column("GPU", right=True),
    Column("BUS ID"),
    Column("MINOR", right=True),
    Column("MODEL", least=10),
    Column("MIB", right=True, drop=1),
    Column("NUMA", right=True, drop=2),
    Column("UUID"),
)


@click.command()
@click.pass_obj
def inventory_command(session: Session) -> None:
    """Show the devices as gpulock sees them: index, bus id, UUID, kinds."""
    node = session.node()
    devices = node.devices()
    click.echo("\n".join(format_inventory_lines(node, devices, table.terminal_width())))


def format_inventory_lines(node: Node, devices: list[Device], width: int) -> list[str]:
    """Return driver and devices, kinds and faults; what is not known stays empty."""
    try:
        driver = loaded_driver_version(node.settings.driver_root)
    except Refusal as refusal:
        driver = f"unknown ({refusal.why})"
    result = [f"{format_count(len(devices), 'device')}, driver {driver}"]
    if not devices:
        return result
    rows = [
        [
            Cell(device.label()),
            Cell(device.bus),
            Cell(str(device.minor) if device.minor >= 0 else ""),
            table.model_cell(short_model(device.model), device.profile),
            Cell(str(device.memory_mib) if device.memory_mib else ""),
            Cell(str(device.numa) if device.numa >= 0 else ""),
            Cell(device.uuid or "not known yet"),
        ]
        for device in devices
    ]
    kinds = format_device_kinds(devices, node.settings.shares)
    faults = [(f"GPU {device.label()}", device.fault) for device in devices if device.fault]
    result += table.render_table(COLUMNS, rows, width)
    result += [f"Kinds that a job may ask for: {kinds}", *table.render_facts(faults, width)]
    if not node.inventory:
        why = "no inventory was published in this boot"
        result.append(f"NVLinks, memory and MIG are not known: {why}.")
    return result
