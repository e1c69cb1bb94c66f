# SPDX-License-Identifier: Apache-2.0
"""When gpulockd reconciles: every 30 s, at once after a change, never in a storm."""

from __future__ import annotations

from gpulock.daemon.reconcile.schedule import FIRST, SETTLING, SPACING, ReconcileSchedule
from gpulock.store.verdicts import PERIOD


def test_the_first_is_due_at_the_start() -> None:
    assert ReconcileSchedule(100.0).due == 100.0


def test_the_next_is_a_period_later() -> None:
    pace = ReconcileSchedule(100.0)
    pace.record_reconcile(101.0, restless=False)
    assert pace.due == 101.0 + PERIOD


def test_a_change_brings_it_forward() -> None:
    pace = ReconcileSchedule(100.0)
    pace.record_reconcile(101.0, restless=False)
    pace.request_reconcile(110.0)
    assert pace.due == 110.0 + SETTLING


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


def test_a_change_never_puts_it_off() -> None:
    pace = ReconcileSchedule(100.0)
    pace.record_reconcile(100.0, restless=False)
    pace.request_reconcile(100.0 + PERIOD - SETTLING / 2)
    assert pace.due == 100.0 + PERIOD


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
