# SPDX-License-Identifier: Apache-2.0
"""LOCK_DIR/idle: what the held-idle policy did about which claim, and when.

Warm, gpulockd alone. A line a claim: its token, and words of the form `act@CLOCK_BOOTTIME`. The
file outlives gpulockd, so that the next one goes on where this one stopped.
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Final

from gpulock.node import sample
from gpulock.store import atomic, kv

NAME: Final = "idle"
WARN: Final = "warn"  # said in the journal; its command is due
WARNED: Final = "told"  # the command of its warning has ended, or there is none
ENDING: Final = "ending"  # its scheduler is being told to end it
KILL: Final = "kill"  # its scheduler was told


class IdleNotes:
    """Acts by claim; `fault` is why the last write failed, or nothing."""

    def __init__(self) -> None:
        self._path = ""
        self._acts: dict[str, dict[str, float]] = {}
        self.fault = ""

    def follow(self, lock_dir: str, standing: Container[str]) -> None:
        """Keep the notes of that LOCK_DIR, of claims that stand; the first time they are read."""
        path = f"{lock_dir}/{NAME}"
        if path != self._path:
            self._path, self._acts = path, read_idle_notes(path)
        left = {token: acts for token, acts in self._acts.items() if token in standing}
        if left != self._acts:
            self._acts = left
            self._write()

    def noted_at(self, token: str, act: str) -> float | None:
        """Return when something was done about a claim, None: it was not."""
        return self._acts.get(token, {}).get(act)

    def note_intent(self, token: str, act: str, now: float) -> bool:
        """Note what is about to be done; return whether that is noted: else it is not done."""
        known = dict(self._acts.get(token, {}))
        self.note_done(token, act, now)
        if self.fault:
            self._acts[token] = known
        return not self.fault

    def note_done(self, token: str, act: str, now: float) -> None:
        """Note what was done; where that cannot be written this process still knows it."""
        self._acts.setdefault(token, {})[act] = now
        self._write()

    def _write(self) -> None:
        pairs = [
            (token, encode_idle_acts(acts)) for token, acts in sorted(self._acts.items()) if acts
        ]
        try:
            atomic.replace_file(self._path, kv.encode_pairs(pairs).encode())
        except OSError as fault:
            self.fault = f"{self._path}: {fault.strerror}"
        else:
            self.fault = ""


def encode_idle_acts(acts: dict[str, float]) -> str:
    """Return the acts of one claim as words."""
    return " ".join([f"{act}@{at:.3f}" for act, at in acts.items()])


def decode_idle_acts(text: str) -> dict[str, float]:
    """Return the acts of one claim; a word that makes no sense is left out."""
    found: dict[str, float] = {}
    for word in text.split():
        act, _, at = word.partition("@")
        try:
            time = float(at)
        except ValueError:
            continue
        if act in (WARN, WARNED, ENDING, KILL) and math.isfinite(time):
            found[act] = time
    return found


def read_idle_notes(path: str) -> dict[str, dict[str, float]]:
    """Return what was done; what cannot be read was not written by us."""
    try:
        pairs = kv.decode_pairs(atomic.read_text(path, sample.LIMIT))
    except (OSError, kv.MalformedError):
        return {}
    return {
        token: decode_idle_acts(acts)
        for token, acts in pairs.items()
        if sample.is_claim_token(token)
    }
