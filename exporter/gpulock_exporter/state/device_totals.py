# SPDX-License-Identifier: Apache-2.0
"""What each device did in this boot: counters that never fall, whatever the frames say.

Pure: a frame and the time go in, what each device did
since the last look comes out. Not observed is not idle: time that the driver did not tell of
is in no counter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

from gpulock.node.devices import card_bus_id
from gpulock_exporter.frame import MOST_NAMES, DeviceTelemetry, Frame
from gpulock_exporter.state.monotonic import KINDS, SUMMED, CounterKind, MonotonicCounter

IDLE_RATIO = 0.01  # of a look: so much a desktop or a monitor works, and it is nobody's work
KEPT_CREDIT = 5.0  # seconds that one look may tell of more than has passed since the last one
LONGEST_LOOK = 120.0  # seconds that a driver remembers


@dataclass(frozen=True)
class DeviceActivity:
    """What one device did from `since` until `at`; None is not known.

    `energy_since` is when the energy was read before, where that was not at the last look.
    """

    since: float
    at: float
    busy: float | None = None
    observed: float = 0.0
    energy: float | None = None
    memory: int | None = None
    energy_since: float | None = None

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
        gap: float | None = None
        for name, kind, value in counter_readings(device):
            counter = self.counters.get(name)
            if counter is None:
                if len(self.counters) >= 2 * MOST_NAMES:
                    continue
                counter = self.counters[name] = MonotonicCounter()
            before = counter.last
            step = counter.advance(value, at, kind, restarted)
            if name == "energy":
                grown, gap = step, before.at if before and before.at < since else None
        look = DeviceActivity(since, at, busy, observed, grown, device.memory_used, gap)
        if look.worked:
            self.last_busy = at
        return look

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
        found = {"busy": self.busy, "observed": self.observed} if self.observable else {}
        for name, one in self.counters.items():
            if one.last is not None and one.last.at >= since:
                found[name] = one.total
        return found


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
        at = self._time(frame.boottime, now)
        restarted = bool(self.driver and frame.driver and frame.driver != self.driver)
        self.driver = frame.driver or self.driver
        looks: dict[str, DeviceActivity] = {}
        for name, device in devices.items():
            totals = self.devices.get(name)
            if totals is None or (totals.uuid and device.uuid not in ("", totals.uuid)):
                totals = DeviceTotals(name, device.uuid, device.index, at)
                self.devices[name] = totals
            totals.uuid = device.uuid or totals.uuid
            looks[name] = totals.advance(device, at, restarted)
        for name, totals in list(self.devices.items()):
            if card_bus_id(name) != name and at - totals.looked > LONGEST_LOOK:
                del self.devices[name]
        self.at = at
        return looks

    def _time(self, told: float, now: float) -> float:
        """Return when a frame was made: what it says, where that can be; time never runs back."""
        last = self.at if self.at is not None else now - LONGEST_LOOK
        return told if last <= told <= now else max(now, last)
