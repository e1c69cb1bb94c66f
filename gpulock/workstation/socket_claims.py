# SPDX-License-Identifier: Apache-2.0
"""Claim for a client of the socket, with a process that is still that client's."""

from __future__ import annotations

import pwd
import time

from gpulock.alloc.choose import CHECK_SECONDS, ClaimRequest
from gpulock.alloc.release import release_locks
from gpulock.daemon.core.background_call import BackgroundCall
from gpulock.daemon.core.journal import (
    ERROR,
    INFO,
    WARNING,
    DaemonJournal,
    describe_exception,
)
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import BROKEN, BUSY, INVALID_REQUEST, LockTimeout, Refusal
from gpulock.node.context import Node
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.store.owner import Owner
from gpulock.store.reservations import Reservation, find_own_devices, find_reserved_devices
from gpulock.workstation import process_claims
from gpulock.workstation.backfill import find_shortage
from gpulock.workstation.claim_rate import ClaimRate
from gpulock.workstation.peer import Client, check_peer_may_hold
from gpulock.workstation.process_claims import ClaimTerms
from gpulock.workstation.wire import GRANTED, REFUSED, WAITING, SocketReply, SocketRequest

GATE_SECONDS = 2.0
NAME_SECONDS = 1.0
NAMES = 1000  # users that are remembered


class SocketClaims:
    """Claims for clients, one at a time, and the names of their users."""

    def __init__(self, journal: DaemonJournal) -> None:
        self.rate = ClaimRate()
        self._journal = journal
        self._names: dict[int, str] = {}

    def serve(
        self, node: Node, client: Client, first: bool, reservations: list[Reservation]
    ) -> SocketReply:
        """Return GRANTED, REFUSED, or WAITING where the devices are not free yet.

        What dead owners hold is for the first in the queue alone.
        """
        request = client.request
        assert request is not None
        kinds = ((request.device_kind, request.number),) if request.device_kind else ()
        share = bool(request.share)
        want = ClaimRequest(request.number, request.devices, share=share, kinds=kinds)
        now, account = time.time(), client.peer.account
        want.kept = find_reserved_devices(reservations, now, account)
        preferred = find_own_devices(reservations, now, account) or request.preferred
        coming = {one.device for one in reservations if now < one.begin and one.uid != account}
        if coming and not preferred:
            preferred = tuple(one.id for one in node.devices() if one.id not in coming)
        want.patience = 0.0  # it is gpulockd that ends health checks, after this answer
        try:
            record = self._record(node, client, request)
            terms = ClaimTerms(preferred, request.seconds, request.note, may_reap=first)
            deadline = Deadline(GATE_SECONDS)
            grant = process_claims.claim_for_process(node, record, want, deadline, terms)
        except Refusal as refusal:
            client.want = want if refusal.kind == BUSY else None
            if refusal.kind == BUSY and not first:
                held = node.store.read_all_locks()
                refusal = find_shortage(node, node.devices(), held, want) or refusal
            if want.asked:
                client.until = max(client.until, clock_boottime() + CHECK_SECONDS)
            temporary = refusal.kind == BUSY or isinstance(refusal, LockTimeout)
            state = WAITING if temporary else REFUSED
            return SocketReply(state, kind=refusal.kind, why=refusal.why, do=refusal.do)
        except Exception as fault:  # one request must not end gpulockd for all others
            why = describe_exception(f"a claim of uid {client.peer.account}", fault)
            self._journal.say(ERROR, why)
            why = f"gpulockd is at fault: {why}"
            return SocketReply(REFUSED, kind=BROKEN, why=why, do="report this as a bug")
        if grant.fresh:
            self.rate.count_claim(client.peer.account, clock_boottime())
        ids = tuple(device.id for device in grant.devices)
        who = f"pid {record.pid} ({record.user})"
        self._journal.say(INFO, f"granted {' '.join(ids)} to {who}, {grant.waited * 1000:.1f} ms")
        places = grant.owner.places
        return SocketReply(GRANTED, token=grant.owner.token, devices=ids, places=places)

    def _record(self, node: Node, client: Client, request: SocketRequest) -> Owner:
        """Return the record of a claim by a process that is still the client's; raise Refusal."""
        name = self.user_name(client.peer.account)
        record = process_claims.make_process_owner(node, request.pid, name, request.comment)
        check_peer_may_hold(client.peer, node.proc, request.pid, request.start)
        if (record.start, record.uid) != (request.start, client.peer.uid):
            raise Refusal(
                INVALID_REQUEST, f"pid {request.pid} now belongs to another process", "try again"
            )
        return record.copy(uid=client.peer.account)

    def user_name(self, uid: int) -> str:
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

    def known_name(self, uid: int) -> str:
        """Return the name of a user as far as it was asked for."""
        return self._names.get(uid, f"uid {uid}")

    def undo_grant(self, node: Node, token: str) -> None:
        """Take back what was granted to a client that never heard of it."""
        judge, how = make_liveness_judge(node), "its client disconnected"
        try:
            release_locks(node, lambda o: o.token == token, judge, Deadline(GATE_SECONDS), how)
        except (Refusal, OSError) as fault:
            self._journal.say(WARNING, f"claim {token} stays until its process ends: {fault}")
