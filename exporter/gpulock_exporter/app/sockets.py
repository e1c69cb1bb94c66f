# SPDX-License-Identifier: Apache-2.0
"""Where the exporter answers: systemd's sockets, or addresses that another process may have first.

Any user may bind the port. That keeps the exporter from answering there, and from nothing else: it
samples all the same, and listens as soon as the address is free.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

from gpulock_exporter.web.listen import (
    AddressTakenError,
    ListenError,
    activated_sockets,
    listen_on_addresses,
)
from gpulock_exporter.web.server import HttpServer

RETRY = 5.0  # seconds between two tries to listen


def open_exporter_sockets(addresses: Sequence[str]) -> tuple[list[socket.socket], str]:
    """Return what to listen on, none where another process does, and the words for people."""
    handed = activated_sockets(os.environ)
    if handed:
        return handed, "answers on systemd's sockets"
    if not addresses:
        raise ListenError("EXPORTER_LISTEN is empty and systemd handed no socket over: set it")
    try:
        return _listen_on_words(addresses)
    except AddressTakenError as fault:
        return [], _answers_nobody(fault)


def listen_when_free(
    addresses: Sequence[str], server: HttpServer, said: str, announce: Callable[[str], object]
) -> None:
    """Try again and again, in a thread of its own, until the server listens.

    `said` is why it does not yet. A new reason is announced, the same one is not said twice.
    """

    def run() -> None:
        last = said
        listeners: list[socket.socket] = []
        while not listeners:
            time.sleep(RETRY)
            try:
                listeners, words = _listen_on_words(addresses)
            except ListenError as fault:  # a name may have no address just now
                words = _answers_nobody(fault)
            server.listen(listeners)
            if words != last:
                announce(words)
            last = words

    threading.Thread(target=run, name="listen", daemon=True).start()


def _answers_nobody(fault: ListenError) -> str:
    return f"samples, and answers nobody yet: {fault}; it tries again every {RETRY:g} s"


def _listen_on_words(addresses: Sequence[str]) -> tuple[list[socket.socket], str]:
    return listen_on_addresses(addresses), f"answers on {' '.join(addresses)}"
