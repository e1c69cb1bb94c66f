# SPDX-License-Identifier: Apache-2.0
"""`gpulock install`, `uninstall`, `doctor`: put gpulock onto a node, take it away, check it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpulock.cli.admin.items import list_objections, run_installation, run_removal
from gpulock.cli.admin.offers import Consent, echo_note, note_missing_daemon
from gpulock.cli.session import CommandRefusedError, Session, name_config
from gpulock.daemon.health.findings import POLICY_WORDS
from gpulock.install.hooks import InstallError
from gpulock.install.versions import DEFAULT_PREFIX
from gpulock.text import table
from gpulock.text.words import format_count

if TYPE_CHECKING:
    from gpulock.install.planner import InstallPlan

F = TypeVar("F", bound=Callable[..., object])
FOLDER = click.Path(path_type=Path)


class WholeHelpGroup(click.Group):
    """A group whose help has each command's first sentence whole."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands, their sentences wrapped and not cut."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, one.get_short_help_str(table.UNCUT)) for name, one in self.commands.items()]
            )


@click.group(cls=WholeHelpGroup)
def install_group() -> None:
    """Install hooks or services."""


def dry_run_option(function: F) -> F:
    """Add --dry-run."""
    text = "Print what would change; change nothing."
    return click.option("--dry-run", is_flag=True, help=text)(function)


def quarantine_option(function: F) -> F:
    """Add --quarantine-on."""
    text = f"QUARANTINE_ON: what takes a GPU out of service, of {' '.join(POLICY_WORDS)}."
    return click.option("--quarantine-on", metavar="WORDS", default=None, help=text)(function)


def yes_option(function: F) -> F:
    """Add --yes."""
    text = "Agree to all that it offers."
    return click.option("--yes", is_flag=True, help=text)(function)


def hook_options(function: F) -> F:
    """Add the options of an installation of hooks."""
    gpus, folder = "GPUs of this node.  [default: count them]", "Folder for the hooks."
    for option in (
        dry_run_option,
        quarantine_option,
        click.option("--interpreter", default=sys.executable, help="Python of the hooks."),
        click.option(
            "--prefix", type=FOLDER, default=DEFAULT_PREFIX, show_default=True, help=folder
        ),
        click.option("--gpus", type=click.IntRange(min=1), help=gpus),
        click.option("--docker", is_flag=True, help="Set CDI_DIR; print lines for Docker."),
        click.option("--podman", is_flag=True, help="A hook that gives podman the job's mask."),
        click.option("--enroot", is_flag=True, help="A hook that gives enroot the job's mask."),
    ):
        function = option(function)
    return function


@install_group.command("sge")
@click.option(
    "--queue",
    "queues",
    multiple=True,
    required=True,
    metavar="NAME",
    help="Queue whose jobs get locks; may be repeated.",
)
@click.option("--complex", default="gpu", show_default=True, help="Consumable that counts GPUs.")
@click.option("--map", default="", metavar="ID=GPU,...", help="Which GPU each id of an RSMAP is.")
@click.option("--host", default="", help="Grid Engine's name of this host.  [default: ask it]")
@click.option("--all-hosts", is_flag=True, help="Set the hooks for all hosts of the queue.")
@click.option("--sge-root", default="", help="SGE_ROOT, where there are several.")
@click.option("--sge-cell", default="", help="SGE_CELL.")
@click.option(
    "--accept-terminal-jobs",
    is_flag=True,
    help="Install although a qrsh on a terminal puts the queue in error.",
)
@yes_option
@hook_options
@click.pass_obj
def install_sge_command(
    session: Session, /, dry_run: bool, yes: bool, prefix: Path, **options: Any
) -> None:
    """Install prolog, epilog and load sensor for Grid Engine on this node.

    On a terminal it asks about quarantine, and offers a trial job.
    """
    from gpulock.install.sge.install import SgeOptions, plan_sge

    options |= {"prefix": prefix.absolute(), "config": Path(session.config)}
    consent = Consent(session, yes, dry_run)

    def plan(quarantine_on: str | None) -> InstallPlan:
        return plan_sge(replace(SgeOptions(**options), quarantine_on=quarantine_on))

    asked: str | None = options["quarantine_on"]
    run_installer(lambda: plan_with_policy(plan, asked, consent), dry_run, consent)


@install_group.command("slurm")
@click.option("--node", default="", help="Slurm's name of this node.  [default: ask slurmd]")
@click.option("--spank", is_flag=True, help="A SPANK plugin in place of TaskProlog, for pyxis.")
@click.option("--write-conf", is_flag=True, help="Write them into slurm.conf; reconfigure.")
@click.option("--installed-everywhere", is_flag=True, help="Every node of the cluster has gpulock.")
@hook_options
@click.pass_obj
def install_slurm_command(session: Session, /, dry_run: bool, prefix: Path, **options: Any) -> None:
    """Install Prolog, TaskProlog and Epilog for Slurm on this node.

    Reads slurm.conf and gres.conf, and prints the lines to add there, or adds them to slurm.conf.
    """
    from gpulock.install.slurm.install import SlurmInstaller, SlurmOptions

    asked = SlurmOptions(**options, prefix=prefix.absolute(), config=Path(session.config))
    run_installation(session, "slurm", lambda: SlurmInstaller(asked).parts(), dry_run)


