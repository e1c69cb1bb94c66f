# SPDX-License-Identifier: Apache-2.0
"""`gpulock simulate`: a node of files."""

from __future__ import annotations

import os
from pathlib import Path

import click

from gpulock.cli.session import CommandRefusedError
from gpulock.simulate.node import SimulationError, make_device_nodes, write_simulated_node
from gpulock.simulate.presets import PRESETS

HELP = "\b\nPresets:\n" + "\n".join(f"  {m.name:<12} {m.summary}" for m in PRESETS.values())


@click.command(epilog=HELP)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--preset",
    default="dgx1",
    show_default=True,
    type=click.Choice(list(PRESETS)),
    metavar="NAME",
    help="Machine type.",
)
@click.option("--gpus", type=click.IntRange(min=1), help="Only its first GPUs, this many.")
@click.option("--for-scheduler", is_flag=True, help="GPUs for a real scheduler's jobs; as root.")
def simulate_command(directory: Path, preset: str, gpus: int | None, for_scheduler: bool) -> None:
    """Write a simulated node into DIRECTORY, which must be new or empty."""
    if for_scheduler and os.geteuid() != 0:
        raise CommandRefusedError("a scheduler's hooks obey root's files alone", "run it as root")
    try:
        node = write_simulated_node(directory, preset, gpus, for_scheduler)
    except SimulationError as fault:
        raise CommandRefusedError(str(fault)) from fault
    machine = node.machine
    click.echo(f"{machine.name}: {machine.summary}")
    click.echo(f"{len(machine.gpus)} GPUs below {node.directory}; look at them with")
    click.echo(f"  gpulock --config {node.config} status")
    if for_scheduler:
        try:
            make_device_nodes(node)
        except OSError as fault:
            what = f"{node.dev_root} has plain files, which slurmd does not take: {fault}"
            click.echo(f"gpulock: simulate: {what}", err=True)
        minors = ",".join(str(number) for number in sorted(gpu.minor for gpu in machine.gpus))
        click.echo(f"for Slurm's gres.conf: Name=gpu File={node.dev_root}/nvidia[{minors}]")
        click.echo("docs/try-without-gpus.md has every step")
