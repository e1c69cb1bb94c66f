# SPDX-License-Identifier: Apache-2.0
"""Hostile and slow clients: a scrape beside them answers, and they cost little and end in time.

Nothing here asks what kind of server it is: it is a process, whose sockets and memory are those
that the kernel counts, and which a signal ends.
"""

from __future__ import annotations

import select
import signal
import socket
import ssl
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import bcrypt
import pytest
from gpulock_exporter.web.server import ENDING, ServerLimits
from gpulock_exporter.web.webconfig import PLACES_OF_ONE

from tests.exporter.certificates import trusting, write_web_config
from tests.exporter.servers import (
    LARGE,
    SOUND,
    Child,
    as_user,
    dial,
    dial_many,
    exchange,
    left_open,
    serving,
)
from tests.exporter.whole import pss_mib
from tests.support.wait import let_work, wait_until

PLACED = ServerLimits.connections
OWN = 8  # sockets of a server beside its connections, at most
LONG = 3600  # seconds: no attacker's own deadline makes room for a scrape
LONG_ANSWER = SOUND.replace(b"/metrics", b"/big")


@pytest.fixture(scope="module")
def secure(authority: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Child]:
    """A server with TLS, in which nobody's deadline passes."""
    yield from with_deadlines(LONG, authority, tmp_path_factory.mktemp("secure"))


@pytest.fixture(scope="module")
def hasty(authority: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Child]:
    """A server with TLS whose deadlines pass soon."""
    yield from with_deadlines(2, authority, tmp_path_factory.mktemp("hasty"))


def with_deadlines(seconds: int, authority: Path, folder: Path) -> Generator[Child]:
    """Start a server with this deadline of each phase."""
    config = write_web_config(folder, authority)
    own = dict.fromkeys(("arrive_seconds", "write_seconds"), seconds)
    more = dict.fromkeys(("handle_seconds", "stop_seconds"), LONG)
    with serving(folder, config, client=trusting(authority), **own, **more) as child:
        yield child


@contextmanager
def closing(connections: list[socket.socket]) -> Generator[list[socket.socket]]:
    try:
        yield connections
    finally:
        for one in connections:
            one.close()


def holds_out(child: Child) -> None:
    """Check what must hold while attackers are connected who need never go by themselves."""
    for _ in range(3):
        child.scrape()
    assert child.sockets() <= PLACED + ENDING + OWN
    wait_until(
        lambda: child.sockets() <= PLACED + OWN, why="the threads of those that were cut to end"
    )


@pytest.mark.parametrize("shakes_hands", [True, False])
def test_1000_idle_connections(secure: Child, hasty: Child, shakes_hands: bool) -> None:
    """Silent behind their handshake, or before it."""
    contexts = [child.client if shakes_hands else None for child in (secure, hasty)]
    with closing(dial_many(secure.port, contexts[0], 1000)) as attackers:
        assert len(attackers) > 800
        holds_out(secure)
    with closing(dial_many(hasty.port, contexts[1], 200)) as attackers:
        wait_until(lambda: left_open(attackers) == 0, why="none to be left")


def outlive(attackers: list[socket.socket], words: bytes) -> bytes:
    """Send a byte on each now and then until none is left; return what there was no time for."""
    rest = iter(words)  # for most of a minute

    def gone() -> bool:
        drop = bytes([next(rest)])
        for one in attackers:
            with suppress(OSError):
                one.sendall(drop)
        return left_open(attackers) == 0

    with closing(attackers):
        wait_until(gone, why="none to be left")
    return bytes(rest)


def test_a_dripping_header_does_not_live_longer_for_dripping(hasty: Child) -> None:
    attackers = [dial(hasty.port, hasty.client) for _ in range(60)]
    assert outlive(attackers, b"GET /metrics HTTP/1.1\r\nX-Slow: " + b"a" * 1000)
    holds_out(hasty)


def test_slow_handshakes_do_not_live_longer_either(hasty: Child) -> None:
    hello = ssl.MemoryBIO()
    assert hasty.client is not None
    client = hasty.client.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="127.0.0.1")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    attackers = [dial(hasty.port) for _ in range(100)]
    assert outlive(attackers, hello.read()), "none was whole"


def test_a_process_short_of_descriptors_still_answers(tmp_path: Path) -> None:
    with serving(tmp_path, descriptors=48, arrive_seconds=LONG) as child:
        attackers = [dial(child.port) for _ in range(200)]
        with closing(attackers):
            for _ in range(5):
                child.scrape()
    assert child.errors.read_text().count("Too many open files") == 1


def test_a_large_header_is_refused_at_its_limit_and_many_take_little_memory(secure: Child) -> None:
    """http.server by itself takes 100 lines of 64 KiB: 6.4 MiB for each connection."""
    for size in (100_000, 10_000_000):
        with dial(secure.port, secure.client) as one:
            answer, closed = exchange(one, SOUND[:-2] + b"X-Huge: " + b"a" * size)
        assert closed and (answer.startswith(b"HTTP/1.0 431 ") or (size > 10**6 and not answer))
    before = pss_mib(secure.process.pid)
    line = b"X-Large: " + b"a" * 60_000 + b"\r\n"
    with closing(dial_many(secure.port, secure.client, PLACED)) as attackers:
        for one in attackers:
            one.settimeout(1)
            with suppress(OSError):
                one.sendall(SOUND[:-2] + line * 90)
        assert pss_mib(secure.process.pid) - before < 64
        holds_out(secure)


