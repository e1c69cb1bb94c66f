# SPDX-License-Identifier: Apache-2.0
"""The clock of all quick unit tests: time passes when a test or a sleep lets it pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.clock import VirtualClock, replace_clock

REAL = ("slow", "real_time")  # marks of tests that wait for what this machine does


@pytest.fixture(autouse=True)
def clock(request: pytest.FixtureRequest) -> Iterator[VirtualClock]:
    """Let the product stand still with the test, but where real programs are the subject."""
    if any(request.node.get_closest_marker(mark) for mark in REAL):
        yield VirtualClock()
        return
    with pytest.MonkeyPatch.context() as patch:
        yield replace_clock(patch)
