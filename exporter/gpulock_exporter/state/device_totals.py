# SPDX-License-Identifier: Apache-2.0
"""What each device did in this boot: counters that never fall, whatever the frames say.

Pure: a frame and the time go in, what each device did since the last look comes out. Not observed
is not idle: time that the driver did not tell of is in no counter.

A counter of the driver wraps, restarts with the driver, or is garbage. A step is believed where the
hardware could have done it in the time. Where a reading fits to nothing it waits until the counter
has moved on from there: garbage does not. Of two ways to explain a reading the smaller step is
taken, so that an error never adds what was not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from gpulock.node.devices import card_bus_id
from gpulock_exporter.frame import MOST_NAMES, DeviceTelemetry, Frame

SLACK = 1.0  # seconds: a look takes a while, and its counters are not read at one moment
REPEATED = 10.0  # seconds for which a worker may hand on a counter that it reads seldom
WORD = 1 << 32
KIB_WORD = WORD << 10  # 32 bits that count KiB, handed on as bytes
IDLE_RATIO = 0.01  # of a look: so much a desktop or a monitor works, and it is nobody's work
KEPT_CREDIT = 5.0  # seconds that one look may tell of more than has passed since the last one
LONGEST_LOOK = 120.0  # seconds that a driver remembers


@dataclass(frozen=True)
class CounterKind:
    """How fast a counter can run, in units a second, and the widths at which it may wrap.

    `whole`: it tells of this boot, so that its first reading counts. One that wraps does not.
    """

    fastest: float
    widths: tuple[int, ...] = ()
    whole: bool = True


# of a device's fields. Faster than anything that is sold: 1.4 kW boards, PCIe 6.0 x16 at 128 GB/s,
# NVLink 6 at 1.8 TB/s
KINDS: dict[str, CounterKind] = {
    "energy": CounterKind(5e3),
    "pcie_replays": CounterKind(1e7),
    "pcie_transmit": CounterKind(2.6e11, whole=False),
    "pcie_receive": CounterKind(2.6e11, whole=False),
    "nvlink_transmit": CounterKind(2e12, (WORD, KIB_WORD), whole=False),
    "nvlink_receive": CounterKind(2e12, (WORD, KIB_WORD), whole=False),
    "clock_reason_seconds": CounterKind(1.1),
    "ecc": CounterKind(1e7),
    "nvlink_errors": CounterKind(1e9),
}
SUMMED = CounterKind(2e12, whole=False)  # bytes that the worker adds up: from 0 with it


class CounterReading(NamedTuple):
    """What a counter showed, when it did so last, and since when (CLOCK_BOOTTIME seconds)."""

    value: float
    at: float
    since: float


@dataclass
class MonotonicCounter:
    """The total, and the last reading that was believed.

    `former` is the reading before a fall, kept for one more: the fall may have been the garbage.
    `doubt` is a reading that fits to nothing yet.
    """

    total: float = 0
    last: CounterReading | None = None
    former: CounterReading | None = None
    doubt: CounterReading | None = None

    def advance(self, value: float, at: float, kind: CounterKind, restarted: bool = False) -> float:
        """Take a reading; return by how much the total grew. `restarted`: the driver began anew."""
        if self.last is not None and value == self.last.value:  # no step is smaller than none
            if at - self.last.since > REPEATED:  # until then it may be one reading, told again
                self.former = None
            self.doubt = None
            self.last = CounterReading(value, at, self.last.since)
            return 0
        if self.last is None and value <= kind.fastest * (at + SLACK):  # it can be of this boot
            self.last = CounterReading(value, at, at)
            self.total += value if kind.whole else 0
            return 0
        widths = () if restarted else kind.widths
        steps = [
            (grown, before)
            for before in (self.last, self.former, self.doubt)
            if before is not None
            and (before is not self.doubt or value != before.value)
            and (grown := counter_growth(before, value, at, kind.fastest, widths)) is not None
        ]
        if not steps:
            self.doubt = CounterReading(value, at, at)
            return 0
        grown, before = min(steps, key=lambda pair: pair[0])
        self.former = self.last if before is self.last and value < before.value else None
        self.doubt = None
        if value == before.value:
            self.last = CounterReading(value, at, before.since)
            return 0
        self.last = CounterReading(value, at, at)
        self.total += grown
        return grown


def counter_growth(
    before: CounterReading, value: float, at: float, fastest: float, widths: Sequence[int]
) -> float | None:
    """Return by how much a counter ran since a reading, None where it cannot have.

    A fall is a wrap where the step through the end is less than half of a width; any other fall is
    a restart.
    """
    passed = max(0.0, min(at - before.since, at - before.at + REPEATED))
    most = fastest * (passed + SLACK)
    grown = value - before.value
    if grown >= 0:
        return grown if grown <= most else None
    for width in widths:
        if before.value < width and 0 <= grown + width <= min(most, width / 2):
            return grown + width
    return value if value <= most else None


@dataclass(frozen=True)
class DeviceActivity:
    """What one device did from `since` until `at`; None is not known.

    `energy` is what it took from `energy_since` on: from longer ago, where it was not read then.
    """

    since: float
    at: float
    busy: float | None = None
    observed: float = 0.0
    energy: float | None = None
    memory: int | None = None
    energy_since: float = 0.0

    @property
    def worked(self) -> bool:
        """Return whether the device was seen at work."""
        return self.busy is not None and self.busy > IDLE_RATIO * self.observed


@dataclass
class DeviceTotals:
    """The counters of one device; times are CLOCK_BOOTTIME seconds.

    `device` is its lock id, `uuid` empty where none is known, `index` the number of its card in
    this boot, `observable` whether the driver ever told whether it works. `counters` are by the
    names of the frame's fields: `energy`, `ecc.corrected.dram`.
    """

    device: str
    uuid: str
    index: int
    looked: float
    observable: bool = False
    busy: float = 0.0
    observed: float = 0.0
    last_busy: float | None = None
    credit: float = 0.0
    counters: dict[str, MonotonicCounter] = field(default_factory=dict[str, MonotonicCounter])

    def advance(self, device: DeviceTelemetry, at: float, restarted: bool) -> DeviceActivity:
        """Take a look; return what the device did since the last one."""
        since, self.looked = self.looked, at
        busy, observed = self._observe(device.busy, device.observed, at - since)
        restarted = restarted or self._fell(device.energy)
        grown: float | None = None
        energy_since = since
        for name, kind, value in counter_readings(device):
            counter = self.counters.get(name)
            if counter is None:
                if len(self.counters) >= 2 * MOST_NAMES:
                    continue
                counter = self.counters[name] = MonotonicCounter()
            before = counter.last
            step = counter.advance(value, at, kind, restarted)
            if name == "energy" and before:
                grown, energy_since = step, before.at
        activity = DeviceActivity(
            since, at, busy, observed, grown, device.memory_used, energy_since
        )
        if activity.worked:
            self.last_busy = at
        return activity

    def _fell(self, energy: float | None) -> bool:
        """Return whether the energy fell: 64 bits do not wrap, so the driver began anew."""
        counter = self.counters.get("energy")
        last = counter.last if counter else None
        return energy is not None and last is not None and energy < last.value

    def _observe(
        self, busy: float | None, observed: float | None, passed: float
    ) -> tuple[float | None, float]:
        """Count a look's seconds; no more of them than have passed, garbage or told twice."""
        room = min(self.credit + passed, LONGEST_LOOK)
        self.credit = min(room, KEPT_CREDIT)
        if busy is None or observed is None:
            return None, 0.0
        self.observable = True
        if observed <= 0:
            return None, 0.0
        seen = min(observed, room)
        worked = min(busy, observed) * seen / observed
        self.credit = min(room - seen, KEPT_CREDIT)
        self.busy += worked
        self.observed += seen
        return worked, seen

    def counts(self, since: float) -> dict[str, float]:
        """Return what was counted until now.

        A counter that could not be read since then is not known: standing still, it would say that
        nothing happened.
        """
        counts = {"busy": self.busy, "observed": self.observed} if self.observable else {}
        for name, one in self.counters.items():
            if one.last is not None and one.last.at >= since:
                counts[name] = one.total
        return counts


