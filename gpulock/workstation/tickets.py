# SPDX-License-Identifier: Apache-2.0
"""Callers of `gpulock run --wait` and `claim --wait` are served in the order they came.

A ticket is a file `tickets/<number>.<pid>.<start>`, numbered under the gate. The first living
ticket tries to claim; the others wait. A ticket whose process is gone is dropped by the next
caller. Only the first in line is served, so a large request is never starved by small ones.
"""

import os
import time

from gpulock.deadline import Deadline
from gpulock.errors import BROKEN, BUSY, Refusal
from gpulock.node.context import Node
from gpulock.store import atomic
from gpulock.store.gate import Gate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulock.alloc.claim import Grant

FOLDER = "tickets"
PARTS = 3  # number, pid, start time
PAUSE = 0.25  # seconds between two looks of one that waits


def take_ticket(node: Node, deadline: Deadline, pid: int = 0) -> str:
    """Draw the next ticket, for process `pid` (0: this one); return its name. Raises Refusal.

    Another process that stands in line already keeps its place.
    """
    folder = f"{node.store.path}/{FOLDER}"
    given, pid = bool(pid), pid or os.getpid()
    with Gate(node.store.path, deadline.sooner(node.settings.gate_timeout)):
        try:
            os.makedirs(folder, 0o755, exist_ok=True)
            start = node.proc.start(pid)
            drawn = list_tickets(folder)
            mine = [name for name in drawn if given and parse_ticket(name)[1:] == (pid, start)]
            if mine:
                return mine[0]
            numbers = [parse_ticket(name)[0] for name in drawn]
            name = f"{max(numbers, default=0) + 1:08}.{pid}.{start}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            os.close(os.open(f"{folder}/{name}", flags, 0o644))
        except OSError as fault:
            raise Refusal(BROKEN, f"no ticket can be drawn: {fault}", "look at LOCK_DIR") from fault
    return name


def remove_ticket(node: Node, name: str) -> None:
    """Leave the line."""
    atomic.remove_quietly(f"{node.store.path}/{FOLDER}/{name}")


def list_tickets(folder: str) -> list[str]:
    """Return the tickets in order; what is no ticket is not looked at."""
    found: list[str] = []
    try:
        listed = os.listdir(folder)
    except FileNotFoundError:
        return []
    for name in listed:
        try:
            parse_ticket(name)
        except ValueError:
            continue
        found.append(name)
    return sorted(found, key=parse_ticket)


def parse_ticket(name: str) -> tuple[int, int, int]:
    """Return (number, pid, start) of a ticket; raise ValueError."""
    parts = name.split(".")
    if len(parts) != PARTS:
        raise ValueError(f"no ticket: {name!r}")
    return int(parts[0]), int(parts[1]), int(parts[2])


def count_callers_ahead(node: Node, name: str) -> int:
    """Return how many living callers are before this one; tickets of dead ones are dropped.

    One that was stopped (SIGSTOP, Ctrl-Z) keeps its ticket, but nobody waits for it.
    """
    before = 0
    place = parse_ticket(name)
    for other in list_tickets(f"{node.store.path}/{FOLDER}"):
        if parse_ticket(other) >= place:  # also where our own is lost
            return before
        _, pid, start = parse_ticket(other)
        try:
            living = node.proc.running(pid, start)
            if living and node.proc.stat(pid).state in ("T", "t"):
                continue
        except OSError:
            living = True
        if living:
            before += 1
        else:
            remove_ticket(node, other)
    return before


def claim_in_turn(
    node: Node,
    attempt: "Callable[[], Grant]",
    deadline: Deadline,
    waiting: "Callable[[int, str], None]",
) -> "Grant":
    """Call `attempt` when it is our turn, again and again while it is refused as busy.

    `waiting` is told how many are before us, and why it is still busy. Raises the last Refusal
    at the deadline; without time to wait, one that would overtake the line is refused.
    """
    # the gate is never held for long: a caller that does not queue waits for it all the same
    ticket = take_ticket(node, Deadline(node.settings.gate_timeout))
    try:
        while True:
            before = count_callers_ahead(node, ticket)
            refusal = Refusal(BUSY, f"callers ahead in the queue: {before}", "use --wait")
            if before == 0:
                try:
                    return attempt()
                except Refusal as again:
                    if again.kind != BUSY:
                        raise
                    refusal = again
            if deadline.left() <= 0:
                raise refusal
            waiting(before, refusal.why)
            time.sleep(min(PAUSE, deadline.left()))
    finally:
        remove_ticket(node, ticket)
