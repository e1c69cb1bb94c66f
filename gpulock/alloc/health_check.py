# SPDX-License-Identifier: Apache-2.0
"""A test of a free GPU (HEALTH_COMMAND) gives way to the claim that needs its GPU.

Hot, loaded only where devices are short and such a test runs. A claim first chooses as if no such
lock stood. It ends the tests of what it chose alone, and waits outside the gate until their
processes are gone. Then the reaper proves the lock's owner dead, as any other. gpulockd leaves the
test's leader a zombie while its lock stands: the number stays that of this group. A process that
hangs in the driver outlives SIGKILL: its lock is noted as such, and no later claim waits for it.
"""

import os
import select
import time

from gpulock.alloc.availability import open_device_ids, pick_free_devices
from gpulock.node.context import Node
from gpulock.node.devices import lock_ids_overlap
from gpulock.node.procfs import OVER
from gpulock.store.locks import Lock
from gpulock.store.owner import STUCK_COMMENT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulock.alloc.choose import ClaimRequest
    from gpulock.alloc.liveness import Judge
    from gpulock.node.devices import Device
    from gpulock.store.owner import Owner

KILL = 9
PATIENCE = 1.0  # seconds for processes to end that were killed; it takes them 2 to 100 ms


def stop_needed_checks(
    node: Node,
    found: "list[Device]",
    held: dict[str, Lock],
    want: "ClaimRequest",
    judge: "Callable[[], Judge]",
    refilled: bool,
) -> bool:
    """Kill the tests on what a claim gets by that, none where it would get nothing.

    Return whether some were killed. `want` notes them: one that outlives it is noted as stuck. The
    gate is held, and `held` are all locks; once locks were lost LOCK_DIR was `refilled`. Raises
    Refusal.
    """
    checks = list_health_checks(node, held)
    for name in [name for name, record in checks.items() if record.pid in want.ended]:
        record = checks.pop(name)
        if list_session_members(node, {record.pid}):
            note_stuck_check(node, name, record.token)
    others = {name: lock for name, lock in held.items() if name not in checks}
    sessions = [record.pid for record in checks.values()]
    opened = open_device_ids(node, found, judge(), sessions) if refilled else []
    needed, _ = pick_free_devices(node, found, others, want, opened)
    if not needed:
        return False
    want.check(needed)
    before = len(want.ended)
    for name, record in checks.items():
        if any([lock_ids_overlap(name, device.id) for device in needed]):
            want.ended.add(record.pid)
            kill_check_process(node, record.pid, record.start)
    return len(want.ended) > before


def list_health_checks(node: Node, held: dict[str, Lock]) -> "dict[str, Owner]":
    """Return the owners, of all locks `held`, that are tests which can be ended from here."""
    found: dict[str, Owner] = {}
    for name, lock in held.items():
        record = lock.owner
        if record is None or not record.gives_way() or record.boot_id != node.boot_id:
            continue
        if record.pid > 1 and record.pid_ns == node.proc.pid_namespace(""):
            found[name] = record
    return found


def kill_check_process(node: Node, pid: int, start: int) -> None:
    """Kill a test with its group."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return  # gone, or its end cannot be seen: the reaper judges
    try:
        if node.proc.running(pid, start):
            os.killpg(pid, KILL)
    except (OSError, ValueError):
        pass  # likewise
    finally:
        os.close(fd)


def wait_for_killed_checks(node: Node, sessions: set[int]) -> None:
    """Wait until no process of the killed tests runs, PATIENCE at most; the gate is not held.

    Each process that is met is waited for by the kernel's word; those after them are then met.
    """
    end = time.monotonic() + PATIENCE
    while left := list_session_members(node, sessions):
        for pid in left:
            patience = end - time.monotonic()
            if patience <= 0:
                return  # the reaper judges
            try:
                fd = os.pidfd_open(pid)
            except OSError:
                continue  # it is gone
            try:
                waiting = select.poll()
                waiting.register(fd, select.POLLIN)
                waiting.poll(1000 * patience)
            finally:
                os.close(fd)


def note_stuck_check(node: Node, name: str, token: str) -> None:
    """Note that a test cannot be ended, gate held; where that fails the next claim does.

    Its lock stays while one of its processes runs, and gives way to nobody.
    """
    record = node.store.read(name).owner
    if record is not None and record.token == token and record.gives_way():
        try:
            node.store.rewrite(name, record.copy(comment=STUCK_COMMENT))
        except OSError:
            return


def list_session_members(node: Node, sessions: set[int]) -> list[int]:
    """Return the processes of these sessions that are not over; none where they cannot be seen."""
    try:
        return [pid for pid in node.proc.pids() if runs_in_session(node, pid, sessions)]
    except OSError:
        return []


def runs_in_session(node: Node, pid: int, sessions: set[int]) -> bool:
    """Return whether a process is of one of these sessions and not over."""
    try:
        found = node.proc.stat(pid)
    except (OSError, ValueError):
        return False
    if found.session not in sessions:
        return False
    return found.state not in OVER or not node.proc.finished(pid)
