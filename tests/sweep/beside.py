# SPDX-License-Identifier: Apache-2.0
"""strace beside a program, for one that looks at itself, at its parent, or at its own cgroup.

Above it, strace would be what the program finds as its parent, and PROC_ROOT would not show the
program. With -D it is the program that is started, and strace watches it from elsewhere: outside
of the job's cgroup too, which else would never be empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.support.wait import let_work
from tests.sweep.trace import KILL

POLLS, PAUSE = 500, 0.002  # in which strace writes that it killed


def beside(
    head: Sequence[str], argv: Sequence[str], inside: Iterable[Path], outside: Iterable[Path]
) -> list[str]:
    """Return a command line that runs `argv` in some cgroups, and `head`, strace's, in others."""
    if not head:
        return list(argv)
    return [*into(outside), head[0], "-D", *head[1:], *into(inside), *argv]


def into(folders: Iterable[Path]) -> list[str]:
    """Return the head of a command line whose program runs in these cgroups."""
    moves = "".join(f"echo $$ >{folder}/cgroup.procs; " for folder in folders)
    return ["/bin/sh", "-c", f'{moves}exec "$@"', "sh"] if moves else []


def await_end(head: Sequence[str], log: Path) -> None:
    """Wait until strace, if it was to kill the program, has written that it did.

    Where the program made fewer calls than before there is nothing to wait for.
    """
    if not any(f"signal={KILL}" in word for word in head):
        return
    for _ in range(POLLS):
        if "killed by" in log.read_text(errors="replace"):
            return
        let_work(PAUSE)
