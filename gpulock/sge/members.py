# SPDX-License-Identifier: Apache-2.0
"""What marks the processes of a Grid Engine job: its supplementary group, and a cgroup of gpulock.

Hot, loaded when a lock must be judged. execd hands a group out again, so it proves membership only
while no other living shepherd has it. With ISOLATION=cgroup the job has a cgroup as well: a
rootless container sheds the group.
"""

from gpulock.alloc.job_processes import JobProcesses
from gpulock.alloc.process_scan import ProcessScan
from gpulock.hooks.frame import observer_judge
from gpulock.node.context import Node
from gpulock.store.locks import Lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.alloc.liveness import Judge


class SgeMembers:
    """Add the processes of a Grid Engine job."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._scan: "ProcessScan | None" = None
        self._groups: dict[int, list[int]] = {}  # of the shepherds that `_scan` has

    def __call__(self, lock: Lock, scan: ProcessScan, job: JobProcesses) -> None:
        """Add what carries a group of the job alone, and what is in its cgroup.

        Where the group may be another job's by now, or a task of this job runs, it is a doubt. So
        is a job without a group; a simulated one has a session.
        """
        if not lock.groups() and lock.owner and not lock.owner.sid:
            job.add_doubt("its record names no supplementary group")
        for gid in lock.groups():
            self._add_group(gid, lock, scan, job)
        if self._node.settings.isolation != "cgroup":
            return
        try:
            self._add_confined(lock, scan, job)
        except (OSError, ValueError) as fault:
            job.add_doubt(f"the job's cgroup cannot be read: {fault}")

    def _add_group(self, gid: int, lock: Lock, scan: ProcessScan, job: JobProcesses) -> None:
        record = lock.owner
        assert record is not None
        carriers = scan.carriers(gid)
        if not carriers:
            job.add_doubt(scan.why_blind_about(record.uid, gid))
            return
        from gpulock.sge.shepherds import UNREADABLE_GROUP

        own = record.pid if scan.proc.running(record.pid, record.start) else 0
        groups = self._shepherd_groups(scan)
        others = [pid for pid in groups.get(gid, []) if pid != own]
        strays = [pid for pid in carriers if not scan.descends(pid, frozenset(others))]
        if not strays:
            return
        unread = [pid for pid in groups.get(UNREADABLE_GROUP, []) if pid != own]
        if others:
            job.add_doubt(f"process {strays[0]} carries its group {gid}, now another job's")
        elif unread or scan.partial:
            job.add_doubt(f"process {strays[0]} carries its group {gid}, perhaps another job's")
        else:
            job.add(strays, f"carries the job's group {gid}")

    def _shepherd_groups(self, scan: ProcessScan) -> dict[int, list[int]]:
        """Return the groups of all living shepherds, read once for each look at processes."""
        from gpulock.sge.shepherds import find_shepherd_groups

        if self._scan is not scan:
            self._scan, self._groups = scan, find_shepherd_groups(scan)
        return self._groups

    def _add_confined(self, lock: Lock, scan: ProcessScan, job: JobProcesses) -> None:
        from gpulock.hooks.cleanup import own_ancestor_pids
        from gpulock.isolation.job import confined_pids

        record = lock.owner
        assert record is not None
        label = f"{record.job_id}.{record.task_id or 1}"
        confined = confined_pids(self._node, label, record.pid)
        spared = own_ancestor_pids(scan) if confined else set[int]()  # an epilog that cannot leave
        for pid in confined:
            try:
                if not scan.proc.finished(pid) and pid not in spared:
                    job.add((pid,), "is in the job's cgroup")
            except (OSError, ValueError) as fault:
                job.add_doubt(f"process {pid} of the job's cgroup cannot be seen: {fault}")


def make_sge_observer(node: Node) -> "Judge":
    """Return a judge for a release: it knows whose processes are left, and judges no owner."""
    return observer_judge(node, {"sge": SgeMembers(node)})
