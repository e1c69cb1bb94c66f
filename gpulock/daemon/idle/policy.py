# SPDX-License-Identifier: Apache-2.0
"""The held-idle policy: a claim whose devices are all seen to do nothing for long.

Warm, gpulockd alone, off by default. After IDLE_WARN it is said once, and IDLE_COMMAND is run with
`warn`; after IDLE_KILL, where that is set, it is run with `kill`, again while it fails. No `kill`
comes before the claim's own `warn` has run, and the time between the two has gone by. What was done
is kept in memory: a gpulockd that was started again warns once more. Idleness is what the exporter
observed: what was not observed is not idle, and a sample that is old counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from gpulock.alloc.reaper import HELD
from gpulock.daemon.core import sample
from gpulock.daemon.core.sample import ClaimUsage
from gpulock.daemon.idle.command import ClaimFacts, IdleCommand
from gpulock.daemon.reconcile.reconcile import Chore, ReconcileReport
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.store.owner import Owner
from gpulock.store.verdicts import ALIVE

END, WARN, KILL = "end", "warn", "kill"
SEEN: Final = 30.0  # seconds: an idleness that was true longer ago is not known any more
POLL: Final = 0.25  # seconds between two looks at a command at work
AGAIN: Final = 60.0  # seconds until a `kill` that failed is tried again


class IdlePolicy(Chore):
    """The chore that follows a reconcile; `say` is told what is done.

    Each round finds anew of whom the command is to be told. Commands run one after another,
    between the rounds, kills last: `run_due` starts the next and waits for none.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[tuple[str, str]] = set()  # by token (or none), what it was about
        self._warned: dict[str, float] = {}  # by token, when its warning was over
        self._next_kill: dict[str, float] = {}  # likewise, when it may be tried; never once done
        self._settings: Settings | None = None
        self._queue: dict[str, list[ClaimFacts]] = {END: [], WARN: [], KILL: []}  # by event
        self.command: IdleCommand | None = None

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Find what is due; `now` is CLOCK_BOOTTIME in seconds. Waits for no command."""
        settings = self._settings = node.settings
        self._queue |= {WARN: [], KILL: []}
        if settings.idle_warn or settings.idle_kill:
            standing = {one.lock.owner.token for one in report.outcomes if one.lock.owner}
            self._said = {one for one in self._said if one[0] in standing or not one[0]}
            for known in (self._warned, self._next_kill):
                for token in known.keys() - standing:
                    del known[token]
            for idler in find_idle_claims(node, report, now):
                self._judge(settings, idler, now)
        self.run_due(now)

    def run_due(self, now: float) -> None:
        """Look after what is at work, and start what comes next."""
        self.due = now + POLL  # later, also where something fails here
        if self.command is not None and (fault := self.command.poll(now)) is not None:
            self._take_outcome(self.command, fault, now)
            self.command = None
        waiting = [event for event, claims in self._queue.items() if claims]
        if self.command is None and waiting and self._settings is not None:
            self._start(self._settings, self._queue[waiting[0]].pop(0), waiting[0], now)
        if self.command is None:
            self.due = now if any(self._queue.values()) else float("inf")

    def tell_end(self, claim: ClaimFacts) -> None:
        """Run IDLE_COMMAND, where there is one, for a claim that is near its end."""
        self._queue[END].append(claim)
        self.due = 0.0

    def close(self) -> None:
        """End the command that runs: its deadline ends with us. The next gpulockd runs it again."""
        if self.command is not None:
            self.command.kill()
            self.command = None

    def _judge(self, settings: Settings, idler: ClaimFacts, now: float) -> None:
        """Put a claim into the line of warnings, or of kills, or neither."""
        token = idler.owner.token
        if self.command is not None and self.command.claim.owner.token == token:
            return
        if settings.idle_warn and token not in self._warned:
            if idler.seconds >= settings.idle_warn:
                self._say_once(token, WARN, idler.describe())
                if settings.idle_command:
                    self._queue[WARN].append(idler)
                else:
                    self._warned[token] = now
            return  # its end comes after its warning, and not before
        if not (settings.idle_kill and idler.alive):
            return
        due = self._next_kill.get(token, 0.0)
        if token in self._warned:
            grace = max(0.0, settings.idle_kill - settings.idle_warn)
            due = max(due, self._warned[token] + grace)
        if idler.seconds >= settings.idle_kill and now >= due:
            self._queue[KILL].append(idler)

    def _start(self, settings: Settings, idler: ClaimFacts, event: str, now: float) -> None:
        path = settings.idle_command
        if not path:
            return  # none is set, or it went since the round
        try:
            self.command = IdleCommand(settings, idler, event, now)
        except OSError as fault:
            why = str(fault.strerror)
            self._say_once("", why, f"IDLE_COMMAND {path} is not run: {why}")

    def _take_outcome(self, command: IdleCommand, fault: str, now: float) -> None:
        """Note a command that has ended: a `kill` is done only where it succeeded."""
        claim = command.claim
        token = claim.owner.token
        if command.event != KILL:
            if command.event == WARN:
                self._warned[token] = now
            if fault:
                self._say(fault)
        elif fault:
            self._next_kill[token] = now + AGAIN
            self._say_once(token, fault, f"{fault}: it is run again every minute")
        else:
            self._next_kill[token] = float("inf")
            self._say(f"{claim.describe()}: IDLE_COMMAND kill")

    def _say_once(self, token: str, key: str, line: str) -> None:
        if (token, key) not in self._said:
            self._said.add((token, key))
            self._say(line)


def find_idle_claims(node: Node, report: ReconcileReport, now: float) -> list[ClaimFacts]:
    """Return the claims whose devices are all seen to idle."""
    standing: dict[str, tuple[Owner, list[str], bool]] = {}
    for outcome in report.outcomes:
        record = outcome.lock.owner
        if record is None or outcome.act != HELD or record.draining or record.scheduler == "admin":
            continue
        known = standing.setdefault(record.token, (record, [], outcome.verdict.state == ALIVE))
        known[1].append(outcome.lock.id)
    if not standing:
        return []
    usage = sample.read_sample(
        node.settings.exporter_dir, now, node.boot_id, node.settings.max_sample_age
    )
    if usage is None:
        return []
    idlers: list[ClaimFacts] = []
    for token, (record, devices, alive) in standing.items():
        seconds = claim_idle_seconds(record, devices, usage.tokens.get(token, {}), now)
        if seconds is not None:
            idlers.append(ClaimFacts(record, tuple(sorted(devices)), seconds, alive))
    return idlers


def claim_idle_seconds(
    record: Owner, devices: Iterable[str], accounts: Mapping[str, ClaimUsage], now: float
) -> float | None:
    """Return for how many observed seconds all devices of a claim did nothing, None: not known."""
    held = now - record.claimed_boottime
    least = held
    for device in devices:
        account = accounts.get(device)
        if account is None or account.idle is None or account.seen is None:
            return None
        if not account.observed or not -sample.AHEAD <= now - account.seen <= SEEN:
            return None
        least = min(least, account.idle, account.observed)  # what was not observed is not idle
    return max(0.0, least)
