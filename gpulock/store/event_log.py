# SPDX-License-Identifier: Apache-2.0
"""What the events of LOCK_DIR tell: counters, refusals, and whether the gate is in doubt.

Hot, loaded by who reads them, and where a long log becomes shorter.
"""

from gpulock.store import atomic
from gpulock.store.event_kinds import (
    CLAIM,
    DROPPED,
    ENTERED,
    EVENTS,
    REAPED,
    REFUSED,
    TIMEOUT,
    TOTALS,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpulock.store.event_kinds import Event

LIMIT = 1 << 20  # bytes of a log that is read
LARGEST_COUNTER = 1e15  # no counter is larger


def read_events(lock_dir: str) -> "list[Event]":
    """Return the events, oldest first, none where there is no file; raise OSError."""
    try:
        return parse_events(atomic.read_text(f"{lock_dir}/{EVENTS}", LIMIT))
    except FileNotFoundError:
        return []


def parse_events(text: str) -> "list[Event]":
    """Return the events of a text; a line that is none is left out."""
    events: "list[Event]" = []
    for line in text.split("\n"):
        at, _, rest = line.partition(" ")
        kind, _, words = rest.partition(" ")
        try:
            events.append((parse_amount(at), kind, words))
        except ValueError:
            continue
    return events


def parse_amount(text: str) -> float:
    """Return a number that is not negative; raise ValueError for anything else."""
    value = float(text)
    if not 0 <= value <= LARGEST_COUNTER:
        raise ValueError(f"not a counter: {text}")
    return value


def count_events(events: "Iterable[Event]") -> dict[str, float]:
    """Return the counters of this boot. Pure.

    Their keys are `claims_RESULT`, `reaped_PROOF`, `lock_wait_seconds`, `lock_timeouts`, and
    `history_dropped`.
    """
    totals: dict[str, float] = {}
    for _, kind, words in events:
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
    path = f"{lock_dir}/{EVENTS}"
    try:
        events = parse_events(atomic.read_text(path, LIMIT))
    except OSError:
        atomic.remove_quietly(path)
        return
    half = len(events) // 2
    try:
        totals = [f"{key}={value:.6f}" for key, value in count_events(events[:half]).items()]
        kept = [(0.0, TOTALS, " ".join(totals)), *events[half:]]
        text = "".join([f"{at:.3f} {kind} {words}\n" for at, kind, words in kept])
        atomic.replace_file(path, text.encode("utf-8", "surrogateescape"))
    except OSError:
        return


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


def list_refusals(events: "Iterable[Event]") -> "list[tuple[float, str, str]]":
    """Return (time, job, what it was told) of each refusal. Pure."""
    refused = [(at, *words.partition(" ")) for at, kind, words in events if kind == REFUSED]
    return [(at, job, text) for at, job, _, text in refused if job.isascii() and job.isdigit()]
