# SPDX-License-Identifier: Apache-2.0
"""Who gets in: certificate names, request rate and password, asked before any handler."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpulock_exporter.web.client_names import client_network
from gpulock_exporter.web.response import HttpRequest, HttpResponse, error_response
from gpulock_exporter.webconfig.passwords import Passwords, PasswordVerdict, parse_basic_credentials


class TokenBucket:
    """Let a burst pass, and then one request an interval."""

    def __init__(
        self, interval_seconds: float, burst: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval = interval_seconds
        self._burst = burst
        self._now = now
        self._tokens = float(burst)
        self._filled_at = now()
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take a token; False when none is left."""
        with self._lock:
            now = self._now()
            gained = (now - self._filled_at) / self._interval
            self._tokens = min(self._tokens + gained, float(self._burst))
            self._filled_at = now
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True


@dataclass(frozen=True, slots=True)
class RequestGuard:
    """The rules of a web-config.yml; a rule that is not there lets everybody through."""

    certificate_names: frozenset[str] = frozenset()
    bucket: TokenBucket | None = None
    passwords: Passwords | None = None

    def refusal(self, request: HttpRequest) -> HttpResponse | None:
        """Return the answer for a request that may not pass, None for one that may."""
        if self.certificate_names and not self.certificate_names & request.names:
            return error_response(
                403, "no name of the client's certificate is in client_allowed_sans"
            )
        if self.bucket is not None and not self.bucket.take():
            return error_response(429, "there are more requests than rate_limit allows")
        return None if self.passwords is None else _password_refusal(request, self.passwords)


def _password_refusal(request: HttpRequest, passwords: Passwords) -> HttpResponse | None:
    challenge = ("WWW-Authenticate", 'Basic realm="gpulock"')
    given = parse_basic_credentials(request.headers.get("authorization", ""))
    if given is None:
        return error_response(401, "a user name and a password are needed", challenge)
    user, password = given
    verdict = passwords.verdict(user, password, client_network(request.peer), request.deadline)
    if verdict is PasswordVerdict.BUSY:
        return error_response(503, "too many passwords are being checked", ("Retry-After", "1"))
    if verdict is PasswordVerdict.WRONG:
        return error_response(401, "user name or password is wrong", challenge)
    return None
