# SPDX-License-Identifier: Apache-2.0
"""What the tests of Slurm's hooks share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.slurm_site import Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Give a node of Slurm."""
    return Site(tmp_path)
