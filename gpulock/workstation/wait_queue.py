# SPDX-License-Identifier: Apache-2.0
"""The queue of users' claims, by number: who is served, who waits, and what each is told.

A claim that fails may cost a look at all processes: a caller is tried once a round. A round begins
when a lock comes or goes, and when all of the line were answered, every PAUSE seconds.
LOCK_DIR/waiting tells everybody who waits; a gpulockd that starts again finds there the numbers of
those who come back.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress

from gpulock.deadline import clock_boottime
from gpulock.errors import BUSY, INVALID_REQUEST, UNKNOWN, LockTimeout, Refusal
from gpulock.node.context import Node
from gpulock.store.reservations import find_own_devices, find_reserved_devices
from gpulock.workstation import backfill, waiting
from gpulock.workstation.backfill import QueueView
from gpulock.workstation.peer import OUTSIDE, Client
from gpulock.workstation.socket_claims import SocketClaims, refuse_request
from gpulock.workstation.waiting import WaitingCaller, is_stopped
from gpulock.workstation.wire import (
    GRANTED,
    REFUSED,
    WAITING,
    SocketReply,
    SocketRequest,
    request_words,
)

PAUSE = 2.0  # seconds between two looks, where nothing changed
RETRY_DELAY = 0.05  # seconds after a claim that failed
REJOIN_SECONDS = 10.0  # until callers are back once gpulockd starts again


class WaitQueue:
    """The waiting clients; `end` sends a client its last reply and drops it."""

    def __init__(
        self,
        claims: SocketClaims,
        node: Callable[[], Node],
        end: Callable[[Client, SocketReply], None],
    ) -> None:
        self._claims = claims
        self._node = node
        self._end = end
        self._line: list[Client] = []
        self._kept_since: dict[int, float] = {}  # when a user's turns began, by account
        self._number = 0
        self._left: list[WaitingCaller] = []  # of the gpulockd before, not yet back
        self._left_until = 0.0
        self._next = 0.0
        self._round = 1  # raised where a lock came or went, or all of the line were answered
        self._published = b""

    def recover(self) -> None:
        """Find the numbers that an earlier gpulockd gave; who waits here keeps the own."""
        if self._line:
            return
        node = self._node()
        self._left = waiting.read_waiting(node)
        self._left_until = clock_boottime() + REJOIN_SECONDS
        self._number = max([self._number, *[one.number for one in self._left]])

    def enqueue(self, client: Client, request: SocketRequest, user: str) -> None:
        """Queue a claim, at its old place where it waited already; raise OSError."""
        pid, account = client.peer.pid, client.peer.account
        node, since = self._node(), clock_boottime()
        start, what = node.proc.start(pid), request_words(request)
        for device in node.devices_if_driver() if request.devices else ():
            what = what.replace(device.id, device.label())
        caller = WaitingCaller(self._number + 1, pid, start, account, since, user, what, "")
        for one in self._left:
            if (one.pid, one.start) == (pid, start):
                caller = caller._replace(number=one.number, since=one.since)
                self._left.remove(one)
                break
        self._number = max(self._number, caller.number)
        client.caller, client.until = caller, since + request.wait
        if account not in [one.peer.account for one in self._line]:
            self._kept_since.pop(account, None)  # who had nobody in line waits anew
        self._line.append(client)
        self._line.sort(key=lambda one: one.caller)
        self._next = 0.0

    def remove(self, client: Client) -> None:
        """Take a client out of the line."""
        if client in self._line:
            self._line.remove(client)
            self._next = 0.0
            self._publish()

    def find(self, number: int) -> Client:
        """Return who has a number; raise Refusal."""
        for client in self._line:
            if client.caller.number == number:
                return client
        raise Refusal(INVALID_REQUEST, f"nobody waits with number {number}", "see gpulock queue")

    def close(self, keep: bool) -> None:
        """End the queue; with `keep` the next gpulockd finds the numbers."""
        self._line, self._left = [], []
        if not keep:
            self._publish()

    def retry_now(self) -> None:
        """Try again at once: a lock came or went."""
        self._round += 1
        self._next = 0.0

    def due(self) -> float:
        """Return when `run_due` has something to do, as CLOCK_BOOTTIME seconds."""
        return self._next if self._line else float("inf")

    def run_due(self, now: float) -> None:
        """Serve one caller, if possible; tell the others why they wait."""
        if not self._line or now < self._next:
            return
        self._next = min([now + PAUSE, *[one.until for one in self._line if one.until > now]])
        if now >= self._left_until:
            self._left = []
        if self._serve_line(QueueView(self._node()), now):
            self._round += 1
        self._publish()

    def _serve_line(self, view: QueueView, now: float) -> bool:
        """Go along the line as far as to one claim, or one end; return whether all were seen."""
        first: Client | None = None  # of those who wait for other users
        kept: dict[str, str] = {}  # for whom devices are kept, by id
        shown = [one.number for one in self._list_callers(now)]
        for client in list(self._line):
            number = client.caller.number
            if is_stopped(view.node, client.peer.pid):
                client.shown = SocketReply(WAITING, why="stopped")
                continue
            why = self._why_not_yet(view, client, now)
            own = find_own_devices(view.reservations, view.now, client.peer.account)
            others = {name: whose for name, whose in kept.items() if name not in own}
            tried = not why and self._try_claim(view, client, others)
            if not why and others and client.answer.state == WAITING:
                why = f"free GPUs are {next(iter(others.values()))}; {client.answer.why}"
            if client.answer.state == WAITING and not client.reaped:
                client.reaped = True
                if self._claims.reap_own(view, client.peer.account):
                    self.retry_now()
                    return False
            if client.answer.state != WAITING or now >= client.until:
                if client.answer.state == GRANTED:
                    self._kept_since.pop(client.peer.account, None)
                waited = bool(client.request and client.request.wait)
                self._end(client, last_reply(client.answer, why, waited))
                self._next = now + (0.0 if client.answer.state == GRANTED else RETRY_DELAY)
                return False
            if not why:
                why = client.answer.why
                if client.want and (causes := backfill.why_yield(view, client.want)):
                    why = f"others go first while {causes}; {why}"
                elif first is None:
                    first = client
                    since = self._kept_since.setdefault(client.peer.account, now)
                    turn, left = backfill.find_turn(now - since)
                    if client.want and turn:
                        usable = backfill.list_usable_devices(view, client.want)
                        whose = f"kept for number {number}: it is the turn of {client.caller.user}"
                        kept = dict.fromkeys(usable, whose)
                    state = waiting.KEPT if kept else "others may go first"
                    end = time.strftime("%H:%M", time.localtime(view.now + left))
                    why = f"{state} until {end}; {why}"
            before = bisect_left(shown, number)
            client.tell(SocketReply(WAITING, why=why, number=number, before=before), now)
            if tried:
                self._next = now + RETRY_DELAY
                return False
        return True

    def _why_not_yet(self, view: QueueView, client: Client, now: float) -> str:
        """Return why a caller is not served now whatever is free, nothing where it may be."""
        account, request = client.peer.account, client.request
        if request and request.pid != client.peer.pid:  # of its own end the kernel tells
            with suppress(OSError, ValueError):
                if not view.node.proc.running(request.pid, request.start):
                    refusal = Refusal(UNKNOWN, f"process {request.pid} has ended", OUTSIDE)
                    client.answer = refuse_request(refusal)
                    return refusal.why
        if any(one.number < client.caller.number for one in self._left):
            return "callers of before the restart of gpulockd come back first"
        if (delay := self._claims.due(account) - now) > 0:
            return f"many calls came in a short time, and the next may in {delay:.0f} s"
        if (most := view.node.settings.user_max) and request:
            try:
                mine = backfill.count_cards(view.held, account)
            except Refusal as refusal:
                if not isinstance(refusal, LockTimeout):
                    client.answer = refuse_request(refusal)
                return refusal.why
            if mine + request.number > most:
                return f"held already: {mine} of the {most} GPUs that a user may hold (USER_MAX)"
        return ""

    def _try_claim(self, view: QueueView, client: Client, kept: dict[str, str]) -> bool:
        """Answer a caller once a round; return whether that took a claim.

        What is `kept` for another it does not get.
        One that was refused is not tried where it would be refused again.
        """
        if client.round == self._round:
            return False
        client.round = self._round
        if client.want:
            reserved = find_reserved_devices(view.reservations, view.now, client.peer.account)
            client.want.kept = kept | reserved
            if refusal := backfill.find_shortage(view, client.want):
                client.answer = refuse_request(refusal)._replace(state=WAITING)
                return False
        with self._claims.charged(client.peer.account):
            client.answer = self._claims.serve(view, client, kept)
        return True

    def _list_callers(self, now: float) -> list[WaitingCaller]:
        """Return who waits, in the order of their numbers."""
        callers = [
            client.caller._replace(why=client.shown.why.partition(" (")[0])
            for client in self._line
            if now < client.until
        ]
        return sorted([*self._left, *callers])

    def _publish(self) -> None:
        """Tell everybody who waits, where that changed."""
        node = self._node()
        data = waiting.encode_waiting(self._list_callers(clock_boottime()), node.boot_id)
        if data != self._published:
            try:
                waiting.write_waiting(node.store.path, data)
            except OSError:
                return  # a full LOCK_DIR: they are served all the same
            self._published = data


def last_reply(reply: SocketReply, why: str, waited: bool) -> SocketReply:
    """Return the reply that ends a call; one that still waits is refused.

    `why` is why it was not served, where that was not for want of devices.
    """
    if reply.state != WAITING:
        return reply
    if why:
        reply = SocketReply(kind=BUSY, why=why, do="see gpulock queue")
    late = "not served in the time of --wait: " if waited else ""
    return reply._replace(state=REFUSED, why=f"{late}{reply.why}")
