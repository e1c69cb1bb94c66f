# SPDX-License-Identifier: Apache-2.0
"""A claim as reports see it, read from a record of the history or of REPORT_DIR; pure.

A record may come from a file that anybody wrote: a value that is not of its type or cannot be
is not known, and no text keeps a control character.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from gpulock.daemon.history.record import VERSION
from gpulock.errors import one_line
from gpulock.node.sample import BUCKETS
from gpulock.store.owner import Owner

MOST_CARDS: Final = 256  # devices of one claim
MOST: Final = 1e15  # of any number: beyond, it is garbage
LONGEST: Final = 256  # characters of a text
MILLI: Final = 1000


@dataclass(frozen=True)
class UseTimeline:
    """Use over time: the share at work in each bucket of `width` seconds, None: not observed."""

    width: float
    use: tuple[float | None, ...]


@dataclass(frozen=True)
class ReportedDevice:
    """One device of a claim; seconds, joules, bytes, epoch. None is not known.

    Of a share `part` is `2/4`, and the seconds are those of such a part of its card.
    """

    id: str
    held: float
    busy: float | None
    observed: float
    index: int | None = None
    minor: int | None = None
    uuid: str = ""
    model: str = ""
    profile: str = ""
    memory: int | None = None
    memory_peak: int | None = None
    energy: float | None = None
    last_busy: float | None = None
    foreign: float | None = None
    shape: UseTimeline | None = None
    timed: bool = True  # False: for how long it was held is not known, and `held` is 0
    part: str = ""

    @property
    def utilization(self) -> float | None:
        """Return the share of the observed time at work, None where nothing was observed."""
        return self.busy / self.observed if self.busy is not None and self.observed > 0 else None

    @property
    def idle(self) -> float:
        """Return the observed seconds in which it did nothing."""
        return max(0.0, self.observed - self.busy) if self.busy is not None else 0.0

    @property
    def unobserved(self) -> float:
        """Return the seconds of which nothing is known."""
        return max(0.0, self.held - self.observed) if self.busy is not None else self.held

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
    node: str
    job_id: str
    task_id: str
    user: str
    uid: int
    begun: float
    ended: float | None
    cards: tuple[ReportedDevice, ...]
    cluster: str = ""
    queue: str = ""
    restart: int = 0
    how: str = ""
    proof: str = ""
    cpu_seconds: float | None = None
    cpus: int | None = None
    host_memory_peak: int | None = None
    host_memory: int | None = None
    elapsed: float | None = None
    record: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def held(self) -> float:
        """Return for how many seconds its longest device was held; of a share all of them."""
        if self.elapsed is not None:
            return self.elapsed
        return max([card.held for card in self.cards], default=0.0)

    @property
    def timed(self) -> bool:
        """Return whether it is known for how long anything was held."""
        return self.elapsed is not None or any(card.timed for card in self.cards)

    @property
    def job(self) -> str:
        """Return how people name the job."""
        return Owner(scheduler=self.scheduler, job_id=self.job_id, task_id=self.task_id).job()


def parse_reported_claim(record: object) -> ReportedClaim:
    """Return the claim that a record tells of; raise ValueError where it tells of none."""
    fields = as_json_object(record)
    if fields.get("version") != VERSION:
        raise ValueError(f"a record of version {str(fields.get('version'))[:20]}")
    token, begun = get_record_text(fields, "token"), get_record_number(fields, "claimed_at")
    if not token or begun is None or not get_record_text(fields, "job_id"):
        raise ValueError("a record without token, job or time")
    shapes = as_json_object(fields.get("shapes", {}))
    cards = [
        parse_reported_device(one, shapes)
        for one in as_json_array(fields.get("devices"))[:MOST_CARDS]
    ]
    keys = ("scheduler", "cluster", "node", "job_id", "task_id", "user", "queue", "how", "proof")
    return ReportedClaim(
        token=token,
        restart=get_record_count(fields, "restart") or 0,
        uid=get_record_count(fields, "uid") or 0,
        begun=begun,
        ended=get_record_number(fields, "released_at"),
        cards=tuple(merge_places(cards)),
        elapsed=get_record_number(fields, "held_seconds"),
        cpu_seconds=get_record_number(fields, "cpu_seconds"),
        cpus=get_record_count(fields, "cpus"),
        host_memory_peak=get_record_count(fields, "host_memory_peak_bytes"),
        host_memory=get_record_count(fields, "host_memory_bytes"),
        record=fields,
        **{key: get_record_text(fields, key) for key in keys},
    )


def parse_reported_device(record: object, shapes: Mapping[str, Any]) -> ReportedDevice:
    """Return one device of a record; raise ValueError."""
    fields = as_json_object(record)
    name = get_record_text(fields, "id")
    if not name:
        raise ValueError("a device without id")
    held = get_record_number(fields, "held_seconds") or 0.0
    observed = min(get_record_number(fields, "observed_seconds") or 0.0, held)
    busy = get_record_number(fields, "busy_seconds")
    return ReportedDevice(
        id=name,
        held=held,
        busy=min(busy, observed) if busy is not None and observed > 0 else None,
        observed=observed,
        index=get_record_count(fields, "index"),
        minor=get_record_count(fields, "minor"),
        uuid=get_record_text(fields, "uuid"),
        model=get_record_text(fields, "model"),
        profile=get_record_text(fields, "profile"),
        memory=get_record_count(fields, "memory_bytes"),
        memory_peak=get_record_count(fields, "memory_peak_bytes"),
        energy=get_record_number(fields, "energy_joules"),
        last_busy=get_record_number(fields, "last_busy"),
        foreign=get_record_number(fields, "foreign_seconds"),
        shape=parse_use_timeline(shapes.get(name)),
        timed=get_record_number(fields, "held_seconds") is not None,
        part=f"1/{get_record_count(fields, 'places') or '?'}" if fields.get("share") else "",
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
        busy = [one.busy for one in (first, card) if one.busy is not None]
        found[key] = replace(
            first,
            held=first.held + card.held,
            observed=first.observed + card.observed,
            busy=sum(busy) if busy else None,
            memory_peak=max(first.memory_peak or 0, card.memory_peak or 0) or None,
            part=f"{count}/{places}",
        )
    return list(found.values())


def parse_use_timeline(record: object) -> UseTimeline | None:
    """Return use over time, None where it makes no sense."""
    if not isinstance(record, dict):
        return None
    fields = as_json_object(cast(object, record))
    width = get_record_number(fields, "width")
    if width is None or width < 1:
        return None
    use = [as_valid_number(value) for value in as_json_array(fields.get("use"))[:BUCKETS]]
    return UseTimeline(
        width, tuple([None if one is None else min(1.0, one / MILLI) for one in use])
    )


def as_json_object(value: object) -> Mapping[str, Any]:
    """Return a JSON object; raise ValueError for anything else."""
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return cast("Mapping[str, Any]", value)


def as_json_array(value: object) -> Sequence[object]:
    """Return a JSON array, or nothing."""
    if isinstance(value, (list, tuple)):
        return cast("Sequence[object]", value)
    return ()


def as_valid_number(value: object) -> float | None:
    """Return a number from 0, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value <= MOST and math.isfinite(value) else None


def get_record_number(fields: Mapping[str, Any], key: str) -> float | None:
    """Return a number from 0 of a record."""
    return as_valid_number(fields.get(key))


def get_record_count(fields: Mapping[str, Any], key: str) -> int | None:
    """Return a whole number from 0 of a record."""
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= MOST else None


def get_record_text(fields: Mapping[str, Any], key: str) -> str:
    """Return a text of a record as it may be shown."""
    value = fields.get(key)
    return one_line(value[:LONGEST]) if isinstance(value, str) else ""
