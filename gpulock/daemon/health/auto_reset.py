# SPDX-License-Identifier: Apache-2.0
"""QUARANTINE_RESET: gpulockd resets what the policy took out, when nobody has it; told, bounded.

A reset runs in a thread of its own, and hooks see only the locks of the GPU and its link peers. A
GPU is tried three times in a boot, with pauses: one that fails again after each reset needs hands.
The tries are in STATE_DIR/cards, so a gpulockd that is started again goes on counting.
Cut resets of whatever process are freed here, also where the setting is off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from gpulock.alloc.reaper import FREED
from gpulock.daemon.core.background_call import BackgroundCall
from gpulock.daemon.core.journal import ERROR, INFO, NOTICE, DaemonJournal
from gpulock.daemon.health import recovery, reset
from gpulock.daemon.health.cards import NodeCards, read_cards, save_cards
from gpulock.daemon.health.findings import ECC, LOST, XID
from gpulock.daemon.health.snapshot import read_quarantine_notes
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.reconcile.schedule import Chore
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.devices import card_bus_id
from gpulock.store.gate import Gate
from gpulock.store.quarantine import POLICY

MOST_TRIES: Final = 3  # of a card in a boot
TRY_PAUSE: Final = 3600.0  # seconds between two tries of a card
POLL: Final = 1.0  # seconds
LATE: Final = 2 * (reset.RESET_SECONDS + reset.PAUSE_SECONDS)  # then it is told that it hangs
REPAIRED_BY_RESET: Final = frozenset((XID, ECC, LOST))


class CardResetter(Chore):
    """The chore; `clock` is CLOCK_BOOTTIME in seconds."""

    def __init__(self, journal: DaemonJournal, clock: Callable[[], float] = clock_boottime) -> None:
        self._journal = journal
        self._clock = clock
        self._running: BackgroundCall[str] | None = None
        self._card = ""  # that is reset
        self._tries: tuple[float, ...] = ()  # when that was done in this boot

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Begin a reset where one is due; raise Refusal or OSError."""
        if self._running is not None:
            return
        left = [one.lock for one in report.outcomes if one.act != FREED]
        for name in reset.free_cut_resets(node, left):
            self._journal.say(NOTICE, f"{name} is free: the process of its reset is gone")
        if not node.settings.quarantine_reset or not report.devices:
            return
        shown = {device.bus for device in report.devices if not device.fault}
        waits: dict[str, str] = {}
        known = read_cards(node.settings.state_dir, node.boot_id)
        for card in find_cards_to_reset(node, known):
            tries, at = known.of(card).tries, self._clock()
            early = len(tries) >= MOST_TRIES or at - max(tries, default=-TRY_PAUSE) < TRY_PAUSE
            if card not in shown or early:
                continue
            try:
                cards = reset.reserve_for_reset(node, card, POLICY)
            except Refusal as refusal:
                waits[card] = f"{card} is not reset yet: {refusal.why}"
                continue
            self._begin(Node(node.settings, node.name), cards)
            break
        self._journal.log_changes("reset", waits, INFO)

    def _begin(self, node: Node, cards: list[str]) -> None:
        """Reset the first of these cards, which are reserved; raise OSError.

        No reset is begun whose try cannot be noted: the next round frees the cards.
        """
        self._card, self._tries = cards[0], note_reset_try(node, cards[0], self._clock())
        self._running = BackgroundCall(lambda: reset.reset_reserved(node, cards, POLICY))
        self.due = clock_boottime() + POLL

    def run_due(self, now: float) -> None:
        """See whether the reset is over; raise Refusal or OSError where its cards stay locked."""
        self.due = float("inf")
        if self._running is None:
            return
        card, count = self._card, len(self._tries)
        if not self._running.wait(0.0):
            self.due = now + POLL
            late = self._clock() - self._tries[-1] > LATE
            what = f"the reset of {card} does not end: it and its link peers stay reserved"
            self._journal.log_state("reset at work", what if late else "", ERROR)
            return
        running, self._running = self._running, None
        failed = running.answer()
        what = f"was not reset: {failed}" if failed else "was reset"
        last = "; it is not tried again in this boot" if count >= MOST_TRIES else ""
        level = ERROR if failed else NOTICE
        self._journal.say(level, f"{card} {what} ({count} of {MOST_TRIES}){last}")


def note_reset_try(node: Node, card: str, now: float) -> tuple[float, ...]:
    """Note that gpulockd resets a card now; return when it did so in this boot.

    Raises Refusal or OSError.
    """
    with Gate(node.store, Deadline(reset.GATE_SECONDS)):
        cards = read_cards(node.settings.state_dir, node.boot_id)
        state = cards.of(card)
        state.tries = (*state.tries, now)
        save_cards(node.settings.state_dir, cards)
    return state.tries


def find_cards_to_reset(node: Node, known: NodeCards) -> list[str]:
    """Return the cards that the policy took out and that were not started again since."""
    found = {
        card_bus_id(name)
        for name, note in read_quarantine_notes(node).items()
        if wants_reset(note) and not recovery.was_card_restarted(note, known, card_bus_id(name))
    }
    return sorted(found)


def wants_reset(note: Mapping[str, str]) -> bool:
    """Return whether a reset may repair what a note names."""
    if not recovery.is_policy_note(note) or recovery.ADMIN_RESTORE_ONLY in note["reason"]:
        return False
    return bool(REPAIRED_BY_RESET & set(recovery.parse_note_causes(note)))
