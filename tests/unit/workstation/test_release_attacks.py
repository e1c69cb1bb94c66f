# SPDX-License-Identifier: Apache-2.0
"""What one user tries with releases, or before them, keeps nobody's release or claim waiting."""

from __future__ import annotations

import pytest

from gpulock.alloc.device_users import OpenFiles
from gpulock.alloc.process_reader import ONE_USER
from gpulock.alloc.process_scan import ProcessScan
from gpulock.daemon.reconcile.reconcile import reconcile_locks
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import BUSY, INVALID_REQUEST, Refusal
from gpulock.node.context import Node
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.store import grants
from gpulock.store.gate import Gate
from gpulock.workstation import server as server_module
from gpulock.workstation.server import MOST_OF_USER
from gpulock.workstation.socket_claims import SHARE_OF_USER, Allowance
from gpulock.workstation.wire import (
    FOR_EVER,
    GRANTED,
    RELEASE,
    RELEASED,
    WAITING,
    SocketRequest,
    encode_packet,
)
from tests.support.clock import VirtualClock
from tests.support.desk import LATER, Desk, answers, last
from tests.support.trees import bus

ALICE, BOB, CAROL, DAVE = 2001, 2002, 2003, 2004
LOOK = 0.5  # seconds


@pytest.mark.attack
def test_a_user_whose_calls_all_wait_gives_back_all_the_same(desk: Desk) -> None:
    """Tried: 16 claims that wait, the most that one user may have, and a release of the same user.

    Stopped by: a release takes no place in the queue.
    """
    desk.hold(0, desk.process(901, ALICE), uid=ALICE, start=9)
    waiting = [desk.claim_as(ALICE, 902, 4, FOR_EVER) for _ in range(MOST_OF_USER)]
    assert {last(caller).state for caller in waiting} == {WAITING}
    release = desk.ask(SocketRequest(RELEASE, 901, 9), desk.come_as(ALICE, 901))
    assert last(release).state == RELEASED


