# SPDX-License-Identifier: Apache-2.0
"""What an installation of hooks asks: what puts a GPU out, and a trial job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpulock.cli.session import CommandRefusedError, Session, name_config
from gpulock.daemon.core.instance_lock import find_running_daemon
from gpulock.install.hooks import InstallError
from gpulock.install.systemd import manager
from gpulock.text import table

if TYPE_CHECKING:
    from gpulock.install.planner import InstallPlan

POLICY = "Let gpulockd take a GPU that fails out of service (QUARANTINE_ON={words})?"
TRIAL = "Run a trial job of one GPU?"
NO_DAEMON = "gpulockd does not run: gpulock install systemd starts both services"
NO_SYSTEMD = (
    "gpulockd does not run, for there is no systemd here: start it and gpulock-exporter yourself,"
    " or run gpulock reap from cron every minute"
)


def echo_note(text: str) -> None:
    """Tell the administrator something, in lines that fit."""
    echo_wrapped(f"note: {text}", "      ")


def echo_wrapped(text: str, indent: str = "") -> None:
    """Say what was found and what to do next, in lines that fit."""
    width = table.sentence_width(sys.stdout)
    for line in table.wrap_sentence(name_config(text), width, indent):
        click.echo(line)


def note_missing_daemon(session: Session) -> None:
    """Say how gpulockd is started, where it does not run."""
    settings = session.settings()
    if find_running_daemon(settings.lock_dir, settings.proc_root) is None:
        echo_note(NO_DAEMON if manager.RUNNING.is_dir() else NO_SYSTEMD)


class Consent:
    """Whether the administrator agrees: to all (--yes), to each question, or to nothing.

    Without a terminal nobody is asked, and a dry run asks nothing.
    """

    def __init__(self, session: Session, yes: bool, dry_run: bool) -> None:
        self.session, self.yes, self.dry_run = session, yes, dry_run
        self.person = not dry_run and sys.stdin.isatty() and sys.stdout.isatty()

    def agrees(self, question: str) -> bool:
        """Return the answer to a question."""
        return self.yes or (self.person and click.confirm(question, default=True))

    def choose_policy(self, asked: str | None) -> str | None:
        """Return QUARANTINE_ON as asked for, else by the answer; None leaves it as it is.

        Raises InstallError where the settings file has a fault.
        """
        from gpulock.install.node_part import current_settings

        settings, given = current_settings(Path(self.session.config))
        if asked is not None or "QUARANTINE_ON" in given or not (self.yes or self.person):
            return asked
        words = " ".join(settings.quarantine_on)
        return words if self.agrees(POLICY.format(words=words)) else ""

    def note_trial(self, plan: InstallPlan) -> None:
        """Note that a trial job can be run, where nobody is asked."""
        if plan.trial and not (self.yes or self.person):
            plan.notes.append("no trial job is run: --yes runs one")

    def run_trial(self, plan: InstallPlan) -> None:
        """Run the trial job of a plan; raise CommandRefusedError where it was not protected."""
        if self.dry_run or plan.trial is None or not self.agrees(TRIAL):
            return
        try:
            echo_wrapped(plan.trial())
        except InstallError as fault:
            raise CommandRefusedError(
                str(fault), "it is installed, and does not work yet"
            ) from fault
