# SPDX-License-Identifier: Apache-2.0
"""What keeps a bad device from the next job while STATE_DIR takes no note: a lock of our own.

LOCK_DIR is another file system, mostly. The lock is an administrator's in form, so that no reap
frees it; `gpulock unreserve` does, and so do we, once the note stands.
"""

from __future__ import annotations

from typing import Final

from gpulock.alloc.reaper import free_lock
from gpulock.deadline import Deadline
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.devices import lock_ids_overlap
from gpulock.store import boot
from gpulock.store.gate import Gate
from gpulock.store.locks import Lock
from gpulock.store.quarantine import POLICY

REASON: Final = "faulty, and STATE_DIR cannot be written"


def is_health_lock(lock: Lock) -> bool:
    """Return whether a lock is one of these."""
    record = lock.owner
    if record is None or record.scheduler != "admin":
        return False
    return record.user == POLICY and record.comment == REASON


def lock_bad_device(node: Node, name: str, seconds: float) -> str:
    """Lock a device that is free; return what becomes of it, as a clause."""
    try:
        with Gate(node.store.path, Deadline(seconds)):
            held = [
                lock
                for lock in node.store.read_all_locks().values()
                if lock_ids_overlap(lock.id, name)
            ]
            if held:
                return "its holder keeps it" if not is_health_lock(held[0]) else "it stays locked"
            note = {"by": POLICY, "reason": REASON}
            node.store.make(name, boot.reserve_owner(name, note, node.boot_id, node.name))
    except (OSError, Refusal) as fault:
        return f"nor can it be locked: {fault}"
    return "it is locked instead"


def unlock_bad_device(node: Node, name: str, seconds: float) -> None:
    """Free a device that was locked instead of noted; raise OSError or Refusal."""
    if not node.store.exists() or not is_health_lock(node.store.read(name)):
        return
    with Gate(node.store.path, Deadline(seconds)):
        lock = node.store.read(name)
        if is_health_lock(lock):
            free_lock(node, lock, "it is quarantined now")
