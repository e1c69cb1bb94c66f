# SPDX-License-Identifier: Apache-2.0
"""slurmctld as gpulockd asks it: one that was silent is left alone for a while.

A question is asked with the gate held, and a slurmctld that does not answer takes SLURM_TIMEOUT of
every job's Prolog on this node. Until it is asked again what it would decide is unknown, and held.
"""

from __future__ import annotations

from gpulock.deadline import boottime
from gpulock.refusal import Refusal
from gpulock.settings import Settings
from gpulock.slurm.scontrol import Control, SilentError

FIRST, LONGEST = 60.0, 600.0  # seconds; doubled each time that it stays silent


class Silence:
    """Until when slurmctld is not asked (CLOCK_BOOTTIME seconds); kept from round to round."""

    def __init__(self) -> None:
        self._until = 0.0
        self._pause = FIRST

    def lasts(self, now: float) -> bool:
        """Return whether it is too early to ask again."""
        return now < self._until

    def begins(self, now: float) -> None:
        """Note that it did not answer."""
        self._until = now + self._pause
        self._pause = min(self._pause * 2, LONGEST)

    def ends(self) -> None:
        """Note that it answered."""
        self._until, self._pause = 0.0, FIRST


class SparingControl(Control):
    """slurmctld, of whom nothing is asked while it is silent."""

    __slots__ = ("_spared",)

    def __init__(self, settings: Settings, silence: Silence) -> None:
        super().__init__(settings)
        self._spared = silence

    def job(self, job: str) -> dict[str, str] | None:
        """Return what slurmctld knows of one job, None for an invalid id; raise Refusal."""
        if self._spared.lasts(boottime()):
            raise SilentError("slurmctld did not answer a while ago")
        try:
            found = super().job(job)
        except Refusal:
            self._spared.begins(boottime())
            raise
        self._spared.ends()
        return found
