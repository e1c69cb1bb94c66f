# SPDX-License-Identifier: Apache-2.0
"""What gpulockd changed of a count at qmaster, and how it puts that right. Pure, but for a file.

Grid Engine has no compare-and-set. So what is wanted is noted before it is done; the count is
read, compared with what we know, set, and read again. Whoever was killed anywhere in between finds
in the note and in qmaster's own value what is left to do. A value that is neither was set by
somebody else: that one stands, and is left alone until all devices of the host are good.
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


class Lowered(NamedTuple):
    """A count that we lowered: `base` before, `was` the last, `now` what is to be; how far."""

    base: int
    was: int
    now: int
    stage: str


class Step(NamedTuple):
    """What to note first (None: forget), what to set then (None: nothing), what to tell."""

    note: Lowered | None
    value: int | None = None
    told: str = ""


def step(note: Lowered | None, current: int, bad: int | None, booked: int) -> Step:
    """Return the next step for one count, `current` at qmaster now.

    `bad` devices are out of service, None where nobody tells; `booked` is what its jobs hold at
    most. The count never falls below that.
    """
    if bad is None:
        return Step(note)
    if note is not None and not is_ours(note, current):
        if not bad:
            return Step(None)
        told = f"it was set to {current} by somebody else, and is left alone"
        return Step(Lowered(current, current, current, THEIRS), None, told)
    base = note.base if note is not None else current
    want = max(base - bad, min(booked, base), 0) if bad else base
    if want != current:
        return Step(Lowered(base, current, want, WANTED), want)
    if not bad or note is None:
        return Step(None)
    return Step(note._replace(was=current, now=current, stage=DONE))


def is_ours(note: Lowered, current: int) -> bool:
    """Return whether a count is what we left it at, or were about to change."""
    if note.stage == THEIRS:
        return False
    return current == note.now or (note.stage == WANTED and current == note.was)


def parse(text: str) -> dict[Key, Lowered]:
    """Return the notes in a text; raise ValueError."""
    found: dict[Key, Lowered] = {}
    for key, value in kv.decode(text).items():
        host, _, name = key.partition(" ")
        words = value.split()
        if len(words) != FIELDS or words[3] not in (WANTED, DONE, THEIRS):
            raise ValueError(f"not understood: {key}={value[:40]}")
        found[host, name] = Lowered(int(words[0]), int(words[1]), int(words[2]), words[3])
    return found


def text_of(found: Mapping[Key, Lowered]) -> str:
    """Return the notes as a text."""
    return kv.encode(
        [(f"{host} {name}", " ".join(map(str, one))) for (host, name), one in sorted(found.items())]
    )


def load(state_dir: str) -> dict[Key, Lowered]:
    """Return the notes; raise OSError or ValueError where they cannot be read."""
    try:
        return parse(atomic.read_text(f"{state_dir}/{NAME}", LIMIT))
    except FileNotFoundError:
        return {}


def save(state_dir: str, found: Mapping[Key, Lowered]) -> None:
    """Write the notes, to outlive a power cut: they know what was there; raise OSError."""
    quarantine.durably(f"{state_dir}/{NAME}", text_of(found).encode())
