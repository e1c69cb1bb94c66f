# SPDX-License-Identifier: Apache-2.0
"""`gpulock install`, `uninstall`, `doctor`: put gpulock onto a node, take it away, check it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpulock.cli.session import CommandRefusedError, Session
from gpulock.install.hooks import InstallError
from gpulock.install.versions import DEFAULT_PREFIX
from gpulock.text.words import format_count

if TYPE_CHECKING:
    from gpulock.install.planner import InstallPlan
    from gpulock.install.undo import Uninstaller


@click.group()
def install_group() -> None:
    """Install hooks or services."""


@install_group.command("sge")
@click.option("--queue", "queues", multiple=True, required=True, metavar="NAME", help="Repeatable.")
@click.option(
    "--gpus", type=click.IntRange(min=1), help="GPUs of this node.  [default: count them]"
)
@click.option("--complex", default="gpu", show_default=True, help="Consumable that counts GPUs.")
@click.option("--host", default="", help="Grid Engine's name of this host.  [default: ask it]")
@click.option("--all-hosts", is_flag=True, help="Set the hooks for all hosts of the queue.")
@click.option(
    "--prefix",
    type=click.Path(path_type=Path),
    default=DEFAULT_PREFIX,
    show_default=True,
    help="Folder for the hooks.",
)
@click.option("--interpreter", default=sys.executable, help="Python interpreter of the hooks.")
@click.option("--sge-root", default="", help="SGE_ROOT, where there are several.")
@click.option("--sge-cell", default="", help="SGE_CELL.")
@click.option("--dry-run", is_flag=True, help="Print what would change; change nothing.")
@click.pass_obj
def install_sge_command(session: Session, /, dry_run: bool, **options: Any) -> None:
    """Install prolog, epilog and load sensor for Grid Engine on this node."""
    from gpulock.install.sge.install import SgeOptions, plan_sge

    try:
        options["prefix"] = options["prefix"].absolute()
        plan = plan_sge(SgeOptions(config=Path(session.config), **options))
        show_or_apply_plan(plan, dry_run)
    except InstallError as fault:
        raise CommandRefusedError(str(fault)) from fault


@install_group.command("slurm")
@click.option(
    "--gpus", type=click.IntRange(min=1), help="GPUs of this node.  [default: count them]"
)
@click.option("--node", default="", help="Slurm's name of this node.  [default: ask slurmd]")
@click.option(
    "--prefix",
    type=click.Path(path_type=Path),
    default=DEFAULT_PREFIX,
    show_default=True,
    help="Folder for the hooks.",
)
@click.option("--interpreter", default=sys.executable, help="Python interpreter of the hooks.")
@click.option("--dry-run", is_flag=True, help="Print what would change; change nothing.")
@click.pass_obj
def install_slurm_command(session: Session, /, dry_run: bool, **options: Any) -> None:
    """Install Prolog, TaskProlog and Epilog for Slurm on this node.

    Reads slurm.conf and gres.conf, and prints the lines to add there.
    """
    from gpulock.install.slurm.install import SlurmOptions, plan_slurm

    try:
        options["prefix"] = options["prefix"].absolute()
        plan = plan_slurm(SlurmOptions(config=Path(session.config), **options))
        show_or_apply_plan(plan, dry_run)
    except InstallError as fault:
        raise CommandRefusedError(str(fault)) from fault
    for page in plan.pages:
        click.echo("\n" + "\n".join(page))


@install_group.command("systemd")
@click.option("--dry-run", is_flag=True, help="Print what would change; change nothing.")
@click.pass_obj
def install_systemd_command(session: Session, /, dry_run: bool) -> None:
    """Install and start gpulockd and the exporter as systemd services."""
    from gpulock.install.systemd.install import SystemdOptions, plan_systemd

    try:
        plan = plan_systemd(SystemdOptions(config=Path(session.config).absolute()))
        for change in () if dry_run else plan.changes:
            click.echo("\n".join(change.lines()))
        show_or_apply_plan(plan, dry_run)
    except InstallError as fault:
        raise CommandRefusedError(str(fault)) from fault


def show_or_apply_plan(plan: InstallPlan, dry_run: bool) -> None:
    """Make the changes, or show them; then say what there is to know."""
    for change in plan.changes if dry_run else ():
        click.echo("\n".join(change.lines()))
    if not dry_run:
        plan.apply(click.echo)
    for note in plan.notes:
        click.echo(f"note: {note}")
    if not plan.changes:
        click.echo("nothing to change: it is installed as asked")
    elif dry_run:
        click.echo(f"{format_count(len(plan.changes), 'change')} would be made")


@click.group()
def uninstall_group() -> None:
    """Remove hooks or services."""


@uninstall_group.command("sge")
@click.option("--force", is_flag=True, help="Although devices are locked.")
@click.option("--reason", default="", metavar="TEXT", help="Reason; needed with --force.")
@click.pass_obj
def uninstall_sge_command(session: Session, force: bool, reason: str) -> None:
    """Restore what was there before `install sge`."""
    from gpulock.install.sge.install import SgeUninstaller

    run_uninstaller(session, SgeUninstaller, force, reason)


@uninstall_group.command("slurm")
@click.option("--force", is_flag=True, help="Uninstall although Slurm jobs hold devices.")
@click.option("--reason", default="", metavar="TEXT", help="Reason; needed with --force.")
@click.pass_obj
def uninstall_slurm_command(session: Session, force: bool, reason: str) -> None:
    """Restore what was there before `install slurm`."""
    from gpulock.install.slurm.install import SlurmUninstaller

    run_uninstaller(session, SlurmUninstaller, force, reason)


@uninstall_group.command("systemd")
@click.pass_obj
def uninstall_systemd_command(session: Session) -> None:
    """Stop both services, and restore what was there before `install systemd`."""
    from gpulock.install.systemd.install import SystemdUninstaller

    run_uninstaller(session, SystemdUninstaller, False, "")


def run_uninstaller(
    session: Session, installed: type[Uninstaller], force: bool, reason: str
) -> None:
    """Uninstall, and say what was left as it is."""
    if force and not reason:
        raise click.UsageError('--force needs --reason "TEXT".')
    try:
        left = installed(Path(session.config), click.echo).undo(force, reason)
    except InstallError as fault:
        raise CommandRefusedError(str(fault)) from fault
    for line in left:
        click.echo(f"left as it is: {line}", err=True)
    if left:
        raise CommandRefusedError(
            f"{format_count(len(left), 'thing')} could not be restored", "see above"
        )


@click.command()
@click.option("--prefix", type=click.Path(path_type=Path), default=None, hidden=True)
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
