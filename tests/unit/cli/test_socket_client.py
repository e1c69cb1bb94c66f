# SPDX-License-Identifier: Apache-2.0
"""What a user's gpulock does with the answers of gpulockd, whatever they are."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import Grant
from gpulock.cli.claims import socket_client
from gpulock.cli.claims.acquire import ClaimWishes, make_socket_request
from gpulock.cli.claims.socket_client import BACK_SECONDS, ClaimWait, NoDaemonError
from gpulock.cli.session import CommandRefusedError
from gpulock.deadline import clock_boottime
from gpulock.errors import BROKEN, BUSY, Refusal
from gpulock.workstation.wire import (
    CLAIM,
    FOR_EVER,
    GRANTED,
    LARGEST,
    READ,
    REFUSED,
    RELEASED,
    WAITING,
    SocketReply,
    SocketRequest,
    encode_packet,
    new_packet_socket,
    parse_request,
)
from tests.support.clock import VirtualClock
from tests.support.trees import Box, bus, record

Answer = list[bytes]
YES = encode_packet(SocketReply(GRANTED, token="feed", devices=(bus(1), bus(2))))
WHY = "2 GPUs asked for, 1 of 4 free (0: job 3)"
WAIT = encode_packet(SocketReply(WAITING, number=7, before=3, why=WHY))
READ_REPLY = encode_packet(SocketReply(READ))
HELD, FIRST = f"{bus(1)} is held by a reserve of root", f"gpulock unreserve {bus(1)}"
NO = encode_packet(SocketReply(REFUSED, kind=BUSY, why=HELD, do=FIRST))


HOLDER = record(scheduler="process", pid=4711, start=99, token="", devices=(), comment="run")


class Daemon:
    """A gpulockd that answers what a test says, one list of packets a connection, and hangs up."""

    def __init__(self, box: Box) -> None:
        self.box = box
        box.lock.mkdir()
        self.asked: list[SocketRequest] = []
        self._thread: threading.Thread | None = None
        self.listen()

    def listen(self) -> None:
        """Listen at the socket, in the place of an earlier one."""
        (self.box.lock / "socket").unlink(missing_ok=True)
        self._socket: socket.socket = new_packet_socket()
        self._socket.bind(str(self.box.lock / "socket"))
        self._socket.listen(8)
        self._socket.settimeout(20)

    def answers(self, *connections: Answer) -> None:
        """Begin to answer."""
        self._thread = threading.Thread(target=self._serve, args=(connections,))
        self._thread.start()

    def _serve(self, connections: tuple[Answer, ...]) -> None:
        for packets in connections:
            connection, _ = self._socket.accept()
            with connection:
                if not (data := connection.recv(LARGEST)):
                    continue  # it was only asked whether anybody is there
                self.asked.append(parse_request(data))
                for packet in packets:
                    connection.send(packet)

    def obtain(self, wait: float = 0.0, handed: socket.socket | None = None) -> Grant:
        """Ask for two devices."""
        how = ClaimWait("2 GPUs", clock_boottime() + wait, handed=handed)
        request = SocketRequest(CLAIM, 4711, 99, 2)
        return socket_client.request_daemon_claim(self.box.node(), HOLDER, request, how)

    def release(self, *devices: str) -> tuple[str, ...]:
        """Give devices back."""
        return socket_client.request_daemon_release(self.box.node(), 4711, devices)

    def close(self) -> None:
        self._socket.close()
        if self._thread:
            self._thread.join(20)


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setattr(socket_client, "PAUSE", 0.001)
    made = Daemon(Box(tmp_path))
    yield made
    made.close()


def refused(act: Callable[[], object]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        act()
    return caught.value


def test_what_is_granted_is_read_from_the_driver_here(daemon: Daemon) -> None:
    daemon.answers([YES])
    grant = daemon.obtain()
    assert [(device.id, device.minor) for device in grant.devices] == [(bus(1), 1), (bus(2), 2)]
    assert (grant.owner.token, grant.owner.devices) == ("feed", (bus(1), bus(2)))


def test_the_request_names_the_process_that_is_to_hold(daemon: Daemon) -> None:
    daemon.answers([YES])
    daemon.obtain(wait=FOR_EVER)
    assert daemon.asked[0].wait == FOR_EVER
    wishes = ClaimWishes(1, None, False, None, "3g.40gb", 0.0, 60.0, "thesis", None)
    want = ClaimRequest(1, kinds=(("mig:3g.40gb", 1),))
    asked = make_socket_request(HOLDER, want, wishes, (bus(1),))
    assert (asked.pid, asked.start, asked.number, asked.comment) == (4711, 99, 1, "run")
    assert (asked.device_kind, asked.devices, asked.preferred) == ("mig:3g.40gb", (), (bus(1),))
    assert (asked.seconds, asked.note, asked.share) == (60.0, "thesis", 0)


def test_who_waits_hears_its_number_its_place_and_why(
    daemon: Daemon, capfd: pytest.CaptureFixture[str]
) -> None:
    daemon.answers([READ_REPLY, WAIT, WAIT, YES])
    daemon.obtain(wait=60)
    place = "number 7, place 4 in the queue; 2 GPUs asked for, 1 of 4 free"
    assert capfd.readouterr().err == f"gpulock: waiting for 2 GPUs: {place}\n"


def test_a_refusal_is_the_daemons_word_with_numbers_in_the_place_of_ids(daemon: Daemon) -> None:
    daemon.answers([NO])
    refusal = refused(daemon.obtain)
    said = (BUSY, "GPU 1 is held by a reserve of root", "gpulock unreserve 1")
    assert (refusal.kind, refusal.why, refusal.do) == said


def test_who_waits_asks_the_next_gpulockd(daemon: Daemon) -> None:
    daemon.answers([WAIT], [], [YES])
    assert daemon.obtain(wait=60).owner.token == "feed"
    assert len(daemon.asked) == 3


def test_who_does_not_wait_is_told_that_no_answer_came(daemon: Daemon) -> None:
    daemon.answers([])
    assert refused(daemon.obtain).why == "no answer came from gpulockd"


def test_one_that_does_not_come_back_is_given_up(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, clock: VirtualClock
) -> None:
    end = clock() + 2 * BACK_SECONDS

    def sleep(_: float) -> None:
        clock.now += BACK_SECONDS / 2
        assert clock.now < end, "waited for again and again"

    monkeypatch.setattr(time, "sleep", sleep)
    daemon.close()
    with pytest.raises(NoDaemonError):
        daemon.obtain(wait=FOR_EVER)


def test_who_waited_at_a_gpulockd_that_ended_connects_to_the_next(daemon: Daemon) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    daemon.answers([YES])
    assert daemon.obtain(wait=60, handed=ours).owner.token == "feed"


@pytest.mark.parametrize(
    "packet",
    [
        encode_packet(SocketReply("maybe")),
        encode_packet(SocketReply(GRANTED, token="feed", devices=("0000:ff:00.0",))),
        encode_packet(SocketReply(RELEASED)),
        b"\xff\x00",  # as good as no answer
    ],
)
def test_an_answer_that_cannot_be_is_a_broken_node(daemon: Daemon, packet: bytes) -> None:
    daemon.answers([packet])
    assert refused(daemon.obtain).kind == BROKEN


def test_what_was_given_back_is_returned(daemon: Daemon) -> None:
    daemon.answers([encode_packet(SocketReply(RELEASED, devices=(bus(1),)))])
    assert daemon.release(bus(1)) == (bus(1),)


def test_a_call_that_waits_asks_again_where_gpulockd_ended_meanwhile(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = daemon.box.lock / "socket"

    def sleep(_: float) -> None:
        if path.exists():
            path.unlink()  # by who stops it, for a moment
            return
        daemon.listen()
        daemon.answers([YES])

    monkeypatch.setattr(time, "sleep", sleep)
    daemon.close()
    assert daemon.obtain(wait=60.0).owner.token == "feed"


@pytest.mark.parametrize("ask", ["obtain", "release"])
def test_a_gpulockd_that_was_stopped_does_not_answer(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    monkeypatch.setattr(socket_client, "READ_SECONDS", 0.01)
    refusal = refused(daemon.obtain if ask == "obtain" else lambda: daemon.release(bus(1)))
    assert (refusal.kind, refusal.why) == (BROKEN, f"gpulockd, pid {os.getpid()}, does not answer")


def test_who_waits_hears_that_gpulockd_does_not_answer_and_waits_on(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_client, "READ_SECONDS", 0.01)
    heard: list[str] = []

    def hear(text: str, *, err: bool) -> None:
        assert err
        heard.append(text)
        daemon.answers([READ_REPLY, YES])

    monkeypatch.setattr(click, "echo", hear)
    assert daemon.obtain(wait=60.0).owner.token == "feed"
    why = f"gpulockd, pid {os.getpid()}, does not answer"
    assert heard == [f"gpulock: {why}; ask root to start gpulockd again"]


def test_where_nobody_serves_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box(tmp_path)
    box.lock.mkdir()
    # the tests' own user owns LOCK_DIR, and is not told to become it
    with pytest.raises(CommandRefusedError, match=r"^gpulockd does not serve users here; it does"):
        socket_client.connect_to_daemon(box.node())
    monkeypatch.setattr(socket_client, "owns_lock_dir", lambda _: False)
    with pytest.raises(CommandRefusedError, match=r"^only .* does not serve users here; run it as"):
        socket_client.connect_to_daemon(box.node())


def test_on_a_node_of_a_scheduler_the_way_is_a_job_of_it(tmp_path: Path) -> None:
    """It said to ask for USER_CLAIMS=yes, which is not served there."""
    box = Box(tmp_path)
    box.lock.mkdir()
    box.settings["SGE_ROOT"] = "/opt/sge"
    with pytest.raises(CommandRefusedError, match=r"Grid Engine owns this node.*submit a job"):
        socket_client.connect_to_daemon(box.node())


def test_who_owns_lock_dir_queues_where_a_gpulockd_serves_and_is_told_where_none_does(
    tmp_path: Path,
) -> None:
    daemon = Daemon(Box(tmp_path))
    assert socket_client.is_daemon_serving(daemon.box.node())
    daemon.close()
    assert not socket_client.is_daemon_serving(daemon.box.node())
    with pytest.raises(CommandRefusedError, match=r"gpulockd does not run.*start gpulockd again"):
        daemon.obtain()
