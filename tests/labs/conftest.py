# SPDX-License-Identifier: Apache-2.0
"""What the labs' tests share: each lab comes up once a session and is gone at its end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.labs.sge_lab import GridEngine


@pytest.fixture(scope="session")
def sge() -> Iterator[GridEngine]:
    """Bring up a real Grid Engine for the session; a test leaves neither jobs nor hooks behind."""
    lab = GridEngine()
    lab.up()
    try:
        yield lab
    finally:
        lab.down()
