# SPDX-License-Identifier: Apache-2.0
"""Users with passwords: bcrypt verdicts, one check at a time, remembered.

bcrypt is slow on purpose (48 ms at cost 10), so strangers could spend all of a node's time on wrong
passwords. One thread does the checks. Clients take turns, so that a thousand from one address delay
another by one check each. A user's first login from that very address waits for those before it,
and is refused where PLACES wait.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError  # its own before Python 3.11

from gpulock_exporter.web.http import HttpRequest, HttpResponse, error_response
from gpulock_exporter.web.serve import ServerLimits

# For checks that wait, of one client or of all; the other connections are for who needs none.
PLACES = ServerLimits.connections - 32
_WRONG_REMEMBERED = 256
_LONGEST_PASSWORD = 72  # bcrypt knows no more bytes of it
_CHALLENGE = ("WWW-Authenticate", 'Basic realm="gpulock"')


class CheckQueue:
    """Slow checks, one at a time: each client has its turn, and its own come in their order."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[tuple[Future[bool], Callable[[], bool]]]] = {}
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, "passwords")
        self._worker.submit(int)  # its thread starts here, or RuntimeError says that it cannot

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def run(self, client: str, check: Callable[[], bool], deadline: float) -> bool | None:
        """Return what the check says; None when there is no place, or no time, for it."""
        asked: Future[bool] = Future()
        with self._lock:
            own = len(self._waiting.get(client, ()))
            if len(self) >= PLACES and not self._drop_last(own + 1):
                return None
            self._waiting.setdefault(client, deque()).append((asked, check))
        self._worker.submit(self._check_next)
        try:
            left = deadline - time.monotonic()
            return asked.result(min(max(left, 0), threading.TIMEOUT_MAX))
        except (
            CancelledError,
            FutureTimeoutError,
            ValueError,
        ):  # a hash bcrypt dislikes
            asked.cancel()
            return None

    def _drop_last(self, most: int) -> bool:
        """Take a place from who has more than `most`; return whether there was one."""
        longest = max(self._waiting.values(), key=len)
        return len(longest) > most and longest.pop()[0].cancel()

    def _check_next(self) -> None:
        with self._lock:
            client = next(iter(self._waiting), None)
            if client is None:
                return  # it was dropped
            waiting = self._waiting.pop(client)
            asked, check = waiting.popleft()
            if waiting:
                self._waiting[client] = waiting  # behind all others
        if asked.set_running_or_notify_cancel():
            try:
                asked.set_result(check())
            except Exception as fault:  # its client's, who waits for it
                asked.set_exception(fault)


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
        self._nobody = os.urandom(32)
        self._right: dict[str, bytes] = {}  # at most one a user, so the wrong ones push none out
        self._wrong: dict[bytes, None] = {}  # in the order that they came
        self._lock = threading.Lock()

    def refusal(self, request: HttpRequest) -> HttpResponse | None:
        """Return the answer to a request that may not pass, None for one that may."""
        given = parse_basic_credentials(request.headers.get("authorization", ""))
        client = client_network(request.peer)
        is_right = given is not None and self.is_right(*given, client, request.deadline)
        if is_right is None:
            return error_response(503, "too many passwords are being checked", ("Retry-After", "1"))
        what = "a user name and its password are needed"
        return None if is_right else error_response(401, what, _CHALLENGE)

    def is_right(self, user: str, password: bytes, client: str, deadline: float) -> bool | None:
        """Return whether this is the user's password; None: too many others wait for a check."""
        name = user.encode()
        message = len(name).to_bytes(4, "big") + name + password
        digest = hmac.digest(self._key, message, "sha256")  # the key makes it worthless elsewhere
        known = self._known(user, digest)
        if known is not None:
            return known
        fits = self._queue.run(client, lambda: self._fits(user, password, digest), deadline)
        if fits is None:
            return None
        with self._lock:
            if fits:
                self._right[user] = digest
            else:
                self._wrong[digest] = None
                if len(self._wrong) > _WRONG_REMEMBERED:
                    del self._wrong[next(iter(self._wrong))]
        return fits

    def _fits(self, user: str, password: bytes, digest: bytes) -> bool:
        known = self._known(user, digest)  # the same one may have been before us in the queue
        if known is not None:
            return known
        hashed = self._hashes.get(user)
        # Some versions of bcrypt cut a password short at these, others raise.
        is_possible = len(password) <= _LONGEST_PASSWORD and b"\0" not in password
        fits = self._check(password if is_possible else b"", hashed or self._decoy)
        return fits and is_possible and hashed is not None

    def _known(self, user: str, digest: bytes) -> bool | None:
        with self._lock:
            if hmac.compare_digest(self._right.get(user, self._nobody), digest):
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
