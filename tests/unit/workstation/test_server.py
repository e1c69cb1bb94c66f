# SPDX-License-Identifier: Apache-2.0
"""The socket: in order, each for its own processes, and nothing lost when a client goes."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from gpulock.alloc.choose import CHECK_SECONDS
from gpulock.deadline import clock_boottime
from gpulock.errors import BROKEN, BUSY, INVALID_REQUEST, UNKNOWN, Refusal
from gpulock.node.context import Node
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.node.subordinate import SubordinateUids
from gpulock.store.gate import Gate
from gpulock.store.locks import LockStore
from gpulock.store.owner import HEALTH_COMMENT, HEALTH_USER
from gpulock.workstation import server as server_module
from gpulock.workstation import socket_claims, wire
from gpulock.workstation import wait_queue as line_module
from gpulock.workstation.peer import Peer
from gpulock.workstation.server import MOST_OF_USER, SILENCE, UNREAD
from gpulock.workstation.socket_claims import user_name
from gpulock.workstation.wire import (
    CANCEL,
    CLAIM,
    FOR_EVER,
    GRANTED,
    LARGEST,
    REFUSED,
    RELEASE,
    RELEASED,
    WAITING,
    SocketReply,
    SocketRequest,
    encode_packet,
)
from tests.support.clock import VirtualClock
from tests.support.desk import LATER, ME, MINE, UIDS, Desk, answers, last
from tests.support.driver_reads import observe_driver_reads
from tests.support.faults import raising, replace_text
from tests.support.locks import place_lock
from tests.support.trees import bus, record, soon


def test_a_claim_that_is_granted_reads_the_locks_once_under_the_gate(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LockStore, "read_all_locks", raising(AssertionError("read once more")))
    assert desk.claim(1).state == GRANTED


def test_nobody_reads_the_driver_with_the_gate_held_whatever_is_held_already(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = observe_driver_reads(Path(desk.node.store.root), monkeypatch)
    assert [desk.claim(count).state for count in (1, 1, 2)] == [GRANTED, GRANTED, REFUSED]
    assert (bool(reads), any(reads)) == (True, False)


def test_the_driver_is_read_once_however_many_wait(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind_all(desk)
    for pid in range(901, 906):
        desk.claim_as(UIDS[0] + pid, pid, 1, FOR_EVER)
    desk.go(clock_boottime() + LATER, rounds=1)
    reads = observe_driver_reads(Path(desk.node.store.root), monkeypatch)
    desk.go(clock_boottime() + 2 * LATER, rounds=1)
    assert len(desk.line()) == 6
    assert reads == [False]


@pytest.mark.attack
@pytest.mark.parametrize("seconds", [1e10, 1e300])
def test_no_claim_ends_later_than_a_date_can_tell(desk: Desk, seconds: float) -> None:
    """Tried: a claim whose end has no date, on which everybody's `gpulock status` ended.

    Stopped by: a claim is for thirty years at most.
    """
    reply = last(desk.ask(SocketRequest(CLAIM, ME, MINE, 1, seconds=seconds)))
    assert (reply.state, reply.kind, desk.box.locks()) == (REFUSED, INVALID_REQUEST, [])
    assert len(reply.why) < 60
    assert last(desk.ask(SocketRequest(CLAIM, ME, MINE, 1, seconds=1e9))).state == GRANTED


def test_where_the_locks_cannot_be_counted_nobody_is_granted_more(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.node = Node(Settings({**desk.box.settings, "USER_MAX": "2"}))
    gone = Refusal(UNKNOWN, "no descriptor is left", "wait")
    monkeypatch.setattr(LockStore, "read_all_locks", raising(gone))
    reply = desk.claim(1)
    assert (reply.state, reply.why) == (REFUSED, gone.why)


@pytest.mark.parametrize("other", [(1, 1, 1), (0, 1, 1), (1, 0, 1), (0, 0, 1)])
def test_a_process_of_another_user_holds_nothing_for_us(desk: Desk, other: tuple[int, ...]) -> None:
    """Nor one whose real, effective or saved uid is another's."""
    desk.box.proc.add(900, "su", start=9, uids=[UIDS[0] + one for one in (*other, 0)])
    reply = desk.claim(1, pid=900, start=9)
    assert (reply.state, reply.kind, desk.box.locks()) == (REFUSED, INVALID_REQUEST, [])


