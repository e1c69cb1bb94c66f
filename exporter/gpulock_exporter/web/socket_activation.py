# SPDX-License-Identifier: Apache-2.0
"""Sockets that systemd opened for us: sd_listen_fds(3) without libsystemd."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

from gpulock_exporter.web.listen import ListenError

_FIRST = 3  # SD_LISTEN_FDS_START
_MOST = 64
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


def activated_sockets(
    environ: MutableMapping[str, str], first: int = _FIRST
) -> list[tuple[str, socket.socket]]:
    """Take over the sockets meant for this process, with their FileDescriptorName.

    The variables are removed, so that no child takes them for its own.
    """
    values = {name: environ.pop(name, "") for name in _VARIABLES}
    if not values["LISTEN_FDS"] or values["LISTEN_PID"] != str(os.getpid()):
        return []
    count = values["LISTEN_FDS"]
    if not count.isascii() or not count.isdigit() or int(count) > _MOST:
        raise ListenError(f"LISTEN_FDS={count} is not a number of sockets")
    names = values["LISTEN_FDNAMES"].split(":") if values["LISTEN_FDNAMES"] else []
    names += ["unknown"] * int(count)  # what systemd calls a nameless one
    taken = [_take_activated_socket(first + index, names[index]) for index in range(int(count))]
    return list(zip(names, taken, strict=False))


def _take_activated_socket(descriptor: int, name: str) -> socket.socket:
    """Check before serving: a datagram or a connected socket would fail at the first accept."""
    try:
        os.set_inheritable(descriptor, False)
        taken = socket.socket(fileno=descriptor)
    except OSError as error:
        raise ListenError(f"descriptor {descriptor} ({name}) is no socket: {error}") from error
    kind = taken.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
    listens = taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    family = taken.family in {socket.AF_INET, socket.AF_INET6, socket.AF_UNIX}
    if not (kind == socket.SOCK_STREAM and listens and family):
        taken.detach()
        raise ListenError(
            f"descriptor {descriptor} ({name}) is not a listening stream socket:"
            " the socket unit needs ListenStream= and Accept=no"
        )
    return taken
