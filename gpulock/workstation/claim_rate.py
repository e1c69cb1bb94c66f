# SPDX-License-Identifier: Apache-2.0
"""How many claims a user may make: each is a line of the history, which others' lines are in too.

Without a limit a loop of claims and releases writes 2 GB a day, and rotates the history away.
"""

from __future__ import annotations

BURST = 1000  # claims at once
PERIOD = 10.0  # seconds a claim in the long run


class ClaimRate:
    """When each user may claim next; times are CLOCK_BOOTTIME seconds."""

    def __init__(self) -> None:
        self._used_until: dict[int, float] = {}  # a claim takes a PERIOD of its user's time

    def count_claim(self, uid: int, now: float) -> None:
        """Note that a user was granted a claim."""
        self._used_until = {one: until for one, until in self._used_until.items() if until > now}
        self._used_until[uid] = self._used_until.get(uid, now) + PERIOD

    def delay(self, uid: int, now: float) -> float:
        """Return for how many seconds a user's next claim must wait, 0 where it need not."""
        return max(0.0, self._used_until.get(uid, now) - BURST * PERIOD - now + PERIOD)
