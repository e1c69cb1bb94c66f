# SPDX-License-Identifier: Apache-2.0
"""How much each user may have of what all share, as time goes by."""

from __future__ import annotations


class Allowance:
    """What users took, in seconds, which time pays off; a user may be `ahead` of it by so many.

    Times are CLOCK_BOOTTIME seconds.
    """

    def __init__(self, ahead: float = 0.0) -> None:
        self._ahead = ahead
        self._paid_off: dict[int, float] = {}

    def charge(self, uid: int, seconds: float, now: float) -> None:
        """Note that a user took something."""
        self._paid_off = {one: at for one, at in self._paid_off.items() if at > now}
        self._paid_off[uid] = self._paid_off.get(uid, now) + seconds

    def due(self, uid: int) -> float:
        """Return from when on a user may take more."""
        return self._paid_off.get(uid, 0.0) - self._ahead
