# SPDX-License-Identifier: Apache-2.0
"""Read the history: filters on bytes, sums without JSON, and JSON only for what is shown.

A line begins with what a filter and a sum ask for (gpulock.daemon.history.record), so most lines
are read no further than that. A line that is no record costs itself, and is counted.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gpulock.daemon.history.files import (
    DAMAGED,
    DAY,
    NAME,
    iter_line_spans,
    list_history_files,
    open_history_file,
)
from gpulock.report.claims import ReportedClaim, parse_reported_claim

TAIL: Final = 1 << 18  # bytes of the history: 100 claims and more
_REAL: Final = rb"[0-9.]+"
_TEXT: Final = rb'("[^"\\]*(?:\\.[^"\\]*)*")'


def _number_fields_pattern(*keys: str) -> bytes:
    """Return the pattern of a run of keys with numbers, each a group."""
    return b",".join([b'"%s":(%s|null)' % (key.encode(), _REAL) for key in keys])


HEAD: Final = re.compile(
    rb'\{"version":1,"released_at":(' + _REAL + rb'),"claimed_at":(?:' + _REAL + rb"|null),"
    rb'"user":' + _TEXT + rb',"gpus":[0-9]+,'
    + _number_fields_pattern("gpu_seconds", "busy_seconds", "observed_seconds")
    + rb","
)  # fmt: skip
DEVICE: Final = re.compile(
    rb'\{"id":"([^"\\]+)",'
    + _number_fields_pattern("held_seconds", "busy_seconds", "observed_seconds")
    + rb","
)
QUEUE: Final = re.compile(rb',"queue":' + _TEXT)
NO_JOBS: Final = ("process", "admin")  # whose numbers are no jobs'
AT, USER, GPU_SECONDS, BUSY, OBSERVED = 1, 2, 3, 4, 5  # groups of HEAD


@dataclass(frozen=True)
class ClaimQuery:
    """Which claims: those that ended `since` and before `until` (epoch), and all of the rest."""

    since: float = 0.0
    until: float = float("inf")
    user: str = ""
    job: str = ""
    task: str = ""
    scheduler: str = ""
    device: str = ""
    token: str = ""

    def needles(self) -> list[bytes]:
        """Return what the line of every claim that fits has in it, the rarest first.

        In a JSON string each quote has a backslash before it, so none of these is in a text.
        """
        pairs = (
            ('"token":', self.token),
            ('"job_id":', self.job),
            ('"user":', self.user),
            ("", self.device),
            ('"task_id":', "" if self.task == "1" else self.task),  # see task_needles
            ('"scheduler":', self.scheduler),
        )
        return [f"{key}{json.dumps(value)}".encode() for key, value in pairs if value]

    def task_needles(self) -> list[bytes]:
        """Return of what the line of every claim that fits has one in it: 12.1 may be no array."""
        return [b'"task_id":"1"', b'"task_id":""'] if self.task == "1" else []

    def excluded_needles(self) -> list[bytes]:
        """Return what the line of no claim that fits has in it: see `of_scheduler`."""
        if not self.job or self.scheduler:
            return []
        return [f'"scheduler":"{name}"'.encode() for name in NO_JOBS]

    def matches_scheduler(self, scheduler: str) -> bool:
        """Return whether claims of a scheduler are asked for: a job's number is no process's."""
        if self.scheduler or not self.job:
            return self.scheduler in ("", scheduler)
        return scheduler not in NO_JOBS

    def fits(self, claim: ReportedClaim) -> bool:
        """Return whether a claim is asked for."""
        ended = claim.ended or 0.0
        named = {card.id for card in claim.cards} | {card.uuid for card in claim.cards}
        return (
            self.since <= ended < self.until
            and self.user in ("", claim.user)
            and self.job in ("", claim.job_id)
            and self.task in ("", claim.task_id or "1")
            and self.token in ("", claim.token)
            and self.matches_scheduler(claim.scheduler)
            and (not self.device or self.device in named)
        )


@dataclass
class GpuTimeSum:
    """GPU seconds held, at work and observed of some claims."""

    claims: int = 0
    held: float = 0.0
    busy: float = 0.0
    observed: float = 0.0

    def add_fields(self, held: bytes, busy: bytes, observed: bytes) -> None:
        """Add what stands in a line; what is not known adds nothing."""
        try:
            self.held += float(held)
            self.observed += float(observed)
            self.busy += float(busy)
        except ValueError:
            pass  # null: nothing is known of the rest
        self.claims += 1

    def times(self) -> tuple[float, float, float, float]:
        """Return the GPU seconds held, at work, idle, and of which nothing is known."""
        return self.held, self.busy, self.idle, self.unobserved

    @property
    def idle(self) -> float:
        """Return the observed GPU seconds in which nothing was done."""
        return max(0.0, self.observed - self.busy)

    @property
    def unobserved(self) -> float:
        """Return the GPU seconds of which nothing is known."""
        return max(0.0, self.held - self.observed)


@dataclass
class HistoryFaults:
    """What could not be read: lines that are no records, and files with their reason."""

    lines: int = 0
    files: list[str] = field(default_factory=list[str])

    def as_sentences(self) -> list[str]:
        """Return it as sentences."""
        lines = [f"{self.lines} lines of the history cannot be read"] if self.lines else []
        return [*lines, *self.files]


class HistoryMatch(NamedTuple):
    """A claim that may be asked for: where its line is, and its head."""

    data: bytes
    begin: int
    end: int
    head: re.Match[bytes]

    def line(self) -> bytes:
        """Return the line."""
        return self.data[self.begin : self.end]


def find_history_matches(
    folder: str, query: ClaimQuery, faults: HistoryFaults
) -> Iterator[HistoryMatch]:
    """Yield each claim that may be asked for, the oldest first.

    A needle may stand in another key than meant: who shows a claim asks `Query.fits`.
    """
    first, *needles = query.needles() or [b""]
    strangers, tasks = query.excluded_needles(), query.task_needles()
    since, until = query.since, query.until
    timed = since > 0 or until < float("inf")
    head = HEAD.match
    for data, begin, end in scan_history_lines(folder, since, faults, first):
        if needles and not all([data.find(needle, begin, end) >= 0 for needle in needles]):
            continue
        if strangers and any([data.find(one, begin, end) >= 0 for one in strangers]):
            continue
        if tasks and not any([data.find(one, begin, end) >= 0 for one in tasks]):
            continue
        found = head(data, begin, end)
        if found is None:
            faults.lines += 1
            continue
        try:
            if not timed or since <= float(found[AT]) < until:
                yield HistoryMatch(data, begin, end, found)
        except ValueError:
            faults.lines += 1


def scan_history_lines(
    folder: str, since: float, faults: HistoryFaults, needle: bytes
) -> Iterator[tuple[bytes, int, int]]:
    """Yield where lines with the needle are, in the files that may have something since then."""
    try:
        paths = list_history_files(folder)
    except OSError as fault:
        faults.files.append(f"{folder}: {fault.strerror}")
        return
    for path, changed in paths:
        if changed < since - DAY:
            continue
        try:
            with open_history_file(path) as file:
                yield from iter_line_spans(file, needle)
        except FileNotFoundError:
            continue
        except (OSError, *DAMAGED) as fault:
            why = fault.strerror if isinstance(fault, OSError) and fault.strerror else str(fault)
            faults.files.append(f"{path}: {why}")


def find_history_claims(
    folder: str, query: ClaimQuery, faults: HistoryFaults
) -> Iterator[ReportedClaim]:
    """Yield the claims that are asked for, the oldest first."""
    for found in find_history_matches(folder, query, faults):
        claim = parse_history_line(found.line(), faults)
        if claim is not None and query.fits(claim):
            yield claim


def find_latest_claim(folder: str, query: ClaimQuery) -> ReportedClaim | None:
    """Return the last claim that is asked for among the last ones written, None for none there."""
    needles = query.needles()
    try:
        with open_history_file(f"{folder}/{NAME}") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read(TAIL).split(b"\n")[:-1]
    except OSError:
        return None
    for line in reversed(lines):
        if all([needle in line for needle in needles]):
            claim = parse_history_line(line, HistoryFaults())
            if claim is not None and query.fits(claim):
                return claim
    return None


def parse_history_line(line: bytes, faults: HistoryFaults) -> ReportedClaim | None:
    """Return the claim of a line; count what is none."""
    try:
        return parse_reported_claim(json.loads(line))
    except (ValueError, RecursionError):
        faults.lines += 1
        return None


class GpuTimeSums:
    """Sums by user, queue or device, or of everything under an empty name.

    Of a `device` that was asked for, only its own time counts, not its neighbours'.
    """

    def __init__(self, by: str = "", device: str = "") -> None:
        self._by = by
        self._device = device.encode()
        self._found: dict[bytes, GpuTimeSum] = {}

    def add(self, found: HistoryMatch) -> None:
        """Add a claim."""
        if self._by != "device" and not self._device:
            held, busy, observed = found.head.group(GPU_SECONDS, BUSY, OBSERVED)
            self._of(self._key(found)).add_fields(held, busy, observed)
            return
        end = found.data.find(b',"shapes":', found.begin, found.end)
        end = end if end > 0 else found.end
        for name, held, busy, observed in DEVICE.findall(found.data, found.head.end(), end):
            if self._device in (b"", name):
                key = name if self._by == "device" else self._key(found)
                self._of(key).add_fields(held, busy, observed)

    def sums_by_name(self) -> dict[str, GpuTimeSum]:
        """Return the sums by name."""
        return {
            json.loads(key) if key.startswith(b'"') else key.decode(): one
            for key, one in self._found.items()
        }

    def _key(self, found: HistoryMatch) -> bytes:
        if self._by == "user":
            return found.head[USER]
        if self._by == "queue":
            queue = QUEUE.search(found.data, found.head.end(), found.end)
            return queue[1] if queue else b""
        return b""

    def _of(self, key: bytes) -> GpuTimeSum:
        known = self._found.get(key)
        if known is None:
            known = self._found[key] = GpuTimeSum()
        return known
