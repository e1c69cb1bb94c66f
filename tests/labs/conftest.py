# SPDX-License-Identifier: Apache-2.0
"""What the labs' tests share: each lab comes up once a session and is gone at its end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.labs.sge_gpulock import Gpulock, installed
from tests.labs.sge_lab import GridEngine


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
    """Give a test gpulock on fresh nodes; no job of it is left behind."""
    installation.prepare()
    yield installation
    installation.sge.clear_jobs()
    installation.sge.clear_queue_errors()