def test_a_number_that_is_another_process_by_now_holds_nothing_and_is_not_looked_at_further(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Proc, "status", raising(AssertionError("it costs 50 ms")))
    other, none = desk.claim(1, start=MINE - 1), desk.claim(1, pid=999)
    assert ("now belongs to another process" in other.why, none.state) == (True, REFUSED)
    assert desk.claim(1, pid=10**22).state == REFUSED
    assert all("in a container run gpulock outside of it" in one.do for one in (other, none))
    assert desk.box.locks() == []


def test_nor_does_one_that_ended_while_its_call_waited(desk: Desk) -> None:
    behind_all(desk)
    desk.process(901)
    caller = desk.ask(SocketRequest(CLAIM, 901, 9, 1, wait=FOR_EVER))
    desk.process(901, UIDS[0] + 1, start=10)
    desk.go(clock_boottime() + LATER)
    assert last(caller).why == "process 901 has ended"
    assert desk.line() == [(1, ME)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"number": 2}),
        ({"device_kind": "model:h200-nvl"}, {"device_kind": "model:h200"}),
        ({"devices": (bus(1),)}, {"devices": (bus(2),)}),
    ],
)
def test_a_second_claim_of_another_size_model_or_device_is_refused(
    desk: Desk, one: dict[str, Any], other: dict[str, Any]
) -> None:
    for number, model in enumerate(("NVIDIA H200", "NVIDIA H200 NVL")):
        desk.box.gpu(bus(number), number, Model=model)
    asked = [SocketRequest(CLAIM, ME, MINE, **{"number": 1, **m}) for m in (one, other, one)]
    replies = [last(desk.ask(one)) for one in asked]
    assert [reply.state for reply in replies] == [GRANTED, REFUSED, GRANTED]
    assert (replies[1].kind, len(desk.box.locks())) == (INVALID_REQUEST, 1)


def test_a_second_claim_of_the_same_is_told_what_stays(desk: Desk) -> None:
    asked = SocketRequest(CLAIM, ME, MINE, 1)
    first, second = (last(desk.ask(asked._replace(seconds=end))) for end in (0.0, 60.0))
    told = f"pid {ME} holds GPU 0 already, without an end: nothing of it is changed"
    assert (first.why, second.why) == ("", told)


def test_what_an_earlier_process_of_this_number_held_is_no_claim_of_ours(desk: Desk) -> None:
    desk.hold(0, ME, uid=UIDS[0], start=MINE - 1)
    assert desk.claim(2).state == GRANTED


@pytest.mark.parametrize("ends", [True, False])
def test_who_does_not_wait_waits_for_gpulockd_to_end_a_health_check(
    desk: Desk, *, ends: bool
) -> None:
    desk.process(900)
    for number in range(3):
        desk.hold(number, 900, start=9)
    desk.hold(3, 900, start=9, user=HEALTH_USER, comment=HEALTH_COMMENT)
    caller = desk.ask(SocketRequest(CLAIM, ME, MINE, 1))
    assert last(caller).state == WAITING
    checked = desk.node.store.read(bus(3)).owner
    assert checked is not None and not checked.gives_way()
    if ends:
        desk.give_back(3)
    desk.go(clock_boottime() + CHECK_SECONDS)
    assert last(caller).state == (GRANTED if ends else REFUSED)


def behind_all(desk: Desk, number: int = 1) -> socket.socket:
    """Wait for devices, all of which another process holds."""
    desk.fill(900, UIDS[0] + 1)
    return desk.ask(SocketRequest(CLAIM, ME, MINE, number, wait=FOR_EVER))


