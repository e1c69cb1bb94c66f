# SPDX-License-Identifier: Apache-2.0
"""Serve `gpulock run`, `claim` and `release` to ordinary users, on LOCK_DIR/socket.

For a shared workstation (SERVE=yes), never where a scheduler owns the node. Whoever connects can
ask for no more than a place in line: the same line, `tickets/`, in which direct callers stand. The
first in line is served, nobody overtakes him.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable

from gpulock import atomic
from gpulock.daemon import attempt
from gpulock.daemon.client import Client
from gpulock.daemon.giving import give_back
from gpulock.daemon.journal import ERROR, INFO, Journal
from gpulock.daemon.loop import Loop
from gpulock.daemon.peer import check_holder, peer_of
from gpulock.daemon.wire import (
    CLAIM,
    LARGEST,
    REFUSED,
    RELEASED,
    SOCKET,
    WAITING,
    Reply,
    new_socket,
    parse_request,
)
from gpulock.deadline import Deadline, boottime
from gpulock.node import Node
from gpulock.refusal import BROKEN, BUSY, SENSELESS, GateShutError, Refusal

MOST, MOST_OF_USER = 200, 16  # connections
SILENCE = 10.0  # seconds until the request must be there
PAUSE = 1.0  # seconds between two attempts of the first in line, where nothing changed
GATE_SECONDS = 2.0
BACKLOG = 64
GONE = select.POLLHUP | select.POLLERR | select.POLLRDHUP


class Server:
    """The socket, and who is connected; `turn` it whenever the loop goes round."""

    def __init__(self, loop: Loop, journal: Journal, node: Callable[[], Node]) -> None:
        self.attempts = attempt.Attempts(journal)
        self._loop = loop
        self._journal = journal
        self._node = node
        self._socket: socket.socket | None = None
        self._file = (0, 0)
        self._clients: dict[int, Client] = {}
        self._line: list[Client] = []
        self._next = 0.0

    def open(self) -> None:
        """Listen, or go on listening where the socket is still there; raise OSError."""
        path = f"{self._node().store.path}/{SOCKET}"
        if self._socket is not None and self._file == identity(path):
            return
        self._stop_listening()
        folder = os.open(os.path.dirname(path), atomic.OPEN_DIRECTORY)
        listening = new_socket(socket.SOCK_NONBLOCK)
        try:
            atomic.remove_quietly(path)  # of an earlier gpulockd: we are the one that runs
            name = f"/proc/self/fd/{folder}/{SOCKET}"  # a path of a socket has 107 bytes at most
            listening.bind(name)
            os.chmod(name, 0o666)
            listening.listen(BACKLOG)
        except BaseException:
            listening.close()
            raise
        finally:
            os.close(folder)
        self._socket, self._file = listening, identity(path)
        self._loop.watch(listening.fileno(), self._accept)

    def close(self, why: str = "") -> None:
        """Serve nobody any more; who waits is told why.

        Without a reason we end: who waits keeps the ticket, and asks the next gpulockd.
        """
        self._stop_listening()
        if why:  # also what an earlier gpulockd left, which served
            atomic.remove_quietly(f"{self._node().store.path}/{SOCKET}")
        for client in list(self._clients.values()):
            if why:
                client.send(Reply(REFUSED, kind=BROKEN, why=why, do="use the scheduler"))
            self._drop(client, keep_ticket=not why)

    def is_open(self) -> bool:
        """Return whether the socket is there."""
        return self._socket is not None

    def stir(self) -> None:
        """Try again at once: a lock came or went."""
        self.attempts.forget()
        self._next = 0.0

    def due(self) -> float:
        """Return when `turn` has something to do, as CLOCK_BOOTTIME seconds."""
        silent = [c.since + SILENCE for c in self._clients.values() if c.request is None]
        return min([*silent, self._next if self._line else float("inf")])

    def turn(self, now: float) -> None:
        """Serve the first in line, as long as he can be; tell the others how long it is."""
        for client in list(self._clients.values()):
            if client.request is None and now >= client.since + SILENCE:
                self._refuse(client, SENSELESS, "no request came", "use gpulock run")
        if not self._line or now < self._next:
            return
        self._next = now + PAUSE
        first = self._line[0]
        if first.ticket:
            self._tell_others(first, self._serve_first(first, now), now)
            return
        try:
            self._stand(first)
        except Refusal as refusal:
            self._refuse(first, refusal.kind, refusal.why, refusal.do)

    def _serve_first(self, first: Client, now: float) -> int:
        """Serve the first of our line; return how many direct callers are before him."""
        reply = self.attempts.serve(self._node(), first, Deadline(GATE_SECONDS))
        if reply.state == WAITING and now < first.until:
            first.tell(reply, now)
        elif reply.state == WAITING:
            self._end(first, Reply(REFUSED, kind=BUSY, why=reply.why, do=reply.do))
        else:
            self._end(first, reply)
        return reply.before

    def _tell_others(self, first: Client, before: int, now: float) -> None:
        """Tell those behind the first of our line how many are before them."""
        if self._line and self._line[0] is not first:
            self._next = now  # the next one at once; the loop goes round between two
        for place, client in list(enumerate(self._line))[1:]:
            why = f"others are before this one in line: {before + place}"
            if now >= client.until:
                self._refuse(client, BUSY, why, "use --wait")
            else:
                client.tell(Reply(WAITING, before=before + place, why=why), now)

    def _accept(self, _: int) -> None:
        """Let one more in, unless there are too many."""
        assert self._socket is not None
        try:
            connection, _address = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as fault:  # no descriptor left: poll would call us again and again
            self._journal.say(ERROR, f"nobody is served until the next reconcile: {fault}")
            self._stop_listening()
            return
        connection.setblocking(False)
        try:
            peer = peer_of(connection)
        except (Refusal, OSError):
            connection.close()
            return
        client = Client(connection, peer, boottime())
        mine = [c for c in self._clients.values() if c.peer.uid == peer.uid]
        if len(mine) >= MOST_OF_USER or len(self._clients) >= MOST:
            who = "you" if len(mine) >= MOST_OF_USER else "others"
            why = f"{who} have too many calls at once"
            client.send(Reply(REFUSED, kind=BUSY, why=why, do="wait for them"))
            client.close()
            return
        self._clients[connection.fileno()] = client
        self._loop.watch(
            connection.fileno(), lambda events: self._ready(client, events), select.POLLIN | GONE
        )
        self._loop.watch(peer.fd, lambda _: self._drop(client))

    def _ready(self, client: Client, events: int) -> None:
        """Read what a client sent; one that has gone is forgotten."""
        try:
            data = client.connection.recv(LARGEST + 1) if events & select.POLLIN else b""
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or events & GONE:
            self._drop(client)
            return
        try:
            self._asked(client, data)
        except Refusal as refusal:
            self._refuse(client, refusal.kind, refusal.why, refusal.do)
        except ValueError as fault:
            self._refuse(client, SENSELESS, f"not understood: {fault}", "use gpulock run")
        except OSError as fault:
            self._refuse(client, BROKEN, str(fault), "see gpulock doctor")

    def _asked(self, client: Client, data: bytes) -> None:
        """Do what a client asks for, or put him in line; raise Refusal or ValueError."""
        if client.request is not None or len(data) > LARGEST:
            raise ValueError("more than one request")
        request = parse_request(data)
        client.request = request
        node = self._node()
        if request.act == CLAIM:
            check_holder(client.peer, node.proc, request.pid, request.start)
            client.until = boottime() + request.wait
            self._stand(client)
            return
        freed = give_back(node, client.peer, request, Deadline(GATE_SECONDS))
        self._journal.say(INFO, f"uid {client.peer.uid} gave back {' '.join(freed)}")
        self._end(client, Reply(RELEASED, devices=freed))
        self.stir()

    def _stand(self, client: Client) -> None:
        """Put a client in line; raise Refusal where no ticket can be drawn and he does not wait.

        While the gate is shut who waits stands at the end without a ticket.
        """
        try:
            attempt.draw(self._node(), client, Deadline(GATE_SECONDS))
        except GateShutError:
            if boottime() >= client.until:
                raise
        if client not in self._line:
            self._line.append(client)
        self._line.sort(key=Client.number)
        self._next = 0.0 if client.ticket else boottime() + PAUSE

    def _refuse(self, client: Client, kind: str, why: str, do: str) -> None:
        self._end(client, Reply(REFUSED, kind=kind, why=why, do=do))

    def _end(self, client: Client, reply: Reply) -> None:
        """Send the last reply; what was granted to one who is gone is taken back."""
        sent = client.send(reply)
        if reply.token and not sent:
            self.attempts.undo(self._node(), reply.token, Deadline(GATE_SECONDS))
        self._drop(client)

    def _drop(self, client: Client, keep_ticket: bool = False) -> None:
        """Forget a client, and give back his place in line."""
        if self._clients.pop(client.connection.fileno(), None) is None:
            return
        self._loop.forget(client.connection.fileno())
        self._loop.forget(client.peer.fd)
        if client in self._line:
            self._line.remove(client)
            self._next = 0.0
        if not keep_ticket:
            attempt.give_back(self._node(), client)
        client.close()

    def _stop_listening(self) -> None:
        if self._socket is not None:
            self._loop.forget(self._socket.fileno())
            self._socket.close()
            self._socket = None


def identity(path: str) -> tuple[int, int]:
    """Return what tells one file from another of its name, (0, 0) for none."""
    try:
        info = os.lstat(path)
    except OSError:
        return (0, 0)
    return (info.st_dev, info.st_ino)
