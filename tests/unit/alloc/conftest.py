# SPDX-License-Identifier: Apache-2.0
"""What the tests of claims share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trees import Box, box_with_shepherd


@pytest.fixture
def box(tmp_path: Path) -> Box:
    """Give a node with an execd and a shepherd below it."""
    return box_with_shepherd(tmp_path)
