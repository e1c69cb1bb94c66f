# SPDX-License-Identifier: Apache-2.0
"""Events of claims: they may be lost, they never stop anybody."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gpulock.alloc.streaks import is_timeout_streak, is_unknown_streak
from gpulock.store import atomic, event_kinds, event_log, events
from gpulock.store.event_kinds import (
    CLAIM,
    DROPPED,
    OPEN,
    REAPED,
    REFUSED,
    TIMEOUT,
    UNKNOWN_REQUEST,
)
from gpulock.store.event_log import (
    count_dropped_claims,
    count_events,
    fold_events,
    parse_events,
    read_events,
)
from gpulock.store.events import note_event
from tests.support.faults import disk_full


@pytest.fixture
def lock_dir(tmp_path: Path) -> str:
    return str(tmp_path)


def counted(lock_dir: str) -> dict[str, float]:
    return count_events(read_events(lock_dir))


def log(lock_dir: str) -> Path:
    return Path(lock_dir, event_kinds.EVENTS)


def one_of_each(lock_dir: str) -> None:
    note_event(lock_dir, CLAIM, "granted", "0.25", "alice:12")
    note_event(lock_dir, CLAIM, "invalid_request", "0.5", "alice:13")
    note_event(lock_dir, REAPED, "shepherd")
    note_event(lock_dir, TIMEOUT, "alice:12")
    note_event(lock_dir, DROPPED, "3")
    note_event(lock_dir, UNKNOWN_REQUEST, "alice:13")


SUMS = {
    "claims_granted": 1,
    "claims_invalid_request": 1,
    "lock_wait_seconds": 0.75,
    "reaped_shepherd": 1,
    "lock_timeouts": 1,
    "history_dropped": 3,
}


@pytest.mark.parametrize("kind", [CLAIM, REAPED, UNKNOWN_REQUEST, REFUSED])
def test_who_has_the_gate_folds_sooner_than_others(
    lock_dir: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Only there no event is added meanwhile, which would be lost."""
    log(lock_dir).write_text("1.0 timeout x:1\n" * (events.CAP // 16 + 1))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gpulock.store.event_log", None)
        note_event(lock_dir, kind, "granted", "0.25")
        assert "totals" not in log(lock_dir).read_text(), "it cannot be loaded just now"
    note_event(lock_dir, kind, "granted", "0.25")
    assert ("totals" in log(lock_dir).read_text()) is (kind in (CLAIM, REAPED))


def test_a_log_that_is_too_long_keeps_its_sums_and_its_last_events(
    lock_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        one_of_each(lock_dir)
    note_event(lock_dir, CLAIM, "busy", "0", "alice:14")
    size = log(lock_dir).stat().st_size
    monkeypatch.setattr(events, "CAP", size)
    note_event(lock_dir, UNKNOWN_REQUEST, "alice:13")  # its author may have no gate
    before, logged = counted(lock_dir), read_events(lock_dir)
    monkeypatch.setattr(events, "SHUT_CAP", size)
    note_event(lock_dir, UNKNOWN_REQUEST, "alice:13")
    assert [one[1:] for one in read_events(lock_dir)[1:]] == [
        *[one[1:] for one in logged[7:]],
        (UNKNOWN_REQUEST, "alice:13"),
    ]
    for _ in range(3):
        fold_events(lock_dir)
        assert counted(lock_dir) == before
    assert [kind for _, kind, _ in read_events(lock_dir)][-1] == UNKNOWN_REQUEST


def test_a_log_that_cannot_be_read_begins_anew_once_it_is_too_long(
    lock_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_of_each(lock_dir)
    monkeypatch.setattr(event_log, "LIMIT", 10)
    fold_events(lock_dir)
    assert not log(lock_dir).exists()


def test_a_full_disk_stops_nobody_and_costs_no_event_that_is_there(
    lock_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_of_each(lock_dir)
    monkeypatch.setattr(atomic, "replace_file", disk_full)
    fold_events(lock_dir)
    monkeypatch.setattr(os, "write", disk_full)
    note_event(lock_dir, REAPED, "shepherd")
    assert counted(lock_dir) == SUMS


def test_an_event_is_one_line_of_limited_length(lock_dir: str) -> None:
    note_event(lock_dir, "refused", "12", "a\nb" + "x" * 100_000)
    text = Path(lock_dir, event_kinds.EVENTS).read_text()
    assert ("a?b" in text, text.count("\n"), len(text) < 1300) == (True, 1, True)


def test_of_what_was_refused_jobs_with_a_number_are_listed(lock_dir: str) -> None:
    for job in ("12", "x", "²"):
        note_event(lock_dir, REFUSED, job, "busy: wait")
    told = event_log.list_refusals(read_events(lock_dir))
    assert [one[1:] for one in told] == [("12", "busy: wait")]


def test_a_line_that_was_cut_short_costs_no_other(lock_dir: str) -> None:
    log(lock_dir).write_text("12.5 claim gran")
    one_of_each(lock_dir)
    assert counted(lock_dir) == SUMS


@pytest.mark.parametrize(
    "line",
    [
        *("garbage", "\0\0", "x claim granted 1 a:1", "nan reaped shepherd", "-1 reaped shepherd"),
        *("1 claim granted", "1 claim granted inf a:1", "1 dropped -3", "1 dropped many"),
        *("1 totals a=nan", "1 totals a", "1 of_a_later_version 7", "1e300 reaped shepherd"),
    ],
)
def test_what_is_no_event_counts_nothing(lock_dir: str, line: str) -> None:
    log(lock_dir).write_text(f"{line}\n")
    assert counted(lock_dir) == {}
    one_of_each(lock_dir)
    assert counted(lock_dir) == SUMS


@pytest.mark.parametrize("planted", ["link", "fifo", "folder"])
def test_what_is_planted_in_the_place_of_the_log_is_not_written_to(
    lock_dir: str, tmp_path: Path, planted: str
) -> None:
    (tmp_path / "target").write_text("")
    if planted == "link":
        log(lock_dir).symlink_to("target")
    elif planted == "fifo":
        os.mkfifo(log(lock_dir))
    else:
        log(lock_dir).mkdir()
    one_of_each(lock_dir)
    assert (tmp_path / "target").read_text() == ""
    assert count_dropped_claims(lock_dir) == 0


@pytest.mark.parametrize(
    ("asked", "broken"),
    [
        (["a:1", "a:2", "a:3", "a:4"], False),
        (["a:1", "b:1"], False),
        (["a:1", "b:2", "a:1", "b:2"], False),
        (["a:1", "a:2", "b:3"], True),
        (["a:1", "b:2", "c:3"], True),
    ],
)
def test_a_streak_is_three_jobs_of_two_owners(asked: list[str], broken: bool) -> None:
    unknowns = [(0.0, UNKNOWN_REQUEST, name) for name in asked[:-1]]
    assert is_unknown_streak(unknowns, asked[-1], is_undone=False) is broken
    timeouts = [(0.0, TIMEOUT, name) for name in asked]
    assert is_timeout_streak(timeouts) is broken


@pytest.mark.parametrize(
    ("between", "broken"),
    [
        ("1 claim granted 0 d:4", False),
        ("1 claim granted 0 c:3", False),
        ("1 claim busy 0 d:4", True),
        ("1 claim granted 0 d:4\n2 undone d:4", True),
        ("1 claim granted 0 d:4\n2 unknown d:4", False),
        ("1 reaped shepherd", True),
    ],
)
def test_a_grant_ends_a_streak_of_unknowns_unless_it_is_undone(between: str, broken: bool) -> None:
    found = parse_events(f"0 unknown a:1\n0 unknown b:2\n{between}\n")
    assert is_unknown_streak(found, "c:3", is_undone=False) is broken


def test_of_a_job_that_was_granted_devices_the_grant_ends_no_streak() -> None:
    found = parse_events("0 unknown a:1\n0 unknown b:2\n1 claim granted 0 c:3\n")
    assert is_unknown_streak(found, "c:3", is_undone=True)


@pytest.mark.parametrize(("between", "broken"), [(CLAIM, False), (OPEN, False), (REFUSED, True)])
def test_who_gets_in_ends_a_streak_of_timeouts(between: str, broken: bool) -> None:
    found = parse_events(f"0 timeout a:1\n0 timeout b:2\n1 {between} x\n2 timeout c:3\n")
    assert is_timeout_streak(found) is broken


def test_the_gate_is_in_doubt_from_a_timeout_until_somebody_gets_in(lock_dir: str) -> None:
    said = [event_log.is_gate_in_doubt(lock_dir)]
    for kind in (TIMEOUT, UNKNOWN_REQUEST, TIMEOUT, CLAIM):
        note_event(lock_dir, kind, "busy", "0", "a:1")
        said.append(event_log.is_gate_in_doubt(lock_dir))
    assert said == [False, True, True, True, False]
