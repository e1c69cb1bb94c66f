# SPDX-License-Identifier: Apache-2.0
"""The queue of clients that wait at the socket: the first is served, no client overtakes it.

The first lets other users by where none of them has what it waits for
(gpulock.workstation.backfill), and while it is stopped. It is the queue of all callers: `tickets/`
has those too that claim without the socket. A client that does not wait is told at once its place
in the queue. An attempt that fails costs a look at all processes: within a second the same
question has the same answer, unless a lock came or went.
"""

from __future__ import annotations

import pwd
from collections.abc import Callable

from gpulock.alloc.choose import CHECK_SECONDS, ClaimRequest
from gpulock.alloc.release import release_locks
from gpulock.daemon.core.background_call import BackgroundCall
from gpulock.daemon.core.journal import INFO, WARNING, DaemonJournal
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import BROKEN, BUSY, INVALID_REQUEST, LockTimeout, Refusal
from gpulock.node.context import Node
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.store.gate import LONGEST_WAIT
from gpulock.store.owner import Owner
from gpulock.workstation import process_claims, tickets
from gpulock.workstation.backfill import must_yield
from gpulock.workstation.claim_rate import BURST, ClaimRate
from gpulock.workstation.peer import Client, check_peer_may_hold
from gpulock.workstation.wire import GRANTED, REFUSED, WAITING, SocketReply, SocketRequest

PAUSE = 1.0  # seconds between two attempts of the first, where nothing changed
RETRY_DELAY = 0.05  # seconds after an attempt that failed: each may look at all processes
GATE_SECONDS = 2.0
OTHERS_FIRST = "others go first while you hold the rest, or it is out of service"


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
            deadline = Deadline(GATE_SECONDS)  # by the process that connected, which waits
            used = {other.ticket for other in self._line}
            client.ticket = tickets.take_ticket(self._node(), deadline, client.peer.pid, used)
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
        """Serve the first that lets nobody by, if possible; tell the others their place."""
        if not self._line or now < self._next:
            return
        self._next = now + PAUSE
        node = self._node()
        yielding: dict[int, int] = {}  # by user, how many of their calls
        for client in list(self._line):
            if not client.ticket:
                self._enqueue_again(client)
                return
            if tickets.is_stopped(node, client.peer.pid):
                continue
            before = yielding.get(client.peer.account, 0)
            if delay := self._attempts.rate.delay(client.peer.account, now):
                self._delay(client, delay, now)
            elif before or (client.want and now < client.until and must_yield(node, client.want)):
                yielding[client.peer.account] = before + 1
                self._pass_over(node, client, before, now)
            else:
                self._serve(node, client, now)
                return

    def _delay(self, client: Client, delay: float, now: float) -> None:
        """Let others by for a while: the client's user has made too many claims."""
        why = f"you made {BURST} claims in a short time, and the next may come in {delay:.0f} s"
        if now >= client.until:
            do = "run several commands in one claim, or use --wait"
            self._end(client, SocketReply(REFUSED, kind=BUSY, why=why, do=do))
        else:
            tickets.mark_waiting(self._node(), client.ticket, client.peer.account)
            client.send_if_changed(SocketReply(WAITING, why=why), now)

    def _pass_over(self, node: Node, client: Client, before: int, now: float) -> None:
        """Let other users by; `before` are calls of the client's own user that do so as well."""
        if before and now >= client.until:
            self._end(client, reply_from_refusal(tickets.line_refusal(before)))
            return
        tickets.mark_waiting(node, client.ticket, client.peer.account)
        if before:
            client.send_if_changed(waiting_reply(before), now)

    def _enqueue_again(self, client: Client) -> None:
        """Draw a ticket for a client that could not get one."""
        try:
            self.enqueue(client)
        except Refusal as refusal:
            self._end(client, reply_from_refusal(refusal))

    def _serve(self, node: Node, first: Client, now: float) -> None:
        """Serve the first that lets nobody by; tell those behind it where it stays there.

        Nobody is refused for the moment of another caller that may be served.
        """
        ahead, moment = list[str](), False
        try:
            ahead = tickets.list_callers_ahead(node, first.ticket, first.peer.account)
            moment = bool(ahead) and not tickets.has_waiting_caller(node, ahead)
            reply = waiting_reply(len(ahead))
            if not ahead:
                reply = self._attempts.serve(node, first, Deadline(GATE_SECONDS))
        except Exception as fault:  # one request must not end gpulockd for all others
            why = f"gpulockd is at fault: {type(fault).__name__}: {fault}"
            reply = SocketReply(REFUSED, kind=BROKEN, why=why, do="report this as a bug")
        patience = first.since + LONGEST_WAIT if moment else 0.0
        if reply.state != WAITING:
            self._end(first, reply)
        elif now >= max(first.until, patience):
            self._end(first, SocketReply(REFUSED, kind=BUSY, why=reply.why, do=reply.do))
        elif first.want and must_yield(node, first.want):
            tickets.mark_waiting(node, first.ticket, first.peer.account)
            first.send_if_changed(reply._replace(why=f"{OTHERS_FIRST}; {reply.why}"), now)
        else:
            first.send_if_changed(reply, now)
            if moment:
                self._next = now + RETRY_DELAY
            else:
                self._tell_others(first, len(ahead), now)
            return
        self._next = now if reply.state == GRANTED else now + RETRY_DELAY

    def _tell_others(self, first: Client, before: int, now: float) -> None:
        """Tell all that the first waits, and how many are before them.

        `before`: how many direct callers are before all of us.
        """
        for place, client in list(enumerate(self._line[self._line.index(first) :])):
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


