# SPDX-License-Identifier: Apache-2.0
"""The held-idle policy: a claim whose devices are all seen to do nothing for long.

Warm, gpulockd alone, off by default. After IDLE_WARN it is said once, and IDLE_COMMAND is run
once; after IDLE_KILL, where that is set, its scheduler is told to end the job. Idleness is what
the exporter observed: what was not observed is not idle, and a sample that is old counts for
nothing. What was done is kept in LOCK_DIR/idle, and noted before it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from gpulock import atomic, kv, sample
from gpulock.daemon.idle_command import Command, environment, untrusted
from gpulock.daemon.idle_kill import kill
from gpulock.daemon.reconcile import Report
from gpulock.daemon.samples import usage_of
from gpulock.liveness import ALIVE
from gpulock.node import Node
from gpulock.owner import Owner
from gpulock.refusal import Refusal
from gpulock.sample import Account
from gpulock.settings import Settings
from gpulock.settle import HELD

NAME: Final = "idle"
SEEN: Final = 30.0  # seconds: an idleness that was true longer ago is not known any more
WARN, KILL = "warn", "kill"
WAITING: Final = 1000  # claims that wait for their turn


class Idler(NamedTuple):
    """A claim that idles: since how many observed seconds, and on which devices."""

    owner: Owner
    devices: tuple[str, ...]
    seconds: float
    alive: bool


class Idle:
    """The chore that follows a reconcile; `say` is told what is done."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()
        self.command: Command | None = None
        self._queue: list[tuple[str, dict[str, str]]] = []

    def run(self, node: Node, report: Report, now: float) -> None:
        """Do what is due; `now` is CLOCK_BOOTTIME in seconds. Waits for no command."""
        settings = node.settings
        if settings.idle_warn or settings.idle_kill:
            idlers = find(node, report, now)
            done = read_done(node)
            standing = tokens(report)
            left = {token: acts for token, acts in done.items() if token in standing}
            if left != done:
                self._keep(node, left)
            for idler in idlers:
                self._judge(node, idler, left, now)
        self.work(settings, now)

    def close(self) -> None:
        """End the command that runs: its deadline ends with us."""
        if self.command is not None:
            self.command.kill()
            self.command = None

    def work(self, settings: Settings, now: float) -> None:
        """Look after the command that runs, and start the next one: one at a time."""
        if self.command is not None:
            fault = self.command.poll(now)
            if fault is None:
                return
            self.command = None
            if fault:
                self._say(fault)
        if not self._queue:
            return
        path, environ = self._queue.pop(0)
        fault = untrusted(path)
        if not fault:
            try:
                self.command = Command(path, environ, now)
                return
            except OSError as failed:
                fault = f"{failed.strerror}"
        self._once(f"IDLE_COMMAND {path} is not run: {fault}")

    def _judge(self, node: Node, idler: Idler, done: dict[str, set[str]], now: float) -> None:
        settings, record = node.settings, idler.owner
        acts = done.get(record.token, set[str]())
        who = f"{job(record)} of {record.user or record.uid}"
        held = f"{','.join(idler.devices)} idle for {idler.seconds:.0f} observed seconds"
        if settings.idle_warn and idler.seconds >= settings.idle_warn and WARN not in acts:
            done[record.token] = acts | {WARN}
            if self._keep(node, done):
                self._say(f"{who} holds {held}")
                self._enqueue(node, idler, WARN, now)
            return  # its end may come with the next look, and not before
        if not settings.idle_kill or idler.seconds < settings.idle_kill or KILL in acts:
            return
        if not idler.alive:
            return
        done[record.token] = acts | {KILL}
        if self._keep(node, done):
            try:
                self._say(f"{who} held {held}: {kill(node, record)}")
                self._enqueue(node, idler, KILL, now)
            except Refusal as refusal:
                self._say(f"{who} holds {held}, and cannot be ended: {refusal.why}; {refusal.do}")

    def _enqueue(self, node: Node, idler: Idler, event: str, now: float) -> None:
        path = node.settings.idle_command
        if path and len(self._queue) < WAITING:
            environ = environment(node, idler.owner, idler.devices, idler.seconds, event, now)
            self._queue.append((path, environ))

    def _keep(self, node: Node, done: Mapping[str, set[str]]) -> bool:
        """Note what was done; return whether it is noted: without that nothing is done."""
        pairs = [(token, " ".join(sorted(acts))) for token, acts in sorted(done.items()) if acts]
        try:
            atomic.replace_file(f"{node.store.path}/{NAME}", kv.encode(pairs).encode())
        except OSError as fault:
            self._once(f"the held-idle policy rests: {node.store.path}/{NAME}: {fault.strerror}")
            return False
        return True

    def _once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)


def find(node: Node, report: Report, now: float) -> list[Idler]:
    """Return the claims whose devices are all seen to idle."""
    standing: dict[str, tuple[Owner, list[str], bool]] = {}
    for outcome in report.outcomes:
        record = outcome.lock.owner
        if record is None or outcome.act != HELD or record.settling or record.scheduler == "admin":
            continue
        known = standing.setdefault(record.token, (record, [], outcome.verdict.state == ALIVE))
        known[1].append(outcome.lock.id)
    if not standing:
        return []
    found = sample.read(node.settings.exporter_dir, now, node.boot_id, node.settings.max_sample_age)
    if found is None:
        return []
    idlers: list[Idler] = []
    for token, (record, devices, alive) in standing.items():
        seconds = idleness(record, devices, found.tokens.get(token, {}), now)
        if seconds is not None:
            idlers.append(Idler(record, tuple(sorted(devices)), seconds, alive))
    return idlers


def idleness(
    record: Owner, devices: Iterable[str], accounts: Mapping[str, Account], now: float
) -> float | None:
    """Return for how many observed seconds all devices of a claim did nothing, None: not known."""
    held = now - record.claimed_boottime
    least = held
    for device in devices:
        usage = usage_of(accounts.get(device), record, held, None)
        if usage.idle is None or usage.seen is None:
            return None
        if not -sample.AHEAD <= now - usage.seen <= SEEN:
            return None
        least = min(least, usage.idle)
    return max(0.0, least)


def tokens(report: Report) -> set[str]:
    """Return the claims that stand."""
    return {o.lock.owner.token for o in report.outcomes if o.lock.owner}


def read_done(node: Node) -> dict[str, set[str]]:
    """Return what was done about which claim; what cannot be read was not written by us."""
    try:
        pairs = kv.decode(atomic.read_text(f"{node.store.path}/{NAME}", sample.LIMIT))
    except (OSError, kv.MalformedError):
        return {}
    return {token: set(acts.split()) for token, acts in pairs.items() if sample.is_token(token)}


def job(record: Owner) -> str:
    """Return how people name the holder."""
    return record.job() if record.scheduler == "process" else f"job {record.job()}"