@pytest.mark.attack
def test_where_every_place_is_taken_each_user_gives_back(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried: accounts that take all places of the queue, and have as many releases waiting.

    Stopped by: a release takes no place in the queue, and one release of a user is always heard.
    """
    monkeypatch.setattr(server_module, "MOST", 20)
    desk.hold(0, desk.process(901, BOB), uid=BOB, start=9)
    for number in range(20):
        desk.claim_as(ALICE + 2 * (number % 2), 902 + number % 2, 4, FOR_EVER)
    assert last(desk.claim_as(DAVE, 905, 1, FOR_EVER)).kind == BUSY
    honest = desk.come_as(BOB, 901)
    flood = [desk.come_as(ALICE, 902) for _ in range(MOST_OF_USER)]
    for caller in [*flood[:10], honest, *flood[10:]]:
        pid = 901 if caller is honest else 902
        caller.send(encode_packet(SocketRequest(RELEASE, pid, 9)))
        desk.loop.wait(clock_boottime())
    refused = [(one.kind, one.why) for caller in flood for one in answers(caller) if one.kind]
    assert refused == [(BUSY, "others have too many open calls: 10 are allowed")] * 6
    desk.go(clock_boottime() + LATER)
    assert last(honest).state == RELEASED


@pytest.mark.attack
def test_looks_at_a_users_processes_are_charged_to_that_user(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, clock: VirtualClock
) -> None:
    """Tried: 16 releases of a user with 160,000 open files: gpulockd looks at them all each time.

    Stopped by: after each look that user's next call waits ten times as long, others go first.
    """
    monkeypatch.setattr(desk.server.claims, "_time", Allowance(LOOK))
    looks: list[int] = []

    def release(*_: object) -> tuple[str, ...]:
        looks.append(1)
        clock.now += LOOK
        raise Refusal(BUSY, "open", "end it")

    flood = [desk.come_as(ALICE, 902) for _ in range(MOST_OF_USER)]
    monkeypatch.setattr(server_module, "release_for_user", release)
    for caller in flood:
        caller.send(encode_packet(SocketRequest(RELEASE, 902, 9)))
    for _ in range(MOST_OF_USER):
        desk.loop.wait(clock.now)
        desk.server.run_due(clock.now)
    assert len(looks) == 1
    assert desk.server.due() > clock.now + LOOK / SHARE_OF_USER - 2 * LOOK
    assert last(desk.claim_as(BOB, 903, 1)).state == GRANTED
    desk.server.run_due(clock.now + LOOK / SHARE_OF_USER)
    assert len(looks) == 2


def test_the_claim_of_a_command_that_runs_costs_no_look_at_files(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.hold(0, desk.process(901, ALICE), uid=ALICE, start=9, comment="run")

    def never(*_: object) -> None:
        pytest.fail("a look at all files")

    monkeypatch.setattr("gpulock.alloc.reaper.OpenFiles", never)
    reply = last(desk.ask(SocketRequest(RELEASE, 901, 9), desk.come_as(ALICE, 902)))
    assert (reply.kind, desk.box.locks()) == (BUSY, [bus(0)])


def test_a_device_that_another_claim_got_during_the_look_is_not_given_back(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.hold(0, desk.process(901, ALICE), uid=ALICE, start=9)

    whole_look = OpenFiles.users_by_device

    def look(files: OpenFiles, uid: "int | None") -> tuple[dict[str, list[int]], str]:
        monkeypatch.undo()
        grants.release_devices(desk.node.store, "t0", [bus(0)], "its shell ended", "")
        desk.hold(0, desk.process(902, ALICE), uid=ALICE, start=9, token="later")
        return whole_look(files, uid)

    monkeypatch.setattr(OpenFiles, "users_by_device", look)
    request = SocketRequest(RELEASE, 901, 0, devices=(bus(0),))
    reply = last(desk.ask(request, desk.come_as(ALICE, 901)))
    assert (reply.kind, desk.box.locks()) == (INVALID_REQUEST, [bus(0)])


@pytest.mark.attack
def test_a_look_at_the_files_of_one_user_has_a_limit(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried: a release of a user who has more open files than can be read in a second.

    Stopped by: the look ends after a second, and the user's own GPU stays locked.
    """

    def look(files: OpenFiles, uid: int | None) -> tuple[dict[str, list[int]], str]:
        assert (files.seconds, uid) == (ONE_USER, ALICE)
        return {}, "process 910 has more files open than can be looked at in time"

    monkeypatch.setattr(OpenFiles, "users_by_device", look)
    desk.node = Node(Settings({**desk.box.settings, "USER_CLAIMS": "yes"}))
    desk.hold(0, desk.process(901, ALICE), uid=ALICE, start=9)
    reply = last(desk.ask(SocketRequest(RELEASE, 901, 9), desk.come_as(ALICE, 901)))
    assert (reply.kind, desk.box.locks()) == (BUSY, [bus(0)])


@pytest.mark.attack
def test_a_release_looks_at_the_processes_of_its_user_alone(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried: processes of another user that are slow to read: a release took 34 s, and its user
    was charged ten times that.

    Stopped by: only the user's own, root's and the system's are read.
    """
    desk.hold(0, desk.process(901, ALICE), uid=ALICE, start=9)
    asked: list[dict[int, str]] = []
    monkeypatch.setattr(ProcessScan, "restrict", lambda _, users: asked.append(users))
    reply = last(desk.ask(SocketRequest(RELEASE, 901, 9), desk.come_as(ALICE, 901)))
    assert (reply.state, [*asked[0]]) == (RELEASED, [ALICE])


def test_what_belongs_to_a_claim_made_during_the_look_is_not_read_below_the_gate(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.hold(0, desk.process(901, ALICE), uid=ALICE, start=9)
    opened = {3: desk.box.dev / "nvidia0"}
    desk.box.proc.add(903, "python", start=9, uids=(ALICE,) * 4, fds=opened)
    (desk.box.proc.root / "903/environ").write_bytes(b"GPULOCK_CLAIM=later\0")
    whole_look = OpenFiles.users_by_device

    def look(files: OpenFiles, uid: int | None) -> tuple[dict[str, list[int]], str]:
        monkeypatch.undo()
        desk.hold(1, desk.process(902, ALICE), uid=ALICE, start=9, token="later")
        return whole_look(files, uid)

    monkeypatch.setattr(OpenFiles, "users_by_device", look)
    reply = last(desk.ask(SocketRequest(RELEASE, 901, 9), desk.come_as(ALICE, 901)))
    assert (reply.kind, desk.box.locks()) == (BUSY, [bus(0), bus(1)])


@pytest.mark.attack
@pytest.mark.parametrize("act", ["release", "undo", "reap"])
def test_nothing_below_the_gate_reads_what_a_user_started(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    """Tried: processes with a GPU of another claim open, whose environments take long to read:
    gpulockd read them with the gate held.

    Stopped by: they are read before the gate is taken, and what was not is held.
    """
    desk.hold(0, desk.process(901, ALICE), uid=ALICE, start=9)
    desk.hold(1, 902, uid=ALICE, start=9, token="t1")
    desk.process(902, ALICE)
    opened = {3: desk.box.dev / "nvidia0"}
    desk.box.proc.add(903, "python", start=9, uids=(ALICE,) * 4, fds=opened)
    reads: list[int] = []

    def read(_: Proc, pid: int, name: str, seconds: float) -> bytes:
        with Gate(desk.node.store, Deadline(0.0)):
            reads.append(pid)
        return b"GPULOCK_CLAIM=t1\0"

    monkeypatch.setattr(Proc, "read_memory", read)
    if act == "release":
        reply = last(desk.ask(SocketRequest(RELEASE, 901, 9), desk.come_as(ALICE, 901)))
        assert reply.state == RELEASED
    elif act == "undo":
        desk.box.proc.remove(901)
        desk.server.claims.undo_grant(desk.node, "t0")
    else:
        desk.box.proc.remove(901)
        reconcile_locks(desk.node, make_liveness_judge(desk.node), Deadline(1.0))
    assert desk.box.locks() == [bus(1)]
    assert 903 in reads
