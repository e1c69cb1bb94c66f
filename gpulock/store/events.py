# SPDX-License-Identifier: Apache-2.0
"""LOCK_DIR/events: what became of claims in this boot, a line each.

Hot: every claim adds a line. `event_log` reads them. An event that cannot be written never stops a
claim, and no gate is needed to add one.
"""

from gpulock.deadline import clock_boottime
from gpulock.errors import one_line
from gpulock.store import atomic

NAME = "events"
CAP = 1 << 15  # bytes from which on who has the gate makes the older half one line of totals
SHUT_CAP = 1 << 18  # bytes from which on a claim does that finds the gate shut
LONGEST = 1200  # bytes of a line

CLAIM = "claim"  # RESULT, seconds at the gate, USER:JOB; the gate was held
UNKNOWN_REQUEST = "unknown"  # USER:JOB of a claim that was refused as unknown; the gate was held
UNDONE = "undone"  # likewise, of a job that had been granted devices
TIMEOUT = "timeout"  # USER:JOB of a claim that found the gate shut until its deadline
OPEN = "open"  # a load sensor found the gate open again
REAPED = "reaped"  # what proved the owner of a lock dead
DROPPED = "dropped"  # how many claims were dropped before their line was in the history
REFUSED = "refused"  # JOB, and what Grid Engine's prolog told it
TOTALS = "totals"  # KEY=NUMBER of all events that are not kept


def note_event(lock_dir: str, kind: str, *words: str) -> int:
    """Add an event; return how long the log is by then, 0 where the event is lost."""
    text = one_line(" ".join([f"{clock_boottime():.3f}", kind, *words]))
    data = text.encode("utf-8", "backslashreplace")[:LONGEST]
    try:  # the first byte ends a line that was cut short
        return atomic.append_file(f"{lock_dir}/{NAME}", b"\n" + data)
    except OSError:
        return 0


def format_claimant(user: str, job: str) -> str:
    """Return who asked, as one word."""
    return f"{user}:{job}".replace(" ", "?")
