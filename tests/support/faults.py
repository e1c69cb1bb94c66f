# SPDX-License-Identifier: Apache-2.0
"""Faults for a test: what fails or says the same whatever it is asked, and calls that fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from typing_extensions import Never

from gpulock.errors import Refusal

Result = TypeVar("Result")
NO_PROCESS = str((1 << 22) + 1)  # no pid is so large (PID_MAX_LIMIT): nobody's parent


def raising(fault: BaseException | type[BaseException]) -> Callable[..., Never]:
    """Return a function that raises this, whatever it is asked."""

    def fail(*_: object, **__: object) -> Never:
        raise fault

    return fail


def returning(result: Result) -> Callable[..., Result]:
    """Return a function that returns this, whatever it is asked."""

    def give(*_: object, **__: object) -> Result:
        return result

    return give


def refusal(act: Callable[[], object]) -> Refusal:
    """Return why something is refused, which must be said in one line."""
    with pytest.raises(Refusal) as caught:
        act()
    assert caught.value.sentence("job 12").isprintable()
    return caught.value


disk_full = raising(OSError(errno.ENOSPC, "No space left on device"))


def faulty_settings(folder: Path) -> str:
    """Write settings with a key that nobody knows, all of whose places are in a folder."""
    path = folder / "faulty.conf"
    path.write_text(f"GUPS=8\nLOCK_DIR={folder}/lock\nSTATE_DIR={folder}/state\n")
    return str(path)


def fail_at(patch: pytest.MonkeyPatch, name: str, end: str, fault: OSError) -> None:
    """Let a function of `os` fail where its first argument, a path or a number, ends so."""
    real = getattr(os, name)

    def call(first: object, *more: Any, **named: Any) -> Any:
        if f"/{first}".endswith(end):
            raise type(fault)(*fault.args, first)
        return real(first, *more, **named)

    patch.setattr(os, name, call)


def replace_text(path: Path, old: str, new: str) -> None:
    """Change what a file says."""
    path.write_text(path.read_text().replace(old, new))


def plant_link(path: Path) -> None:
    """Put a link in the place of a file, to what it was."""
    path.rename(path.with_name("real"))
    path.symlink_to("real")


def plant_fifo(path: Path) -> None:
    """Put a FIFO in the place of a file."""
    path.unlink()
    os.mkfifo(path, 0o644)


def plant_folder(path: Path) -> None:
    """Put a folder in the place of a file."""
    path.unlink()
    path.mkdir(0o755)


class Failing:
    """Let the k-th call of one os function fail, or do something just before it."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        name: str,
        at: int,
        fault: BaseException | None = None,
        before: Callable[[str], object] | None = None,
    ) -> None:
        self.calls: list[str] = []
        real = getattr(os, name)

        def call(*arguments: object, **more: object) -> object:
            self.calls.append(str(arguments[0]))
            if len(self.calls) == at:
                if before is not None:
                    before(str(arguments[0]))
                if fault is not None:
                    raise fault
            return real(*arguments, **more)

        patch.setattr(os, name, call)
