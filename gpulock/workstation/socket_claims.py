# SPDX-License-Identifier: Apache-2.0
"""Claim for a client of the socket, with a process that is still that client's."""

from __future__ import annotations

import pwd
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache

from gpulock.alloc.choose import CHECK_SECONDS, ClaimRequest
from gpulock.alloc.liveness import Judge
from gpulock.alloc.process_owner import is_same_process_running
from gpulock.alloc.process_scan import ProcessScan
from gpulock.alloc.reaper import DIED
from gpulock.alloc.release import release_locks
from gpulock.daemon.core.background_call import BackgroundCall, NoAnswerError
from gpulock.daemon.core.journal import (
    ERROR,
    INFO,
    WARNING,
    DaemonJournal,
    describe_exception,
)
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import BROKEN, BUSY, LockTimeout, Refusal
from gpulock.node.context import Node
from gpulock.node.devices import SHARE
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.store.reservations import find_own_devices, find_reserved_devices
from gpulock.workstation import process_claims
from gpulock.workstation.backfill import QueueView
from gpulock.workstation.peer import Client, check_peer_may_hold
from gpulock.workstation.wire import (
    CLAIM,
    GRANTED,
    REFUSED,
    RELEASE,
    WAITING,
    SocketReply,
)

GATE_SECONDS = 2.0
NAME_SECONDS = 1.0
# Each is a line of the history or the journal, which others' lines are in too: a loop of claims and
# releases would write 2 GB a day.
BURST = 1000  # claims and reservations of a user at once
PERIOD = 10.0  # seconds for each in the long run
SHARE_OF_USER = 0.1  # of gpulockd's time, for the calls of one user
SPARE = 2.0  # seconds of it that a user may take before
SOON = 4 * 3600.0  # seconds within which a claim without an end is told of a reservation


class Allowance:
    """What users took, in seconds, which time pays off; a user may be `ahead` of it by so many.

    Times are CLOCK_BOOTTIME seconds.
    """

    def __init__(self, ahead: float = 0.0) -> None:
        self._ahead = ahead
        self._paid_off: dict[int, float] = {}

    def charge(self, uid: int, seconds: float, now: float) -> None:
        """Note that a user took something."""
        self._paid_off = {one: at for one, at in self._paid_off.items() if at > now}
        self._paid_off[uid] = self._paid_off.get(uid, now) + seconds

    def due(self, uid: int) -> float:
        """Return from when on a user may take more."""
        return self._paid_off.get(uid, 0.0) - self._ahead


