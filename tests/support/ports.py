# SPDX-License-Identifier: Apache-2.0
"""A port that stays one's own until a server listens on it.

A port that was free a moment ago may be given to a test beside this one: the kernel gives it to
anybody who binds port 0. It gives nobody a port that is bound, and lets a server listen on it if
both sockets have SO_REUSEADDR (socket(7)).
"""

from __future__ import annotations

import socket


class ReservedPort:
    """A port of 127.0.0.1 that is kept until `release`; a connection to it is refused."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number = int(self._socket.getsockname()[1])
        self.address = f"127.0.0.1:{self.number}"

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let the kernel give the port to others again."""
        self._socket.close()
