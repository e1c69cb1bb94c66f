# SPDX-License-Identifier: Apache-2.0
"""What a program asks of a file system, in order: names, data, syncs, and what it acknowledged.

gpulock's code says `os.X` for each system call that changes a file, so these functions are wrapped
while it runs. `Recorder.finish` compares the log with the real folders: a change that no wrapped
call made is an error, so no call is missed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import pytest


class Names(NamedTuple):
    """Names that change at once: (folder, name, inode, or None where it goes).

    `removed` is the folder that an rmdir removes.
    """

    changes: tuple[tuple[int, str, int | None], ...]
    removed: int | None = None


class Data(NamedTuple):
    """The whole content of a file after a change."""

    inode: int
    content: bytes


class Sync(NamedTuple):
    """An fsync of a file or of a folder."""

    inode: int


class Told(NamedTuple):
    """What the program acknowledged by then."""

    what: str


Event = Union[Names, Data, Sync, Told]
Tree = dict[str, Optional[tuple[int, bytes]]]  # by path: mode and content, or None for a folder


class Log:
    """What was on the disk before, and what happened since; inodes are numbers of our own."""

    def __init__(self) -> None:
        self.roots: dict[str, int] = {}
        self.modes: dict[int, int] = {}  # of files; an inode without a mode is a folder
        self.names: dict[tuple[int, str], int] = {}
        self.content: dict[int, bytes] = {}
        self.events: list[Event] = []
        self.told: frozenset[str] = frozenset()  # what was acknowledged before
        self.count = 0

    def new(self) -> int:
        """Return a number for a new inode."""
        self.count += 1
        return self.count

    def scan(self, folder: str, number: int) -> None:
        """Take in what is in a folder: all of it is durable."""
        for entry in os.scandir(folder):
            inode = self.names[number, entry.name] = self.new()
            if entry.is_dir(follow_symlinks=False):
                self.scan(entry.path, inode)
            else:
                self.modes[inode] = entry.stat(follow_symlinks=False).st_mode & 0o7777
                self.content[inode] = Path(entry.path).read_bytes()

    def paths(self, names: dict[tuple[int, str], int]) -> list[tuple[str, int]]:
        """Return what the roots lead to by these names: paths and inodes."""
        inside: dict[int, list[tuple[str, int]]] = {}
        for (folder, name), inode in names.items():
            inside.setdefault(folder, []).append((name, inode))
        found: list[tuple[str, int]] = []
        todo = list(self.roots.items())
        while todo:
            path, number = todo.pop()
            for name, inode in inside.get(number, []):
                found.append((f"{path}/{name}", inode))
                if inode not in self.modes:
                    todo.append(found[-1])
        return found

    def tree(self, paths: list[tuple[str, int]], content: Mapping[int, bytes]) -> Tree:
        """Return what is at these paths."""
        return {
            path: (self.modes[inode], content.get(inode, b"")) if inode in self.modes else None
            for path, inode in paths
        }


class Recorder:
    """Write a log of what happens below some folders, which must be there."""

    def __init__(self, *roots: Path) -> None:
        self.log = log = Log()
        for root in roots:
            log.roots[os.path.realpath(root)] = log.new()
        for path, number in log.roots.items():
            log.scan(path, number)
        self._names = dict(log.names)
        self._content = dict(log.content)
        self._open: dict[int, int] = {}  # inode by descriptor

    def tell(self, what: str) -> None:
        """Note that something is acknowledged from now on."""
        self.log.events.append(Told(what))

    def settle(self, *paths: Path) -> None:
        """Let half a minute pass: the kernel has written everything by then, or these files."""
        some = [self.find(os.path.realpath(path)) for path in paths]
        for inode in [one for one in some if one] or range(1, self.log.count + 1):
            self.log.events.append(Sync(inode))

    def finish(self) -> Log:
        """Return the log; raise AssertionError where the folders are not what it says."""
        real = Log()
        for path in self.log.roots:
            real.roots[path] = real.new()
        for path, number in real.roots.items():
            real.scan(path, number)
        shown = self.log.tree(self.log.paths(self._names), self._content)
        assert real.tree(real.paths(real.names), real.content) == shown
        return self.log

    def locate(self, path: str, dir_fd: int | None = None) -> tuple[int, str] | None:
        """Return folder and name of a path, None for one that is not below a root."""
        if dir_fd is not None:
            path = f"{os.readlink(f'/proc/self/fd/{dir_fd}')}/{path}"
        above, _, name = os.path.abspath(path).rpartition("/")
        folder = self.find(os.path.realpath(above))
        return None if folder is None else (folder, name)

    def find(self, path: str) -> int | None:
        """Return the inode of a path without links, None for one that is not there or not ours."""
        for root, inode in self.log.roots.items():
            if path == root or path.startswith(f"{root}/"):
                found: int | None = inode
                for name in path[len(root) + 1 :].split("/"):
                    if name and found is not None:
                        found = self._names.get((found, name))
                return found
        return None

    def change(self, *changes: tuple[int, str, int | None], removed: int | None = None) -> None:
        """Note that names changed."""
        self.log.events.append(Names(changes, removed))
        for folder, name, inode in changes:
            if inode is None:
                del self._names[folder, name]
            else:
                self._names[folder, name] = inode

    def fill(self, inode: int, content: bytes) -> None:
        """Note that a file has another content."""
        self.log.events.append(Data(inode, content))
        self._content[inode] = content

    def open(self, real: Callable[..., int], path: Any, flags: int, *more: Any, **by: Any) -> int:
        """Open, and note a file that is made or emptied by that."""
        place = self.locate(os.fsdecode(path), by.get("dir_fd"))
        fd = real(path, flags, *more, **by)
        self._open.pop(fd, None)
        if place is None:
            inode = self.find(os.path.realpath(os.fsdecode(path)))
        else:
            inode = self._names.get(place)
            if inode is None and flags & os.O_CREAT:
                inode = self.log.new()
                self.log.modes[inode] = os.fstat(fd).st_mode & 0o7777
                self.change((*place, inode))
        if inode is not None:
            self._open[fd] = inode
            if flags & os.O_TRUNC and self._content.get(inode):
                self.fill(inode, b"")
        return fd

    def close(self, real: Callable[..., None], fd: int) -> None:
        """Close."""
        self._open.pop(fd, None)
        real(fd)

    def write(self, real: Callable[..., int], fd: int, data: Any) -> int:
        """Write where the descriptor stands."""
        count = real(fd, data)
        if (inode := self._open.get(fd)) is not None:
            end = os.lseek(fd, 0, os.SEEK_CUR)
            old = self._content.get(inode, b"").ljust(end - count, b"\0")
            new = old[: end - count] + bytes(data)[:count] + old[end:]
            self.fill(inode, new)
        return count

    def ftruncate(self, real: Callable[..., None], fd: int, length: int) -> None:
        """Cut a file."""
        real(fd, length)
        if (inode := self._open.get(fd)) is not None:
            content = self._content.get(inode, b"")[:length].ljust(length, b"\0")
            if content != self._content.get(inode, b""):
                self.fill(inode, content)

    def fchmod(self, real: Callable[..., None], fd: int, mode: int) -> None:
        """Change a mode, which is taken to be kept."""
        real(fd, mode)
        if (inode := self._open.get(fd, 0)) in self.log.modes:
            self.log.modes[inode] = mode & 0o7777

    def fsync(self, real: Callable[..., None], fd: int) -> None:
        """Note a sync; it takes no time here."""
        if (inode := self._open.get(fd)) is None:
            real(fd)
        else:
            self.log.events.append(Sync(inode))

    def rename(
        self,
        real: Callable[..., None],
        old: str,
        new: str,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
    ) -> None:
        """Rename, in one step on the disk as well."""
        source, target = self.locate(old, src_dir_fd), self.locate(new, dst_dir_fd)
        real(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        assert (source is None) == (target is None), "a rename leaves the folders that are watched"
        if source and target and source != target:
            self.change((*source, None), (*target, self._names[source]))

    def unlink(self, real: Callable[..., None], path: str, *, dir_fd: int | None = None) -> None:
        """Remove a name."""
        place = self.locate(path, dir_fd)
        real(path, dir_fd=dir_fd)
        if place:
            self.change((*place, None))

    def rmdir(self, real: Callable[..., None], path: str, *, dir_fd: int | None = None) -> None:
        """Remove a folder."""
        place = self.locate(path, dir_fd)
        real(path, dir_fd=dir_fd)
        if place:
            self.change((*place, None), removed=self._names[place])

    def mkdir(self, real: Callable[..., None], path: str, mode: int = 0o777) -> None:
        """Make a folder."""
        place = self.locate(path, None)
        real(path, mode)
        if place:
            self.change((*place, self.log.new()))


WRAPPED = {
    **{name: name for name in ("open", "close", "write", "ftruncate", "fchmod", "fsync")},
    **{name: name for name in ("rename", "unlink", "rmdir", "mkdir")},
    **{"fdatasync": "fsync", "replace": "rename", "remove": "unlink"},
}


@contextmanager
def recording(*roots: Path, told: Iterable[str] = ()) -> Generator[Recorder]:
    """Record what this process does below some folders; `told` was acknowledged before."""
    made = Recorder(*roots)
    made.log.told = frozenset(told)

    def wrap(real: Callable[..., Any], note: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            return note(real, *args, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, method in WRAPPED.items():
            patch.setattr(os, name, wrap(getattr(os, name), getattr(made, method)))
        yield made


def materialize(tree: Tree) -> None:
    """Make files and folders; what is in their place already must have been removed."""
    for path in sorted(tree):
        file = tree[path]
        if file is None:
            os.mkdir(path, 0o755)
        else:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IMODE(file[0]))
            os.write(fd, file[1])
            os.close(fd)
