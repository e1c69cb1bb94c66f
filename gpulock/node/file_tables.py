# SPDX-License-Identifier: Apache-2.0
"""Which threads of a process have open files of their own.

Hot, loaded with a release. A thread leaves its process's table of files by unshare(2),
CLONE_FILES: what it opens then stands in /proc/PID/task/TID/fd alone.
"""

import os

KCMP = {"x86_64": 312, "aarch64": 272, "ppc64le": 354}  # kcmp(2)
FILES = 2  # KCMP_FILES of linux/kcmp.h: one table of files?
ONE_THREAD = 3  # links of /proc/PID/task


def list_own_tables(root: str, pid: int, is_leader_over: bool, seen: "set[str]") -> "list[str]":
    """Return the threads with files that the leader does not show; raise OSError.

    All of them, where the kernel compares none: a leader that has ended has no table any more.
    Those in `seen` are left out; all that are there are in it then.
    """
    folder = f"{root}/{pid}/task"
    if not is_leader_over and os.stat(folder).st_nlink == ONE_THREAD:
        return []
    threads = [name for name in os.listdir(folder) if name not in seen]
    seen.update(threads)
    number = KCMP.get(os.uname().machine, 0)
    if is_leader_over or not number or root != "/proc":
        return threads
    try:
        import ctypes
    except ImportError:  # a job's own limits
        return threads
    libc = ctypes.CDLL(None)

    def has_own_table(thread: str) -> bool:
        words = number, pid, int(thread), FILES, 0, 0
        return bool(libc.syscall(*map(ctypes.c_long, words)))  # 0: one table; -1: not known

    return [thread for thread in threads if has_own_table(thread)]
