# SPDX-License-Identifier: Apache-2.0
"""The processes of the world, and the /proc that shows them: in memory, at a path of its own.

A process is there or gone at once. What a file of /proc says is made when it is read, as the
kernel does; a process that ended between open and read gives ESRCH.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from typing_extensions import Unpack

from tests.support.trees import HOST_NS, About, stat_line, status_text

PROC = "/world/proc"
INIT, FIRST_PID = 1, 300
TICKS = 100  # a second


class Process:
    """One process. `fds` are the paths that it has open, `files` the descriptors of its program."""

    def __init__(self, pid: int, name: str, ticks: int, **about: Unpack[About]) -> None:
        self.pid, self.name, self.start = pid, name, ticks
        self.inode = 0  # of its folder
        self.ppid = about.get("ppid", INIT)
        self.uids = tuple(about.get("uids", (0, 0, 0, 0)))
        self.groups = tuple(about.get("groups", ()))
        self.session = about.get("session", pid)
        self.cwd, self.exe = str(about.get("cwd", "/")), str(about.get("exe", f"/usr/bin/{name}"))
        self.fds = {number: str(path) for number, path in about.get("fds", {}).items()}
        self.title, self.environ = name, {"PATH": "/bin"}
        self.files: set[int] = set()
        self.output = b""
        self.alive = True

    def stat(self) -> bytes:
        """Return /proc/PID/stat."""
        return stat_line(self.pid, self.name, "S", self.ppid, self.session, self.start)

    def status(self) -> bytes:
        """Return /proc/PID/status."""
        text = status_text(self.name, "S", self.ppid, self.uids, self.groups)
        return text + b"NSsid:\t%d\n" % self.session

    def command(self) -> bytes:
        """Return /proc/PID/cmdline."""
        return f"{self.title}\0".encode()

    def words(self) -> bytes:
        """Return /proc/PID/environ."""
        return b"".join(f"{key}={value}\0".encode() for key, value in self.environ.items())


class Link(str):
    """Where a symlink of /proc points, or a path through one."""

    __slots__ = ()


def gone(path: str) -> FileNotFoundError:
    """Return ENOENT as the kernel says it."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


class ProcTree:
    """All processes, by pid; `next_pid` is the one that is given out next."""

    def __init__(self, boot_id: str, ticks: Callable[[], int]) -> None:
        self.boot_id = boot_id
        self.by_pid: dict[int, Process] = {}
        self.next_pid = FIRST_PID
        self.spawned = 0
        self._ticks = ticks
        self.spawn("systemd", pid=INIT, ppid=0)

    def spawn(self, name: str, pid: int = 0, **about: Unpack[About]) -> Process:
        """Let a process begin."""
        while not pid or (pid in self.by_pid):
            pid, self.next_pid = self.next_pid, self.next_pid + 1
        made = self.by_pid[pid] = Process(pid, name, self._ticks(), **about)
        self.spawned += 1
        made.inode = self.spawned
        return made

    def end(self, process: Process) -> None:
        """Let a process be gone; its children are init's."""
        if not process.alive:
            return
        process.alive = False
        del self.by_pid[process.pid]
        for other in self.by_pid.values():
            if other.ppid == process.pid:
                other.ppid = INIT

    def look(self, path: str) -> tuple[Process | None, Callable[[], bytes] | list[str] | Link]:
        """Return whose file a path is, and what makes its bytes, its names, or where it leads."""
        first, _, rest = path[len(PROC) + 1 :].partition("/")
        if first.isdecimal():
            process = self.by_pid.get(int(first))
            if process is None:
                raise gone(path)
            return process, self._of_process(process, rest, path)
        whole = f"{first}/{rest}" if rest else first
        if not whole:
            return None, [*map(str, self.by_pid), "self", "sys"]
        if whole == "sys/kernel/random/boot_id":
            return None, f"{self.boot_id}\n".encode
        if whole == "self/ns/pid":
            return None, Link(HOST_NS)
        if whole == "self/mountinfo":
            return None, b"1 0 0:1 / / rw - tmpfs tmpfs rw\n".strip
        raise gone(path)

    def _of_process(
        self, process: Process, rest: str, path: str
    ) -> Callable[[], bytes] | list[str] | Link:
        top, _, more = rest.partition("/")
        if top in ("cwd", "exe") or (top == "fd" and more):
            links = {"cwd": process.cwd, "exe": process.exe}
            if top == "fd":
                number, _, more = more.partition("/")
                if not (number.isdecimal() and int(number) in process.fds):
                    raise gone(path)
                return Link(process.fds[int(number)])
            return Link(f"{links[top]}/{more}" if more else links[top])
        texts = {"status": process.status, "environ": process.words, "cmdline": process.command}
        if rest in ("stat", f"task/{process.pid}/stat"):
            return process.stat
        if rest in texts:
            return texts[rest]
        if rest == f"task/{process.pid}/children":
            return lambda: b" ".join(
                b"%d" % one.pid for one in self.by_pid.values() if one.ppid == process.pid
            )
        if top == "fdinfo" and more.isdecimal() and int(more) in process.fds:
            return b"mnt_id:\t1\n".strip
        folders = {"": ["fd", "task"], "task": [str(process.pid)], "fd": [*map(str, process.fds)]}
        if rest not in folders:
            raise gone(path)
        return folders[rest]
