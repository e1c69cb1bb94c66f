# SPDX-License-Identifier: Apache-2.0
"""Attacks: a test with the mark `attack` says what it tried, and what stopped it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import pytest

WORDS = ("Tried: ", "Stopped by: ")


def attack_story(item: pytest.Item) -> list[str]:
    """Return the lines in which a test says what it tried and what stopped it."""
    text = inspect.getdoc(getattr(item, "obj", None)) or ""
    return [line for line in text.splitlines() if line]


def check_attacks(items: Iterable[pytest.Item]) -> None:
    """Raise pytest.UsageError where an attack does not say so."""
    mute: list[str] = []
    for item in items:
        if item.get_closest_marker("attack"):
            tried, stopped = ("\n".join(attack_story(item)).find(word) for word in WORDS)
            if not 0 == tried < stopped:
                mute.append(item.nodeid)
    if mute:
        raise pytest.UsageError(f"attacks that do not say {' and '.join(WORDS)}: {mute}")
