# SPDX-License-Identifier: Apache-2.0
"""What client and daemon say, and who says it: nothing else is a request."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.node.procfs import Proc
from gpulock.workstation import peer as peer_module
from gpulock.workstation.peer import Peer, identify_peer
from gpulock.workstation.wire import (
    CLAIM,
    FIRST_LINES,
    LARGEST,
    WAITING,
    SocketReply,
    SocketRequest,
    encode_packet,
    new_packet_socket,
    parse_reply,
    parse_request,
    request_words,
)
from tests.support.faults import returning
from tests.support.trees import FakeProc, bus


def asked(*lines: str) -> bytes:
    return "\n".join([FIRST_LINES[SocketRequest], *lines]).encode() + b"\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"GET / HTTP/1.1\r\n",
        asked(),
        asked("act=reap"),
        asked("act=claim", "pid=1", "start=1"),
        asked("act=claim", "number=0"),
        asked("act=claim", "number=-1"),
        asked("act=claim", "number=99999"),
        asked("act=claim", "number=1", "wait=-1"),
        asked("act=claim", "number=1", "wait=nan"),
        asked("act=claim", "number=1", "wait=soon"),
        asked("act=claim", "number=1", "comment=root's own"),
        asked("act=claim", "number=2", f"devices={bus(0)},{bus(0)}"),
        asked("act=claim", "number=2", f"devices={bus(0)}"),
        asked("act=claim", "number=1", "devices=0 1 2 3: taken out of service by root"),
        asked("act=claim", "number=1", f"devices={bus(0)}{'0' * 40}"),
        asked("act=claim", "number=1", "preferred=all of them"),
        asked("act=claim", "number=1", "device_kind=model:\u00e4"),
        asked("act=claim", "number=1", f"device_kind=model:{'a' * 40}"),
        asked("act=claim", "act=claim", "number=1"),
        asked("act=reserve", "seconds=60"),
        asked("act=reserve", "seconds=60", f"devices={bus(0)},{bus(1)}"),
        asked("act=claim", "number=1", "device_kind=a100"),
        asked("act=claim", "number=1", "device_kind=share"),
        asked("act=claim", "number=1", "device_kind=any", "share=1"),
        asked("act=claim", "number=1", "device_kind=any", f"devices={bus(0)}"),
    ],
)
@pytest.mark.attack
def test_anything_else_is_no_request(data: bytes) -> None:
    """Tried: besides nonsense, names of devices that read like a line of gpulock's in the queue.

    Stopped by: a request names ids of devices, and kinds of 40 characters at most.
    """
    with pytest.raises(ValueError):
        parse_request(data)


@pytest.mark.parametrize(
    ("note", "read"), [("für Diss", "für Diss"), ("a\x1bb\u2028", "a?b?"), ("ü" * 81, "ü" * 80)]
)
def test_a_comment_is_text_in_any_language_and_of_one_line(note: str, read: str) -> None:
    assert parse_request(asked("act=claim", "number=1", f"note={note}")).note == read


def test_a_call_is_told_by_what_it_asks_for_and_its_comment() -> None:
    """The queue shows that, and two calls of one user would look the same."""
    asked_for = SocketRequest(CLAIM, number=2, note='a "b"')
    assert request_words(asked_for) == "2 GPUs, \"a 'b'\""
    assert request_words(asked_for._replace(number=1, share=1, note="")) == "1 share"


def test_a_reply_is_one_message_whatever_it_says() -> None:
    told = SocketReply(WAITING, before=3, why="a\nstate=granted\x1b\0", do="x" * LARGEST)
    data = encode_packet(told)
    found = parse_reply(data)
    assert (len(data) < LARGEST, found.state, found.before) == (True, WAITING, 3)
    assert found.why.startswith("a") and found.why.isprintable()


# --- who is at the other end of a connection, and who answers for it ------------------------------

ACCOUNT, SUBORDINATE = 61_001, 3_000_005
CLONE_NEWUSER = 0x10000000


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[socket.socket]:
    with new_packet_socket() as found:
        found.bind(str(tmp_path / "socket"))
        found.listen()
        found.settimeout(10)
        yield found


def identify(listening: socket.socket, proc: Proc) -> Peer:
    """Return who connected; its pidfd is closed."""
    with listening.accept()[0] as connection:
        peer = identify_peer(connection, proc, lambda _: False)
    peer.close()
    return peer


def test_a_process_that_ended_before_it_was_looked_at_is_nobody(
    tmp_path: Path, listening: socket.socket
) -> None:
    pid = os.fork()
    if not pid:
        new_packet_socket().connect(str(tmp_path / "socket"))
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    proc = FakeProc(tmp_path / "proc")
    proc.add(pid)
    with pytest.raises(ProcessLookupError):
        identify(listening, Proc(str(proc.root)))
    os.waitpid(pid, 0)


@pytest.mark.attack
def test_a_number_that_is_another_users_process_by_now_is_nobody(
    tmp_path: Path, listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried: end as soon as connected, so that the number goes to a process in another's namespace.

    Stopped by: who answers for a caller is asked of a process with its uid alone.
    """
    proc = FakeProc(tmp_path / "proc")
    proc.add(os.getpid())
    monkeypatch.setattr(Proc, "namespace_owner", returning(os.geteuid()))
    monkeypatch.setattr(peer_module, "read_peer_ids", returning((os.getpid(), ACCOUNT)))
    with new_packet_socket() as caller:
        caller.connect(str(tmp_path / "socket"))
        with pytest.raises(ProcessLookupError):
            identify(listening, Proc(str(proc.root)))


@pytest.mark.root
def test_a_caller_with_a_uid_of_32_bits_is_known_by_it(
    tmp_path: Path, listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = 3_000_000_001
    monkeypatch.chdir(tmp_path)
    os.chmod(tmp_path, 0o755)
    os.chmod(tmp_path / "socket", 0o666)
    with new_packet_socket() as caller:
        os.seteuid(uid)
        try:
            caller.connect("socket")
            assert identify(listening, Proc()).uid == uid
        finally:
            os.seteuid(0)


@pytest.mark.root
def test_a_subordinate_uid_is_its_users(tmp_path: Path, listening: socket.socket) -> None:
    """As newuidmap makes it, and from a namespace within that namespace."""
    ready, told = os.pipe()
    go, went = os.pipe()
    end, over = os.pipe()
    os.chmod(tmp_path, 0o755)
    os.chmod(tmp_path / "socket", 0o666)
    pid = os.fork()
    if not pid:
        try:
            os.chdir(tmp_path)
            os.setresgid(65_534, 65_534, 65_534)
            os.setresuid(ACCOUNT, ACCOUNT, ACCOUNT)
            libc = ctypes.CDLL(None)
            assert libc.unshare(CLONE_NEWUSER) == 0
            os.write(told, b"x")
            os.read(go, 1)
            os.setresuid(5, 5, 5)
            assert libc.unshare(CLONE_NEWUSER) == 0
            caller = new_packet_socket()
            caller.connect("socket")
            os.read(end, 1)
        finally:
            os._exit(0)
    assert os.read(ready, 1) == b"x"
    Path(f"/proc/{pid}/uid_map").write_text(f"0 {ACCOUNT} 1\n1 3000001 100\n")
    Path(f"/proc/{pid}/gid_map").write_text("0 65534 1\n")
    os.write(went, b"x")
    peer = identify(listening, Proc())
    assert (peer.pid, peer.uid, peer.account) == (pid, SUBORDINATE, ACCOUNT)
    os.write(over, b"x")
    os.waitpid(pid, 0)
    for fd in (ready, told, go, went, end, over):
        os.close(fd)
