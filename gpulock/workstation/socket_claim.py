# SPDX-License-Identifier: Apache-2.0
"""One attempt to serve the first in line: a claim with the client's process as its owner.

An attempt that fails costs a look at all processes, so that within a second the same answer is
given to the same question, unless a lock came or went.
"""

from __future__ import annotations

import pwd

from gpulock.alloc.release import release
from gpulock.daemon.core.background_call import Asking
from gpulock.daemon.core.journal import INFO, WARNING, Journal
from gpulock.deadline import Deadline, boottime
from gpulock.errors import BUSY, SENSELESS, GateShutError, Refusal
from gpulock.node.context import Node
from gpulock.store.owner import Owner
from gpulock.workstation import process_claims, tickets
from gpulock.workstation.connection import Client
from gpulock.workstation.peer import check_holder
from gpulock.workstation.wire import GRANTED, REFUSED, WAITING, Reply, Request

SAME = 1.0  # seconds
NAME_SECONDS = 1.0
NAMES = 1000  # users that are remembered


class Attempts:
    """Serve clients one at a time; remember why the last one had to wait."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._busy: Reply | None = None
        self._asked: tuple[int, tuple[str, ...]] = (0, ())
        self._until = 0.0
        self._names: dict[int, str] = {}

    def forget(self) -> None:
        """Something changed: ask again."""
        self._until = 0.0

    def serve(self, node: Node, client: Client, deadline: Deadline) -> Reply:
        """Return GRANTED, REFUSED, or WAITING where the devices are not free yet."""
        request = client.request
        assert request is not None
        before = tickets.ahead(node, client.ticket)
        if before:
            why = f"others are before this one in line: {before}"
            return Reply(WAITING, before=before, why=why, do="use --wait")
        question = request.number, request.devices
        if self._busy and question == self._asked and boottime() < self._until:
            return self._busy
        reply = self._claim(node, client, request, deadline)
        self._busy, self._asked = (reply if reply.state == WAITING else None), question
        self._until = boottime() + SAME
        return reply

    def _claim(self, node: Node, client: Client, request: Request, deadline: Deadline) -> Reply:
        try:
            record = self._record(node, client, request)
            other = process_claims.holds_other(node, record, request.number, request.devices)
            if other:
                why = f"pid {record.pid} holds {' '.join(other)} already"
                raise Refusal(SENSELESS, why, f"gpulock release --pid {record.pid} first")
            grant = process_claims.claim_for(
                node, record, request.number, request.devices, deadline
            )
        except Refusal as refusal:
            state = WAITING if is_busy(refusal) else REFUSED
            return Reply(state, kind=refusal.kind, why=refusal.why, do=refusal.do)
        ids = tuple(device.id for device in grant.devices)
        who = f"pid {record.pid} ({record.user})"
        self._journal.say(INFO, f"granted {' '.join(ids)} to {who}, {grant.waited * 1000:.1f} ms")
        if grant.fault:
            self._journal.say(WARNING, f"{who}: {grant.fault}")
        return Reply(GRANTED, token=grant.owner.token, devices=ids)

    def _record(self, node: Node, client: Client, request: Request) -> Owner:
        """Return the record of a claim by a process that is still the client's; raise Refusal."""
        name = self._name(client.peer.uid)
        record = process_claims.template(node, request.pid, name, request.comment)
        check_holder(client.peer, node.proc, request.pid, request.start)
        if (record.start, record.uid) != (request.start, client.peer.uid):
            raise Refusal(SENSELESS, f"process {request.pid} is another by now", "try again")
        return record

    def _name(self, uid: int) -> str:
        """Return the name of a user, for people; a name service that is slow is not waited for."""
        if uid not in self._names:
            asking = Asking(lambda: pwd.getpwuid(uid).pw_name)
            if not asking.wait(NAME_SECONDS):
                return f"uid {uid}"
            if len(self._names) >= NAMES:
                self._names.clear()
            try:
                self._names[uid] = asking.answer()
            except KeyError:
                self._names[uid] = f"uid {uid}"
        return self._names[uid]

    def undo(self, node: Node, token: str, deadline: Deadline) -> None:
        """Take back what was granted to a client that never heard of it."""
        how = "its client had gone"
        try:
            release(node, lambda o: o.token == token, process_claims.judge(node), deadline, how)
        except (Refusal, OSError) as fault:
            self._journal.say(WARNING, f"claim {token} stays until its process ends: {fault}")


def is_busy(refusal: Refusal) -> bool:
    """Return whether a refusal may be otherwise in a moment."""
    return refusal.kind == BUSY or isinstance(refusal, GateShutError)


def draw(node: Node, client: Client, deadline: Deadline) -> None:
    """Give a client a place in line: by the process that connected, which waits; raise Refusal."""
    client.ticket = tickets.draw(node, deadline, client.peer.pid)


def give_back(node: Node, client: Client) -> None:
    """Take a client out of the line."""
    if client.ticket:
        tickets.give_back(node, client.ticket)
