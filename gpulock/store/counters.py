# SPDX-License-Identifier: Apache-2.0
"""Counters of this boot in LOCK_DIR/totals, and the streak of requests that were not understood.

Hot. Replaced under the gate. A counter that cannot be written never stops a claim. A hook that
found the gate shut adds a line to `timeouts`; the next one that gets in folds it in. So it is with
`dropped`: a byte for each released lock that was removed before its line was in the history.
"""

import errno
import os

from gpulock.store import atomic, kv
from gpulock.store.grants import DROPPED
from gpulock.store.locks import LockStore

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

    from gpulock.store.verdicts import DeathProof

UNDONE = "streak_before"  # the streak that the last grant ended
TIMEOUTS, TIMEOUT_LENGTH = "timeouts", 32  # bytes of a line: USER:JOB
# counters that are noted in a file of their own, so many bytes a time, until a hook folds them in
NOTED = (("lock_timeouts", TIMEOUTS, TIMEOUT_LENGTH), ("history_dropped", DROPPED, 1))
STREAK_JOBS, STREAK_OWNERS = 3, 2  # unknowns of so many jobs and owners in a row: a broken node


class ClaimCounters:
    """The counters as read; change them, then `save`."""

    __slots__ = ("_store", "values")

    def __init__(self, store: LockStore) -> None:
        self._store = store
        try:
            self.values = kv.decode_pairs(atomic.read_text(f"{store.path}/totals"))
        except (OSError, kv.MalformedError):
            self.values = {}

    def add(self, key: str, amount: float = 1) -> None:
        """Add to one counter."""
        try:
            before = float(self.values.get(key, "0"))
        except ValueError:
            before = 0.0
        self.values[key] = f"{before + amount:.6f}".rstrip("0").rstrip(".")

    def count_reap(self, by: "DeathProof") -> None:
        """Count a lock that was freed, by what proved that its owner is dead."""
        self.add(f"reaped_{by}")

    def count_result(self, kind: str, waited: float) -> None:
        """Count a claim by its result; a grant ends the streak of unknowns, unless it is undone."""
        if kind == "granted":
            self.values.pop(UNDONE, None)
            if streak := self.values.pop("streak", ""):
                self.values[UNDONE] = streak
        self.add(f"claims_{kind.replace(' ', '_')}")
        self.add("lock_wait_seconds", waited)

    def note_unknown_streak(self, job: str, user: str, granted: bool = False) -> bool:
        """Note an unknown, also of a job that was `granted`; return whether it breaks the node."""
        streak = self.values.get("streak") or (self.values.get(UNDONE, "") if granted else "")
        entries = [e for e in streak.split(",") if e]
        entry = f"{user}:{job}".replace(",", "?")
        if entry not in entries:
            entries = [*entries[-7:], entry]
        self.values["streak"] = ",".join(entries)
        return is_streak(entries)

    def save(self) -> None:
        """Write the counters, with what was counted without them; what fails is lost."""
        folder = self._store.path
        for key, name, length in NOTED:
            try:
                self.add(key, os.stat(f"{folder}/{name}").st_size // length)
                atomic.remove_quietly(f"{folder}/{name}")
            except OSError:
                continue  # nothing was
        try:
            data = kv.encode_pairs(list(self.values.items())).encode()
            atomic.replace_file(f"{folder}/totals", data)
        except (OSError, ValueError):
            return


def is_streak(entries: "Collection[str]") -> bool:
    """Return whether jobs of several owners, each `USER:JOB`, mean a broken node. Pure."""
    owners = {entry.partition(":")[0] for entry in entries}
    return len(entries) >= STREAK_JOBS and len(owners) >= STREAK_OWNERS


def note_lock_timeout(store: LockStore, job: str, user: str) -> bool:
    """Note, without the gate, that it stayed shut; return whether that means a broken node.

    The lines are of jobs that waited in vain since somebody got in last.
    """
    path, size = f"{store.path}/{TIMEOUTS}", TIMEOUT_LENGTH - 1
    entry = f"{user}:{job}".encode("utf-8", "replace").replace(b"\n", b"?")[:size]
    try:
        atomic.append_file(path, entry.ljust(size) + b"\n")
        return is_streak({line for line in atomic.read_text(path).split("\n") if line})
    except OSError as fault:
        return fault.errno == errno.EFBIG  # thousands, and nobody got in


def read_history_dropped(store: LockStore) -> int:
    """Return how many claims of this boot were dropped before their line was in the history."""
    try:
        fresh = os.stat(f"{store.path}/{DROPPED}").st_size
    except OSError:
        fresh = 0
    return kv.int_or_zero(ClaimCounters(store).values.get("history_dropped", "")) + fresh
