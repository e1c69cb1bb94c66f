# SPDX-License-Identifier: Apache-2.0
"""A test of a free GPU (HEALTH_COMMAND) gives way to the claim that needs its GPU.

Hot, loaded only where devices are short and such a test runs. The claim ends the test's processes
and waits until they are gone. Then the reaper proves the lock's owner dead, as any other. gpulockd
leaves the test's leader a zombie while its lock stands: the number stays that of this group.
"""

import os
import select
import time

from gpulock.node.context import Node
from gpulock.node.devices import lock_ids_overlap
from gpulock.node.procfs import OVER
from gpulock.store.locks import Lock

KILL = 9
PATIENCE = 1000  # milliseconds for processes to end that were killed; it takes them 2 to 20


def stop_health_checks(node: Node, held: dict[str, Lock], wanted: "tuple[str, ...]") -> bool:
    """End the tests that have a device of `wanted`, or any device; return whether there were some.

    The gate is held, and `held` are all locks.
    """
    stopped = False
    for lock in held.values():
        record = lock.owner
        if record is None or not record.is_health_check() or record.boot_id != node.boot_id:
            continue
        if wanted and not any([lock_ids_overlap(lock.id, name) for name in wanted]):
            continue
        if record.pid > 1 and record.pid_ns == node.proc.pid_namespace(""):
            stopped |= kill_check_process(node, record.pid, record.start)
    return stopped


def kill_check_process(node: Node, pid: int, start: int) -> bool:
    """Kill a test with its group and wait for its end; return whether it was there."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return True  # gone, or its end cannot be seen: the reaper judges
    try:
        if not node.proc.running(pid, start):
            return True
        os.killpg(pid, KILL)
        wait_for_end(fd)
        wait_for_session(node, pid)
    except (OSError, ValueError):
        pass  # likewise
    finally:
        os.close(fd)
    return True


def wait_for_end(fd: int) -> None:
    """Wait until the process of a pidfd has ended, PATIENCE at most."""
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    waiting.poll(PATIENCE)


def wait_for_session(node: Node, session: int) -> None:
    """Wait until no process of a killed session runs: each ends in its own time, after the leader.

    Each process that is met is waited for by the kernel's word; those after it are then met.
    """
    end = time.monotonic() + PATIENCE / 1000
    while left := [pid for pid in node.proc.pids() if runs_in_session(node, pid, session)]:
        if time.monotonic() > end:
            return  # the reaper judges
        try:
            fd = os.pidfd_open(left[0])
        except OSError:
            continue  # it is gone
        try:
            wait_for_end(fd)
        finally:
            os.close(fd)


def runs_in_session(node: Node, pid: int, session: int) -> bool:
    """Return whether a process is of a session and not over."""
    try:
        found = node.proc.stat(pid)
    except (OSError, ValueError):
        return False
    if found.session != session:
        return False
    return found.state not in OVER or not node.proc.finished(pid)
