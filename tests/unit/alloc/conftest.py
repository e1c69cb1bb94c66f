# SPDX-License-Identifier: Apache-2.0
"""What the tests of claims share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trees import Box, FakeProc, box_with_shepherd


@pytest.fixture
def box(tmp_path: Path) -> Box:
    """Give a node with an execd and a shepherd below it."""
    return box_with_shepherd(tmp_path)


@pytest.fixture
def fake(tmp_path: Path) -> FakeProc:
    """Give a /proc of its own, with init alone."""
    return FakeProc(tmp_path / "proc")


@pytest.fixture
def proc(fake: FakeProc) -> FakeProc:
    """Give the same, to tests that speak of a judgement by it."""
    return fake