def counter_readings(device: DeviceTelemetry) -> Iterator[tuple[str, CounterKind, float]]:
    """Yield name, kind and value of each raw counter that the device has."""
    for name, kind in KINDS.items():
        value = getattr(device, name)
        if isinstance(value, dict):
            for of, one in value.items():
                yield f"{name}.{of}", kind, one
        elif value is not None:
            summed = device.nvlink_summed and name.startswith("nvlink")
            yield name, SUMMED if summed else kind, value


class TelemetryTotals:
    """All devices of this boot, by lock id; `at` is the last look.

    `numbers` has the number of each card by its bus id: people know it by that, so that it stays
    the card's until the next boot, whichever cards leave the driver's list and come back.
    """

    def __init__(self, devices: Mapping[str, DeviceTotals] | None = None, driver: str = "") -> None:
        self.devices = dict(devices or {})
        self.driver = driver
        self.numbers = {card_bus_id(one.device): one.index for one in self.devices.values()}
        self.at: float | None = max((one.looked for one in self.devices.values()), default=None)

    def number_cards(self, indexes: Mapping[str, int]) -> None:
        """Give cards that have none a number: the index of each, by bus id, or the lowest free."""
        for bus, index in indexes.items():
            if bus not in self.numbers and index >= 0:
                taken = set(self.numbers.values())
                free = next(number for number in count() if number not in taken)
                self.numbers[bus] = free if index in taken else index
        for one in self.devices.values():
            one.index = self.numbers.get(card_bus_id(one.device), one.index)

    def advance(
        self, frame: Frame, devices: Mapping[str, DeviceTelemetry], now: float
    ) -> dict[str, DeviceActivity]:
        """Take a frame, its devices cleaned and by lock id; return what each did since its last.

        A device that is seen for the first time did nothing yet. Where another one has its place,
        by its UUID, that begins at 0. An instance that is gone is forgotten after a while.
        """
        at = self.time_of(frame, now)
        restarted = bool(self.driver and frame.driver and frame.driver != self.driver)
        self.driver = frame.driver or self.driver
        activities: dict[str, DeviceActivity] = {}
        for name, device in devices.items():
            totals = self.devices.get(name)
            if totals is None or (totals.uuid and device.uuid not in ("", totals.uuid)):
                totals = DeviceTotals(name, device.uuid, device.index, at)
                self.devices[name] = totals
            totals.uuid = device.uuid or totals.uuid
            activities[name] = totals.advance(device, at, restarted)
        for name, totals in list(self.devices.items()):
            if card_bus_id(name) != name and at - totals.looked > LONGEST_LOOK:
                del self.devices[name]
        self.at = at
        return activities

    def time_of(self, frame: Frame, now: float) -> float:
        """Return when a frame was made: what it says, where that can be; time never runs back."""
        made = frame.boottime
        last = self.at if self.at is not None else now - LONGEST_LOOK
        return made if last <= made <= now else max(now, last)
