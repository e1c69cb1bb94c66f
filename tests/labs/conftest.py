# SPDX-License-Identifier: Apache-2.0
"""What the labs' tests share: each lab comes up once a session and is gone at its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.labs.sge.gpulock import Gpulock, installed
from tests.labs.sge.jobs import start_shepherds
from tests.labs.sge.lab import GridEngine
from tests.labs.slurm import gpulock
from tests.labs.slurm.config import Setup
from tests.labs.slurm.lab import Slurm
from tests.root.build import MARK
from tests.support.ledger import (
    pytest_runtest_makereport,
    pytest_runtest_protocol,
    pytest_terminal_summary,
)

__all__ = [
    "pytest_runtest_makereport",
    "pytest_runtest_protocol",
    "pytest_terminal_summary",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run no lab on the machine itself: nothing of one is to stay there."""
    is_private = (Path("/") / MARK).exists()
    if not is_private and any(item.get_closest_marker("lab") for item in items):
        pytest.exit("labs run in the private root: make lab WORDS='tests/labs/sge -k ...'", 2)


@pytest.fixture(scope="session")
def sge() -> Iterator[GridEngine]:
    """Bring up a real Grid Engine for the session; a test leaves neither jobs nor hooks behind."""
    lab = GridEngine()
    lab.up()
    try:
        yield lab
    finally:
        lab.down()


@pytest.fixture(scope="session")
def installation(sge: GridEngine) -> Gpulock:
    """Install gpulock on the lab's nodes once."""
    return installed(sge)


@pytest.fixture
def gpus(installation: Gpulock) -> Iterator[Gpulock]:
    """Give a test gpulock on fresh nodes; neither job nor missing daemon is left behind."""
    installation.prepare()
    yield installation
    installation.sge.recover()


@pytest.fixture(scope="module")
def shepherd_cmd(installation: Gpulock) -> Iterator[str]:
    """Start the shepherds of a module's tests as `gpulock install sge` has it, on every node."""
    path = str(installation.hooks.folder / "prolog/sge_shepherd")
    start_shepherds(installation.sge, path)
    yield path
    start_shepherds(installation.sge, "none")


@pytest.fixture
def guarded(shepherd_cmd: str, gpus: Gpulock) -> Gpulock:
    """Give a test gpulock on nodes that start no shepherd of a forged job."""
    assert shepherd_cmd
    return gpus


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """Bring up a real Slurm of three nodes with four GPUs each for the session."""
    with Slurm(Setup(gpus=4), nodes=3) as lab:
        yield lab


@pytest.fixture(scope="session")
def slurm_installation(slurm: Slurm) -> gpulock.Gpulock:
    """Install gpulock on the Slurm lab's nodes once."""
    return gpulock.installed(slurm)


@pytest.fixture
def slurm_gpus(slurm_installation: gpulock.Gpulock) -> Iterator[gpulock.Gpulock]:
    """Give a test gpulock on fresh nodes; neither job nor drained node is left behind.

    Slurm is as the test before had it, until a mode is chosen: it is not started anew for nothing.
    """
    slurm_installation.clear()
    yield slurm_installation
    slurm_installation.slurm.recover()
