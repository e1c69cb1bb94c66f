# SPDX-License-Identifier: Apache-2.0
"""Who is at the other end of a connection, and who answers for it."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.errors import Refusal
from gpulock.node.procfs import Proc
from gpulock.workstation.peer import Peer, identify_peer
from gpulock.workstation.wire import new_packet_socket
from tests.support.trees import FakeProc

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
        peer = identify_peer(connection, proc)
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
    with pytest.raises((Refusal, ProcessLookupError)):
        identify(listening, Proc(str(FakeProc(tmp_path / "proc").root)))
    os.waitpid(pid, 0)


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
