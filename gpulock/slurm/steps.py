# SPDX-License-Identifier: Apache-2.0
"""What of a Slurm job is on this node: its step daemons, its cgroup.

Hot. A step daemon is root's process `slurmstepd` with `slurmstepd: [JOB.STEP]` in its command
line; the child that becomes a task has the same title but is the user's (docs/facts/slurm.md).
Nothing in it names the node, so where several slurmd share a machine a step of any of them keeps
the job alive.
"""

import os

from gpulock.alloc.job_processes import JobProcesses
from gpulock.alloc.process_reader import is_root_program
from gpulock.alloc.process_scan import ProcessScan
from gpulock.errors import UNKNOWN, Refusal
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.slurm.call import parse_stepd_title
from gpulock.slurm.job_cgroup import (
    find_job_cgroups,
    is_in_job_cgroup,
    list_slurm_cgroup_pids,
    why_in_slurm_cgroup,
)
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner

STEPD, SLURMD = "slurmstepd", "slurmd"
EXTERN = "extern"  # the step of PrologFlags=Contain: there for the whole of an allocation
PLACEHOLDER = ([b"100000000", b""], [b"infinity", b""])  # slurmstepd/mgr.c
CLIENTS = ("srun", "salloc", "sbatch")  # wait for a while when their job is gone, and hold nothing
# `slurmstepd infinity` keeps the scope of cgroup v2 for ever, `getenv` reads a login environment
NO_STEP = ([b"infinity"], [b"getenv"])


class SlurmSteps:
    """Who is there of which job."""

    def __init__(self, settings: Settings) -> None:
        self._cgroup = f"{settings.sys_root}/fs/cgroup"
        self._uid = settings.root_uid()

    def owns(self, pid: int, record: Owner, scan: ProcessScan) -> bool:
        """Return whether a process is of a job: where it has no cgroup, by the environment too.

        Raises OSError or ValueError where it cannot be seen.
        """
        if is_slurm_job_process(pid, record, scan):
            return True
        # where it has no cgroup under a name that is known: it may have another
        folders, _ = find_job_cgroups(self._cgroup, record, scan.proc)
        if any([os.path.isdir(folder) for folder in folders]):
            return False
        for above, status in scan.ancestry(pid).items():
            if status.uids[0] != record.uid:
                break
            started = scan.read_start(above, record.uid)
            if any(
                [started.is_of(job, record.slurmd) for job in (record.job_id, record.het_leader)]
            ):
                return True
        return False

    def daemons(self, scan: ProcessScan) -> dict[str, dict[int, str]]:
        """Return pid -> step of all step daemons by job id; those without a title yet under ""."""
        daemons: dict[str, dict[int, str]] = {}
        for pid in scan.named(STEPD):
            if is_slurm_daemon(pid, STEPD, scan, self._uid):
                try:
                    title = scan.proc.read_memory(pid, "cmdline")
                except (ProcessLookupError, TimeoutError):
                    title = b""  # whose it is, or was when it was listed, nobody knows
                if title.split(b"\0")[1:2] in NO_STEP:
                    continue
                job, step = parse_stepd_title(title)
                daemons.setdefault(job, {})[pid] = step
        return daemons

    def is_slurmd_seen(self, scan: ProcessScan) -> bool:
        """Return whether slurmd runs where we can see it."""
        return any([is_slurm_daemon(pid, SLURMD, scan, self._uid) for pid in scan.named(SLURMD)])

    def add_members(self, lock: Lock, scan: ProcessScan, job: JobProcesses) -> None:
        """Add what is in the job's cgroup, or was started with the job's environment.

        The environment counts where the job has no cgroup (proctrack/linuxproc, pgid): a user can
        remove it, and who fakes it keeps only the lock of the own job. What the kernel says of the
        user's processes counts there as well. A heterogeneous job's other component has the
        leader's id: whose process that is nobody knows.
        """
        record = lock.owner
        assert record is not None
        job.daemons = self.daemons(scan).get(record.job_id, {})
        folders, places = find_job_cgroups(self._cgroup, record, scan.proc)
        for pid in self._list_members(folders, scan):
            if pid:
                job.add((pid,), "is in the job's cgroup")
            else:
                job.add_doubt("the job's cgroup cannot be read")
        if any([os.path.isdir(folder) for folder in folders]):
            return
        job.unmarked = not places
        own, leaders, unseen = self._find_started(record, scan)
        job.add(own, "was started as the job's")
        if leaders:
            job.add_doubt(f"process {leaders[0]} was started as job {record.het_leader}'s")
        job.add_doubt(unseen)
        for pid, status in scan.statuses().items():
            if status.uids[0] == record.uid and not status.kernel:
                job.add_doubt(why_in_slurm_cgroup(pid, record, scan.proc))

    def add_members_and_steps(self, lock: Lock, scan: ProcessScan, job: JobProcesses) -> None:
        """Add step daemons as well: for a prolog, before its own steps start."""
        assert lock.owner is not None
        for pid in self.daemons(scan).get(lock.owner.job_id, {}):
            job.add_doubt(f"step daemon {pid} of the job runs")
        self.add_members(lock, scan, job)

    def _find_started(self, record: Owner, scan: ProcessScan) -> tuple[list[int], list[int], str]:
        started, unseen = scan.started_as(record.uid)
        own: list[int] = []
        leaders: list[int] = []
        for pid, one in started.items():
            if one.is_hook() or scan.status(pid).name in CLIENTS:
                continue
            if one.is_of(record.job_id, record.slurmd):
                own.append(pid)
            elif one.is_of(record.het_leader, record.slurmd):
                leaders.append(pid)
        return own, leaders, unseen

    def members(self, record: Owner, scan: ProcessScan) -> list[int]:
        """Return the processes in the job's cgroup; what cannot be read counts as pid 0."""
        folders, _ = find_job_cgroups(self._cgroup, record, scan.proc)
        return self._list_members(folders, scan)

    def _list_members(self, folders: list[str], scan: ProcessScan) -> list[int]:
        pids: set[int] = set()
        for folder in folders:
            pids.update(list_slurm_cgroup_pids(folder))
        return sorted([pid for pid in pids if not (pid and self._is_placeholder(pid, scan))])

    def _is_placeholder(self, pid: int, scan: ProcessScan) -> bool:
        """Return whether a process is the extern step's own `sleep`, which outlives its daemon."""
        try:
            for status in (scan.status(pid), scan.proc.status(pid)):  # a user's is not read anew
                if status.uids[0] != self._uid:
                    return False
            words = scan.proc.read_memory(pid, "cmdline").split(b"\0")
        except (OSError, ValueError):
            return False
        return words[0].rpartition(b"/")[2] == b"sleep" and words[1:] in PLACEHOLDER


