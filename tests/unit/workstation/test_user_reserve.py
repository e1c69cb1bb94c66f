# SPDX-License-Identifier: Apache-2.0
"""A user reserves a GPU from a time to another, as RESERVE_MAX allows; nobody else gets it then."""

from __future__ import annotations

import time

import pytest

from gpulock.deadline import clock_boottime
from gpulock.errors import BUSY, INVALID_REQUEST
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.store.reservations import (
    RESERVED,
    Reservation,
    read_reservations,
    write_reservations,
)
from gpulock.workstation import backfill
from gpulock.workstation.socket_claims import PERIOD, Allowance
from gpulock.workstation.wire import (
    CLAIM,
    FOR_EVER,
    GRANTED,
    RELEASE,
    RELEASED,
    RESERVE,
    UNRESERVE,
    WAITING,
    SocketReply,
    SocketRequest,
)
from tests.support.clock import VirtualClock
from tests.support.desk import Desk, last
from tests.support.trees import bus

ALICE, BOB, CAROL = 2001, 2002, 2003
HOUR = 3600.0


@pytest.fixture(autouse=True)
def limit(desk: Desk) -> None:
    desk.node = Node(Settings({**desk.box.settings, "RESERVE_MAX": f"{4 * HOUR:.0f}"}))


def reserve(desk: Desk, uid: int, number: int, hours: float, ahead: float = 0.0) -> SocketReply:
    """Reserve a device for a user, `ahead` hours from now."""
    begin = time.time() + ahead * HOUR
    request = SocketRequest(
        RESERVE, 0, 0, devices=(bus(number),), note="thesis", begin=begin, seconds=hours * HOUR
    )
    return last(desk.ask(request, desk.come_as(uid, 900 + uid)))


def unreserve(desk: Desk, uid: int, number: int) -> SocketReply:
    request = SocketRequest(UNRESERVE, 0, 0, devices=(bus(number),))
    return last(desk.ask(request, desk.come_as(uid, 900 + uid)))


def test_a_reserved_device_is_its_users_alone(desk: Desk) -> None:
    assert reserve(desk, ALICE, 2, 1).state == RELEASED
    assert last(desk.claim_as(BOB, 901, 3)).devices == (bus(0), bus(1), bus(3))
    refused = last(desk.claim_as(BOB, 902, 1))
    assert (refused.kind, f"2: reserved for uid {ALICE} from" in refused.why) == (BUSY, True)
    assert refused.why.startswith("1 GPU asked for, 0 of 4 free, 1 reserved (")
    assert refused.do == "the job can run when others have ended"
    whole = last(desk.claim_as(BOB, 904, 4))
    assert whole.do == "the job can run when the reservations are over, see gpulock status"
    assert last(desk.claim_as(ALICE, 903, 1)).devices == (bus(2),)


def test_a_device_that_another_has_reserved_for_later_is_taken_last_and_told(desk: Desk) -> None:
    for number in (0, 1):
        reserve(desk, ALICE, number, 1, ahead=1)
    granted = [last(desk.claim_as(BOB, 901 + n, 1)) for n in range(3)]
    assert [reply.devices for reply in granted] == [(bus(2),), (bus(3),), (bus(0),)]
    told = f"GPU 0 is reserved for uid {ALICE} from"
    assert [reply.why[: len(told)] for reply in granted] == ["", "", told]


def test_a_claim_without_an_end_is_told_of_no_reservation_of_the_next_day(desk: Desk) -> None:
    for number in (0, 1, 2):
        reserve(desk, ALICE, number, 1, ahead=20)
    granted = [last(desk.claim_as(BOB, 901 + n, 1)) for n in range(2)]
    assert [(one.devices, one.why) for one in granted] == [((bus(3),), ""), ((bus(0),), "")]


@pytest.mark.parametrize(("uid", "seconds"), [(BOB, HOUR / 2), (ALICE, 0.0)])
def test_it_is_as_any_other_for_a_claim_that_ends_before_and_for_its_user(
    desk: Desk, uid: int, seconds: float
) -> None:
    reserve(desk, ALICE, 0, 1, ahead=1)
    request = SocketRequest(CLAIM, 901, 9, 1, seconds=seconds)
    reply = last(desk.ask(request, desk.come_as(uid, 901)))
    assert (reply.devices, reply.why) == ((bus(0),), "")


@pytest.mark.attack
@pytest.mark.parametrize("begin", [1e17, 1e19, 1e300])
def test_a_time_that_no_calendar_has_is_refused(desk: Desk, begin: float) -> None:
    """Tried: a time beyond every year, which is as good as free, and which no clock can write.

    Stopped by: nobody reserves for later than in a year.
    """
    for caller in (ALICE, BOB):
        reply = reserve(desk, caller, 2, 2, begin / HOUR)
        assert (reply.kind, "more than a year" in reply.why) == (INVALID_REQUEST, True)
    assert read_reservations(desk.box.settings["STATE_DIR"]) == []


