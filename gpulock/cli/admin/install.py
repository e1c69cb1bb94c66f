# SPDX-License-Identifier: Apache-2.0
"""`gpulock install`, `uninstall`, `doctor`: put gpulock onto a node, take it away, check it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpulock.cli.session import CommandRefusedError, Session
from gpulock.install.hooks import InstallError
from gpulock.install.versions import DEFAULT_PREFIX
from gpulock.text.words import format_count

if TYPE_CHECKING:
    from gpulock.install.planner import InstallPlan
    from gpulock.install.undo import Uninstaller


F = TypeVar("F", bound=Callable[..., object])
SYSTEMS = ("sge", "slurm", "systemd")
FOLDER = click.Path(path_type=Path)


@click.group()
def install_group() -> None:
    """Install hooks or services."""


def dry_run_option(function: F) -> F:
    """Add --dry-run."""
    text = "Print what would change; change nothing."
    return click.option("--dry-run", is_flag=True, help=text)(function)


def hook_options(function: F) -> F:
    """Add the options of an installation of hooks."""
    gpus, folder = "GPUs of this node.  [default: count them]", "Folder for the hooks."
    for option in (
        dry_run_option,
        click.option("--interpreter", default=sys.executable, help="Python of the hooks."),
        click.option(
            "--prefix", type=FOLDER, default=DEFAULT_PREFIX, show_default=True, help=folder
        ),
        click.option("--gpus", type=click.IntRange(min=1), help=gpus),
        click.option("--podman", is_flag=True, help="A hook that gives podman the job's mask."),
        click.option("--enroot", is_flag=True, help="A hook that gives enroot the job's mask."),
    ):
        function = option(function)
    return function


@install_group.command("sge")
@click.option("--queue", "queues", multiple=True, required=True, metavar="NAME", help="Repeatable.")
@click.option("--complex", default="gpu", show_default=True, help="Consumable that counts GPUs.")
@click.option("--map", default="", metavar="ID=GPU,...", help="Which GPU each id of an RSMAP is.")
@click.option("--host", default="", help="Grid Engine's name of this host.  [default: ask it]")
@click.option("--all-hosts", is_flag=True, help="Set the hooks for all hosts of the queue.")
@click.option("--sge-root", default="", help="SGE_ROOT, where there are several.")
@click.option("--sge-cell", default="", help="SGE_CELL.")
@hook_options
@click.pass_obj
def install_sge_command(session: Session, /, dry_run: bool, prefix: Path, **options: Any) -> None:
    """Install prolog, epilog and load sensor for Grid Engine on this node."""
    from gpulock.install.sge.install import SgeOptions, plan_sge

    options |= {"prefix": prefix.absolute(), "config": Path(session.config)}
    run_installer(lambda: plan_sge(SgeOptions(**options)), dry_run)


@install_group.command("slurm")
@click.option("--node", default="", help="Slurm's name of this node.  [default: ask slurmd]")
@click.option("--spank", is_flag=True, help="A SPANK plugin in place of TaskProlog, for pyxis.")
@hook_options
@click.pass_obj
def install_slurm_command(session: Session, /, dry_run: bool, prefix: Path, **options: Any) -> None:
    """Install Prolog, TaskProlog and Epilog for Slurm on this node.

    Reads slurm.conf and gres.conf, and prints the lines to add there.
    """
    from gpulock.install.slurm.install import SlurmOptions, plan_slurm

    options |= {"prefix": prefix.absolute(), "config": Path(session.config)}
    run_installer(lambda: plan_slurm(SlurmOptions(**options)), dry_run)


@install_group.command("systemd")
@dry_run_option
@click.pass_obj
def install_systemd_command(session: Session, /, dry_run: bool) -> None:
    """Install and start gpulockd and the exporter as systemd services."""
    from gpulock.install.systemd.install import SystemdOptions, plan_systemd

    options = SystemdOptions(config=Path(session.config).absolute())
    run_installer(lambda: plan_systemd(options), dry_run, shown=True)


def run_installer(plan_it: Callable[[], InstallPlan], dry_run: bool, shown: bool = False) -> None:
    """Make the changes, or show them (`shown`: both); then say what there is to know."""
    try:
        plan = plan_it()
        for change in plan.changes if dry_run or shown else ():
            click.echo("\n".join(change.lines()))
        if not dry_run:
            plan.apply(click.echo)
    except InstallError as fault:
        raise CommandRefusedError(str(fault)) from fault
    for note in plan.notes:
        click.echo(f"note: {note}")
    if not plan.changes:
        click.echo("nothing to change: it is installed as asked")
    elif dry_run:
        click.echo(f"{format_count(len(plan.changes), 'change')} would be made")
    for page in plan.pages:
        click.echo("\n" + "\n".join(page))


@click.command()
@click.argument("system", type=click.Choice(SYSTEMS))
@click.option("--force", is_flag=True, help="Uninstall although jobs hold devices.")
@click.option("--reason", default="", metavar="TEXT", help="Reason; needed with --force.")
@click.pass_obj
def uninstall_command(session: Session, system: str, force: bool, reason: str) -> None:
    """Restore what was there before `install sge`, `slurm` or `systemd`."""
    if force and not reason:
        raise click.UsageError('--force needs --reason "TEXT".')
    module = import_module(f"gpulock.install.{system}.install")
    installed: type[Uninstaller] = getattr(module, f"{system.capitalize()}Uninstaller")
    try:
        left = installed(Path(session.config), click.echo).undo(force, reason)
    except InstallError as fault:
        raise CommandRefusedError(str(fault)) from fault
    for line in left:
        click.echo(f"left as it is: {line}", err=True)
    if left:
        what = f"{format_count(len(left), 'thing')} could not be restored"
        raise CommandRefusedError(what, "see above")


@click.command()
@click.option("--prefix", type=FOLDER, default=None, hidden=True)
@click.pass_context
def doctor_command(ctx: click.Context, prefix: Path | None) -> None:
    """Check this node, its settings and its scheduler; exit 3 if there is a fault."""
    from gpulock.install.doctor import doctor as checks

    session: Session = ctx.obj
    if os.geteuid() != 0 and not session.settings().simulation:
        raise CommandRefusedError("only root can check this node", "run it as root")
    try:
        found = checks.run_doctor(checks.DoctorOptions(config=Path(session.config), prefix=prefix))
    except InstallError as fault:
        raise CommandRefusedError(str(fault)) from fault
    colours = dict(zip(checks.MARKS.values(), ("green", "yellow", "red"), strict=True))
    checks.print_checks(
        found, lambda line: click.echo(click.style(line[:1], colours.get(line[:1])) + line[1:])
    )
    ctx.exit(checks.doctor_exit_code(found))
