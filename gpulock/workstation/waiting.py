# SPDX-License-Identifier: Apache-2.0
"""LOCK_DIR/waiting: who waits in gpulockd's queue of users' claims, for everybody to read.

Warm. Written by gpulockd alone. The next gpulockd finds there who waited already.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

from gpulock.errors import one_line
from gpulock.node.context import Node
from gpulock.store import atomic

WAITING_FILE = "waiting"
VERSION = 1
LIMIT = 1 << 18  # bytes: 200 callers of 1000 characters
SHOWN = 200  # characters of a text
KEPT = "free GPUs are kept for it"  # begins why a caller waits
NOT_WAITING = (ValueError, LookupError, TypeError, OverflowError, RecursionError)


class WaitingCaller(NamedTuple):
    """One caller: its number, the process that called, its user, and since when it waits.

    `since` in CLOCK_BOOTTIME seconds. `what` it asks for, and `why` it is not served yet.
    """

    number: int
    pid: int
    start: int
    uid: int
    since: float
    user: str
    what: str
    why: str


KINDS = (int, int, int, int, float, str, str, str)  # of a caller's fields


def encode_waiting(callers: list[WaitingCaller], boot_id: str) -> bytes:
    """Return the file."""
    import json  # here alone: status of a node without a queue does without

    lines = [
        [one_line(value)[:SHOWN] if isinstance(value, str) else value for value in one]
        for one in callers
    ]
    return json.dumps({"version": VERSION, "boot_id": boot_id, "callers": lines}).encode()


def write_waiting(lock_dir: str, data: bytes) -> None:
    """Replace the file; raise OSError."""
    atomic.replace_file(f"{lock_dir}/{WAITING_FILE}", data)


def read_waiting(node: Node) -> list[WaitingCaller]:
    """Return those that wait, in the order of their numbers; nobody where the file is no good."""
    try:
        text = atomic.read_text(f"{node.store.path}/{WAITING_FILE}", LIMIT)
        import json

        page: dict[str, Any] = json.loads(text)
        if (page["version"], page["boot_id"]) != (VERSION, node.boot_id):
            return []
        callers = [
            WaitingCaller(*[kind(value) for kind, value in zip(KINDS, line)])
            for line in page["callers"]
        ]
    except (OSError, *NOT_WAITING):
        return []
    return sorted([one for one in callers if not has_ended(node, one)])


def has_ended(node: Node, one: WaitingCaller) -> bool:
    """Return whether the process of a caller has ended; one that cannot be seen has not."""
    with suppress(OSError, ValueError):
        return not node.proc.running(one.pid, one.start)
    return False


def is_stopped(node: Node, pid: int) -> bool:
    """Return whether a process was stopped: a caller can use nothing, and a gpulockd give none."""
    try:
        return node.proc.stat(pid).state in ("T", "t")
    except OSError:
        return False
