# SPDX-License-Identifier: Apache-2.0
"""Processes that nothing ends, as in state D: a frozen cgroup of version 1 takes no signal."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path

from tests.labs.sge.wait import until


@contextlib.contextmanager
def frozen(name: str, pids: list[int]) -> Generator[None]:
    """Let processes be such as no signal ends, not even SIGKILL."""
    group = Path("/sys/fs/cgroup/freezer") / name
    group.mkdir(exist_ok=True)
    for pid in pids:
        (group / "cgroup.procs").write_text(str(pid))
    state = group / "freezer.state"
    state.write_text("FROZEN")
    try:
        until(lambda: state.read_text() == "FROZEN\n", what="all to be frozen")  # FREEZING before
        yield
    finally:
        state.write_text("THAWED")
        until(lambda: removed(group), what="the frozen to end")


def removed(group: Path) -> bool:
    """Remove a group; return whether that was possible: not as long as one of it dies."""
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()
