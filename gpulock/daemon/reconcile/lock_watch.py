# SPDX-License-Identifier: Apache-2.0
"""What brings a reconcile forward: a change of LOCK_DIR (inotify), the end of an owner (pidfd).

Locks that come and go are watched, records that go, and the loss of a folder; the log of
events, to which every claim adds, wakes nobody. A pidfd is of one process, whatever becomes of its
number (pidfd_open(2)). What cannot be watched (no descriptor left, an old kernel) is seen by the
next reconcile all the same. inotify(7) has no face in the stdlib.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable

from gpulock.daemon.core.loop import EventLoop
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.deadline import clock_boottime
from gpulock.node.procfs import Proc
from gpulock.store.locks import LockStore

# linux/inotify.h
MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x40, 0x80, 0x100, 0x200
DELETE_SELF, MOVE_SELF, OVERFLOW = 0x400, 0x800, 0x4000
ONLYDIR, DONT_FOLLOW = 0x01000000, 0x02000000
GONE = MOVED_FROM | DELETE
LOST = DELETE_SELF | MOVE_SELF
EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name behind it
BUFFER = 1 << 14  # bytes


class LockDirWatch:
    """What changes in LOCK_DIR; `fd` is readable when something did, -1 without inotify.

    `fault` says why changes are not seen, and is empty where they are.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self.fault = "" if self.fd >= 0 else os.strerror(ctypes.get_errno())
        self._watches: set[int] = set()
        self._lost = False  # a folder that was watched is gone, or another one by now

    def follow(self, store: LockStore) -> None:
        """Watch the folders that now have these names: of locks, of records."""
        claims = CREATE | MOVED_TO | GONE | LOST
        masks = {store.path: DELETE | LOST, store.locks_dir: claims, store.claims_dir: GONE | LOST}
        if self.fd < 0:
            return
        before, self._watches, self.fault = self._watches, set(), ""
        for path, mask in masks.items():
            name = os.fsencode(path)  # of the same folder it is the same watch
            watch: int = self._libc.inotify_add_watch(self.fd, name, mask | ONLYDIR | DONT_FOLLOW)
            if watch >= 0:
                self._watches.add(watch)
            elif ctypes.get_errno() != errno.ENOENT:
                self.fault = f"{path}: {os.strerror(ctypes.get_errno())}"
        for gone in before - self._watches:
            self._lost = True
            self._libc.inotify_rm_watch(self.fd, gone)

    def changed(self) -> bool:
        """Return whether something happened since, in the folders that are watched now."""
        lost, self._lost = self._lost, False
        while self.fd >= 0:
            try:
                data = os.read(self.fd, BUFFER)
            except BlockingIOError:
                break
            while data:
                watch, mask, _, length = EVENT.unpack_from(data)
                hidden = data.startswith(b".", EVENT.size) and length > 0
                lost |= not hidden and (watch in self._watches or bool(mask & OVERFLOW))
                data = data[EVENT.size + length :]
        return lost


MOST_DESCRIPTORS = 512  # descriptors; a service has 1,024

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
        if len(self.known) >= MOST_DESCRIPTORS:
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
