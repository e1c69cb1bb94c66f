# SPDX-License-Identifier: Apache-2.0
"""What is to be done about a worker, and for how long nothing is. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

REAP = 2.0  # seconds in which a killed process is reaped, where its driver lets it
POLL = 0.2  # seconds between two looks whether a process that is ending is over
MOMENT = 0.01  # seconds that a sleep lasts at least, where nobody wants a shorter one


class WorkerAction(Enum):
    """What is to be done now."""

    WAIT = "wait"
    START = "start"
    KILL = "kill"
    ABANDON = "abandon"


@dataclass(frozen=True)
class WorkerTimeouts:
    """Seconds: for the first frame after a start (NVML initialises cards), and between two."""

    first: float = 30.0
    frame: float = 5.0


@dataclass(frozen=True)
class WorkerStatus:
    """What there is: times are CLOCK_BOOTTIME seconds, 0 where there was none.

    `running` is whether a child is there and not reaped yet; `heard` whether it has sent a frame.
    `calling` is since when it makes a call of one card, 0 where it makes none.
    """

    running: bool = False
    heard: bool = False
    since: float = 0.0  # of the start, or of the last frame
    calling: float = 0.0
    killed: float = 0.0
    abandoned: bool = False
    not_before: float = 0.0  # the next start
    paused_until: float = 0.0


def decide_worker_action(now: float, seen: WorkerStatus, limits: WorkerTimeouts) -> WorkerAction:
    """Return what is to be done."""
    if seen.running:
        if seen.abandoned:
            return WorkerAction.WAIT
        if seen.killed:
            return WorkerAction.ABANDON if now - seen.killed > REAP else WorkerAction.WAIT
        late = now - seen.since > (limits.frame if seen.heard else limits.first)
        late |= seen.calling > 0 and now - seen.calling > limits.frame
        return WorkerAction.KILL if late or now < seen.paused_until else WorkerAction.WAIT
    return (
        WorkerAction.START if now >= max(seen.not_before, seen.paused_until) else WorkerAction.WAIT
    )


def seconds_until_action(now: float, seen: WorkerStatus, limits: WorkerTimeouts) -> float:
    """Return for how many seconds `decide_worker_action` says nothing else, as far as known."""
    if seen.killed:
        return POLL
    due = max(seen.not_before, seen.paused_until)
    if seen.running:
        due = seen.since + (limits.frame if seen.heard else limits.first)
        due = min(due, seen.calling + limits.frame) if seen.calling else due
    return max(MOMENT, due - now)
