# SPDX-License-Identifier: Apache-2.0
"""STATE_DIR/health-history: each step of a GPU that went out of service, was reset, or came back.

A line is `<epoch seconds> <lock id> <step> <words>`. The file is bounded, and older lines go. It is
for people: what cannot be written is left out, and no decision is made by it.
"""

from __future__ import annotations

import os
import time
from typing import Final, NamedTuple

from gpulock.errors import one_line
from gpulock.store import atomic

NAME: Final = "health-history"  # in STATE_DIR
LIMIT: Final = 1 << 18  # bytes; then the older half goes
OUT, BACK, RESET = "out", "back", "reset"
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
            atomic.replace_file(path, kept.encode("utf-8", "replace"))
    except OSError:
        return


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
