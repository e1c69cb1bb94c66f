# SPDX-License-Identifier: Apache-2.0
"""Which Slurm job a process was started for, by the environment that it was started with.

Hot, loaded when a lock of a Slurm job must be judged. A user writes the environment of their own
processes: it proves something about that user's jobs alone. Each is read once a look, and the look
at one user's has an end: 1,500 processes of 640,000 strings each took more than a minute.
"""

import time

from gpulock.alloc.process_scan import ProcessScan

ONE_USER = 0.5  # seconds for the processes of one user
INIT = 1  # may hide its environment even from root
JOB, NODE, CONTEXT = b"SLURM_JOB_ID=", b"SLURMD_NODENAME=", b"SLURM_SCRIPT_CONTEXT="
HOOK_CONTEXTS = (b"prolog_slurmd", b"epilog_slurmd")


class StartedAs:
    """What a process was started as: for which job, by the slurmd of which node, as which hook."""

    __slots__ = ("context", "job", "node")

    def __init__(self, environ: bytes) -> None:
        self.job = environ_value(environ, JOB)
        self.node = environ_value(environ, NODE)
        self.context = environ_value(environ, CONTEXT)

    def is_hook(self) -> bool:
        """Return whether it is a Prolog or Epilog, or was started by one."""
        return self.context in HOOK_CONTEXTS

    def is_of(self, job: str, slurmd: str) -> bool:
        """Return whether it was started for a job, on that node of Slurm's."""
        return bool(job) and self.job == job.encode() and self.node == slurmd.encode()


def environ_value(environ: bytes, key: bytes) -> bytes:
    """Return the first value of `KEY=` in an environment, as execve(2) gave it; else nothing."""
    at = 0 if environ.startswith(key) else environ.find(b"\0" + key) + 1
    if not at and not environ.startswith(key):
        return b""
    begin = at + len(key)
    end = environ.find(b"\0", begin)
    return environ[begin:] if end < 0 else environ[begin:end]


class Environs:
    """The environments of users' processes, by real uid, each user's read once a look."""

    __slots__ = ("_scan", "_users")

    def __init__(self) -> None:
        self._scan: "ProcessScan | None" = None
        self._users: dict[int, tuple[dict[int, StartedAs], str]] = {}

    def of_user(self, uid: int, scan: ProcessScan) -> tuple[dict[int, StartedAs], str]:
        """Return what each process of a user was started as, and why there may be more.

        What cannot be seen at all makes the whole look blind.
        """
        if self._scan is not scan:
            self._scan, self._users = scan, {}
        if uid not in self._users:
            self._users[uid] = read_user_environs(uid, scan)
        return self._users[uid]


def read_user_environs(uid: int, scan: ProcessScan) -> tuple[dict[int, StartedAs], str]:
    """Return what each process of a user was started as; the first one that hangs ends the look."""
    started: dict[int, StartedAs] = {}
    late = time.monotonic() + ONE_USER
    for pid, status in scan.statuses().items():
        if status.kernel or status.uids[0] != uid or pid == INIT:
            continue
        if time.monotonic() > late:
            return started, f"no time for the environment of process {pid} of uid {uid}"
        try:
            started[pid] = StartedAs(scan.proc.read_memory(pid, "environ"))
        except TimeoutError as fault:
            return started, str(fault)
        except ProcessLookupError:
            continue
        except OSError as fault:
            scan.mark_blind(f"process {pid} cannot be seen: {fault}")
    return started, ""
