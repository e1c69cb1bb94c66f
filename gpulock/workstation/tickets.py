# SPDX-License-Identifier: Apache-2.0
"""Callers of `gpulock run` and `claim` are served in the order they came.

A ticket is a file `tickets/<number>.<pid>.<start>`, numbered under the gate. The first living
ticket tries to claim; the others wait. Any caller drops a ticket whose process is gone.
Only the first in line is served, so a large request is never starved by small ones. A caller with
--wait marks its ticket once it cannot be served: another one without --wait is then refused. An
unmarked ticket is one of a moment, which a caller without --wait waits for as well. A ticket that
is marked as yielding keeps its place, but no other user waits for it
(gpulock.workstation.backfill).
"""

import os
import time

from gpulock.deadline import Deadline
from gpulock.errors import BROKEN, BUSY, Refusal
from gpulock.node.context import Node
from gpulock.store import atomic
from gpulock.store.gate import LONGEST_WAIT, Gate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from gpulock.alloc.claim import Grant

FOLDER = "tickets"
WAITS, YIELDS = "waiting", "yielding"  # what a ticket says; after the latter its user
ANYBODY = -1  # no user
PARTS = 3  # number, pid, start time
PAUSE = 0.25  # seconds between two looks of one that waits
MOMENT = 0.02  # seconds between two looks while those before are at it this moment


def take_ticket(node: Node, deadline: Deadline, pid: int = 0, used: "Collection[str]" = ()) -> str:
    """Draw the next ticket, for process `pid` (0: this one); return its name. Raises Refusal.

    Another process gets back the first of its tickets that is not `used` by one of its calls: it
    waited already when gpulockd was started again.
    """
    given, pid = bool(pid), pid or os.getpid()
    with Gate(node.store, deadline):
        folder = f"{node.store.path}/{FOLDER}"
        try:
            os.makedirs(folder, 0o755, exist_ok=True)
            start = node.proc.start(pid)
            drawn = list_tickets(folder)
            mine = [name for name in drawn if given and parse_ticket(name)[1:] == (pid, start)]
            left = [name for name in mine if name not in used]
            if left:
                return left[0]
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


def mark_waiting(node: Node, name: str, yields: int = ANYBODY) -> None:
    """Note that the caller of a ticket waits for devices; a ticket that is lost stays so.

    Where it lets other users by, `yields` is its own.
    """
    text = WAITS if yields == ANYBODY else f"{YIELDS} {yields}"
    try:
        with open(f"{node.store.path}/{FOLDER}/{name}", "r+b", buffering=0) as ticket:
            ticket.write(f"{text}\n".encode("ascii"))
    except OSError:
        return


def is_yielding(node: Node, name: str, uid: int = ANYBODY) -> bool:
    """Return whether a ticket lets a user by; without `uid` whether it lets any."""
    try:
        first, _, _ = atomic.read_text(f"{node.store.path}/{FOLDER}/{name}").partition("\n")
    except OSError:
        return False
    return first.startswith(f"{YIELDS} ") and first != f"{YIELDS} {uid}"


def has_waiting_caller(node: Node, names: list[str]) -> bool:
    """Return whether the caller of one of these tickets waits for devices."""
    for name in names:
        try:
            if os.stat(f"{node.store.path}/{FOLDER}/{name}").st_size:
                return True
        except OSError:
            continue
    return False


def list_callers_ahead(node: Node, name: str, uid: int = ANYBODY) -> list[str]:
    """Return the tickets of living callers before this one of a user; those of dead ones go.

    One that yields to that user, or was stopped (SIGSTOP, Ctrl-Z), keeps its ticket, but is not
    waited for.
    """
    before: list[str] = []
    place = parse_ticket(name)
    for other in list_tickets(f"{node.store.path}/{FOLDER}"):
        if parse_ticket(other) >= place:  # also where our own is lost
            return before
        _, pid, start = parse_ticket(other)
        try:
            living = node.proc.running(pid, start)
        except OSError:
            living = True
        if not living:
            remove_ticket(node, other)
        elif not is_stopped(node, pid) and not is_yielding(node, other, uid):
            before.append(other)
    return before


def is_stopped(node: Node, pid: int) -> bool:
    """Return whether a caller was stopped, and so cannot use what it would be granted."""
    try:
        return node.proc.stat(pid).state in ("T", "t")
    except OSError:
        return False


def drop_dead_tickets(node: Node) -> None:
    """Drop the tickets of processes that are gone; one that cannot be seen keeps its place."""
    for name in list_tickets(f"{node.store.path}/{FOLDER}"):
        _, pid, start = parse_ticket(name)
        try:
            if not node.proc.running(pid, start):
                remove_ticket(node, name)
        except OSError:
            continue


def drop_left_tickets(node: Node, kept: "Collection[str]") -> None:
    """Drop the tickets that gpulockd drew, but for those `kept`: their callers do not call again.

    The owner of LOCK_DIR needs no gpulockd, and draws tickets for itself.
    """
    owner = os.stat(node.store.path).st_uid
    for name in list_tickets(f"{node.store.path}/{FOLDER}"):
        try:
            if name not in kept and node.proc.status(parse_ticket(name)[1]).uids[1] != owner:
                remove_ticket(node, name)
        except (OSError, ValueError):
            continue


def claim_in_turn(
    node: Node,
    attempt: "Callable[[], Grant]",
    deadline: Deadline,
    waiting: "Callable[[int, str], None]",
    yields: "Callable[[], bool]",
    uid: int,
) -> "Grant":
    """Call `attempt` when it is our turn, again and again while it is refused as busy.

    `waiting` is told how many are before us, and why it is still busy. `yields` says whether a
    refused attempt lets other users than `uid` by. Raises the last Refusal at the deadline.
    Without time to wait, a caller that would overtake one that waits is refused; it waits for
    others of a moment, no longer than for the gate.
    """
    # the gate is never held for long: a caller that does not queue waits for it all the same
    ticket = take_ticket(node, Deadline(LONGEST_WAIT))
    moments = Deadline(LONGEST_WAIT)
    try:
        while True:
            ahead = list_callers_ahead(node, ticket, uid)
            moment = bool(ahead) and not has_waiting_caller(node, ahead)
            refusal = line_refusal(len(ahead))
            if not ahead:
                try:
                    return attempt()
                except Refusal as again:
                    if again.kind != BUSY:
                        raise
                    refusal = again
            if deadline.left() > 0:
                waiting(len(ahead), refusal.why)
                if not moment:
                    by = all([is_yielding(node, name) for name in ahead]) if ahead else yields()
                    mark_waiting(node, ticket, uid if by else ANYBODY)
            elif not moment or moments.left() <= 0:
                raise refusal
            time.sleep(MOMENT if moment else max(0.0, min(PAUSE, deadline.left())))
    finally:
        remove_ticket(node, ticket)


def line_refusal(before: int) -> Refusal:
    """Return what a caller is told that would overtake others."""
    return Refusal(BUSY, f"callers ahead in the queue: {before}", "use --wait")
