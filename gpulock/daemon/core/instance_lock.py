# SPDX-License-Identifier: Apache-2.0
"""One gpulockd a node: it holds a lock of LOCK_DIR, of the gate's kind, for as long as it lives.

The kernel frees such a lock when its holder dies. The file stays: without it two could hold two
files of one name.
"""

from __future__ import annotations

import os
from contextlib import suppress

from gpulock.deadline import Deadline
from gpulock.errors import BUSY, LockTimeout, Refusal
from gpulock.store import atomic
from gpulock.store.gate import Gate

NAME = "daemon"  # in LOCK_DIR; it holds the pid for people
PID_BYTES = 32


def find_running_daemon(lock_dir: str, proc_root: str) -> int | None:
    """Return the pid of the gpulockd that has this node's lock open; None where none is seen.

    The file outlives its holder, and its pid may be another process's by now. One whose open files
    may not be seen is believed: in a container root may lack that right.
    """
    path = f"{lock_dir}/{NAME}"
    try:
        pid = int(atomic.read_text(path, PID_BYTES))
        file, folder = os.stat(path), f"{proc_root}/{pid}/fd"
    except (OSError, ValueError):
        return None
    try:
        return pid if _has_open(folder, file) else None
    except PermissionError:
        return pid
    except OSError:
        return None


def _has_open(folder: str, file: os.stat_result) -> bool:
    """Return whether a folder of descriptors, in /proc, has one of a file; raise OSError."""
    for fd in os.listdir(folder):
        try:
            if os.path.samestat(file, os.stat(f"{folder}/{fd}")):
                return True
        except FileNotFoundError:
            continue  # closed meanwhile
    return False


class AlreadyRunningError(Refusal):
    """Refuse to go on: another gpulockd is this node's."""


class InstanceLock:
    """The right to be this node's gpulockd; `take` it before every reconcile.

    Where LOCK_DIR was removed and made again, it is taken again.
    """

    def __init__(self) -> None:
        self._gate: Gate | None = None

    def take(self, lock_dir: str) -> None:
        """Take the lock, or keep it; raise Refusal, AlreadyRunningError where another runs."""
        if self._gate is not None and self._gate.is_named():
            return
        self.release()  # of a file that is gone
        path, gate = f"{lock_dir}/{NAME}", Gate(lock_dir, Deadline(0.0), name=NAME)
        try:
            self._gate = gate.__enter__()
        except LockTimeout as fault:
            try:
                who = atomic.read_text(path, PID_BYTES).strip()
            except OSError:
                who = ""
            raise AlreadyRunningError(
                BUSY, f"gpulockd runs already, pid {who or '?'}", "stop that one"
            ) from fault
        write_pid(path)

    def release(self) -> None:
        """Let another one run."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.__exit__()


def write_pid(path: str) -> None:
    """Write for people who holds a lock; no room for that stops nobody."""
    with suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            atomic.write_descriptor(fd, f"{os.getpid()}\n".encode())
        finally:
            os.close(fd)