def test_everybody_may_read_who_waits_for_what_and_why(desk: Desk) -> None:
    behind_all(desk, 2)
    (caller,) = desk.waiting()
    assert (caller.pid, caller.uid, caller.what) == (ME, UIDS[0], "2 GPUs")
    assert caller.why.endswith("2 GPUs asked for, 0 of 4 free")
    assert (desk.box.lock / "waiting").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("old", "new"), [("", ""), ('"version": 1', '"version": 2'), ("boot", "x")]
)
def test_of_another_boot_or_version_nobody_waits(desk: Desk, old: str, new: str) -> None:
    behind_all(desk)
    old = desk.node.boot_id if old == "boot" else old
    replace_text(desk.box.lock / "waiting", old, new)
    assert len(desk.waiting()) == (0 if old else 1)
    desk.box.proc.remove(ME)
    assert desk.waiting() == [], "nor who has ended"


def test_who_waits_is_told_each_change_but_once_a_second(desk: Desk) -> None:
    caller = desk.come()
    (client,) = desk.server.clients.values()
    for now, why in ((1.0, "a"), (1.5, "b"), (2.0, "c"), (9.0, "c"), (9.5, "d")):
        client.tell(SocketReply(WAITING, why=why), now)
    assert [reply.why for reply in answers(caller)] == ["a", "c", "d"]


def test_a_caller_is_cancelled_by_number_by_its_user_or_root_alone(desk: Desk) -> None:
    caller = behind_all(desk)
    ((number, _),) = desk.line()
    assert last(caller).number == number  # it is told what to cancel
    stranger = desk.come_as(UIDS[0] + 1, 901)
    desk.ask(SocketRequest(CANCEL, 0, 0, number), stranger)
    assert (last(stranger).kind, len(desk.line())) == (INVALID_REQUEST, 1)
    assert last(desk.ask(SocketRequest(CANCEL, 0, 0, number))).state == RELEASED
    told = last(caller)
    assert (told.kind, told.why, desk.line()) == (BUSY, f"cancelled by {user_name(UIDS[0])}", [])
    assert last(desk.ask(SocketRequest(CANCEL, 0, 0, number))).kind == INVALID_REQUEST


