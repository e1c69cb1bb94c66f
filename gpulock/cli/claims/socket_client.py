# SPDX-License-Identifier: Apache-2.0
"""Ask gpulockd for what an ordinary user may not do: the other end of its socket.

A claim's owner is the process that the request names. gpulockd checks that it is of the user who
the kernel says connected. What is granted is the daemon's word; the devices are read from the
driver here as well.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from typing import NamedTuple

import click

from gpulock.alloc.claim import Grant
from gpulock.alloc.same_job import granted_devices
from gpulock.cli.session import CommandRefusedError, owns_lock_dir, uid_to_user_name
from gpulock.daemon.serve_policy import scheduler_from_settings
from gpulock.deadline import Deadline, clock_boottime
from gpulock.errors import BROKEN, KINDS, Refusal
from gpulock.node.context import Node
from gpulock.store import atomic
from gpulock.store.owner import Owner
from gpulock.text.words import name_devices
from gpulock.workstation import waiter
from gpulock.workstation.peer import CREDENTIALS
from gpulock.workstation.wire import (
    FOR_EVER,
    GRANTED,
    LARGEST,
    READ,
    REFUSED,
    RELEASE,
    RELEASED,
    SOCKET,
    WAITING,
    SocketReply,
    SocketRequest,
    encode_packet,
    new_packet_socket,
    parse_reply,
)

BACK_SECONDS = 60.0  # a gpulockd that is restarted comes back within that
PAUSE = 0.5  # seconds between two tries
READ_SECONDS = 15.0  # until gpulockd has read a request: a reconcile may take that long
ANSWER_SECONDS = 60.0  # until the last reply to a request, behind what a claim waits
_SEND_TIMEOUT = struct.Struct("ll")  # struct timeval


class NoDaemonReplyError(Refusal):
    """gpulockd gave no reply that can be read: it ended, or hangs.

    Where it ended, the next gpulockd keeps our place in the queue.
    """

    def __init__(self) -> None:
        super().__init__(BROKEN, "no answer came from gpulockd", "try again")


class NoDaemonError(CommandRefusedError):
    """gpulockd cannot be reached at its socket: it ended, is being restarted, or hangs."""


def is_daemon_needed(node: Node) -> bool:
    """Return whether the caller must ask the daemon: LOCK_DIR is there, and another's."""
    return os.path.lexists(node.store.path) and not owns_lock_dir(node)


def is_daemon_serving(node: Node) -> bool:
    """Return whether a gpulockd serves users: then who owns LOCK_DIR queues as well."""
    try:
        connect_to_daemon(node).close()
    except (Refusal, OSError):
        return False
    return True


