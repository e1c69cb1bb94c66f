# SPDX-License-Identifier: Apache-2.0
"""LEFTOVER_PROCESSES=kill: an epilog ends the processes that its own job left behind.

Hot, loaded there alone. TERM comes first, then KILL, within LEFTOVER_SECONDS. A process that is
perhaps the job's (a doubt of `JobProcesses`) gets no signal, and keeps the lock.
"""

import os
import time
from _signal import SIGKILL, SIGTERM, pidfd_send_signal  # the C module: its Python face costs 4 ms

from gpulock.alloc.device_users import OpenFiles
from gpulock.alloc.liveness import Judge
from gpulock.alloc.process_owner import DAEMONS, belongs_to_other_claim
from gpulock.alloc.process_scan import ProcessScan
from gpulock.alloc.release import locked_devices, restrict_to_owners, select_job_locks
from gpulock.deadline import Deadline
from gpulock.errors import one_line
from gpulock.node.context import Node
from gpulock.node.procfs import INIT, TICKS
from gpulock.store.locks import Lock
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


LEFTOVER_SECONDS = 10.0  # at most, for what the job left behind
GRACE = 2.0  # seconds from TERM to KILL, of a third of LEFTOVER_SECONDS at most
PAUSE = 0.02  # seconds between two looks at what does not end
SHOWN = 4  # processes named in a line


class LeftoverProcess:
    """A process that a job left behind: pid, start time, name, and why it is the job's."""

    def __init__(self, pid: int, start: int, name: str, why: str) -> None:
        self.pid = pid
        self.start = start
        self.name = name
        self.why = why

    def __str__(self) -> str:
        return f"{self.pid} ({self.name}, {self.why})"


def clean_leftovers(
    node: Node,
    ours: "Callable[[Owner], bool]",
    judge: "Callable[[], Judge]",
    deadline: Deadline,
) -> list[str]:
    """End what the job left behind here; return lines to tell.

    `judge` gives a fresh look at all processes. Raises Refusal where locks cannot be read.
    """

    def find() -> list[LeftoverProcess]:
        return find_leftovers(node, ours, judge())

    leftovers = find()
    if not leftovers:
        return []
    lines = [f"left behind, ended: {format_leftovers(leftovers)}"]
    limit = deadline.sooner(LEFTOVER_SECONDS)
    lines += signal_leftovers(node, leftovers, SIGTERM)
    wait_for_leftovers(leftovers, node, limit.sooner(min(GRACE, limit.left() / 3)))
    while leftovers := find():
        if limit.left() <= 0:
            return [*lines, f"left behind, and does not end: {format_leftovers(leftovers)}"]
        lines += [line for line in signal_leftovers(node, leftovers, SIGKILL) if line not in lines]
        wait_for_leftovers(leftovers, node, limit.sooner(PAUSE))
    return lines


def find_leftovers(
    node: Node, ours: "Callable[[Owner], bool]", judge: Judge
) -> list[LeftoverProcess]:
    """Return the processes of this node's locks that are `ours`, each once."""
    held = node.store.read_detailed_locks()
    mine = select_job_locks(held, ours)
    if not mine:
        return []
    restrict_to_owners(judge.scan, mine)
    spared = own_ancestor_pids(judge.scan)
    leftovers: dict[int, LeftoverProcess] = {}
    for lock in mine:
        job = judge.job_processes(lock)
        if job.unmarked:
            job.add(list_later_device_users(node, lock, judge.scan), f"has {lock.id} open")
        for pid, why in job.pids.items():
            left = check_leftover(pid, why, lock, held, judge.scan)
            if left and pid not in spared:
                leftovers.setdefault(pid, left)
    return list(leftovers.values())


def list_later_device_users(node: Node, lock: Lock, scan: ProcessScan) -> list[int]:
    """Return the owner's processes that have a lock's device open and began after the claim.

    For jobs that no cgroup marks: one that began with an empty environment shows its job by nothing
    else, and would keep a GPU from everybody.
    """
    record = lock.owner
    assert record is not None
    files = OpenFiles(scan, locked_devices(node, [lock]), node.settings)
    begun: list[int] = []
    for pid in files.pids_with_open(lock.id, record.uid):
        try:
            if scan.proc.start(pid) >= record.claimed_boottime * TICKS:
                begun.append(pid)
        except (OSError, ValueError):
            continue
    return begun


def own_ancestor_pids(scan: ProcessScan) -> set[int]:
    """Return this process and all above it: an epilog does not end itself or its daemon."""
    return {INIT, os.getpid(), *scan.ancestry(os.getpid())}


def check_leftover(
    pid: int, why: str, lock: Lock, held: dict[str, Lock], scan: ProcessScan
) -> "LeftoverProcess | None":
    """Return a process as left behind, None where it is gone, another's, or a service's.

    root's processes are no job's, unless its owner may end them; a daemon of a scheduler never is.
    """
    record = lock.owner
    assert record is not None
    try:
        status = scan.status(pid)
        start = scan.proc.start(pid)
        if any([belongs_to_other_claim(pid, other, record, scan) for other in held.values()]):
            return None
    except (OSError, ValueError):
        return None
    if status.kernel or (status.name in DAEMONS and status.uids[0] == 0):
        return None
    if 0 in status.uids[:3] and not user_may_signal(record.uid, status.uids):
        return None
    return LeftoverProcess(pid, start, one_line(status.name), why)


def user_may_signal(uid: int, uids: tuple[int, ...]) -> bool:
    """Return whether a user may end a process (kill(2)): by its real or saved uid.

    So a user may end a `su` that asks for a password, although it runs as root.
    """
    real, _, saved, *_ = uids
    return uid in (0, real, saved)


def signal_leftovers(node: Node, leftovers: list[LeftoverProcess], number: int) -> list[str]:
    """Send a signal to each process, by a pidfd that is proven to be its; return what failed."""
    lines: list[str] = []
    for left in leftovers:
        try:
            fd = os.pidfd_open(left.pid)
        except ProcessLookupError:
            continue
        except OSError as fault:  # a kernel before 5.3: a pid may be another's by now
            return [f"process {left.pid} cannot be ended safely: pidfd_open: {fault.strerror}"]
        try:
            if node.proc.running(left.pid, left.start):
                pidfd_send_signal(fd, number)
        except ProcessLookupError:
            pass
        except (OSError, ValueError) as fault:
            lines.append(f"process {left.pid} cannot be ended: {fault}")
        finally:
            os.close(fd)
    return lines


def wait_for_leftovers(leftovers: list[LeftoverProcess], node: Node, limit: Deadline) -> None:
    """Wait until these processes are gone, for as long as `limit` allows."""
    for left in leftovers:
        try:
            while limit.left() > 0 and node.proc.running(left.pid, left.start):
                time.sleep(min(limit.left(), PAUSE))
        except (OSError, ValueError):
            time.sleep(min(limit.left(), PAUSE))


def format_leftovers(leftovers: list[LeftoverProcess]) -> str:
    """Return the first processes for a line."""
    rest = len(leftovers) - SHOWN
    words = ", ".join([f"process {left}" for left in leftovers[:SHOWN]])
    return f"{words} and {rest} more" if rest > 0 else words
