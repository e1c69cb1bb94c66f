# SPDX-License-Identifier: Apache-2.0
"""Whose a process is: the owner's of a lock, an allowed service's, or foreign.

Hot. The one judgement for the last guard, the clean-up, `gpulock status` and the exporter. A
process that is not shown is not foreign: without proof it counts as not seen.
"""

import os

from gpulock.alloc.process_reader import SYSTEM_UIDS
from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.procfs import OVER, Proc
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping


OWNERS, SERVICE, FOREIGN = "owner's", "service", "foreign"
UNSEEN, GONE = "unseen", "gone"  # hidden from us, ended since it was listed
RUN = "run"  # the comment of a claim whose process is the command itself
NAMED = "claim --pid"  # and of one whose process was named
COMM = 15  # characters of a process's name, proc_pid_comm(5)
DAEMONS = frozenset(("sge_execd", "sge_shepherd", "slurmd", "slurmd-wlm", "slurmstepd"))


def classify_process(
    pid: int,
    locks: "Collection[Lock]",
    tree: ProcessScan,
    services: "Collection[str]",
) -> str:
    """Return whose a process is: OWNERS, SERVICE, FOREIGN, UNSEEN or GONE.

    `locks` are those whose owners may use the device, with their details. Beside a claim that
    cannot be read nobody is foreign.
    """
    try:
        if tree.status(pid).state in OVER and tree.proc.finished(pid):
            return GONE  # nobody has asked for its exit code yet
        if not all([lock.owner for lock in locks]):
            return UNSEEN
        if any([is_claim_process(pid, lock, tree) for lock in locks]):
            return OWNERS
        return SERVICE if is_service_process(pid, tree, services) else FOREIGN
    except ProcessLookupError:
        return GONE if tree.sees_all() else UNSEEN
    except (OSError, ValueError):
        return UNSEEN


def find_foreign_pids(
    pids: "Iterable[int]",
    held: "Mapping[str, Lock]",
    tree: ProcessScan,
    services: "Collection[str]",
) -> list[int]:
    """Return which of these processes are of no claim in `held`, nor a service, nor this process.

    Without a device cgroup CUDA opens every node it can see, so that a job's process has free
    devices open as well.
    """
    locks = [lock for lock in held.values() if lock.owner]
    return [
        pid
        for pid in pids
        if pid != os.getpid() and classify_process(pid, locks, tree, services) == FOREIGN
    ]


def is_claim_process(
    pid: int, lock: Lock, tree: ProcessScan, beside: "Owner | None" = None
) -> bool:
    """Return whether a process is of a claim: by group, session, descent or its scheduler's word.

    The token of a user's claim in its environment says so as well. A group or session that `beside`
    also has proves nothing. Raises OSError or ValueError where the process cannot be seen.
    """
    record = lock.owner
    assert record is not None
    status = tree.status(pid)
    shared = (beside.add_grp_id, beside.sid) if beside else (0, 0)
    if any([gid in status.groups and gid != shared[0] for gid in lock.groups()]):
        return True
    in_session = record.sid > 0 and record.sid != shared[1] and status.session == record.sid
    if in_session and record.uid in status.uids[:3]:  # anybody may lead one of an earlier number
        return True
    above = tree.ancestry(pid)
    for keeper, start in lock.shepherds():
        if keeper in above and is_same_process_running(keeper, start, tree.proc):
            return True
    if lock.mps and is_mps_process(pid, lock.mps, tree):
        return True
    if record.scheduler == "process" and status.uids[0] == record.uid:
        return tree.read_start(pid, record.uid).token == record.token.encode()
    more = tree.members.get(record.scheduler)
    return more is not None and more(pid, record, tree)


def is_mps_process(pid: int, mark: str, tree: ProcessScan) -> bool:
    """Return whether a process is of the MPS that gpulockd started, by the mark of a claim.

    By descent or session, while that very daemon is seen to run: nobody joins the session of a
    process that is not below it. Raises OSError or ValueError where `pid` cannot be seen.
    """
    daemon, _, start = mark.partition(" ")
    if not (daemon.isdecimal() and start.isdecimal()):
        return False  # it could not be started
    status, above = tree.status(pid), tree.ancestry(pid)
    try:
        same = int(daemon) in above or status.session == tree.status(int(daemon)).session
    except (OSError, ValueError):
        return False
    return same and is_same_process_running(int(daemon), int(start), tree.proc)


def belongs_to_other_claim(pid: int, lock: Lock, record: Owner, tree: ProcessScan) -> bool:
    """Return whether a process is of another claim than `record`; raise as is_claim_process."""
    other = lock.owner
    return (
        other is not None
        and other.token != record.token
        and is_claim_process(pid, lock, tree, beside=record)
    )


def is_same_process_running(pid: int, start: int, proc: Proc) -> bool:
    """Return whether that very process is seen to run, rather than another one of its pid."""
    try:
        return proc.running(pid, start)
    except (OSError, ValueError):
        return False


def is_command_running_elsewhere(record: Owner, pid: int, tree: ProcessScan) -> bool:
    """Return whether a claim is of `gpulock run` whose command runs, not above `pid`.

    Such a command counts on its devices.
    """
    if record.comment != RUN or not tree.proc.running(record.pid, record.start):
        return False
    return not tree.descends(pid, (record.pid,))


def is_service_process(pid: int, tree: ProcessScan, services: "Collection[str]") -> bool:
    """Return whether a process is an allowed service: a system user's, and from no job.

    By its name (proc_pid_comm(5)): only a system user could forge that. Raises OSError where the
    process cannot be seen.
    """
    status = tree.status(pid)
    if max(status.uids[:3]) >= SYSTEM_UIDS or status.name not in [s[:COMM] for s in services]:
        return False
    return not any([one.name in DAEMONS for one in tree.ancestry(pid).values()])
