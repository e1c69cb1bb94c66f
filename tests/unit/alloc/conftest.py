# SPDX-License-Identifier: Apache-2.0
"""What the tests of claims share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trees import Box


@pytest.fixture
def box(tmp_path: Path) -> Box:
    """Give a node with an execd and a shepherd below it."""
    made = Box(tmp_path)
    made.proc.execd(tmp_path)
    made.proc.shepherd(500, tmp_path)
    return made
