# SPDX-License-Identifier: Apache-2.0
"""Which exporter writes a folder: it holds a lock for as long as it runs, and a file names it.

The lock is a file that its user alone may open: a reader's flock would keep the exporter from
starting (facts/locking.md). The kernel lets go of it when the process ends, however it ends.
`pause` and `resume` may be root's, and the files are an ordinary user's: a signal goes to a process
of that very user alone.
"""

from __future__ import annotations

import errno
import os
import signal
import time

from gpulock.deadline import Deadline
from gpulock.errors import BROKEN, LockTimeout, Refusal
from gpulock.node.procfs import OVER, Proc
from gpulock.node.sample import WRITER, find_running_exporter
from gpulock.store.gate import Gate
from gpulock_exporter.files.publish import make_exporter_folders, replace_exporter_file

LOCK = "lock"
PAUSE = 0.05


class NotRunningError(ProcessLookupError):
    """Say that no exporter writes a folder."""


class FolderHold:
    """A folder that this exporter alone writes, for as long as it is held. Its files stay."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._gate: Gate | None = None
        self._named = False  # by the file of our pid

    def take(self) -> None:
        """Hold the folder, also where it was removed meanwhile: then it is made again.

        Raises Refusal where another exporter writes it, or OSError.
        """
        if self._gate is not None and not self._gate.is_named():
            self.release()
        if self._gate is None:
            make_exporter_folders(self._folder)
            gate = Gate(self._folder, Deadline(0.0), name=LOCK)
            try:
                gate.__enter__()
            except LockTimeout:
                raise Refusal(
                    BROKEN,
                    f"another gpulock-exporter writes {self._folder}",
                    "give this one a folder of its own (--folder)",
                ) from None
            self._gate, self._named = gate, False
        if not self._named:
            own = f"{os.getpid()} {Proc().start(os.getpid())}\n"
            replace_exporter_file(f"{self._folder}/{WRITER}", own)
            self._named = True

    def release(self) -> None:
        """Let another exporter write the folder."""
        if self._gate is not None:
            self._gate.__exit__()
        self._gate = None


def is_disk_full(fault: BaseException) -> bool:
    """Return whether an error, or its cause, is that a file system has no room left."""
    number = getattr(fault, "errno", None) or getattr(fault.__cause__, "errno", None)
    return number in (errno.ENOSPC, errno.EDQUOT)


def signal_exporter(folder: str, number: signal.Signals) -> int:
    """Send a signal to the exporter that writes `folder`, return its pid.

    Raises NotRunningError, or OSError.
    """
    pid = find_running_exporter(folder)
    if not pid:
        raise NotRunningError(folder)
    signal_user_process(pid, os.lstat(f"{folder}/{WRITER}").st_uid, number)
    return pid


def signal_user_process(pid: int, uid: int, number: signal.Signals) -> None:
    """Send a signal to a process where it is a user's own; raise NotRunningError, or OSError."""
    try:
        handle = os.pidfd_open(pid)
    except (ProcessLookupError, OverflowError):
        raise NotRunningError(f"process {pid}") from None
    try:
        if os.stat(f"/proc/{pid}").st_uid != uid:  # the handle keeps it from being a later one
            raise NotRunningError(f"process {pid}")
        signal.pidfd_send_signal(handle, number)
    except FileNotFoundError:
        raise NotRunningError(f"process {pid}") from None
    finally:
        os.close(handle)


def wait_for_worker_exit(pid: int, seconds: float) -> int:
    """Wait until an exporter has no worker; return the pid of one that is still there, or 0."""
    end = time.monotonic() + seconds
    while left := find_exporter_worker(pid):
        if time.monotonic() >= end:
            break
        time.sleep(PAUSE)
    return left


def find_exporter_worker(pid: int) -> int:
    """Return the child of an exporter that is not over, 0 where there is none."""
    proc = Proc()
    for child in proc.pids():
        try:
            found = proc.stat(child)
            if found.ppid == pid and (found.state not in OVER or not proc.finished(child)):
                return child
        except (OSError, ValueError):
            continue  # it is gone, or none of ours
    return 0
