# SPDX-License-Identifier: Apache-2.0
"""Learn at once that an owner ended: a pidfd for each process that stands for a lock.

A pidfd is of one process, whatever becomes of its number (pidfd_open(2)). Those that cannot be
had (no descriptor left, an old kernel) are seen by the next reconcile all the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from gpulock.alloc.reaper import FREED
from gpulock.daemon.core.loop import EventLoop
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.node.procfs import Proc

MOST = 512  # descriptors; a service has 1,024

OwnerProcess = tuple[int, int]  # pid, start time


class OwnerWatcher:
    """The processes that keep locks alive; `ended` is called when one of them is no more."""

    def __init__(self, loop: EventLoop, ended: Callable[[], None]) -> None:
        self._loop = loop
        self._ended = ended
        self._known: dict[OwnerProcess, int] = {}  # their descriptors, -1 for one that is gone

    def follow(self, report: ReconcileReport, proc: Proc) -> None:
        """Watch the owners in a report, and nobody else."""
        wanted = {
            owner
            for outcome in report.outcomes
            if outcome.act != FREED
            for owner in outcome.lock.shepherds()
            if owner[0] > 0
        }
        for owner in [known for known in self._known if known not in wanted]:
            self._unwatch(owner)
        for owner in sorted(wanted - self._known.keys()):
            self._add(owner, proc)

    def watched(self) -> list[OwnerProcess]:
        """Return who is watched now."""
        return [owner for owner, fd in self._known.items() if fd >= 0]

    def close(self) -> None:
        """Watch nobody any more."""
        for owner in list(self._known):
            self._unwatch(owner)

    def _add(self, owner: OwnerProcess, proc: Proc) -> None:
        if len(self._known) >= MOST:
            return
        try:
            fd = os.pidfd_open(owner[0])
        except ProcessLookupError:
            self._known[owner] = -1
            self._ended()
            return
        except OSError:
            return
        try:
            same = proc.running(*owner)
        except (OSError, ValueError):
            same = True  # it cannot be seen: what the kernel says of it counts
        if not same:
            os.close(fd)
            self._known[owner] = -1
            self._ended()
            return
        self._known[owner] = fd
        self._loop.watch(fd, lambda _: self._owner_ended(owner))

    def _owner_ended(self, owner: OwnerProcess) -> None:
        """Note that an owner ended."""
        self._close(self._known[owner])
        self._known[owner] = -1
        self._ended()

    def _unwatch(self, owner: OwnerProcess) -> None:
        self._close(self._known.pop(owner))

    def _close(self, fd: int) -> None:
        if fd >= 0:
            self._loop.forget(fd)
            os.close(fd)
