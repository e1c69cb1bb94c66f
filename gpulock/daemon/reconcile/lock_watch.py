# SPDX-License-Identifier: Apache-2.0
"""See changes of the lock directory as they happen (inotify(7), which has no face in the stdlib).

Only what is worth a reconcile is watched: locks that come and go, and the loss of a folder. The
counters, which every claim writes, wake nobody.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Collection

from gpulock.store.locks import LockStore

# linux/inotify.h
MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x40, 0x80, 0x100, 0x200
DELETE_SELF, MOVE_SELF = 0x400, 0x800
OVERFLOW, IGNORED = 0x4000, 0x8000
ONLYDIR, DONT_FOLLOW = 0x01000000, 0x02000000
GONE = MOVED_FROM | DELETE
LOST = DELETE_SELF | MOVE_SELF
HEAD = struct.Struct("iIII")  # watch, mask, cookie, length of the name
BUFFER = 1 << 14  # bytes

Event = tuple[int, int, str]


def parse_inotify_events(data: bytes) -> list[Event]:
    """Return (watch, mask, name) of each event in what a read returned."""
    found: list[Event] = []
    at = 0
    while at + HEAD.size <= len(data):
        watch, mask, _, length = HEAD.unpack_from(data, at)
        at += HEAD.size
        name = data[at : at + length].rstrip(b"\0").decode("utf-8", "surrogateescape")
        found.append((watch, mask, name))
        at += length
    return found


class LockDirWatch:
    """What changes in LOCK_DIR; `fd` is readable when something did, -1 without inotify.

    `fault` says why changes are not seen, and is empty where they are.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self.fault = "" if self.fd >= 0 else os.strerror(ctypes.get_errno())
        self._watches: dict[str, int] = {}
        self._lost = False  # a folder that was watched is gone, or another one by now

    def follow(self, store: LockStore, *folders: str) -> None:
        """Watch the folders that now have these names: LOCK_DIR, its locks, and `folders`."""
        masks = {store.path: DELETE | LOST, store.locks_dir: CREATE | MOVED_TO | GONE | LOST}
        masks.update({folder: GONE | LOST for folder in folders})
        self.fault = "" if self.fd >= 0 else self.fault
        for path in [known for known in self._watches if known not in masks]:
            self._libc.inotify_rm_watch(self.fd, self._watches.pop(path))
        for path, mask in masks.items() if self.fd >= 0 else ():
            self._add(path, mask)

    def _add(self, path: str, mask: int) -> None:
        """Watch one folder; that it is watched already changes nothing."""
        name = os.fsencode(path)
        watch: int = self._libc.inotify_add_watch(self.fd, name, mask | ONLYDIR | DONT_FOLLOW)
        known = self._watches.pop(path, -1)
        if watch >= 0:
            self._watches[path] = watch
        elif ctypes.get_errno() != errno.ENOENT:
            self.fault = f"{path}: {os.strerror(ctypes.get_errno())}"
        if known not in (-1, watch):
            self._lost = True
            self._libc.inotify_rm_watch(self.fd, known)

    def events(self) -> list[Event]:
        """Return what happened since, in the folders that are watched now."""
        found: list[Event] = []
        while self.fd >= 0:
            try:
                found += parse_inotify_events(os.read(self.fd, BUFFER))
            except BlockingIOError:
                break
        ours = set(self._watches.values())
        return [event for event in found if event[0] in ours or event[1] & OVERFLOW]

    def changed(self, gone: Collection[str] = (), made: Collection[str] = ()) -> bool:
        """Return whether something happened that was not our own doing.

        `gone` and `made` are the locks that this process has freed and made since.
        """
        lost, self._lost = self._lost, False
        seen = self.events()
        return lost or any(
            not name.startswith(".")
            and not (mask & GONE and name in gone)
            and not (mask & (CREATE | MOVED_TO) and name in made)
            for _, mask, name in seen
        )

    def close(self) -> None:
        """Watch nothing any more."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1