@install_group.command("systemd")
@dry_run_option
@quarantine_option
@click.pass_obj
def install_systemd_command(session: Session, /, dry_run: bool, quarantine_on: str | None) -> None:
    """Install and start gpulockd and the exporter as systemd services."""
    from gpulock.install.systemd.install import SystemdInstaller, SystemdOptions

    asked = SystemdOptions(Path(session.config).absolute(), quarantine_on=quarantine_on)
    run_installation(session, "systemd", lambda: SystemdInstaller(asked).parts(), dry_run)


@install_group.command("hooks")
@click.option("--if-broken", is_flag=True, help="Only where the Python that they name is gone.")
@click.pass_obj
def install_hooks_command(session: Session, /, if_broken: bool) -> None:
    """Render the installed hooks again, for this version and its Python; ask no scheduler."""
    from gpulock.install.renew import renew_hooks

    try:
        renew_hooks(session.settings(), sys.executable, if_broken, click.echo)
    except InstallError as fault:
        raise CommandRefusedError(str(fault)) from fault


def plan_with_policy(
    plan_it: Callable[[str | None], InstallPlan], asked: str | None, consent: Consent
) -> InstallPlan:
    """Return a plan with QUARANTINE_ON as asked for, else as answered; raise InstallError.

    It is planned without an answer first: what cannot be installed here is not asked about.
    """
    plan = plan_it(asked)
    chosen = consent.choose_policy(asked)
    return plan if chosen == asked else plan_it(chosen)


def run_installer(plan_it: Callable[[], InstallPlan], dry_run: bool, consent: Consent) -> None:
    """Make the changes, or show them; then say what there is to know, and offer a trial job."""
    try:
        plan = plan_it()
        consent.note_trial(plan)
        for change in plan.changes if dry_run else ():
            click.echo("\n".join(change.lines()))
        if not dry_run:
            plan.apply(click.echo)
    except InstallError as fault:
        for line in fault.page:
            click.echo(line)
        raise CommandRefusedError(str(fault)) from fault
    for note in plan.notes:
        echo_note(note)
    if not plan.changes:
        click.echo("nothing to change: it is installed as asked")
    elif dry_run:
        click.echo(f"{format_count(len(plan.changes), 'change')} would be made")
    for page in plan.pages:
        click.echo(name_config("\n" + "\n".join(page)))
    if not dry_run:
        note_missing_daemon(consent.session)
        consent.run_trial(plan)


@click.command()
@click.argument("system", type=click.Choice(["sge", "slurm", "systemd"]))
@dry_run_option
@click.option("--write-conf", is_flag=True, help="Slurm: take the block out of slurm.conf, too.")
@click.option("--prefix", type=FOLDER, help="Slurm: folder of the hooks.  [default: as installed]")
@click.option("--force", is_flag=True, help="Uninstall although jobs hold devices.")
@click.option("--reason", default="", metavar="TEXT", help="Reason; needed with --force.")
@click.pass_obj
def uninstall_command(
    session: Session, /, system: str, force: bool, reason: str, **options: Any
) -> None:
    """Remove gpulock's own files; name what leads to them in files of others."""
    if force and not reason:
        raise click.UsageError('--force needs --reason "TEXT".')
    if system == "slurm":
        uninstall_slurm(session, force, reason, **options)
        return
    dry_run: bool = options.pop("dry_run")
    if any(options.values()):
        raise click.UsageError("--write-conf and --prefix are Slurm's.")
    if system == "systemd":
        uninstall_systemd(session, dry_run)
    elif dry_run:
        raise click.UsageError("--dry-run is not Grid Engine's.")
    else:
        uninstall_sge(session, force, reason)


def uninstall_slurm(
    session: Session, force: bool, reason: str, dry_run: bool, **options: Any
) -> None:
    """Take the items of Slurm away; what is overruled by force is logged."""
    from gpulock.install.slurm.uninstall import SlurmRemoval, SlurmRemover
    from gpulock.install.uninstall import log_forced_uninstall

    asked = SlurmRemoval(Path(session.config), **options)
    if force:
        for what in list_objections(lambda: SlurmRemover(asked).parts()) if not dry_run else ():
            log_forced_uninstall(f"slurm uninstalled by force: {what}: {reason}")
        asked = replace(asked, force=True)
    run_removal(session, "slurm", lambda: SlurmRemover(asked).parts(), dry_run)


def uninstall_systemd(session: Session, dry_run: bool) -> None:
    """Take the items of the services away."""
    from gpulock.install.systemd.install import SystemdInstaller, SystemdOptions

    asked = SystemdOptions(Path(session.config).absolute())
    run_removal(session, "systemd", lambda: SystemdInstaller(asked).removal(), dry_run)


def uninstall_sge(session: Session, force: bool, reason: str) -> None:
    """Remove what the record of the installation names."""
    from gpulock.install.sge.uninstall import SgeUninstaller

    try:
        installation = SgeUninstaller(Path(session.config), click.echo)
        there = bool(installation.record.load())
        left = installation.uninstall(force, reason)
    except InstallError as fault:
        raise CommandRefusedError(str(fault)) from fault
    for line in left:
        click.echo(line)
    if left:
        what = "gpulock is not yet uninstalled from sge"
        raise CommandRefusedError(what, "do what is shown above, and run it again")
    click.echo("uninstalled: sge" if there else "nothing to do: sge is not installed here")


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
    colours = dict(zip(checks.MARKS.values(), ("green", "yellow", "red")))
    checks.print_checks(
        [replace(check, do=name_config(check.do)) for check in found],
        lambda line: click.echo(click.style(line[:1], colours.get(line[:1])) + line[1:]),
        table.sentence_width(sys.stdout),
    )
    ctx.exit(checks.doctor_exit_code(found))
