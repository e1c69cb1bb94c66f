# SPDX-License-Identifier: Apache-2.0
"""The held-idle policy: a claim whose devices are all seen to do nothing for long.

Warm, gpulockd alone, off by default. After IDLE_WARN it is said once, and IDLE_COMMAND is run with
`warn`; after IDLE_KILL, where that is set, it is run with `kill`, again while it fails. No `kill`
comes before the claim's own `warn` has run, and the time between the two has gone by. Idleness is
what the exporter observed: what was not observed is not idle, and a sample that is old counts for
nothing. What was done is kept in LOCK_DIR/idle: a gpulockd that starts goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final

from gpulock.daemon.idle.command import IdleCommand, check_program_trust
from gpulock.daemon.idle.idle_claims import (
    KILL,
    WARN,
    IdleClaim,
    IdleNotes,
    find_idle_claims,
    standing_claim_tokens,
)
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.reconcile.schedule import LOCKS, SAMPLE, TIME, Chore, Due
from gpulock.node.context import Node
from gpulock.node.settings import Settings

POLL: Final = 0.25  # seconds between two looks at a command at work
AGAIN: Final = 60.0  # seconds until a `kill` that failed is tried again


class IdlePolicy(Chore):
    """The chore that follows a reconcile; `say` is told what is done.

    Each round finds anew of whom the command is to be told. Commands run one after another,
    between the rounds, warnings first: `run_due` starts the next and waits for none.
    """

    after: ClassVar[Due] = dict.fromkeys((LOCKS, SAMPLE, TIME), ("idle_warn", "idle_kill"))

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[tuple[str, str]] = set()  # by token (or none), what it was about
        self._notes = IdleNotes()
        self._node: Node | None = None
        self._warnings: list[IdleClaim] = []
        self._kills: list[IdleClaim] = []
        self._again: dict[str, float] = {}  # by token, when its `kill` is tried again
        self._looked = 0.0
        self.command: IdleCommand | None = None

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Find what is due; `now` is CLOCK_BOOTTIME in seconds. Waits for no command."""
        settings = node.settings
        self._node, self._warnings, self._kills = node, [], []
        if settings.idle_warn or settings.idle_kill:
            standing = standing_claim_tokens(report)
            self._notes.follow(node.store.path, standing)
            self._said = {one for one in self._said if one[0] in standing or not one[0]}
            self._again = {token: at for token, at in self._again.items() if token in standing}
            for idler in find_idle_claims(node, report, now):
                self._judge(settings, idler, now)
        self.run_due(now)

    def run_due(self, now: float) -> None:
        """Look after what is at work, and start what comes next."""
        self._looked, self.due = now, now + POLL  # later, also where something fails here
        if self._node is not None:
            self._run_next_command(self._node.settings, now)
        if self.command is None:
            self.due = now if self._warnings or self._kills else float("inf")

    def close(self) -> None:
        """End the command that runs: its deadline ends with us. The next gpulockd runs it again."""
        if self.command is not None:
            fault = self.command.poll(0.0)
            if fault is None:
                self.command.kill()
            else:
                self._record_outcome(self.command, fault, self._looked)
            self.command = None

    def _judge(self, settings: Settings, idler: IdleClaim, now: float) -> None:
        """Put a claim into the line of warnings, or of kills, or neither."""
        if self.command is not None and self.command.claim.owner.token == idler.owner.token:
            return
        token = idler.owner.token
        warned = self._notes.noted_at(token, WARN)
        if settings.idle_warn and warned is None:
            if idler.seconds >= settings.idle_warn:
                self._warn(settings, idler, now)
            return  # its end comes after its warning, and not before
        if not settings.idle_kill or idler.seconds < settings.idle_kill or not idler.alive:
            return
        if not settings.idle_command or now < self._again.get(token, now):
            return
        grace = max(0.0, settings.idle_kill - settings.idle_warn) if warned is not None else 0.0
        if self._notes.noted_at(token, KILL) is None and now - (warned or 0.0) >= grace:
            self._kills.append(idler)

    def _warn(self, settings: Settings, idler: IdleClaim, now: float) -> None:
        token = idler.owner.token
        self._log_once(token, WARN, f"{idler.describe_holder()} holds {idler.describe_idle()}")
        if not settings.idle_command:
            self._note(token, WARN, now)
        else:
            self._warnings.append(idler)

    def _run_next_command(self, settings: Settings, now: float) -> None:
        """Look after the command that runs, and start the next one: one at a time."""
        if self.command is not None:
            fault = self.command.poll(now)
            if fault is None:
                return
            self._record_outcome(self.command, fault, now)
            self.command = None
        if self._warnings:
            self._start(settings, self._warnings.pop(0), WARN, now)
        elif self._kills:
            self._start(settings, self._kills.pop(0), KILL, now)

    def _start(self, settings: Settings, idler: IdleClaim, event: str, now: float) -> None:
        path = settings.idle_command
        if not path:
            return  # the setting went since the round
        fault = check_program_trust(path)
        if not fault:
            try:
                self.command = IdleCommand(settings, idler, event, now)
            except OSError as failed:
                fault = f"{failed.strerror}"
            else:
                return
        self._log_once("", fault, f"IDLE_COMMAND {path} is not run: {fault}")

    def _record_outcome(self, command: IdleCommand, fault: str, now: float) -> None:
        """Note a command that has ended: a warning is done, a `kill` only where it succeeded."""
        claim = command.claim
        token = claim.owner.token
        if command.event == WARN:
            self._note(token, WARN, now)
            if fault:
                self._say(fault)
        elif fault:
            self._again[token] = now + AGAIN
            self._log_once(token, fault, f"{fault}: it is run again every minute")
        else:
            self._note(token, KILL, now)
            self._say(f"{claim.describe_holder()} held {claim.describe_idle()}: IDLE_COMMAND kill")

    def _note(self, token: str, act: str, now: float) -> None:
        """Note what was done; where that fails the next gpulockd does it again."""
        self._notes.note_done(token, act, now)
        if fault := self._notes.fault:
            self._log_once("", fault, f"what was done about idle claims is not noted: {fault}")

    def _log_once(self, token: str, key: str, line: str) -> None:
        if (token, key) not in self._said:
            self._said.add((token, key))
            self._say(line)
