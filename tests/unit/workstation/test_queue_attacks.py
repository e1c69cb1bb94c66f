# SPDX-License-Identifier: Apache-2.0
"""What one user tries in the queue does not keep the others from the devices that are free."""

from __future__ import annotations

import pwd
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.device_users import OpenFiles
from gpulock.deadline import clock_boottime
from gpulock.errors import BUSY, INVALID_REQUEST
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.store import quarantine
from gpulock.store.reservations import Reservation, write_reservations
from gpulock.store.verdicts import DEAD, UNKNOWN, Verdict
from gpulock.workstation import backfill, peer, server, socket_claims
from gpulock.workstation.peer import receive_packet
from gpulock.workstation.server import MOST_OF_USER
from gpulock.workstation.socket_claims import SHARE_OF_USER, SPARE, Allowance
from gpulock.workstation.wait_queue import PAUSE, REJOIN_SECONDS, RETRY_DELAY
from gpulock.workstation.waiting import KEPT
from gpulock.workstation.wire import (
    CLAIM,
    FOR_EVER,
    GRANTED,
    REFUSED,
    WAITING,
    SocketRequest,
    new_packet_socket,
)
from tests.support.clock import VirtualClock
from tests.support.desk import Desk, answers, last
from tests.support.fake_mps import leave_mps
from tests.support.faults import raising, returning
from tests.support.trees import bus

ALICE, BOB, CAROL = 2001, 2002, 2003


def later(desk: Desk) -> None:
    """Let the pause after an attempt be over."""
    desk.go(clock_boottime() + RETRY_DELAY)


