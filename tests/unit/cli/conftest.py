# SPDX-License-Identifier: Apache-2.0
"""What the tests of the command line share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli_site import Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Give a simulated DGX-1."""
    return Site(tmp_path)
