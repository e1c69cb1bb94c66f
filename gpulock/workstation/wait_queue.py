# SPDX-License-Identifier: Apache-2.0
"""The line of those who wait at the socket: the first is served, nobody overtakes him.

It is the line of all callers: `tickets/`, in which those stand as well who claim by themselves.
Who does not wait is told at once where he would have stood.
"""

from __future__ import annotations

from collections.abc import Callable

from gpulock.deadline import Deadline, boottime
from gpulock.errors import BROKEN, BUSY, GateShutError, Refusal
from gpulock.node.context import Node
from gpulock.workstation import socket_claim
from gpulock.workstation.connection import Client
from gpulock.workstation.socket_claim import Attempts
from gpulock.workstation.wire import GRANTED, REFUSED, WAITING, Reply

PAUSE = 1.0  # seconds between two attempts of the first, where nothing changed
BREATH = 0.05  # seconds after an attempt that failed: each may look at all processes
GATE_SECONDS = 2.0


class Line:
    """Who waits, by ticket; `end` sends somebody his last reply and takes him out."""

    def __init__(
        self, attempts: Attempts, node: Callable[[], Node], end: Callable[[Client, Reply], None]
    ) -> None:
        self._attempts = attempts
        self._node = node
        self._end = end
        self._line: list[Client] = []
        self._next = 0.0

    def stand(self, client: Client) -> None:
        """Put a client in line; raise Refusal where no ticket can be drawn and he does not wait.

        While the gate is shut who waits stands at the end without a ticket.
        """
        try:
            socket_claim.draw(self._node(), client, Deadline(GATE_SECONDS))
        except GateShutError:
            if boottime() >= client.until:
                raise
        if client not in self._line:
            self._line.append(client)
        self._line.sort(key=Client.number)
        self._next = 0.0 if client.ticket else boottime() + PAUSE

    def leave(self, client: Client) -> None:
        """Take a client out of the line."""
        if client in self._line:
            self._line.remove(client)
            self._next = 0.0

    def stir(self) -> None:
        """Try again at once: a lock came or went."""
        self._attempts.forget()
        self._next = 0.0

    def due(self) -> float:
        """Return when `turn` has something to do, as CLOCK_BOOTTIME seconds."""
        return self._next if self._line else float("inf")

    def turn(self, now: float) -> None:
        """Serve the first, if he can be; tell the others how long it is."""
        if not self._line or now < self._next:
            return
        self._next = now + PAUSE
        first = self._line[0]
        if first.ticket:
            reply = self._serve(first, now)
            if first not in self._line:
                self._next = now if reply.state == GRANTED else now + BREATH
            self._tell_others(reply.before, now)
            return
        try:
            self.stand(first)
        except Refusal as refusal:
            self._end(first, refused(refusal))

    def _serve(self, first: Client, now: float) -> Reply:
        """Serve the first of our line; return what came of it."""
        try:
            reply = self._attempts.serve(self._node(), first, Deadline(GATE_SECONDS))
        except Exception as fault:  # his request must not end gpulockd for all the others
            why = f"gpulockd is at fault: {type(fault).__name__}: {fault}"
            reply = Reply(REFUSED, kind=BROKEN, why=why, do="report this as a bug")
        if reply.state != WAITING:
            self._end(first, reply)
        elif now >= first.until:
            self._end(first, Reply(REFUSED, kind=BUSY, why=reply.why, do=reply.do))
        else:
            first.tell(reply, now)
        return reply

    def _tell_others(self, before: int, now: float) -> None:
        """Tell those behind the first of our line how many are before them.

        `before`: how many direct callers are before all of us.
        """
        for place, client in list(enumerate(self._line))[1:]:
            why = f"others are before this one in line: {before + place}"
            if now >= client.until:
                self._end(client, Reply(REFUSED, kind=BUSY, why=why, do="use --wait"))
            else:
                client.tell(Reply(WAITING, before=before + place, why=why), now)


def refused(refusal: Refusal) -> Reply:
    """Return the reply that a refusal is told with."""
    return Reply(REFUSED, kind=refusal.kind, why=refusal.why, do=refusal.do)
