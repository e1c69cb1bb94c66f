# SPDX-License-Identifier: Apache-2.0
"""slurmctld as gpulockd asks it: one that was silent is left alone for a minute.

A question is asked with the gate held, and a slurmctld that does not answer takes five seconds of
every hook that waits there. Meanwhile what it would decide is unknown, and held.
"""

from __future__ import annotations

from gpulock.deadline import clock_boottime
from gpulock.errors import Refusal
from gpulock.node.settings import Settings
from gpulock.slurm.scontrol import SlurmctldClient, SlurmctldSilentError

AGAIN = 60.0  # seconds between two questions to one that is silent


class ControllerSilence:
    """Not `until` then is slurmctld asked (CLOCK_BOOTTIME); kept between rounds."""

    def __init__(self) -> None:
        self.until = 0.0


class BackoffControl(SlurmctldClient):
    """slurmctld, of whom nothing is asked while it is silent."""

    __slots__ = ("_silence",)

    def __init__(self, settings: Settings, silence: ControllerSilence) -> None:
        super().__init__(settings)
        self._silence = silence

    def job(self, job: str) -> dict[str, str] | None:
        """Return what slurmctld knows of one job, None for an invalid id; raise Refusal.

        An odd answer about one job is no silence.
        """
        if clock_boottime() < self._silence.until:
            raise SlurmctldSilentError("slurmctld did not answer a while ago")
        try:
            return super().job(job)
        except Refusal as fault:
            if not (isinstance(fault, SlurmctldSilentError) and fault.heard):
                self._silence.until = clock_boottime() + AGAIN
            raise
