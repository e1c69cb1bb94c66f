# SPDX-License-Identifier: Apache-2.0
"""One caller at the socket: who it is, what it asks for, what it was told."""

from __future__ import annotations

import socket
import sys

from gpulock.workstation import tickets
from gpulock.workstation.peer import Peer
from gpulock.workstation.wire import SocketReply, SocketRequest, encode_reply

RARELY = 1.0  # seconds between two lines to one who waits


class Client:
    """One connection; `ticket` is its place in line, `until` when it waits no longer.

    Times are CLOCK_BOOTTIME seconds.
    """

    __slots__ = ("_last", "_told", "connection", "peer", "request", "since", "ticket", "until")

    def __init__(self, connection: socket.socket, peer: Peer, now: float) -> None:
        self.connection = connection
        self.peer = peer
        self.request: SocketRequest | None = None
        self.since = now
        self.ticket = ""
        self.until = now
        self._last: SocketReply | None = None
        self._told = now - RARELY

    def ticket_number(self) -> int:
        """Return the number of the ticket; who has none yet comes last."""
        return tickets.parse_ticket(self.ticket)[0] if self.ticket else sys.maxsize

    def send(self, reply: SocketReply) -> bool:
        """Send a reply; return whether it is on its way. Who does not read is not waited for."""
        try:
            self.connection.send(encode_reply(reply))
        except OSError:
            return False
        return True

    def send_if_changed(self, reply: SocketReply, now: float) -> None:
        """Say how the waiting goes, where that changed."""
        if reply != self._last and now >= self._told + RARELY:
            self._last, self._told = reply, now
            self.send(reply)

    def close(self) -> None:
        """End the connection."""
        self.peer.close()
        self.connection.close()
