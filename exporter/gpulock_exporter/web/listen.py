# SPDX-License-Identifier: Apache-2.0
"""Listening sockets: by address, or handed over by systemd."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import ExitStack

_BACKLOG = 4096  # a full one costs the next client a second; the kernel caps it (somaxconn)
_HIGHEST_PORT = 65535
_WITHOUT_IPV6 = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}
_FIRST = 3  # SD_LISTEN_FDS_START
_MOST = 64
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


class ListenError(ValueError):
    """An address that cannot be listened on, with what to do."""


class AddressTakenError(ListenError):
    """An address on which another process listens."""


def listen_on_addresses(addresses: Iterable[str]) -> list[socket.socket]:
    """Listen on every address, or on none of them."""
    with ExitStack() as opened:
        found = [opened.enter_context(one) for address in addresses for one in _listen(address)]
        opened.pop_all()
    return found


def parse_listen_address(text: str) -> tuple[str, int]:
    """Parse `host:port`, `[IPv6]:port` or `:port`, as `--web.listen-address` of other exporters.

    No host means every address of this node.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > _HIGHEST_PORT:
        raise ListenError(f"{text!r} is no address: write host:port, [IPv6]:port or :port")
    if ":" in host and not bracketed:
        raise ListenError(f"{text!r} is no address: an IPv6 address stands in brackets, [::1]:9465")
    return host[1:-1] if bracketed else host, int(port)


def _listen(address: str) -> Iterator[socket.socket]:
    """Yield a socket for each address of a name; of no host one for IPv6 and IPv4 together."""
    host, port = parse_listen_address(address)
    try:
        if not host:
            yield _listen_everywhere(port)
            return
        # A name may have both kinds of addresses, and the same one twice.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, where in sorted({(one[0], one[4]) for one in found}, key=str):
            yield socket.create_server(where, family=family, backlog=_BACKLOG)
    except (socket.gaierror, UnicodeError) as error:
        raise ListenError(f"cannot listen on {address}: {error}") from error
    except OSError as error:
        kind = AddressTakenError if error.errno == errno.EADDRINUSE else ListenError
        raise kind(f"cannot listen on {address}: {os.strerror(error.errno or 0)}") from error


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


def peer_address(address: object) -> str:
    """Return a client's address from what accept() says: IPv4 as such, where it came over IPv6."""
    if not isinstance(address, tuple) or not address:
        return ""  # a Unix socket has no name
    host = str(address[0])  # pyright: ignore[reportUnknownArgumentType]
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
    if not count.isascii() or not count.isdigit() or int(count) > _MOST:
        raise ListenError(f"LISTEN_FDS={count} is not a number of sockets")
    taken = [socket.socket(fileno=first + index) for index in range(int(count))]
    for one in taken:
        one.set_inheritable(False)
    return taken
