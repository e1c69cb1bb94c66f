# SPDX-License-Identifier: Apache-2.0
"""The sites of the scenarios: a test has each scheduler in turn, and a file each one once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.labs.both.sge_site import SgeSite
from tests.labs.both.site import Site
from tests.labs.both.slurm_site import SlurmSite
from tests.labs.daemon.daemon_lab import Daemon, daemon_on
from tests.labs.sge.gpulock import Gpulock

SGE: Final = pytest.param("Grid Engine", marks=pytest.mark.sge)
SLURM: Final = pytest.param("Slurm", marks=pytest.mark.slurm)
SELECTING: Final = pytest.param("Slurm selects", marks=pytest.mark.slurm)
# for a test that has each way in which devices are selected
EVERY: Final = pytest.mark.parametrize(
    "scheduler", [SGE, SLURM, SELECTING], indirect=True, scope="module"
)


@pytest.fixture(scope="module", params=[SGE, SLURM])
def scheduler(request: pytest.FixtureRequest) -> str:
    """Return the scheduler's name."""
    return str(request.param)


@pytest.fixture
def any_site(scheduler: str, request: pytest.FixtureRequest) -> Iterator[Site]:
    """Give a test a node whose scheduler is as a test before left it, without jobs."""
    if scheduler == "Grid Engine":
        yield SgeSite(request.getfixturevalue("gpus"))
        return
    installation = request.getfixturevalue("slurm_installation")
    yield SlurmSite(installation, is_selected_by_slurm=scheduler == "Slurm selects")
    installation.slurm.recover()


@pytest.fixture
def sge_site(gpus: Gpulock) -> SgeSite:
    """Give a test a node of Grid Engine, which alone counts places (Slurm has shards)."""
    return SgeSite(gpus)


@pytest.fixture
def site(any_site: Site) -> Site:
    """Give a test a node; neither job nor stopped node is left behind."""
    any_site.prepare()
    return any_site


@pytest.fixture
def daemon(site: Site) -> Iterator[Daemon]:
    """Give a test a gpulockd on the node."""
    with daemon_on(site.gpus, site.node) as daemon:
        yield daemon
