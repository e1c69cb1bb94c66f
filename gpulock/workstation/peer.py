# SPDX-License-Identifier: Apache-2.0
"""One client at the socket, and which process it is by the kernel's word (unix(7), SO_PEERCRED).

The pid is that of the process that connected. Its number may be another's by now: what holds
devices is named with its start time, which a process that got the number later does not share.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from _thread import start_new_thread
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from gpulock.alloc.choose import ClaimRequest
from gpulock.errors import INVALID_REQUEST, UNKNOWN, Refusal
from gpulock.node.procfs import Proc
from gpulock.node.subordinate import SubordinateUids
from gpulock.workstation.waiting import WaitingCaller
from gpulock.workstation.wire import WAITING, SocketReply, SocketRequest, encode_packet

PASSRIGHTS = 83  # SO_PASSRIGHTS, asm-generic/socket.h
OUTSIDE = "in a container run gpulock outside of it"  # the request has the pid that is known inside
RIGHTS = socket.CMSG_SPACE(4 * 253)  # bytes of the descriptors of one packet: SCM_MAX_FD
CREDENTIALS = struct.Struct("i2I")  # struct ucred: a uid has no sign


@dataclass
class Peer:
    """The process that connected: pid, uid, and a pidfd of it.

    `account` is the user who answers for it: of a subordinate uid, whose it is.
    """

    pid: int
    uid: int
    account: int
    fd: int

    def close(self) -> None:
        """Close the pidfd."""
        os.close(self.fd)

    def has_ended(self) -> bool:
        """Return whether that process has ended."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(0))


def read_peer_ids(connection: socket.socket) -> tuple[int, int]:
    """Return pid and uid of who connected; raise OSError."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(data)
    return pid, uid


def identify_peer(connection: socket.socket, proc: Proc, is_account: Callable[[int], bool]) -> Peer:
    """Return who connected, by the kernel's word; raise OSError, also for one that has ended.

    `is_account` says of a uid that it is a user's own although it is in another user's range of
    subordinate uids.
    """
    pid, uid = read_peer_ids(connection)
    peer = Peer(pid, uid, uid, os.pidfd_open(pid))
    try:
        if os.stat(f"{proc.root}/{pid}").st_uid != uid:
            raise ProcessLookupError  # another process has its number by now
        if (owner := proc.namespace_owner(pid)) > 0:
            peer.account = owner
        owner = SubordinateUids().owner(peer.account)
        if owner != peer.account and not is_account(peer.account):
            peer.account = owner
    except PermissionError:
        pass  # without CAP_SYS_PTRACE each uid answers for itself
    except OSError:
        peer.close()
        raise
    if peer.has_ended():
        peer.close()
        raise ProcessLookupError
    return peer


def receive_packet(connection: socket.socket, largest: int) -> bytes:
    """Return the next packet of a client, without the descriptors in it; raise OSError."""
    data, beside, _, _ = connection.recvmsg(largest, RIGHTS, socket.MSG_CMSG_CLOEXEC)
    for _, _, packed in beside:
        numbers = array("i", packed)
        close_aside(*numbers)
    return data


def close_aside(*descriptors: int) -> None:
    """Close what a client sent, or may have sent packets with descriptors to.

    close(2) waits for whoever made such a file (SO_LINGER, FUSE), and nobody else may.
    """

    def close() -> None:
        for one in descriptors:
            with suppress(OSError):
                os.close(one)

    try:
        start_new_thread(close, ())
    except RuntimeError:  # no thread is to be had
        close()


def check_peer_may_hold(peer: Peer, proc: Proc, pid: int, start: int) -> None:
    """Raise Refusal unless `peer` may hold devices with process `pid` of that start time.

    Its own process, or another of the same user: never another user's, nor one that runs with
    another's rights.
    """
    try:
        started = proc.start(pid)
        uids = proc.status(pid).uids if started == start else ()
    except (OSError, ValueError) as fault:
        why, do = f"process {pid} cannot be seen: {fault}", f"is it alive? {OUTSIDE}"
        raise Refusal(UNKNOWN, why, do) from fault
    if started != start:
        why, do = f"pid {pid} now belongs to another process", f"try again; {OUTSIDE}"
        raise Refusal(INVALID_REQUEST, why, do)
    if set(uids[:3]) != {peer.uid}:
        why = f"process {pid} is another user's, or has another's rights"
        raise Refusal(INVALID_REQUEST, why, "claim for one of your own")
    if pid == peer.pid and peer.has_ended():
        raise Refusal(UNKNOWN, f"process {pid} has ended", "nothing to do")


RARELY = 1.0  # seconds between two lines to one who waits
STILL_WAITING = SocketReply(WAITING)
NO_CALLER = WaitingCaller(0, 0, 0, 0, 0.0, "", "", "")


@dataclass(eq=False)
class Client:
    """One connection since `since`; `caller` is its place in the queue, until `until`.

    `want` is what it was refused as busy, once it was, `answer` what its last claim was answered
    in this `round` of the queue, and `shown` why it waits, as `gpulock queue` shows it. `reaped`:
    what its user's dead processes held was looked for. Times are CLOCK_BOOTTIME seconds.
    """

    connection: socket.socket
    peer: Peer
    since: float
    request: SocketRequest | None = None
    caller: WaitingCaller = NO_CALLER
    until: float = 0.0
    want: ClaimRequest | None = None
    answer: SocketReply = STILL_WAITING
    shown: SocketReply = STILL_WAITING
    round: int = 0
    reaped: bool = False
    _sent: SocketReply | None = None
    _sent_at: float = float("-inf")

    def send(self, reply: SocketReply) -> bool:
        """Send a reply; return whether it is on its way. It waits for no reader."""
        try:
            self.connection.send(encode_packet(reply))
        except OSError:
            return False
        return True

    def tell(self, reply: SocketReply, now: float) -> None:
        """Say how the waiting goes, where that changed."""
        self.shown = reply
        if reply != self._sent and now >= self._sent_at + RARELY:
            self._sent, self._sent_at = reply, now
            self.send(reply)

    def close(self) -> None:
        """End the connection."""
        self.peer.close()
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # at once for its other end
        close_aside(self.connection.detach())
