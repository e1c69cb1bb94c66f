# SPDX-License-Identifier: Apache-2.0
"""The chore of gpulockd that runs MPS on cards whose places are held: SHARE_MPS.

It is started when the first place of a card is held, watched, and stopped with the last one. Until
it has ended the card's folder stays, and the card is closed to everybody but the same user's
shares. gpulockd itself may end at any moment: the next one finds the folders, takes an MPS over
that runs, and stops any other.
"""

from __future__ import annotations

from typing import Final

from gpulock.alloc.reaper import FREED
from gpulock.daemon.core.journal import ERROR, NOTICE, DaemonJournal
from gpulock.daemon.mps.folder import (
    MpsError,
    list_card_folders,
    make_card_folder,
    remove_card_folder,
)
from gpulock.daemon.mps.unit import (
    MANAGER_SECONDS,
    NOBODY_THERE,
    MpsPrograms,
    MpsSite,
    Steps,
    find_daemon,
    start_unit,
    stop_unit,
)
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.reconcile.schedule import Chore
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import Refusal, one_line
from gpulock.job.mps import mps_folder, read_mps_user
from gpulock.node.context import Node
from gpulock.node.devices import SHARE
from gpulock.store import atomic
from gpulock.store.gate import Gate

WATCH: Final = 5.0  # seconds between two looks at a daemon that runs
AGAIN: Final = 10.0  # seconds until a start that failed is tried again
SLOWLY: Final = 1.0  # seconds between two looks at what does not end
GATE_SECONDS: Final = 1.0
FOREVER: Final = float("inf")


class CardMps:
    """The MPS of one card, from its start to its end; `due` is when it goes on (boottime).

    `wanted` are the shares that it serves, by lock id with their tokens. `fault` is why it does
    not run, `over` whether nothing is left of it.
    """

    def __init__(self, site: MpsSite, journal: DaemonJournal, adopted: bool = False) -> None:
        self.site = site
        self.wanted: dict[str, str] = {}
        self.fault = ""
        self.over = False
        self.due = 0.0
        self._told: dict[str, str] = {}  # marks by token
        self._journal = journal
        self._life = self._live(adopted)

    def advance(self, now: float) -> None:
        """Go on as far as that is possible without waiting."""
        try:
            self.due = now + next(self._life)
        except StopIteration:
            self.over, self.due = True, 0.0

    def _live(self, adopted: bool) -> Steps:
        """Start it, watch it, end it."""
        site, what = self.site, f"MPS of {self.site.card.bus}"
        try:
            if not adopted:
                make_card_folder(site.folder, site.uid, site.node.boot_id)
                yield from start_unit(site)
            yield from find_daemon(site)
            if not adopted:
                pid = site.control[0]
                self._journal.say(NOTICE, f"{what} started for uid {site.uid}, pid {pid}")
            while self.wanted and site.runs():
                self.mark(site.mark)
                yield WATCH
            if self.wanted:
                self.fault = "its daemon died"
        except (MpsError, OSError) as fault:
            self.fault = one_line(str(fault))
        except Refusal as refusal:
            self.fault = f"{refusal.why}; {refusal.do}"
        if self.fault:
            self.mark(f"! {self.fault}")
        yield from self._end()
        self._journal.say(NOTICE, f"{what} ended")

    def mark(self, text: str) -> None:
        """Tell the jobs that wait; what cannot be told now is told the next time."""
        new = {name: token for name, token in self.wanted.items() if self._told.get(token) != text}
        if not new:
            return
        store = self.site.node.store
        try:
            with Gate(store, Deadline(GATE_SECONDS)):
                for name, token in new.items():
                    if store.is_held(token, name):
                        atomic.replace_file(f"{store.locks_dir}/{name}/mps", f"{text}\n".encode())
                    self._told[token] = text
        except (Refusal, OSError):
            return

    def _end(self) -> Steps:
        """Stop it, then open the card once none of its processes is left there."""
        site, begun = self.site, clock_boottime()
        while True:
            try:
                held = yield from stop_unit(site)
                if not held:
                    remove_card_folder(site.folder)
                    return self._journal.log_changes(f"mps {site.card.bus}", {})
            except (MpsError, Refusal, OSError) as fault:
                held = str(fault)
            if clock_boottime() - begun > MANAGER_SECONDS:
                text = f"MPS of {site.card.bus}: the card stays closed: {held}"
                self._journal.log_changes(f"mps {site.card.bus}", {held: text}, ERROR)
            yield SLOWLY


