# SPDX-License-Identifier: Apache-2.0
"""Which processes have begun since a moment, by their numbers.

Hot, loaded with process_scan. The kernel gives numbers upwards and begins anew at the highest one
(docs/facts/locking.md). So a process that forks and ends all the time is met by its child's number,
and a number that was not given since still is the same process's.
"""

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from gpulock.node.procfs import Proc

SHORTLY, MANY = 256, 1024  # numbers before a mark, and after it, that are asked for one by one
FAR = 1024  # numbers before a mark that are gone through for them
RATE = 2e6  # numbers a second: a processor gives 150,000, and they wait for each other


class PidMark:
    """The number given last, and until when (time.monotonic) none can have come round.

    Raises OSError, ValueError or IndexError where the kernel does not tell.
    """

    __slots__ = ("last", "until")

    def __init__(self, proc: "Proc") -> None:
        # in this order: what is given in between stands before the mark, and is no more to come
        begun = time.monotonic()
        self.until = begun + proc.free_pids() / RATE
        self.last = proc.last_pid()


def list_begun_since(
    mark: PidMark, proc: "Proc", known: "Collection[int]", others: "Collection[int]"
) -> "list[int] | None":
    """Return the processes that began since a mark, and those that were being made at it.

    The latter have numbers shortly before it that neither collection has. None where so many
    were given that to list all is cheaper, or where one may have come round. Raises OSError,
    ValueError or IndexError.
    """
    before = {*range(max(1, mark.last - FAR), mark.last + 1)}.difference(known, others)
    asked = sorted(before)[-SHORTLY:]
    found = [number for number in asked if os.access(f"{proc.root}/{number}", os.F_OK)]
    number, last = mark.last, proc.last_pid()
    while number < last <= mark.last + MANY:
        number += 1
        if os.access(f"{proc.root}/{number}", os.F_OK):
            found.append(number)
        if number == last:
            last = proc.last_pid()
    if not mark.last <= last <= number or time.monotonic() > mark.until:
        return None
    return [pid for pid in found if proc.leads(pid)]


def iterate_given(proc: "Proc", seconds: float) -> "Iterator[int]":
    """Give the numbers that are given from now on, each once, for so long; the newest ones first.

    Most are of no process by the time they are read, or never were: a fork may fail. Raises
    OSError, ValueError or IndexError.
    """
    late = time.monotonic() + seconds
    before = proc.last_pid()
    while time.monotonic() < late:
        last = proc.last_pid()
        yield from range(last, max(before, last - MANY), -1)
        before = last
