# SPDX-License-Identifier: Apache-2.0
"""A node that confines its jobs; and what is not for the Grid Engine that is there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.labs.sge.confined import Site, isolated
from tests.labs.sge.gpulock import Gpulock
from tests.labs.sge.install import INSTALLATION

OF_OCS = "test_rsmap.py"  # no other Grid Engine has complexes of that type
# In Open Cluster Scheduler a job on a terminal runs, a fork for the epilog that fails stops the
# queue, and -binding takes other words (docs/facts/grid-engine.md).
NOT_OF_OCS = ("test_no_users_terminal_stops_a_queue", "[the shepherd's]", "-binding linear:1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of another Grid Engine, also of files that were named."""
    if INSTALLATION.is_ocs:
        left_out = [one for one in items if any(word in one.name for word in NOT_OF_OCS)]
    else:
        left_out = [one for one in items if one.path.name == OF_OCS]
    items[:] = [one for one in items if one not in left_out]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture
def site(gpus: Gpulock) -> Iterator[Site]:
    """Give a test a node with ISOLATION=cgroup and device nodes that have no driver."""
    with isolated(gpus) as made:
        yield made