@pytest.mark.attack
def test_what_a_client_hands_over_is_closed_by_no_thread_that_serves(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried: send a TCP socket whose last close waits an hour (SO_LINGER), in a packet.

    Stopped by: from Linux 6.16 on nobody can send descriptors; a thread closes those of before,
    and each connection, in which unread ones may be.
    """
    aside: list[Callable[[], None]] = []
    monkeypatch.setattr(peer, "start_new_thread", lambda act, _: aside.append(act))
    with socket.socket() as sent:
        caller = desk.come()
        with suppress(PermissionError):
            socket.send_fds(caller, [b"junk"], [sent.fileno()])
        caller.send(b"junk")
        older, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with older, other:  # which no kernel refuses
            socket.send_fds(other, [b"junk"], [sent.fileno()])
            before = len(aside)
            assert receive_packet(older, 99) == b"junk"
            assert len(aside) == before + 1
    desk.go()
    assert not desk.server.clients
    assert len(aside) > before + 1, "the connection as well"
    for close in aside:
        close()


@pytest.mark.attack
def test_who_connects_without_end_is_not_let_in(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried: connect with 3,000 threads, ask for nothing sensible, close, and begin again.

    Stopped by: who connected 200 times is let in 20 times a second; root is not counted.
    """
    for uid, known in ((0, True), (ALICE, False)):
        monkeypatch.setattr(server, "read_peer_ids", returning((1, uid)))
        for _ in range(250):
            desk.come().close()
        desk.go()
        caller = desk.come()
        assert (desk.server.clients != {}) == known, uid
        caller.close()
        desk.go()
    desk.go(clock_boottime() + 1.0)
    monkeypatch.setattr(server, "read_peer_ids", returning((1, BOB)))
    desk.come()
    assert desk.server.clients, "others are"


@pytest.mark.attack
def test_a_caller_that_waits_for_what_it_holds_itself_lets_others_by(desk: Desk) -> None:
    """Tried: hold one of four GPUs, and wait for all four with 16 calls.

    Stopped by: a caller whom no other user's release would serve keeps its place and lets others
    by, without an attempt for each.
    """
    desk.process(901, ALICE)
    desk.hold(0, 901, uid=ALICE, start=9)
    heads = [desk.claim_as(ALICE, 902, 4, FOR_EVER) for _ in range(MOST_OF_USER)]
    for _ in heads:
        later(desk)
    honest = desk.claim_as(BOB, 903, 1)
    assert last(honest).state == GRANTED
    waiting = [answers(head)[-1] for head in heads]
    assert {reply.state for reply in waiting} == {WAITING}
    assert waiting[0].why.startswith("others go first while its user holds GPUs; 4 GPUs asked for")


def test_a_reservation_of_what_a_caller_does_not_ask_for_is_not_in_its_way(desk: Desk) -> None:
    desk.hold(0, desk.process(901, ALICE), uid=ALICE, start=9)
    reserved = Reservation(bus(3), CAROL, (0.0, time.time() + 1000.0), "carol", "talk")
    write_reservations(str(desk.box.state), [reserved])
    desk.ask(SocketRequest(CLAIM, 902, 9, 1, (bus(0),), FOR_EVER), desk.come_as(ALICE, 902))
    later(desk)
    assert desk.waiting()[0].why.startswith("others go first while its user holds GPUs; ")


@pytest.mark.attack
@pytest.mark.parametrize(
    ("barrier", "why"),
    [
        (Verdict(UNKNOWN, "its crowd"), "GPUs of dead or unknown claims are locked"),
        (Verdict(DEAD, "gone"), "GPUs of dead or unknown claims are locked"),
        (quarantine.QUARANTINE, "GPUs are out of service"),
        (quarantine.RESERVE, "GPUs are out of service"),
        (None, "GPUs are reserved"),
    ],
)
def test_a_caller_that_waits_for_a_device_that_no_user_can_give_back_lets_others_by(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, barrier: Verdict | str | None, why: str
) -> None:
    """Tried: a claim that ended beside a crowd that cannot all be looked at: its GPU stays locked,
    and the free ones were kept for a caller who wants all.

    Stopped by: a lock that is not proven alive is none that its user gives back.
    """
    monkeypatch.setattr(backfill, "find_turn", lambda waited: (True, 60.0))
    if isinstance(barrier, Verdict):
        desk.hold(0, desk.process(904, CAROL), uid=CAROL, start=9)
        monkeypatch.setattr(backfill, "read_node_verdicts", returning(({"t0": barrier}, 0)))
    elif barrier is not None:
        folder = desk.box.state / quarantine.FOLDER
        folder.mkdir()
        (folder / f"{bus(0)}{barrier}").write_text("")
    else:
        reserved = Reservation(bus(0), CAROL, (0.0, time.time() + 1000.0), "carol", "talk")
        write_reservations(str(desk.box.state), [reserved])
    waiting = desk.claim_as(ALICE, 901, 4, FOR_EVER)
    later(desk)
    assert last(desk.claim_as(BOB, 903, 1)).state == GRANTED
    reply = answers(waiting)[-1]
    assert (reply.state, reply.why.partition(";")[0]) == (WAITING, f"others go first while {why}")


@pytest.mark.attack
def test_no_caller_looks_at_the_dead_claims_of_others(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried: a dead claim beside processes with all descriptors open: each caller paid for a look.

    Stopped by: the reconcile frees what dead owners hold, and a caller its own user's alone.
    """
    monkeypatch.setattr(OpenFiles, "_fill", raising(AssertionError("looked at")))
    for number in range(4):
        desk.hold(number, 904, uid=CAROL, start=9)
    refused = last(desk.claim_as(BOB, 911, 4))
    assert (refused.kind, refused.why[:30]) == (BUSY, "4 GPUs asked for, 0 of 4 free ")


def test_a_caller_whose_card_the_mps_of_others_closes_waits_for_them_and_is_kept_devices(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.node = Node(Settings({**desk.box.settings, "SHARES": "0:4", "SHARE_MPS": "yes"}))
    leave_mps(desk.node, bus(0), CAROL)
    monkeypatch.setattr(backfill, "find_turn", lambda waited: (True, 60.0))
    desk.claim_as(ALICE, 901, 4, FOR_EVER)
    assert desk.waiting()[0].why.startswith(KEPT)


@pytest.mark.attack
def test_a_request_that_others_keep_waiting_keeps_them_from_free_devices_in_turns(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried: wait for all GPUs, one of which somebody holds for days: nobody got one meanwhile.

    Stopped by: the first lets others by and has free devices kept for it in turns.
    """
    desk.hold(0, desk.process(901, CAROL), uid=CAROL, start=9)
    large = desk.claim_as(ALICE, 902, 4, FOR_EVER)
    later(desk)
    end = time.localtime(time.time() + backfill.FIRST_TURN)
    told = time.strftime("others may go first until %H:%M; 4 GPUs asked for", end)
    assert last(large).why.startswith(told)
    assert last(desk.claim_as(BOB, 903, 1)).state == GRANTED
    monkeypatch.setattr(backfill, "find_turn", lambda waited: (True, 60.0))
    for wait, late in ((0.0, ""), (0.01, "not served in the time of --wait: ")):
        asked = desk.claim_as(BOB, 904, 1, wait)
        desk.go(clock_boottime() + 2 * PAUSE)
        reply = last(asked)
        assert (reply.state, reply.kind, reply.do) == (REFUSED, BUSY, "see gpulock queue")
        why = f"{late}free GPUs are kept for number 1: it is the turn of uid 2001; 1 GPU asked for"
        assert reply.why.startswith(why)
    end = time.localtime(time.time() + 60.0)
    told = time.strftime(f"{KEPT} until %H:%M; 4 GPUs asked for", end)
    assert desk.waiting()[0].why.startswith(told)
    for device in [bus(n) for n in range(4)]:
        if device in desk.box.locks():
            desk.give_back([bus(n) for n in range(4)].index(device))
    assert last(large).state == GRANTED


@pytest.mark.attack
def test_free_devices_that_the_first_could_not_use_are_not_kept_for_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried: wait for one certain GPU, which a friend holds: all free ones were kept for that call.

    Stopped by: only what the first could use itself is kept for it.
    """
    monkeypatch.setattr(backfill, "find_turn", lambda waited: (True, 60.0))
    for number in (0, 1):
        desk.hold(number, desk.process(901 + number, CAROL), uid=CAROL, start=9)
    request = SocketRequest(CLAIM, 903, 9, 1, devices=(bus(0),), wait=FOR_EVER)
    head = desk.ask(request, desk.come_as(ALICE, 903))
    assert desk.waiting()[0].what == "GPU 0"
    later(desk)
    assert last(head).state == WAITING
    desk.give_back(1)
    assert last(desk.claim_as(BOB, 904, 3)).devices == (bus(1), bus(2), bus(3))


def test_who_waits_for_a_card_that_falls_off_the_bus_is_told(desk: Desk) -> None:
    desk.hold(0, desk.process(901, CAROL), uid=CAROL, start=9)
    request = SocketRequest(CLAIM, 903, 9, 1, devices=(bus(0),), wait=FOR_EVER)
    head = desk.ask(request, desk.come_as(ALICE, 903))
    shutil.rmtree(desk.box.driver / "gpus" / bus(0))
    for rounds in (1, 2):
        desk.go(clock_boottime() + rounds * PAUSE)
    assert last(head).state == REFUSED


def test_what_is_kept_for_the_first_is_of_the_kind_that_it_asks_for(desk: Desk) -> None:
    desk.box.gpu(bus(1), 1, Model="NVIDIA A100")
    want = ClaimRequest(1, kinds=(("model:a100", 1),))
    assert backfill.list_usable_devices(backfill.QueueView(desk.node), want) == [bus(1)]


def test_the_turns_of_the_first_are_of_equal_length_and_grow() -> None:
    first = backfill.FIRST_TURN
    ends = [first, 2 * first, 4 * first, 6 * first, 10 * first]
    kept = [backfill.find_turn(end) for end in (0.0, *ends)]
    left = [first, first, 2 * first, 2 * first, 4 * first, 4 * first]
    assert kept == [*zip([False, True] * 3, left)]
    assert backfill.find_turn(first - 1.0) == (False, 1.0)


@pytest.mark.attack
def test_calls_of_one_user_keep_free_devices_in_the_same_turns(
    desk: Desk, clock: VirtualClock
) -> None:
    """Tried: several calls of one user, stopped in turns: one of them kept the free GPUs always.

    Stopped by: the turns are those of the user, as long as any call of that user waits.
    """
    begun = clock.now
    desk.hold(0, desk.process(904, CAROL), uid=CAROL, start=9)
    calls = [desk.claim_as(ALICE, pid, 4, FOR_EVER) for pid in (901, 902)]

    def bob_asks(at: float, stopped: str) -> str:
        """Ask for one device, after a while in which the first call is stopped or not."""
        desk.box.proc.add(901, "gpulock", start=9, uids=(ALICE,) * 4, state=stopped)
        for clock.now in (begun + at, begun + at + PAUSE, begun + at + 2 * PAUSE):
            desk.go()
        reply = last(desk.claim_as(BOB, 903, 1))
        if reply.state == GRANTED:
            desk.give_back(1)
        return reply.state

    turn = backfill.FIRST_TURN
    asked = [(10.0, "S"), (turn, "S"), (turn + 60, "T"), (2 * turn + 90, "T"), (4 * turn, "S")]
    states = [bob_asks(at, stopped) for at, stopped in asked]
    assert states == [GRANTED, REFUSED, REFUSED, GRANTED, REFUSED]
    for call in calls:
        call.close()
    clock.now += PAUSE
    desk.go()
    desk.claim_as(ALICE, 905, 4, FOR_EVER)
    assert bob_asks(clock.now - begun + PAUSE, "S") == GRANTED


def test_a_users_dead_claims_are_looked_at_once_for_a_call(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def look(_: OpenFiles, found: object, uid: int) -> str:
        looks.append(uid)
        return "more than can be looked at"

    monkeypatch.setattr(OpenFiles, "_fill", look)
    desk.hold(0, 904, uid=CAROL, start=9)
    assert last(desk.claim_as(CAROL, 905, 4)).state == REFUSED
    assert looks == [CAROL]


def test_the_end_of_a_wait_waits_for_no_turn_of_the_queue(desk: Desk) -> None:
    desk.fill(904, CAROL)
    desk.claim_as(ALICE, 901, 1, PAUSE / 2)
    for _ in range(4):
        later(desk)
    assert desk.server.due() <= clock_boottime() + PAUSE / 2


def test_a_place_counts_those_whom_the_queue_shows(desk: Desk, clock: VirtualClock) -> None:
    desk.fill(904, CAROL)
    desk.claim_as(ALICE, 901, 1, PAUSE)
    desk.box.proc.add(901, "gpulock", start=9, uids=(ALICE,) * 4, state="T")
    waiting = desk.claim_as(BOB, 902, 1, FOR_EVER)
    for seconds in (0.5 * PAUSE, 1.5 * PAUSE):
        clock.now += seconds
        desk.go()
    told = [(reply.number, reply.before) for reply in answers(waiting)]
    assert told == [(2, 1), (2, 0)]
    assert desk.line() == [(2, 902)]


@pytest.mark.attack
def test_a_user_who_is_granted_something_begins_the_turns_anew(
    desk: Desk, clock: VirtualClock
) -> None:
    """Tried: always to have a call in the queue: a new large one had free GPUs kept at once.

    Stopped by: the turns of a user begin where a call of that user was granted last.
    """
    desk.hold(0, desk.process(904, CAROL), uid=CAROL, start=9)
    desk.claim_as(ALICE, 901, 4, FOR_EVER)
    clock.now += backfill.FIRST_TURN - PAUSE
    assert last(desk.claim_as(ALICE, 902, 1)).state == GRANTED
    clock.now += 2 * PAUSE
    assert last(desk.claim_as(BOB, 903, 1)).state == GRANTED


@pytest.mark.parametrize(("kept", "state"), [(False, GRANTED), (True, REFUSED)])
@pytest.mark.parametrize("holder", [ALICE, CAROL])
def test_the_calls_of_one_user_are_let_by_as_others_are(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, holder: int, *, kept: bool, state: str
) -> None:
    monkeypatch.setattr(backfill, "find_turn", lambda waited: (kept, 60.0))
    desk.hold(0, desk.process(901, holder), uid=holder, start=9)
    large = desk.claim_as(ALICE, 902, 4, FOR_EVER)
    later(desk)
    small = last(desk.claim_as(ALICE, 903, 1)).state
    assert (small, last(large).state) == (GRANTED if holder == ALICE else state, WAITING)


@pytest.mark.attack
def test_a_process_with_many_calls_gets_a_number_for_each(desk: Desk) -> None:
    """Tried: one call that waits for ever, and new calls of that process with its old number.

    Stopped by: a call gets a number that no living connection has.
    """
    desk.fill(904, CAROL)
    keeper = desk.claim_as(ALICE, 901, 2, FOR_EVER)
    honest = desk.claim_as(BOB, 903, 1, FOR_EVER)
    jumper = desk.claim_as(ALICE, 901, 1, FOR_EVER)
    assert desk.line() == [(1, 901), (2, 903), (3, 901)]
    keeper.close()
    desk.go()
    desk.give_back(0)
    later(desk)
    assert (last(honest).state, last(jumper).state) == (GRANTED, WAITING)


@pytest.mark.attack
def test_a_number_that_nobody_calls_with_any_more_delays_nobody_for_long(desk: Desk) -> None:
    """Tried: wait in the queue while gpulockd is started again, live on, and never call again.

    Stopped by: gpulockd drops the number after ten seconds.
    """
    desk.fill(904, CAROL)
    desk.claim_as(ALICE, 901, 1, FOR_EVER)
    desk.server.close()
    desk.server.open()
    honest = desk.claim_as(BOB, 903, 1, FOR_EVER)
    desk.give_back(0)
    assert last(honest).state == WAITING
    desk.go(clock_boottime() + REJOIN_SECONDS)
    assert last(honest).state == GRANTED


@pytest.mark.attack
def test_a_caller_that_was_stopped_gets_nothing_and_keeps_nobody_waiting(desk: Desk) -> None:
    """Tried: Ctrl-Z while waiting: the devices would be held by a command that never starts.

    Stopped by: a stopped caller keeps its place and is passed over until it goes on.
    """
    desk.fill(904, CAROL)
    stopped = desk.claim_as(ALICE, 901, 1, FOR_EVER)
    desk.box.proc.add(901, "gpulock", start=9, uids=(ALICE,) * 4, state="T")
    honest = desk.claim_as(BOB, 903, 1, FOR_EVER)
    desk.give_back(0)
    assert (last(honest).state, last(stopped).state) == (GRANTED, WAITING)
    desk.process(901, ALICE)
    desk.give_back(1)
    assert last(stopped).state == GRANTED


@pytest.mark.attack
def test_no_user_holds_more_than_a_site_allows(desk: Desk) -> None:
    """Tried: all GPUs, by one claim or by several.

    Stopped by: USER_MAX; such a call lets others by.
    """
    desk.node = Node(Settings({**desk.box.settings, "USER_MAX": "2"}))
    assert last(desk.claim_as(ALICE, 901, 3)).kind == INVALID_REQUEST
    assert last(desk.claim_as(ALICE, 902, 2)).state == GRANTED
    more = desk.claim_as(ALICE, 903, 1, FOR_EVER)
    why = "held already: 2 of the 2 GPUs that a user may hold (USER_MAX)"
    assert (last(more).why, last(desk.claim_as(BOB, 904, 2)).state) == (why, GRANTED)
    desk.give_back(0)
    later(desk)
    assert last(more).state == GRANTED


@pytest.mark.attack
def test_a_user_who_claims_again_and_again_fills_no_history(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried: a loop of claims and releases, each of which is a line of everybody's history.

    Stopped by: a user's claims wait ten seconds each, once there were 1,000 in a short time.
    """
    rate = Allowance(2 * socket_claims.PERIOD)
    monkeypatch.setattr(desk.server.claims, "rate", rate)
    for number in range(3):
        assert last(desk.claim_as(ALICE, 901 + number, 1)).state == GRANTED
        desk.give_back(0)
    refused = last(desk.claim_as(ALICE, 904, 1))
    assert (refused.kind, "in 10 s" in refused.why) == (BUSY, True)
    waiting = desk.claim_as(ALICE, 905, 1, FOR_EVER)
    assert (last(waiting).state, last(desk.claim_as(BOB, 906, 1)).state) == (WAITING, GRANTED)
    desk.go(clock_boottime() + socket_claims.PERIOD)
    assert last(waiting).state == GRANTED


@pytest.mark.attack
def test_a_user_whose_claims_take_long_waits_while_others_are_served(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, clock: VirtualClock
) -> None:
    """Tried: 30,000 open files, and a loop of claims that are undone: each took three seconds.

    Stopped by: what a user's claims and their ends take is charged to that user.
    """

    def look(*_: object) -> None:
        clock.now += 2 * SPARE

    monkeypatch.setattr(desk.server.claims, "undo_grant", look)
    gone = desk.come_as(ALICE, 901)
    gone.shutdown(socket.SHUT_RD)
    desk.ask(SocketRequest(CLAIM, 901, 9, 1), gone)
    desk.give_back(0)
    refused = last(desk.claim_as(ALICE, 902, 1))
    assert (refused.kind, "the next may in" in refused.why) == (BUSY, True)
    waiting = desk.claim_as(ALICE, 903, 1, FOR_EVER)
    assert (last(waiting).state, last(desk.claim_as(BOB, 906, 1)).state) == (WAITING, GRANTED)
    desk.go(clock.now + 2 * SPARE / SHARE_OF_USER)
    assert last(waiting).state == GRANTED


@pytest.mark.attack
def test_all_who_wait_at_the_socket_are_let_in_at_once(desk: Desk) -> None:
    """Tried: many short calls, each of which comes before a newcomer: one was let in each turn.

    Stopped by: each turn lets in all that wait.
    """
    come = [new_packet_socket() for _ in range(10)]
    for caller in come:
        caller.connect(str(desk.box.lock / "socket"))
    desk.loop.wait(clock_boottime())
    assert len(desk.server.clients) == 10
    for caller in come:
        caller.close()


def test_a_claim_that_is_answered_again_counts_once_and_is_no_line(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk.server.claims, "rate", Allowance(socket_claims.PERIOD))
    for _ in range(2):
        assert last(desk.claim_as(ALICE, 901, 1)).state == GRANTED
    assert desk.server.claims.rate.due(ALICE) <= clock_boottime()
    assert len(desk.journal.said()) == 1


def test_who_did_not_claim_for_long_saved_up_no_more_than_one_burst(desk: Desk) -> None:
    rate, now = desk.server.claims.rate, 1e6
    rate.charge(ALICE, socket_claims.PERIOD, 0.0)
    for _ in range(socket_claims.BURST):
        assert rate.due(ALICE) <= now
        rate.charge(ALICE, socket_claims.PERIOD, now)
    assert rate.due(ALICE) == now + socket_claims.PERIOD


def test_what_a_dead_owner_held_is_taken_by_no_later_caller(desk: Desk) -> None:
    desk.fill(904, CAROL)
    first = desk.claim_as(ALICE, 901, 4, FOR_EVER)
    desk.box.proc.remove(904)
    second = desk.claim_as(BOB, 903, 1, FOR_EVER)
    assert last(second).state == WAITING
    assert desk.box.locks() == [bus(number) for number in range(4)]
    assert last(first).state == WAITING


def test_a_name_service_that_does_not_answer_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = threading.Event()
    monkeypatch.setattr(pwd, "getpwuid", lambda _: answered.wait(60))
    monkeypatch.setattr(socket_claims, "NAME_SECONDS", 0.01)
    assert socket_claims.user_name(4_711_000) == "uid 4711000"
    answered.set()


def test_a_name_service_that_is_slow_is_asked_once_for_each_call(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.fill(904, CAROL)
    desk.claim_as(ALICE, 901, 1, FOR_EVER)
    later(desk)

    def never(_: int) -> str:
        pytest.fail("the name service is asked while nobody comes")

    monkeypatch.setattr(server, "user_name", never)
    monkeypatch.setattr(socket_claims, "look_up_user", never)
    desk.box.proc.add(901, "gpulock", start=9, uids=(ALICE,) * 4, state="T")
    desk.go(clock_boottime() + 2 * PAUSE)
    assert desk.waiting()[0].why == "stopped"
