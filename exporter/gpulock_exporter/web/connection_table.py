# SPDX-License-Identifier: Apache-2.0
"""All open connections: never more than the cap, none past its deadline.

When the cap is reached the newcomer gets in and another goes: one at rest first, else the one
that has been longest in its phase. A scrape takes milliseconds, so it is never the oldest while
an attacker's connections are; refusing newcomers instead would let 128 silent ones lock it out.
"""

from __future__ import annotations

import threading
import time
from collections import Counter

from gpulock_exporter.web.connection import Connection, Phase

_CUT_AT_ONCE = 8  # so that a flood costs one look through the table for every eighth connection


class ConnectionTable:
    """The connections of one server, counted until their threads have ended."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._connections: set[Connection] = set()
        self._changed = threading.Condition()
        self.dropped: Counter[str] = Counter()  # by phase, and "full" for those that made room

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, connection: Connection) -> None:
        """Count a connection from now on."""
        with self._changed:
            self._connections.add(connection)

    def remove(self, connection: Connection) -> None:
        """Its thread ends: its place is free."""
        with self._changed:
            self._connections.discard(connection)
            self._changed.notify_all()

    def make_room(self, patience_seconds: float) -> bool:
        """Have a place free, at another's cost if need be; False when none came free in time."""
        with self._changed:
            return len(self._connections) < self._cap or self._free_one(patience_seconds)

    def relieve(self, patience_seconds: float) -> bool:
        """Have one fewer, for the process has no more descriptors; False when none went."""
        with self._changed:
            return self._free_one(patience_seconds)

    def expire(self, now: float) -> None:
        """Cut every connection that is past its phase's deadline."""
        for connection in self._those():
            state = connection.state
            if now >= state.deadline and not connection.is_cut:
                connection.cut()
                self.dropped[state.phase.value] += 1

    def cut_idle(self) -> None:
        """Cut those between two requests: what they agreed on at their handshake is out of date."""
        for connection in self._those():
            if connection.state.phase is Phase.IDLE:
                connection.cut()

    def finish(self, seconds: float) -> None:
        """Let the answers under way be written, at most so long; cut all else at once."""
        end = time.monotonic() + seconds
        with self._changed:
            while self._connections and time.monotonic() < end:
                for connection in self._connections:
                    if not connection.state.phase.is_answering:
                        connection.cut()
                self._changed.wait(0.05)
            for connection in self._connections:
                connection.cut()
            self._changed.wait_for(lambda: not self._connections, 1.0)

    def _those(self) -> list[Connection]:
        with self._changed:
            return list(self._connections)

    def _free_one(self, patience_seconds: float) -> bool:
        """Cut the oldest. One in its handler is left alone: cutting it would free nothing."""
        candidates = [
            one
            for one in self._connections
            if not one.is_cut and one.state.phase is not Phase.HANDLE
        ]
        candidates.sort(key=lambda one: (not one.state.phase.is_at_rest, one.state.since))
        for one in candidates[:_CUT_AT_ONCE]:
            one.cut()
            self.dropped["full"] += 1
        before = len(self._connections)
        return self._changed.wait_for(lambda: len(self._connections) < before, patience_seconds)
