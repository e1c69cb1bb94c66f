# SPDX-License-Identifier: Apache-2.0
"""Which claims idle: all their devices were seen to do nothing until now.

Warm. Idleness is what the exporter observed: what was not observed is not idle, and a sample that
is old counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from gpulock.alloc.reaper import HELD
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.node import sample
from gpulock.node.context import Node
from gpulock.node.sample import ClaimUsage
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
