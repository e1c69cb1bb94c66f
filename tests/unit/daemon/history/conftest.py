# SPDX-License-Identifier: Apache-2.0
"""What the tests of the history share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.history_site import Ended


@pytest.fixture
def site(tmp_path: Path) -> Ended:
    """Give a node whose claims end."""
    return Ended(tmp_path)
