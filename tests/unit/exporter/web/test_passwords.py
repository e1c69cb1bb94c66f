# SPDX-License-Identifier: Apache-2.0
"""Passwords: checked with bcrypt, remembered, and never a way to stop others."""

from __future__ import annotations

import base64
import threading

import bcrypt
import pytest
from gpulock_exporter.web.http import HttpRequest
from gpulock_exporter.web.listen import peer_address
from gpulock_exporter.web.server import ServerLimits
from gpulock_exporter.web.webconfig import (
    PLACES,
    PLACES_OF_ONE,
    Passwords,
    client_network,
    parse_basic_credentials,
)

from tests.support.wait import wait_until


def hashed(password: bytes, prefix: str = "2b", cost: int = 4) -> str:
    return bcrypt.hashpw(password, bcrypt.gensalt(cost)).decode().replace("$2b$", f"${prefix}$")


class Users(Passwords):
    """Users and their hashes, with the hashes that bcrypt was asked about."""

    def __init__(self, **hashes: str) -> None:
        self.asked: list[str] = []
        super().__init__(hashes, self._ask)

    def _ask(self, password: bytes, known: bytes) -> bool:
        self.asked.append(known.decode())
        return bcrypt.checkpw(password, known)

    def accepts(self, user: str, password: bytes) -> bool | None:
        return self.is_right(user, password, "a")


def basic(user: str, password: bytes) -> str:
    return "Basic " + base64.b64encode(user.encode() + b":" + password).decode()


def test_a_hash_that_was_made_elsewhere_is_known() -> None:
    known = "$2y$10$QOauhQNbBCuQDKes6eFzPeMqBSjb7Mr5DUmpZ/VcEd00UAV/LDeSi"  # Prometheus's decoy
    users = Users(alice=known, old=hashed(b"right", "2a"))
    pairs = (("alice", b"fakepassword"), ("old", b"right"), ("old", b"x"), ("bob", b"right"))
    assert [users.accepts(*pair) for pair in pairs] == [True, True, False, False]


@pytest.mark.slow
def test_a_verdict_is_remembered_and_wrong_ones_push_no_right_one_out() -> None:
    users = Users(alice=hashed(b"right"))
    for _ in range(5):
        assert users.accepts("alice", b"right") is True
        assert users.accepts("alice", b"wrong") is False
    assert len(users.asked) == 2
    for n in range(300):
        users.accepts("alice", f"wrong{n}".encode())
    assert users.accepts("alice", b"right") is True
    assert len(users.asked) == 302
    users.accepts("alice", b"wrong0")
    assert len(users.asked) == 303  # forgotten: no more than 256 are kept


def test_an_unknown_user_costs_a_check_of_the_dearest_hash() -> None:
    cheap, dear = hashed(b"a", cost=4), hashed(b"b", cost=5)
    users = Users(alice=cheap, bob=dear)
    assert users.accepts("carol", b"b") is False
    assert users.asked == [dear]


@pytest.mark.parametrize("password", [b"a" * 73, b"right\0more", b""])
def test_what_bcrypt_would_cut_short_is_wrong_and_takes_as_long(password: bytes) -> None:
    users = Users(alice=hashed(b"a" * 72), bob=hashed(b"right"))
    assert [users.accepts(user, password) for user in ("alice", "bob")] == [False, False]
    assert len(users.asked) == 2


def test_the_same_digest_does_not_stand_for_another_user() -> None:
    users = Users(ab=hashed(b"c"), a=hashed(b"x"))
    pairs = (("a", b"bc"), ("ab", b"c"), ("a", b"bc"))
    assert [users.accepts(*pair) for pair in pairs] == [False, True, False]


