# SPDX-License-Identifier: Apache-2.0
"""Processes of whatever lab: whether and what they run, their kin, and their end."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.support.wait import wait_ended, wait_until


def running(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def command_of(pid: int) -> str:
    """Return the command line of a process, empty for one that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def parent_of(pid: int) -> int | None:
    """Return the parent of a process, None for one that is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return int(status.partition("\nPPid:")[2].partition("\n")[0])


def children_of(pid: int) -> list[int]:
    """Return the living children of a process."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [one for one in pids if parent_of(one) == pid and running(one)]


def wait_at_gate(hook: str) -> int:
    """Wait until a `prolog` or an `epilog` has the gate open, which it holds or waits for."""

    def find() -> int | None:
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                is_hook = b"-IS" in words and any(f"/{hook}/".encode() in word for word in words)
                if is_hook and any(
                    os.readlink(fd)[-5:] == "/gate" for fd in (entry / "fd").iterdir()
                ):
                    return int(entry.name)
        return None

    return wait_until(find, why=f"the {hook} to wait at the gate")


def end(pids: Iterable[int]) -> None:
    """Kill processes and wait until they are gone."""
    pids = list(pids)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_ended(pids, why=f"processes {pids} to end")


def remove_cgroups(find: Callable[[], Iterable[Path]]) -> None:
    """Remove the cgroups that `find` finds, and those in them, once their processes are gone."""

    def all_removed() -> bool:
        for group in find():
            for folder, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):  # its last process is still on its way out
                    os.rmdir(folder)
        return not [*find()]

    wait_until(all_removed, why=lambda: f"the lab's cgroups to go\n{[*find()]!s}")
