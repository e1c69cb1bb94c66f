# SPDX-License-Identifier: Apache-2.0
"""Whether a Slurm job is alive on this node (docs/facts/slurm.md, whether a job is alive).

Hot, loaded when a lock must be judged. A hook judges no other job of this boot: between a
Prolog and its first step, and between the last step and its Epilog, nothing of a living job is to
be seen. A reconcile does, and asks slurmctld where the node alone does not prove it.
"""

from gpulock.alloc.process_scan import ProcessScan
from gpulock.errors import Refusal
from gpulock.slurm.steps import SlurmSteps
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner
from gpulock.store.verdicts import ALIVE, DEAD, SLURMCTLD, STEPS, UNKNOWN, Verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulock.alloc.job_processes import JobProcesses
    from gpulock.slurm.scontrol import SlurmctldClient

# of a later run; while a job is COMPLETING its epilogs are to run, and the restart counts already
NEXT_RUN = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED")


def hook_verdict(lock: Lock, *_: object) -> Verdict:
    """Judge for a hook: only what its own Epilog gave up may be reaped, behind the last guard."""
    assert lock.owner is not None
    if lock.owner.draining:
        return Verdict(ALIVE, "released by its epilog, processes were left")
    return Verdict(UNKNOWN, "a Slurm job of this boot: only gpulockd or gpulock reap judges it")


class SlurmJobRule:
    """Judge for a reconcile."""

    def __init__(self, steps: SlurmSteps, control: "SlurmctldClient") -> None:
        self._steps = steps
        self._control = control

    def __call__(
        self, lock: Lock, scan: ProcessScan, job_processes: "Callable[[Lock], JobProcesses]"
    ) -> Verdict:
        """Return the verdict on a Slurm lock of this boot."""
        record = lock.owner
        assert record is not None
        if record.draining:
            return hook_verdict(lock)
        seen = self._on_node(record, scan)
        if seen is not None:
            return seen
        job = job_processes(lock)
        if job.reason():
            return Verdict(ALIVE if job.pids else UNKNOWN, job.reason())
        try:
            return judge_slurmctld_answer(self._control.job(record.job_id), record)
        except Refusal as silent:
            if not lock.seen:
                return Verdict(UNKNOWN, f"no step of it was ever seen here, and {silent.why}")
            if not self._steps.is_slurmd_seen(scan):
                return Verdict(UNKNOWN, f"slurmd is not visible, and {silent.why}")
        return Verdict(DEAD, "its steps, seen before, are gone", STEPS)

    def _on_node(self, record: Owner, scan: ProcessScan) -> "Verdict | None":
        """Return what runs of the job here, for which root's daemons stand, None where nothing."""
        daemons = self._steps.daemons(scan)
        mine = daemons.get(record.job_id, {})
        for pid, step in mine.items():
            return Verdict(ALIVE, f"step daemon {pid} ({step}) runs")
        for pid in daemons.get("", {}):
            return Verdict(UNKNOWN, f"step daemon {pid} may be the job's: its title tells none")
        return None


def judge_slurmctld_answer(answer: "dict[str, str] | None", record: Owner) -> Verdict:
    """Return the verdict by slurmctld's answer: only a clear end of this very run is one."""
    from gpulock.slurm.scontrol import OVER, is_later_run, slurm_job_uid

    if answer is None:
        what = f"slurmctld knows no job {record.job_id}, no process of it is here"
        return Verdict(DEAD, what, SLURMCTLD)
    if slurm_job_uid(answer) < 0 or not answer["State"]:
        return Verdict(UNKNOWN, "slurmctld's answer cannot be read")
    if slurm_job_uid(answer) != record.uid:
        what = f"slurmctld gave its id to another user's job, uid {slurm_job_uid(answer)}"
        return Verdict(DEAD, what, SLURMCTLD)
    if answer["State"] in OVER:
        what = f"slurmctld says {answer['State']}, no process of it is here"
        return Verdict(DEAD, what, SLURMCTLD)
    if is_later_run(answer, record.restart) and answer["State"] in NEXT_RUN:
        what = f"slurmctld says requeued (restart {answer['Restarts']}), no process of it is here"
        return Verdict(DEAD, what, SLURMCTLD)
    return Verdict(ALIVE, f"slurmctld says {answer['State']}")
