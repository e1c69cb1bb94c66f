# SPDX-License-Identifier: Apache-2.0
"""LOCK_DIR/events: what became of claims in this boot, a line each.

Hot: every claim adds a line. An event that cannot be written never stops a claim, and no gate is
needed to add one. From them come counters, streaks of refusals, and what jobs were told.
"""

from gpulock.deadline import clock_boottime
from gpulock.errors import one_line
from gpulock.store import atomic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    Event = tuple[float, str, str]  # CLOCK_BOOTTIME seconds, kind, words

NAME = "events"
CAP = 1 << 15  # bytes from which on who has the gate makes the older half one line of totals
SHUT_CAP = 1 << 18  # bytes from which on anybody does
LONGEST = 1200  # bytes of a line
LIMIT = 1 << 20  # bytes of a log that is read
MOST = 1e15  # no counter is larger
STREAK_JOBS, STREAK_OWNERS = 3, 2  # unknowns of so many jobs and owners in a row: a broken node

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


def note_event(lock_dir: str, kind: str, *words: str) -> None:
    """Add an event, which may be lost; make the older half of a long log one line of totals."""
    text = one_line(" ".join([f"{clock_boottime():.3f}", kind, *words]))
    data = text.encode("utf-8", "backslashreplace")[:LONGEST]
    try:  # the first byte ends a line that was cut short
        size = atomic.append_file(f"{lock_dir}/{NAME}", b"\n" + data)
    except OSError:
        return
    if size > (CAP if kind in GATED else SHUT_CAP):
        fold_events(lock_dir)


def format_claimant(user: str, job: str) -> str:
    """Return who asked, as one word."""
    return f"{user}:{job}".replace(" ", "?")


def read_events(lock_dir: str) -> "list[Event]":
    """Return the events, oldest first, none where there is no file; raise OSError."""
    try:
        return parse_events(atomic.read_text(f"{lock_dir}/{NAME}", LIMIT))
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
            if kind == CLAIM:
                waited = parse_amount(rest.partition(" ")[0])
                pairs = [(f"claims_{first}", 1.0), ("lock_wait_seconds", waited)]
            elif kind == REAPED:
                pairs = [(f"reaped_{first}", 1.0)]
            elif kind == TIMEOUT:
                pairs = [("lock_timeouts", 1.0)]
            elif kind == DROPPED:
                pairs = [("history_dropped", parse_amount(first))]
            elif kind == TOTALS:
                named = [word.partition("=") for word in words.split()]
                pairs = [(key, parse_amount(value)) for key, _, value in named]
            else:
                continue
        except ValueError:
            continue
        for key, amount in pairs:
            totals[key] = totals.get(key, 0.0) + amount
    return totals


def fold_events(lock_dir: str) -> None:
    """Make the older half of the events one line of totals; a file that cannot be read goes.

    An event that is added meanwhile is lost.
    """
    path = f"{lock_dir}/{NAME}"
    try:
        found = parse_events(atomic.read_text(path, LIMIT))
    except OSError:
        atomic.remove_quietly(path)
        return
    half = len(found) // 2
    try:
        totals = [f"{key}={value:.6f}" for key, value in count_events(found[:half]).items()]
        kept = [(0.0, TOTALS, " ".join(totals)), *found[half:]]
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
        if kind in (UNKNOWN_REQUEST, UNDONE):
            claimants.add(words)
            if kind == UNDONE:
                undone.add(words)
        elif kind == CLAIM and words.startswith("granted "):
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
        if kind == TIMEOUT:
            claimants.add(words)
    return is_streak(claimants)


def is_streak(claimants: set[str]) -> bool:
    """Return whether jobs of several owners, each `USER:JOB`, mean a broken node. Pure."""
    owners = {one.partition(":")[0] for one in claimants}
    return len(claimants) >= STREAK_JOBS and len(owners) >= STREAK_OWNERS


def is_gate_in_doubt(lock_dir: str) -> bool:
    """Return whether a claim found the gate shut, and nobody got in since; raise OSError."""
    last = [kind for _, kind, _ in read_events(lock_dir) if kind in (TIMEOUT, *ENTERED)]
    return last[-1:] == [TIMEOUT]


def count_dropped_claims(lock_dir: str) -> int:
    """Return how many claims of this boot were dropped before their line was in the history."""
    try:
        return int(count_events(read_events(lock_dir)).get("history_dropped", 0))
    except OSError:
        return 0


def list_refusals(found: "Iterable[Event]") -> "list[tuple[float, str, str]]":
    """Return (time, job, what it was told) of each refusal. Pure."""
    told = [(at, *words.partition(" ")) for at, kind, words in found if kind == REFUSED]
    return [(at, job, text) for at, job, _, text in told if job.isascii() and job.isdigit()]
