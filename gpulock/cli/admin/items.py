# SPDX-License-Identifier: Apache-2.0
"""An installation by items, as an administrator sees it: differences, one verdict, what is next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gpulock.cli.session import CommandRefusedError, Session, echo_note, echo_wrapped, name_config
from gpulock.daemon.core.instance_lock import find_running_daemon
from gpulock.install.files import InstallError
from gpulock.install.items import Wanted, run_items
from gpulock.install.node_part import NodePart
from gpulock.install.sge.cluster import ClusterInstaller
from gpulock.install.sge.install import SgeInstaller
from gpulock.install.slurm.install import SlurmInstaller
from gpulock.install.systemd import install

CELL = "sge --cluster"
UNFINISHED = 4  # exit code: what this run may do is done, and a person has to do the rest
NO_DAEMON = "gpulockd does not run: gpulock install systemd starts both services"
NO_SYSTEMD = (
    "gpulockd does not run, for there is no systemd here: start it and gpulock-exporter yourself,"
    " or run gpulock reap from cron every minute"
)


def run_installation(
    session: Session,
    system: str,
    dry_run: bool,
    wanted: Wanted = Wanted.PRESENT,
    **options: Any,
) -> None:
    """Bring all items of a system where they are wanted, or show each difference.

    Then say what there is to know, what a person has to do, and the verdict. It ends with
    UNFINISHED where a person has to do the rest, but for a dry run; raises Refusal at the first
    item that fails.
    """
    try:
        installer = make_installer(Path(session.config), system, **options)
        items = installer.parts() if wanted is Wanted.PRESENT else installer.removal()
        state_dir = Path(installer.settings.state_dir) if installer.on_node else None
        outcome = run_items(items, wanted, state_dir, click.echo, dry_run)
    except InstallError as fault:
        raise CommandRefusedError(str(fault)) from fault
    for note in installer.notes:
        echo_note(note)
    for page in [one.page for one in outcome.remainders if one.page]:
        click.echo(name_config("\n".join([*page, ""])))
    echo_wrapped(outcome.verdict(system, wanted, dry_run), "", err=False)
    if dry_run:
        return
    if installer.on_node and wanted is Wanted.PRESENT:
        note_missing_daemon(session)
        if installer.trial and not outcome.clauses():
            echo_wrapped(f"try it, as an ordinary user: {installer.trial}", "", err=False)
    elif installer.on_node and outcome.changed:
        click.echo(f"{session.config}, locks and history stay")
    if outcome.clauses():
        click.get_current_context().exit(UNFINISHED)


def make_installer(config: Path, system: str, **options: Any) -> NodePart:
    """Return what installs a system, or the cluster's part of it; raise InstallError."""
    if system == CELL:
        return ClusterInstaller(config, **options)
    if system == "sge":
        return SgeInstaller(config, click.echo, **options)
    return SlurmInstaller(config) if system == "slurm" else install.SystemdInstaller(config)


def note_missing_daemon(session: Session) -> None:
    """Say how gpulockd is started, where it does not run."""
    settings = session.settings()
    if find_running_daemon(settings.lock_dir, settings.proc_root) is None:
        echo_note(NO_DAEMON if install.BOOTED.is_dir() else NO_SYSTEMD)
