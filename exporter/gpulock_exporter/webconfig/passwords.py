# SPDX-License-Identifier: Apache-2.0
"""Users with passwords: bcrypt verdicts, one check at a time, remembered.

bcrypt is slow on purpose (48 ms at cost 10), so strangers could spend all of a node's time on wrong
passwords. One thread does the checks. Clients take turns, so that a thousand from one address delay
another by one check each. A verdict is remembered even where its client has gone meanwhile: a
scrape that came too early for it finds it the next time.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from gpulock_exporter.web.http import HttpRequest, HttpResponse, error_response

# For checks that wait, of one client or of all; the other connections are for who needs none.
PLACES = 128
PLACES_OF_NEWCOMERS = 16  # more, for clients of which no check waits
_WRONG_REMEMBERED = 256
_LONGEST_PASSWORD = 72  # bcrypt knows no more bytes of it
_CHALLENGE = ("WWW-Authenticate", 'Basic realm="gpulock"')


class CheckQueue:
    """Slow checks by one thread: each client has its turn, and its own come in their order."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[tuple[Future[bool], Callable[[], bool]]]] = {}
        self._lock = threading.Lock()
        self._is_working = False

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def run(self, client: str, check: Callable[[], bool]) -> bool | None:
        """Return what the check says; None when there is no place for it."""
        asked: Future[bool] = Future()
        with self._lock:
            places = PLACES + (0 if client in self._waiting else PLACES_OF_NEWCOMERS)
            if len(self) >= places:
                return None
            self._waiting.setdefault(client, deque()).append((asked, check))
            if not self._is_working:
                threading.Thread(target=self._work, name="passwords", daemon=True).start()
                self._is_working = True
        return asked.result()

    def _work(self) -> None:
        """Check until nobody waits."""
        while True:
            with self._lock:
                client = next(iter(self._waiting), None)
                if client is None:
                    self._is_working = False
                    return
                waiting = self._waiting.pop(client)
                asked, check = waiting.popleft()
                if waiting:
                    self._waiting[client] = waiting  # behind all others
            try:
                asked.set_result(check())
            except ValueError:  # a hash that bcrypt dislikes
                asked.set_result(False)


class Passwords:
    """Check users' passwords against their bcrypt hashes."""

    def __init__(self, hashes: Mapping[str, str], check: Callable[[bytes, bytes], bool]) -> None:
        """`check` is bcrypt.checkpw, of a password and a hash."""
        self._hashes = {user: hashed.encode() for user, hashed in hashes.items()}
        self._check = check
        self._queue = CheckQueue()
        # A stranger's name takes as long as the dearest known one.
        self._decoy = max(hashes.values(), key=bcrypt_cost).encode()
        self._key = os.urandom(32)
        self._right: dict[str, bytes] = {}  # at most one a user, so the wrong ones push none out
        self._wrong: dict[bytes, None] = {}  # in the order that they came
        self._lock = threading.Lock()

    def refusal(self, request: HttpRequest) -> HttpResponse | None:
        """Return the answer to a request that may not pass, None for one that may."""
        given = parse_basic_credentials(request.headers.get("authorization", ""))
        is_right = given is not None and self.is_right(*given, client_network(request.peer))
        if is_right is None:
            return error_response(503, "too many passwords are being checked", ("Retry-After", "1"))
        what = "a user name and its password are needed"
        return None if is_right else error_response(401, what, _CHALLENGE)

    def is_right(self, user: str, password: bytes, client: str) -> bool | None:
        """Return whether this is the user's password; None: too many others wait for a check."""
        name = user.encode()
        message = len(name).to_bytes(4, "big") + name + password
        digest = hmac.digest(self._key, message, "sha256")  # the key makes it worthless elsewhere
        known = self._known(user, digest)
        if known is not None:
            return known
        return self._queue.run(client, lambda: self._judge(user, password, digest))

    def _judge(self, user: str, password: bytes, digest: bytes) -> bool:
        """Check, and remember, unless the same one was before us in the queue."""
        known = self._known(user, digest)
        if known is not None:
            return known
        hashed = self._hashes.get(user)
        # Some versions of bcrypt cut a password short at these, others raise.
        is_possible = len(password) <= _LONGEST_PASSWORD and b"\0" not in password
        fits = self._check(password if is_possible else b"", hashed or self._decoy)
        fits = fits and is_possible and hashed is not None
        with self._lock:
            if fits:
                self._right[user] = digest
            else:
                self._wrong[digest] = None
                if len(self._wrong) > _WRONG_REMEMBERED:
                    del self._wrong[next(iter(self._wrong))]
        return fits

    def _known(self, user: str, digest: bytes) -> bool | None:
        with self._lock:
            if hmac.compare_digest(self._right.get(user, self._key), digest):
                return True
            return False if digest in self._wrong else None


def bcrypt_cost(hashed: str) -> int:
    """Return the cost in a bcrypt hash: each step doubles the time."""
    return int(hashed.split("$")[2])


def parse_basic_credentials(authorization: str) -> tuple[str, bytes] | None:
    """Return user and password from an Authorization header, or None when there are none."""
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        decoded = base64.b64decode(encoded.strip().encode("ascii"), validate=True)
        name, colon, password = decoded.partition(b":")
        return (name.decode(), password) if colon else None
    except ValueError:  # not ASCII, not base64, not UTF-8
        return None


def client_network(peer: str) -> str:
    """Return what stands for one client: an IPv4 address, or an IPv6 /64, which one may own.

    On this machine everybody has all of 127.0.0.0/8: what is not its first is one.
    """
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:  # a Unix socket's
        return peer
    is_other_local = address.is_loopback and peer != "127.0.0.1"
    bits = 64 if address.version == 6 else 8 if is_other_local else 32  # noqa: PLR2004
    return str(ipaddress.ip_network(f"{address}/{bits}", strict=False))
