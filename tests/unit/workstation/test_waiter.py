# SPDX-License-Identifier: Apache-2.0
"""Who waits becomes a program that loads next to nothing, and then what it was."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.deadline import clock_boottime
from gpulock.workstation import waiter
from gpulock.workstation.wire import GRANTED, WAITING, SocketReply, encode_packet

AGAIN = "import os, socket; number = int(os.environ['GPULOCK_WAITED'].split()[0]); "
READ = f"{AGAIN}print(socket.socket(fileno=number).recv(999).decode())"
WHY = "2 GPUs asked for, 1 of 4 free (0: job 3)"
WAIT = encode_packet(SocketReply(WAITING, number=7, before=3, why=WHY))
YES = encode_packet(SocketReply(GRANTED, token="feed"))


def start(
    connection: socket.socket, seconds: float = 60.0, options: tuple[str, ...] = ()
) -> subprocess.Popen[bytes]:
    """Start one who waits, and then prints the last reply."""
    now = clock_boottime()
    number = connection.fileno()
    words = [str(number), str(now), str(now + seconds), "2 GPUs", sys.executable, "-c", READ]
    return subprocess.Popen(
        [sys.executable, "-IS", *options, str(Path(waiter.__file__)), *words],
        pass_fds=[number],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Give the two ends of a connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def test_the_last_reply_is_read_by_the_program_that_goes_on(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    ours.send(WAIT)
    ours.send(WAIT)
    ours.send(YES)
    with start(theirs) as process:
        out, err = process.communicate(timeout=60)
    assert "token=feed" in out.decode()
    place = "number 7, place 4 in the queue; 2 GPUs asked for, 1 of 4 free"
    assert err.decode() == f"gpulock: waiting for 2 GPUs: {place}\n"


@pytest.mark.parametrize("seconds", [60.0, 0.0])
def test_where_no_reply_comes_the_program_goes_on_all_the_same(
    ends: tuple[socket.socket, socket.socket], seconds: float
) -> None:
    ours, theirs = ends
    theirs.setblocking(False)
    if seconds:
        ours.close()
    with start(theirs, seconds) as process:
        process.communicate(timeout=60)
    assert process.returncode == (0 if seconds else 1)  # nothing was there to read


def test_ctrl_c_ends_it_without_a_word(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    ours.send(WAIT)
    with start(theirs) as process:
        assert process.stderr is not None
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == -signal.SIGINT


def loaded(stderr: bytes) -> set[str]:
    """Return the modules that a Python with `-X importtime` says it loaded."""
    lines = stderr.decode().splitlines()
    return {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}


def test_one_who_waits_loads_next_to_nothing_beside_python_itself(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """What it has for itself is 3 MB at most, by what it does not load."""
    timed = ("-X", "importtime")
    bare = subprocess.run(
        [sys.executable, "-IS", *timed, "-c", "pass"], capture_output=True, check=True
    )
    ours, theirs = ends
    ours.send(WAIT)
    ours.send(YES)
    with start(theirs, options=timed) as process:
        _, stderr = process.communicate(timeout=60)
    assert b"gpulock: waiting" in stderr
    assert loaded(stderr) - loaded(bare.stderr) <= {"select", "_socket"}
