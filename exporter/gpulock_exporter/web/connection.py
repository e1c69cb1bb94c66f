# SPDX-License-Identifier: Apache-2.0
"""One connection: a socket that its own thread uses, and that the accepting thread may cut.

The thread blocks in its socket without any timeout, since one of Python's is for each recv alone.
Deadlines are kept from outside: a cut makes the blocked call return at once. So a deadline holds
for a whole phase, however the bytes drip, in a handshake and inside OpenSSL too.
"""

from __future__ import annotations

import math
import re
import socket
import ssl
import struct
import threading
import time
from enum import Enum, auto

_END = re.compile(rb"\n\r?\n")
_CHUNK = 4096
_MOST_DRAINED = 256 * 1024
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger: what is unsent is thrown away


class Phase(Enum):
    """What a connection is doing."""

    ARRIVING = auto()  # handshake and header
    HANDLING = auto()
    WRITING = auto()
    LINGERING = auto()  # its client reads what the kernel still holds of the answer


class Connection:
    """A socket with a deadline."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self.peer = peer
        self.is_cut = False
        self._accepted = time.monotonic()
        self.phase, self.deadline = Phase.ARRIVING, math.inf

    def enter(self, phase: Phase, seconds: float) -> None:
        """Begin a phase that may last so long."""
        self.phase, self.deadline = phase, time.monotonic() + seconds

    def is_awaited(self, seconds: float) -> bool:
        """Tell whether its answer is under way, or its request, as it was accepted so lately."""
        if self.phase is Phase.ARRIVING:
            return time.monotonic() - self._accepted < seconds
        return self.phase is not Phase.LINGERING

    def secure(self, context: ssl.SSLContext) -> None:
        """Do the TLS handshake; what the context asks of a client's certificate, it checks."""
        with self._lock:  # wrapping moves the descriptor to a new object: that one is to be cut
            wrapped = context.wrap_socket(
                self._sock, server_side=True, do_handshake_on_connect=False
            )
            self._sock = wrapped
        wrapped.do_handshake()

    def receive_head(self, most: int) -> bytes:
        """Read up to the end of a header, or until it is longer than `most`; nothing at an end."""
        head = b""
        while not _END.search(head, max(0, len(head) - _CHUNK - 2)) and len(head) <= most:
            data = self._sock.recv(_CHUNK)
            if not data:
                return b""
            head += data
        return head

    def send(self, data: bytes) -> None:
        """Write all of it, from the caller's own bytes."""
        self._sock.sendall(data)

    def drain(self) -> None:
        """Say that nothing more comes, then read and drop: unread bytes would reset the answer.

        TLS is left without its closing alert: every answer has a length.
        """
        socket.socket.shutdown(self._sock, socket.SHUT_WR)
        left = _MOST_DRAINED
        while left > 0 and (data := socket.socket.recv(self._sock, _CHUNK)):
            left -= len(data)

    def cut(self) -> None:
        """End it from another thread, at once; of a slow reader the kernel keeps nothing."""
        with self._lock:
            self.is_cut = True
            try:
                if self.phase is not Phase.LINGERING:
                    self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
            except OSError:
                return  # its client, or its thread, was faster

    def close(self) -> None:
        """Give the socket back; only the connection's own thread does."""
        with self._lock:  # never a descriptor that is already someone else's
            self._sock.close()
