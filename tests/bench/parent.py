# SPDX-License-Identifier: Apache-2.0
"""A process that hooks take for their sge_shepherd, and that starts what it is told to.

It runs as `python -IS parent.py` with the job's spool folder as working folder, so it imports
nothing of gpulock. One line of JSON is one order: argv, env, and where wanted `proc`, a folder
of links to /proc in which the child is to be seen while it runs, and `stderr`, a file. The answer
is one line: status (128 + signal for a kill), nanoseconds of wall and of processor time.
"""

import json
import os
import resource
import sys
import time
from typing import Any

COMM = "sge_shepherd"
SIGNALLED = 128
WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
QUIET = [
    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
    (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
]


def main() -> int:
    """Look like a shepherd, then serve until standard input ends."""
    os.setsid()
    os.umask(0o022)
    with open("/proc/self/comm", "w") as file:
        file.write(COMM)
    answer(os.getpid())
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        answer(*(forked(order) if order.get("proc") else spawned(order)))
    return 0


def answer(*numbers: int) -> None:
    """Write one line of numbers."""
    sys.stdout.write(" ".join(map(str, numbers)) + "\n")
    sys.stdout.flush()


def spawned(order: dict[str, Any]) -> tuple[int, int, int]:
    """Start the child the cheapest way, and time it from before its start to its end."""
    argv: list[str] = order["argv"]
    error = (os.POSIX_SPAWN_OPEN, 2, order["stderr"], WRITE, 0o644)
    files = [*QUIET, error]
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
        os.setsid()
        os.symlink(f"/proc/{os.getpid()}", f"{order['proc']}/{os.getpid()}")
        error = os.open(order["stderr"], WRITE, 0o644)
        os.dup2(error, 2)
        os.dup2(error, 1)
        os.execve(argv[0], argv, order["env"])
    _, status, usage = os.wait4(pid, 0)
    os.unlink(f"{order['proc']}/{pid}")
    return code(status), time.perf_counter_ns() - begun, cpu(usage)


def cpu(usage: resource.struct_rusage) -> int:
    """Return what a child used of the processors, its own children included."""
    return round((usage.ru_utime + usage.ru_stime) * 1e9)


def code(status: int) -> int:
    """Return the exit code as a shepherd counts it."""
    found = os.waitstatus_to_exitcode(status)
    return found if found >= 0 else SIGNALLED - found


if __name__ == "__main__":
    sys.exit(main())
