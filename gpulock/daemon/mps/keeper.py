# SPDX-License-Identifier: Apache-2.0
"""The chore of gpulockd that runs MPS on cards whose places are held: SHARE_MPS.

It is started when the first place of a card is held, watched, and stopped with the last one. Until
it has ended the card's folder stays, and the card is closed to everybody but the same user's
shares. gpulockd itself may end at any moment: the next one finds the folders, takes an MPS over
that runs, and stops any other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from typing import Final, TypeVar

from gpulock.alloc.reaper import FREED
from gpulock.daemon.core.background_call import BackgroundCall
from gpulock.daemon.core.journal import ERROR, NOTICE, DaemonJournal
from gpulock.daemon.mps.unit import (
    MANAGER_SECONDS,
    MpsUnit,
    list_card_folders,
    make_card_folder,
    remove_card_folder,
)
from gpulock.daemon.reconcile.reconcile import Chore, ReconcileReport
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import Refusal, one_line
from gpulock.job.mps import mps_folder, read_mps_user
from gpulock.node.context import Node
from gpulock.node.devices import SHARE, Device
from gpulock.store import atomic
from gpulock.store.gate import Gate
from gpulock.store.locks import MPS

POLL: Final = 0.05  # seconds between two looks at systemd's answer
WATCH: Final = 5.0  # seconds between two looks at a daemon that runs
SLOWLY: Final = 1.0  # seconds between two looks at what does not end
GATE_SECONDS: Final = 1.0

T = TypeVar("T")
Steps = Generator[float, None, T]  # each step yields for how many seconds there is nothing to do


def in_background(question: Callable[[], T]) -> Steps[T]:
    """Return what a thread finds out, at the latest at its own deadline; raise what it raises."""
    asked = BackgroundCall(question)
    while not asked.wait(0.0):
        yield POLL
    return asked.answer()


class CardMps:
    """The MPS of one card, from its start to its end; `due` is when it goes on (boottime).

    `wanted` are the tokens of the claims that it serves, `marks` has what each of them was told.
    `stuck` is why it does not end.
    """

    def __init__(self, node: Node, card: Device, uid: int, journal: DaemonJournal) -> None:
        self.node = node
        self.card, self.uid = card, uid
        self.folder = mps_folder(node.settings.mps_dir, card.bus)
        self.unit = MpsUnit(card.bus, card.uuid, uid, self.folder)
        self.control: tuple[int, int] | None = None  # pid and start of its daemon
        self.wanted: set[str] = set()
        self.stuck = ""
        self.due = 0.0
        self.life = self._live(journal)
        self.marks: dict[str, str] = {}  # marks by token

    def _live(self, journal: DaemonJournal) -> Steps[None]:
        """Start it, or take over what runs; watch it; end it."""
        what, adopted = f"MPS of {self.card.bus}", os.path.lexists(self.folder)
        fault = ""
        try:
            if not adopted:
                make_card_folder(self.folder, self.uid, self.node.boot_id)
                yield from in_background(self.unit.start)
            pid = yield from in_background(self.unit.find_daemon)
            try:
                self.control = pid, self.node.proc.start(pid)
            except (OSError, ValueError) as gone:
                raise OSError(f"its daemon died: {gone}") from None
            if not adopted:
                journal.say(NOTICE, f"{what} started for uid {self.uid}, pid {pid}")
            while self.wanted and self.runs():
                self.mark("{} {}".format(*self.control))
                yield WATCH
            if self.wanted:
                fault = "its daemon died"
        except OSError as failed:
            fault = one_line(str(failed))
        except Refusal as refusal:
            fault = f"{refusal.why}; {refusal.do}"
        if fault:
            journal.say(ERROR, f"no {what} for uid {self.uid}: {fault}")
            self.mark(f"! {fault}")
        yield from self._end()
        journal.say(NOTICE, f"{what} ended")

    def runs(self) -> bool:
        """Return whether its daemon runs."""
        try:
            return self.control is not None and self.node.proc.running(*self.control)
        except (OSError, ValueError):
            return False

    def mark(self, text: str) -> None:
        """Tell the jobs that wait how it is; what cannot be told now is told the next time."""
        new = [token for token in self.wanted if self.marks.get(token) != text]
        if not new:
            return
        store = self.node.store
        try:
            with Gate(store, Deadline(GATE_SECONDS)):
                for token in new:
                    if store.is_held(token):
                        path = f"{store.claims_dir}/{token}/{MPS}"
                        atomic.replace_file(path, f"{text}\n".encode())
                    self.marks[token] = text
        except (Refusal, OSError):
            return

    def _end(self) -> Steps[None]:
        """Stop it, then open the card once none of its processes is left there."""
        begun = clock_boottime()
        while True:
            try:
                left = yield from in_background(self.unit.stop)
                if not left:
                    remove_card_folder(self.folder)
                    self.stuck = ""
                    return
            except (Refusal, OSError) as fault:
                left = str(fault)
            self.stuck = left if clock_boottime() - begun > MANAGER_SECONDS else ""
            yield SLOWLY


class MpsKeeper(Chore):
    """One MPS for each card whose places one user holds: `cards`, by bus id."""

    def __init__(self, journal: DaemonJournal) -> None:
        self._journal = journal
        self.cards: dict[str, CardMps] = {}
        self._adopted = False

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """See which cards have places held, and start or end their MPS.

        One that failed is started anew by the next reconcile.
        """
        wanted = select_mps_shares(report, node)
        if node.settings.simulation or not (wanted or self.cards or not self._adopted):
            return  # a simulated card's unit may have the name of a real one's
        if not self._adopted:
            self._adopt(node)
            self._adopted = True
        shown = {device.id: device for device in report.devices}
        for bus in {*self.cards, *wanted}:
            uid, shares = wanted.get(bus, (-1, set[str]()))
            one = self.cards.get(bus)
            if one is None and bus in shown:
                one = self.cards[bus] = CardMps(node, shown[bus], uid, self._journal)
            if one is not None:
                one.node, one.due = node, 0.0
                one.wanted = shares if uid == one.uid else set()
        self.run_due(now)

    def run_due(self, now: float) -> None:
        """Go on with each card whose time has come."""
        for bus, one in list(self.cards.items()):
            if now >= one.due:
                try:
                    one.due = now + next(one.life)
                except StopIteration:
                    del self.cards[bus]
                    if one.wanted - one.marks.keys():  # they came while it ended
                        self.cards[bus] = again = CardMps(
                            one.node, one.card, one.uid, self._journal
                        )
                        again.wanted = one.wanted
        stuck = {
            bus: f"MPS of {bus}: the card stays closed: {one.stuck}"
            for bus, one in self.cards.items()
            if one.stuck
        }
        self._journal.log_changes("mps", stuck, ERROR)
        self.due = min([one.due for one in self.cards.values()], default=float("inf"))

    def _adopt(self, node: Node) -> None:
        """Take over what an earlier gpulockd of this boot ran, and end what is left of others.

        The folder is made first: containers bind it, also before there is an MPS.
        """
        if node.settings.share_mps:
            atomic.mkdir_if_missing(node.settings.mps_dir)
        cards = {mps_folder(node.settings.mps_dir, d.bus): d for d in node.devices_if_driver()}
        for folder in list_card_folders(node.settings.mps_dir):
            (uid, boot_id), card = read_mps_user(folder), cards.get(folder)
            if card is None or boot_id != node.boot_id:
                remove_card_folder(folder)  # of another boot, or of a card that is gone
            else:
                self.cards[card.bus] = CardMps(node, card, uid, self._journal)


def select_mps_shares(report: ReconcileReport, node: Node) -> dict[str, tuple[int, set[str]]]:
    """Return by card whose the held places are, and the tokens of their claims.

    A job that has ended needs none. With SHARE_MPS off only what runs already goes on, until its
    places are free: `served` by MPS is a place whose claim says so.
    """
    shares_by_card: dict[str, tuple[int, set[str]]] = {}
    for outcome in report.outcomes:
        lock = outcome.lock
        card, share, _ = lock.id.partition(SHARE)
        record = lock.owner
        if not share or outcome.act == FREED or record is None or record.draining:
            continue
        if record.places and (node.settings.share_mps or lock.mps):
            uid, shares = shares_by_card.setdefault(card, (record.uid, set()))
            if uid == record.uid:
                shares.add(record.token)
    return shares_by_card