def test_a_waiting_file_that_cannot_be_written_stops_nobody(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = raising(OSError(errno.ENOSPC, "full"))
    monkeypatch.setattr("gpulock.workstation.waiting.write_waiting", full)
    caller = behind_all(desk)
    desk.give_back(0)
    assert last(caller).state == GRANTED


def test_what_is_granted_to_one_who_has_gone_is_taken_back(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client goes between the claim and the answer."""
    serving = desk.server.claims.serve

    def gone(*arguments: Any) -> SocketReply:
        reply = serving(*arguments)
        desk.came[0].close()
        return reply

    monkeypatch.setattr(desk.server.claims, "serve", gone)
    desk.ask(SocketRequest(CLAIM, ME, MINE, 2))
    assert desk.box.locks() == []
    assert desk.line() == []


def test_a_gpulockd_that_ends_leaves_the_numbers_for_the_next(
    desk: Desk, clock: VirtualClock
) -> None:
    caller = behind_all(desk)
    for pid in (902, 903):
        desk.claim_as(pid, pid, 1, FOR_EVER)
    before = desk.waiting()
    desk.server.close()
    assert desk.waiting() == before
    assert answers(caller)[-1].state == WAITING  # no word: it is to ask the next one
    clock.now += 3
    desk.server = server_module.ClaimServer(desk.loop, desk.journal, lambda: desk.node)
    desk.server.open()
    new = desk.claim_as(904, 904, 1, FOR_EVER)  # gets no number of one that is not back yet
    third = desk.claim_as(903, 903, 1, FOR_EVER)
    first = desk.ask(SocketRequest(CLAIM, ME, MINE, 1, wait=FOR_EVER))
    again = desk.waiting()
    assert [(one.number, one.pid) for one in again] == [(1, ME), (2, 902), (3, 903), (4, 904)]
    assert [one.since for one in again[:3]] == [one.since for one in before]
    second = desk.claim_as(902, 902, 1, FOR_EVER)
    desk.give_back(0)
    states = [last(one).state for one in (first, second, third, new)]
    assert states == [GRANTED, WAITING, WAITING, WAITING]


def test_where_a_scheduler_owns_the_node_those_who_wait_are_told(desk: Desk) -> None:
    caller = behind_all(desk)
    desk.server.close("slurmd runs here")
    reply = last(caller)
    assert (reply.state, reply.kind, reply.why) == (REFUSED, BROKEN, "slurmd runs here")
    assert not (desk.box.lock / "socket").exists()


def wait_for_all(desk: Desk, count: int) -> list[socket.socket]:
    """Let so many calls wait for all devices, one of which another user holds."""
    desk.hold(0, desk.process(904), uid=UIDS[0] + 1, start=9)
    asked = SocketRequest(CLAIM, ME, MINE, 4, wait=FOR_EVER)
    return [desk.ask(asked) for _ in range(count)]


@pytest.mark.attack
def test_one_user_cannot_take_all_places(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried: claims under 14 subordinate uids, which would fill the places of all users.

    Stopped by: 16 places of one user, who is the owner of the user namespace.
    """
    uids = iter(range(100_000, 100_100))

    def identify(_: socket.socket, proc: Proc, __: object) -> Peer:
        assert proc is desk.node.proc
        uid = next(uids)
        desk.box.proc.add(ME, "python3", start=MINE, uids=(uid,) * 4, session=1)
        return Peer(ME, uid, 61_001, os.pidfd_open(ME))

    monkeypatch.setattr(server_module, "identify_peer", identify)
    callers = wait_for_all(desk, MOST_OF_USER + 1)
    refused = last(callers[-1])
    assert (refused.kind, refused.why) == (BUSY, "you have too many open calls: 16 are allowed")
    assert last(callers[0]).state == WAITING


@pytest.mark.attack
def test_who_says_nothing_keeps_nobody_out(desk: Desk) -> None:
    """Tried: as many connections as gpulockd reads from, none of which says anything.

    Stopped by: one more takes the place of the oldest of the user who has most of them, unless
    that has said something by now.
    """
    honest = desk.come_as(2001, 901)
    callers = [desk.come() for _ in range(UNREAD - 1)]
    callers[0].send(encode_packet(SocketRequest(CLAIM, ME, MINE, 1)))
    for _ in range(2):
        desk.come()
    assert last(callers[0]).state == GRANTED
    assert len(desk.server.clients) == UNREAD
    with pytest.raises(BrokenPipeError):
        callers[1].send(b"late")
    assert last(desk.ask(SocketRequest(CLAIM, 901, 9, 1), honest)).state == GRANTED


@pytest.mark.attack
@pytest.mark.parametrize("is_inside", [True, False])
def test_a_claim_under_a_subordinate_uid_is_of_the_user_who_has_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, is_inside: bool
) -> None:
    """Tried: a claim under a subordinate uid, whose name nobody knows: one user was thousands.

    Stopped by: the claim is of the user who owns the user namespace or, of a set-user-id file, in
    whose range the uid is.
    """

    def namespace_owner(_: Proc, pid: int) -> int:
        return 61_001 if is_inside and pid == ME else -1

    monkeypatch.setattr(Proc, "namespace_owner", namespace_owner)
    if not is_inside:
        monkeypatch.setattr(SubordinateUids, "owner", lambda _, uid: 61_001)
        monkeypatch.setattr(server_module, "has_name", lambda uid: False)
    told = desk.claim(1)
    assert told.state == GRANTED, told.why
    owner = desk.node.store.read(bus(0)).owner
    assert owner is not None
    assert (owner.uid, owner.user) == (61_001, "uid 61001")
    assert last(desk.ask(SocketRequest(RELEASE, ME, MINE))).devices == (bus(0),)


def test_a_user_with_a_name_in_anothers_range_is_a_user(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a name service that gives uids out of the same numbers."""
    monkeypatch.setattr(SubordinateUids, "owner", lambda _, uid: 61_001)
    monkeypatch.setattr(server_module, "has_name", lambda uid: True)
    assert desk.claim(1).state == GRANTED
    owner = desk.node.store.read(bus(0)).owner
    assert owner is not None and owner.uid == os.geteuid()


@pytest.mark.attack
def test_who_has_taken_too_much_time_has_no_process_looked_at_before_the_turn(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried: claims for a process of 65,536 groups, 50 ms each, as many as there is time for.

    Stopped by: such a look is taken in the queue, where it is charged.
    """
    desk.server.claims._time.charge(os.geteuid(), 1000.0, clock_boottime())
    monkeypatch.setattr(Proc, "status", raising(AssertionError("it costs 50 ms")))
    assert "many calls came in a short time" in desk.claim(1).why


def test_who_says_nothing_is_sent_away(desk: Desk) -> None:
    caller = desk.come()
    desk.go(now=clock_boottime() + SILENCE)
    assert last(caller).state == REFUSED
    assert desk.server.due() == float("inf")


@pytest.mark.attack
@pytest.mark.parametrize("others", [0, UNREAD])
def test_what_came_during_a_long_round_is_read_before_its_caller_is_sent_away(
    desk: Desk, others: int
) -> None:
    """Tried: a round that takes as long as a caller may be silent, or others who connect in it.

    Stopped by: who seems to be silent is read before that counts.
    """
    caller = desk.come()
    caller.send(encode_packet(SocketRequest(CLAIM, ME, MINE, 1)))
    for _ in range(others):
        stranger = wire.new_packet_socket()
        stranger.connect(str(desk.box.lock / "socket"))
        desk.server._accept(0)
        desk.came.append(stranger)
    desk.server.run_due(clock_boottime() + SILENCE)
    assert last(caller).state == GRANTED


@pytest.mark.parametrize("data", [b"\0", b"x" * LARGEST, b"gpulock-request 2\nact=claim\n"])
def test_garbage_is_refused(desk: Desk, data: bytes) -> None:
    caller = desk.come()
    caller.send(data)
    desk.go()
    assert last(caller).kind == INVALID_REQUEST


def test_a_second_request_of_one_who_waits_is_refused(desk: Desk) -> None:
    caller = behind_all(desk)
    desk.ask(SocketRequest(CLAIM, ME, MINE, 1), caller)
    assert last(caller).kind == INVALID_REQUEST


def test_after_a_wish_that_cannot_be_granted_the_line_takes_a_breath(desk: Desk) -> None:
    """Each attempt may look at all processes: nobody keeps gpulockd at that."""
    desk.fill(900, UIDS[0] + 1)
    first, second = desk.come(), desk.come()
    first.send(encode_packet(SocketRequest(CLAIM, ME, MINE, 1)))
    second.send(encode_packet(SocketRequest(CLAIM, ME, MINE, 1, wait=FOR_EVER)))
    now = clock_boottime() + 1
    desk.go(now, rounds=1)
    assert last(first).kind == BUSY
    assert desk.server.due() == now + line_module.RETRY_DELAY


def test_an_impossible_wish_is_refused_and_the_next_is_served(desk: Desk) -> None:
    assert desk.claim(5).kind == INVALID_REQUEST
    assert desk.claim(4).state == GRANTED


def test_the_gate_is_waited_for_by_who_waits_alone(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_claims, "GATE_SECONDS", 0.01)
    with Gate(desk.node.store, soon()):
        assert desk.claim(1).kind == UNKNOWN
        caller = desk.ask(SocketRequest(CLAIM, ME, MINE, 1, wait=FOR_EVER))
        assert {reply.state for reply in answers(caller)} <= {WAITING}
    for _ in range(2):
        desk.go(now=desk.server.due())
    assert last(caller).state == GRANTED


@pytest.mark.parametrize(
    ("act", "place"),
    [
        (CLAIM, "gpulock.workstation.process_claims.claim_for_process"),
        (RELEASE, "gpulock.workstation.server.release_for_user"),
    ],
)
def test_a_fault_of_gpulockd_ends_one_call_and_not_gpulockd(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, act: str, place: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(place, raising(KeyError("surprise")))
        reply = last(desk.ask(SocketRequest(act, ME, MINE, 1)))
    assert (reply.state, reply.kind, "at fault" in reply.why) == (REFUSED, BROKEN, True)
    (line,) = desk.journal.said()
    assert line.startswith(f"<3>a request of uid {UIDS[0]} failed: KeyError: 'surprise' (")
    assert desk.claim(1).state == GRANTED


def test_devices_are_given_back_by_name(desk: Desk) -> None:
    granted = desk.claim(3)
    reply = last(desk.ask(SocketRequest(RELEASE, ME, 0, devices=granted.devices[:2])))
    assert reply.devices == granted.devices[:2]
    assert desk.box.locks() == list(granted.devices[2:])


def test_what_is_anothers_is_not_given_back_nor_what_is_named_with_it(desk: Desk) -> None:
    desk.hold(0, 900, uid=UIDS[0] + 1)
    desk.hold(1, ME, uid=UIDS[0], start=MINE, scheduler="sge", job_id="12")
    desk.hold(2, ME, uid=UIDS[0], start=MINE - 1)  # of an earlier process of that number
    named = [SocketRequest(RELEASE, ME, 0, devices=(bus(number),)) for number in (0, 1)]
    for asked in (*named, SocketRequest(RELEASE, ME, MINE)):
        reply = last(desk.ask(asked))
        assert (reply.state, reply.kind) == (REFUSED, INVALID_REQUEST)
    desk.hold(3, ME, uid=UIDS[0], start=MINE)
    desk.ask(SocketRequest(RELEASE, ME, 0, devices=(bus(3), bus(0))))
    assert desk.box.locks() == [bus(number) for number in range(4)]


@pytest.mark.parametrize(("other", "left"), [(0, [bus(0)]), (1, [])])
def test_a_device_that_its_own_user_has_open_is_not_given_back(
    desk: Desk, other: int, left: list[str]
) -> None:
    desk.hold(0, ME, uid=UIDS[0], start=MINE)
    desk.box.proc.add(900, uids=(UIDS[0] + other,) * 4, fds={3: desk.box.dev / "nvidia0"})
    reply = last(desk.ask(SocketRequest(RELEASE, ME, MINE)))
    assert (reply.kind, desk.box.locks()) == (BUSY if left else "", left)


def test_who_waits_keeps_the_number_where_the_socket_is_made_again(desk: Desk) -> None:
    """Nobody is taken for a caller of before a restart that was none."""
    assert desk.claim(4).state == GRANTED
    callers = [desk.claim_as(uid, pid, 1, 60.0) for uid, pid in ((2001, 901), (2002, 902))]
    (desk.box.lock / "socket").unlink()

    desk.server.open()

    for number in (0, 1):
        desk.give_back(number)
    assert [last(caller).state for caller in callers] == [GRANTED, GRANTED]
    assert desk.waiting() == []
    assert last(desk.claim_as(2003, 903, 1)).kind == BUSY, "the new one is served"


class Unseen(socket.socket):
    """A socket that begins to listen only where nobody can come to it yet."""

    def listen(self, backlog: int = 0, /) -> None:
        """Check that what users find is there, and is another one."""
        name = Path(self.getsockname())
        public = name.resolve().with_name("socket")
        assert public.stat().st_ino != name.stat().st_ino
        assert stat.S_IMODE(name.stat().st_mode) == 0o666
        super().listen(backlog)


def test_users_find_the_old_socket_until_the_new_one_listens(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gpulockd that starts again leaves no moment in which nobody is said to serve."""
    desk.server.close()
    old = (desk.box.lock / "socket").stat().st_ino

    def unseen(flags: int) -> socket.socket:
        return Unseen(socket.AF_UNIX, socket.SOCK_SEQPACKET | flags)

    monkeypatch.setattr(server_module, "new_packet_socket", unseen)
    desk.server.open()
    assert (desk.box.lock / "socket").stat().st_ino != old
    assert desk.claim(1).state == GRANTED
    assert [one for one in os.listdir(desk.box.lock) if "socket" in one] == ["socket"]


def test_a_socket_that_cannot_be_put_in_its_place_leaves_the_old_one_and_nothing_beside(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.server.close()
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", raising(OSError(errno.ENOSPC, "full")))
        with pytest.raises(OSError, match="full"):
            desk.server.open()
    assert [one for one in os.listdir(desk.box.lock) if "socket" in one] == ["socket"]
    desk.server.open()
    assert desk.claim(1).state == GRANTED


def test_of_many_who_give_back_one_is_served_a_turn(desk: Desk) -> None:
    """Each may look at all files: gpulockd has its watchdog to feed, and others to serve."""
    callers = [desk.come() for _ in range(3)]
    for caller in callers:
        caller.send(encode_packet(SocketRequest(RELEASE, ME, MINE)))
    desk.loop.wait(clock_boottime())
    later = clock_boottime()
    for served in range(1, 4):
        assert desk.server.due() <= later
        desk.server.run_due(later)
        assert len([one for one in callers if answers(one)]) == 1, served
        later += 1.0


def test_a_client_gone_before_its_turn_gives_nothing_back(desk: Desk) -> None:
    desk.hold(0, ME, uid=UIDS[0], start=MINE)
    caller = desk.come()
    caller.send(encode_packet(SocketRequest(RELEASE, ME, MINE)))
    desk.loop.wait(clock_boottime())
    caller.close()
    desk.loop.wait(clock_boottime())
    assert desk.server.due() > clock_boottime()  # nor does it cost any client a turn
    desk.server.run_due(clock_boottime())
    assert desk.box.locks() == [bus(0)]


def test_a_share_is_granted_beside_anothers_and_told_its_part(desk: Desk) -> None:
    desk.node = Node(Settings({**desk.box.settings, "SHARES": "1:4", "SHARE_USERS": "many"}))
    first, second = f"{bus(1)}.share1", f"{bus(1)}.share2"
    held = record(uid=UIDS[0] + 1, devices=(first,), places=4, token="other")
    place_lock(desk.node.store, first, held)
    reply = last(desk.ask(SocketRequest(CLAIM, ME, MINE, 1, share=1)))
    assert (reply.state, reply.devices, reply.places) == (GRANTED, (second,), 4)
    whole = last(desk.ask(SocketRequest(CLAIM, ME, MINE, 1)))
    assert (whole.state, whole.kind) == (REFUSED, INVALID_REQUEST)  # it holds something else
    assert last(desk.ask(SocketRequest(RELEASE, ME, MINE))).devices == (second,)
    assert desk.box.locks() == [first]


def test_what_a_dead_process_of_the_same_user_held_is_free_for_its_next_call(desk: Desk) -> None:
    """So it is with a script that runs one program after the other."""
    desk.node = Node(Settings({**desk.box.settings, "USER_MAX": "3"}))
    for pid in (900, 901, 902):
        assert desk.claim(2, pid=desk.process(pid), start=9).state == GRANTED, pid
        desk.box.proc.remove(pid)


@pytest.mark.parametrize(("mark", "state"), [(b"", GRANTED), (b"GPULOCK_CLAIM=t0", REFUSED)])
def test_so_it_is_behind_others_unless_what_it_started_runs(
    desk: Desk, mark: bytes, state: str
) -> None:
    desk.hold(0, desk.process(900), uid=UIDS[0], start=9)
    for number in (1, 2, 3):
        desk.hold(number, desk.process(903, UIDS[0] + 1), uid=UIDS[0] + 1, start=9)
    desk.claim_as(UIDS[0] + 2, 904, 2, FOR_EVER)
    desk.process(901)
    (desk.box.proc.root / "901/environ").write_bytes(mark)
    desk.box.proc.remove(900)
    assert desk.claim(1).state == state
