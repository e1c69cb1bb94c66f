# SPDX-License-Identifier: Apache-2.0
"""HEALTH_COMMAND tests each free card once in a boot, one at a time.

Warm, gpulockd alone. What the policy took out is tested before it comes back, and what
`gpulock test` names. The outcome is in STATE_DIR/cards, where the policy reads it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from gpulock.daemon.core.journal import ERROR, NOTICE, WARNING, DaemonJournal
from gpulock.daemon.health import recovery
from gpulock.daemon.health.cards import (
    COMMAND,
    CardState,
    NodeCards,
    read_cards,
    save_changed_cards,
)
from gpulock.daemon.health.health_command import CardTakenError, HealthCommand
from gpulock.daemon.health.snapshot import read_quarantine_notes
from gpulock.daemon.idle.command import check_program_trust
from gpulock.daemon.reconcile.reconcile import Chore, ReconcileReport
from gpulock.deadline import clock_boottime
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.devices import Device, lock_ids_overlap
from gpulock.workstation.waiting import read_waiting

POLL: Final = 0.1  # seconds between two looks at the command: a claim may wait for its end
PAUSE: Final = 30.0  # seconds until a card is tried again that somebody needed
AGAIN: Final = 600.0  # seconds until a card is tested again that failed, or told nothing


class CardChecker(Chore):
    """The chore; `clock` is CLOCK_BOOTTIME in seconds."""

    def __init__(self, journal: DaemonJournal, clock: Callable[[], float] = clock_boottime) -> None:
        self._journal = journal
        self._clock = clock
        self._again: dict[str, float] = {}  # by bus id, not to be tested before
        self._node: Node | None = None
        self.command: HealthCommand | None = None

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Start the command where it is due. Raises Refusal or OSError."""
        self._node = node
        self.run_due(now)
        if self.command is None and node.settings.health_command:
            self._start_next(node, report)
        self.due = float("inf") if self.command is None else now + POLL

    def run_due(self, now: float) -> None:
        """Look after the command that runs; raise OSError."""
        if self._node is not None and self.command is not None:
            with suppress(Refusal):  # the gate is held: it is looked at again
                self._poll_command(self._node, self.command, now)
        self.due = float("inf") if self.command is None else now + POLL

    def close(self) -> None:
        """End the command: the next gpulockd runs it again."""
        if self.command is not None:
            self.command.close()
        self.command = None

    def _poll_command(self, node: Node, command: HealthCommand, now: float) -> None:
        """Look after the command that runs; raise Refusal or OSError."""
        end, bus = command.poll(node, now), command.bus
        if end is None:
            return
        self.command = None
        self._again[bus] = self._clock() + (AGAIN if end.words else PAUSE)
        if end.passed is not None:  # where it cannot be noted, the card is tested again later
            self._note_outcome(node, command, "" if end.passed else f"HEALTH_COMMAND: {end.words}")
        elif end.words:
            self._journal.say(WARNING, f"{bus}: HEALTH_COMMAND told nothing: {end.words}")
        if end.passed:
            del self._again[bus]

    def _note_outcome(self, node: Node, command: HealthCommand, failure: str) -> None:
        cards = read_cards(node.settings.state_dir, node.boot_id)
        state = cards.of(command.bus)
        before = state.checks.get(COMMAND)
        state.note_command(failure, command.begun)
        save_changed_cards(node.store, node.settings.state_dir, cards)
        if before and not failure:
            self._journal.say(NOTICE, f"{command.bus} passed HEALTH_COMMAND")

    def _start_next(self, node: Node, report: ReconcileReport) -> None:
        """Test the card that has waited for longest, where nobody waits for a card."""
        words, now = node.settings.health_command, self._clock()
        cards = read_cards(node.settings.state_dir, node.boot_id)
        device = self._find_due_card(node, report, cards, now)
        waiting = read_waiting(node)
        if device is None or waiting:
            return
        fault = check_program_trust(words[0], os.geteuid())
        if not fault:
            try:
                self.command = HealthCommand(node, device, now)
            except (CardTakenError, Refusal):
                self._again[device.bus] = now + PAUSE
            except OSError as failed:
                fault = str(failed)
        said = f"HEALTH_COMMAND {words[0]} is not run: {fault}" if fault else ""
        self._journal.log_state("health command", said, ERROR)

    def _find_due_card(
        self, node: Node, report: ReconcileReport, cards: NodeCards, now: float
    ) -> Device | None:
        """Return the free card whose test is due, those that are out of service first."""
        held = [one.lock.id for one in report.outcomes]
        out = read_quarantine_notes(node)
        due: list[tuple[bool, float, Device]] = []
        for device in report.devices:
            bus, note = device.bus, out.get(device.bus, {})
            if device.parent or device.withheld or device.fault or now < self._again.get(bus, 0):
                continue
            if note and not recovery.is_policy_note(note):
                continue  # an administrator is at work there
            if any(lock_ids_overlap(name, bus) for name in held):
                continue
            state = cards.states.get(bus, CardState())
            if is_test_due(state, note, cards, now):
                due.append((not note, state.tested or 0.0, device))
        return min(due, key=lambda one: one[:2])[2] if due else None


def is_test_due(state: CardState, note: Mapping[str, str], cards: NodeCards, now: float) -> bool:
    """Return whether a card is to be tested: it was not in this boot, or since it was out.

    One that failed is tested again after a pause.
    """
    if state.tested is None:
        return True
    if note and state.tested <= recovery.test_since(note, cards):
        return True
    return bool(state.checks.get(COMMAND)) and now - state.tested >= AGAIN
