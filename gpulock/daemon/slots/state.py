# SPDX-License-Identifier: Apache-2.0
"""What gpulockd changed of a count at qmaster, and how it restores it. Pure, but for a file.

Grid Engine has no compare-and-set. So what is wanted is noted before it is done; the count is
read, compared with what we know, set, and read again. After a kill at any point
the note and qmaster's own value say what is left to do. A value that is neither was set by others:
gpulockd does not change it until all devices of the host are good.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from gpulock.store import atomic, kv, quarantine

NAME: Final = "sge-count"  # in STATE_DIR
LIMIT: Final = 1 << 20  # bytes
WANTED, DONE, THEIRS = "wanted", "done", "theirs"
Key = tuple[str, str]  # host, complex
FIELDS: Final = 4


class LoweredCount(NamedTuple):
    """A count that we lowered: `base` before, `was` the last, `now` what is to be; how far."""

    base: int
    was: int
    now: int
    stage: str


class SyncStep(NamedTuple):
    """What to note first (None: forget), what to set then (None: nothing), what to tell."""

    note: LoweredCount | None
    value: int | None = None
    told: str = ""


def next_sync_step(
    note: LoweredCount | None, current: int, bad: int | None, booked: int
) -> SyncStep:
    """Return the next step for one count, `current` at qmaster now.

    `bad` devices are out of service, None where nobody tells; `booked` is what its jobs hold at
    most. The count never falls below that.
    """
    if bad is None:
        return SyncStep(note)
    if note is not None and not is_own_count(note, current):
        if not bad:
            return SyncStep(None)
        told = f"it was set to {current} by others, and gpulock does not change it"
        return SyncStep(LoweredCount(current, current, current, THEIRS), None, told)
    base = note.base if note is not None else current
    want = max(base - bad, min(booked, base), 0) if bad else base
    if want != current:
        return SyncStep(LoweredCount(base, current, want, WANTED), want)
    if not bad or note is None:
        return SyncStep(None)
    return SyncStep(note._replace(was=current, now=current, stage=DONE))


def is_own_count(note: LoweredCount, current: int) -> bool:
    """Return whether a count is what we left it at, or were about to change."""
    if note.stage == THEIRS:
        return False
    return current == note.now or (note.stage == WANTED and current == note.was)


def parse_lowered_counts(text: str) -> dict[Key, LoweredCount]:
    """Return the notes in a text; raise ValueError."""
    found: dict[Key, LoweredCount] = {}
    for key, value in kv.decode_pairs(text).items():
        host, _, name = key.partition(" ")
        words = value.split()
        if len(words) != FIELDS or words[3] not in (WANTED, DONE, THEIRS):
            raise ValueError(f"not understood: {key}={value[:40]}")
        found[host, name] = LoweredCount(int(words[0]), int(words[1]), int(words[2]), words[3])
    return found


def format_lowered_counts(found: Mapping[Key, LoweredCount]) -> str:
    """Return the notes as a text."""
    return kv.encode_pairs(
        [(f"{host} {name}", " ".join(map(str, one))) for (host, name), one in sorted(found.items())]
    )


def load_lowered_counts(state_dir: str) -> dict[Key, LoweredCount]:
    """Return the notes; raise OSError or ValueError where they cannot be read."""
    try:
        return parse_lowered_counts(atomic.read_text(f"{state_dir}/{NAME}", LIMIT))
    except FileNotFoundError:
        return {}


def save_lowered_counts(state_dir: str, found: Mapping[Key, LoweredCount]) -> None:
    """Write the notes, to outlive a power cut: they know what was there; raise OSError."""
    quarantine.replace_file_durably(f"{state_dir}/{NAME}", format_lowered_counts(found).encode())
