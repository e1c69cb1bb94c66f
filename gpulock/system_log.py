# SPDX-License-Identifier: Apache-2.0
"""Write one line to the system's log, and wait for its reader no longer than 0.2 s.

Hot. syslog(3) waits in send(2) for as long as a reader that is stuck leaves its socket full, and a
hook with it: the claim is made, and Grid Engine sets no time limit. Here such a line is lost. Its
form is that of syslog(3). The short wait is for a burst of hooks: where systemd does not raise it,
a socket takes ten lines (net.unix.max_dgram_qlen).
"""

import os
import time
from _socket import (
    AF_UNIX,
    MSG_DONTWAIT,
    SOCK_CLOEXEC,
    SOCK_DGRAM,
    SOCK_NONBLOCK,
    socket,
)

from gpulock.errors import shorten

SOCKET = "/dev/log"
LOG_BYTES = 4000  # of a line
ERROR, WARNING, NOTICE, INFO = 3, 4, 5, 6  # syslog(3)
DAEMON = 3 << 3  # the facility
FULL_SECONDS = 0.2  # for a reader to take a line: of 200 hooks at once none loses its own


def log_to_system(level: int, line: str, tag: str = "gpulock", path: str = SOCKET) -> None:
    """Write a line; one that nobody takes in time is lost."""
    head = f"<{DAEMON | level}>{time.strftime('%b %e %H:%M:%S')} {tag}[{os.getpid()}]: "
    data = head.encode() + shorten(line, LOG_BYTES).encode("utf-8", "backslashreplace")
    try:
        log = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK)
        try:
            log.connect(path)
            send_in_time(log, data)
        finally:
            log.close()
    except OSError:
        return


def send_in_time(log: socket, data: bytes) -> None:
    """Send a line; raise OSError, BlockingIOError where there is no room for it in time."""
    late = time.monotonic() + FULL_SECONDS
    while True:
        try:
            log.send(data, MSG_DONTWAIT)
            return
        except BlockingIOError:
            import select  # not for a log that has room

            left = late - time.monotonic()
            if left <= 0 or not select.select((), (log,), (), left)[1]:
                raise