def test_200_readers_that_read_nothing(secure: Child, hasty: Child) -> None:
    with closing(deaf_readers(secure)) as attackers:
        assert len(attackers) > PLACED, "more than there are places"
        holds_out(secure)
    with closing(deaf_readers(hasty)) as attackers:
        wait_until(lambda: hasty.sockets() <= hasty.at_rest, why="none to be left")
        for one in attackers:  # what was in flight is there, what was not never comes
            received, closed = exchange(one, b"")
            assert closed
            assert len(received) < 2_000_000


def deaf_readers(child: Child) -> list[socket.socket]:
    """Ask for what is long, and read nothing of it."""
    attackers = [dial(child.port, child.client) for _ in range(100)]
    for one in attackers:
        with suppress(OSError):
            one.sendall(LONG_ANSWER)
    for _ in range(100):
        for one in dial_many(child.port, child.client, 1):
            attackers.append(one)
            with suppress(OSError):  # it has made room for a later one
                one.sendall(LONG_ANSWER)
    return attackers


@pytest.mark.attack
def test_attackers_of_every_kind_who_come_again(secure: Child) -> None:
    """Tried: silence, half a request, a reader that reads nothing, no TLS; again and again.

    Stopped by: a deadline for each phase, and a newcomer's place is that of the oldest.
    """
    stop = threading.Event()
    words = (b"", SOUND[:-4], LONG_ANSWER, b"\x16\x03\x01")

    def attack(word: bytes, context: ssl.SSLContext | None) -> None:
        while not stop.is_set():
            held: list[socket.socket] = []
            with closing(held):
                for _ in range(40):
                    try:
                        held.append(dial(secure.port, context))
                        held[-1].sendall(word)
                    except OSError:
                        continue
                stop.wait(0.3)

    attackers = [
        threading.Thread(target=attack, args=(word, context))
        for word in words
        for context in (None, secure.client)
    ]
    for thread in attackers:
        thread.start()
    try:
        for _ in range(20):
            secure.scrape()
    finally:
        stop.set()
        for thread in attackers:
            thread.join()


@pytest.mark.parametrize("with_tls", [False, True])
def test_a_response_under_way_is_finished_after_sigterm(
    with_tls: bool, authority: Path, tmp_path: Path
) -> None:
    config = write_web_config(tmp_path, authority) if with_tls else None
    client = trusting(authority) if with_tls else None
    with serving(tmp_path, config, client=client, stop_seconds=60) as child:
        with dial(child.port, client, buffer=16384) as slow:
            slow.sendall(SOUND.replace(b"/metrics", b"/big"))
            received = slow.recv(1000)
            assert received.startswith(b"HTTP/1.0 200 ")
            child.process.send_signal(signal.SIGTERM)
            wait_until(lambda: refuses(child.port), why="the port to be closed")
            assert child.process.poll() is None
            while part := slow.recv(4096):
                if len(received) < LARGE - 100_000 <= len(received) + len(part):
                    let_work(1)  # all is written by now: the rest is the kernel's to deliver
                received += part
            header, _, body = received.partition(b"\r\n\r\n")
            assert len(body) == LARGE, header
        assert child.process.wait(60) == 0


def refuses(port: int) -> bool:
    try:
        dial(port).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:
        return False  # it stopped to listen while the kernel made this connection
    return False


def test_who_never_reads_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with serving(tmp_path, stop_seconds=1, write_seconds=3600) as child, dial(child.port) as stuck:
        stuck.sendall(SOUND.replace(b"/metrics", b"/big"))
        assert select.select([stuck], [], [], 60)[0], "its answer has begun"
        child.process.send_signal(signal.SIGTERM)
        assert child.process.wait(60) == 0


GUESSERS = PLACES_OF_ONE - 1


def with_passwords(folder: Path, cost: int) -> Path:
    """Write a web configuration of two users; return its path."""
    hashed = bcrypt.hashpw(b"right", bcrypt.gensalt(cost, b"2b")).decode().replace("$2b$", "$2y$")
    config = folder / "web-config.yml"
    config.write_text(f"basic_auth_users:\n  prometheus: {hashed}\n  alice: {hashed}\n")
    return config


@pytest.mark.attack
def test_a_first_login_waits_behind_as_many_guessers_of_its_address_as_may_wait(
    tmp_path: Path,
) -> None:
    """Tried: one guesser less than may wait, on and on, from the address of a first login.

    Stopped by: checks come in their order.
    """
    with serving(tmp_path, with_passwords(tmp_path, 8)) as child:
        stop = threading.Event()
        results: list[int] = []

        def guess(who: int) -> None:
            tries = 0
            while not stop.is_set():
                headers = as_user("alice", f"wrong{who}.{tries}")
                results.append(child.get(headers).status)
                tries += 1

        guessers = [threading.Thread(target=guess, args=(n,)) for n in range(GUESSERS)]
        for thread in guessers:
            thread.start()
        try:
            wait_until(lambda: len(results) > GUESSERS, why="each to have guessed once")
            first = child.get(as_user("alice", "right")).status
            child.scrape(as_user("prometheus", "right"), "127.0.0.2")
        finally:
            stop.set()
            for thread in guessers:
                thread.join()
        assert first == 200
        assert set(results) == {401}
