# SPDX-License-Identifier: Apache-2.0
"""What the tests of the store share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.store.locks import LockStore


@pytest.fixture
def store(tmp_path: Path) -> LockStore:
    """Give a LOCK_DIR that is ready, with nothing in it."""
    made = LockStore(str(tmp_path / "run"))
    for folder in (made.locks_dir, made.claims_dir, made.finished_dir):
        os.makedirs(folder)
    return made
