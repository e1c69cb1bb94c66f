# SPDX-License-Identifier: Apache-2.0
"""The check of cards: after each reconcile by the sample, and by HEALTH_COMMAND in its time.

Warm, gpulockd alone. What is found is in LOCK_DIR/checks, for status, doctor and the exporter, and
in the log. A card that degrades every job is named in LOCK_DIR/suspects besides: claims take it
last. It goes out of service where QUARANTINE_ON has the word `health`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final

from gpulock.daemon.core.journal import ERROR, NOTICE, DaemonJournal
from gpulock.daemon.health import card_checks, policy, recovery
from gpulock.daemon.health.card_checks import CardHistory, CardLook
from gpulock.daemon.health.health_command import (
    CardTakenError,
    GaveWayError,
    HealthCommand,
    NoOutcomeError,
)
from gpulock.daemon.health.steps import TESTED, note_health_step
from gpulock.daemon.idle.command import check_program_trust
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.reconcile.schedule import LOCKS, QUARANTINE, SAMPLE, TIME, Chore, Due
from gpulock.deadline import clock_boottime
from gpulock.errors import Refusal
from gpulock.node import sample
from gpulock.node.context import Node
from gpulock.node.devices import Device, lock_ids_overlap
from gpulock.store.checks import (
    COMMAND,
    MOST_SILENT,
    CardChecks,
    read_card_checks,
    write_card_checks,
)
from gpulock.store.waiting import read_waiting

POLL: Final = 0.1  # seconds between two looks at the command: a claim may wait for its end
PAUSE: Final = 30.0  # seconds until a card is tried again that somebody needed
AGAIN: Final = 600.0  # seconds until a card is tested again that has failed
MOST_DOUBLED: Final = 16  # times that a pause is: 600 s are a year and more then


class CardChecker(Chore):
    """The chore; `clock` is CLOCK_BOOTTIME in seconds."""

    after: ClassVar[Due] = dict.fromkeys((SAMPLE, LOCKS, QUARANTINE, TIME), ())

    def __init__(self, journal: DaemonJournal, clock: Callable[[], float] = clock_boottime) -> None:
        self._journal = journal
        self._clock = clock
        self._had: dict[str, CardHistory] = {}
        self._again: dict[str, float] = {}  # by bus id, not to be tested before
        self._node: Node | None = None
        self.command: HealthCommand | None = None
        self._stuck: list[HealthCommand] = []  # told, and not to be ended: their cards stay locked

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Look at every card, and start the command where it is due. Raises OSError."""
        self._node = node
        self.run_due(now)
        self._stuck = [one for one in self._stuck if not one.is_over(node)]
        cards, _ = read_card_checks(node.store.path, node.boot_id)
        if self.command is None:
            for bus, card in cards.items():
                if card.begun is not None:
                    note_test(node, bus, end="gpulockd was killed meanwhile", at=card.begun)
            cards, _ = read_card_checks(node.store.path, node.boot_id)
        self._look(node, report, cards)
        if self.command is None and node.settings.health_command:
            self._start_next(node, report, cards)

    def run_due(self, now: float) -> None:
        """Look after the command that runs."""
        self.due = float("inf")
        if self.command is None or self._node is None:
            return
        self.due = now + POLL
        bus = self.command.bus
        try:
            fault = self.command.poll(self._node, now)
        except GaveWayError:
            self._end_command(bus, PAUSE)
            note_test(self._node, bus)
            return
        except NoOutcomeError as end:
            self._end_command(bus, 0.0)
            note_test(self._node, bus, end=str(end), at=self._clock())
            return
        except Refusal:
            return  # the gate is held: it is looked at again
        if fault is not None:
            if self.command.is_stuck:
                self._stuck.append(self.command)
            self._end_command(bus, AGAIN if fault else 0.0)
            self._note_outcome(self._node, bus, fault)

    def close(self) -> None:
        """End the command: the next gpulockd runs it again."""
        if self.command is not None:
            self.command.close()
            if self._node is not None:
                try:
                    note_test(self._node, self.command.bus)
                except OSError:
                    pass  # it counts as one that told nothing
            self.command = None
        for one in self._stuck:
            one.close()
        self._stuck = []

    def _end_command(self, bus: str, pause: float) -> None:
        self.command, self.due = None, float("inf")
        self._again[bus] = self._clock() + pause

    def _note_outcome(self, node: Node, bus: str, fault: str) -> None:
        cards, looked = read_card_checks(node.store.path, node.boot_id)
        card = cards.setdefault(bus, CardChecks())
        before, card.tested = card.found.get(COMMAND), self._clock()
        card.begun, card.unproven = None, (0, 0.0, "")
        card.found[COMMAND] = found = f"HEALTH_COMMAND: {fault}" if fault else ""
        write_card_checks(node.store.path, cards, node.boot_id, looked)
        if found != before or (not fault and bus in policy.read_quarantine_notes(node)):
            said = found or "HEALTH_COMMAND passed"
            note_health_step(node.settings.state_dir, bus, TESTED, said)
        if before and not fault:
            self._journal.say(NOTICE, f"{bus} passed HEALTH_COMMAND")

    def _look(self, node: Node, report: ReconcileReport, known: dict[str, CardChecks]) -> None:
        """Judge every card of which a fresh sample tells, and write what was found."""
        settings, now = node.settings, self._clock()
        oldest = settings.max_sample_age
        told = sample.read_sample(settings.exporter_dir, now, node.boot_id, oldest)
        here = {device.bus for device in report.devices if not device.fault}
        cards = {bus: card for bus, card in known.items() if bus in here}
        fresh = {
            bus: seen
            for bus, seen in (told.devices.items() if told else ())
            if bus in here and seen.looked is not None and now - seen.looked <= oldest
        }
        held = [one.lock.id for one in report.outcomes]
        for bus, seen in fresh.items():
            card = cards.setdefault(bus, CardChecks())
            had = self._had.setdefault(bus, CardHistory(card.most))
            had.follow(seen, now)
            free = seen.processes == 0 and not any(lock_ids_overlap(one, bus) for one in held)
            others = [fresh[name] for name in fresh if name != bus]
            found = card_checks.judge_card(CardLook(seen, free, others), had)
            tested = settings.health_command and COMMAND in card.found
            kept = {COMMAND: card.found[COMMAND]} if tested else {}
            found = had.leave_out_passing(found, now)
            card.found, card.most = {**found, **kept}, had.most
        if fresh or cards.keys() != known.keys():
            write_card_checks(node.store.path, cards, node.boot_id, now if fresh else 0.0)
        lasting: dict[str, str] = {}
        for bus, card in sorted(cards.items()):
            lasting.update(
                {f"{bus} {name}": f"{bus}: {why}" for name, why in card.failed().items()}
            )
            if settings.health_command and (why := card.unproven_words()):
                lasting[f"{bus} unproven"] = f"{bus}: {why}"
        self._journal.log_changes("checks", lasting)

    def _start_next(
        self, node: Node, report: ReconcileReport, cards: dict[str, CardChecks]
    ) -> None:
        """Test the card that has waited for longest, where nobody waits for a card."""
        words, now = node.settings.health_command, self._clock()
        device = self._find_due_card(node, report, cards, now)
        waiting = read_waiting(node.store.path, node.boot_id, node.proc.running)
        if device is None or waiting:
            return
        fault = check_program_trust(words[0])
        if not fault:
            note_test(node, device.bus, begun=now)
            try:
                self.command = HealthCommand(node, device, now)
                self.due = now
            except (CardTakenError, Refusal):
                self._again[device.bus] = now + PAUSE
            except OSError as failed:
                fault = str(failed)
            if self.command is None:
                note_test(node, device.bus)
        said = {words[0]: f"HEALTH_COMMAND {words[0]} is not run: {fault}"} if fault else {}
        self._journal.log_changes("health command", said, ERROR)

    def _find_due_card(
        self, node: Node, report: ReconcileReport, cards: dict[str, CardChecks], now: float
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
            card, wait = cards.get(bus, CardChecks()), node.settings.health_period
            count, over, _ = card.unproven
            if count and now - over < pause_without_outcome(count, wait):
                continue
            place = node.store.path, node.boot_id, bus
            since = recovery.find_test_start(*place, note, now) if note else 0.0
            if card.found.get(COMMAND):
                wait = min(AGAIN, wait)
            at = card.tested
            if at is None or at <= since or now - at >= wait:
                due.append((not note, at or 0.0, device))
        return min(due, key=lambda one: one[:2])[2] if due else None


def pause_without_outcome(count: int, period: float) -> float:
    """Return seconds until a card is tested again of which `count` tests in a row told nothing."""
    if count <= MOST_SILENT:
        return PAUSE
    return min(AGAIN * 2.0 ** min(count - MOST_SILENT - 1, MOST_DOUBLED), max(period, PAUSE))


def note_test(
    node: Node, bus: str, begun: float | None = None, end: str = "", at: float = 0.0
) -> None:
    """Note that the test of a card has begun or is over; raise OSError.

    `end` and `at` are what ended one that told nothing, and when.
    """
    cards, looked = read_card_checks(node.store.path, node.boot_id)
    card = cards.setdefault(bus, CardChecks())
    card.begun = begun
    if end:
        card.unproven = card.unproven[0] + 1, at, end
    write_card_checks(node.store.path, cards, node.boot_id, looked)
