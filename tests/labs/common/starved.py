# SPDX-License-Identifier: Apache-2.0
"""Processes that cannot fork: a cgroup of version 1."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path

from tests.support.wait import wait_until


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
    """Return where a controller of version 1 is mounted, for a while where only version 2 is."""
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
