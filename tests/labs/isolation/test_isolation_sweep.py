# SPDX-License-Identifier: Apache-2.0
"""Hooks that confine a job, on this machine's own cgroups: stopped at every system call."""

from __future__ import annotations

import pytest

from tests.sweep import isolated, isolated_slurm
from tests.sweep.play import Case
from tests.sweep.tally import WHOLE
from tests.sweep.test_sweep import play, strace, test_a_fault_at_any_system_call_loses_nothing

pytestmark = [pytest.mark.lab, pytest.mark.timeout(7200 if WHOLE else 900)]
__all__ = ["play", "strace", "test_a_fault_at_any_system_call_loses_nothing"]
CASES = (*isolated.CASES, *isolated_slurm.CASES)


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found
