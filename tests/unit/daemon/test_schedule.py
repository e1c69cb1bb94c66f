# SPDX-License-Identifier: Apache-2.0
"""When gpulockd reconciles: every 30 s, at once after a change, never in a storm."""

from __future__ import annotations

import pytest

from gpulock.daemon.main_loop import FIRST, SETTLING, SPACING, ReconcileSchedule
from gpulock.store.verdicts import PERIOD


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
    pace.record_reconcile(100.0, restless=False)
    if changed:
        pace.request_reconcile(changed)
    assert pace.due == due


def test_a_storm_of_changes_is_one_reconcile_now_and_then() -> None:
    pace = ReconcileSchedule(100.0)
    done = 0
    pace.record_reconcile(100.0, restless=False)
    for tenth in range(1000, 1100):
        now = tenth / 10
        pace.request_reconcile(now)
        if now >= pace.due:
            pace.record_reconcile(now, restless=False)
            done += 1
    assert done <= 10 / SPACING + 1


def test_what_is_about_to_be_free_is_looked_at_after_longer_and_longer_pauses() -> None:
    pace = ReconcileSchedule(0.0)
    pauses: list[float] = []
    now = 0.0
    for _ in range(7):
        pace.record_reconcile(now, restless=True)
        pauses.append(pace.due - now)
        now = pace.due
    assert pauses == [FIRST, 2.0, 4.0, 8.0, 16.0, PERIOD, PERIOD]


def test_after_a_quiet_time_the_pauses_start_short() -> None:
    pace = ReconcileSchedule(0.0)
    for restless in (True, True, True, False, True):
        pace.record_reconcile(0.0, restless)
    assert pace.due == FIRST


@pytest.mark.parametrize(
    ("next_at", "due"), [(110.0, 110.0), (99.0, 100.0 + SPACING), (900.0, 130.0)]
)
def test_work_that_a_chore_has_at_some_time_brings_the_next_forward(
    next_at: float, due: float
) -> None:
    pace = ReconcileSchedule(90.0)
    pace.record_reconcile(100.0, restless=False, next_at=next_at)
    assert pace.due == due