@pytest.mark.attack
def test_a_user_who_reserves_again_and_again_fills_no_journal(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried: a loop of reserve and unreserve: 10,010 files written and lines of the journal in 12
    seconds.

    Stopped by: they count as claims do, and a release does not wait for them.
    """
    monkeypatch.setattr(desk.server.claims, "rate", Allowance(PERIOD))
    assert (reserve(desk, ALICE, 2, 1).state, unreserve(desk, ALICE, 2).state) == (RELEASED,) * 2
    assert reserve(desk, ALICE, 3, 1).state == "nothing"
    assert reserve(desk, BOB, 2, 1).state == RELEASED
    release = desk.ask(SocketRequest(RELEASE, 901, 9), desk.come_as(ALICE, 901))
    assert "no matching claim" in last(release).why
    desk.go(clock_boottime() + PERIOD)
    reserved = read_reservations(desk.box.settings["STATE_DIR"])
    assert [one.device for one in reserved] == [bus(2), bus(3)]


@pytest.mark.attack
def test_the_journal_names_what_was_reserved_and_no_words_of_a_user(desk: Desk) -> None:
    """Tried: `unreserve` with more in the list of devices, which the journal then had.

    Stopped by: it names the devices whose reservation ended.
    """
    reserve(desk, ALICE, 2, 1)
    request = SocketRequest(UNRESERVE, 0, 0, devices=(bus(2), bus(3)))
    assert last(desk.ask(request, desk.come_as(ALICE, 901))).state == RELEASED
    assert desk.journal.said()[-1].endswith(f"uid {ALICE}: unreserve {bus(2)}")


def test_its_user_gets_that_very_device_where_all_are_free(desk: Desk) -> None:
    reserve(desk, ALICE, 2, 1)
    assert last(desk.claim_as(ALICE, 903, 1)).devices == (bus(2),)


def test_who_holds_it_at_that_time_keeps_it_and_its_user_is_next(desk: Desk) -> None:
    desk.fill(904, CAROL)
    reserve(desk, ALICE, 1, 1)
    earlier = desk.claim_as(BOB, 901, 1, FOR_EVER)
    user = desk.claim_as(ALICE, 903, 1, FOR_EVER)
    desk.give_back(1)
    assert last(user).devices == (bus(1),)
    assert last(earlier).state == WAITING
    desk.give_back(0)
    assert last(earlier).devices == (bus(0),)


def test_what_is_kept_for_a_large_request_does_not_keep_a_user_from_a_reserved_device(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfill, "find_turn", lambda waited: (True, 60.0))
    desk.hold(0, desk.process(904, CAROL), uid=CAROL, start=9)
    reserve(desk, ALICE, 3, 1)
    large = desk.claim_as(BOB, 902, 3, FOR_EVER)
    assert last(large).state == WAITING
    assert "kept for number 1" in last(desk.claim_as(CAROL, 905, 1)).why
    assert "kept for number 1" in last(desk.claim_as(ALICE, 906, 2)).why  # one is reserved
    assert last(desk.claim_as(ALICE, 903, 1)).devices == (bus(3),)


@pytest.mark.attack
def test_who_has_reserved_a_device_gets_no_other_that_is_kept(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried: reserve a GPU that is held, and claim one: a free one that was kept came.

    Stopped by: of what is kept for another, a user gets the own reserved devices alone.
    """
    monkeypatch.setattr(backfill, "find_turn", lambda waited: (True, 60.0))
    for number in (0, 1):
        desk.hold(number, desk.process(904, CAROL), uid=CAROL, start=9)
    reserve(desk, ALICE, 0, 1)
    desk.claim_as(BOB, 902, 3, FOR_EVER)
    assert "kept for number 1" in last(desk.claim_as(ALICE, 903, 1)).why
    desk.give_back(0)
    assert last(desk.claim_as(ALICE, 905, 1)).devices == (bus(0),)


@pytest.mark.parametrize(
    ("ask", "kind", "words"),
    [
        (
            {"uid": ALICE, "number": 1, "hours": 4.1},
            INVALID_REQUEST,
            "246 minutes are asked for, 239 of 240",
        ),
        ({"uid": ALICE, "number": 9, "hours": 1}, INVALID_REQUEST, "no device"),
        ({"uid": ALICE, "number": 1, "hours": 1, "ahead": -2}, INVALID_REQUEST, "time is over"),
        (
            {"uid": BOB, "number": 0, "hours": 1, "ahead": 1.5},
            BUSY,
            "is reserved for uid 2001 from",
        ),
        ({"uid": ALICE, "number": 2, "hours": 1}, BUSY, f"gpulock unreserve {bus(2)} first, or"),
    ],
)
def test_what_is_refused(desk: Desk, ask: dict[str, float], kind: str, words: str) -> None:
    reserve(desk, ALICE, 0, 0.0 if ask["uid"] == ALICE else 1, ahead=1)
    reserve(desk, ALICE, 2, 0.01)
    reply = reserve(desk, **ask)  # type: ignore[arg-type]
    assert (reply.kind, words in f"{reply.why}; {reply.do}") == (kind, True), reply


def test_what_lies_within_a_day_counts_with_it_and_nothing_else(desk: Desk) -> None:
    assert [reserve(desk, ALICE, 1, 4, ahead).state for ahead in (1.0, 30.0)] == [RELEASED] * 2
    for ahead in (6.0, 28.0, 57.0):
        assert ", 0 of 240 minutes a day" in reserve(desk, ALICE, 2, 1, ahead).why, ahead
    assert reserve(desk, BOB, 2, 1, 57.0).state == RELEASED


@pytest.mark.attack
def test_a_second_of_each_gpu_every_few_hours_stops_no_longer_reservation(desk: Desk) -> None:
    """Tried: reserve each GPU for a second every hour: nobody could reserve an hour and a half.

    Stopped by: few reservations of a user count at a time.
    """
    short = [reserve(desk, ALICE, n % 4, 1 / HOUR, 1 + n // 4) for n in range(20)]
    assert [one.state for one in short] == [RELEASED] * 16 + ["refused"] * 4
    assert short[-1].why.startswith("16 reservations of yours count already")
    assert reserve(desk, BOB, 1, 4, ahead=5).state == RELEASED


def test_without_a_limit_users_reserve_nothing(desk: Desk) -> None:
    desk.node = Node(Settings(desk.box.settings))
    assert reserve(desk, ALICE, 0, 1).why == "users reserve nothing here"


@pytest.mark.attack
def test_reserves_one_after_another_keep_no_device_from_all_others(
    desk: Desk, clock: VirtualClock
) -> None:
    """Tried: reserve every device, end it or let it run out, and reserve again.

    Stopped by: RESERVE_MAX is GPU time a day, and what was used of a reserve counts a day more.
    """
    assert {reserve(desk, ALICE, number, 1).state for number in range(4)} == {RELEASED}
    assert reserve(desk, ALICE, 0, 1, ahead=1).kind == INVALID_REQUEST
    for hours, state in ((0.5, "refused"), (1.0, "refused"), (24.5, RELEASED)):
        clock.now += hours * HOUR
        unreserve(desk, ALICE, 3)
        assert reserve(desk, ALICE, 3, 4).state == state, hours


@pytest.mark.attack
def test_a_reserve_is_ended_by_its_own_user_or_root(desk: Desk) -> None:
    """Tried: end somebody else's reserve, and take the device.

    Stopped by: whose it is goes by the uid that the kernel says.
    """
    reserve(desk, ALICE, 2, 1)
    assert unreserve(desk, BOB, 2).kind == INVALID_REQUEST
    assert last(desk.claim_as(BOB, 901, 4)).kind == BUSY
    reserve(desk, ALICE, 2, 1, ahead=20)
    ended = unreserve(desk, 0, 2)
    assert (ended.state, ended.number) == (RELEASED, 2)
    assert ended.why.count(f"reserved for uid {ALICE} from") == 2
    assert last(desk.claim_as(BOB, 902, 4)).state == GRANTED


@pytest.mark.parametrize(("ahead", "left"), [(0, 3), (2, 4)])
def test_what_was_used_of_one_that_is_ended_counts(
    desk: Desk, clock: VirtualClock, ahead: int, left: int
) -> None:
    reserve(desk, ALICE, 2, 2, ahead)
    reserve(desk, BOB, 3, 4)
    clock.now += HOUR
    assert unreserve(desk, ALICE, 2).state == RELEASED
    assert reserve(desk, ALICE, 1, left + 0.1).kind == INVALID_REQUEST
    assert reserve(desk, ALICE, 1, left - 0.1).state == RELEASED
    assert reserve(desk, CAROL, 3, 1).kind == BUSY  # another's stays


def test_reserves_outlive_a_restart_and_garbage_is_none(desk: Desk) -> None:
    one = Reservation(bus(1), ALICE, (1.0, 2.5), "alice; x", "a = b; c")
    folder = str(desk.box.state)
    write_reservations(folder, [one])
    (read,) = read_reservations(folder)
    assert (read.device, read.uid, read.begin, read.end) == (bus(1), ALICE, 1.0, 2.5)
    assert (read.user, read.why) == ("alice", "x; a = b; c")
    for times in ("", "0 x=1", "0 x=1 nan", "0 x=1 5.0 2.0 alice; its end is before it begins"):
        (desk.box.state / RESERVED).write_text(
            f"gpulock-reservations 1\n{times}\n" if times else ""
        )
        assert read_reservations(folder) == []


def test_a_claim_of_a_certain_device_waits_for_the_end_of_its_reserve(desk: Desk) -> None:
    reserve(desk, ALICE, 2, 1)
    request = SocketRequest(CLAIM, 901, 9, 1, devices=(bus(2),), wait=FOR_EVER)
    waiting = desk.ask(request, desk.come_as(BOB, 901))
    assert "reserved for" in last(waiting).why
    unreserve(desk, ALICE, 2)
    assert last(waiting).state == GRANTED
