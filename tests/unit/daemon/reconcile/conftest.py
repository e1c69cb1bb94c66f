# SPDX-License-Identifier: Apache-2.0
"""What the tests of a reconcile share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trees import Box, box_at_work


@pytest.fixture
def box(tmp_path: Path) -> Box:
    """Give a node with an execd, at work since this boot."""
    return box_at_work(tmp_path)
