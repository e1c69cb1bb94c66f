# SPDX-License-Identifier: Apache-2.0
"""Hooks that confine a job are stopped at every system call, on this machine's own cgroups."""

from __future__ import annotations

import pytest

from tests.sweep import isolated
from tests.sweep.play import Case
from tests.sweep.test_sweep import (
    play,
    strace,
    test_a_fault_at_any_system_call_loses_nothing,
)

pytestmark = [pytest.mark.lab, pytest.mark.timeout(7200)]
__all__ = ["play", "strace", "test_a_fault_at_any_system_call_loses_nothing"]


@pytest.fixture(params=isolated.CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found
