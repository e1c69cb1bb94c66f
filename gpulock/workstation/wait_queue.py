# SPDX-License-Identifier: Apache-2.0
"""The queue of clients that wait at the socket: the first is served, no client overtakes it.

It is the queue of all callers: `tickets/` has those too that claim without the socket. A client
that does not wait is told at once its place in the queue.
"""

from __future__ import annotations

from collections.abc import Callable

from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import BROKEN, BUSY, LockTimeout, Refusal
from gpulock.node.context import Node
from gpulock.workstation import socket_claim, tickets
from gpulock.workstation.connection import Client
from gpulock.workstation.socket_claim import SocketClaims
from gpulock.workstation.wire import GRANTED, REFUSED, WAITING, SocketReply

PAUSE = 1.0  # seconds between two attempts of the first, where nothing changed
RETRY_DELAY = 0.05  # seconds after an attempt that failed: each may look at all processes
GATE_SECONDS = 2.0


class WaitQueue:
    """The waiting clients by ticket; `end` sends a client its last reply and drops it."""

    def __init__(
        self,
        attempts: SocketClaims,
        node: Callable[[], Node],
        end: Callable[[Client, SocketReply], None],
    ) -> None:
        self._attempts = attempts
        self._node = node
        self._end = end
        self._line: list[Client] = []
        self._next = 0.0

    def enqueue(self, client: Client) -> None:
        """Queue a client; raise Refusal where no ticket can be drawn and it does not wait.

        While the gate is shut who waits stands at the end without a ticket.
        """
        try:
            socket_claim.draw_client_ticket(self._node(), client, Deadline(GATE_SECONDS))
        except LockTimeout:
            if clock_boottime() >= client.until:
                raise
        if client not in self._line:
            self._line.append(client)
        self._line.sort(key=Client.ticket_number)
        self._next = 0.0 if client.ticket else clock_boottime() + PAUSE

    def remove(self, client: Client) -> None:
        """Take a client out of the line."""
        if client in self._line:
            self._line.remove(client)
            self._next = 0.0

    def retry_now(self) -> None:
        """Try again at once: a lock came or went."""
        self._attempts.forget_last_answer()
        self._next = 0.0

    def due(self) -> float:
        """Return when `turn` has something to do, as CLOCK_BOOTTIME seconds."""
        return self._next if self._line else float("inf")

    def run_due(self, now: float) -> None:
        """Serve the first, if possible; tell the others their place."""
        if not self._line or now < self._next:
            return
        self._next = now + PAUSE
        first = self._line[0]
        if first.ticket:
            self._serve(first, now)
            return
        try:
            self.enqueue(first)
        except Refusal as refusal:
            self._end(first, reply_from_refusal(refusal))

    def _serve(self, first: Client, now: float) -> None:
        """Serve the first of our line; tell those behind it where it stays there.

        Nobody is refused for the moment of another caller that may be served.
        """
        node, ahead, moment = self._node(), list[str](), False
        try:
            ahead = tickets.list_callers_ahead(node, first.ticket)
            moment = bool(ahead) and not tickets.has_waiting_caller(node, ahead)
            reply = waiting_reply(len(ahead))
            if not ahead:
                reply = self._attempts.serve(node, first, Deadline(GATE_SECONDS))
        except Exception as fault:  # one request must not end gpulockd for all others
            why = f"gpulockd is at fault: {type(fault).__name__}: {fault}"
            reply = SocketReply(REFUSED, kind=BROKEN, why=why, do="report this as a bug")
        patience = first.since + node.settings.gate_timeout if moment else 0.0
        if reply.state != WAITING:
            self._end(first, reply)
        elif now >= max(first.until, patience):
            self._end(first, SocketReply(REFUSED, kind=BUSY, why=reply.why, do=reply.do))
        else:
            first.send_if_changed(reply, now)
            if moment:
                self._next = now + RETRY_DELAY
            else:
                self._tell_others(len(ahead), now)
            return
        self._next = now if reply.state == GRANTED else now + RETRY_DELAY

    def _tell_others(self, before: int, now: float) -> None:
        """Tell all that the first of our line waits, and how many are before them.

        `before`: how many direct callers are before all of us.
        """
        for place, client in list(enumerate(self._line)):
            if now >= client.until:
                refusal = reply_from_refusal(tickets.line_refusal(before + place))
                self._end(client, refusal)
                continue
            if client.ticket:
                tickets.mark_waiting(self._node(), client.ticket)
            if place:
                client.send_if_changed(waiting_reply(before + place), now)


def waiting_reply(before: int) -> SocketReply:
    """Return what a client is told while so many are before it."""
    refusal = tickets.line_refusal(before)
    return SocketReply(WAITING, before=before, why=refusal.why, do=refusal.do)


def reply_from_refusal(refusal: Refusal) -> SocketReply:
    """Return the reply that a refusal is told with."""
    return SocketReply(REFUSED, kind=refusal.kind, why=refusal.why, do=refusal.do)
