# SPDX-License-Identifier: Apache-2.0
"""The kinds of events in LOCK_DIR/events, and what words each has. Hot."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    Event = tuple[float, str, str]  # CLOCK_BOOTTIME seconds, kind, words

EVENTS = "events"

CLAIM = "claim"  # RESULT, seconds at the gate, USER:JOB; the gate was held
UNKNOWN_REQUEST = "unknown"  # USER:JOB of a claim that was refused as unknown; the gate was held
UNDONE = "undone"  # likewise, of a job that had been granted devices
TIMEOUT = "timeout"  # USER:JOB of a claim that found the gate shut until its deadline
OPEN = "open"  # a load sensor found the gate open again
REAPED = "reaped"  # what proved the owner of a lock dead
DROPPED = "dropped"  # how many claims were dropped before their line was in the history
REFUSED = "refused"  # JOB, and what Grid Engine's prolog told it
TOTALS = "totals"  # KEY=NUMBER of all events that are not kept
GATED = (CLAIM, REAPED)  # of many events, whose author has the gate
ENTERED = (CLAIM, OPEN)  # whose author had it, where others found it shut
