# SPDX-License-Identifier: Apache-2.0
"""Users with passwords: bcrypt verdicts, one check at a time, remembered.

bcrypt is slow on purpose (48 ms at cost 10), so strangers could spend all of a node's time on wrong
passwords. Each check waits for the one before. A few of each client may wait, so that a
thousand from one address delay another by those few. A verdict is remembered even where its client
has gone meanwhile: a scrape that came too early for it finds it the next time.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping

from gpulock_exporter.web.http import HttpRequest, HttpResponse, error_response

PLACES, PLACES_OF_ONE = 128, 8  # for checks that wait, of all clients and of one
_WRONG_REMEMBERED = 256
_LONGEST_PASSWORD = 72  # bcrypt knows no more bytes of it
_CHALLENGE = ("WWW-Authenticate", 'Basic realm="gpulock"')


class Passwords:
    """Check users' passwords against their bcrypt hashes."""

    def __init__(self, hashes: Mapping[str, str], check: Callable[[bytes, bytes], bool]) -> None:
        """`check` is bcrypt.checkpw, of a password and a hash."""
        self._hashes = {user: hashed.encode() for user, hashed in hashes.items()}
        self._check = check
        self._last = threading.Event()  # set once the last check is over
        self._last.set()
        self._waiting = Counter[str]()  # checks by client
        # A stranger's name takes as long as the dearest known one.
        self._decoy = max(hashes.values(), key=bcrypt_cost).encode()
        self._key = os.urandom(32)
        self._right: dict[str, bytes] = {}  # at most one a user, so the wrong ones push none out
        self._wrong: dict[bytes, None] = {}  # in the order that they came
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Return how many checks wait, or are made."""
        return sum(self._waiting.values())

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
        with self._lock:
            if self._waiting[client] >= PLACES_OF_ONE or self.waiting >= PLACES:
                return None
            self._waiting[client] += 1
            before, self._last = self._last, threading.Event()
            mine = self._last
        before.wait()
        try:
            return self._judge(user, password, digest)
        except ValueError:  # a hash that bcrypt dislikes
            return False
        finally:
            mine.set()
            with self._lock:
                self._waiting[client] -= 1
                self._waiting += Counter()  # forgets who has none

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
