# SPDX-License-Identifier: Apache-2.0
"""STATE_DIR/health-history: each step of a GPU: out of service, reset, tested, back.

A line is `<epoch seconds> <lock id> <step> <words>`. The file is bounded, and older lines go; a
line `# <step>=<number> ...` says how many. It is for people: what cannot be written is left out,
and no decision is made by it.
"""

from __future__ import annotations

import os
import time
from typing import Final, NamedTuple

from gpulock.errors import one_line
from gpulock.store import atomic, kv

NAME: Final = "health-history"  # in STATE_DIR
LIMIT: Final = 1 << 18  # bytes; then the older half goes
OUT, RESET, TESTED, BACK = STEPS = ("out", "reset", "tested", "back")
GONE: Final = "# "  # begins the line that counts what went
WORDS: Final = 4  # of a line
_APPEND: Final = (
    os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
)


class HealthStep(NamedTuple):
    """What became of `device` (a lock id) at `at`, epoch seconds."""

    at: float
    device: str
    step: str
    words: str


def note_health_step(state_dir: str, device: str, step: str, words: str) -> None:
    """Add a step; one that cannot be written is left out."""
    path = f"{state_dir}/{NAME}"
    line = f"{time.time():.0f} {device} {step} {one_line(words)}\n".encode("utf-8", "replace")
    try:
        fd = os.open(path, _APPEND, 0o644)
        try:
            os.write(fd, line)
            full = os.fstat(fd).st_size > LIMIT
        finally:
            os.close(fd)
        if full:
            text = atomic.read_text(path, 2 * LIMIT)
            kept = text[len(text) // 2 :].partition("\n")[2]
            gone = parse_step_counts(text[: len(text) - len(kept)])
            head = GONE + " ".join(f"{of}={number}" for of, number in gone.items())
            atomic.replace_file(path, f"{head}\n{kept}".encode("utf-8", "replace"))
    except OSError:
        return


def count_health_steps(state_dir: str) -> dict[str, int]:
    """Return how many steps of each kind there were, those that went included; raise OSError."""
    try:
        return parse_step_counts(atomic.read_text(f"{state_dir}/{NAME}", 2 * LIMIT))
    except FileNotFoundError:
        return dict.fromkeys(STEPS, 0)


def parse_step_counts(text: str) -> dict[str, int]:
    """Return how many steps of each kind a part of the file tells of. Pure."""
    found: dict[str, int] = dict.fromkeys(STEPS, 0)
    for line in text.split("\n"):
        words = line.split(" ")
        pairs = [word.partition("=") for word in words] if line.startswith(GONE) else []
        if not pairs and len(words) >= WORDS:
            pairs = [(words[2], "=", "1")]
        for step, _, number in pairs:
            if step in found:
                found[step] += kv.int_or_zero(number)
    return found


def read_health_steps(state_dir: str, device: str = "") -> list[HealthStep]:
    """Return the steps, oldest first, of a device and its card where one is named."""
    try:
        text = atomic.read_text(f"{state_dir}/{NAME}", 2 * LIMIT)
    except OSError:
        return []
    found: list[HealthStep] = []
    for line in text.split("\n"):
        words = line.split(" ", WORDS - 1)
        if len(words) < WORDS or not words[0].isdigit():
            continue
        at, name, step, rest = words
        if not device or device == name or device.startswith(f"{name}."):
            found.append(HealthStep(float(at), name, step, rest))
    return found