def connect_to_daemon(node: Node) -> socket.socket:
    """Return a connection to this node's gpulockd; raise Refusal where nobody serves."""
    path = node.store.path
    connection = new_packet_socket()
    # connect(2) waits for room in the queue of a gpulockd that hangs
    limit = _SEND_TIMEOUT.pack(int(READ_SECONDS), 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    try:
        folder = os.open(path, atomic.OPEN_DIRECTORY)
        try:
            connection.connect(f"/proc/self/fd/{folder}/{SOCKET}")
        finally:
            os.close(folder)
    except OSError as fault:
        connection.close()
        if owned := scheduler_from_settings(node):
            raise CommandRefusedError(owned, "submit a job that asks it for GPUs") from fault
        name, own = uid_to_user_name(os.lstat(path).st_uid), owns_lock_dir(node)
        who = "" if own else f"only {name} may change the locks in {path}, and "
        if isinstance(fault, FileNotFoundError):
            way = "" if own else f"run it as {name}; or ask {name}: "
            raise CommandRefusedError(
                f"{who}gpulockd does not serve users here",
                f"{way}it does not run, or USER_CLAIMS is not yes (gpulock doctor)",
            ) from fault
        what = "answer" if isinstance(fault, BlockingIOError) else "run"
        do = "start gpulockd again" if own else f"ask {name} to start gpulockd again"
        raise NoDaemonError(f"{who}gpulockd does not {what}", do) from fault
    return connection


class ClaimWait(NamedTuple):
    """How a claim waits: for what, until when, and which program is to go on after it.

    `end` is in CLOCK_BOOTTIME seconds. Without a program this one waits itself. `handed` is the
    socket of a request that was sent before.
    """

    what: str
    end: float
    program: tuple[str, ...] = ()
    handed: socket.socket | None = None


def take_handed_wait(what: str, wait: float, program: tuple[str, ...]) -> ClaimWait:
    """Return how a claim waits; where `waiter` has waited in our place, from there on."""
    number, _, end = os.environ.pop(waiter.ENVIRONMENT, "").partition(" ")
    try:
        handed = socket.socket(fileno=int(number))
        handed.set_inheritable(False)
        return ClaimWait(what, float(end), program, handed)
    except (OSError, ValueError):
        return ClaimWait(what, clock_boottime() + wait, program)


def wait_in_queue(connection: socket.socket, how: ClaimWait, deadline: Deadline) -> None:
    """Return once the next packet is the last reply, or there is none in time.

    With a program to go on with this process becomes `waiter`, which loads next to nothing and
    then starts that program.
    """
    number, until = connection.fileno(), clock_boottime() + deadline.left()
    connection.settimeout(min(max(0.001, deadline.left()), waiter.LONGEST_WAIT))
    first = parse_reply(connection.recv(LARGEST, socket.MSG_PEEK))
    if first.state == WAITING and how.program:
        connection.settimeout(None)
        connection.set_inheritable(True)
        words = [str(number), str(how.end), str(until), how.what, *how.program]
        try:
            os.execv(sys.executable, [sys.executable, "-IS", waiter.__file__, *words])
        except OSError:
            connection.set_inheritable(False)  # then we wait ourselves
    waiter.wait_for_reply(number, how.what, until)


def send_daemon_request(
    node: Node, request: SocketRequest, deadline: Deadline, how: ClaimWait | None = None
) -> SocketReply:
    """Send a request and return the last reply; raise Refusal.

    `how` it waits, for a claim. Where it is not even read, that is told; without time to wait it
    is a Refusal.
    """
    handed = how.handed if how else None
    with handed or connect_to_daemon(node) as connection:
        try:
            if handed is None:
                connection.send(encode_packet(request))
                await_reading(connection, request.wait)
            if how:
                wait_in_queue(connection, how, deadline)
            connection.settimeout(min(max(0.001, deadline.left()), waiter.LONGEST_WAIT))
            reply = parse_reply(connection.recv(LARGEST))
        except (OSError, ValueError) as fault:
            raise NoDaemonReplyError from fault
    if reply.state == REFUSED:
        kind = reply.kind if reply.kind in KINDS else BROKEN
        devices = node.devices_if_driver()
        why, do = name_devices(reply.why, devices), name_devices(reply.do, devices, "")
        raise Refusal(kind, why, do)
    return reply


def await_reading(connection: socket.socket, wait: float) -> None:
    """Return once a request was read; raise Refusal where that takes too long, or OSError."""
    connection.settimeout(READ_SECONDS)
    try:
        first = connection.recv(LARGEST, socket.MSG_PEEK)
    except socket.timeout:  # TimeoutError from Python 3.10 on
        # it takes connections and reads nothing, as when it is stopped: the end that listens
        # (unix(7), SO_PEERCRED)
        data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        why = f"gpulockd, pid {CREDENTIALS.unpack(data)[0]}, does not answer"
        refusal = Refusal(BROKEN, why, "ask root to start gpulockd again")
        if wait <= READ_SECONDS:
            raise refusal from None
        click.echo(f"gpulock: {refusal.why}; {refusal.do}", err=True)
        connection.settimeout(None if wait == FOR_EVER else wait)
        first = connection.recv(LARGEST, socket.MSG_PEEK)
    if parse_reply(first).state == READ:
        connection.recv(LARGEST)


def request_daemon_claim(
    node: Node, record: Owner, request: SocketRequest, how: ClaimWait
) -> Grant:
    """Have the daemon claim for a process of ours; raise Refusal."""
    end = Deadline(how.end - clock_boottime())
    lost: Deadline | None = None
    while True:
        request = request._replace(wait=end.left())
        ended: Exception
        try:
            reply = send_daemon_request(node, request, Deadline(end.left() + ANSWER_SECONDS), how)
            break
        except NoDaemonReplyError as nothing:
            ended = nothing
        except CommandRefusedError as nobody:
            if lost is None and not isinstance(nobody, NoDaemonError):
                raise
            ended = nobody
        how = how._replace(handed=None)
        lost = lost or Deadline(BACK_SECONDS)
        if not (end.left() and lost.left()):
            raise ended
        time.sleep(PAUSE)
    if reply.state != GRANTED:
        raise Refusal(BROKEN, f"gpulockd answers {reply.state!r}", "is it the same version?")
    if reply.why:
        click.echo(f"gpulock: {reply.why}", err=True)
    granted = granted_devices(node.devices(), {*reply.devices}, reply.places)
    if len(granted) != len(reply.devices):
        raise Refusal(BROKEN, f"not all of {', '.join(reply.devices)} are there", "see status")
    own = record.copy(token=reply.token, devices=reply.devices, places=reply.places)
    return Grant(granted, own, True, 0.0)


def request_daemon_release(node: Node, pid: int, devices: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Have the daemon free what a process holds, or these devices; raise Refusal.

    The process may have ended, and what it started hold its claim.
    """
    held = [lock.owner for lock in node.store.read_all_locks().values() if lock.owner]
    own = [one.start for one in held if one.scheduler == "process" and one.pid == pid]
    start = 0 if devices else max(own, default=0)
    return request_daemon_act(node, SocketRequest(RELEASE, pid, start, devices=devices)).devices


def request_daemon_act(node: Node, request: SocketRequest) -> SocketReply:
    """Have the daemon do something that it answers at once; raise Refusal."""
    reply = send_daemon_request(node, request, Deadline(ANSWER_SECONDS))
    if reply.state != RELEASED:
        raise Refusal(BROKEN, f"gpulockd answers {reply.state!r}", "is it the same version?")
    return reply
