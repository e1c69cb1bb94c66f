# SPDX-License-Identifier: Apache-2.0
"""Passwords: bcrypt verdicts, remembered; who was right once is right again in microseconds."""

from __future__ import annotations

import binascii
import hmac
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum

from gpulock_exporter.webconfig.check_queue import CheckQueue

CheckPassword = Callable[[bytes, bytes], bool]  # bcrypt.checkpw: password, hash

_WRONG_REMEMBERED = 256
_LONGEST_PASSWORD = 72  # bcrypt knows no more bytes of it


class PasswordVerdict(Enum):
    """What is known of a user and a password."""

    RIGHT = "right"
    WRONG = "wrong"
    BUSY = "busy"  # not checked: too many others are waiting


class Passwords:
    """Check users' passwords against their bcrypt hashes."""

    def __init__(self, hashes: Mapping[str, bytes], check: CheckPassword) -> None:
        self._hashes = dict(hashes)
        self._check = check
        self._queue = CheckQueue()
        # A stranger's name takes as long as the dearest known one.
        self._decoy = max(self._hashes.values(), key=bcrypt_cost)
        self._key = os.urandom(32)
        self._nobody = os.urandom(32)
        self._right: dict[str, bytes] = {}  # at most one a user, so the wrong ones push none out
        self._wrong: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def verdict(self, user: str, password: bytes, client: str, deadline: float) -> PasswordVerdict:
        """Say whether this is the user's password; `client` is who waits for the check."""
        digest = self._digest(user, password)
        known = self._known(user, digest)
        if known is not None:
            return known
        fits = self._queue.run(client, lambda: self._fits(user, password, digest), deadline)
        if fits is None:
            return PasswordVerdict.BUSY
        return self._remember(user, digest, fits)

    def _fits(self, user: str, password: bytes, digest: bytes) -> bool:
        known = self._known(user, digest)  # the same one may have been before us in the queue
        if known is not None:
            return known is PasswordVerdict.RIGHT
        hashed = self._hashes.get(user)
        # Some versions of bcrypt cut a password short at these, others raise.
        is_possible = len(password) <= _LONGEST_PASSWORD and b"\0" not in password
        fits = self._check(password if is_possible else b"", hashed or self._decoy)
        return fits and is_possible and hashed is not None

    def _digest(self, user: str, password: bytes) -> bytes:
        """Stand for a user and a password in memory; the key makes it worthless elsewhere."""
        name = user.encode()
        message = len(name).to_bytes(4, "big") + name + password
        return hmac.digest(self._key, message, "sha256")

    def _known(self, user: str, digest: bytes) -> PasswordVerdict | None:
        with self._lock:
            if hmac.compare_digest(self._right.get(user, self._nobody), digest):
                return PasswordVerdict.RIGHT
            return PasswordVerdict.WRONG if digest in self._wrong else None

    def _remember(self, user: str, digest: bytes, is_right: bool) -> PasswordVerdict:
        with self._lock:
            if is_right:
                self._right[user] = digest
                return PasswordVerdict.RIGHT
            self._wrong[digest] = None
            if len(self._wrong) > _WRONG_REMEMBERED:
                self._wrong.popitem(last=False)
            return PasswordVerdict.WRONG


def bcrypt_cost(hashed: bytes) -> int:
    """Return the cost in a bcrypt hash: each step doubles the time."""
    return int(hashed.split(b"$")[2])


def parse_basic_credentials(authorization: str) -> tuple[str, bytes] | None:
    """Return user and password from an Authorization header, or None when there are none."""
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        decoded = binascii.a2b_base64(encoded.strip().encode("ascii"), strict_mode=True)
        name, colon, password = decoded.partition(b":")
        return (name.decode(), password) if colon else None
    except ValueError:  # not ASCII, not base64, not UTF-8
        return None
