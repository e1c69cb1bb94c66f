# SPDX-License-Identifier: Apache-2.0
"""LOCK_DIR/events: what became of claims in this boot, a line each.

Hot: every claim adds a line. An event that cannot be written never stops a claim, and no gate is
needed to add one. From them come counters, streaks of refusals, and what jobs were told.
"""

from gpulock.deadline import clock_boottime
from gpulock.errors import one_line
from gpulock.store import atomic
from gpulock.store.event_kinds import CLAIM, EVENTS, GATED

CAP = 1 << 15  # bytes from which on who has the gate makes the older half one line of totals
SHUT_CAP = 1 << 18  # bytes from which on anybody does
EVENT_BYTES = 1200  # bytes of a line


def note_event(lock_dir: str, kind: str, *words: str) -> None:
    """Add an event, which may be lost; make the older half of a long log one line of totals."""
    text = one_line(" ".join([f"{clock_boottime():.3f}", kind, *words]))
    data = text.encode("utf-8", "backslashreplace")[:EVENT_BYTES]
    try:  # the first byte ends a line that was cut short
        size = atomic.append_file(f"{lock_dir}/{EVENTS}", b"\n" + data)
    except OSError:
        return
    if size > (CAP if kind in GATED else SHUT_CAP):
        try:
            from gpulock.store.event_log import fold_events
        except (ImportError, OSError, MemoryError):
            return  # the author of a later event does it
        fold_events(lock_dir)


def format_claimant(user: str, job: str) -> str:
    """Return who asked, as one word."""
    return f"{user}:{job}".replace(" ", "?")


def note_claim(lock_dir: str, result: str, name: str, waited: float) -> None:
    """Add what became of a claim; the gate is held."""
    note_event(lock_dir, CLAIM, result.replace(" ", "_"), f"{waited:.6f}", name)
