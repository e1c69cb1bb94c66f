# SPDX-License-Identifier: Apache-2.0
"""Processes that nothing ends, as in state D, and such as cannot fork: cgroups of version 1."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path

from tests.support.wait import wait_until


@contextlib.contextmanager
def frozen(name: str, pids: list[int]) -> Generator[None]:
    """Let processes be such as no signal ends, not even SIGKILL."""
    with hierarchy("freezer") as top:
        group = top / name
        group.mkdir(exist_ok=True)
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        state = group / "freezer.state"
        state.write_text("FROZEN")
        try:
            wait_until(
                lambda: state.read_text() == "FROZEN\n", why="all to be frozen"
            )  # FREEZING first
            yield
        finally:
            state.write_text("THAWED")
            wait_until(lambda: removed(group), why="the frozen to end")


@contextlib.contextmanager
def starved(name: str, pid: int, more: int) -> Generator[None]:
    """Let a process and its children have only so many more of them: their forks fail."""
    with hierarchy("pids") as top:
        group = top / name
        group.mkdir(exist_ok=True)
        (group / "pids.max").write_text(str(1 + more))
        (group / "cgroup.procs").write_text(str(pid))
        try:
            yield
        finally:
            (group / "pids.max").write_text("max")
            wait_until(lambda: removed(group), why="the starved to end")


@contextlib.contextmanager
def hierarchy(controller: str) -> Generator[Path]:
    """Return where a controller of version 1 is mounted, for a while where only version 2 is.

    A process that version 2 has frozen ends by SIGKILL.
    """
    usual = Path("/sys/fs/cgroup") / controller
    if usual.is_dir():
        yield usual
        return
    with tempfile.TemporaryDirectory() as place:
        mount = ["mount", "-t", "cgroup", "-o", controller, "gpulock-lab", place]
        subprocess.run(mount, check=True, timeout=60)
        try:
            yield Path(place)
        finally:
            subprocess.run(["umount", place], check=True, timeout=60)


def removed(group: Path) -> bool:
    """Remove a group; return whether that was possible: not as long as one of it dies."""
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()
