# SPDX-License-Identifier: Apache-2.0
"""A node of the Slurm lab that confines its jobs, and hooks that can be stopped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.labs.slurm.confined import Site, confined_site
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.hooks import Stops, stops


@pytest.fixture
def site(slurm_gpus: Gpulock) -> Iterator[Site]:
    """Give a test a node with ISOLATION=cgroup and device nodes that have no driver."""
    with confined_site(slurm_gpus) as made:
        yield made


@pytest.fixture
def hooks(slurm_gpus: Gpulock) -> Stops:
    """Give a test hooks that it can stop."""
    return stops(slurm_gpus)
