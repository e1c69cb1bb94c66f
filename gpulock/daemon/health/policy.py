# SPDX-License-Identifier: Apache-2.0
"""The health of cards, after each reconcile: checked, named suspect, put out, brought back.

Warm, gpulockd alone. What is found is in STATE_DIR/cards, for claims, `gpulock why` and the
exporter, and in the log. A card that does not answer (XID 79, a call that hangs), or that degrades
every job, is suspect: claims take it last, with every setting. Such a card is still in /proc, so it
looks free, and each job that fails on it at once frees it for the next.

By QUARANTINE_ON a note is all that is written: a job that holds the device keeps it, and nobody
gets it afterwards. The exporter's word is advice, which with XIDs may put out half of a node, and
free nothing. A killed daemon leaves a note, or none; the next round goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final

from gpulock.daemon.core.journal import ERROR, NOTICE, WARNING, DaemonJournal, run_each
from gpulock.daemon.core.sample import Sample
from gpulock.daemon.health import findings, recovery
from gpulock.daemon.health.cards import (
    COMMAND,
    GATE_SECONDS,
    LONGEST_WORDS,
    NodeCards,
    read_cards,
    save_changed_cards,
)
from gpulock.daemon.health.findings import (
    ECC,
    LOST,
    MEMORY_CHECK,
    MISSING,
    XID,
    HealthFinding,
)
from gpulock.daemon.health.kernel_log import KernelLog
from gpulock.daemon.health.recovery import CLEAN_CHECKS
from gpulock.daemon.health.snapshot import (
    HealthSnapshot,
    read_fresh_sample,
    read_quarantine_notes,
)
from gpulock.daemon.reconcile.inventory_file import (
    LIMITED_CAUSES,
    QUARANTINE_LIMIT_REACHED,
    find_limited_cards,
    limit_quarantine,
)
from gpulock.daemon.reconcile.reconcile import Chore, ReconcileReport
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import Refusal, one_line
from gpulock.node.context import Node
from gpulock.node.devices import card_bus_id, lock_ids_overlap
from gpulock.store import kv
from gpulock.store import quarantine as notes
from gpulock.store.gate import Gate
from gpulock.store.verdicts import PERIOD

SUSPECT_PERIOD: Final = 3.0  # seconds between two looks for cards that do not answer
MEMORY_SECONDS: Final = 25.0  # for which memory must be in use: processes are listed every 10
LOSS_SECONDS: Final = 60.0  # for which a card is gone or lost before it goes out: a driver reload
LONGEST_GAP: Final = 1.5 * PERIOD  # seconds between looks that count: no suspended machine's do
CHECK_SPACING: Final = 10.0  # seconds between two clean checks that count
XIDS_MISSED: Final = "XIDs may be missed: records of the kernel's log were overwritten unread"
QuarantineNotes = Mapping[str, Mapping[str, str]]


class LastingTimer:
    """For how long devices have a cause against them, by looks that are close to each other."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[float, float]] = {}  # seconds, and when last seen

    def follow(self, keys: Iterable[tuple[str, str]], now: float) -> dict[tuple[str, str], float]:
        """Return for how many seconds each of all that stand now has stood, by device and cause."""
        before, self._seen = self._seen, {}
        for key in keys:
            seconds, last = before.get(key, (0.0, now))
            gap = now - last
            self._seen[key] = seconds + (gap if gap <= LONGEST_GAP else 0.0), now
        return {key: seconds for key, (seconds, _) in self._seen.items()}


