# SPDX-License-Identifier: Apache-2.0
"""The system calls of a program, and the ways to fail them one at a time (strace -e inject).

strace counts `when=K` per name of a system call and per process, so a point is (name, K): the
K-th call of that name since exec. The calls before the marker, the first one that names the
settings file, are the interpreter's own and are left out.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

STRACE = "/usr/bin/strace"
KILL = "KILL"


def calls(names: str) -> frozenset[str]:
    """Return a set of system calls, written as words."""
    return frozenset(names.split())


# They change nothing that outlives the process: a kill there is a kill at the next call.
INNER = calls("brk futex madvise mmap mprotect mremap munmap rseq rt_sigaction rt_sigprocmask")
CREATING = calls("mkdir mkdirat rename renameat renameat2 link linkat symlink symlinkat")
REMOVING = calls("unlink unlinkat rmdir")
WRITING = calls("write pwrite64 fsync fdatasync ftruncate fallocate")
LOOKING = calls("stat lstat newfstatat statx access faccessat faccessat2 readlink readlinkat chdir")
OPEN = calls("open openat")
BY_DESCRIPTOR = calls("read pread64 getdents64 fstat fchmod fchown fstatfs close flock")
STARTING = calls("fork vfork clone clone3 pipe pipe2 poll")
ERRORS = {
    "ENOSPC": CREATING | WRITING,  # and an open that creates, see `fits`
    "EIO": OPEN | CREATING | REMOVING | WRITING | LOOKING | BY_DESCRIPTOR,
    "EACCES": OPEN | CREATING | REMOVING | LOOKING,
    "ENOMEM": STARTING,
}
KINDS = (KILL, *ERRORS)

_CALL = re.compile(r"^(\d+) +(\w+)\(")


@dataclass(frozen=True)
class Point:
    """The `number`-th call of `name` since exec, to be failed by `kind`; `text` is strace's."""

    kind: str
    name: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.name} #{self.number}: {self.text[:150]}"


def fits(kind: str, name: str, text: str) -> bool:
    """Return whether the kernel could fail this call in this way."""
    if kind == KILL:
        return name not in INNER
    return name in ERRORS[kind] or (kind == "ENOSPC" and name in OPEN and "O_CREAT" in text)


def points_of(log: Path, marker: str) -> list[Point]:
    """Return every point of a traced run, from the first call that names `marker` on.

    Of the program itself: the calls of those that it starts are not counted.
    """
    counts: Counter[str] = Counter()
    found: list[Point] = []
    begun, program = False, ""
    for line in log.read_text(errors="replace").splitlines():
        call = _CALL.match(line)
        program = program or (call[1] if call else "")
        if call is None or call[1] != program:
            continue
        name = call[2]
        counts[name] += 1
        begun = begun or (marker in line and name in OPEN | LOOKING)  # not the execve
        if begun:
            text = line[line.index(name) :]
            found += [Point(k, name, counts[name], text) for k in KINDS if fits(k, name, text)]
    if not begun:
        raise RuntimeError(f"no call of the traced run names {marker}")
    return found


def watching(log: Path) -> list[str]:
    """Return the head of a command line that traces every call into `log`."""
    return [STRACE, "-f", "-qq", "-y", "-s", "200", "-o", str(log)]


def failing(point: Point, log: Path) -> list[str]:
    """Return the head of a command line that fails one call.

    --seccomp-bpf stops at that name only and is much faster, but never delivers a signal.
    """
    if point.kind == KILL:
        fault, fast = "signal=KILL", []
    else:
        fault, fast = f"error={point.kind}", ["--seccomp-bpf"]
    inject = f"inject={point.name}:{fault}:when={point.number}"
    return [STRACE, "-f", "-qq", *fast, "-o", str(log), "-e", f"trace={point.name}", "-e", inject]


def struck(point: Point, log: Path) -> bool:
    """Return whether the fault was injected: a run may make fewer calls than the traced one."""
    text = log.read_text(errors="replace")
    return ("killed by SIGKILL" if point.kind == KILL else "(INJECTED)") in text
