# SPDX-License-Identifier: Apache-2.0
"""`gpulock simulate`: a node made of files, to try everything on."""

from __future__ import annotations

from pathlib import Path

import click

from gpulock.cli.session import CommandRefusedError
from gpulock.simulate.node import SimulationError, write_simulated_node
from gpulock.simulate.presets import PRESETS

HELP = "\b\nPresets:\n" + "\n".join(f"  {m.name:<12} {m.summary}" for m in PRESETS.values())


@click.command(epilog=HELP)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--preset", default="dgx1", show_default=True, metavar="NAME", help="Machine type.")
@click.option("--gpus", type=click.IntRange(min=1), help="Only its first GPUs, this many.")
def simulate_command(directory: Path, preset: str, gpus: int | None) -> None:
    """Write a simulated node into DIRECTORY, which must be empty or an older simulation."""
    try:
        node = write_simulated_node(directory, preset, gpus)
    except SimulationError as fault:
        raise CommandRefusedError(str(fault)) from fault
    machine = node.machine
    click.echo(f"{machine.name}: {machine.summary}")
    click.echo(f"{len(machine.gpus)} GPUs below {node.directory}; look at them with")
    click.echo(f"  gpulock --config {node.config} status")
