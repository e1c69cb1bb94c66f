# SPDX-License-Identifier: Apache-2.0
"""Hooks that confine a job, on this machine's own cgroups: stopped at every system call, and in
a long row.
"""

from __future__ import annotations

import os

import pytest

from tests.labs.common.device_nodes import programs
from tests.support.scene import folder
from tests.sweep import isolated, isolated_slurm
from tests.sweep.play import Case
from tests.sweep.tally import WHOLE
from tests.sweep.test_sweep import (
    play,
    strace,
    test_a_fault_at_any_system_call_loses_nothing,
)

pytestmark = [pytest.mark.lab, pytest.mark.timeout(7200 if WHOLE else 900)]
__all__ = ["play", "strace", "test_a_fault_at_any_system_call_loses_nothing"]
CASES = (*isolated.CASES, *isolated_slurm.CASES)


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


MANY = 500 if os.environ.get("GPULOCK_SOAK") == "1" else 20


def test_hooks_in_a_long_row_leave_no_cgroup_and_no_program() -> None:
    with folder("row") as root:
        stage = isolated.ConfinedStage(root)
        try:
            before = programs()
            for _ in range(MANY):
                for hook in ("prolog", "epilog"):
                    stage.must(stage.hook(stage.mine, hook), 0)
            assert [*stage.service.folder.glob("gpulock-*")] == []
            assert programs() == before
            assert stage.locks() == {}
        finally:
            stage.close()
