# SPDX-License-Identifier: Apache-2.0
"""The server: accepts connections, gives each a thread, and cuts those past their deadline.

One thread accepts and keeps time. It never touches what a client sends: handshake, header and
response are the business of the connection's own thread, so a silent client delays nobody.

When all places are taken the newcomer gets in and the oldest goes. A scrape takes milliseconds, so
it is never the oldest while an attacker's connections are; refusing newcomers instead would let
silent ones lock it out.

A connection's thread blocks in its socket without any timeout, since one of Python's is for each
recv alone. Deadlines are kept from outside: a cut makes the blocked call return at once. So a
deadline holds for a whole phase, however the bytes drip, in a handshake and inside OpenSSL too.
"""

from __future__ import annotations

import _thread
import errno
import math
import re
import selectors
import socket
import ssl
import struct
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from gpulock_exporter.web.http import (
    Handler,
    HttpExchange,
    HttpRequest,
    HttpResponse,
    error_response,
)
from gpulock_exporter.web.listen import peer_address

_END = re.compile(rb"\n\r?\n")
_CHUNK = 4096
_MOST_DRAINED = 256 * 1024
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger: what is unsent is thrown away
_LOOK_SECONDS = 0.25  # how late a deadline may be kept
_REST_SECONDS = 2.0  # between two looks while nobody is connected
_KERNEL_LATER = 1.0  # seconds that the kernel waits longer than we do
_PAUSE_SECONDS = 0.05
_QUIET_SECONDS = 60.0
ENDING = 32  # threads of connections that were cut, at most, beside those that are served
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@dataclass(frozen=True)
class ServerLimits:
    """How much and how long a client may; each deadline is for the whole of that phase."""

    connections: int = 160  # a TLS connection costs 60-100 KiB: its thread's stack and OpenSSL
    arrive_seconds: float = 5.0  # of the handshake, then of the header
    handle_seconds: float = 30.0  # a first login may wait for others
    write_seconds: float = 10.0
    linger_seconds: float = 1.0  # for a client to read why it is refused
    stop_seconds: float = 5.0
    new_seconds: float = 0.5  # at a stop, for a request that has not come yet
    header_bytes: int = 16 * 1024
    send_buffer_bytes: int = 128 * 1024  # the kernel's, for each connection


@dataclass(frozen=True)
class WebSettings:
    """Who is let in."""

    tls: ssl.SSLContext | None = None
    refusal: Callable[[HttpRequest], HttpResponse | None] | None = None  # before the handler


class Phase(Enum):
    """What a connection is doing."""

    ARRIVING = auto()  # handshake and header
    HANDLING = auto()
    WRITING = auto()
    LINGERING = auto()  # its client reads what the kernel still holds of the answer


class Connection:
    """A socket that its own thread uses, and that the accepting thread may cut; with a deadline."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self.peer = peer
        self.is_cut = False
        self.phase, self.deadline = Phase.ARRIVING, math.inf

    def enter(self, phase: Phase, seconds: float) -> None:
        """Begin a phase that may last so long."""
        self.phase, self.deadline = phase, time.monotonic() + seconds

    def secure(self, context: ssl.SSLContext) -> None:
        """Do the TLS handshake; what the context asks of a client's certificate, it checks."""
        with self._lock:  # wrapping moves the descriptor to a new object: that one is to be cut
            wrapped = context.wrap_socket(
                self._sock, server_side=True, do_handshake_on_connect=False
            )
            self._sock = wrapped
        wrapped.do_handshake()

    def receive_head(self, most: int) -> bytes:
        """Read up to the end of a header, or until it is longer than `most`; nothing at an end."""
        head = b""
        while not _END.search(head, max(0, len(head) - _CHUNK - 2)) and len(head) <= most:
            data = self._sock.recv(_CHUNK)
            if not data:
                return b""
            head += data
        return head

    def send(self, data: bytes) -> None:
        """Write all of it, from the caller's own bytes."""
        self._sock.sendall(data)

    def drain(self) -> None:
        """Say that nothing more comes, then read and drop: unread bytes would reset the answer.

        TLS is left without its closing alert: every answer has a length.
        """
        socket.socket.shutdown(self._sock, socket.SHUT_WR)
        left = _MOST_DRAINED
        while left > 0 and (data := socket.socket.recv(self._sock, _CHUNK)):
            left -= len(data)

    def cut(self) -> None:
        """End it from another thread, at once; of a slow reader the kernel keeps nothing."""
        with self._lock:
            self.is_cut = True
            try:
                if self.phase is not Phase.LINGERING:
                    self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
            except OSError:
                return  # its client, or its thread, was faster

    def close(self) -> None:
        """Give the socket back; only the connection's own thread does."""
        with self._lock:  # never a descriptor that is already someone else's
            self._sock.close()


