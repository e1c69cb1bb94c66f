# SPDX-License-Identifier: Apache-2.0
"""What is told of a node at one moment: records that page and metrics are made of.

They do not change once they are made, so that a client is answered from them while the next
moment is being put together. None is not known, which is never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpulock.store.locks import Lock
from gpulock.store.owner import Owner
from gpulock_exporter import telemetry
from gpulock_exporter.clock import Moment
from gpulock_exporter.state.process_attribution import DeviceProcesses


@dataclass(frozen=True)
class SnapshotLimits:
    """Seconds, and how many GPUs this node must have (0: not known).

    `oldest` is the age at which a value of the driver is dropped (MAX_SAMPLE_AGE), `idle_after`
    the observed idleness that makes a held device held-idle (IDLE_AFTER), `listed` the age at which
    a process list says nothing of now any more: the next one was due long ago.
    """

    oldest: float = 10.0
    idle_after: float = 600.0
    gpus: int = 0
    listed: float = 30.0


@dataclass(frozen=True)
class DeviceCounters:
    """A device's counters at one moment; None is not known. Times are epoch seconds."""

    busy: float | None = None
    observed: float | None = None
    counters: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class DeviceSnapshot:
    """One device at one moment. What is None is not known, or too old.

    `uuid` is its identity: the lock id where NVML tells none. `card` is the index of its card,
    `instance` `gi1.ci0` for a MIG instance. `state` is None where the locks are not known, and
    for a card in MIG mode, which nobody can be granted.
    """

    id: str
    uuid: str
    card: int | None
    instance: str = ""
    state: str | None = None
    reason: str = ""
    lock: Lock | None = None
    stale: bool | None = None
    quarantined: bool | None = None
    values: telemetry.DeviceTelemetry | None = None
    counts: DeviceCounters = field(default=DeviceCounters())
    xids: Mapping[int, tuple[int, float]] = field(default_factory=dict[int, tuple[int, float]])
    last_busy: float | None = None
    present: DeviceProcesses | None = None
    idle: float | None = None

    @property
    def name(self) -> str:
        """Return what names it among its neighbours, as `gpulock status` does."""
        card = "" if self.card is None else str(self.card)
        return f"{card}:{self.instance}" if self.instance else card

    @property
    def owner(self) -> Owner | None:
        """Return who holds it."""
        return self.lock.owner if self.lock else None

    @property
    def foreign(self) -> int | None:
        """Return how many foreign processes are on it; none to be seen is not none at all."""
        if self.present is None or (self.present.unseen and not self.present.foreign):
            return None
        return len(self.present.foreign)


@dataclass(frozen=True)
class ExporterHealth:
    """How the exporter itself is.

    `collectors` has (seconds, fault) of each by name; seconds are None where nobody took them.
    """

    version: str = ""
    nvml_up: bool = False
    abandoned: int = 0
    sampled: float | None = None  # epoch seconds of the last frame
    collectors: Mapping[str, tuple[float | None, str]] = field(
        default_factory=dict[str, tuple[float | None, str]]
    )
    reloaded: bool | None = None  # None: no web configuration


@dataclass(frozen=True)
class NodeSnapshot:
    """A node at one moment; `states` is None where the locks or the devices are not known.

    `counters` are the hooks' own, `reconciled` is epoch seconds.
    """

    at: Moment
    devices: tuple[DeviceSnapshot, ...]
    states: Mapping[str, int] | None
    driver: str
    counters: Mapping[str, str]
    reconciled: float | None
    health: ExporterHealth


@dataclass(frozen=True)
class DriverState:
    """What the driver said last: devices by id, when, and who is on each.

    `at` is CLOCK_BOOTTIME, `fresh` whether that is recent enough to be told; a counter that was
    read last before `since` is not.
    """

    devices: Mapping[str, telemetry.DeviceTelemetry]
    at: float
    fresh: bool
    present: Mapping[str, DeviceProcesses]
    since: float = 0.0

    def fresh_devices(self) -> Mapping[str, telemetry.DeviceTelemetry] | None:
        """Return the devices, None where they are old."""
        return self.devices if self.fresh else None