@pytest.mark.parametrize(
    ("header", "credentials"),
    [
        (basic("alice", b"a:b"), ("alice", b"a:b")),
        (basic("alice", b"").replace("Basic", "bAsIc"), ("alice", b"")),
        (basic("ältere", b"\xff"), ("ältere", b"\xff")),
        *[(wrong, None) for wrong in ("", "Basic", "Basic ????", "Basic YQ", "Bearer YTpi")],
        ("Basic " + base64.b64encode(b"no colon").decode(), None),
        ("Basic " + base64.b64encode(b"\xff:x").decode(), None),
        (basic("a", b"b") + ", " + basic("c", b"d"), None),  # two headers
        ("Basic \udcff", None),
    ],
)
def test_credentials_are_read_or_not_there(
    header: str, credentials: tuple[str, bytes] | None
) -> None:
    assert parse_basic_credentials(header) == credentials


def test_a_request_is_asked_for_a_password_and_says_nothing_of_users() -> None:
    users = Users(alice=hashed(b"right"))
    right, wrong, stranger = (
        users.refusal(HttpRequest("/", headers={"authorization": basic(*pair)}, peer="::1"))
        for pair in (("alice", b"right"), ("alice", b"wrong"), ("nobody", b"wrong"))
    )
    assert right is None
    assert wrong == stranger == users.refusal(HttpRequest("/", peer="::1"))
    assert wrong is not None
    assert wrong.status == 401
    assert ("WWW-Authenticate", 'Basic realm="gpulock"') in wrong.headers


class Crowd:
    """Clients that guess, each guess another, while the first check takes its time."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.order: list[bytes] = []
        self.users = Passwords({"alice": hashed(b"right")}, self._check)
        self.answers: list[tuple[str, bool | None]] = []
        self.threads: list[threading.Thread] = []

    def _check(self, password: bytes, known: bytes) -> bool:
        self.open.wait(100)
        self.order.append(password)
        if password == b"salt":
            raise ValueError("invalid salt")
        return password == b"right"

    def ask(self, client: str, password: bytes = b"") -> None:
        """Let a client ask; return when it has a place, or an answer."""
        guess = password or f"{client} {len(self.threads)}".encode()
        self.threads.append(threading.Thread(target=self._run, args=(client, guess)))
        self.threads[-1].start()
        wait_until(self._is_settled, why="a place or an answer")

    def _run(self, client: str, password: bytes) -> None:
        self.answers.append((client, self.users.is_right("alice", password, client)))

    def _is_settled(self) -> bool:
        return self.users.waiting + len(self.answers) == len(self.threads)

    def end(self) -> None:
        self.open.set()
        for thread in self.threads:
            thread.join()


@pytest.mark.attack
def test_who_fills_all_places_keeps_nobody_else_out() -> None:
    """Tried: as many wrong passwords at once as may wait, from the address of a user or another.

    Stopped by: few of one address wait, of all fewer than connections, checks in their order.
    """
    assert 16 * PLACES_OF_ONE <= PLACES <= ServerLimits.connections - 32
    crowd = Crowd()
    for _ in range(PLACES_OF_ONE + 1):
        crowd.ask("flood")
    assert crowd.answers == [("flood", None)], "all its places are taken"
    crowd.ask("user", b"right")
    crowd.ask("other", b"salt")
    crowd.end()
    assert crowd.order[PLACES_OF_ONE] == b"right"
    assert dict(crowd.answers[1:]) == {"flood": False, "user": True, "other": False}
    assert crowd.users.waiting == 0


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        ("10.0.0.1", "10.0.0.1/32"),
        ("::ffff:10.0.0.1", "10.0.0.1/32"),
        ("127.0.0.1", "127.0.0.1/32"),
        ("127.0.0.2", "127.0.0.0/8"),
        ("127.3.2.1", "127.0.0.0/8"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("2001:db8:0:1:ffff::", "2001:db8:0:1::/64"),
        ("::1", "::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_one_client_may_have_many_addresses(peer: str, client: str) -> None:
    assert client_network(peer_address((peer, 80, 0, 0))) == client
