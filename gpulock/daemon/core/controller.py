# SPDX-License-Identifier: Apache-2.0
"""slurmctld as gpulockd asks it: one that was silent is not asked with the gate held.

A question is asked with the gate held, and a slurmctld that does not answer takes SLURM_TIMEOUT of
every job's Prolog on this node. So the question that it did not answer is put again before the
gate is taken, by a thread, and until it is answered what it would decide is unknown, and held.
"""

from __future__ import annotations

from gpulock.daemon.core.background_call import Asking
from gpulock.deadline import boottime
from gpulock.errors import Refusal
from gpulock.node.settings import Settings
from gpulock.slurm.scontrol import Control, SilentError

AGAIN = 60.0  # seconds between two questions to one that is silent
PATIENCE = 1.0  # seconds that a round waits for the answer: a healthy slurmctld needs 4 ms
LONGEST = 600.0  # seconds without even a failure of ours: then it is asked at the gate again


class Silence:
    """Until when slurmctld is not asked at the gate (CLOCK_BOOTTIME); kept from round to round."""

    def __init__(self) -> None:
        self._until = 0.0
        self._again = 0.0
        self._asked = 0.0
        self._job = ""
        self._asking: Asking[dict[str, str] | None] | None = None

    def lasts(self, now: float) -> bool:
        """Return whether it is not to be asked at the gate."""
        return now < self._until

    def begins(self, now: float, job: str) -> None:
        """Note that it did not answer a question about a job."""
        self._until, self._again, self._job = now + LONGEST, now + AGAIN, job

    def ends(self) -> None:
        """Note that it answered."""
        self._until, self._asking = 0.0, None

    def listen(self, settings: Settings, now: float) -> None:
        """Ask a slurmctld that is silent again, where that is due; the gate is not held."""
        if not self.lasts(now):
            return
        if self._asking is None:
            if now < self._again:
                return
            job, self._asked = self._job, now
            self._asking = Asking(lambda: Control(settings).job(job))
        if not self._asking.wait(PATIENCE):
            return
        asking, self._asking = self._asking, None
        try:
            asking.answer()
        except (Refusal, OSError) as fault:
            if not is_silence(fault):
                self.ends()
                return
            self.begins(now, self._job)
            self._again = self._asked + AGAIN  # how long it said nothing is no reason to wait
        else:
            self.ends()


def is_silence(fault: Refusal | OSError) -> bool:
    """Return whether slurmctld said nothing at all; an odd answer about one job is none."""
    return not (isinstance(fault, SilentError) and fault.heard)


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
        except Refusal as fault:
            if is_silence(fault):
                self._spared.begins(boottime(), job)
            raise
        self._spared.ends()
        return found