class MpsKeeper(Chore):
    """One MPS for each card whose places one user holds: `cards`, by bus id.

    `failed` has, by card and user, when it may be tried again, and why it failed.
    """

    def __init__(self, journal: DaemonJournal, programs: MpsPrograms | None = None) -> None:
        self._journal = journal
        self._programs = programs or MpsPrograms()
        self.cards: dict[str, CardMps] = {}
        self.failed: dict[tuple[str, int], tuple[float, str]] = {}
        self._adopted = False

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """See which cards have places held, and start or end their MPS."""
        wanted = select_mps_shares(report, node)
        if node.settings.simulation or not (wanted or self.cards or not self._adopted):
            return  # a simulated card's unit may have the name of a real one's
        if not self._adopted:
            self._adopt(node)
            self._adopted = True
        for bus, one in self.cards.items():
            uid, shares = wanted.pop(bus, (-1, {}))
            one.site.node = node
            one.wanted = shares if uid == one.site.uid else {}
            one.due = 0.0
        for bus, (uid, shares) in wanted.items():
            self._start(node, bus, uid, shares, now)
        self.run_due(now)

    def run_due(self, now: float) -> None:
        """Go on with each card whose time has come."""
        for bus, one in list(self.cards.items()):
            if now >= one.due:
                one.advance(now)
            if one.over:
                del self.cards[bus]
                self.failed.pop((bus, one.site.uid), None)
                if one.fault:
                    self.failed[bus, one.site.uid] = now + AGAIN, one.fault
                if one.wanted:  # a share that came while it ended
                    self._start(one.site.node, bus, one.site.uid, one.wanted, now)
            elif one.site.control != NOBODY_THERE:
                self.failed.pop((bus, one.site.uid), None)
        self.failed = {key: one for key, one in self.failed.items() if now < one[0]}
        faults = {
            f"{bus} {uid}": f"no MPS on {bus} for uid {uid}: {why}"
            for (bus, uid), (_, why) in self.failed.items()
        }
        self._journal.log_changes("mps", faults, ERROR)
        self.due = min([one.due for one in self.cards.values()], default=FOREVER)

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
                continue
            site = MpsSite(node, card, uid, self._programs)
            self.cards[card.bus] = CardMps(site, self._journal, adopted=True)

    def _start(self, node: Node, bus: str, uid: int, shares: dict[str, str], now: float) -> None:
        """Start MPS on a card; one that failed a moment ago fails again at once."""
        card = next((d for d in node.devices_if_driver() if d.id == bus), None)
        if card is None:
            return
        one = CardMps(MpsSite(node, card, uid, self._programs), self._journal)
        one.wanted = shares
        until, why = self.failed.get((bus, uid), (0.0, ""))
        if now < until:
            one.fault = why
            one.mark(f"! {why}")
            return
        self.cards[bus] = one
        one.advance(now)


def select_mps_shares(report: ReconcileReport, node: Node) -> dict[str, tuple[int, dict[str, str]]]:
    """Return by card whose the held places are, and their lock ids with tokens.

    A job that has ended needs none. With SHARE_MPS off only what runs already goes on, until its
    places are free: `served` by MPS is a place whose lock says so.
    """
    found: dict[str, tuple[int, dict[str, str]]] = {}
    for outcome in report.outcomes:
        lock = outcome.lock
        card, share, _ = lock.id.partition(SHARE)
        record = lock.owner
        if not share or outcome.act == FREED or record is None or record.draining:
            continue
        if record.places and (node.settings.share_mps or lock.mps):
            uid, shares = found.setdefault(card, (record.uid, {}))
            if uid == record.uid:
                shares[lock.id] = record.token
    return found
