# SPDX-License-Identifier: Apache-2.0
"""A claim as reports see it, read from a record of the history; pure.

Root wrote the record, of values that it believed (`daemon.history.record`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpulock.daemon.history.record import VERSION
from gpulock.node.sample import MILLI
from gpulock.store.owner import Owner
from gpulock.text.words import format_percent

Fields = dict[str, Any]  # of a JSON object


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
    model: str
    memory: int | None
    memory_peak: int | None
    energy: float | None
    foreign: float | None
    shape: UseTimeline | None
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

    It was `held` for so many seconds; `timed` says whether that is known.
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
    held: float
    timed: bool
    how: str
    proof: str
    cards: tuple[ReportedDevice, ...]
    record: Fields

    @property
    def times(self) -> GpuTimes:
        """Return the sum of its devices."""
        return sum_times(self.cards)

    @property
    def owner(self) -> Owner:
        """Return what names it to people."""
        keys = ("scheduler", "job_id", "task_id", "user")
        return Owner(**{key: getattr(self, key) for key in keys})

    @property
    def job(self) -> str:
        """Return how people name the job."""
        return self.owner.job()


def parse_reported_claim(record: Fields) -> ReportedClaim:
    """Return the claim that a record of the history tells of; raise ValueError for no such one."""
    try:
        if record["version"] != VERSION:
            raise ValueError(f"a record of version {record['version']!s:.20}")
        shapes = record["shapes"]
        cards = [make_reported_device(one, shapes.get(one["id"])) for one in record["devices"]]
        keys = ("scheduler", "cluster", "node", "task_id", "user", "queue", "how", "proof")
        return ReportedClaim(
            **{key: record.get(key) or "" for key in keys},
            token=record["token"],
            job_id=record["job_id"],
            restart=record.get("restart") or 0,
            uid=record["uid"],
            begun=float(record["claimed_at"]),
            ended=record.get("released_at"),
            held=record["held_seconds"] or 0.0,
            timed=record["held_seconds"] is not None,
            cards=tuple(merge_places(cards)),
            record=record,
        )
    except (LookupError, TypeError, AttributeError, ArithmeticError) as fault:
        raise ValueError("no record of a claim") from fault


def make_reported_device(record: Fields, shape: Fields | None) -> ReportedDevice:
    """Return one device of a record."""
    times, observed = GpuTimes(), record.get("observed_seconds") or 0.0
    busy = record.get("busy_seconds") if observed else None
    times.add(record["held_seconds"] or 0.0, busy, observed)
    return ReportedDevice(
        id=record["id"],
        times=times,
        index=record.get("index"),
        model=record.get("model") or "",
        memory=record.get("memory_bytes"),
        memory_peak=record.get("memory_peak_bytes"),
        energy=record.get("energy_joules"),
        foreign=record.get("foreign_seconds"),
        shape=make_use_timeline(shape) if shape else None,
        part=f"1/{record.get('places') or '?'}" if record.get("share") else "",
    )


def make_use_timeline(shape: Fields) -> UseTimeline:
    """Return use over time, of thousandths the share."""
    use = tuple([None if one is None else one / MILLI for one in shape["use"]])
    return UseTimeline(float(shape["width"]), use)


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
