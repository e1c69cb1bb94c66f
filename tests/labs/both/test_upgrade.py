# SPDX-License-Identifier: Apache-2.0
"""Another release of gpulock on a node of a real scheduler whose jobs begin, run and end."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.install.versions import FOLDER
from tests.labs.both.conftest import SELECTING, SGE, SLURM
from tests.labs.both.site import Site
from tests.labs.common.installed import SOAK
from tests.labs.common.upgrade import JOBS, Package, UpgradedNode, upgrade_and_go_back

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    "scheduler", [SGE, SELECTING, *([SLURM] * SOAK)], indirect=True, scope="module"
)
def test_jobs_go_on_while_gpulock_is_upgraded_and_downgraded(site: Site, tmp_path: Path) -> None:
    with site.with_hooks_below(FOLDER, JOBS + 20):
        upgrade_and_go_back(UpgradedNode(site, Package(tmp_path / "package")), tmp_path)
