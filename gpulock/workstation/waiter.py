# SPDX-License-Identifier: Apache-2.0
"""Wait at gpulockd's socket for the last reply: what `gpulock run --wait` is while it waits.

As a program it loads next to nothing: `waiter.py SOCKET END UNTIL WHAT COMMAND...`, of which
COMMAND is then started in its place. The last reply stays in the socket.
"""

import posix
import select
import sys
import time

PEEK = 2  # MSG_PEEK, linux/socket.h
LARGEST = 1 << 14
LONGEST_WAIT = 86400.0  # seconds; poll(2) counts milliseconds in an int
ENVIRONMENT = "GPULOCK_WAITED"  # SOCKET END


def read_fields(data: bytes) -> dict[str, str]:
    """Return what a packet says."""
    lines = data.decode("utf-8", "replace").split("\n")
    return {key: value for key, _, value in [line.partition("=") for line in lines]}


def show_waiting(fields: dict[str, str], what: str, last: str) -> str:
    """Say on stderr how the waiting goes, where that changed since `last`; return it."""
    before = int(fields["before"]) if fields.get("before", "").isdecimal() else 0
    why = fields.get("why", "").partition(" (")[0]  # who has which: `gpulock status` says it better
    reason = f"number {fields.get('number', '')}, place {before + 1} in the queue; {why}"
    if reason != last:
        posix.write(2, f"gpulock: waiting for {what}: {reason}\n".encode())
    return reason


def wait_for_reply(connection: int, what: str, until: float) -> None:
    """Wait until the next packet is a last reply, the connection has ended, or it is too late.

    `until` in CLOCK_BOOTTIME seconds.
    """
    from _socket import socket  # `socket` takes a megabyte

    peer, last = socket(fileno=connection), ""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    try:
        while (left := until - time.clock_gettime(time.CLOCK_BOOTTIME)) > 0:
            if not poll.poll(min(left, LONGEST_WAIT) * 1000):
                continue
            fields = read_fields(peer.recv(LARGEST, PEEK))
            if fields.get("state") != "waiting":
                break
            peer.recv(LARGEST)
            last = show_waiting(fields, what, last)
    except OSError:
        pass  # whoever reads the reply meets it as well
    finally:
        peer.detach()


def main(words: list[str]) -> None:
    """Wait, then start the command."""
    import _signal

    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # Ctrl-C ends it without a word
    connection, end, until, what, *command = words
    wait_for_reply(int(connection), what, float(until))
    handed = f"{connection} {end}".encode()
    posix.execve(command[0], command, {**posix.environ, ENVIRONMENT.encode(): handed})


if __name__ == "__main__":
    main(sys.argv[1:])