class HttpServer:
    """Serve a handler on listening sockets until `stop`, one request a connection."""

    def __init__(
        self,
        handler: Handler,
        listeners: Sequence[socket.socket],
        log: Callable[[str], None],
        settings: WebSettings | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        self._handler, self._log = handler, log
        self._settings, self._limits = settings or WebSettings(), limits or ServerLimits()
        self._connections: dict[Connection, None] = {}  # the oldest first, until its thread ends
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._stopper, stopping = socket.socketpair()  # closing one end wakes who waits
        self._selector.register(stopping, selectors.EVENT_READ, stopping)
        self._is_stopping = False
        self._went_round = self._quiet_until = float("-inf")
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self.listen(listeners)

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def listen(self, listeners: Sequence[socket.socket]) -> None:
        """Accept on these sockets too; after `stop` they are closed."""
        with self._changed:
            for listener in listeners:
                if self._is_stopping:
                    listener.close()
                    continue
                self._tune(listener)
                self._selector.register(listener, selectors.EVENT_READ, listener)

    def stop(self) -> None:
        """Accept no more, let the answers under way be written, and end the rest.

        One that was accepted is answered, where its request comes soon: had it waited in systemd's
        socket, the next exporter would have answered it.
        """
        with self._changed:
            self._is_stopping = True
        self._stopper.close()
        self._thread.join()
        for key in [*(self._selector.get_map() or {}).values()]:
            key.data.close()
        self._selector.close()
        begun = time.monotonic()
        patience = dict.fromkeys((Phase.HANDLING, Phase.WRITING), self._limits.stop_seconds)
        patience[Phase.ARRIVING] = self._limits.new_seconds
        with self._changed:
            while any(
                time.monotonic() < begun + patience.get(one.phase, 0.0) for one in self._connections
            ):
                self._changed.wait(_PAUSE_SECONDS)
            for one in self._connections:
                one.cut()
            self._changed.wait_for(lambda: not self._connections, 1.0)

    @property
    def is_serving(self) -> bool:
        """Tell whether connections are accepted; if not before `stop`, the process must end."""
        return self._thread.is_alive()

    @property
    def connections(self) -> int:
        """Return how many connections there are now."""
        return len(self._connections)

    def answers(self, seconds: float) -> bool:
        """Return whether the accepting thread went round in the last so many seconds."""
        return self.is_serving and time.monotonic() - self._went_round <= seconds

    def _run(self) -> None:
        while not self._is_stopping:
            seconds = _LOOK_SECONDS if self._connections else _REST_SECONDS
            for key, _ in self._selector.select(seconds):
                if not self._is_stopping:
                    self._accept_from(key.data)
            now = time.monotonic()
            if now - self._went_round < _LOOK_SECONDS:
                continue  # a flood of newcomers
            self._went_round = now
            with self._changed:
                for one in self._connections:
                    if now >= one.deadline and not one.is_cut:
                        one.cut()

    def _accept_from(self, listener: socket.socket) -> None:
        try:
            accepted, address = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._complain(f"cannot accept a connection: {error}")
            if error.errno in _EXHAUSTED:
                with self._changed:
                    self._cut_oldest()
                    self._changed.wait(_PAUSE_SECONDS)
            return
        if self._has_place():
            self._begin(Connection(accepted, peer_address(address)))
        else:
            accepted.close()

    def _has_place(self) -> bool:
        """Make a place, at the oldest's cost if need be; return False where each is at work."""
        most = self._limits.connections
        with self._changed:
            served = sum(not one.is_cut for one in self._connections)
            if served >= most and not self._cut_oldest():
                return False
            # those that were cut end as soon as their threads run
            return self._changed.wait_for(
                lambda: len(self._connections) < most + ENDING, _PAUSE_SECONDS
            )

    def _cut_oldest(self) -> bool:
        """Cut the oldest. One in its handler is left alone: cutting it would free nothing."""
        for one in self._connections:
            if not one.is_cut and one.phase is not Phase.HANDLING:
                one.cut()
                return True
        return False

    def _begin(self, connection: Connection) -> None:
        connection.enter(Phase.ARRIVING, self._limits.arrive_seconds)
        with self._changed:
            self._connections[connection] = None
        try:
            # threading.Thread waits until the new one runs: twice the time for each of a flood
            _thread.start_new_thread(self._live, (connection,))
        except RuntimeError as error:  # there can be no more threads
            self._end(connection)
            self._complain(f"cannot serve a connection: {error}")

    def _complain(self, line: str) -> None:
        """Log what a flood repeats, once in a while."""
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + _QUIET_SECONDS
            self._log(line)

    def _live(self, connection: Connection) -> None:
        try:
            self._serve(connection)
        except OSError:
            return  # ssl.SSLError too: the client went, or was cut
        finally:
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        try:
            connection.close()
        finally:
            with self._changed:
                del self._connections[connection]
                self._changed.notify_all()

    def _serve(self, connection: Connection) -> None:
        """Serve a connection to its end; raise OSError when the client ends it, or it is cut."""
        settings, limits = self._settings, self._limits
        if settings.tls is not None:
            connection.secure(settings.tls)
            connection.enter(Phase.ARRIVING, limits.arrive_seconds)
        head = connection.receive_head(limits.header_bytes)
        if not head:
            return

        def answer(request: HttpRequest) -> HttpResponse:
            try:
                refusal = settings.refusal and settings.refusal(request)
                return refusal or self._handler(request)
            except Exception:  # a fault in a handler is the exporter's, not the connection's
                self._log(f"{request.path} failed:\n{traceback.format_exc()}")
                return error_response(500, "the exporter failed here; its log says how")

        connection.enter(Phase.HANDLING, limits.handle_seconds)
        exchange = HttpExchange(head, limits.header_bytes, connection.peer, answer)
        connection.enter(Phase.WRITING, limits.write_seconds)
        connection.send(exchange.text)
        connection.send(exchange.body)  # which is not copied
        connection.enter(Phase.LINGERING, limits.linger_seconds)
        connection.drain()

    def _tune(self, listener: socket.socket) -> None:
        """Set what every accepted socket inherits."""
        listener.setblocking(False)
        size = self._limits.send_buffer_bytes
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        # The second piece of a response must not wait for the ack of the first; and the
        # kernel gives up too on a reader that takes nothing, once we would have.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        milliseconds = int((self._limits.write_seconds + _KERNEL_LATER) * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
