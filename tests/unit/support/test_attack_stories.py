# SPDX-License-Identifier: Apache-2.0
"""`make attack` says of each attack what it tried and what stopped it."""

from __future__ import annotations

import pytest

from tests.support.attacks import is_told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Tried: a flood.\n\nStopped by: places.", True),
        ("Tried: a flood. Stopped\nby: places.", True),
        ("Stopped by: places. Tried: a flood.", False),
        ("A flood is stopped.", False),
        ("", False),
    ],
)
def test_an_attack_says_what_it_tried_and_then_what_stopped_it(text: str, told: bool) -> None:
    assert is_told(text) is told
