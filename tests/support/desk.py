# SPDX-License-Identifier: Apache-2.0
"""A node that serves users at its socket, and those who come."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from gpulock.daemon.core.loop import EventLoop
from gpulock.deadline import clock_boottime
from gpulock.node.context import Node
from gpulock.node.procfs import Proc
from gpulock.workstation import server as server_module
from gpulock.workstation.peer import Peer
from gpulock.workstation.server import ClaimServer
from gpulock.workstation.waiting import WaitingCaller, read_waiting
from gpulock.workstation.wire import (
    CLAIM,
    LARGEST,
    READ,
    RELEASE,
    SocketReply,
    SocketRequest,
    encode_packet,
    new_packet_socket,
    parse_reply,
)
from tests.support.journal import HeardJournal
from tests.support.locks import place_lock, retire_lock
from tests.support.trees import Box, bus, record

ME, MINE = os.getpid(), 4242  # start time of this process in the fake /proc
UIDS = (os.geteuid(),) * 4
LATER = 5.0  # seconds, after which a user's next release is served


class Desk:
    """A node that serves, and those who come; every caller is this process."""

    def __init__(self, root: Path) -> None:
        self.box = Box(root)
        self.box.proc.add(ME, "python3", start=MINE, uids=UIDS, session=1)
        self.node: Node = self.box.node()
        self.node.store.check(make=True)
        self.loop = EventLoop()
        self.journal = HeardJournal()
        self.server = ClaimServer(self.loop, self.journal, lambda: self.node)
        self.server.open()
        self.came: list[socket.socket] = []

    def come(self) -> socket.socket:
        """Connect, and be let in."""
        caller = new_packet_socket()
        caller.connect(str(self.box.lock / "socket"))
        caller.setblocking(False)
        self.came.append(caller)
        self.go()
        return caller

    def come_as(self, uid: int, pid: int) -> socket.socket:
        """Connect as a process of another user."""

        def identify(_: socket.socket, proc: Proc, __: object) -> Peer:
            assert proc is self.node.proc
            return Peer(pid, uid, uid, os.pidfd_open(ME))

        if not (self.box.proc.root / str(pid)).exists():
            self.process(pid, uid)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server_module, "identify_peer", identify)
            return self.come()

    def claim_as(self, uid: int, pid: int, number: int, wait: float = 0.0) -> socket.socket:
        """Ask for devices as a process of another user."""
        return self.ask(SocketRequest(CLAIM, pid, 9, number, wait=wait), self.come_as(uid, pid))

    def give_back(self, number: int) -> None:
        """Let a device be given back, of which gpulockd hears."""
        retire_lock(self.node.store, self.node.store.read(bus(number)), "release")
        self.server.line.retry_now()
        self.go()

    def ask(self, request: SocketRequest, caller: socket.socket | None = None) -> socket.socket:
        """Send a request, and let the daemon read it."""
        asking = caller or self.come()
        asking.send(encode_packet(request))
        self.go(clock_boottime() + LATER if request.act == RELEASE else None)
        return asking

    def go(self, now: float | None = None, rounds: int = 3) -> None:
        """Let the daemon do what there is to do."""
        for _ in range(rounds):
            self.loop.wait(clock_boottime())
            self.server.run_due(clock_boottime() if now is None else now)

    def claim(
        self, number: int, wait: float = 0.0, pid: int = ME, start: int = MINE
    ) -> SocketReply:
        """Ask for devices; return the last answer."""
        return last(self.ask(SocketRequest(CLAIM, pid, start, number, wait=wait)))

    def hold(self, number: int, pid: int = ME, **changes: object) -> None:
        """Let devices be held by a process."""
        fields = {"scheduler": "process", "job_id": str(pid), "pid": pid, "add_grp_id": 0}
        one = record(**{**fields, "token": f"t{number}", "devices": (bus(number),), **changes})
        place_lock(self.node.store, bus(number), one)

    def fill(self, pid: int, uid: int) -> None:
        """Let every device be held by a process of another user."""
        for number in range(4):
            self.hold(number, self.process(pid, uid), uid=uid, start=9)

    def process(self, pid: int, uid: int = UIDS[0], **about: int) -> int:
        """Let another process be."""
        return self.box.proc.add(pid, "sleep", start=about.get("start", 9), uids=(uid,) * 4)

    def waiting(self) -> list[WaitingCaller]:
        """Return who waits, as everybody may read it."""
        return read_waiting(self.node)

    def line(self) -> list[tuple[int, int]]:
        """Return number and pid of each caller that waits."""
        return [(one.number, one.pid) for one in self.waiting()]


def answers(caller: socket.socket) -> list[SocketReply]:
    """Return what was answered since, but for the word that the request was read."""
    found: list[SocketReply] = []
    while True:
        try:
            data = caller.recv(LARGEST)
        except (BlockingIOError, ConnectionError):
            return found
        if not data:
            return found
        reply = parse_reply(data)
        found += [reply] if reply.state != READ else []


def last(caller: socket.socket) -> SocketReply:
    found = answers(caller)
    return found[-1] if found else SocketReply("nothing")
