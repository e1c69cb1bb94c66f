# SPDX-License-Identifier: Apache-2.0
"""Which exporter writes a folder: it holds a lock for as long as it runs, and a file names it.

The lock is a file that its user alone may open: a reader's flock would keep the exporter from
starting (facts/locking.md). The kernel lets go of it when the process ends, however it ends.
`pause` and `resume` may be root's, and the files are an ordinary user's: a signal goes to a process
of that very user alone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from gpulock.deadline import Deadline
from gpulock.errors import BROKEN, LockTimeout, Refusal
from gpulock.node.procfs import OVER, Proc
from gpulock.node.sample import WRITER, find_running_exporter
from gpulock.store import atomic
from gpulock.store.gate import Gate

LOCK = "lock"
PAUSE = 0.05


class NotRunningError(ProcessLookupError):
    """Say that no exporter writes a folder."""


@contextmanager
def hold_exporter_folder(folder: str) -> Generator[None]:
    """Be the exporter that writes `folder`; raise Refusal where another one is, or OSError.

    The files themselves stay.
    """
    with ExitStack() as held:
        try:
            held.enter_context(Gate(folder, Deadline(0.0), name=LOCK))
        except LockTimeout:
            raise Refusal(
                BROKEN,
                f"another gpulock-exporter writes {folder}",
                "give this one a folder of its own (EXPORTER_DIR)",
            ) from None
        own = f"{os.getpid()} {Proc().start(os.getpid())}\n"
        atomic.replace_file(f"{folder}/{WRITER}", own.encode())
        yield


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
