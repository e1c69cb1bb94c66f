# SPDX-License-Identifier: Apache-2.0
"""What brings a reconcile forward: locks and records that come and go, the end of an owner (pidfd).

A pidfd is of one process, whatever becomes of its number (pidfd_open(2)). What cannot be watched
(no descriptor left, an old kernel) is seen by the next reconcile all the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from gpulock.daemon.core.loop import EventLoop
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.deadline import clock_boottime
from gpulock.node.procfs import Proc
from gpulock.store.locks import LockStore

PERIOD = 0.5  # seconds between two looks at the names


class LockDirWatch:
    """The names of locks and records, as they were when they were looked at last."""

    def __init__(self) -> None:
        self._names: list[set[str]] = []

    def has_changed(self, store: LockStore) -> bool:
        """Return whether other names are there than at the last look."""
        before = self._names
        self._names = [names_in_folder(one) for one in (store.locks_dir, store.claims_dir)]
        return self._names != before


def names_in_folder(folder: str) -> set[str]:
    """Return the names in a folder, without hidden ones; none where it cannot be read."""
    try:
        return {name for name in os.listdir(folder) if not name.startswith(".")}
    except OSError:
        return set()


MOST = 512  # descriptors; a service has 1,024

OwnerProcess = tuple[int, int]  # pid, start time


class OwnerWatcher:
    """The processes that keep locks alive; `ended` is called when one of them is no more.

    It is told when that was noticed (CLOCK_BOOTTIME seconds).
    """

    def __init__(self, loop: EventLoop, ended: Callable[[float], None]) -> None:
        self._loop = loop
        self._ended = ended
        self.known: dict[OwnerProcess, int] = {}  # their descriptors, -1 for one that is gone

    def follow(self, report: ReconcileReport, proc: Proc) -> None:
        """Watch the owners in a report, and nobody else."""
        wanted = {owner for owner in report.processes if owner[0] > 0}
        for owner in [known for known in self.known if known not in wanted]:
            self._unwatch(owner)
        for owner in sorted(wanted - self.known.keys()):
            self._add(owner, proc)

    def _add(self, owner: OwnerProcess, proc: Proc) -> None:
        if len(self.known) >= MOST:
            return
        fd = -1
        try:
            fd = os.pidfd_open(owner[0])
            if not proc.running(*owner):
                os.close(fd)
                fd = -1
        except ProcessLookupError:
            pass
        except (OSError, ValueError):
            if fd < 0:
                return  # no descriptor is left
        self.known[owner] = fd  # also of an owner that cannot be seen: its pidfd tells the end
        if fd >= 0:
            self._loop.watch(fd, lambda _: self._owner_ended(owner))
        else:
            self._ended(clock_boottime())

    def _owner_ended(self, owner: OwnerProcess) -> None:
        """Note that an owner ended."""
        self._loop.close(self.known[owner])
        self.known[owner] = -1
        self._ended(clock_boottime())

    def _unwatch(self, owner: OwnerProcess) -> None:
        fd = self.known.pop(owner)
        if fd >= 0:
            self._loop.close(fd)
