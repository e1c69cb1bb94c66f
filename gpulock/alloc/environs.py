# SPDX-License-Identifier: Apache-2.0
"""Which job or claim a process was started for, by the environment that it was started with.

Hot, loaded where neither a cgroup nor a group marks a job's processes. A user writes the
environment of their own processes: it proves something about that user's jobs alone.
"""

import errno
import time

from gpulock.node.procfs import CHUNK, FILE_LIMIT, INIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulock.node.procfs import Proc

# fields of stat after the name, since Linux 3.5
FLAGS, END_CODE, ENV_START, ENV_END = 6, 24, 47, 48
PF_KTHREAD = 0x00200000  # linux/sched.h: a thread of the kernel's has no memory of its own
LONG = 256  # bytes of a value: no token, job or node is longer
ROUNDS = 4  # reads of an environment that comes to be meanwhile
# Seconds: an execve(2) takes 0.3 ms, and longer where others have the processor.
PAUSES = (0.0, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128)
CLAIM = "GPULOCK_CLAIM"  # the token of the claim that a process was started in
JOB, NODE, CONTEXT = b"SLURM_JOB_ID=", b"SLURMD_NODENAME=", b"SLURM_SCRIPT_CONTEXT="
HOOK_CONTEXTS = (b"prolog_slurmd", b"epilog_slurmd")


class StartingProgramError(OSError):
    """A process is in execve(2) or exit(2): it has no environment at this moment."""


class StartedAs:
    """What a process was started as: for which job, by the slurmd of which node, as which hook.

    `token` is that of the user's claim in which it was started.
    """

    __slots__ = ("context", "job", "node", "token")

    def __init__(self, environ: bytes) -> None:
        self.job = environ_value(environ, JOB)
        self.node = environ_value(environ, NODE)
        self.context = environ_value(environ, CONTEXT)
        self.token = environ_value(environ, f"{CLAIM}=".encode())

    def is_hook(self) -> bool:
        """Return whether it is a Prolog or Epilog, or was started by one."""
        return self.context in HOOK_CONTEXTS

    def is_of(self, job: str, slurmd: str) -> bool:
        """Return whether it was started for a job, on that node of Slurm's."""
        return bool(job) and self.job == job.encode() and self.node == slurmd.encode()


def environ_value(environ: bytes, key: bytes) -> bytes:
    """Return the first value of `KEY=` in an environment, as execve(2) gave it; else nothing.

    Its beginning alone: thousands of processes may have one of a MiB each.
    """
    at = 0 if environ.startswith(key) else environ.find(b"\0" + key) + 1
    if not at and not environ.startswith(key):
        return b""
    begin = at + len(key)
    return environ[begin : begin + LONG].partition(b"\0")[0]


def read_environ(proc: "Proc", pid: int, late: float = float("inf")) -> bytes:
    """Return what a process was started with: environ, of any thread where the leader is over.

    It reads empty while execve(2) sets a program up, and is cut where several reads are of two
    programs (docs/facts/locking.md): stat tells both. `late` is the end of its time (monotonic).
    Raises StartingProgramError then, and whatever `Proc.read_memory` raises.
    """
    name = "environ"
    for _ in range(ROUNDS):
        data = b""
        try:
            data = proc.read_memory(pid, name, late - time.monotonic())
            if 0 < len(data) < CHUNK or len(data) >= FILE_LIMIT:
                return data
        except ProcessLookupError:
            pass  # it has no memory any more: another thread may
        except PermissionError:  # of one that has ended as well, unless root asks
            if not proc.finished(pid):
                raise
        thread = proc.find_living_thread(pid)
        if not thread:
            raise ProcessLookupError(errno.ESRCH, "no such process", str(pid))
        rest = proc.read(pid, f"task/{thread}/stat").rpartition(b")")[2].split()
        begin, end = int(rest[ENV_START]), int(rest[ENV_END])
        if data and len(data) == end - begin:
            return data
        none = begin == end != 0 and int(rest[END_CODE]) != 0  # all of the program is set up
        if not data and (none or int(rest[FLAGS]) & PF_KTHREAD):
            return b""  # it was started with none
        if data:
            continue
        name = f"task/{thread}/environ"
    raise StartingProgramError(errno.EAGAIN, f"process {pid} starts a program or ends")


def read_each(pids: "list[int]", read: "Callable[[int], StartedAs]", hides: bool) -> str:
    """Read what the processes of one user were started as; return why there may be more.

    One that is starting a program is read again once the others are, and one that is hidden from
    its own user (`hides`): the kernel hides it while it ends, and while it enters namespaces. One
    that hangs ends it: 1,500 processes of 640,000 strings each took more than a minute.
    """
    waiting = [pid for pid in pids if pid != INIT]  # it may hide its own even from root
    later = (StartingProgramError, *([PermissionError] if hides else ()))
    doubt = unseen = ""
    for pause in PAUSES:
        if pause and waiting:
            time.sleep(pause)
        pids, waiting = waiting, []
        for pid in pids:
            try:
                read(pid)
            except later as fault:
                hidden = isinstance(fault, PermissionError)
                doubt = cannot_see(pid, fault) if hidden else str(fault.strerror)
                waiting.append(pid)
            except TimeoutError as fault:
                return str(fault)
            except ProcessLookupError:
                continue
            except OSError as fault:
                unseen = cannot_see(pid, fault)
    return unseen or (doubt if waiting else "")


def cannot_see(pid: int, fault: OSError) -> str:
    """Return that a process cannot be seen, and why."""
    return f"process {pid} cannot be seen: {fault}"
