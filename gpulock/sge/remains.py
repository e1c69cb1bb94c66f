# SPDX-License-Identifier: Apache-2.0
"""Which processes are what a Grid Engine job left behind: those of its group, and of its cgroup.

Hot, loaded by an epilog where LEFTOVER_PROCESSES is not off. execd hands a group out again, so it
proves membership only while no other living shepherd owns it. With ISOLATION=cgroup the job has a
cgroup of gpulock's as well, which no process can leave: a rootless container sheds the group.
"""

from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.context import Node
from gpulock.node.procfs import OVER
from gpulock.sge.verdict import UNREADABLE_GROUP, find_shepherd_groups
from gpulock.store.locks import Lock


class SgeLeftoverFinder:
    """Find them on a node."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    def __call__(self, lock: Lock, scan: ProcessScan) -> dict[int, str]:
        """Return pid -> why.

        A task of the job whose shepherd still runs (`qrsh -inherit`) is not left behind.
        """
        found = find_job_group_processes(lock, scan)
        if self._node.settings.isolation != "cgroup":
            return found
        try:
            confined = self._confined(lock)
        except (OSError, ValueError):
            return found  # what is left keeps the lock
        for pid in confined:
            found.setdefault(pid, "in the job's cgroup")
        return found

    def describe_leftover(self, lock: Lock, scan: ProcessScan) -> str:
        """Return which process is in the job's cgroup still, as a clause, or nothing.

        It may have shed the job's group, and have the device where no descriptor shows it.
        """
        try:
            found = self._confined(lock)
        except (OSError, ValueError) as fault:
            return f"the job's cgroup cannot be read: {fault}"
        if not found:
            return ""
        from gpulock.hooks.cleanup import own_ancestor_pids

        spared = own_ancestor_pids(scan)  # an epilog that could not leave
        for pid in found:
            try:
                over = scan.proc.stat(pid).state in OVER and scan.proc.finished(pid)
            except ProcessLookupError:
                continue
            except (OSError, ValueError) as fault:
                return f"process {pid} of the job's cgroup cannot be seen: {fault}"
            if not over and pid not in spared:
                return f"process {pid} is in the job's cgroup"
        return ""

    def _confined(self, lock: Lock) -> list[int]:
        """Return the processes in the job's cgroup, and in those of its tasks that are over."""
        from gpulock.isolation import job

        record = lock.owner
        assert record is not None
        label, running = f"{record.job_id}.{record.task_id or 1}", self._node.proc.running
        over = [one for one in lock.shepherds() if one[0] == record.pid or not running(*one)]
        whose = [job.IsolatedJob(label, pid, start) for pid, start in over]
        return [pid for who in whose for pid in job.isolated_job_pids(self._node, who)]


def find_job_group_processes(lock: Lock, scan: ProcessScan) -> dict[int, str]:
    """Return pid -> why, of the processes that carry a group of this job alone.

    While another shepherd lives of which the group is not to be read, it may be any.
    """
    record = lock.owner
    assert record is not None
    owners = find_shepherd_groups(scan)
    found: dict[int, str] = {}
    if scan.partial:
        return found  # the group may be that of a job whose shepherd was not reached
    for gid in lock.groups():
        others = [*owners.get(gid, []), *owners.get(UNREADABLE_GROUP, [])]
        if gid and all([pid == record.pid for pid in others]):
            found.update({pid: f"of the job's group {gid}" for pid in scan.carriers(gid)})
    return found
