# SPDX-License-Identifier: Apache-2.0
"""No test of the installer touches a hook of the machine that it runs on."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.install import container_hooks


@pytest.fixture(autouse=True)
def _containers_are_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have hooks of enroot and podman, of which neither is there, go below the test's folder."""
    monkeypatch.setattr(container_hooks, "ENROOT_HOOKS", tmp_path / "enroot/hooks.d")
    monkeypatch.setattr(container_hooks, "PODMAN_HOOKS", tmp_path / "podman/oci/hooks.d")