SAME = 1.0  # seconds
NAME_SECONDS = 1.0
NAMES = 1000  # users that are remembered


class SocketClaims:
    """Serve clients one at a time; remember why the last one had to wait."""

    def __init__(self, journal: DaemonJournal) -> None:
        self.rate = ClaimRate()
        self._journal = journal
        self._busy: SocketReply | None = None
        self._want: ClaimRequest | None = None
        self._asked: tuple[object, ...] = ()
        self._until = 0.0
        self._names: dict[int, str] = {}

    def forget_last_answer(self) -> None:
        """Something changed: ask again."""
        self._until = 0.0

    def serve(self, node: Node, client: Client, deadline: Deadline) -> SocketReply:
        """Return GRANTED, REFUSED, or WAITING where the devices are not free yet."""
        request = client.request
        assert request is not None
        asked = request.number, request.devices, request.share, request.device_kind
        question = (*asked, client.peer.account)
        if self._busy and question == self._asked and clock_boottime() < self._until:
            client.want = self._want
            return self._busy
        reply = self._claim(node, client, request, deadline)
        self._want = client.want
        self._busy, self._asked = (reply if reply.state == WAITING else None), question
        self._until = clock_boottime() + SAME
        return reply

    def _claim(
        self, node: Node, client: Client, request: SocketRequest, deadline: Deadline
    ) -> SocketReply:
        kinds = ((request.device_kind, request.number),) if request.device_kind else ()
        share = bool(request.share)
        want = ClaimRequest(request.number, request.devices, share=share, kinds=kinds)
        want.patience = 0.0  # it is gpulockd that ends health checks, after this answer
        try:
            record = self._record(node, client, request)
            other = process_claims.find_other_process_grant(node, record, want)
            if other:
                why = f"pid {record.pid} holds {' '.join(other)} already"
                raise Refusal(INVALID_REQUEST, why, f"gpulock release --pid {record.pid} first")
            grant = process_claims.claim_for_process(node, record, want, deadline)
        except Refusal as refusal:
            client.want = want if refusal.kind == BUSY else None
            if want.asked:
                client.until = max(client.until, clock_boottime() + CHECK_SECONDS)
            state = WAITING if is_temporary_refusal(refusal) else REFUSED
            return SocketReply(state, kind=refusal.kind, why=refusal.why, do=refusal.do)
        if grant.fresh:
            self.rate.count_claim(client.peer.account, clock_boottime())
        ids = tuple(device.id for device in grant.devices)
        who = f"pid {record.pid} ({record.user})"
        self._journal.say(INFO, f"granted {' '.join(ids)} to {who}, {grant.waited * 1000:.1f} ms")
        places = grant.owner.places
        return SocketReply(GRANTED, token=grant.owner.token, devices=ids, places=places)

    def _record(self, node: Node, client: Client, request: SocketRequest) -> Owner:
        """Return the record of a claim by a process that is still the client's; raise Refusal."""
        name = self._name(client.peer.account)
        record = process_claims.make_process_owner(node, request.pid, name, request.comment)
        check_peer_may_hold(client.peer, node.proc, request.pid, request.start)
        if (record.start, record.uid) != (request.start, client.peer.uid):
            raise Refusal(
                INVALID_REQUEST, f"pid {request.pid} now belongs to another process", "try again"
            )
        return record.copy(uid=client.peer.account)

    def _name(self, uid: int) -> str:
        """Return the name of a user, for people; a name service that is slow is not waited for."""
        if uid not in self._names:
            asking = BackgroundCall(lambda: pwd.getpwuid(uid).pw_name)
            if not asking.wait(NAME_SECONDS):
                return f"uid {uid}"
            if len(self._names) >= NAMES:
                self._names.clear()
            try:
                self._names[uid] = asking.answer()
            except KeyError:
                self._names[uid] = f"uid {uid}"
        return self._names[uid]

    def undo_grant(self, node: Node, token: str, deadline: Deadline) -> None:
        """Take back what was granted to a client that never heard of it."""
        how = "its client disconnected"
        try:
            release_locks(
                node,
                lambda o: o.token == token,
                make_liveness_judge(node),
                deadline,
                how,
            )
        except (Refusal, OSError) as fault:
            self._journal.say(WARNING, f"claim {token} stays until its process ends: {fault}")


def is_temporary_refusal(refusal: Refusal) -> bool:
    """Return whether a refusal may be otherwise in a moment."""
    return refusal.kind == BUSY or isinstance(refusal, LockTimeout)
