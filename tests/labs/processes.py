# SPDX-License-Identifier: Apache-2.0
"""Processes of whatever lab: whether they run, and their end."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from tests.labs.sge_wait import until


def running(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def end(pids: Iterable[int]) -> None:
    """Kill processes and wait until they are gone."""
    pids = list(pids)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not any(map(running, pids)), what=f"processes {pids} to end")
