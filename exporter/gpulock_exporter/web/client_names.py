# SPDX-License-Identifier: Apache-2.0
"""Names of clients, written the one way that they are compared in."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import cast

_MAPPED = (
    bytes(10) + b"\xff\xff"
)  # an IPv4 address as a socket for both shows it (RFC 4291 2.5.5.2)
_LOOPBACK, _FIRST = "127.0.0.0/8", "127.0.0.1"


def certificate_alt_names(certificate: Mapping[str, object]) -> frozenset[str]:
    """Return the alternative names of `SSLSocket.getpeercert()`: DNS, e-mail, IP address, URI."""
    pairs = cast("tuple[tuple[str, str], ...]", certificate.get("subjectAltName", ()))
    return frozenset(
        normalize_ip_address(value) if kind == "IP Address" else value
        for kind, value in pairs
        if kind in {"DNS", "email", "IP Address", "URI"}
    )


def normalize_ip_address(text: str) -> str:
    """Write an IP address in its short form; anything else is returned as it is.

    OpenSSL writes 2001:DB8:0:0:0:0:0:1 where a configuration says 2001:db8::1.
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        packed = _pack_ip_address(family, text.strip())
        if packed:
            return socket.inet_ntop(family, packed)
    return text


def client_network(peer: str) -> str:
    """Return what stands for one client: an IPv4 address, or an IPv6 /64, which one may own.

    On this machine everybody has all of 127.0.0.0/8: what is not its first is one.
    """
    packed = _pack_ip_address(socket.AF_INET6, peer.partition("%")[0])
    if packed.startswith(_MAPPED):
        peer = socket.inet_ntop(socket.AF_INET, packed[len(_MAPPED) :])
    elif packed:
        return packed[:8].hex()
    return _LOOPBACK if peer.startswith("127.") and peer != _FIRST else peer


def _pack_ip_address(family: int, text: str) -> bytes:
    try:
        return socket.inet_pton(family, text)
    except (OSError, ValueError):  # ValueError: a NUL in it, or not ASCII
        return b""
