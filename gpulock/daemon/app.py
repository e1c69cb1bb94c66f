# SPDX-License-Identifier: Apache-2.0
"""gpulockd: reconcile this node again and again, for when the hooks did not run.

Warm. The hooks need no daemon; it needs neither slurmctld nor qmaster. Exit codes: 0 ended by a
signal; 1 another one runs; 2 usage; 3 the settings cannot be believed.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module

import gpulock
from gpulock import __version__
from gpulock.daemon.core.instance_lock import AlreadyRunningError
from gpulock.daemon.core.journal import (
    ERROR,
    WARNING,
    DaemonJournal,
    is_journal_stream,
    notifier_from_environ,
)
from gpulock.daemon.core.loop import DaemonSignals
from gpulock.daemon.health.checker import CardChecker
from gpulock.daemon.health.policy import HealthPolicy
from gpulock.daemon.history.writer import HistoryWriter
from gpulock.daemon.idle.claim_ends import ClaimEnds
from gpulock.daemon.idle.policy import IdlePolicy
from gpulock.daemon.main_loop import GpulockDaemon
from gpulock.daemon.mps.keeper import MpsKeeper
from gpulock.daemon.reconcile.cdi import CdiSpecWriter
from gpulock.daemon.reconcile.inventory_file import InventoryPublisher
from gpulock.daemon.reconcile.reconcile import Chore
from gpulock.daemon.reconcile.temporaries import TemporaryRemover
from gpulock.daemon.slots.rsmap import RsmapSync
from gpulock.daemon.slots.slurm_map import SlurmMapRenewal
from gpulock.errors import BROKEN, Refusal
from gpulock.node.settings_file import DEFAULT_PATH, read_settings

PACKAGES = ("store", "node", "job", "alloc", "isolation", "workstation", "daemon")
DONE, REFUSED, NODE_BROKEN = 0, 1, 3


def make_daemon_chores(journal: DaemonJournal) -> list[Chore]:
    """Return what is done after each reconcile, in this order."""

    def say(text: str) -> None:
        journal.say(WARNING, text)

    return [
        HistoryWriter(say),  # first: a claim that is over waits for no other chore
        MpsKeeper(journal),  # before the rest: a job may wait for it
        InventoryPublisher(journal),
        HealthPolicy(journal),  # before others write STATE_DIR/cards: it tells of a bad one
        CardChecker(journal),
        CdiSpecWriter(journal),
        idle := IdlePolicy(say),
        ClaimEnds(journal, idle.tell_end),
        RsmapSync(journal),
        SlurmMapRenewal(journal),
        TemporaryRemover(),
    ]


def import_all_modules() -> None:
    """Import what a round may need: later an upgrade may have replaced it by another version's."""
    for package in PACKAGES:
        folders = [f"{folder}/{package}" for folder in gpulock.__path__]
        for module in pkgutil.walk_packages(folders, f"gpulock.{package}."):
            import_module(module.name)


def daemon_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        prog="gpulockd",
        description="Free what dead owners hold, publish verdicts, write the history.",
        allow_abbrev=False,
    )
    default = f"settings of the node  [default: {DEFAULT_PATH}]"
    parser.add_argument("--config", metavar="FILE", default=DEFAULT_PATH, help=default)
    parser.add_argument("--version", action="version", version=f"gpulockd {__version__}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Be this node's gpulockd until a signal comes; return the exit code."""
    path = daemon_parser().parse_args(argv).config
    faulthandler.enable(2)  # the watchdog's SIGABRT writes to the journal where it hung
    os.umask(0o022)  # everybody may read locks and records
    import_all_modules()
    gc.freeze()  # modules never end: no look for cycles passes through them
    journal = DaemonJournal(levels=is_journal_stream(os.environ))
    signals = DaemonSignals()
    signals.install()
    notify = notifier_from_environ(os.environ, os.getpid())
    try:
        settings = read_settings(path, keep=True)
        if os.geteuid() != 0 and not settings.simulation:
            raise Refusal(BROKEN, f"gpulockd runs as uid {os.geteuid()}", "it must be root's")
        journal.quiet = bool(settings.simulation)
        journal.log_changes("settings", {fault: fault for fault in settings.faults}, ERROR)
        GpulockDaemon(settings, journal, notify, signals, make_daemon_chores(journal)).run()
        signals.close()
    except Refusal as refusal:
        journal.say(ERROR, f"{refusal.why}; {refusal.do}")
        return REFUSED if isinstance(refusal, AlreadyRunningError) else NODE_BROKEN
    return DONE


if __name__ == "__main__":
    sys.exit(main())
