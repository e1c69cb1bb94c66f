# SPDX-License-Identifier: Apache-2.0
"""What an installation tells besides: notes in lines that fit, and a gpulockd that is missing."""

from __future__ import annotations

import sys

import click

from gpulock.cli.session import Session, name_config
from gpulock.daemon.core.instance_lock import find_running_daemon
from gpulock.install.systemd import manager
from gpulock.text import table

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
