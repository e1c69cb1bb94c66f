# SPDX-License-Identifier: Apache-2.0
"""The history and a crash: a line says how whatever was killed, and the file stays whole."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from gpulock.daemon.history.writer import HistoryWriter
from gpulock.store.repair import repair_locks
from tests.support.faults import raising
from tests.support.history_site import Ended, write_history
from tests.support.locks import retire_lock
from tests.support.trees import BOOT

pytestmark = pytest.mark.slow

# every face of a system call that the chore uses
CALLS = (
    *("open", "close", "read", "write", "pread", "fsync", "fstat", "stat", "lstat", "listdir"),
    *("ftruncate", "unlink", "rmdir", "mkdir", "rename"),
)
KILLED = 42
HALF = pytest.mark.parametrize("half", [False, pytest.param(True, marks=pytest.mark.giant)])
PROOF = "its shepherd is gone"


def in_child(act: Callable[[], None]) -> int:
    """Do it in a forked process; return how that ended."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at(number: int, act: Callable[[], None], half: bool) -> Callable[[], None]:
    """Return `act`, killed at its `number`-th system call; `half` of what a write had to write."""

    def run() -> None:
        left = number
        real_write = os.write

        def wrap(real: Callable[..., object]) -> Callable[..., object]:
            def call(*args: Any, **named: Any) -> object:
                nonlocal left
                left -= 1
                if left == 0:
                    if half and real is real_write:
                        fd, data = args[0], bytes(args[1])
                        real_write(fd, data[: len(data) // 2])
                    os._exit(KILLED)
                return real(*args, **named)

            return call

        for name in CALLS:
            setattr(os, name, wrap(getattr(os, name)))
        act()

    return run


def killed(
    folder: Path, half: bool, prepare: Callable[[Ended], None], act: Callable[[Ended], None]
) -> Iterator[tuple[Ended, str]]:
    """Yield a node on which `act` was killed at its first system call, its second, to the last."""
    deaths = 0
    for number in count(1):
        site = Ended(folder / str(number))
        prepare(site)
        code = in_child(killed_at(number, partial(act, site), half))
        assert code in (0, KILLED)
        deaths += code == KILLED
        yield site, f"killed at call {number}"
        if code == 0:
            break
    assert deaths > 40


@HALF
def test_killed_at_any_call_of_a_reap_its_line_says_how_all_the_same(
    tmp_path: Path, half: bool
) -> None:
    def prepare(site: Ended) -> None:
        site.run_job(0, 1)

    for site, when in killed(tmp_path, half, prepare, reap):
        reap(site)
        (told,) = site.lines()
        assert (told["how"], told["proof"]) == ("reap", PROOF), when
        assert [one["how"] for one in told["devices"]] == ["reap"] * 2
        assert (site.waiting(), site.owed()) == ([], [])


def reap(site: Ended) -> None:
    """Free what is still held, as a reconcile does, and run the chore, in a new process."""
    store = site.node().store
    for lock in repair_locks(store, BOOT).held.values():
        retire_lock(store, lock, f"reap: {PROOF}")
    fresh(site)


def fresh(site: Ended) -> int:
    """Run the chore as a process that starts now."""
    return write_history(HistoryWriter(site.told.append), site.node())


def test_killed_before_a_new_month_its_line_is_still_known(site: Ended) -> None:
    site.claim(0)
    folder = site.finished()
    saved = {path.name: path.read_bytes() for path in folder.iterdir()}
    site.write()
    folder.mkdir()
    for name, data in saved.items():
        (folder / name).write_bytes(data)
    site.path.rename(site.path.with_name("2025-12.jsonl"))
    assert (fresh(site), site.waiting(), site.tokens()) == (0, [], ["feed"])


@pytest.mark.parametrize("tail", [b"\0" * 700, b"[" * 100_000, b'{"version":1,"rel'])
def test_what_a_power_cut_leaves_at_the_end_is_taken_back(site: Ended, tail: bytes) -> None:
    site.path.parent.mkdir()
    site.path.write_bytes(b'{"token":"old"}\n' + tail)
    site.claim(0)
    fresh(site)
    assert site.tokens() == ["old", "feed"]


def full_at(site: Ended, room: int) -> None:
    """Run the chore where the file can grow by `room` bytes only."""
    size = site.path.stat().st_size if site.path.exists() else 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, resource.RLIM_INFINITY))
    fresh(site)


@pytest.mark.parametrize("room", [0, 1, 500, 1500])
def test_a_disk_that_is_full_keeps_the_claims_waiting_and_the_file_whole(
    site: Ended, room: int
) -> None:
    for number in range(4):
        site.claim(number, token=f"t{number}")
        if number == 1:
            site.write()
    before = site.path.read_bytes()
    assert in_child(lambda: full_at(site, room)) == 0
    assert site.path.read_bytes() == before
    assert len(site.waiting()) == 2
    fresh(site)
    assert (site.tokens(), site.waiting()) == ([f"t{n}" for n in range(4)], [])


@pytest.mark.parametrize("call", ["fsync", "write"])
def test_a_disk_that_fails_takes_the_line_back(
    site: Ended, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    site.claim(0)
    site.write()
    site.claim(1, token="beef")
    real = getattr(os, call)

    def fail(fd: int, *rest: object) -> object:
        if os.readlink(f"/proc/self/fd/{fd}") == str(site.path):
            raise OSError(errno.EIO, "input/output error")
        return real(fd, *rest)

    monkeypatch.setattr(os, call, fail)
    assert site.write() == 0
    assert "waits in" in site.told[-1]
    monkeypatch.undo()
    assert (site.write(), site.tokens()) == (1, ["feed", "beef"])


def test_a_finished_claim_that_cannot_be_removed_is_not_written_again(
    site: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.claim(0)
    real = os.rmdir
    fail = raising(OSError(errno.EROFS, "read-only file system"))
    monkeypatch.setattr(os, "unlink", fail)
    monkeypatch.setattr(os, "rmdir", fail)
    assert (site.write(), site.write(), fresh(site)) == (1, 0, 0)
    site.path.write_bytes(site.path.read_bytes() + b'{"token":"foreign"}\n')
    assert site.write() == 0
    monkeypatch.undo()
    assert (real, site.write(), site.waiting()) == (os.rmdir, 0, [])
    assert site.tokens() == ["feed", "foreign"]


def test_every_line_is_json_whatever_a_record_says(site: Ended) -> None:
    site.claim(0)
    path = site.finished() / "record"
    text = path.read_bytes().replace(b"user=alice", 'user=a"\\b\u2028'.encode() + b"\xff")
    path.write_bytes(text.replace(b"queue=gpu.q", b"queue=x\x7f\x01\r"))
    site.write()
    (line,) = site.path.read_bytes().splitlines()
    found = json.loads(line)
    assert (found["user"], found["queue"]) == ('a"\\b\u2028\udcff', "x\x7f\x01\r")
