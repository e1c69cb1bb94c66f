# SPDX-License-Identifier: Apache-2.0
"""Listening sockets: by address, or handed over by systemd."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import MutableMapping, Sequence

_BACKLOG = 4096  # a full one costs the next client a second; the kernel caps it (somaxconn)
_HIGHEST_PORT = 65535
_WITHOUT_IPV6 = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}
_FIRST = 3  # SD_LISTEN_FDS_START
_MOST_ADDRESSES = 64
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


class ListenError(ValueError):
    """An address that cannot be listened on, with what to do."""


class AddressTakenError(ListenError):
    """An address on which another process listens."""


class Listening:
    """What an exporter listens on: systemd's sockets, or addresses, each as soon as nobody has it.

    Any user may bind a port, which keeps the exporter from answering there and from nothing else.
    """

    def __init__(self, addresses: Sequence[str], environ: MutableMapping[str, str]) -> None:
        """Check the addresses; raise ListenError."""
        self._handed = activated_sockets(environ)
        for one in addresses:
            parse_listen_address(one)
        self._waiting = {} if self._handed else dict.fromkeys(addresses, "")  # why it has none
        self._served: list[str] = []
        self._is_begun = False
        if not (self._handed or self._waiting):
            raise ListenError("EXPORTER_LISTEN is empty and systemd handed no socket over: set it")

    def open(self) -> list[socket.socket]:
        """Return the sockets that can be had now, and could not before.

        The first time raise ListenError, but for an address that is taken: whatever keeps it from
        one later, it serves the others.
        """
        sockets, self._handed = self._handed, []
        for address in list(self._waiting):
            try:
                sockets += listen_on_address(address)
            except ListenError as fault:
                if not (self._is_begun or isinstance(fault, AddressTakenError)):
                    raise
                self._waiting[address] = str(fault)
                continue
            del self._waiting[address]
            self._served.append(address)
        self._is_begun = True
        return sockets

    def words(self, again: float) -> str:
        """Return where it answers, for people; it tries again each so many seconds."""
        if not (self._served or self._waiting):
            return "answers on systemd's sockets"
        on = f"answers on {' '.join(self._served)}"
        said = on if self._served else "samples, and answers nobody yet"
        faults = "; ".join(self._waiting.values())
        return f"{said}: {faults}; it tries again every {again:g} s" if faults else said


def parse_listen_address(text: str) -> tuple[str, int]:
    """Parse `host:port`, `[IPv6]:port` or `:port`, as `--web.listen-address` of other exporters.

    No host means every address of this node.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    is_number = port.isascii() and port.isdigit() and len(port) <= len(str(_HIGHEST_PORT))
    if not colon or not is_number or int(port) > _HIGHEST_PORT or host == "[]":
        raise ListenError(f"{text[:100]!r} is no address: write host:port, [IPv6]:port or :port")
    if ":" in host and not bracketed:
        raise ListenError(f"{text!r} is no address: an IPv6 address stands in brackets, [::1]:9465")
    return host[1:-1] if bracketed else host, int(port)


def listen_on_address(address: str) -> list[socket.socket]:
    """Return a socket for each address of a name; raise ListenError.

    For no host it is one for IPv6 and IPv4 together. Of several addresses those of IPv6 may lack.
    """
    host, port = parse_listen_address(address)
    sockets: list[socket.socket] = []
    try:
        if not host:
            return [_listen_everywhere(port)]
        # A name may have both kinds of addresses, and the same one twice.
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        addresses = sorted({(one[0], one[4]) for one in resolved}, key=str)
        for family, where in addresses:
            try:
                sockets.append(socket.create_server(where, family=family, backlog=_BACKLOG))
            except OSError as error:
                is_lacking = family == socket.AF_INET6 and error.errno in _WITHOUT_IPV6
                if not (is_lacking and socket.AF_INET in dict(addresses)):
                    raise
    except (socket.gaierror, UnicodeError) as error:
        raise ListenError(f"cannot listen on {address}: {error}") from error
    except OSError as error:
        for one in sockets:
            one.close()
        kind = AddressTakenError if error.errno == errno.EADDRINUSE else ListenError
        raise kind(f"cannot listen on {address}: {os.strerror(error.errno or 0)}") from error
    return sockets


def _listen_everywhere(port: int) -> socket.socket:
    """One socket for IPv6 and IPv4, or for IPv4 where the kernel has no IPv6."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
        except OSError as error:
            if error.errno not in _WITHOUT_IPV6:
                raise
    return socket.create_server(("0.0.0.0", port), backlog=_BACKLOG)


def peer_address(address: Sequence[object]) -> str:
    """Return a client's address from what accept() says: IPv4 as such, where it came over IPv6."""
    host = str(address[0])
    return host.removeprefix("::ffff:") if "." in host else host


def activated_sockets(
    environ: MutableMapping[str, str], first: int = _FIRST
) -> list[socket.socket]:
    """Take over the sockets that systemd opened for this process (sd_listen_fds(3)).

    The variables are removed, so that no child takes them for its own.
    """
    pid, count, *_ = (environ.pop(name, "") for name in _VARIABLES)
    if not count or pid != str(os.getpid()):
        return []
    if not count.isascii() or not count.isdigit() or int(count) > _MOST_ADDRESSES:
        raise ListenError(f"LISTEN_FDS={count} is not a number of sockets")
    taken = [socket.socket(fileno=first + index) for index in range(int(count))]
    for one in taken:
        one.set_inheritable(False)
    return taken
