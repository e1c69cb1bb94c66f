# SPDX-License-Identifier: Apache-2.0
"""The locks as they were read last: they are read again once anything there has changed.

All that changes a lock makes, renames or removes a file in its folder, or in that of its anchors,
and so gives the folder another time stamp (store.locks); a record that somebody has written over
has one itself. Two changes within one tick of the kernel's clock have the same time: what has
changed a moment ago is read again all the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from gpulock.store.locks import Lock, LockStore

SETTLED = 1_000_000_000  # nanoseconds; the kernel's clock for files ticks each 1 to 10 ms

Mark = tuple[str, int, int, int, int]  # path, inode, size, time stamps in nanoseconds
Marks = tuple[Mark, ...]


class LockCache:
    """The locks of one node; `read` is what reads them all, `now` the wall clock of files."""

    def __init__(
        self,
        read: Callable[[LockStore], dict[str, Lock]],
        now: Callable[[], int] = time.time_ns,
    ) -> None:
        self._read = read
        self._now = now
        self._marks: Marks | None = None
        self._held: dict[str, Lock] = {}

    def locks(self, store: LockStore) -> dict[str, Lock]:
        """Return every lock with its details; raise what `read` raises."""
        marks, at = read_lock_marks(store.locks_dir), self._now()
        if marks is None or marks != self._marks:
            self._marks = None
            self._held = self._read(store)
            sound = all(lock.owner and not lock.fault for lock in self._held.values())
            if marks is not None and sound and are_marks_settled(marks, at):
                self._marks = marks
        return dict(self._held)


def read_lock_marks(folder: str) -> Marks | None:
    """Return what tells one state of the locks from another, None where it cannot be told."""
    found: list[Mark] = []
    try:
        for name in sorted(os.listdir(folder)):
            lock = f"{folder}/{name}"
            found += (read_file_mark(lock), read_file_mark(f"{lock}/owner"))
            if os.path.exists(f"{lock}/anchors"):
                found.append(read_file_mark(f"{lock}/anchors"))
    except OSError:
        return None  # one is being made, or is gone this moment
    return tuple(found)


def read_file_mark(path: str) -> Mark:
    """Return what tells one state of a file or folder from another; raise OSError."""
    info = os.stat(path)
    return path, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def are_marks_settled(marks: Marks, now: int) -> bool:
    """Return whether any later change will have another time stamp than these."""
    return all(now - max(changed, noted) >= SETTLED for *_, changed, noted in marks)
