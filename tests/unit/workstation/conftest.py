# SPDX-License-Identifier: Apache-2.0
"""What the tests of a shared workstation share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.desk import Desk


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """Give a node that serves users."""
    made = Desk(tmp_path)
    yield made
    made.server.close()
    for caller in made.came:
        caller.close()