class HealthPolicy(Chore):
    """The chore; `clock` is CLOCK_BOOTTIME in seconds.

    Where QUARANTINE_ON is empty it still lifts notes.
    """

    def __init__(self, journal: DaemonJournal, clock: Callable[[], float] = clock_boottime) -> None:
        self._journal = journal
        self._clock = clock
        self._log = KernelLog()
        self._losses = LastingTimer()
        self._memory_use = LastingTimer()
        self._clean: dict[str, tuple[int, float]] = {}  # checks in a row, and when the last was
        self._seen: tuple[Node, ReconcileReport] | None = None
        self._deadline = Deadline(0.0)  # at the gate, of all that a round puts out or back

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Put out what is bad, and back what is clean; tell of each part that fails."""
        self._seen, self.due = (node, report), now + SUSPECT_PERIOD
        cards = read_cards(node.settings.state_dir, node.boot_id)
        self._journal.log_state("cards", cards.fault)
        snapshot = HealthSnapshot(node, report, self._clock(), cards)
        parts: dict[str, Callable[[], object]] = {
            "kernel log": lambda: self._read_kernel_log(node, cards),
            "checks of cards": lambda: self._check_cards(snapshot),
            "suspects": lambda: self._name_suspects(report, snapshot.sample, cards),
            "policy": lambda: self._judge_cards(snapshot),
            "cards": lambda: save_changed_cards(node.store, node.settings.state_dir, cards),
        }
        self._journal.log_changes("parts of health", run_each(parts.items()), ERROR)

    def run_due(self, now: float) -> None:
        """Look for what does not answer, between reconciles; raise OSError or MalformedError."""
        self.due = now + SUSPECT_PERIOD
        if self._seen is None:
            return
        node, report = self._seen
        sample = read_fresh_sample(node, self._clock())
        if sample is None:
            return  # what was told last stands
        cards = read_cards(node.settings.state_dir, node.boot_id)
        self._name_suspects(report, sample, cards)
        with suppress(Refusal):  # the gate is held: it is looked at again
            save_changed_cards(node.store, node.settings.state_dir, cards)

    # --- checks -------------------------------------------------------------------------------

    def _read_kernel_log(self, node: Node, cards: NodeCards) -> None:
        """Count the XIDs since the last look."""
        unknown = ""
        try:
            if self._log.read(node.settings.dev_root, cards):
                self._journal.say(WARNING, XIDS_MISSED)
        except OSError as fault:
            self._log.close()
            unknown = f"XIDs are not known: the kernel's log cannot be read: {fault}"
        self._journal.log_state("kernel log", unknown)

    def _check_cards(self, snapshot: HealthSnapshot) -> None:
        """Check every card of which a fresh sample tells, and keep what failed."""
        cards = snapshot.cards
        if not snapshot.node.settings.health_command:  # any more
            for state in cards.states.values():
                if COMMAND in state.checks:
                    state.note_command("", None)
        memory = {
            name: findings.check_memory(seen)
            for name, seen in snapshot.fresh.items()
            if seen.processes == 0 and snapshot.is_free(name)
        }
        used = [(name, MEMORY_CHECK) for name, check in memory.items() if check.get(MEMORY_CHECK)]
        for (name, _), seconds in self._memory_use.follow(used, snapshot.now).items():
            if seconds < MEMORY_SECONDS:
                del memory[name]
        for name, seen in snapshot.fresh.items():
            state = cards.of(name)
            width, links = state.most
            state.most = max(width, seen.pcie_width or 0), max(links, seen.nvlink_active or 0)
            others = [one for other, one in snapshot.fresh.items() if other != name]
            # memory until it is looked at again: while it is held it is not
            kept = {k: why for k, why in state.checks.items() if k in (COMMAND, MEMORY_CHECK)}
            state.checks = {
                **findings.check_links(seen, others, state.most),
                **kept,
                **memory.get(name, {}),
            }
        failed = {
            f"{name} {check}": f"{name}: {why}"
            for name, state in sorted(cards.states.items())
            for check, why in state.failed().items()
            if name in snapshot.here
        }
        self._journal.log_changes("checks", failed)

    def _name_suspects(
        self, report: ReconcileReport, sample: Sample | None, cards: NodeCards
    ) -> None:
        """Name the cards that claims take last; without the exporter's word the last one stands."""
        if sample is None:
            return
        lost = {
            bus: why[:LONGEST_WORDS]
            for bus, why in findings.read_lost_cards(sample, report.devices).items()
        }
        lines = {
            bus: f"{bus} does not answer: {why}; claims take it last; see dmesg for NVRM and Xid"
            for bus, why in lost.items()
        }
        self._journal.log_changes("suspects", lines)
        for name in {*cards.states, *lost}:
            state = cards.of(name)
            state.suspect = lost.get(name) or state.describe_failed()

    def _judge_cards(self, snapshot: HealthSnapshot) -> None:
        """Put out what is news and wanted, then bring back what nothing speaks against."""
        if not snapshot.devices:
            return  # without a driver nothing is known about a card
        cards, out = snapshot.cards, read_quarantine_notes(snapshot.node)
        ours = {name: note for name, note in out.items() if recovery.is_policy_note(note)}
        wanted = {*snapshot.node.settings.quarantine_on}
        wanted |= {LOST} if MISSING in wanted else set()
        standing = [*snapshot.find_all()]
        cards.marks = findings.expire_finding_marks(
            cards.marks, standing, snapshot.fresh.keys(), snapshot.here
        )
        lost = [(one.device, one.cause) for one in standing if one.cause in (MISSING, LOST)]
        lost_for = self._losses.follow(lost, snapshot.now)
        news = [
            one
            for one in standing
            if one.cause in wanted
            and one.mark != cards.marks.get((one.device, one.key))
            and lost_for.get((one.device, one.cause), LOSS_SECONDS) >= LOSS_SECONDS
            and not (one.cause == LOST and one.device in ours)  # what is out and lost stays out
        ]
        self._deadline = Deadline(GATE_SECONDS)
        failed = self._quarantine_news(snapshot, news, out)
        against = [one for one in standing if one in news or one.key in findings.STATE_KEYS]
        failed.update(self._restore_recovered(snapshot, ours, against))
        self._journal.log_changes("health", failed, ERROR)

    # --- out ----------------------------------------------------------------------------------

    def _quarantine_news(
        self, snapshot: HealthSnapshot, news: list[HealthFinding], out: QuarantineNotes
    ) -> dict[str, str]:
        """Put out the devices that something new speaks against; return what could not be done.

        Beyond the half a device is noted for its other causes alone. What an administrator took out
        does not count.
        """
        kept = {name for name, note in out.items() if not recovery.is_policy_note(note)}
        new = [one.device for one in news if one.cause in LIMITED_CAUSES and one.device not in kept]
        already = find_limited_cards(out, snapshot.devices)
        allowed = limit_quarantine(new, already, snapshot.count_cards())
        failed: dict[str, str] = {}
        for name in sorted({one.device for one in news}):
            reasons = [one for one in news if one.device == name]
            limited = [one for one in reasons if one.cause in LIMITED_CAUSES]
            if limited and not {name, card_bus_id(name)} & {*allowed, *kept}:
                words = ", ".join(one.words for one in limited)
                why = f"{name} is not put out for this: {words}; {QUARANTINE_LIMIT_REACHED}"
                failed[f"cap {name}"] = why
                reasons = [one for one in reasons if one not in limited]
            if not reasons:
                continue
            try:
                self._quarantine(snapshot, name, reasons)
            except (Refusal, OSError, kv.MalformedError) as fault:
                failed[f"put {name}"] = f"{name} cannot be put out of service: {fault}"
                continue
            snapshot.cards.marks.update({(one.device, one.key): one.mark for one in reasons})
        return failed

    def _quarantine(
        self, snapshot: HealthSnapshot, name: str, reasons: list[HealthFinding]
    ) -> None:
        """Note a device as out, beside what is noted; an administrator's note stays as it is.

        Raises Refusal, OSError or kv.MalformedError where it cannot be noted.
        """
        state_dir, kind = snapshot.node.settings.state_dir, notes.QUARANTINE
        with Gate(snapshot.node.store, self._deadline):
            noted = notes.read_device_notes(state_dir, kind).get(name)
            if noted is not None and not recovery.is_policy_note(noted):
                return
            if noted is not None and not any(one.cause in (XID, ECC) for one in reasons):
                return  # it is out, and comes back once no state speaks against it
            flaps = recovery.is_device_flapping(snapshot.cards, name)
            reason = one_line("; ".join(recovery.merge_note_reasons(noted, reasons, flaps)))
            facts = ("boot", snapshot.node.boot_id), ("since", f"{self._clock():.3f}")
            notes.write_device_note(state_dir, kind, name, notes.POLICY, reason, facts)
        self._journal.say(WARNING, f"{name} is out of service: {reason}")

    # --- back ---------------------------------------------------------------------------------

    def _restore_recovered(
        self, snapshot: HealthSnapshot, ours: QuarantineNotes, against: list[HealthFinding]
    ) -> dict[str, str]:
        """Check what the policy took out; return what could not be done, by a key.

        What is out for one of LIMITED_CAUSES stays out while that lasts. Where the driver put a
        device out, they keep it out only as far as half of the node leaves room.
        """
        failed: dict[str, str] = {}
        self._clean = {name: checks for name, checks in self._clean.items() if name in ours}
        advised = [one.device for one in against if one.cause in LIMITED_CAUSES]
        kept = [name for name in ours if any(lock_ids_overlap(one, name) for one in advised)]
        already = find_limited_cards(ours, snapshot.devices)
        may_stay_out = limit_quarantine(kept, already, snapshot.count_cards())
        for name, note in ours.items():
            believed = card_bus_id(name) in may_stay_out
            if not snapshot.is_shown(name) or any(
                lock_ids_overlap(one.device, name)
                for one in against
                if believed or one.cause not in LIMITED_CAUSES
            ):
                self._clean.pop(name, None)
                continue
            known = recovery.is_end_known(
                note,
                sampled=name in snapshot.fresh,
                restarted=recovery.was_card_restarted(note, snapshot.cards),
                tested=bool(snapshot.node.settings.health_command),
            )
            times, at = self._clean.get(name, (0, snapshot.now - CHECK_SPACING))
            if not known or snapshot.now - at < CHECK_SPACING:
                continue
            self._clean[name] = (times + 1, snapshot.now)
            if times + 1 < CLEAN_CHECKS or not snapshot.has_passed_command(name, note):
                continue  # what is out is tested first
            try:
                self._restore(snapshot, name, note)
                del self._clean[name]
            except (Refusal, OSError, ValueError) as fault:
                failed[f"back {name}"] = f"{name} could be back in service: {fault}"
        return failed

    def _restore(self, snapshot: HealthSnapshot, name: str, note: Mapping[str, str]) -> None:
        """Take our own note back, unless it changed since it was read.

        Raises Refusal, OSError or ValueError: then it stays out.
        """
        state_dir, kind = snapshot.node.settings.state_dir, notes.QUARANTINE
        with Gate(snapshot.node.store, self._deadline):
            if notes.read_device_notes(state_dir, kind).get(name) != note:
                return
            notes.remove_device_note(state_dir, kind, name)
        recovery.note_comeback(snapshot.cards, name)
        self._journal.say(NOTICE, f"{name} is back in service, clean: was {note['reason']}")
