# SPDX-License-Identifier: Apache-2.0
"""A function killed at one of the calls by which it changes something: a file, or a program's work.

Python's audit events tell of each such call before it is made. What a fake program of the test's
own does counts as one call.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, Union

import pytest

CHANGES: Final = frozenset(
    (
        *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink"),
        *("os.chmod", "os.chown", "os.utime", "os.truncate"),
    )
)
WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


LAST: Final = 6  # calls of which a sample leaves out none: they tidy up
PRIVATE, PUBLIC = 0o077, 0o022  # umask of the one who installs, and of others' programs
Left = dict[str, Union[str, tuple[int, int, bytes]]]  # mode, owner and text of each file, and more
ALL_OR_SAMPLE: Final = pytest.mark.parametrize(
    "share",  # one call of so many
    [
        pytest.param(20, id="sample", marks=pytest.mark.timeout(300)),
        pytest.param(1, id="all", marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)


HIDDEN: Final = re.compile(r"\..*\.[0-9a-f]{12}")  # gpulock.store.atomic, the link of the hooks


class ChangingCalls:
    """Counts the changing calls of this process from now on, and kills it at one of them."""

    def __init__(self, at: int = 0) -> None:
        self.seen: list[str] = []
        self._at = at
        self._hidden = 0
        sys.addaudithook(self._on_event)

    @contextmanager
    def one_call(self, name: str) -> Generator[None]:
        """Count all that is done within as one call of a program."""
        self._count(name)
        self._hidden += 1
        try:
            yield
        finally:
            self._hidden -= 1

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._hidden:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, (str, bytes)) and isinstance(flags, int) and flags & WRITES:
                self._count(f"open {os.fsdecode(path)}")
        elif event in CHANGES:
            self._count(f"{event} {arguments[0]}")

    def _count(self, what: str) -> None:
        self.seen.append(what)
        if len(self.seen) == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def run_killed(act: Callable[[ChangingCalls], None], at: int) -> tuple[bool, list[str]]:
    """Run a function in a child, killed at its call number `at`; return whether it was, and calls.

    With 0 it runs to its end, and the calls that it makes are returned. What it makes is for
    others to see by its own doing.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        os.umask(PRIVATE)
        try:
            calls = ChangingCalls(at)
            act(calls)
            os.write(writing, "\n".join(calls.seen).encode() if not at else b"")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as told:
        seen = told.read().split("\n")
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, "it failed by itself: see stderr"
    return killed, seen


class KilledSite(ABC):
    """A site in one folder on which an installer is killed at each of its calls."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: ChangingCalls | None = None
        self._keep("before")

    def _keep(self, name: str) -> None:
        copy_tree(str(self.root), f"{self.root}.{name}")

    def _put_back(self, name: str) -> None:
        shutil.rmtree(self.root)
        copy_tree(f"{self.root}.{name}", str(self.root))

    @contextmanager
    def one_call(self, name: str) -> Generator[None]:
        """Count what a fake program does as one call."""
        with self.calls.one_call(name) if self.calls else nullcontext():
            umask = os.umask(PUBLIC)
            try:
                yield
            finally:
                os.umask(umask)

    @abstractmethod
    def apply(self) -> None:
        """Install."""

    @abstractmethod
    def undo(self) -> list[str]:
        """Uninstall; return what was left."""

    def install(self, calls: ChangingCalls | None = None) -> None:
        """Install, each call counted."""
        self.calls = calls
        self.apply()

    def uninstall(self, calls: ChangingCalls | None = None) -> None:
        """Uninstall, likewise."""
        self.calls = calls
        assert self.undo() == []

    def left(self) -> Left:
        """Return all that there is, but what a killed write leaves hidden, and empty folders."""
        found: Left = {}
        files = [one for one in self.root.rglob("*") if one.is_symlink() or one.is_file()]
        files = [one for one in files if not HIDDEN.fullmatch(one.name)]
        folders = {above for one in files for above in one.parents if self.root in above.parents}
        for path in sorted({*files, *folders}):
            text = b"" if path.is_symlink() or path.is_dir() else path.read_bytes()
            info = path.lstat()
            found[str(path.relative_to(self.root))] = (info.st_mode, info.st_uid, text)
        return found

    def points(self, act: Callable[[ChangingCalls], None], share: int) -> list[int]:
        """Return the calls at which to kill: all, or a sample; of the hooks' files some do."""
        _, seen = run_killed(act, 0)
        numbers = range(1, len(seen) + 1)
        if share == 1:
            return [*numbers]
        files = [number for number, call in enumerate(seen, 1) if "/hooks/" in call]
        inner = range(min(files) + 8, max(files) - 8) if files else range(0)
        outer = [number for number in numbers if number not in inner]
        return [*outer[:-LAST:share], *outer[-LAST:], *inner[:: len(inner) // 3 or 1]]

    def killed_installations(self, share: int) -> list[str]:
        """Return what a killed installation leaves for good, uninstalled or completed."""
        before = self.left()
        self.install()
        whole = self.left()
        self.uninstall()
        nothing = self.left()
        self._put_back("before")
        bad: list[str] = []
        for point in self.points(self.install, share):
            self._put_back("before")
            assert run_killed(self.install, point)[0]
            self.uninstall()
            bad += [f"{point}: uninstalled: {o}" for o in differences(self.left(), nothing, before)]

            self._put_back("before")
            run_killed(self.install, point)
            self.install()
            bad += [f"{point}: installed: {one}" for one in differences(self.left(), whole)]
            self.uninstall()
            bad += [f"{point}: both: {one}" for one in differences(self.left(), nothing)]
        return bad

    def killed_uninstallations(self, share: int) -> list[str]:
        """Return what a killed uninstallation leaves for good."""
        self.install()
        self._keep("whole")
        points = self.points(self.uninstall, share)
        self._put_back("whole")
        self.uninstall()
        nothing = self.left()
        bad: list[str] = []
        for point in points:
            self._put_back("whole")
            assert run_killed(self.uninstall, point)[0]
            self.uninstall()
            bad += [f"{point}: {one}" for one in differences(self.left(), nothing)]
        return bad


def copy_tree(source: str, target: str) -> None:
    """Copy a folder, with the owners of its files."""

    def copy(one: str, other: str) -> None:
        shutil.copy2(one, other)
        if (owner := os.stat(one).st_uid) != os.geteuid():
            os.chown(other, owner, -1)

    shutil.copytree(source, target, symlinks=True, copy_function=copy)


def differences(now: Left, *wanted: Left) -> list[str]:
    """Return the files that are as none of these would have them; folders' modes included."""
    names = {name for one in (now, *wanted) for name in one}
    return sorted(
        f"{name} {now.get(name)!r:.80}"
        for name in names
        if now.get(name) not in [one.get(name) for one in wanted]
    )
