# SPDX-License-Identifier: Apache-2.0
"""The history and a crash: the file stays whole, and no claim has two lines (see tests/sweep)."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Callable

import pytest

from gpulock.daemon.history.writer import HistoryWriter
from tests.support.faults import raising
from tests.support.history_site import Ended, write_history

pytestmark = pytest.mark.slow


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


def full_at(site: Ended, room: int) -> None:
    """Run the chore where the file can grow by `room` bytes only."""
    size = site.path.stat().st_size if site.path.exists() else 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, resource.RLIM_INFINITY))
    fresh(site)


@pytest.mark.parametrize("lines", [0, 0.01, 0.5, 1.5])
def test_a_disk_that_is_full_keeps_the_claims_waiting_and_the_file_whole(
    site: Ended, lines: float
) -> None:
    for number in range(4):
        site.claim(number, token=f"t{number}")
        if number == 1:
            site.write()
    before = site.path.read_bytes()  # two lines, and two more wait
    assert in_child(lambda: full_at(site, int(lines * len(before) / 2))) == 0
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
