# SPDX-License-Identifier: Apache-2.0
"""The held-idle policy: a claim whose devices are all seen to do nothing for long.

Warm, gpulockd alone, off by default. After IDLE_WARN it is said once, and IDLE_COMMAND is run
once; after IDLE_KILL, where that is set, its scheduler is told to end the job. No job is ended
before its own warning has run, and it has had from then on the time between the two. Idleness is
what the exporter observed: what was not observed is not idle, and a sample that is old counts for
nothing. What was done is kept in LOCK_DIR/idle: a gpulockd that starts goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Final

from gpulock.daemon.core.background_call import BackgroundCall
from gpulock.daemon.idle.command import (
    IdleCommand,
    build_idle_environment,
    check_program_trust,
    terminate_idle_job,
)
from gpulock.daemon.idle.idle_claims import (
    ENDING,
    KILL,
    WARN,
    WARNED,
    IdleClaim,
    IdleNotes,
    find_idle_claims,
    standing_claim_tokens,
)
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.reconcile.schedule import LOCKS, SAMPLE, TIME, Chore, Due
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.settings import Settings

POLL: Final = 0.25  # seconds between two looks at a command or a scheduler at work
AGAIN: Final = 60.0  # seconds until a job that could not be ended is tried again


class IdlePolicy(Chore):
    """The chore that follows a reconcile; `say` is told what is done.

    Each round finds anew who is to be warned and who is to be ended. Commands run one after
    another and so do ends, between the rounds: `run_due` starts the next and waits for none.
    """

    after: ClassVar[Due] = dict.fromkeys((LOCKS, SAMPLE, TIME), ("idle_warn", "idle_kill"))

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[tuple[str, str]] = set()  # by token (or none), what
        self._notes = IdleNotes()
        self._node: Node | None = None
        self._warnings: list[IdleClaim] = []
        self._ends: list[IdleClaim] = []
        self._ended: list[IdleClaim] = []  # whose command is still to be run
        self._again: dict[str, float] = {}  # by token, when its end is tried again
        self._looked = 0.0
        self._warned = ""  # the token whose warning `command` is
        self.command: IdleCommand | None = None
        self.ending: tuple[IdleClaim, BackgroundCall[str]] | None = None

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Find what is due; `now` is CLOCK_BOOTTIME in seconds. Waits for no command."""
        settings = node.settings
        self._node, self._warnings, self._ends = node, [], []
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
            self._run_next_command(self._node, now)
            self._terminate_next(self._node, now)
        if self.command is None and self.ending is None:
            waits = self._warnings or self._ends or self._ended
            self.due = now if waits else float("inf")

    def close(self) -> None:
        """End the command that runs: its deadline ends with us. The next gpulockd runs it again."""
        if self.command is not None:
            fault = self.command.poll(0.0)
            if fault is None:
                self.command.kill()
            elif self._warned:
                self._notes.note_done(self._warned, WARNED, self._looked)
            self.command = None

    def _judge(self, settings: Settings, idler: IdleClaim, now: float) -> None:
        """Put a claim into the line of those to be warned, or to be ended, or neither."""
        token = idler.owner.token
        told = self._notes.noted_at(token, WARNED)
        if settings.idle_warn and told is None:
            if idler.seconds >= settings.idle_warn:
                self._warn(settings, idler, now)
            return  # its end comes after its warning, and not before
        if not settings.idle_kill or idler.seconds < settings.idle_kill or not idler.alive:
            return
        grace = max(0.0, settings.idle_kill - settings.idle_warn) if told is not None else 0.0
        if self._notes.noted_at(token, KILL) is None and now - (told or 0.0) >= grace:
            self._ends.append(idler)

    def _warn(self, settings: Settings, idler: IdleClaim, now: float) -> None:
        token = idler.owner.token
        if self._notes.noted_at(token, WARN) is None:
            if not self._noted(token, WARN, now):
                return
            self._say(f"{idler.describe_holder()} holds {idler.describe_idle()}")
        if not settings.idle_command:
            self._notes.note_done(token, WARNED, now)
        elif token != self._warned:
            self._warnings.append(idler)

    def _run_next_command(self, node: Node, now: float) -> None:
        """Look after the command that runs, and start the next one: one at a time."""
        if self.command is not None:
            fault = self.command.poll(now)
            if fault is None:
                return
            if self._warned:
                self._notes.note_done(self._warned, WARNED, now)
            self.command, self._warned = None, ""
            if fault:
                self._say(fault)
        if self._ended:
            self._start(node, self._ended.pop(0), KILL, now)
        elif self._warnings:
            self._start(node, self._warnings.pop(0), WARN, now)

    def _start(self, node: Node, idler: IdleClaim, event: str, now: float) -> None:
        path = node.settings.idle_command
        if not path:
            return
        fault = check_program_trust(path)
        if not fault:
            environ = build_idle_environment(
                node, idler.owner, idler.devices, idler.seconds, event, now
            )
            try:
                self.command = IdleCommand(path, environ, now)
            except OSError as failed:
                fault = f"{failed.strerror}"
            else:
                self._warned = idler.owner.token if event == WARN else ""
                return
        self._log_once("", f"IDLE_COMMAND {path} is not run: {fault}")

    def _terminate_next(self, node: Node, now: float) -> None:
        """Hear what became of the job that is being ended, and end the next one."""
        if self.ending is not None:
            idler, asking = self.ending
            if not asking.wait(0.0):
                return
            self.ending = None
            self._record_termination(idler, asking, now)
        while self._ends:
            idler = self._ends.pop(0)
            token = idler.owner.token
            if self._notes.noted_at(token, KILL) is not None or now < self._again.get(token, now):
                continue
            if self._noted(token, ENDING, now):
                # a scheduler may take its time, and gpulockd has none
                self.ending = idler, BackgroundCall(partial(terminate_idle_job, node, idler.owner))
                return

    def _record_termination(
        self, idler: IdleClaim, asking: BackgroundCall[str], now: float
    ) -> None:
        token = idler.owner.token
        try:
            how = asking.answer()
        except (Refusal, OSError) as fault:
            self._again[token] = now + AGAIN
            why = f"{fault.why}; {fault.do}" if isinstance(fault, Refusal) else str(fault)
            what = f"{idler.describe_holder()} holds {idler.describe_idle()}"
            line = f"{what}, and cannot be ended yet: {why}"
            self._log_once(token, line, why)
            return
        self._notes.note_done(token, KILL, now)
        self._say(f"{idler.describe_holder()} held {idler.describe_idle()}: {how}")
        self._ended.append(idler)

    def _noted(self, token: str, act: str, now: float) -> bool:
        """Note what is about to be done; without that nothing is done."""
        if self._notes.note_intent(token, act, now):
            return True
        self._log_once("", f"the held-idle policy is suspended: {self._notes.fault}")
        return False

    def _log_once(self, token: str, line: str, what: str = "") -> None:
        key = token, what or line
        if key not in self._said:
            self._said.add(key)
            self._say(line)
