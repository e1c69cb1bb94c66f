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
    attacks = [item for item in items if item.get_closest_marker("attack")]
    mute = [item.nodeid for item in attacks if not is_told("\n".join(attack_story(item)))]
    if mute:
        raise pytest.UsageError(f"attacks that do not say {' and '.join(WORDS)}: {mute}")


def is_told(text: str) -> bool:
    """Return whether a docstring says both, in their order."""
    plain = " ".join(text.split())
    tried, stopped = (plain.find(word) for word in WORDS)
    return 0 == tried < stopped
