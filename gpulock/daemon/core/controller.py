# SPDX-License-Identifier: Apache-2.0
"""slurmctld as gpulockd asks it: one that was silent is not asked with the gate held.

A question is asked with the gate held, and a slurmctld that does not answer takes five seconds of
every job's Prolog on this node. So the question that it did not answer is put again before the
gate is taken, by a thread, and until it is answered what it would decide is unknown, and held.
"""

from __future__ import annotations

from gpulock.daemon.core.background_call import BackgroundCall
from gpulock.deadline import clock_boottime
from gpulock.errors import Refusal
from gpulock.node.settings import Settings
from gpulock.slurm.scontrol import SlurmctldClient, SlurmctldSilentError

AGAIN = 60.0  # seconds between two questions to one that is silent
PATIENCE = 1.0  # seconds that a round waits for the answer: a healthy slurmctld needs 4 ms
LONGEST = 600.0  # seconds without even a failure of ours: then it is asked at the gate again


class ControllerBackoff:
    """Not `until` then is slurmctld asked at the gate (CLOCK_BOOTTIME); kept between rounds."""

    def __init__(self) -> None:
        self.until = 0.0
        self._again = 0.0
        self._asked = 0.0
        self._job = ""
        self._asking: BackgroundCall[dict[str, str] | None] | None = None

    def start(self, now: float, job: str) -> None:
        """Note that it did not answer a question about a job."""
        self.until, self._again, self._job = now + LONGEST, now + AGAIN, job

    def clear(self) -> None:
        """Note that it answered."""
        self.until, self._asking = 0.0, None

    def probe(self, settings: Settings, now: float) -> None:
        """Ask a slurmctld that is silent again, where that is due; the gate is not held."""
        if self._asking is None:
            if now < self._again:
                return
            job, self._asked = self._job, now
            self._asking = BackgroundCall(lambda: SlurmctldClient(settings).job(job))
        if not self._asking.wait(PATIENCE):
            return
        asking, self._asking = self._asking, None
        try:
            asking.answer()
        except (Refusal, OSError) as fault:
            if not is_controller_silent(fault):
                self.clear()
                return
            self.start(now, self._job)
            self._again = self._asked + AGAIN  # how long it said nothing is no reason to wait
        else:
            self.clear()


def is_controller_silent(fault: Refusal | OSError) -> bool:
    """Return whether slurmctld said nothing at all; an odd answer about one job is none."""
    return not (isinstance(fault, SlurmctldSilentError) and fault.heard)


class BackoffControl(SlurmctldClient):
    """slurmctld, of whom nothing is asked while it is silent."""

    __slots__ = ("_spared",)

    def __init__(self, settings: Settings, silence: ControllerBackoff) -> None:
        super().__init__(settings)
        self._spared = silence

    def job(self, job: str) -> dict[str, str] | None:
        """Return what slurmctld knows of one job, None for an invalid id; raise Refusal."""
        if clock_boottime() < self._spared.until:
            raise SlurmctldSilentError("slurmctld did not answer a while ago")
        try:
            found = super().job(job)
        except Refusal as fault:
            if is_controller_silent(fault):
                self._spared.start(clock_boottime(), job)
            raise
        self._spared.clear()
        return found