class SocketClaims:
    """Claims for clients, one at a time."""

    def __init__(self, journal: DaemonJournal) -> None:
        self.rate = Allowance((BURST - 1) * PERIOD)
        self._time = Allowance(SPARE / SHARE_OF_USER)
        self._journal = journal

    @contextmanager
    def charged(self, account: int) -> Iterator[None]:
        """Charge a user for the time that something takes."""
        begun = clock_boottime()
        try:
            yield
        finally:
            ended = clock_boottime()
            self._time.charge(account, (ended - begun) / SHARE_OF_USER, ended)

    def due(self, account: int, act: str = CLAIM) -> float:
        """Return from when on a user's next call may be served, as CLOCK_BOOTTIME seconds."""
        of_lines = self.rate.due(account) if act != RELEASE else 0.0
        return max(self._time.due(account), of_lines)

    def serve(self, view: QueueView, client: Client, kept: dict[str, str]) -> SocketReply:
        """Return GRANTED, REFUSED, or WAITING where the devices are not free yet, or are `kept`.

        What dead owners hold the reconcile frees, but for `reap_own`.
        """
        node, request, account = view.node, client.request, client.peer.account
        assert request is not None
        kinds = ((request.device_kind, request.number),) if request.device_kind else ()
        share = bool(request.share)
        want = ClaimRequest(request.number, request.devices, share=share, kinds=kinds)
        want.kept = kept | find_reserved_devices(view.reservations, view.now, account)
        want.patience = 0.0  # it is gpulockd that ends health checks, after this answer
        if own := find_own_devices(view.reservations, view.now, account):
            request = request._replace(preferred=own)
        try:
            check_peer_may_hold(client.peer, node.proc, request.pid, request.start)
            record = process_claims.make_process_owner(
                node, request.pid, client.caller.user, request.comment
            )
            record, limit = record.copy(uid=account), Deadline(GATE_SECONDS)
            grant = process_claims.claim_for_process(
                node, record, want, limit, request, judge_nobody
            )
        except Refusal as refusal:
            client.want = want if refusal.kind == BUSY else None
            if want.asked:
                client.until = max(client.until, clock_boottime() + CHECK_SECONDS)
            temporary = refusal.kind == BUSY or isinstance(refusal, LockTimeout)
            return refuse_request(refusal)._replace(state=WAITING if temporary else REFUSED)
        except Exception as fault:  # one request must not end gpulockd for all others
            return self.report_fault(client, fault)
        ids = tuple(device.id for device in grant.devices)
        if grant.fresh:
            self.rate.charge(account, PERIOD, clock_boottime())
            self._journal.say(INFO, f"granted {' '.join(ids)} to pid {record.pid} ({record.user})")
        places = grant.owner.places
        cards = {one.id.partition(SHARE)[0]: one for one in grant.devices}
        near = view.now + (request.seconds or node.settings.claim_max or SOON)
        coming = find_reserved_devices(view.reservations, view.now, account, near)
        coming_soon = [
            f"GPU {cards[name].label()} is {coming[name]}" for name in coming if name in cards
        ]
        why = "; ".join(filter(None, [process_claims.describe_former_claim(grant), *coming_soon]))
        return SocketReply(GRANTED, token=grant.owner.token, devices=ids, places=places, why=why)

    def reap_own(self, view: QueueView, account: int) -> bool:
        """Free what a user's processes that are gone held; return whether there was any.

        No look is taken for a user whose calls have taken too long.
        """
        node, limit = view.node, Deadline(GATE_SECONDS)
        with suppress(Refusal, OSError), self.charged(account):  # the claim says why
            owners = {lock.owner for lock in view.held.values() if lock.owner}
            gone = {
                one.token
                for one in owners
                if (one.scheduler, one.uid) == ("process", account)
                and not is_same_process_running(one.pid, one.start, node.proc)
            }
            if gone and self._time.due(account) <= clock_boottime():
                judge = make_liveness_judge(node)
                released = release_locks(node, lambda o: o.token in gone, judge, limit, "", DIED)
                return bool(released.freed)
        return False

    def report_fault(self, client: Client, fault: Exception) -> SocketReply:
        """Return the reply to a request that met a fault of gpulockd, and log it."""
        why = describe_exception(f"a request of uid {client.peer.account}", fault)
        self._journal.say(ERROR, why)
        do = "report this as a bug"
        return SocketReply(REFUSED, kind=BROKEN, why=f"gpulockd is at fault: {why}", do=do)

    def undo_grant(self, node: Node, token: str) -> None:
        """Take back what was granted to a client that never heard of it."""
        judge, how = make_liveness_judge(node), "its client disconnected"
        try:
            release_locks(node, lambda o: o.token == token, judge, Deadline(GATE_SECONDS), how)
        except (Refusal, OSError) as fault:
            self._journal.say(WARNING, f"claim {token} stays until its process ends: {fault}")


def judge_nobody(node: Node) -> Judge:
    """Return a judge that holds every lock of this boot, and looks at no process."""
    return Judge(node.boot_id, ProcessScan(node.proc), {})


def refuse_request(refusal: Refusal) -> SocketReply:
    """Return the reply that says a refusal."""
    return SocketReply(REFUSED, kind=refusal.kind, why=refusal.why, do=refusal.do)


def user_name(uid: int) -> str:
    """Return the name of a user, for people; a name service that is slow is not waited for."""
    try:
        return look_up_user(uid)
    except NoAnswerError:
        return f"uid {uid}"


def has_name(uid: int) -> bool:
    """Return whether a uid is known to be a user's own."""
    return user_name(uid) != f"uid {uid}"


@lru_cache(maxsize=1000)
def look_up_user(uid: int) -> str:
    """Return the name of a user; raise NoAnswerError."""
    try:
        return BackgroundCall(lambda: pwd.getpwuid(uid).pw_name).answer(NAME_SECONDS)
    except KeyError:
        return f"uid {uid}"
