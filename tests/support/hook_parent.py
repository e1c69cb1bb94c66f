# SPDX-License-Identifier: Apache-2.0
"""A process that hooks take for what starts them, and that starts what it is told to.

It runs as `python -IS hook_parent.py NAME [TITLE [UID]]`, where NAME is what it is called (comm),
TITLE what its command line shows and UID whose it is, and imports nothing of gpulock. One line of
JSON is one order: argv, env, and where wanted `program`, the file to run where it is not argv[0];
`proc`, a folder of links to /proc in which the child is to be seen while it runs; `stderr`, a file
for all that it says, which `append` leaves as it is; and `uid`, whose it is to be. The answer is
one line: status (128 + signal for a kill), nanoseconds of wall and of processor time.

With `job` the child is a job: it stays in this session, in a process group of its own, and nobody
waits for it. Its pid is in the file `job_pid`, as a shepherd's is, and is the answer. `wait` is the
pid of such a job, whose end is answered.
"""

import ctypes
import json
import os
import resource
import sys
import time
from typing import Any

SIGNALLED = 128
ARG_START, ARG_END = 45, 46  # of /proc/PID/stat behind the name: fields 48 and 49 of proc(5)
WRITE = os.O_WRONLY | os.O_CREAT
QUIET = (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)


def main(name: str, title: str = "", uid: str = "") -> int:
    """Look like the one that is named, then serve until standard input ends."""
    os.setsid()
    os.umask(0o022)
    with open("/proc/self/comm", "w") as file:
        file.write(name)
    if title:
        entitle(title)
    if uid:
        become_user(int(uid))
    answer(os.getpid())
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        if "wait" in order:
            answer(code(os.waitpid(order["wait"], 0)[1]), 0, 0)
        elif "job" in order:
            answer(start_job(order), 0, 0)
        else:
            answer(*(forked(order) if order.get("proc") else spawned(order)))
    return 0


def entitle(title: str) -> None:
    """Write over the arguments, as slurmstepd does: the title, then blanks."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    begin, end = int(fields[ARG_START]), int(fields[ARG_END])
    ctypes.memmove(begin, title.encode().ljust(end - begin - 1), end - begin - 1)


def answer(*numbers: int) -> None:
    """Write one line of numbers."""
    sys.stdout.write(" ".join(map(str, numbers)) + "\n")
    sys.stdout.flush()


def spawned(order: dict[str, Any]) -> tuple[int, int, int]:
    """Start the child the cheapest way, and time it from before its start to its end."""
    argv: list[str] = order["argv"]
    output = (os.POSIX_SPAWN_OPEN, 1, order["stderr"], output_flags(order), 0o644)
    files = [QUIET, output, (os.POSIX_SPAWN_DUP2, 1, 2)]
    begun = time.perf_counter_ns()
    pid = os.posix_spawn(argv[0], argv, order["env"], file_actions=files, setsid=True)
    _, status, usage = os.wait4(pid, 0)
    return code(status), time.perf_counter_ns() - begun, cpu(usage)


def forked(order: dict[str, Any]) -> tuple[int, int, int]:
    """Start the child with its link in `proc`: a hook wants to see its own parents."""
    argv: list[str] = order["argv"]
    begun = time.perf_counter_ns()
    pid = os.fork()
    if pid == 0:
        become(order)
        os.execve(order.get("program") or argv[0], argv, order["env"])
    _, status, usage = os.wait4(pid, 0)
    os.unlink(f"{order['proc']}/{pid}")
    return code(status), time.perf_counter_ns() - begun, cpu(usage)


def become(order: dict[str, Any]) -> None:
    """Be what the order says, in the child."""
    os.setsid()
    os.symlink(f"/proc/{os.getpid()}", f"{order['proc']}/{os.getpid()}")
    redirect_streams(order)
    become_user(order.get("uid", os.getuid()))


def start_job(order: dict[str, Any]) -> int:
    """Start a job in this session; return its pid once it runs its program."""
    begun, closed_by_exec = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        redirect_streams(order)
        become_user(order.get("uid", os.getuid()))
        os.chdir("/")
        os.execve(order["argv"][0], order["argv"], order["env"])
    os.close(closed_by_exec)
    os.read(begun, 1)
    os.close(begun)
    with open("job_pid", "w") as file:
        file.write(f"{pid}\n")
    return pid


def output_flags(order: dict[str, Any]) -> int:
    """Return how the file for all that a child says is opened."""
    return WRITE | (os.O_APPEND if order.get("append") else os.O_TRUNC)


def redirect_streams(order: dict[str, Any]) -> None:
    """Give this child an empty input, and let it say all into the file of the order."""
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    output = os.open(order["stderr"], output_flags(order), 0o644)
    os.dup2(output, 2)
    os.dup2(output, 1)


def become_user(uid: int) -> None:
    """Be a user with a group of the same number, and no other."""
    if uid != os.getuid():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)


def cpu(usage: resource.struct_rusage) -> int:
    """Return what a child used of the processors, its own children included."""
    return round((usage.ru_utime + usage.ru_stime) * 1e9)


def code(status: int) -> int:
    """Return the exit code as a shepherd counts it."""
    found = os.waitstatus_to_exitcode(status)
    return found if found >= 0 else SIGNALLED - found


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
