# SPDX-License-Identifier: Apache-2.0
"""Whether an owner is alive, dead or unknown, with the proof.

Hot, but loaded only when a lock must be judged. Dead only when proven: what cannot be seen
is unknown, and unknown is held. A judge therefore proves its own sight first. Age proves nothing.
"""

from gpulock.alloc.job_processes import JobProcesses, find_job_processes
from gpulock.alloc.process_scan import ProcessScan
from gpulock.store.locks import Lock
from gpulock.store.verdicts import ALIVE, DEAD, PROCESS, REBOOT, UNKNOWN, Verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpulock.alloc.job_processes import JobMembers

    # a scheduler's own way to judge a lock; the last gives the judge's one answer about its job
    LivenessRule = Callable[[Lock, ProcessScan, Callable[[Lock], JobProcesses]], Verdict]


def shepherd_verdict(lock: Lock, scan: ProcessScan, word: str) -> "Verdict | None":
    """Return the verdict by the processes that keep a lock alive, None where all are gone."""
    for pid, start in lock.shepherds():
        try:
            if scan.proc.running(pid, start):
                return Verdict(ALIVE, f"{word} {pid} runs")
        except (OSError, ValueError) as fault:
            return Verdict(UNKNOWN, f"{word} {pid} cannot be seen: {fault}")
    return None


def process_verdict(
    lock: Lock, scan: ProcessScan, job_processes: "Callable[[Lock], JobProcesses]"
) -> Verdict:
    """Judge a lock that a process holds: it, its anchors, what it started."""
    record = lock.owner
    assert record is not None
    if runs := shepherd_verdict(lock, scan, "process"):
        return runs
    job = job_processes(lock)
    if job.reason():
        return Verdict(ALIVE if job.pids else UNKNOWN, job.reason())
    return Verdict(DEAD, f"process {record.pid} is gone, and all that is of its claim", PROCESS)


class Judge:
    """Judge any lock of this node; the schedulers' own rules are given by name.

    `rules` maps a scheduler to its function. A scheduler without a rule is unknown, and its locks
    are held. `members` maps a scheduler to what it knows of the processes of its jobs.
    """

    def __init__(
        self,
        boot_id: str,
        scan: ProcessScan,
        rules: "Mapping[str, LivenessRule]",
        members: "Mapping[str, JobMembers] | None" = None,
    ) -> None:
        self.boot_id = boot_id
        self.scan = scan
        self._rules = rules
        self._members = members or {}

    def job_processes(self, lock: Lock) -> JobProcesses:
        """Return the processes of a lock's job, by all that marks them."""
        assert lock.owner is not None
        return find_job_processes(lock, self.scan, self._members.get(lock.owner.scheduler))

    def verdict(self, lock: Lock) -> Verdict:
        """Return the verdict on one lock (its details read already).

        Administrators' locks are alive for ever. A record of another boot is dead: records are
        this machine's, whatever its host name was. A pid of another namespace means nothing to us.
        """
        record = lock.owner
        if lock.fault:
            return Verdict(UNKNOWN, lock.fault)
        if record is None:
            return Verdict(UNKNOWN, "a claim is being made")  # with the gate held there is none
        if record.scheduler == "admin":
            return Verdict(ALIVE, "an administrator's lock")
        if record.boot_id != self.boot_id:
            return Verdict(DEAD, "claimed before this boot", REBOOT)
        try:
            ours = self.scan.proc.namespaces()
        except OSError as fault:
            return Verdict(UNKNOWN, f"our pid namespace cannot be seen: {fault}")
        if record.namespaces != ours:
            return Verdict(UNKNOWN, f"claimed in {record.namespaces}, judged in {ours}")
        rule = self._rules.get(record.scheduler)
        unruled = Verdict(UNKNOWN, f"no rule for scheduler {record.scheduler}")
        verdict = rule(lock, self.scan, self.job_processes) if rule else unruled
        if verdict.state == DEAD and (late := find_late_end(lock, self.scan)):
            verdict = Verdict(UNKNOWN, f"process {late} ended while the processes were looked at")
        return verdict


def find_late_end(lock: Lock, scan: ProcessScan) -> int:
    """Return a process of a dead owner that was there when the processes were listed, or 0.

    What it started since is in no list. A process with another start time is another one: the owner
    had ended before.
    """
    for pid, start in lock.shepherds() if scan.complete else ():
        try:
            if pid in scan.statuses() and scan.proc.start(pid) == start:
                return pid
        except (OSError, ValueError):
            return pid
    return 0
