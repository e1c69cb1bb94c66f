# SPDX-License-Identifier: Apache-2.0
"""Who waits is served in the order they came, and the dead do not stand in line."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gpulock.alloc.claim import Grant
from gpulock.deadline import Deadline
from gpulock.errors import BROKEN, BUSY, Refusal
from gpulock.node.devices import Device
from gpulock.workstation import tickets
from tests.support.faults import fail_at
from tests.support.trees import Box, record, soon


@pytest.fixture
def box(tmp_path: Path) -> Box:
    made = Box(tmp_path)
    made.proc.add(os.getpid())
    made.node().store.check(make=True)
    return made


def line(box: Box) -> list[str]:
    return tickets.list_tickets(f"{box.lock}/{tickets.FOLDER}")


def stand(box: Box, number: int, pid: int, start: int = 1000, waits: bool = False) -> str:
    folder = box.lock / tickets.FOLDER
    folder.mkdir(exist_ok=True)
    name = f"{number:08}.{pid}.{start}"
    (folder / name).touch()
    if waits:
        tickets.mark_waiting(box.node(), name)
    return name


def ahead(box: Box, name: str) -> int:
    return len(tickets.list_callers_ahead(box.node(), name))


def test_tickets_are_numbered_as_they_are_drawn(box: Box) -> None:
    drawn = [tickets.take_ticket(box.node(), soon()) for _ in range(12)]
    assert line(box) == drawn
    assert [tickets.parse_ticket(name)[0] for name in drawn] == list(range(1, 13))


def test_the_order_is_of_numbers_not_of_text(box: Box) -> None:
    late, early = stand(box, 10**8, 500), stand(box, 99_999_999, 501)
    assert line(box) == [early, late]


def test_the_living_before_us_count_and_the_dead_are_dropped(box: Box) -> None:
    box.proc.add(500, start=1000)
    box.proc.add(501, start=2000)
    alive = stand(box, 1, 500)
    stand(box, 2, 501)  # that pid is another process now
    stand(box, 3, 502)
    mine = tickets.take_ticket(box.node(), soon())
    assert ahead(box, mine) == 1
    assert line(box) == [alive, mine]


def test_the_tickets_of_dead_callers_are_dropped_though_nobody_comes_after_them(box: Box) -> None:
    box.proc.add(500, start=1000)
    alive = stand(box, 1, 500)
    stand(box, 2, 501)
    tickets.drop_dead_tickets(box.node())
    assert line(box) == [alive]


def test_who_cannot_be_seen_still_stands_in_line(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    stand(box, 1, 500)
    mine = tickets.take_ticket(box.node(), soon())
    fail_at(monkeypatch, "open", "/500/stat", PermissionError(1, "not permitted"))
    assert ahead(box, mine) == 1


@pytest.mark.parametrize("name", ["x", "1.2", "1.2.3.4", "a.b.c", ".1.2.3", "1.2.x"])
def test_what_is_no_ticket_is_not_looked_at(box: Box, name: str) -> None:
    stand(box, 1, 500)
    (box.lock / tickets.FOLDER / name).touch()
    assert len(line(box)) == 1


def wait(box: Box, answers: list[Refusal | Grant], seconds: float = 10) -> Grant:
    def attempt() -> Grant:
        answer = answers.pop(0)
        if isinstance(answer, Refusal):
            raise answer
        return answer

    def waiting(before: int, why: str) -> None:
        told.append((before, why))
        for step in steps[:1]:
            steps.pop(0)
            box.proc.remove(step)

    told.clear()
    return tickets.claim_in_turn(box.node(), attempt, Deadline(seconds), waiting, lambda: False, 7)


told: list[tuple[int, str]] = []
steps: list[int] = []
GRANT = Grant([Device("x", 0)], record(), True, 0.0)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    steps.clear()


def test_one_waits_while_it_is_busy_and_leaves_the_line_when_served(box: Box) -> None:
    busy = Refusal(BUSY, "full", "wait")
    assert wait(box, [busy, busy, GRANT]) is GRANT
    assert told == [(0, "full"), (0, "full")]
    assert line(box) == []


def test_one_is_not_served_before_those_who_came_earlier(box: Box) -> None:
    box.proc.add(500)
    stand(box, 1, 500)
    steps.append(500)
    assert wait(box, [GRANT]) is GRANT
    assert [before for before, _ in told] == [1]


def test_what_waiting_cannot_cure_is_told_at_once(box: Box) -> None:
    with pytest.raises(Refusal) as caught:
        wait(box, [Refusal(BROKEN, "no driver", "load it")])
    assert (caught.value.kind, told, line(box)) == (BROKEN, [], [])


def test_at_the_deadline_the_last_refusal_stands_and_the_line_is_left(box: Box) -> None:
    with pytest.raises(Refusal, match="full"):
        wait(box, [Refusal(BUSY, "full", "wait")], 0)
    assert line(box) == []


def test_without_time_to_wait_nobody_overtakes_one_that_waits(box: Box) -> None:
    box.proc.add(500)
    stand(box, 1, 500, waits=True)
    with pytest.raises(Refusal, match="ahead in the queue"):
        wait(box, [GRANT], 0)
    assert len(line(box)) == 1


def test_one_that_does_not_wait_waits_for_the_moment_of_another_that_does_not(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    box.proc.add(500)
    stand(box, 1, 500)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        box.proc.remove(500)

    monkeypatch.setattr(time, "sleep", sleep)
    assert wait(box, [GRANT], 0) is GRANT
    assert (pauses, told, line(box)) == ([tickets.MOMENT], [], [])


def test_the_moments_of_others_are_waited_for_no_longer_than_for_the_gate(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    box.proc.add(500)
    stand(box, 1, 500)
    monkeypatch.setattr(tickets, "LONGEST_WAIT", 0.05)
    with pytest.raises(Refusal, match="ahead in the queue"):
        wait(box, [GRANT], 0)


def test_one_that_waits_says_so_once_it_cannot_be_served(box: Box) -> None:
    marks: list[int] = []
    busy = Refusal(BUSY, "full", "wait")

    def attempt() -> Grant:
        (name,) = line(box)
        marks.append((box.lock / tickets.FOLDER / name).stat().st_size)
        if len(marks) == 1:
            raise busy
        return GRANT

    def waiting(before: int, why: str) -> None:
        assert (before, why) == (0, "full")

    assert tickets.claim_in_turn(box.node(), attempt, soon(), waiting, lambda: False, 7) is GRANT
    assert marks[0] == 0 < marks[1]


def test_a_stopped_caller_keeps_its_place_but_nobody_waits_for_it(box: Box) -> None:
    box.proc.add(500, state="T")
    stopped, ours = stand(box, 1, 500), stand(box, 2, os.getpid())
    assert ahead(box, ours) == 0
    assert line(box) == [stopped, ours]
    box.proc.add(500, state="S")
    assert ahead(box, ours) == 1


def test_one_that_yields_keeps_its_place_and_no_other_user_waits_for_it(box: Box) -> None:
    behind: list[tuple[int, int]] = []
    busy = Refusal(BUSY, "full", "wait")
    answers: list[Refusal | Grant] = [busy, busy, GRANT]

    def attempt() -> Grant:
        other = tickets.take_ticket(box.node(), soon())
        by_user = [len(tickets.list_callers_ahead(box.node(), other, uid)) for uid in (7, 8)]
        behind.append((by_user[0], by_user[1]))
        tickets.remove_ticket(box.node(), other)
        if isinstance(answer := answers.pop(0), Refusal):
            raise answer
        return answer

    def waiting(before: int, why: str) -> None:
        assert (before, why) == (0, "full")

    yields = iter((True, False))
    grant = tickets.claim_in_turn(box.node(), attempt, soon(), waiting, lambda: next(yields), 7)
    assert grant is GRANT
    assert behind == [(1, 1), (1, 0), (1, 1)]


def test_one_behind_a_caller_of_its_user_that_yields_yields_too(box: Box) -> None:
    box.proc.add(500)
    node, first = box.node(), stand(box, 1, 500)
    tickets.mark_waiting(node, first, yields=7)
    others: list[int] = []

    def waiting(before: int, why: str) -> None:
        assert (before, why) == (1, "callers ahead in the queue: 1")

    def pause(_: float) -> None:
        last = tickets.take_ticket(node, soon())
        others.append(len(tickets.list_callers_ahead(node, last, 8)))
        for name in (last, first):
            tickets.remove_ticket(node, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", pause)
        tickets.claim_in_turn(node, lambda: GRANT, soon(), waiting, lambda: False, 7)
    assert others == [0]


def test_tickets_that_gpulockd_drew_are_dropped_once_nobody_calls_with_them(box: Box) -> None:
    other = os.geteuid() + 1
    for pid, uid in ((500, other), (501, other), (502, os.geteuid())):
        box.proc.add(pid, uids=(uid,) * 4)
    _, kept, own = [stand(box, number, 499 + number) for number in (1, 2, 3)]
    tickets.drop_left_tickets(box.node(), {kept})
    assert line(box) == [kept, own]
