# SPDX-License-Identifier: Apache-2.0
"""Log lines for faults and recoveries: one for each change, not one a second. Pure.

A metric says that something failed; the log line says why.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpulock.errors import one_line

QUIET = 30.0  # seconds between two lines on one subject: what comes and goes does not flood
LONGEST = 300  # characters of a reason that are shown


class FaultJournal:
    """The last line about each subject, and when it was logged."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}
        self._at: dict[str, float] = {}

    def lines(self, faults: Mapping[str, str], now: float) -> list[str]:
        """Return what is new; `faults` has the reason of each subject that fails now.

        `now` is in seconds, of any clock that does not run back.
        """
        found: list[str] = []
        for subject in sorted({*faults, *self._told}):
            fault, told = faults.get(subject, ""), self._told.get(subject, "")
            if fault == told or now - self._at.get(subject, -QUIET) < QUIET:
                continue
            self._at[subject] = now
            if fault:
                self._told[subject] = fault
                found.append(f"{subject}: {one_line(fault)[:LONGEST]}")
            else:
                del self._told[subject]
                found.append(f"{subject}: recovered")
        return found
