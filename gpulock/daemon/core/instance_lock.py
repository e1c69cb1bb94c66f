# SPDX-License-Identifier: Apache-2.0
"""One gpulockd a node: it holds a lock of LOCK_DIR, of the gate's kind, for as long as it lives.

The kernel frees such a lock when its holder dies. The file stays: without it two could hold two
files of one name.
"""

from __future__ import annotations

import os

from gpulock.deadline import Deadline
from gpulock.errors import BUSY, LockTimeout, Refusal
from gpulock.store.gate import Gate

LOCK_NAME = "daemon"  # in LOCK_DIR


def find_running_daemon(lock_dir: str, proc_root: str) -> int | None:
    """Return the pid of the gpulockd that holds this node's lock; None where none is seen.

    The kernel lists who holds which lock (proc_locks(5)), to every user, and nobody else can open
    the file. In a container whose processes are its own, gpulockd on the host is not seen.
    """
    try:
        file = os.stat(f"{lock_dir}/{LOCK_NAME}")
        place = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
        with open(f"{proc_root}/locks", encoding="ascii", errors="replace") as locks:
            for line in locks:
                words = line.split()
                if words[1:2] == ["FLOCK"] and words[5:6] == [place]:
                    return int(words[4])
    except (OSError, ValueError):
        return None
    return None


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
        gate = Gate(lock_dir, Deadline(0.0), name=LOCK_NAME)
        try:
            self._gate = gate.__enter__()
        except LockTimeout as fault:
            pid = find_running_daemon(lock_dir, "/proc")
            see = f"systemctl status {pid}" if pid else f"fuser -v {lock_dir}/{LOCK_NAME}"
            why = f"gpulockd runs already, pid {pid or 'not known'}"
            raise AlreadyRunningError(BUSY, why, f"see {see}") from fault

    def release(self) -> None:
        """Let another one run."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.__exit__()
