# SPDX-License-Identifier: Apache-2.0
"""Serve `gpulock run`, `claim` and `release` to ordinary users, on LOCK_DIR/socket.

For a shared workstation (USER_CLAIMS=yes), never where gpulock is installed into a scheduler. A
client can ask for no more than a place in line (gpulock.workstation.wait_queue).
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from gpulock.daemon.core.journal import ERROR, INFO, DaemonJournal
from gpulock.daemon.core.loop import EventLoop
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import BROKEN, BUSY, INVALID_REQUEST, Refusal
from gpulock.node.context import Node
from gpulock.store import atomic
from gpulock.workstation.peer import (
    PASSRIGHTS,
    Client,
    close_aside,
    identify_peer,
    read_peer_ids,
    receive_packet,
)
from gpulock.workstation.socket_claims import (
    GATE_SECONDS,
    PERIOD,
    Allowance,
    SocketClaims,
    has_name,
    refuse_request,
    user_name,
)
from gpulock.workstation.user_release import release_for_user
from gpulock.workstation.user_reserve import end_reservations, reserve_for_user
from gpulock.workstation.wait_queue import WaitQueue
from gpulock.workstation.wire import (
    CANCEL,
    CLAIM,
    LARGEST,
    READ,
    REFUSED,
    RELEASE,
    RELEASED,
    RESERVE,
    SOCKET,
    SocketReply,
    SocketRequest,
    new_packet_socket,
    parse_request,
)

MOST, MOST_OF_USER = 200, 16  # calls that wait in the queue; half of them may give back
UNREAD = 64  # connections whose request is yet to come
# seconds for each connection of a user, and how many at once: 200, then 20 a second
ARRIVAL, ARRIVALS_AHEAD = 0.05, 10.0
SILENCE = 10.0  # seconds until the request must be there
BACKLOG = 64
GONE = select.POLLHUP | select.POLLERR | select.POLLRDHUP


class ClaimServer:
    """The socket and its clients; `run_due` runs once in each turn of the loop."""

    def __init__(self, loop: EventLoop, journal: DaemonJournal, node: Callable[[], Node]) -> None:
        self.claims = SocketClaims(journal)
        self._loop = loop
        self._journal = journal
        self._node = node
        self._socket: socket.socket | None = None
        self.clients: dict[int, Client] = {}
        self.line = WaitQueue(self.claims, node, self._end)
        self._calls: list[Client] = []  # that neither claim nor cancel
        self._arrivals = Allowance(ARRIVALS_AHEAD)

    def open(self) -> None:
        """Listen, or go on listening where the socket is still there; raise OSError.

        Until a new socket listens, and all may connect to it, users find that of before.
        """
        path = f"{self._node().store.path}/{SOCKET}"
        if self._socket is not None and os.path.exists(path):
            return
        self._stop_listening()
        self.line.recover()
        self._socket = listen_at(path)
        self._loop.watch(self._socket.fileno(), self._accept)

    def close(self, why: str = "") -> None:
        """Serve nobody any more; who waits is told why.

        Without a reason we end: who waits keeps the number, and asks the next gpulockd.
        """
        self._stop_listening()
        self.line.close(keep=not why)
        if why:  # also what an earlier gpulockd left, which served
            atomic.remove_quietly(f"{self._node().store.path}/{SOCKET}")
        for client in list(self.clients.values()):
            if why:
                client.send(SocketReply(REFUSED, kind=BROKEN, why=why, do="use the scheduler"))
            self._drop(client)

    def due(self) -> float:
        """Return when `run_due` has something to do, as CLOCK_BOOTTIME seconds."""
        silent = [c.since + SILENCE for c in self.clients.values() if c.request is None]
        return min([*silent, *map(self._call_due, self._calls), self.line.due()])

    def run_due(self, now: float) -> None:
        """Serve the first in the queue, if possible; disconnect silent clients."""
        for client in list(self.clients.values()):
            if now >= client.since + SILENCE and self._is_silent(client):
                self._refuse(client, INVALID_REQUEST, "no request came", "use gpulock run")
        if self._calls:
            client = min(self._calls, key=self._call_due)
            if now >= self._call_due(client):
                self._calls.remove(client)
                with self.claims.charged(client.peer.account):
                    self._guarded(client, self._serve_call)
        self.line.run_due(now)

    def _call_due(self, client: Client) -> float:
        """Return when a call of this user may be served, as CLOCK_BOOTTIME seconds."""
        assert client.request is not None
        return self.claims.due(client.peer.account, client.request.act)

    def _accept(self, _: int) -> None:
        """Let all in who wait at the socket."""
        for _ in range(BACKLOG):
            if self._socket is None:
                return
            try:
                connection, _address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as fault:  # no descriptor left: poll would call us again and again
                self._journal.say(ERROR, f"no user is served until the next reconcile: {fault}")
                self._stop_listening()
                return
            self._let_in(connection)

    def _let_in(self, connection: socket.socket) -> None:
        """Let one more in; where too many say nothing, the oldest of who has most of them goes."""
        connection.setblocking(False)
        peer, now = None, clock_boottime()
        with suppress(OSError):
            uid = read_peer_ids(connection)[1]
            if not uid or self._arrivals.due(uid) <= now:
                self._arrivals.charge(uid, ARRIVAL, now)
                peer = identify_peer(connection, self._node().proc, has_name)
        if peer is None:  # it has gone, or its user comes too often
            close_aside(connection.detach())
            return
        client = Client(connection, peer, now)
        silent = [one for one in self.clients.values() if one.request is None]
        if len(silent) >= UNREAD:
            accounts = [one.peer.account for one in silent]
            most = max(accounts, key=accounts.count)
            oldest = silent[accounts.index(most)]  # they are in the order in which they came
            if self._is_silent(oldest):
                self._drop(oldest)
        self.clients[connection.fileno()] = client
        self._loop.watch(
            connection.fileno(), lambda events: self._ready(client, events), select.POLLIN | GONE
        )
        self._loop.watch(peer.fd, lambda _: self._drop(client))

    def _is_silent(self, client: Client) -> bool:
        """Return whether a client has sent nothing: a round may have taken as long as it may."""
        if client.request is None:
            self._ready(client, select.POLLIN)
        return client.request is None and client in self.clients.values()

    def _ready(self, client: Client, events: int) -> None:
        """Read what a client sent; one that has gone is forgotten."""
        try:
            readable = events & select.POLLIN
            data = receive_packet(client.connection, LARGEST + 1) if readable else b""
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or events & GONE:
            self._drop(client)
            return
        try:
            if client.request is not None or len(data) > LARGEST:
                raise ValueError("more than one request")
            request = parse_request(data)
        except ValueError as fault:
            self._refuse(client, INVALID_REQUEST, f"not understood: {fault}", "use gpulock run")
            return
        self._guarded(client, lambda client: self._handle_request(client, request))

    def _guarded(self, client: Client, act: Callable[[Client], None]) -> None:
        """Do something for a client, who is told why where it cannot be done."""
        try:
            act(client)
        except Refusal as refusal:
            self._end(client, refuse_request(refusal))
        except OSError as fault:
            self._refuse(client, BROKEN, str(fault), "see gpulock doctor")
        except Exception as fault:  # one request must not end gpulockd for all others
            self._end(client, self.claims.report_fault(client, fault))

    def _handle_request(self, client: Client, request: SocketRequest) -> None:
        """Do what a client asks for, or put it into a queue; raise Refusal or OSError."""
        self._refuse_too_many(client, request.act)
        client.request = request
        client.send(SocketReply(READ))  # what it asks for may take long
        if request.act == CLAIM:
            self._enqueue(client, request)
        elif request.act == CANCEL:
            self._cancel(client, request.number)
        else:  # one a turn: each may look at every open file, or write to the disk
            self._calls.append(client)

    def _enqueue(self, client: Client, request: SocketRequest) -> None:
        """Put a claim into the queue; raise Refusal or OSError."""
        if (most := self._node().settings.user_max) and request.number > most:
            why = f"{request.number} GPUs, a user may hold {most} (USER_MAX)"
            raise Refusal(INVALID_REQUEST, why, "ask for fewer")
        self.line.enqueue(client, request, user_name(client.peer.account))

    def _refuse_too_many(self, client: Client, act: str) -> None:
        """Raise Refusal where a user, or all users, have too many calls of this kind.

        Some user's releases never keep another's single one out.
        """
        calls = [one for one in self.clients.values() if one.request and one.request.act == act]
        mine = [one for one in calls if one.peer.account == client.peer.account]
        full = len(calls) >= (room := MOST if act == CLAIM else MOST // 2)
        if len(mine) >= MOST_OF_USER or (full and (mine or act == CLAIM)):
            who, most = ("you", MOST_OF_USER) if len(mine) >= MOST_OF_USER else ("others", room)
            why = f"{who} have too many open calls: {most} are allowed"
            raise Refusal(BUSY, why, "wait for them")

    def _cancel(self, client: Client, number: int) -> None:
        """End a call that waits, for its own user or root; raise Refusal."""
        other, account = self.line.find(number), client.peer.account
        if account not in (0, other.peer.account):
            why = f"number {number} is another user's"
            raise Refusal(INVALID_REQUEST, why, "ask that user, or root")
        self._refuse(other, BUSY, f"cancelled by {user_name(account)}", "see gpulock queue")
        self._end(client, SocketReply(RELEASED))

    def _serve_call(self, client: Client) -> None:
        """Release, or begin or end a reservation; raise Refusal or OSError."""
        request, account, now = client.request, client.peer.account, time.time()
        assert request is not None
        if request.act == RELEASE:
            freed = release_for_user(self._node(), client.peer, request, Deadline(GATE_SECONDS))
            self._journal.say(INFO, f"uid {account} gave back {' '.join(freed)}")
            self._end(client, SocketReply(RELEASED, devices=freed))
        else:
            devices, ended = request.devices, list[str]()
            if request.act == RESERVE:
                reserve_for_user(self._node(), request, (account, user_name(account)), now)
            else:
                devices, ended = end_reservations(self._node(), request, account, now)
            self.claims.rate.charge(account, PERIOD, clock_boottime())
            self._journal.say(INFO, f"uid {account}: {request.act} {' '.join(devices)}")
            self._end(client, SocketReply(RELEASED, number=len(ended), why="; ".join(ended)))
        self.line.retry_now()

    def _refuse(self, client: Client, kind: str, why: str, do: str) -> None:
        self._end(client, SocketReply(REFUSED, kind=kind, why=why, do=do))

    def _end(self, client: Client, reply: SocketReply) -> None:
        """Send the last reply; what was granted to one who is gone is taken back."""
        sent = client.send(reply)
        if reply.token and not sent:
            with self.claims.charged(client.peer.account):
                self.claims.undo_grant(self._node(), reply.token)
        self._drop(client)

    def _drop(self, client: Client) -> None:
        """Forget a client, and give back its place in the queue."""
        if self.clients.pop(client.connection.fileno(), None) is None:
            return
        self._loop.forget(client.connection.fileno())
        self._loop.forget(client.peer.fd)
        if client in self._calls:
            self._calls.remove(client)
        self.line.remove(client)
        client.close()

    def _stop_listening(self) -> None:
        if self._socket is not None:
            self._loop.forget(self._socket.fileno())
            self._socket.close()
            self._socket = None


def listen_at(path: str) -> socket.socket:
    """Return a socket that listens at a path, and that all may connect to; raise OSError."""
    folder = os.open(os.path.dirname(path), atomic.OPEN_DIRECTORY)
    listening, beside = new_packet_socket(socket.SOCK_NONBLOCK), atomic.name_temporary(SOCKET)
    try:
        with suppress(OSError):  # from Linux 6.16 on nobody sends descriptors
            listening.setsockopt(socket.SOL_SOCKET, PASSRIGHTS, 0)
        name = f"/proc/self/fd/{folder}/{beside}"  # a path of a socket has 107 bytes at most
        listening.bind(name)
        os.chmod(name, 0o666)
        listening.listen(BACKLOG)
        os.rename(beside, SOCKET, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        listening.close()
        atomic.remove_quietly(beside, folder)
        raise
    finally:
        os.close(folder)
    return listening
