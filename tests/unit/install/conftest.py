# SPDX-License-Identifier: Apache-2.0
"""A host of Grid Engine, a node of Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.install_site import Site, make_site
from tests.support.slurm_node import SlurmNode, make_slurm_node


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return make_site(tmp_path, monkeypatch)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmNode:
    return make_slurm_node(tmp_path, monkeypatch)
