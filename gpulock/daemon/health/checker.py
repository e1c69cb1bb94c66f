# SPDX-License-Identifier: Apache-2.0
"""The checks of cards: after each reconcile by the sample, and by HEALTH_COMMAND.

Warm, gpulockd alone. What is found is in STATE_DIR/cards, for status, doctor and the exporter, and
in the log. A card that does not answer (XID 79, a call that hangs), or that degrades every job, is
suspect: claims take it last, with every setting. Such a card is still in /proc, so it looks free,
and each job that fails on it at once frees it for the next. HEALTH_COMMAND tests each free card
once in a boot, what the policy took out before it comes back, and what `gpulock test` names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import ClassVar, Final

from gpulock.daemon.core.journal import ERROR, NOTICE, WARNING, DaemonJournal
from gpulock.daemon.health import card_checks, policy, recovery
from gpulock.daemon.health.card_checks import CardHistory, CardLook, describe_serious
from gpulock.daemon.health.findings import quarantinable_ids, read_lost_cards
from gpulock.daemon.health.health_command import (
    CardTakenError,
    GaveWayError,
    HealthCommand,
    NoOutcomeError,
)
from gpulock.daemon.health.snapshot import HealthSnapshot
from gpulock.daemon.idle.command import check_program_trust
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.reconcile.schedule import LOCKS, QUARANTINE, SAMPLE, TIME, Chore, Due
from gpulock.deadline import clock_boottime
from gpulock.errors import Refusal, one_line
from gpulock.node import sample
from gpulock.node.context import Node
from gpulock.node.devices import Device, lock_ids_overlap
from gpulock.store.cards import (
    COMMAND,
    LONGEST_WORDS,
    TESTED,
    CardState,
    NodeCards,
    read_cards,
    save_changed_cards,
)
from gpulock.store.quarantine import read_suspect_cards
from gpulock.store.waiting import read_waiting

POLL: Final = 0.1  # seconds between two looks at the command: a claim may wait for its end
SUSPECT_PERIOD: Final = 3.0  # seconds between two looks for cards that do not answer
PAUSE: Final = 30.0  # seconds until a card is tried again that somebody needed
AGAIN: Final = 600.0  # seconds until a card is tested again that failed, or told nothing


class CardChecker(Chore):
    """The chore; `clock` is CLOCK_BOOTTIME in seconds."""

    after: ClassVar[Due] = dict.fromkeys((SAMPLE, LOCKS, QUARANTINE, TIME), ())

    def __init__(self, journal: DaemonJournal, clock: Callable[[], float] = clock_boottime) -> None:
        self._journal = journal
        self._clock = clock
        self._had: dict[str, CardHistory] = {}
        self._again: dict[str, float] = {}  # by bus id, not to be tested before
        self._seen: tuple[Node, ReconcileReport] | None = None
        self._serious: dict[str, str] = {}  # why a card degrades each job
        self._suspects_due = 0.0
        self.command: HealthCommand | None = None
        self._stuck: list[HealthCommand] = []  # told, and not to be ended: their cards stay locked

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Look at every card, and start the command where it is due. Raises Refusal or OSError."""
        self._seen = node, report
        if self.command is not None:
            self._poll_command(node, self.command, now)
        self._stuck = [one for one in self._stuck if not one.is_over(node)]
        cards = read_cards(node.settings.state_dir, node.boot_id)
        self._judge(HealthSnapshot(node, report, self._clock(), cards), report)
        save_changed_cards(node.store, node.settings.state_dir, cards)
        self._name_suspects(node, report)
        if self.command is None and node.settings.health_command:
            self._start_next(node, report, cards)
        self._set_due(now)

    def run_due(self, now: float) -> None:
        """Look after the command that runs, and for cards that do not answer."""
        if self._seen is None:
            return
        node, report = self._seen
        try:
            if self.command is not None:
                self._poll_command(node, self.command, now)
            if now >= self._suspects_due:
                self._name_suspects(node, report)
        except Refusal:
            pass  # the gate is held: it is looked at again
        self._set_due(now)

    def _set_due(self, now: float) -> None:
        if now >= self._suspects_due:
            self._suspects_due = now + SUSPECT_PERIOD
        self.due = self._suspects_due if self.command is None else now + POLL

    def close(self) -> None:
        """End the command: the next gpulockd runs it again."""
        for one in [*self._stuck, *([self.command] if self.command else [])]:
            one.close()
        self._stuck, self.command = [], None

    # --- by the sample ------------------------------------------------------------------------

    def _judge(self, look: HealthSnapshot, report: ReconcileReport) -> None:
        """Judge every card of which a fresh sample tells, and keep what was found."""
        cards, commanded = look.cards, bool(look.node.settings.health_command)
        held = [one.lock.id for one in report.outcomes]
        for name, seen in look.fresh.items():
            state = cards.of(name)
            had = self._had.setdefault(name, CardHistory(state.most))
            had.follow(seen, look.now)
            free = seen.processes == 0 and not any(lock_ids_overlap(one, name) for one in held)
            others = [one for other, one in look.fresh.items() if other != name]
            found = card_checks.judge_card(CardLook(seen, free, others), had)
            kept = {key: why for key, why in state.found.items() if key == COMMAND and commanded}
            state.found = {**had.leave_out_passing(found, look.now), **kept}
            state.most = had.most
        here = quarantinable_ids(report.devices)
        states = {name: state for name, state in sorted(cards.states.items()) if name in here}
        self._serious = {name: describe_serious(state.found) for name, state in states.items()}
        self._journal.log_changes(
            "checks",
            {
                f"{name} {check}": f"{name}: {why}"
                for name, state in states.items()
                for check, why in state.failed().items()
            },
        )

    def _name_suspects(self, node: Node, report: ReconcileReport) -> None:
        """Name the cards that claims take last; without the exporter's word the last one stands."""
        settings = node.settings
        told = sample.read_sample(
            settings.exporter_dir, self._clock(), node.boot_id, settings.max_sample_age
        )
        if told is None:
            return
        lost = {
            bus: why
            for bus, why in read_lost_cards(told, report.devices).items()
            if os.path.lexists(f"{settings.driver_root}/gpus/{bus}")
        }
        found = {
            name: one_line(why)[:LONGEST_WORDS]
            for name, why in {**self._serious, **lost}.items()
            if why
        }
        if found != read_suspect_cards(settings.state_dir, node.boot_id):
            cards = read_cards(settings.state_dir, node.boot_id)
            for name in {*cards.states, *found}:
                cards.of(name).suspect = found.get(name, "")
            save_changed_cards(node.store, node.settings.state_dir, cards)
        lasting = {
            bus: f"{bus} does not answer: {why[:LONGEST_WORDS]}; claims take it last"
            for bus, why in lost.items()
        }
        self._journal.log_changes("suspects", lasting)

    # --- by HEALTH_COMMAND --------------------------------------------------------------------

    def _poll_command(self, node: Node, command: HealthCommand, now: float) -> None:
        """Look after the command that runs; raise Refusal or OSError."""
        bus = command.bus
        try:
            fault = command.poll(node, now)
        except GaveWayError:
            self._end_command(bus, PAUSE)
            note_test(node, bus, None)
        except NoOutcomeError as end:
            self._end_command(bus, AGAIN)
            self._journal.say(WARNING, f"{bus}: HEALTH_COMMAND told nothing: {end}")
        else:
            if fault is not None:
                if command.is_stuck:
                    self._stuck.append(command)
                self._end_command(bus, AGAIN if fault else 0.0)
                self._note_outcome(node, bus, f"HEALTH_COMMAND: {fault}" if fault else "")

    def _end_command(self, bus: str, pause: float) -> None:
        self.command = None
        self._again[bus] = self._clock() + pause

    def _note_outcome(self, node: Node, bus: str, found: str) -> None:
        cards = read_cards(node.settings.state_dir, node.boot_id)
        state = cards.of(bus)
        before, state.found[COMMAND] = state.found.get(COMMAND), found
        if found != before or bus in policy.read_quarantine_notes(node):
            cards.add_step(bus, TESTED, found or "HEALTH_COMMAND passed")
        save_changed_cards(node.store, node.settings.state_dir, cards)
        if before and not found:
            self._journal.say(NOTICE, f"{bus} passed HEALTH_COMMAND")

    def _start_next(self, node: Node, report: ReconcileReport, cards: NodeCards) -> None:
        """Test the card that has waited for longest, where nobody waits for a card."""
        words, now = node.settings.health_command, self._clock()
        device = self._find_due_card(node, report, cards, now)
        waiting = read_waiting(node.store.path, node.boot_id, node.proc.running)
        if device is None or waiting:
            return
        fault = check_program_trust(words[0])
        if not fault:
            note_test(node, device.bus, now)  # before: one that ends gpulockd is not run at once
            try:
                self.command = HealthCommand(node, device, now)
            except (CardTakenError, Refusal):
                self._again[device.bus] = now + PAUSE
                note_test(node, device.bus, None)
            except OSError as failed:
                fault = str(failed)
        said = {words[0]: f"HEALTH_COMMAND {words[0]} is not run: {fault}"} if fault else {}
        self._journal.log_changes("health command", said, ERROR)

    def _find_due_card(
        self, node: Node, report: ReconcileReport, cards: NodeCards, now: float
    ) -> Device | None:
        """Return the free card whose test is due, those that are out of service first."""
        held = [one.lock.id for one in report.outcomes]
        out = policy.read_quarantine_notes(node)
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
            if is_test_due(state, note, node.boot_id, now):
                due.append((not note, state.tested or 0.0, device))
        return min(due, key=lambda one: one[:2])[2] if due else None


def is_test_due(state: CardState, note: Mapping[str, str], boot_id: str, now: float) -> bool:
    """Return whether a card is to be tested: it was not in this boot, or since it was put out.

    One that failed, or told nothing, is tested again after a pause.
    """
    if state.tested is None:
        return True
    if note and state.tested <= max(recovery.out_since(note, boot_id), state.reset):
        return True
    return state.found.get(COMMAND) != "" and now - state.tested >= AGAIN


def note_test(node: Node, bus: str, begun: float | None) -> None:
    """Note when the test of a card began, None where it gave way; raise Refusal or OSError.

    A card that passed before has not, until this test is over.
    """
    cards = read_cards(node.settings.state_dir, node.boot_id)
    state = cards.of(bus)
    state.tested = begun
    if not state.found.get(COMMAND):
        state.found.pop(COMMAND, None)
    save_changed_cards(node.store, node.settings.state_dir, cards)
