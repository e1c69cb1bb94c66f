# SPDX-License-Identifier: Apache-2.0
"""What LOCK_DIR/events says: counters of this boot, streaks of refusals, what jobs were told.

Hot, loaded after a refusal that may be the node's fault, and by those who show it.
"""

import os

from gpulock.store import atomic, events

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    Event = tuple[float, str, str]  # CLOCK_BOOTTIME seconds, kind, words

LIMIT = 1 << 20  # bytes; the file is folded at a part of it
MOST = 1e15  # no counter is larger
STREAK_JOBS, STREAK_OWNERS = 3, 2  # unknowns of so many jobs and owners in a row: a broken node
ENTERED = (events.CLAIM, events.OPEN)  # whose author had the gate


def read_events(lock_dir: str) -> "list[Event]":
    """Return the events, oldest first, none where there is no file; raise OSError."""
    try:
        return parse_events(atomic.read_text(f"{lock_dir}/{events.NAME}", LIMIT))
    except FileNotFoundError:
        return []


def parse_events(text: str) -> "list[Event]":
    """Return the events of a text; a line that is none is left out."""
    found: "list[Event]" = []
    for line in text.split("\n"):
        at, _, rest = line.partition(" ")
        kind, _, words = rest.partition(" ")
        try:
            found.append((parse_amount(at), kind, words))
        except ValueError:
            continue
    return found


def parse_amount(text: str) -> float:
    """Return a number that is not negative; raise ValueError for anything else."""
    value = float(text)
    if not 0 <= value <= MOST:
        raise ValueError(f"not a counter: {text}")
    return value


def count_events(found: "Iterable[Event]") -> dict[str, float]:
    """Return the counters of this boot. Pure.

    Their keys are `claims_RESULT`, `reaped_PROOF`, `lock_wait_seconds`, `lock_timeouts`, and
    `history_dropped`.
    """
    totals: dict[str, float] = {}
    for _, kind, words in found:
        first, _, rest = words.partition(" ")
        try:
            if kind == events.CLAIM:
                waited = parse_amount(rest.partition(" ")[0])
                pairs = [(f"claims_{first}", 1.0), ("lock_wait_seconds", waited)]
            elif kind == events.REAPED:
                pairs = [(f"reaped_{first}", 1.0)]
            elif kind == events.TIMEOUT:
                pairs = [("lock_timeouts", 1.0)]
            elif kind == events.DROPPED:
                pairs = [("history_dropped", parse_amount(first))]
            elif kind == events.TOTALS:
                named = [word.partition("=") for word in words.split()]
                pairs = [(key, parse_amount(value)) for key, _, value in named]
            else:
                continue
        except ValueError:
            continue
        for key, amount in pairs:
            totals[key] = totals.get(key, 0.0) + amount
    return totals


def limit_events(lock_dir: str) -> None:
    """Fold the events of a log that is too long; the gate is held. Raises OSError."""
    try:
        size = os.stat(f"{lock_dir}/{events.NAME}").st_size
    except FileNotFoundError:
        return
    if size > events.CAP:
        fold_events(lock_dir)


def fold_events(lock_dir: str) -> None:
    """Make the older half of the events one line of totals; a file that cannot be read goes.

    An event that is added meanwhile is lost.
    """
    path = f"{lock_dir}/{events.NAME}"
    try:
        found = parse_events(atomic.read_text(path, LIMIT))
    except OSError:
        atomic.remove_quietly(path)
        return
    half = len(found) // 2
    try:
        totals = [f"{key}={value:.6f}" for key, value in count_events(found[:half]).items()]
        kept = [(0.0, events.TOTALS, " ".join(totals)), *found[half:]]
        text = "".join([f"{at:.3f} {kind} {words}\n" for at, kind, words in kept])
        atomic.replace_file(path, text.encode("utf-8", "surrogateescape"))
    except OSError:
        return


def is_unknown_streak(found: "list[Event]", who: str, granted: bool) -> bool:
    """Return whether another unknown, of `who`, makes jobs of several owners in a row. Pure.

    A grant ends the row, unless it is one that was undone: `granted` says so of this job's.
    """
    claimants, undone = {who}, {who} if granted else set[str]()
    for _, kind, words in reversed(found):
        if kind in (events.UNKNOWN_REQUEST, events.UNDONE):
            claimants.add(words)
            if kind == events.UNDONE:
                undone.add(words)
        elif kind == events.CLAIM and words.startswith("granted "):
            if words.rpartition(" ")[2] in undone:
                continue
            break
    return is_streak(claimants)


def is_timeout_streak(found: "list[Event]") -> bool:
    """Return whether jobs of several owners found the gate shut since somebody got in. Pure."""
    claimants: set[str] = set()
    for _, kind, words in reversed(found):
        if kind in ENTERED:
            break
        if kind == events.TIMEOUT:
            claimants.add(words)
    return is_streak(claimants)


def is_streak(claimants: set[str]) -> bool:
    """Return whether jobs of several owners, each `USER:JOB`, mean a broken node. Pure."""
    owners = {one.partition(":")[0] for one in claimants}
    return len(claimants) >= STREAK_JOBS and len(owners) >= STREAK_OWNERS


def is_gate_in_doubt(lock_dir: str) -> bool:
    """Return whether a claim found the gate shut, and nobody got in since; raise OSError."""
    last = [kind for _, kind, _ in read_events(lock_dir) if kind in (events.TIMEOUT, *ENTERED)]
    return last[-1:] == [events.TIMEOUT]


def count_dropped_claims(lock_dir: str) -> int:
    """Return how many claims of this boot were dropped before their line was in the history."""
    try:
        return int(count_events(read_events(lock_dir)).get("history_dropped", 0))
    except OSError:
        return 0


def list_refusals(found: "Iterable[Event]") -> "list[tuple[float, str, str]]":
    """Return (time, job, what it was told) of each refusal. Pure."""
    told = [(at, *words.partition(" ")) for at, kind, words in found if kind == events.REFUSED]
    return [(at, job, text) for at, job, _, text in told if job.isascii() and job.isdigit()]
