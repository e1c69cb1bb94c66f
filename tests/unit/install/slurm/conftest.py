# SPDX-License-Identifier: Apache-2.0
"""A node of Slurm for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.slurm_node import SlurmNode, make_slurm_node


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmNode:
    return make_slurm_node(tmp_path, monkeypatch)
