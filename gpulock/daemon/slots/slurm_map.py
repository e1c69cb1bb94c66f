# SPDX-License-Identifier: Apache-2.0
"""Have the map of Slurm's positions compared again when gres.conf or the cards changed.

A program of its own compares, because it starts `slurmd -G`. gres.conf may be on a file server
that does not answer, so its version is read in a thread.
"""

from __future__ import annotations

import os
from typing import Final

from gpulock.daemon.core.background_call import BackgroundCall
from gpulock.daemon.core.journal import NOTICE, DaemonJournal
from gpulock.daemon.core.own_program import module_command
from gpulock.daemon.reconcile.reconcile import Chore, ReconcileReport
from gpulock.deadline import Deadline
from gpulock.errors import UNKNOWN, Refusal, one_line
from gpulock.hooks.subprocess import SchedulerProgram
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.slurm import gres_map

EVERY: Final = 2.0  # seconds between two readings of gres.conf's version
AGAIN: Final = 30.0  # seconds until a comparison that failed is tried again
SECONDS: Final = 90.0  # slurmd -G waits 19 s for a device file that is missing
PROGRAM: Final = "gpulock.install.slurm.renew_map"
ENVIRON: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
LENGTH: Final = 400  # characters of an answer
HINT: Final = "run gpulock install slurm on this node"


Seen = tuple[object, ...]  # of slurm.conf and the cards


class SlurmMapRenewal(Chore):
    """The chore."""

    def __init__(self, journal: DaemonJournal) -> None:
        self._journal = journal
        self.asking: BackgroundCall[tuple[Seen, str]] | None = None
        self._settings: Settings | None = None
        self._cards: frozenset[str] = frozenset()
        self._compared: Seen = ()
        self._next = 0.0

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Note the cards, and look at gres.conf from now on."""
        self._settings = node.settings
        if report.devices:
            self._cards = frozenset(map(gres_map.gres_map_device_name, report.devices))
        self.run_due(now)

    def run_due(self, now: float) -> None:
        """Take the answer of the last comparison where it is there, and begin the next."""
        settings = self._settings
        if settings is None:
            return
        self.due = now + EVERY
        if not os.path.exists(f"{settings.state_dir}/{gres_map.MAP_NAME}"):
            return  # `gpulock install slurm` makes it, and gres.conf may change right after that
        if self.asking is not None:
            if not self.asking.wait(0.0):
                return
            asked, self.asking, fault = self.asking, None, ""
            self._next = now + AGAIN  # also where the answer is an exception nobody foresaw
            try:
                self._compared, written = asked.answer()
                self._next = now
                if written:
                    self._journal.say(NOTICE, f"{gres_map.MAP_NAME}: {written}")
            except (Refusal, OSError) as why:  # no descriptor or no process for the program
                refused = f"{why.why}; {why.do}" if isinstance(why, Refusal) else str(why)
                fault = f"{gres_map.MAP_NAME} is not renewed: {refused}"
            self._journal.log_state("slurm map", fault)
        if now >= self._next and self._cards:
            cards, compared = self._cards, self._compared
            self.asking = BackgroundCall(lambda: compare_map(settings, cards, compared))


def compare_map(settings: Settings, cards: frozenset[str], compared: Seen) -> tuple[Seen, str]:
    """Have the map compared where something changed since; return what was seen, and written.

    Raises Refusal or OSError.
    """
    pairs = gres_map.read_map_pairs(settings.state_dir)
    path = pairs.get(gres_map.GRES_CONF, "")
    beside = f"{os.path.dirname(path)}/slurm.conf"
    conf = gres_map.gres_conf_version(beside)  # its Gres= sorts slurmd's list
    seen = (conf, cards)
    known = compared or (conf, frozenset(gres_map.map_positions(pairs).values()))
    if seen == known and not gres_map.is_gres_conf_changed(pairs):
        return seen, ""
    return seen, renew_map(settings, seen != known)


def renew_map(settings: Settings, ask: bool) -> str:
    """Start the program; return what it wrote; raise Refusal where it could not."""
    python, *words = module_command(PROGRAM)
    program = SchedulerProgram(python, ENVIRON, HINT)
    words += [*(["--ask"] if ask else []), settings.path]
    code, output = program.answer(words, Deadline(SECONDS))  # whose failures are sentences of ours
    said = one_line(output.decode("utf-8", "replace").strip())[:LENGTH]
    if code:
        raise Refusal(UNKNOWN, said, HINT)
    return said
