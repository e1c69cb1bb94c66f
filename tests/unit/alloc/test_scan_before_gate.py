# SPDX-License-Identifier: Apache-2.0
"""Open files are looked at before the gate is taken: who has many keeps nobody waiting there.

A user whose job is over may have more files open than are looked at in seconds, and may claim and
reap as often as the scheduler lets it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpulock.alloc.device_users import OpenFiles
from gpulock.alloc.liveness import shepherd_verdict
from gpulock.alloc.process_scan import ProcessScan
from gpulock.daemon.reconcile.reconcile import reconcile_locks
from gpulock.deadline import Deadline
from gpulock.errors import BUSY
from gpulock.sge import verdict
from gpulock.store.gate import Gate
from gpulock.store.locks import Lock
from gpulock.store.verdicts import UNKNOWN, Verdict
from tests.support.claims import ask, holder, ids, refused
from tests.support.locks import change_record, place_lock
from tests.support.trees import Box, bus, judge_of, record, soon

Act = Callable[[Box], object]


def claim_once_more(box: Box) -> None:
    """Claim a card beside those that are held: all are, so that the dead are judged."""
    ask(box, 1, job_id="15")


def claim_after_an_earlier_run(box: Box) -> None:
    """Claim as the job whose shepherd is gone, and that has devices here."""
    ask(box, 1, job_id="99")


def reconcile(box: Box) -> None:
    """Judge all locks, as gpulockd does."""
    reconcile_locks(box.node(), judge_of(box.node()), soon())


def leave_dead_claims(box: Box) -> None:
    """Let a job that is over hold every card."""
    reconcile(box)  # makes LOCK_DIR ready
    for number in range(4):
        one = record(job_id="99", pid=999, token=f"t{number}", devices=(bus(number),))
        place_lock(box.node().store, bus(number), one)


def when_files_are_looked_at(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Act before the first look at the open files of a user."""
    real = OpenFiles.users_by_device
    acts = [act]

    def look(files: OpenFiles, uid: int | None) -> tuple[dict[str, list[int]], str]:
        if acts:
            acts.pop()()
        return real(files, uid)

    monkeypatch.setattr(OpenFiles, "users_by_device", look)


@pytest.mark.parametrize("act", [claim_once_more, claim_after_an_earlier_run, reconcile])
def test_while_open_files_are_looked_at_the_gate_is_free(
    box: Box, monkeypatch: pytest.MonkeyPatch, act: Act
) -> None:
    leave_dead_claims(box)
    taken: list[bool] = []

    def take_gate() -> None:
        with Gate(box.node().store, Deadline(0.0)):
            taken.append(True)

    when_files_are_looked_at(monkeypatch, take_gate)
    act(box)
    assert taken == [True]
    assert box.locks() in ([], [bus(0)])


def test_a_lock_that_is_claimed_while_files_are_looked_at_does_not_go(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_dead_claims(box)

    def claim_anew() -> None:
        for number in range(4):
            change_record(box.node().store, bus(number), holder(box, number).copy(token="another"))

    when_files_are_looked_at(monkeypatch, claim_anew)
    refusal = refused(box, 1, job_id="15")
    assert refusal.kind == BUSY
    assert len(box.locks()) == 4
    assert ids(ask(box, 1, job_id="15")) == [bus(0)]  # by a look of its own


def test_a_user_who_was_not_looked_at_before_the_gate_keeps_the_lock(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That its owner is dead is known between the look and the gate: who uses it was not asked."""
    leave_dead_claims(box)
    one = record(job_id="12", pid=999, uid=4000, token="t9", devices=(bus(0),))
    change_record(box.node().store, bus(0), one)
    real = shepherd_verdict
    silent = [Verdict(UNKNOWN, "nobody answers yet")]

    def judge(lock: Lock, scan: ProcessScan, who: str) -> Verdict | None:
        unknown = lock.id == bus(0) and silent
        return silent.pop() if unknown else real(lock, scan, who)

    monkeypatch.setattr(verdict, "shepherd_verdict", judge)
    reconcile(box)
    assert box.locks() == [bus(0)]
    reconcile(box)
    assert box.locks() == []


@pytest.mark.parametrize(
    ("draining", "runs"), [(1, True), (1, False), (0, False)], ids=["epilog", "shepherd", "killed"]
)
@pytest.mark.parametrize("act", [claim_once_more, reconcile])
def test_what_a_job_leaves_that_ends_while_files_are_looked_at_keeps_its_lock(
    box: Box, monkeypatch: pytest.MonkeyPatch, act: Act, draining: int, runs: bool
) -> None:
    """The look at processes is older than what is left: a dead claim of the user's began it."""
    box.proc.shepherd(500, box.root)
    leave_dead_claims(box)
    one = record(job_id="12", pid=500, token="t9", add_grp_id=65412, devices=(bus(0),))
    change_record(box.node().store, bus(0), one)

    def end() -> None:
        box.proc.add(700, "straggler", groups=(65412,))
        change_record(box.node().store, bus(0), one.copy(draining=draining))
        if not runs:
            box.proc.remove(500)

    when_files_are_looked_at(monkeypatch, end)
    act(box)
    assert holder(box, 0).token == "t9"
    reconcile(box)  # by a look of its own
    assert holder(box, 0).token == "t9"
    box.proc.remove(700)
    reconcile(box)
    assert bus(0) not in box.locks()
