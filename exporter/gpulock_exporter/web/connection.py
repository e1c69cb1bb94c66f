# SPDX-License-Identifier: Apache-2.0
"""One accepted connection: its socket, and the phase it is in with that phase's deadline.

Its own thread blocks in the socket without any timeout. Deadlines are kept from outside: whoever
watches cuts the connection, and the blocked call returns at once. So a deadline holds for a whole
phase, however the bytes drip, in a handshake and inside OpenSSL too.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import ssl

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger: what is unsent is thrown away


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

    __slots__ = ("_lock", "_open", "_sock", "certificate_names", "is_cut", "peer", "state")

    def __init__(self, sock: socket.socket, peer: str, seconds: float) -> None:
        self._sock = sock
        self._open = True
        self._lock = threading.Lock()
        self.peer = peer
        self.is_cut = False
        self.certificate_names: frozenset[str] = frozenset()
        self.state = _phase_state(Phase.HANDSHAKE, seconds)

    def enter(self, phase: Phase, seconds: float) -> None:
        """Begin a phase that may last so long."""
        self.state = _phase_state(phase, seconds)

    def secure(self, context: ssl.SSLContext) -> dict[str, object]:
        """Do the TLS handshake; return the client's verified certificate, empty without one."""
        with self._lock:  # wrapping moves the descriptor to a new object
            wrapped = context.wrap_socket(
                self._sock, server_side=True, do_handshake_on_connect=False
            )
            self._sock = wrapped
        wrapped.do_handshake()
        return {**(wrapped.getpeercert() or {})}

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

        TLS is left without its closing alert: every answer has a length, and OpenSSL would keep
        the session of a properly closed connection in memory.
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
