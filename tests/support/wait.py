# SPDX-License-Identifier: Apache-2.0
"""Wait for what other processes do: the one place of the tests that polls and that sleeps.

A wait gives up when nothing happens any more, and not by the wall clock: a busy machine makes
every poll take longer, and one that stands still makes none.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
from collections.abc import Callable, Generator, Iterable
from time import monotonic, sleep  # a unit test's own stand still
from typing import Any, Final, TypeVar, Union

from tests.support import evidence
from tests.support.evidence import LabError

__all__ = ["GaveUp", "LabError", "let_work", "wait_ended", "wait_exit", "wait_until"]
_T = TypeVar("_T")
Why = Union[str, Callable[[], str]]

QUIET: Final = 40.0  # seconds of polls in which nothing happens, where no lab is up
LAB_QUIET: Final = 150.0  # seconds of polls in which no log grows: Slurm starts a job again in 121
LONGEST_POLL: Final = 0.25  # seconds that one poll counts at most, however long it took
# Seconds by the wall clock, after which a wait ends though logs grow: pytest ends tests after 600.
BOUND: Final = 3600.0 if os.environ.get("GPULOCK_SOAK") == "1" else 480.0


class GaveUp(LabError):
    """A wait that gave up: what it waited for did not come, and nothing else happened either."""


def wait_until(
    condition: Callable[[], _T | None],
    *,
    why: Why,
    quiet: float | None = None,
) -> _T:
    """Return the first result of `condition` that is true.

    `why` says what that is: a text, to which the labs that are up add their state, or a function
    that says more.
    """
    began = monotonic()
    quiet = quiet or (LAB_QUIET if evidence.is_watched() else QUIET)
    polls = 0
    while True:
        sizes = evidence.log_sizes()
        for _ in _polls(quiet, began + BOUND):
            polls += 1
            result = condition()
            if result:
                return result
        took = monotonic() - began
        if took > BOUND or evidence.log_sizes() == sizes:
            text = why if isinstance(why, str) else why()
            about = f"{text}\n{evidence.describe()}".rstrip()
            raise GaveUp(f"gave up after {polls} polls in {took:.1f} s, waiting for {about}")


def wait_ended(pids: Iterable[int], *, why: Why) -> None:
    """Wait until processes are over, zombies or gone: the kernel says it of each."""
    with contextlib.ExitStack() as stack:
        poller, left = select.poll(), set[int]()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                stack.callback(os.close, descriptor)
                poller.register(descriptor, select.POLLIN)
                left.add(descriptor)

        def over() -> bool:
            for descriptor, _ in poller.poll(1000 * LONGEST_POLL) if left else []:
                poller.unregister(descriptor)
                left.discard(descriptor)
            return not left

        wait_until(over, why=why)


def wait_exit(process: subprocess.Popen[Any], *, why: Why) -> int:
    """Wait until a process of ours has ended; return its exit status."""
    wait_ended([process.pid], why=why)
    return process.wait()


def let_work(seconds: float) -> None:
    """Let other processes work for a while, before a blow that falls at a random moment."""
    sleep(seconds)


def _polls(quiet: float, end: float) -> Generator[None]:
    """Yield for each poll until these have taken so long; one that costs much is rarer."""
    spent = 0.0
    while spent < quiet:
        began = monotonic()
        yield
        took = monotonic() - began
        sleep(min(max(0.01, 2 * took), LONGEST_POLL))
        now = monotonic()
        spent += min(now - began, LONGEST_POLL)
        if now > end:
            return
