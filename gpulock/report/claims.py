# SPDX-License-Identifier: Apache-2.0
"""A claim as reports see it, read from a record of the history or of REPORT_DIR; pure.

A record may come from a file that anybody wrote: a value that is not of its type or cannot be
is not known, and no text keeps a control character.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from gpulock.daemon.history.record import VERSION
from gpulock.errors import one_line
from gpulock.node.sample import BUCKETS
from gpulock.store.owner import Owner
from gpulock.text.words import format_percent

MOST_CARDS: Final = 256  # devices of one claim
MOST: Final = 1e15  # of any number: beyond, it is garbage
LONGEST: Final = 256  # characters of a text
MILLI: Final = 1000


@dataclass(frozen=True)
class UseTimeline:
    """Use over time: the share at work in each bucket of `width` seconds, None: not observed."""

    width: float
    use: tuple[float | None, ...]


@dataclass
class GpuTimes:
    """GPU seconds held, at work and observed, of one device or of some `claims`."""

    held: float = 0.0
    busy: float = 0.0
    observed: float = 0.0
    claims: int = 0

    def add(self, held: float, busy: float | None, observed: float) -> None:
        """Add the times of a record; of what `busy` is not known nothing was observed."""
        self.held += held
        if busy is not None:
            observed = min(observed, held)
            self.observed += observed
            self.busy += min(busy, observed)

    @property
    def utilization(self) -> float | None:
        """Return the share of the observed time at work, None where nothing was observed."""
        return self.busy / self.observed if self.observed > 0 else None

    @property
    def idle(self) -> float:
        """Return the observed seconds in which nothing was done."""
        return self.observed - self.busy

    @property
    def unobserved(self) -> float:
        """Return the seconds of which nothing is known."""
        return self.held - self.observed

    def shares(self) -> tuple[str, str, str]:
        """Return how much of the time was at work, idle, and not observed."""
        busy, idle, unseen = [
            format_percent(seconds / self.held if self.held > 0 else None)
            for seconds in (self.busy, self.idle, self.unobserved)
        ]
        return (busy, idle, unseen) if self.observed > 0 else ("-", "-", unseen)


@dataclass(frozen=True)
class ReportedDevice:
    """One device of a claim; joules, bytes. None is not known.

    Of a share `part` is `2/4`, and the times are those of such a part of its card.
    """

    id: str
    times: GpuTimes
    index: int | None
    minor: int | None
    model: str
    memory: int | None
    memory_peak: int | None
    energy: float | None
    foreign: float | None
    shape: UseTimeline | None
    timed: bool  # False: for how long it was held is not known
    part: str

    @property
    def name(self) -> str:
        """Return what names it on its node: index, and the instance or the share."""
        instance = self.id.partition(".gi")[2]
        part = f" ({self.part})" if self.part else ""
        if self.index is None:
            return f"{self.id}{part}"
        return f"{self.index}:gi{instance}" if instance else f"{self.index}{part}"


@dataclass(frozen=True)
class ReportedClaim:
    """All devices that one job held on one node; `ended` is None while it stands.

    `elapsed` is for how many seconds, None where the record does not say.
    Of that host the job used `cpu_seconds` of its `cpus`, and `host_memory_peak` bytes of its
    `host_memory`, as far as its cgroup told.
    """

    token: str
    scheduler: str
    cluster: str
    node: str
    job_id: str
    task_id: str
    restart: int
    user: str
    uid: int
    queue: str
    begun: float
    ended: float | None
    elapsed: float | None
    how: str
    proof: str
    cpu_seconds: float | None
    cpus: int | None
    host_memory_peak: int | None
    host_memory: int | None
    cards: tuple[ReportedDevice, ...]
    record: Mapping[str, Any]

    @property
    def held(self) -> float:
        """Return for how many seconds its longest device was held; of a share all of them."""
        if self.elapsed is not None:
            return self.elapsed
        return max([card.times.held for card in self.cards], default=0.0)

    @property
    def times(self) -> GpuTimes:
        """Return the sum of its devices."""
        return sum_times(self.cards)

    @property
    def timed(self) -> bool:
        """Return whether it is known for how long anything was held."""
        return self.elapsed is not None or any(card.timed for card in self.cards)

    @property
    def owner(self) -> Owner:
        """Return what names it to people."""
        keys = ("scheduler", "job_id", "task_id", "user")
        return Owner(**{key: getattr(self, key) for key in keys})

    @property
    def job(self) -> str:
        """Return how people name the job."""
        return self.owner.job()


def parse_reported_claim(found: object) -> ReportedClaim:
    """Return the claim that a record tells of; raise ValueError where it tells of none."""
    record = Record(found)
    if record.get("version") != VERSION:
        raise ValueError(f"a record of version {str(record.get('version'))[:20]}")
    begun, shapes = record.number("claimed_at"), Record(record.get("shapes", {}))
    if begun is None or not (record.text("token") and record.text("job_id")):
        raise ValueError("a record without token, job or time")
    cards = [parse_reported_device(Record(one), shapes) for one in record.array("devices")]
    keys = ("token", "scheduler", "cluster", "node", "job_id", "task_id", "user", "queue")
    return ReportedClaim(
        **{key: record.text(key) for key in (*keys, "how", "proof")},
        restart=record.count("restart") or 0,
        uid=record.count("uid") or 0,
        begun=begun,
        ended=record.number("released_at"),
        elapsed=record.number("held_seconds"),
        cpu_seconds=record.number("cpu_seconds"),
        cpus=record.count("cpus"),
        host_memory_peak=record.count("host_memory_peak_bytes"),
        host_memory=record.count("host_memory_bytes"),
        cards=tuple(merge_places(cards)),
        record=record.fields,
    )


def parse_reported_device(record: Record, shapes: Record) -> ReportedDevice:
    """Return one device of a record; raise ValueError."""
    name, held = record.text("id"), record.number("held_seconds")
    if not name:
        raise ValueError("a device without id")
    times = GpuTimes()
    observed = record.number("observed_seconds") or 0.0
    times.add(held or 0.0, record.number("busy_seconds") if observed else None, observed)
    return ReportedDevice(
        id=name,
        times=times,
        index=record.count("index"),
        minor=record.count("minor"),
        model=record.text("model"),
        memory=record.count("memory_bytes"),
        memory_peak=record.count("memory_peak_bytes"),
        energy=record.number("energy_joules"),
        foreign=record.number("foreign_seconds"),
        shape=parse_use_timeline(shapes.get(name)),
        timed=held is not None,
        part=f"1/{record.count('places') or '?'}" if record.get("share") else "",
    )


def merge_places(cards: Sequence[ReportedDevice]) -> list[ReportedDevice]:
    """Return the devices; the places of a claim on one card are one of them.

    All processes of the claim use each of its places: only the times add up.
    """
    found: dict[tuple[str, str], ReportedDevice] = {}
    for number, card in enumerate(cards):
        _, _, places = card.part.partition("/")
        key = (card.id, places or str(-number))
        first = found.get(key)
        if first is None:
            found[key] = card
            continue
        count = int(first.part.partition("/")[0]) + 1
        found[key] = replace(
            first,
            times=sum_times((first, card)),
            memory_peak=max(first.memory_peak or 0, card.memory_peak or 0) or None,
            part=f"{count}/{places}",
        )
    return list(found.values())


def sum_times(cards: Iterable[ReportedDevice]) -> GpuTimes:
    """Return the times of some devices together."""
    found = GpuTimes(claims=1)
    for card in cards:
        found.add(card.times.held, card.times.busy, card.times.observed)
    return found


def parse_use_timeline(found: object) -> UseTimeline | None:
    """Return use over time, None where it makes no sense."""
    record = Record(found if isinstance(found, dict) else {})
    width = record.number("width")
    if width is None or width < 1:
        return None
    use = [as_number(value) for value in record.array("use")[:BUCKETS]]
    return UseTimeline(
        width, tuple([None if one is None else min(1.0, one / MILLI) for one in use])
    )


class Record:
    """A JSON object that anybody may have written; raises ValueError for anything else."""

    def __init__(self, found: object) -> None:
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
        self.fields = cast("dict[str, Any]", found)

    def get(self, key: str, otherwise: object = None) -> Any:
        """Return a value as it is."""
        return self.fields.get(key, otherwise)

    def number(self, key: str) -> float | None:
        """Return a number from 0."""
        return as_number(self.get(key))

    def count(self, key: str) -> int | None:
        """Return a whole number from 0."""
        value = self.get(key)
        return value if isinstance(value, int) and as_number(value) is not None else None

    def text(self, key: str) -> str:
        """Return a text as it may be shown."""
        value = self.get(key)
        return one_line(value[:LONGEST]) if isinstance(value, str) else ""

    def array(self, key: str) -> Sequence[object]:
        """Return a JSON array, of no more values than a claim has devices, or nothing."""
        value = self.get(key)
        return cast("list[object]", value)[:MOST_CARDS] if isinstance(value, list) else ()


def as_number(value: object) -> float | None:
    """Return a number from 0, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value <= MOST and math.isfinite(value) else None
