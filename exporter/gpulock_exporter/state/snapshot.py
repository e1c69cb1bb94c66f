# SPDX-License-Identifier: Apache-2.0
"""The snapshot of a node at one moment: records that page and metrics are made of.

They do not change once they are made, so that a client is answered from them while the next
moment is being put together. None is not known, which is never 0.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpulock.deadline import clock_boottime
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner
from gpulock.store.reservations import Reservation
from gpulock.workstation.waiting import WaitingCaller
from gpulock_exporter.frame import DeviceTelemetry

STEP = 1.0  # seconds by which the wall clock was set, rather than that it drifts


@dataclass(frozen=True)
class Moment:
    """One moment: CLOCK_BOOTTIME seconds, for durations, and epoch seconds, for people."""

    boottime: float
    wall: float


def current_moment() -> Moment:
    """Return this moment, by the clocks of this machine."""
    return Moment(clock_boottime(), time.time())


def steady_offset(before: float | None, now: Moment) -> float:
    """Return what to add to a boottime to get its epoch seconds.

    It stays the same while the two clocks only drift apart, so that the timestamp of one event
    is the same number in each scrape; it follows once the wall clock was set.
    """
    offset = now.wall - now.boottime
    return offset if before is None or abs(offset - before) > STEP else before


NOT_IN_NVML = "the driver lists it, NVML does not"


@dataclass(frozen=True)
class LostCard:
    """A card that does not answer: since when (CLOCK_BOOTTIME seconds), and why."""

    since: float
    why: str


@dataclass(frozen=True)
class DeviceProcesses:
    """Who is on one device: how many processes NVML listed, and what they turned out to be.

    `at` is when it listed them, CLOCK_BOOTTIME seconds. `share_memory` has the bytes in use by the
    processes of each share of the device, by lock id, where that is known.
    """

    nvml_count: int
    foreign: tuple[int, ...] = ()
    unseen: int = 0
    at: float | None = None
    share_memory: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass
class DeviceSnapshot(DeviceTelemetry):
    """One device at one moment: NVML's values, and what is known here besides.

    `answered` is whether NVML's values are there and not too old, `responding` whether NVML answers
    for the device at all. What is None is not known. `id` is its lock id and `uuid` its identity:
    the lock id where NVML tells none. `card` is the number of its card in this boot,
    `instance` `gi1.ci0` for a MIG instance, and `gpu_label` names it among its neighbours. `state`
    is None where the locks are not known, and for a card in MIG mode, which nobody can be granted.
    `owner` has the device alone, `sharers` by lock id have a share of it each, whose processes
    use `share_memory` bytes, and which have been idle since `share_idle_since`. `places` is how
    many shares it gives out, None for one that gives none. `counters` are this boot's: `busy`,
    `observed`, `energy`, `ecc.<name>`, ... `xids` has how many there were and when the last was;
    times are epoch seconds. `foreign` counts processes; where none is seen and some are hidden it
    is None. `checks` has why each check of gpulockd's failed, nothing for one that is good.
    `causes` are why it is out of service, None where the quarantine is not known. Of its claim,
    `mean` is the share at work, and `idle_since` the last look less the observed seconds without
    work.
    """

    id: str = ""
    card: int | None = None
    instance: str = ""
    gpu_label: str = ""
    answered: bool = False
    responding: bool | None = None
    state: str | None = None
    reason: str = ""
    lock: Lock | None = None
    owner: Owner | None = None
    places: int | None = None
    sharers: Mapping[str, Owner] = field(default_factory=dict[str, Owner])
    share_memory: Mapping[str, int] = field(default_factory=dict[str, int])
    share_idle_since: Mapping[str, float] = field(default_factory=dict[str, float])
    counters: Mapping[str, float] = field(default_factory=dict[str, float])
    xids: Mapping[int, tuple[int, float]] = field(default_factory=dict[int, tuple[int, float]])
    checks: Mapping[str, str] = field(default_factory=dict[str, str])
    causes: tuple[str, ...] | None = None
    last_busy: float | None = None
    idle_since: float | None = None
    foreign: int | None = None
    mean: float | None = None


@dataclass(frozen=True)
class ExporterHealth:
    """How the exporter itself is; `collectors` has the fault of each by name."""

    version: str = ""
    nvml_up: bool = False
    unkillable: int = 0
    sampled: float | None = None  # epoch seconds of the last frame
    collectors: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class NodeSnapshot:
    """A node at one moment; `states` is None where the locks or the devices are not known.

    `counters` are the hooks' own, `reconciled` is epoch seconds, `waiting` the queue of users'
    claims, `reservations` are users' own. `switch_errors` has the SXids of NVSwitches by bus id and
    number: how many there were, and when the last was.
    """

    at: Moment
    devices: tuple[DeviceSnapshot, ...]
    states: Mapping[str, int] | None
    driver: str
    counters: Mapping[str, float]
    reconciled: float | None
    health: ExporterHealth
    waiting: tuple[WaitingCaller, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    switch_errors: Mapping[tuple[str, int], tuple[int, float]] = field(
        default_factory=dict[tuple[str, int], tuple[int, float]]
    )
