# SPDX-License-Identifier: Apache-2.0
"""The server: accepts connections, gives each a thread, and cuts those past their deadline.

One thread accepts and keeps time. It never touches what a client sends: handshake, header and
response are the business of the connection's own thread, so a silent client delays nobody.
"""

from __future__ import annotations

import _thread
import errno
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from gpulock_exporter.web.connections import Connection, ConnectionTable
from gpulock_exporter.web.http import Handler
from gpulock_exporter.web.listen import peer_address
from gpulock_exporter.web.serve import (
    ServerContext,
    ServerLimits,
    WebSettings,
    serve_connection,
)

_LOOK_SECONDS = 0.25  # how late a deadline may be kept
_KERNEL_LATER = 1.0  # seconds that the kernel waits longer than we do
_ACCEPTED_AT_ONCE = 32
_PATIENCE_SECONDS = 0.05
_QUIET_SECONDS = 60.0
_RINGS = 4096  # bytes of the bell that are heard at once
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class HttpServer:
    """Serve a handler on listening sockets until `stop`."""

    def __init__(
        self,
        handler: Handler,
        listeners: Sequence[socket.socket],
        log: Callable[[str], None],
        settings: WebSettings | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        self._limits = limits or ServerLimits()
        self._service = ServerContext(handler, self._limits, settings or WebSettings(), log)
        self._table = ConnectionTable(self._limits.connections)
        self._listeners: list[socket.socket] = []
        self._listening = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._bell, self._ringer = socket.socketpair()
        self._heard = threading.Event()
        self._quiet_until = 0.0
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self.listen(listeners)

    def start(self) -> None:
        """Begin to accept."""
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread.start()

    def listen(self, listeners: Sequence[socket.socket]) -> None:
        """Accept on these sockets too; after `stop` they are closed."""
        with self._listening:
            for listener in listeners:
                if self._service.is_stopping:
                    listener.close()
                    continue
                self._tune(listener)
                self._listeners.append(listener)
                self._selector.register(listener, selectors.EVENT_READ)

    def stop(self) -> None:
        """Accept no more, let the answers under way be written, and end the rest."""
        with self._listening:
            self._service.is_stopping = True
        self._ringer.send(b".")
        self._thread.join()
        for listener in self._listeners:
            listener.close()
        self._table.finish(self._limits.stop_seconds, self._limits.arriving_seconds)
        self._selector.close()
        self._bell.close()
        self._ringer.close()

    def adopt(self, settings: WebSettings) -> None:
        """Serve by new settings from the next request on."""
        self._service.settings = settings
        self._table.cut_idle()

    @property
    def is_serving(self) -> bool:
        """Tell whether connections are accepted; if not before `stop`, the process must end."""
        return self._thread.is_alive()

    def answers(self, seconds: float) -> bool:
        """Return whether the accepting thread still runs; wait so long for its answer."""
        self._heard.clear()
        try:
            self._ringer.send(b".", socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass  # it has not heard for long: it was rung often enough
        except OSError:
            return False  # it was stopped
        return self._heard.wait(seconds)

    def counts(self) -> dict[str, int]:
        """Count answers by status, connections dropped by reason, and those open now."""
        answered = {f"answered_{status}": n for status, n in self._service.answered.copy().items()}
        dropped = {f"dropped_{reason}": n for reason, n in self._table.dropped.copy().items()}
        return {"open": len(self._table), **answered, **dropped}

    def _run(self) -> None:
        while not self._service.is_stopping:
            ready = self._selector.select(_LOOK_SECONDS if len(self._table) else None)
            for key, _ in ready:
                if key.fileobj is self._bell:
                    self._bell.recv(_RINGS)
                    self._heard.set()
                elif isinstance(key.fileobj, socket.socket):
                    self._accept_from(key.fileobj)
            self._table.expire(time.monotonic())

    def _accept_from(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._complain(f"cannot accept a connection: {error}")
                if error.errno not in _EXHAUSTED or not self._table.relieve(_PATIENCE_SECONDS):
                    time.sleep(_PATIENCE_SECONDS)
                return
            if self._table.make_room(_PATIENCE_SECONDS):
                self._serve(accepted, peer_address(address))
            else:
                accepted.close()

    def _serve(self, accepted: socket.socket, peer: str) -> None:
        connection = Connection(accepted, peer, self._limits.handshake_seconds)
        self._table.add(connection)
        try:
            # threading.Thread waits until the new one runs: twice the time for each of a flood.
            _thread.start_new_thread(self._live, (connection,))
        except RuntimeError as error:  # there can be no more threads
            self._end(connection)
            self._complain(f"cannot serve a connection: {error}")

    def _complain(self, line: str) -> None:
        """Log what a flood repeats, once in a while."""
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + _QUIET_SECONDS
            self._service.log(line)

    def _live(self, connection: Connection) -> None:
        try:
            serve_connection(connection, self._service)
        except OSError:
            return  # ssl.SSLError too: the client went, or was cut; `dropped` counts the latter
        except Exception:  # such as a handler's header with a line end in it
            self._service.log(f"a connection failed:\n{traceback.format_exc()}")
        finally:
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        connection.close()
        self._table.remove(connection)

    def _tune(self, listener: socket.socket) -> None:
        """Set what every accepted socket inherits."""
        listener.setblocking(False)
        size = self._limits.send_buffer_bytes
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        if listener.family != socket.AF_UNIX:
            # The second piece of a response must not wait for the ack of the first; and the
            # kernel gives up too on a reader that takes nothing, once we would have: our own
            # deadline says of the connection why it went, the kernel's does not.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            milliseconds = int((self._limits.write_seconds + _KERNEL_LATER) * 1000)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
