# SPDX-License-Identifier: Apache-2.0
"""Accepted connections: never more than the cap, none past the deadline of its phase.

The thread of a connection blocks in its socket without any timeout. Deadlines are kept from
outside: the server cuts the connection, and the blocked call returns at once. So a deadline holds
for a whole phase, however the bytes drip, in a handshake and inside OpenSSL too.

When the cap is reached the newcomer gets in and another goes: one at rest first, else the one
that has been longest in its phase. A scrape takes milliseconds, so it is never the oldest while
an attacker's connections are; refusing newcomers instead would let silent ones lock it out.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import ssl

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger: what is unsent is thrown away
_CUT_AT_ONCE = 8  # so that a flood costs one look through the table for every eighth connection


class Phase(Enum):
    """What a connection is doing."""

    HANDSHAKE = "handshake"
    HEADER = "header"
    HANDLE = "handle"
    WRITE = "write"
    IDLE = "idle"
    LINGER = "linger"

    @property
    def is_at_rest(self) -> bool:
        """Tell whether the client loses nothing that it waits for."""
        return self in {Phase.IDLE, Phase.LINGER}

    @property
    def is_arriving(self) -> bool:
        """Tell whether a request is on the way, or may be."""
        return self in {Phase.HANDSHAKE, Phase.HEADER}

    @property
    def is_answering(self) -> bool:
        """Tell whether a sound request is being answered."""
        return self in {Phase.HANDLE, Phase.WRITE}


class PhaseState(NamedTuple):
    """A phase, since when, and until when at most (time.monotonic)."""

    phase: Phase
    since: float
    deadline: float


class Connection:
    """A socket that one thread uses and others may cut."""

    __slots__ = ("_lock", "_open", "_sock", "is_cut", "peer", "state")

    def __init__(self, sock: socket.socket, peer: str, seconds: float) -> None:
        self._sock = sock
        self._open = True
        self._lock = threading.Lock()
        self.peer = peer
        self.is_cut = False
        self.state = _phase_state(Phase.HANDSHAKE, seconds)

    def enter(self, phase: Phase, seconds: float) -> None:
        """Begin a phase that may last so long."""
        self.state = _phase_state(phase, seconds)

    def secure(self, context: ssl.SSLContext) -> None:
        """Do the TLS handshake; what the context asks of a client's certificate, it checks."""
        with self._lock:  # wrapping moves the descriptor to a new object
            wrapped = context.wrap_socket(
                self._sock, server_side=True, do_handshake_on_connect=False
            )
            self._sock = wrapped
        wrapped.do_handshake()

    def receive(self, size: int) -> bytes:
        """Read what has come, at most `size`; empty at the end."""
        return self._sock.recv(size)

    def send(self, data: bytes) -> None:
        """Write all of it, from the caller's own bytes."""
        self._sock.sendall(data)

    def send_raw(self, data: bytes) -> None:
        """Write past TLS: a word to a client that does not speak it."""
        socket.socket.send(self._sock, data)

    def drain(self, most: int) -> None:
        """Say that nothing more comes, then read and drop: unread bytes would reset the answer.

        TLS is left without its closing alert: every answer has a length, and until Python 3.13
        OpenSSL would keep the session of a properly closed connection in memory.
        """
        socket.socket.shutdown(self._sock, socket.SHUT_WR)
        while most > 0 and (data := socket.socket.recv(self._sock, 16384)):
            most -= len(data)

    def cut(self) -> None:
        """End it from another thread, at once.

        At rest, what the kernel still holds of an answer is delivered; else it is thrown away, so
        that a slow reader's share is free again.
        """
        with self._lock:  # never a descriptor that is already someone else's
            if not self._open:
                return
            self.is_cut = True
            try:
                if not self.state.phase.is_at_rest:
                    self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
            except OSError:
                return  # the client was faster

    def close(self) -> None:
        """Give the socket back; only the connection's own thread does."""
        with self._lock:
            self._open = False
            self._sock.close()


def _phase_state(phase: Phase, seconds: float) -> PhaseState:
    now = time.monotonic()
    return PhaseState(phase, now, now + seconds)


class ConnectionTable:
    """The connections of one server, counted until their threads have ended."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._connections: set[Connection] = set()
        self._changed = threading.Condition()
        self.dropped: Counter[str] = Counter()  # by phase, and "full" for those that made room

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, connection: Connection) -> None:
        """Count a connection from now on."""
        with self._changed:
            self._connections.add(connection)

    def remove(self, connection: Connection) -> None:
        """Its thread ends: its place is free."""
        with self._changed:
            self._connections.discard(connection)
            self._changed.notify_all()

    def make_room(self, patience_seconds: float) -> bool:
        """Have a place free, at another's cost if need be; False when none came free in time."""
        with self._changed:
            return len(self._connections) < self._cap or self._free_one(patience_seconds)

    def relieve(self, patience_seconds: float) -> bool:
        """Have one fewer, for the process has no more descriptors; False when none went."""
        with self._changed:
            return self._free_one(patience_seconds)

    def expire(self, now: float) -> None:
        """Cut every connection that is past its phase's deadline."""
        for connection in self._those():
            state = connection.state
            if now >= state.deadline and not connection.is_cut:
                connection.cut()
                self.dropped[state.phase.value] += 1

    def cut_idle(self) -> None:
        """Cut those between two requests: what they agreed on at their handshake is out of date."""
        for connection in self._those():
            if connection.state.phase is Phase.IDLE:
                connection.cut()

    def finish(self, seconds: float, arriving_seconds: float) -> None:
        """Let the answers under way be written, at most so long; cut all else at once.

        One that was just accepted has its request on the way: it is cut when that is overdue.
        """
        end = time.monotonic() + seconds
        with self._changed:
            while self._connections and time.monotonic() < end:
                arrived = time.monotonic() - arriving_seconds
                for connection in self._connections:
                    phase, since, _ = connection.state
                    if not phase.is_answering and not (phase.is_arriving and since > arrived):
                        connection.cut()
                self._changed.wait(0.05)
            for connection in self._connections:
                connection.cut()
            self._changed.wait_for(lambda: not self._connections, 1.0)

    def _those(self) -> list[Connection]:
        with self._changed:
            return list(self._connections)

    def _free_one(self, patience_seconds: float) -> bool:
        """Cut the oldest. One in its handler is left alone: cutting it would free nothing."""
        candidates = [
            one
            for one in self._connections
            if not one.is_cut and one.state.phase is not Phase.HANDLE
        ]
        candidates.sort(key=lambda one: (not one.state.phase.is_at_rest, one.state.since))
        for one in candidates[:_CUT_AT_ONCE]:
            one.cut()
            self.dropped["full"] += 1
        before = len(self._connections)
        return self._changed.wait_for(lambda: len(self._connections) < before, patience_seconds)
