# SPDX-License-Identifier: Apache-2.0
"""Which processes are what a Slurm job left behind: those in its cgroup.

Hot, loaded by an Epilog where LEFTOVER_PROCESSES is not off. Where Slurm keeps no cgroup
(proctrack/linuxproc, pgid) they are recognised by the environment that slurmstepd gave them, and
must be the user's own.
"""

from gpulock.alloc.process_scan import ProcessScan
from gpulock.slurm.steps import SlurmSteps
from gpulock.store.locks import Lock


class SlurmLeftoverFinder:
    """Find them by what `Steps` knows."""

    __slots__ = ("_steps",)

    def __init__(self, steps: SlurmSteps) -> None:
        self._steps = steps

    def __call__(self, lock: Lock, scan: ProcessScan) -> dict[int, str]:
        """Return pid -> why."""
        record = lock.owner
        assert record is not None
        if self._steps.has_cgroup(record, scan):
            pids = [pid for pid in self._steps.members(record, scan) if pid > 0]
            return dict.fromkeys(pids, "in the job's cgroup")
        # not by the leader's id, which the leader's processes have, and its components' too
        own = record.copy(het_leader="")
        return dict.fromkeys(self._steps.find_by_environ(own, scan), "started as the job's")
