# SPDX-License-Identifier: Apache-2.0
"""A test of a free GPU (HEALTH_COMMAND) gives way to the claim that needs its GPU.

Hot, loaded only where devices are short and such a test runs. A claim first chooses as if no such
lock stood. It ends the tests of what it chose alone, and waits until their processes are gone. Then
the reaper proves the lock's owner dead, as any other. gpulockd leaves the test's leader a zombie
while its lock stands: the number stays that of this group.
"""

import os
import select
import time

from gpulock.alloc.availability import open_device_ids, pick_free_devices
from gpulock.node.context import Node
from gpulock.node.devices import lock_ids_overlap
from gpulock.node.procfs import OVER
from gpulock.store.locks import Lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulock.alloc.choose import ClaimRequest
    from gpulock.alloc.liveness import Judge
    from gpulock.node.devices import Device

KILL = 9
PATIENCE = 1000  # milliseconds for processes to end that were killed; it takes them 2 to 20


def stop_needed_checks(
    node: Node,
    found: "list[Device]",
    held: dict[str, Lock],
    want: "ClaimRequest",
    judge: "Callable[[], Judge]",
    refilled: bool,
) -> bool:
    """End the tests on what a claim gets by that, none where it would get nothing.

    Return whether some were ended. `want` notes them: none is ended twice. The gate
    is held, and `held` are all locks; once locks were lost LOCK_DIR was `refilled`. Raises Refusal.
    """
    checks = {
        name: lock
        for name, lock in list_health_checks(node, held).items()
        if lock.owner and lock.owner.pid not in want.ended
    }
    others = {name: lock for name, lock in held.items() if name not in checks}
    sessions = [lock.owner.pid for lock in checks.values() if lock.owner]
    opened = open_device_ids(node, found, judge(), sessions) if refilled else []
    needed, _ = pick_free_devices(node, found, others, want, opened)
    if not needed:
        return False
    want.check(needed)
    before = len(want.ended)
    for name, lock in checks.items():
        if lock.owner and any([lock_ids_overlap(name, device.id) for device in needed]):
            want.ended.add(lock.owner.pid)
            kill_check_process(node, lock.owner.pid, lock.owner.start)
    return len(want.ended) > before


def list_health_checks(node: Node, held: dict[str, Lock]) -> dict[str, Lock]:
    """Return the locks, of all that are `held`, of tests whose processes can be ended from here."""
    found: dict[str, Lock] = {}
    for name, lock in held.items():
        record = lock.owner
        if record is None or not record.is_health_check() or record.boot_id != node.boot_id:
            continue
        if record.pid > 1 and record.pid_ns == node.proc.pid_namespace(""):
            found[name] = lock
    return found


def kill_check_process(node: Node, pid: int, start: int) -> None:
    """Kill a test with its group and wait for its end."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return  # gone, or its end cannot be seen: the reaper judges
    try:
        if not node.proc.running(pid, start):
            return
        os.killpg(pid, KILL)
        wait_for_end(fd)
        wait_for_session(node, pid)
    except (OSError, ValueError):
        pass  # likewise
    finally:
        os.close(fd)


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
