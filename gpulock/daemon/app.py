# SPDX-License-Identifier: Apache-2.0
"""gpulockd: reconcile this node again and again, for when the hooks did not run.

Warm. The hooks need no daemon; it needs neither slurmctld nor qmaster. Exit codes: 0 ended by a
signal; 1 another one runs; 2 usage; 3 the settings cannot be believed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from gpulock import __version__
from gpulock.daemon.core.journal import ERROR, WARNING, Journal
from gpulock.daemon.core.notify import from_environ, in_journal
from gpulock.daemon.core.signals import EndedError, Signals
from gpulock.daemon.health.policy import Health
from gpulock.daemon.history.collect import History
from gpulock.daemon.idle.policy import Idle
from gpulock.daemon.main_loop import Daemon
from gpulock.daemon.reconcile.cdi import CdiSpec
from gpulock.daemon.reconcile.inventory_file import Publisher
from gpulock.daemon.reconcile.refusal_context import Refusals
from gpulock.daemon.rounds import Chore, RunsAlreadyError
from gpulock.daemon.slots.drift import Drift
from gpulock.daemon.slots.sge import SgeCount
from gpulock.daemon.slots.slurm import SlurmCount
from gpulock.errors import BROKEN, Refusal
from gpulock.node.settings import DEFAULT_PATH, load

DONE, REFUSED, USAGE, NODE_BROKEN = 0, 1, 2, 3
HELP = """usage: gpulockd [--config FILE]

Free what dead owners hold, publish the verdicts, write the history: see docs/gpulockd.md.

  --config FILE  settings of the node  [default: /etc/gpulock/gpulock.conf]
  --version      show the version
"""


def chores(journal: Journal) -> list[Chore]:
    """Return what is done after each reconcile, in this order."""

    def say(text: str) -> None:
        journal.say(WARNING, text)

    return [
        Publisher(journal),
        Health(journal),
        CdiSpec(journal),
        History(say),
        Idle(say),
        Drift(journal),
        Refusals(journal),
        SgeCount(journal),
        SlurmCount(journal),
    ]


def config_of(argv: Sequence[str]) -> str:
    """Return the settings file that the arguments name; raise ValueError."""
    words = list(argv)
    path = DEFAULT_PATH
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name != "--config" or not (equals or words):
            raise ValueError(f"not understood: {word}")
        path = value if equals else words.pop(0)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Be this node's gpulockd until a signal comes; return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if "--version" in arguments or "-h" in arguments or "--help" in arguments:
        text = f"gpulockd {__version__}\n" if "--version" in arguments else HELP
        sys.stdout.write(text)
        return DONE
    try:
        path = config_of(arguments)
    except ValueError as fault:
        sys.stderr.write(f"gpulockd: {fault}\n{HELP}")
        return USAGE
    os.umask(0o022)  # everybody may read locks and records
    journal = Journal(levels=in_journal(os.environ))
    signals = Signals()
    signals.install()
    notify = from_environ(os.environ, os.getpid())
    try:
        settings = load(path)
        if os.geteuid() != 0 and not settings.simulation:
            raise Refusal(BROKEN, f"gpulockd runs as uid {os.geteuid()}", "it must be root's")
        journal.quiet = bool(settings.simulation)
        Daemon(settings, journal, notify, signals, chores(journal)).run()
    except RunsAlreadyError as other:
        journal.say(ERROR, f"{other.why}; {other.do}")
        return REFUSED
    except Refusal as refusal:
        journal.say(ERROR, f"{refusal.why}; {refusal.do}")
        return NODE_BROKEN
    except EndedError:
        return DONE
    return DONE


if __name__ == "__main__":
    sys.exit(main())
