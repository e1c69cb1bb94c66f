# SPDX-License-Identifier: Apache-2.0
"""Floods of wrong passwords: a scrape beside them answers, and a first login has its turn."""

from __future__ import annotations

import threading
from pathlib import Path

import bcrypt
import pytest
from gpulock_exporter.web.webconfig import PLACES_OF_ONE

from tests.exporter.servers import serving
from tests.exporter.wire import as_user
from tests.support.wait import wait_until

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
