# SPDX-License-Identifier: Apache-2.0
"""`gpulock install`, `uninstall`, `doctor`: put gpulock onto a node, take it away, check it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from gpulock.cli.admin.items import CELL, run_installation
from gpulock.cli.session import CommandRefusedError, Session, name_config
from gpulock.install.files import InstallError
from gpulock.install.items import Wanted, run_items
from gpulock.text import table


@click.group()
def install_command() -> None:
    """Install hooks or services."""


DRY_RUN = click.option("--dry-run", is_flag=True, help="Print what would change; change nothing.")


@install_command.command("sge")
@click.option("--cluster", is_flag=True, help="The cluster's part alone, once, as a manager.")
@click.option(
    "--queue",
    "queues",
    multiple=True,
    metavar="NAME",
    help="With --cluster: queue whose jobs get locks; may be repeated.",
)
@click.option(
    "--map",
    "map_option",
    default="",
    metavar="ID=GPU,...",
    help="Which GPU each id of an RSMAP is.",
)
@DRY_RUN
@click.pass_obj
def install_sge_command(
    session: Session,
    /,
    dry_run: bool,
    cluster: bool,
    queues: tuple[str, ...],
    **options: Any,
) -> None:
    """Install prolog, epilog and load sensor of a Grid Engine node.

    Before, once for all nodes: install sge --cluster --queue NAME.
    """
    if cluster != bool(queues):
        raise click.UsageError("--cluster and --queue NAME belong together.")
    system, own = (CELL, {"queues": queues}) if cluster else ("sge", options)
    run_installation(session, system, dry_run, **own)


@install_command.command("slurm")
@DRY_RUN
@click.pass_obj
def install_slurm_command(session: Session, /, dry_run: bool) -> None:
    """Install Prolog, TaskProlog and Epilog for Slurm on this node.

    Prints the lines that slurm.conf lacks.
    """
    run_installation(session, "slurm", dry_run)


@install_command.command("systemd")
@DRY_RUN
@click.pass_obj
def install_systemd_command(session: Session, /, dry_run: bool) -> None:
    """Install and start gpulockd and the exporter as systemd services."""
    run_installation(session, "systemd", dry_run)


@install_command.command("hooks")
@click.pass_obj
def install_hooks_command(session: Session, /) -> None:
    """Render the installed hooks again, for this version and Python."""
    from gpulock.install import versions

    settings = session.settings()
    try:
        items = [versions.Hooks(settings)] if versions.installed_schedulers(settings) else []
        if not items and versions.version_in_force(versions.hooks_folder(settings)):
            why = f"no map in {settings.state_dir} tells for which scheduler the hooks are"
            raise CommandRefusedError(why, "run gpulock install sge or slurm")
        run_items(items, Wanted.PRESENT, Path(settings.state_dir), click.echo)
    except InstallError as fault:
        raise CommandRefusedError(str(fault)) from fault


@click.command()
@click.argument("system", type=click.Choice(["sge", "slurm", "systemd"]))
@DRY_RUN
@click.option("--cluster", is_flag=True, help="Grid Engine: the cluster's part, as a manager.")
@click.pass_obj
def uninstall_command(session: Session, /, system: str, dry_run: bool, cluster: bool) -> None:
    """Remove gpulock's own files; name what leads to them in files of others."""
    if cluster and system != "sge":
        raise click.UsageError(f"uninstall {system} has no such option.")
    run_installation(session, CELL if cluster else system, dry_run, Wanted.ABSENT)


@click.command()
@click.option("--all", "with_all", is_flag=True, help="Name each check that is well, too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor_command(ctx: click.Context, with_all: bool, as_json: bool) -> None:
    """Check this node, its settings and its scheduler; exit 1 if there is a fault."""
    from gpulock.install.doctor import doctor
    from gpulock.install.doctor.check import MARKS, report_json, report_lines

    session: Session = ctx.obj
    if os.geteuid() != 0 and not session.settings().simulation:
        raise CommandRefusedError("only root can check this node", "run it as root")
    try:
        report = doctor.run_doctor(Path(session.config))
    except InstallError as fault:
        raise CommandRefusedError(str(fault)) from fault
    report.findings = [replace(one, do=name_config(one.do)) for one in report.findings]
    if as_json:
        click.echo(report_json(report))
    else:
        colours = dict(zip(MARKS.values(), ("yellow", "red")))
        for line in report_lines(report, with_all, table.sentence_width(sys.stdout)):
            click.echo(click.style(line[:1], colours.get(line[:1])) + line[1:])
    ctx.exit(1 if report.is_broken else 0)