def is_slurm_daemon(pid: int, name: str, scan: ProcessScan, uid: int = 0) -> bool:
    """Return whether a process runs a program of Slurm's as root, also as Debian names it.

    By its real uid: slurmstepd takes the user's effective one while it opens the user's files. In
    the simulation of another user (`uid`) by its name alone.
    """
    status = scan.status(pid)
    if status.uids[0] != uid or status.name.partition("-")[0] != name:
        return False
    return bool(uid) or is_root_program(scan.proc, pid, name)


def find_slurmds_above(node: Node, pid: int) -> list[int]:
    """Return the slurmd above a process of root's, else every slurmd; raise Refusal for none.

    With PrologFlags=RunInJob a Prolog is no child of slurmd's.
    """
    scan = ProcessScan(node.proc)
    above = [one for one in scan.ancestry(pid) if is_slurm_daemon(one, SLURMD, scan)]
    slurmds = above[:1] or [p for p in scan.named(SLURMD) if is_slurm_daemon(p, SLURMD, scan)]
    if not slurmds and not node.settings.simulation:
        raise Refusal(UNKNOWN, "no slurmd is seen", "is /proc mounted with hidepid?")
    return slurmds


def is_slurm_job_process(pid: int, record: Owner, scan: ProcessScan) -> bool:
    """Return whether a process is in the job's cgroup or below one of its step daemons.

    Needs no more than an ordinary user may see.
    """
    if is_in_job_cgroup(pid, record, scan.proc):
        return True
    for above in scan.ancestry(pid):
        if is_slurm_daemon(above, STEPD, scan):
            try:
                job, _ = parse_stepd_title(scan.proc.read_memory(above, "cmdline"))
            except OSError:
                continue
            if job == record.job_id:
                return True
    return False
