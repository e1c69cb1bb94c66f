# SPDX-License-Identifier: Apache-2.0
"""A claim as reports see it, read from a record of the history or of REPORT_DIR; pure.

A record may come from a file that anybody wrote: a value that is not of its type or cannot be
is not known, and no text keeps a control character.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from gpulock.daemon.history.record import VERSION
from gpulock.errors import one_line
from gpulock.node.sample import BUCKETS, MILLI
from gpulock.store.owner import Owner
from gpulock.text.words import format_percent

MOST_CARDS: Final = 256  # devices of one claim
LARGEST: Final = 1e15  # number: beyond, it is garbage
LONGEST: Final = 256  # characters of a text

Fields = dict[str, Any]  # of a JSON object
Kinds = Mapping[str, Callable[[object], Any]]  # of its values, by key


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
    cards: tuple[ReportedDevice, ...]
    record: Fields

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


def check_record(found: object) -> Fields:
    """Return what is known in a record of a claim, as it may be shown; raise ValueError."""
    told = as_object(found)
    if told.get("version") != VERSION:
        raise ValueError(f"a record of version {str(told.get('version'))[:20]}")
    record = check_fields(told, CLAIM_FIELDS)
    if not (record.get("token") and record.get("job_id")):
        raise ValueError("a record without token or job")
    if record.get("claimed_at") is None or record.get("uid") is None:
        raise ValueError("a record without time or user")
    found = as_array(told.get("devices"))
    devices = [check_fields(as_object(one), DEVICE_FIELDS) for one in found]
    if not all(one.get("id") for one in devices):
        raise ValueError("a device without id")
    shapes = told.get("shapes")
    drawn = shapes if isinstance(shapes, dict) else {}
    drawn = {name: check_shape(drawn[name]) for one in devices if (name := one["id"]) in drawn}
    return {"version": VERSION, **record, "devices": devices, "shapes": drawn}


def parse_reported_claim(found: object) -> ReportedClaim:
    """Return the claim that a record tells of; raise ValueError where it tells of none."""
    record = check_record(found)
    shapes = record["shapes"]
    cards = [make_reported_device(one, shapes.get(one["id"])) for one in record["devices"]]
    keys = ("token", "scheduler", "cluster", "node", "job_id", "task_id", "user", "queue")
    return ReportedClaim(
        **{key: record.get(key) or "" for key in (*keys, "how", "proof")},
        restart=record.get("restart") or 0,
        uid=record["uid"],
        begun=record["claimed_at"],
        ended=record.get("released_at"),
        elapsed=record.get("held_seconds"),
        cards=tuple(merge_places(cards)),
        record=cast("Fields", found),
    )


def make_reported_device(record: Fields, shape: Fields | None) -> ReportedDevice:
    """Return one device of a checked record."""
    held, times = record.get("held_seconds"), GpuTimes()
    observed = record.get("observed_seconds") or 0.0
    times.add(held or 0.0, record.get("busy_seconds") if observed else None, observed)
    return ReportedDevice(
        id=record["id"],
        times=times,
        index=record.get("index"),
        minor=record.get("minor"),
        model=record.get("model") or "",
        memory=record.get("memory_bytes"),
        memory_peak=record.get("memory_peak_bytes"),
        energy=record.get("energy_joules"),
        foreign=record.get("foreign_seconds"),
        shape=make_use_timeline(shape),
        timed=held is not None,
        part=f"1/{record.get('places') or '?'}" if record.get("share") else "",
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


def make_use_timeline(shape: Fields | None) -> UseTimeline | None:
    """Return use over time, None where it makes no sense."""
    if shape is None or (shape.get("width") or 0) < 1:
        return None
    use = [None if one is None else min(1.0, one / MILLI) for one in shape["use"]]
    return UseTimeline(shape["width"], tuple(use))


def as_object(found: object) -> Fields:
    """Return a JSON object; raise ValueError for anything else."""
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return cast("Fields", found)


def as_array(found: object) -> list[object]:
    """Return a JSON array, of no more values than a claim has devices, or nothing."""
    return cast("list[object]", found)[:MOST_CARDS] if isinstance(found, list) else []


def as_number(value: object) -> float | None:
    """Return a number from 0, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if 0 <= value <= LARGEST and math.isfinite(value) else None


def as_count(value: object) -> int | None:
    """Return a whole number from 0, None for anything else."""
    return value if isinstance(value, int) and as_number(value) is not None else None


def as_text(value: object) -> str | None:
    """Return a text as it may be shown, None for anything else."""
    return one_line(value[:LONGEST]) if isinstance(value, str) else None


def check_fields(found: Fields, kinds: Kinds) -> Fields:
    """Return the fields that are known; a value that is not of its kind is null."""
    return {key: kinds[key](value) for key, value in found.items() if key in kinds}


def check_shape(found: object) -> Fields:
    """Return a shape, of no more buckets than there are."""
    fields = found if isinstance(found, dict) else {}
    use = [as_number(value) for value in as_array(fields.get("use"))[:BUCKETS]]
    return {"width": as_number(fields.get("width")), "use": use}


CLAIM_FIELDS: Final[Kinds] = {
    **dict.fromkeys(("token", "user", "scheduler", "job_id", "task_id", "queue"), as_text),
    **dict.fromkeys(("cluster", "node", "het_leader", "comment", "how", "proof"), as_text),
    **dict.fromkeys(("released_at", "claimed_at", "held_seconds", "gpu_seconds"), as_number),
    **dict.fromkeys(("busy_seconds", "observed_seconds", "utilization"), as_number),
    **dict.fromkeys(("energy_joules", "last_busy", "foreign_seconds"), as_number),
    **dict.fromkeys(("gpus", "restart", "uid", "memory_peak_bytes"), as_count),
}
DEVICE_FIELDS: Final[Kinds] = {
    **dict.fromkeys(("id", "uuid", "model", "profile", "how"), as_text),
    **dict.fromkeys(("held_seconds", "busy_seconds", "observed_seconds"), as_number),
    **dict.fromkeys(("utilization", "energy_joules", "last_busy", "foreign_seconds"), as_number),
    **dict.fromkeys(("index", "minor", "memory_bytes", "memory_peak_bytes", "places"), as_count),
    "share": bool,
}
