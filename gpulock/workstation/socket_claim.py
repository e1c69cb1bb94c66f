# SPDX-License-Identifier: Apache-2.0
"""One attempt to serve the first in line: a claim with the client's process as its owner.

An attempt that fails costs a look at all processes, so that within a second the same answer is
given to the same question, unless a lock came or went.
"""

from __future__ import annotations

import pwd

from gpulock.alloc.release import release_locks
from gpulock.daemon.core.background_call import BackgroundCall
from gpulock.daemon.core.journal import INFO, WARNING, DaemonJournal
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import BUSY, INVALID_REQUEST, LockTimeout, Refusal
from gpulock.node.context import Node
from gpulock.store.owner import Owner
from gpulock.workstation import process_claims, tickets
from gpulock.workstation.connection import Client
from gpulock.workstation.peer import check_peer_may_hold
from gpulock.workstation.wire import GRANTED, REFUSED, WAITING, SocketReply, SocketRequest

SAME = 1.0  # seconds
NAME_SECONDS = 1.0
NAMES = 1000  # users that are remembered


class SocketClaims:
    """Serve clients one at a time; remember why the last one had to wait."""

    def __init__(self, journal: DaemonJournal) -> None:
        self._journal = journal
        self._busy: SocketReply | None = None
        self._asked: tuple[int, tuple[str, ...]] = (0, ())
        self._until = 0.0
        self._names: dict[int, str] = {}

    def forget_last_answer(self) -> None:
        """Something changed: ask again."""
        self._until = 0.0

    def serve(self, node: Node, client: Client, deadline: Deadline) -> SocketReply:
        """Return GRANTED, REFUSED, or WAITING where the devices are not free yet."""
        request = client.request
        assert request is not None
        question = request.number, request.devices
        if self._busy and question == self._asked and clock_boottime() < self._until:
            return self._busy
        reply = self._claim(node, client, request, deadline)
        self._busy, self._asked = (reply if reply.state == WAITING else None), question
        self._until = clock_boottime() + SAME
        return reply

    def _claim(
        self, node: Node, client: Client, request: SocketRequest, deadline: Deadline
    ) -> SocketReply:
        try:
            record = self._record(node, client, request)
            other = process_claims.find_other_process_grant(
                node, record, request.number, request.devices
            )
            if other:
                why = f"pid {record.pid} holds {' '.join(other)} already"
                raise Refusal(INVALID_REQUEST, why, f"gpulock release --pid {record.pid} first")
            grant = process_claims.claim_for_process(
                node, record, request.number, request.devices, deadline
            )
        except Refusal as refusal:
            state = WAITING if is_temporary_refusal(refusal) else REFUSED
            return SocketReply(state, kind=refusal.kind, why=refusal.why, do=refusal.do)
        ids = tuple(device.id for device in grant.devices)
        who = f"pid {record.pid} ({record.user})"
        self._journal.say(INFO, f"granted {' '.join(ids)} to {who}, {grant.waited * 1000:.1f} ms")
        if grant.fault:
            self._journal.say(WARNING, f"{who}: {grant.fault}")
        return SocketReply(GRANTED, token=grant.owner.token, devices=ids)

    def _record(self, node: Node, client: Client, request: SocketRequest) -> Owner:
        """Return the record of a claim by a process that is still the client's; raise Refusal."""
        name = self._name(client.peer.uid)
        record = process_claims.make_process_owner(node, request.pid, name, request.comment)
        check_peer_may_hold(client.peer, node.proc, request.pid, request.start)
        if (record.start, record.uid) != (request.start, client.peer.uid):
            raise Refusal(
                INVALID_REQUEST, f"pid {request.pid} now belongs to another process", "try again"
            )
        return record

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
                process_claims.make_liveness_judge(node),
                deadline,
                how,
            )
        except (Refusal, OSError) as fault:
            self._journal.say(WARNING, f"claim {token} stays until its process ends: {fault}")


def is_temporary_refusal(refusal: Refusal) -> bool:
    """Return whether a refusal may be otherwise in a moment."""
    return refusal.kind == BUSY or isinstance(refusal, LockTimeout)


def draw_client_ticket(node: Node, client: Client, deadline: Deadline) -> None:
    """Give a client a place in line: by the process that connected, which waits; raise Refusal."""
    client.ticket = tickets.take_ticket(node, deadline, client.peer.pid)


def return_client_ticket(node: Node, client: Client) -> None:
    """Take a client out of the line."""
    if client.ticket:
        tickets.remove_ticket(node, client.ticket)
