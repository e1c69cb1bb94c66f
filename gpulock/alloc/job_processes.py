# SPDX-License-Identifier: Apache-2.0
"""Which processes are a job's: the one answer for judge, last guard, clean-up and isolation.

Hot, loaded when a lock must be judged. It is a union, and an empty cgroup ends no question: with a
systemd user manager a process leaves its job's cgroup, and keeps descriptors and supplementary
group (docs/facts/isolation.md, ways out of a cgroup). `device_users` asks who has the device open.
"""

from gpulock.alloc.process_scan import ProcessScan
from gpulock.store.locks import Lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpulock.store.owner import Owner

    # a scheduler's own knowledge: it adds what marks the processes of its jobs
    JobMembers = Callable[[Lock, ProcessScan, "JobProcesses"], None]


# what holds a user's namespaces for all of that user's podman until a reboot, and does no work
PAUSES = ("podman pause", "catatonit")


class JobProcesses:
    """The processes of a job on this node, and why there may be more.

    `pids` maps each to a clause, as in "process 7 carries the job's group 65400". `doubt` is a
    sentence without its end. `unmarked` says that neither cgroup nor group marks them. `daemons`
    has the steps of Slurm's step daemons by pid: one may be of another node on this machine.
    """

    def __init__(self) -> None:
        self.pids: dict[int, str] = {}
        self.daemons: dict[int, str] = {}
        self.doubt = ""
        self.unmarked = False

    def add(self, pids: "Iterable[int]", clause: str) -> None:
        """Add processes that are the job's; the first clause of each stays."""
        for pid in pids:
            self.pids.setdefault(pid, clause)

    def add_doubt(self, reason: str) -> None:
        """Say why there may be more processes; the first reason stays."""
        self.doubt = self.doubt or reason

    def reason(self) -> str:
        """Return why something of the job is or may be here, as a clause, or nothing."""
        for pid, clause in self.pids.items():
            return f"process {pid} {clause}"
        return self.doubt


def find_job_processes(
    lock: Lock, scan: ProcessScan, members: "JobMembers | None" = None
) -> JobProcesses:
    """Return the processes of a lock's job; `lock` has its details read.

    The shepherd or process of the record itself is left out: it may be the one that gives the lock
    back.
    A process is of a session only if its user is the owner: anybody may lead a session of a number
    that was given before.
    """
    job = JobProcesses()
    record = lock.owner
    assert record is not None
    job.add_doubt(lock.fault)
    for pid, start, _ in lock.anchors:
        if scan.proc.running(pid, start):
            job.add_doubt(f"shepherd {pid} of a task runs")
    if members is not None:
        members(lock, scan, job)
    if record.sid > 0 and not record.add_grp_id:
        for pid in scan.session_members(record.sid):
            if pid != record.pid and is_owners_process(pid, record.uid, scan, job):
                job.add((pid,), f"is of its session {record.sid}")
    if record.scheduler == "process":
        add_started(record, scan, job)
    job.add_doubt(scan.why_blind_about(record.uid))
    return job


def add_started(record: "Owner", scan: ProcessScan, job: JobProcesses) -> None:
    """Add what was started in a user's claim: a terminal server, what a launcher left."""
    started, unseen = scan.started_as(record.uid)
    token = record.token.encode()
    marked = [
        pid
        for pid, one in started.items()
        if one.token == token and pid != record.pid and scan.status(pid).name not in PAUSES
    ]
    job.add(marked, "was started as the claim's")
    job.add_doubt(unseen)


def is_owners_process(pid: int, uid: int, scan: ProcessScan, job: JobProcesses) -> bool:
    """Return whether a process is a user's; one that cannot be seen is a doubt."""
    try:
        return scan.is_process_of(pid, uid)
    except ProcessLookupError:
        return False
    except (OSError, ValueError) as fault:
        job.add_doubt(f"process {pid} cannot be seen: {fault}")
        return False
