# SPDX-License-Identifier: Apache-2.0
"""When gpulockd reconciles: every 30 s, at once after a change, never in a storm."""

from __future__ import annotations

import pytest

from gpulock.daemon.main_loop import SETTLING, SPACING, ReconcileSchedule
from gpulock.store.verdicts import PERIOD

NEVER = float("inf")


@pytest.mark.parametrize(
    ("changed", "due"),
    [
        (None, 100.0 + PERIOD),
        (110.0, 110.0 + SETTLING),
        (100.0 + PERIOD - SETTLING / 2, 100.0 + PERIOD),  # it is never put off
    ],
)
def test_the_next_is_due_after_a_period_or_a_change(changed: float | None, due: float) -> None:
    pace = ReconcileSchedule(90.0)
    assert pace.due == 90.0, "the first, at once"
    pace.record_reconcile(100.0, NEVER)
    if changed:
        pace.request_reconcile(changed)
    assert pace.due == due


def test_a_storm_of_changes_is_one_reconcile_now_and_then() -> None:
    pace = ReconcileSchedule(100.0)
    done = 0
    pace.record_reconcile(100.0, NEVER)
    for tenth in range(1000, 1100):
        now = tenth / 10
        pace.request_reconcile(now)
        if now >= pace.due:
            pace.record_reconcile(now, NEVER)
            done += 1
    assert done <= 10 / SPACING + 1


@pytest.mark.parametrize(
    ("next_at", "due"), [(110.0, 110.0), (99.0, 100.0 + SPACING), (900.0, 130.0)]
)
def test_work_that_a_chore_has_at_some_time_brings_the_next_forward(
    next_at: float, due: float
) -> None:
    pace = ReconcileSchedule(90.0)
    pace.record_reconcile(100.0, next_at)
    assert pace.due == due
