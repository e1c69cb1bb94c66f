# SPDX-License-Identifier: Apache-2.0
"""Which claims idle (all their devices were seen to do nothing until now), and what was done.

Warm. Idleness is what the exporter observed: what was not observed is not idle, and a sample that
is old counts for nothing. What was done stands in LOCK_DIR/idle, a line a claim: its token, and
words of the form `act@CLOCK_BOOTTIME`. The next gpulockd goes on from there.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from typing import Final, NamedTuple

from gpulock.alloc.reaper import HELD
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.node import sample
from gpulock.node.context import Node
from gpulock.node.sample import ClaimUsage
from gpulock.store import atomic, kv
from gpulock.store.owner import Owner
from gpulock.store.verdicts import ALIVE

SEEN: Final = 30.0  # seconds: an idleness that was true longer ago is not known any more


class IdleClaim(NamedTuple):
    """A claim that idles: since how many observed seconds, and on which devices."""

    owner: Owner
    devices: tuple[str, ...]
    seconds: float
    alive: bool

    def describe_holder(self) -> str:
        """Return how people name the holder."""
        job = "" if self.owner.scheduler == "process" else "job "
        return f"{job}{self.owner.job()} of {self.owner.user or self.owner.uid}"

    def describe_idle(self) -> str:
        """Return what it holds, and for how long in vain."""
        return f"{','.join(self.devices)} idle for {self.seconds:.0f} observed seconds"


def find_idle_claims(node: Node, report: ReconcileReport, now: float) -> list[IdleClaim]:
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
    found = sample.read_sample(
        node.settings.exporter_dir, now, node.boot_id, node.settings.max_sample_age
    )
    if found is None:
        return []
    idlers: list[IdleClaim] = []
    for token, (record, devices, alive) in standing.items():
        seconds = claim_idle_seconds(record, devices, found.tokens.get(token, {}), now)
        if seconds is not None:
            idlers.append(IdleClaim(record, tuple(sorted(devices)), seconds, alive))
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


def standing_claim_tokens(report: ReconcileReport) -> set[str]:
    """Return the claims that stand."""
    return {o.lock.owner.token for o in report.outcomes if o.lock.owner}


NAME: Final = "idle"
WARN: Final = "warn"  # the command of its warning has ended, or there is none
KILL: Final = "kill"  # the command that ends it has succeeded


class IdleNotes:
    """Acts by claim; `fault` is why the last write failed, or nothing."""

    def __init__(self) -> None:
        self._path = ""
        self._acts: dict[str, dict[str, float]] = {}
        self.fault = ""

    def follow(self, lock_dir: str, standing: Container[str]) -> None:
        """Keep the notes of that LOCK_DIR, of claims that stand; the first time they are read."""
        path = f"{lock_dir}/{NAME}"
        if path != self._path:
            self._path, self._acts = path, read_idle_notes(path)
        left = {token: acts for token, acts in self._acts.items() if token in standing}
        if left != self._acts:
            self._acts = left
            self._write()

    def noted_at(self, token: str, act: str) -> float | None:
        """Return when something was done about a claim, None: it was not."""
        return self._acts.get(token, {}).get(act)

    def note_done(self, token: str, act: str, now: float) -> None:
        """Note what was done; where that cannot be written this process still knows it."""
        self._acts.setdefault(token, {})[act] = now
        self._write()

    def _write(self) -> None:
        pairs = [
            (token, " ".join([f"{act}@{at:.3f}" for act, at in acts.items()]))
            for token, acts in sorted(self._acts.items())
            if acts
        ]
        try:
            atomic.replace_file(self._path, kv.encode_pairs(pairs).encode())
        except OSError as fault:
            self.fault = f"{self._path}: {fault.strerror}"
        else:
            self.fault = ""


def decode_idle_acts(text: str) -> dict[str, float]:
    """Return the acts of one claim; a word that makes no sense is left out."""
    found: dict[str, float] = {}
    for word in text.split():
        act, _, at = word.partition("@")
        try:
            time = float(at)
        except ValueError:
            continue
        if act in (WARN, KILL) and math.isfinite(time):
            found[act] = time
    return found


def read_idle_notes(path: str) -> dict[str, dict[str, float]]:
    """Return what was done; what cannot be read was not written by us."""
    try:
        pairs = kv.decode_pairs(atomic.read_text(path, sample.LIMIT))
    except (OSError, kv.MalformedError):
        return {}
    return {
        token: decode_idle_acts(acts)
        for token, acts in pairs.items()
        if sample.is_claim_token(token)
    }
