# SPDX-License-Identifier: Apache-2.0
"""What the tests of a reconcile share."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.store import boot
from tests.support.trees import BOOT, NAME, Box


@pytest.fixture
def box(tmp_path: Path) -> Box:
    """Give a node with an execd, at work since this boot."""
    made = Box(tmp_path)
    made.proc.execd(tmp_path)
    node = made.node()
    node.store.check(make=True)
    boot.begin_boot(node.store, str(made.state), BOOT, NAME)
    return made
