# SPDX-License-Identifier: Apache-2.0
"""Read the history: the claims that are asked for, and their sums.

A line that is no record costs itself, and is counted.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from gpulock.daemon.history.files import CHUNK, iter_history_lines, list_months
from gpulock.report.claims import (
    GpuTimes,
    ReportedClaim,
    ReportedDevice,
    parse_reported_claim,
    sum_times,
)
from gpulock.store.owner import Owner
from gpulock.text.words import format_count

FOREVER: Final = float("inf")
NO_JOBS: Final = ("process", "admin")  # whose numbers are no jobs'


class ClaimQuery(NamedTuple):
    """Which claims: those that ended `since` and before `until` (epoch), and all of the rest."""

    since: float = 0.0
    until: float = FOREVER
    user: str = ""
    job: str = ""
    task: str = ""
    scheduler: str = ""
    device: str = ""

    def fits(self, claim: Owner) -> bool:
        """Return whether a claim is of the user, job and scheduler that are asked for.

        A job's number is no process's. The first task may be the job itself, which is no array.
        """
        return (
            self.user in ("", claim.user)
            and self.job in ("", claim.job_id)
            and self.task in ("", claim.task_id or "1")
            and (self.scheduler or claim.scheduler) == claim.scheduler
            and (not self.job or bool(self.scheduler) or claim.scheduler not in NO_JOBS)
        )

    def fits_ended(self, claim: ReportedClaim) -> bool:
        """Return whether a claim is over, and all that is asked for."""
        return (
            claim.ended is not None
            and self.since <= claim.ended < self.until
            and self.device in ("", *(card.id for card in claim.cards))
            and self.fits(claim.owner)
        )


class HistoryFaults:
    """What could not be read: lines by number, files with their reason."""

    def __init__(self) -> None:
        self.lines = 0
        self.files: list[str] = []

    def as_sentences(self) -> list[str]:
        """Return it as sentences."""
        lines = f"{format_count(self.lines, 'line')} of the history cannot be read"
        return [*[lines][: self.lines], *self.files]


def find_history_claims(
    folder: str, query: ClaimQuery, faults: HistoryFaults, limit: int = 0
) -> Iterable[ReportedClaim]:
    """Return the claims that are asked for in the order of their lines; of a `limit` the last.

    No more files are read than that takes.
    """
    try:
        paths = [f"{folder}/{name}" for name in list_months(folder, query.since)]
    except OSError as fault:
        faults.files.append(f"{folder}: {fault.strerror}")
        return []
    if not limit:
        return (claim for path in paths for claim in read_claims(path, query, faults))
    found: list[ReportedClaim] = []
    while paths and len(found) < limit:
        found[:0] = deque(read_claims(paths.pop(), query, faults), limit - len(found))
    return found


def read_claims(path: str, query: ClaimQuery, faults: HistoryFaults) -> Iterator[ReportedClaim]:
    """Yield what is asked for in a file."""
    names = [json.dumps(one).encode() for one in (query.user, query.job, query.device) if one]
    try:
        with open(path, "rb", buffering=CHUNK) as file:
            for line in iter_history_lines(file):
                if all(name in line for name in names):  # else there is no need to parse it
                    claim = parse_history_line(line, faults)
                    if claim and query.fits_ended(claim):
                        yield claim
    except FileNotFoundError:
        return  # it was removed meanwhile
    except OSError as fault:
        faults.files.append(f"{path}: {fault.strerror}")


def parse_history_line(line: bytes, faults: HistoryFaults) -> ReportedClaim | None:
    """Return the claim of a line; count what is none.

    With zeros in it a power cut tore it, and its claim has another line.
    """
    try:
        return parse_reported_claim(json.loads(line))
    except (ValueError, RecursionError):
        faults.lines += 1
        return None


def sum_claims(
    claims: Iterable[ReportedClaim], by: str = "", device: str = ""
) -> dict[str, GpuTimes]:
    """Return the sums by user, queue or device, or of everything under an empty name.

    Of a `device` that was asked for, only its own time counts, not its neighbours'.
    """
    found: defaultdict[str, GpuTimes] = defaultdict(GpuTimes)
    for claim in claims:
        name = {"user": claim.owner.user, "queue": claim.owner.queue}.get(by, "")
        parts: defaultdict[str, list[ReportedDevice]] = defaultdict(list)
        for card in claim.cards:
            if device in ("", card.id):
                parts[card.id if by == "device" else name].append(card)
        for key, cards in parts.items():
            found[key].add(sum_times(cards))
            found[key].claims += 1
    return found
