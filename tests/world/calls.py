# SPDX-License-Identifier: Apache-2.0
"""The system calls of the world: what stands for `os`, `time` and `fcntl` in the product's modules.

A call on a file that changes is a step; then it is made, on the real file. What a file holds is
read at once when it was opened: all files but a release's note and logs are replaced by renames.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

from tests.world.kernel import VIRTUAL, Kernel, Killed
from tests.world.processes import PROC, Link

OWN_FD = "/proc/self/fd/"
STATIC = ("config", "pe_hostfile")  # files of a spool directory that nobody changes
ROOT = os.geteuid()
FDOPEN: Callable[..., Any] = os.fdopen
NAMED = (
    "stat",
    "lstat",
    "listdir",
    "readlink",
    "mkdir",
    "rmdir",
    "unlink",
    "rename",
    "link",
    "utime",
)
CHANGES = ("mkdir", "rmdir", "unlink", "rename", "create", "write", "link", "ftruncate")
GROWS = ("mkdir", "create", "write", "link")


class Entry:
    """What scandir(3) tells of a process's folder."""

    def __init__(self, pid: int, inode: int) -> None:
        self.name, self._inode = str(pid), inode

    def inode(self) -> int:
        """Return the number of its folder's inode."""
        return self._inode


class Machine(Kernel):
    """The kernel with its calls: `os`, `time` and `fcntl` are modules."""

    def __init__(
        self, moving: tuple[str, ...], watched: tuple[str, ...], check: Callable[[], None]
    ) -> None:
        super().__init__(moving, watched, check)
        self.os, self.time, self.fcntl = self._make_os(), self._make_time(), self._make_fcntl()

    def _stop_the_dead(self) -> None:
        """Let nothing go on of a program that was killed: its descriptors are closed."""
        if self.actor and self.actor.doomed:
            raise Killed

    def _where(self, path: str, more: Mapping[str, Any]) -> str:
        """Return the path from the root, of one below a descriptor as well."""
        self._stop_the_dead()
        if path.startswith(OWN_FD):
            number, _, rest = path[len(OWN_FD) :].partition("/")
            return f"{self.files[int(number)][0]}/{rest}" if int(number) in self.files else path
        fd = more.get("dir_fd")
        fd = more.get("src_dir_fd") if fd is None else fd
        return path if fd is None or path[:1] == "/" else f"{self.files[fd][0]}/{path}"

    def _moves(self, where: str) -> bool:
        """Return whether a file may change: another actor can tell when it is asked about."""
        return where.startswith(self.moving) and where.rpartition("/")[2] not in STATIC

    def _do(self, line: list[str], real: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Call, and note what became of it."""
        name, where = line[2], line[3]
        try:
            if self.full and name in GROWS and where.startswith(self.full):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), where)
            return real(*args, **more)
        except OSError as fault:
            line[4] = errno.errorcode.get(fault.errno or 0, "?")
            raise
        finally:
            if name in CHANGES and where.startswith(self.watched):
                self.dirty = True

    def _named(self, name: str) -> Callable[..., Any]:
        """Return the call of this name, of which the first argument is a path."""
        real = getattr(os, name)

        def call(path: Any, *args: Any, **more: Any) -> Any:
            where = self._where(path, more) if isinstance(path, str) else ""
            if where.startswith(PROC):
                return self._of_proc(name, real, where)
            if not self._moves(where):
                return self._seen(real(path, *args, **more))
            line = self.step(name, where)
            found = self._seen(self._do(line, real, path, *args, **more))
            if name == "listdir":
                names: list[str] = found
                return sorted(names)
            if args and name in ("rename", "link"):
                line[3] += f" -> {args[0].rpartition('/')[2]}"
            return found

        return call

    def _of_proc(self, name: str, real: Callable[..., Any], path: str) -> Any:
        line = self.step(name, path)
        try:
            process, what = self.tree.look(path)
        except OSError:
            line[4] = "ENOENT"
            raise
        if isinstance(what, Link):
            return str(what) if name == "readlink" else self._seen(real(str(what)))
        if name == "listdir" and not callable(what):
            return [str(one) for one in what]
        uid = process.uids[1] if process else 0
        mode = 0o100444 if callable(what) else 0o40555
        return os.stat_result((mode, 1, 1, 1, uid, uid, 0, 0, 0, 0))

    def _scandir(self, path: str) -> Any:
        """List the processes at one moment, with the inodes of their folders."""
        names = self._of_proc("listdir", os.listdir, path)
        pids = [int(name) for name in names if name.isdecimal()]
        return contextlib.nullcontext([Entry(pid, self.tree.by_pid[pid].inode) for pid in pids])

    def _seen(self, found: Any) -> Any:
        """Return what a call found; our files are root's."""
        if ROOT != 0 and isinstance(found, os.stat_result) and found.st_uid == ROOT:
            return os.stat_result([*found[:4], 0, *found[5:]], {"st_mtime_ns": found.st_mtime_ns})
        return found

    def _asked(self, name: str) -> Callable[[str], bool]:
        """Return a question of os.path."""
        real: Callable[[str], bool] = getattr(os.path, name)

        def call(path: str) -> bool:
            if path.startswith(PROC):
                self.step("stat", path)
                try:
                    what = self.tree.look(path)[1]
                except OSError:
                    return False
                return real(what) if isinstance(what, Link) else True
            where = self._where(path, {})
            if self._moves(where):
                self.step("stat", where)
            return real(path)

        return call

    def _open(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        where = self._where(path, {"dir_fd": dir_fd})
        if where.startswith(PROC):
            process, what = self.tree.look(where)
            if not isinstance(what, Link):
                self._last += 1
                if callable(what):
                    self.shown[self._last] = where, process, what, []
                return self._opened(self._last, where)
            path = where = str(what)
        if not self._moves(where):
            return self._opened(os.open(path, flags, mode, dir_fd=dir_fd), where)
        new = flags & os.O_CREAT and not os.path.lexists(where)
        line = self.step("create" if new else "open", where)
        return self._opened(self._do(line, os.open, path, flags, mode, dir_fd=dir_fd), where)

    def _opened(self, fd: int, where: str) -> int:
        """Note an open file, which is its process's."""
        owner = self.actor.process if self.actor else None
        self.files[fd] = where, owner
        if owner:
            owner.files.add(fd)
        return fd

    def _close(self, fd: int) -> None:
        actor = self.actor
        if actor is not None and actor.doomed:
            return  # the kernel has closed it
        if fd in self.locked and actor is not None:
            self.step("close", self.files[fd][0])
            self.locked.discard(fd)
        if actor is not None and actor.process:
            actor.process.files.discard(fd)
        self.forget(fd)

    def _read(self, fd: int, most: int) -> bytes:
        self._stop_the_dead()
        if fd not in self.shown:
            return os.read(fd, most)
        path, process, make, rest = self.shown[fd]
        if not rest:
            self.step("read", path)
            if process is not None and not process.alive:
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
            rest.append(make())
        data, rest[0] = rest[0][:most], rest[0][most:]
        return data

    def _write(self, fd: int, data: bytes) -> int:
        if fd in (1, 2):
            if self.actor and self.actor.process:
                self.actor.process.output += bytes(data)
            return len(data)
        self._stop_the_dead()
        line = self.step("write", self.files[fd][0])
        written: int = self._do(line, lambda: os.write(fd, data))
        return written

    def _on_file(self, name: str) -> Callable[..., Any]:
        """Return the call of this name, of which the first argument is a descriptor."""
        real = getattr(os, name)

        def call(fd: int, *args: Any) -> Any:
            if fd >= VIRTUAL:
                return os.stat_result((0o100444, 1, 1, 1, 0, 0, 0, 0, 0, 0))
            self._stop_the_dead()
            if name == "fstat":
                return self._seen(real(fd, *args))
            line = self.step(name, self.files[fd][0] if fd in self.files else "")
            return None if name in ("fsync", "fchown") else self._do(line, real, fd, *args)

        return call

    def _fdopen(self, fd: int, *args: Any, **more: Any) -> Any:
        if self.actor is not None and self.actor.process:
            self.actor.process.files.discard(fd)
        self.files.pop(fd, None)
        return FDOPEN(fd, *args, **more)

    def _flock(self, fd: int, how: int) -> None:
        if self.actor and self.actor.doomed and how == fcntl.LOCK_UN:
            return
        self._stop_the_dead()
        self._do(self.step("flock", self.files[fd][0]), fcntl.flock, fd, how)
        self.locked.add(fd)

    def _mine(self, which: str) -> Callable[[], int]:
        real: Callable[[], int] = getattr(os, which)

        def call() -> int:
            process = self.actor.process if self.actor else None
            if process is None:
                return real()
            found: int = getattr(process, {"getppid": "ppid"}.get(which, "pid"))
            return process.uids[0] if which == "getuid" else found

        return call

    def _pidfd_open(self, pid: int, flags: int = 0) -> int:
        """Return a descriptor of a process, which is gone at once when it is killed."""
        del flags
        self.step("pidfd_open", f"{PROC}/{pid}")
        if pid not in self.tree.by_pid:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        self._last += 1
        return self._opened(self._last, f"{PROC}/{pid}")

    def _killpg(self, group: int, signal: int) -> None:
        """Kill a group of processes: a session has one here."""
        self.step("killpg", f"{group} {signal}")
        mine = [one for one in self.tree.by_pid.values() if one.session == group]
        if not mine:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        for process in mine:
            self.kill(process)

    def _make_os(self) -> types.ModuleType:
        made = types.ModuleType("os")
        vars(made).update(vars(os))
        for name in NAMED:
            setattr(made, name, self._named(name))
        for name in ("fsync", "fchmod", "fchown", "ftruncate", "fstat"):
            setattr(made, name, self._on_file(name))
        for name in ("getpid", "getppid", "getpgrp", "getuid"):
            setattr(made, name, self._mine(name))
        paths = types.ModuleType("posixpath")
        vars(paths).update(vars(os.path))
        for name in ("exists", "lexists", "isdir", "isfile"):
            setattr(paths, name, self._asked(name))

        def urandom(size: int) -> bytes:
            return self.rng.randbytes(size)

        def makedirs(path: str, mode: int = 0o777, exist_ok: bool = False) -> None:
            self._do(self.step("mkdir", path), os.makedirs, path, mode, exist_ok)

        own: dict[str, object] = {
            "path": paths,
            "open": self._open,
            "close": self._close,
            "read": self._read,
            "write": self._write,
            "fdopen": self._fdopen,
            "urandom": urandom,
            "makedirs": makedirs,
            "scandir": self._scandir,
            "pidfd_open": self._pidfd_open,
            "killpg": self._killpg,
            "geteuid": nobody_else,
            "umask": usual_mask,
        }
        for name, value in own.items():
            setattr(made, name, value)
        return made

    def _make_time(self) -> types.ModuleType:
        made = types.ModuleType("time")
        vars(made).update(vars(time))

        def sleep(seconds: float) -> None:
            self.sleep(seconds)

        def clock(which: int) -> float:
            del which
            return self.now

        own: dict[str, object] = {
            "sleep": sleep,
            "time": lambda: self.wall + self.now,
            "monotonic": lambda: self.now,
            "clock_gettime": clock,
        }
        for name, value in own.items():
            setattr(made, name, value)
        return made

    def _make_fcntl(self) -> types.ModuleType:
        made = types.ModuleType("fcntl")
        vars(made).update(vars(fcntl))
        vars(made)["flock"] = self._flock
        return made


def nobody_else() -> int:
    """Stand for geteuid: hooks and gpulockd are root's."""
    return 0


def usual_mask(mask: int) -> int:
    """Stand for umask, which is the test's own."""
    return mask
