# SPDX-License-Identifier: Apache-2.0
"""A host of Grid Engine for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.install_site import Site, make_site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return make_site(tmp_path, monkeypatch)
