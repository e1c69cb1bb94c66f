# SPDX-License-Identifier: Apache-2.0
"""A host of Grid Engine, a node of Slurm; no test touches a hook of the machine it runs on."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.install import container_hooks
from tests.support.install_site import Site, make_site
from tests.support.slurm_node import SlurmNode, make_slurm_node


@pytest.fixture(autouse=True)
def _containers_are_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have hooks of enroot and podman, of which neither is there, go below the test's folder."""
    monkeypatch.setattr(container_hooks, "ENROOT_HOOKS", tmp_path / "enroot/hooks.d")
    monkeypatch.setattr(container_hooks, "PODMAN_HOOKS", tmp_path / "podman/oci/hooks.d")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return make_site(tmp_path, monkeypatch)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmNode:
    return make_slurm_node(tmp_path, monkeypatch)
