# SPDX-License-Identifier: Apache-2.0
"""What the tests of Grid Engine's hooks share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import Site, child_of


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Give a node of Grid Engine, as a hook below a shepherd sees it."""
    made = Site(tmp_path)
    child_of(monkeypatch, made)
    return made
