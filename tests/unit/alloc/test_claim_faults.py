# SPDX-License-Identifier: Apache-2.0
"""A claim while system calls fail or somebody else comes between: never half a grant."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpulock.alloc import checks
from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import claim_devices
from gpulock.deadline import Deadline
from gpulock.errors import BROKEN, BUSY, UNKNOWN, LockTimeout, Refusal
from gpulock.store import atomic, grants
from gpulock.store.gate import Gate
from gpulock.store.owner import HEALTH_COMMENT, HEALTH_USER
from tests.support.claims import ask, never, refused
from tests.support.clock import VirtualClock
from tests.support.faults import Failing, disk_full, returning
from tests.support.locks import place_lock
from tests.support.trees import Box, bus, judging, record, soon

CALLS = ("mkdir", "rename", "write", "open", "link", "lstat")
MOST = 60  # system calls of one kind in one claim


def reset(box: Box) -> None:
    for folder in (box.lock, box.records, box.state):
        shutil.rmtree(folder, ignore_errors=True)
    box.state.mkdir()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EMFILE])
def test_whichever_call_fails_the_claim_is_whole_or_refused_and_undone(
    box: Box, name: str, code: int
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for at in range(1, MOST):
        reset(box)
        node = box.node()
        with pytest.MonkeyPatch.context() as patch:
            calls = Failing(patch, name, at, OSError(code, os.strerror(code))).calls
            try:
                grant = claim_devices(
                    node, record(token=""), ClaimRequest(2), judging(node), soon()
                )
            except OSError:  # the hook takes it for "could not find out"
                assert box.locks() == [], f"{name} {at}: {calls[-1]}"
            except Refusal as refusal:
                assert refusal.kind in (BROKEN, UNKNOWN)
                assert box.locks() == [], f"{name} {at}: {calls[-1]}"
            else:
                assert box.locks() == sorted(d.id for d in grant.devices)
        if len(calls) < at:
            break
    else:
        pytest.fail("more calls than were thought of")
    assert len(os.listdir("/proc/self/fd")) <= before  # other tests' may be closed meanwhile


@pytest.mark.parametrize("name", CALLS)
def test_after_any_crash_the_next_claims_get_everything_and_nothing_twice(
    box: Box, name: str
) -> None:
    """A crash is an exception that no clean-up survives: what stands on disk then must do."""
    for at in range(1, MOST):
        reset(box)
        ask(box, job_id="7", pid=999)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grants, "undo_claim", returning(None))
            patch.setattr(atomic, "remove_quietly", returning(None))
            calls = Failing(patch, name, at, KeyboardInterrupt()).calls
            try:
                ask(box, job_id="8", pid=998)
            except KeyboardInterrupt:
                pass
        later = [ask(box, job_id=str(100 + n), pid=500) for n in range(2)]
        given = [d.id for grant in later for d in grant.devices]
        assert sorted(given) == [bus(n) for n in range(4)], f"{name} {at}: {calls[-1]}"
        if len(calls) < at:
            break
    else:
        pytest.fail("more calls than were thought of")


@pytest.mark.parametrize("nth", [1, 2])
def test_a_device_locked_meanwhile_stays_with_its_new_owner(
    box: Box, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    ask(box, job_id="7", pid=999)
    real = os.mkdir

    def peer(path: str) -> None:
        real(path, 0o755)
        Path(path, "owner").write_text("theirs")

    Failing(monkeypatch, "mkdir", 1 + nth, before=peer)  # the first is the record's folder
    assert refused(box).kind == BROKEN
    theirs = [p.parent.name for p in box.lock.glob("locks/*/owner") if p.read_text() == "theirs"]
    assert theirs == [bus(1 + nth)]
    assert box.locks() == [bus(0), bus(1), bus(1 + nth)]


def test_what_was_made_is_undone_newest_first(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(box, job_id="7", pid=999)
    removed: list[str] = []
    real = os.rmdir

    def rmdir(path: str) -> None:
        removed.append(os.path.basename(path))
        real(path)

    monkeypatch.setattr(os, "rmdir", rmdir)
    real_create, written = atomic.create_file, list[str]()

    def create(path: str, data: bytes) -> None:
        written.append(path)
        if len(written) == 3:  # behind the record and the first lock's owner
            raise OSError(errno.ENOSPC, "no space")
        real_create(path, data)

    monkeypatch.setattr(atomic, "create_file", create)
    refused(box)
    assert removed[:2] == [bus(3), bus(2)]
    assert len(os.listdir(box.records / "claims")) == 1


def test_a_name_that_cannot_be_written_locks_nothing(box: Box) -> None:
    assert refused(box, user="alice\nuid=0").kind == UNKNOWN
    assert box.locks() == []


def test_a_gate_that_stays_shut_is_told_although_it_cannot_be_noted(box: Box) -> None:
    ask(box)
    (box.lock / "events").unlink()
    (box.lock / "events").mkdir()
    with Gate(box.node().store, soon()), pytest.raises(LockTimeout):
        claim_devices(
            box.node(), record(token="", devices=()), ClaimRequest(1), never, Deadline(0.0)
        )


def test_a_health_check_that_cannot_be_asked_to_end_keeps_its_device(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(box)
    check = {"scheduler": "process", "user": HEALTH_USER, "comment": HEALTH_COMMENT}
    for number in (2, 3):
        own = record(token=f"c{number}", devices=(bus(number),), sid=500, **check)
        place_lock(box.node().store, bus(number), own)
    box.proc.shepherd(500, box.root)
    with monkeypatch.context() as broken:
        broken.setattr(grants, "rewrite_claim", disk_full)
        assert refused(box, job_id="13").kind == BUSY
    want, one = ClaimRequest(2), record(token="", devices=(), job_id="13")
    want.asked, want.patience = {bus(2): "of an earlier claim with this request"}, 0.0
    with pytest.raises(Refusal):
        claim_devices(box.node(), one, want, judging(box.node()), soon())
    assert {*want.asked.values()} == {"c2", "c3"}


def test_a_claim_waits_for_a_check_that_does_not_end_as_long_as_its_patience_is(
    box: Box, monkeypatch: pytest.MonkeyPatch, clock: VirtualClock
) -> None:
    """Not as long as its hook has: then the job is tried again elsewhere."""
    check = {"scheduler": "process", "user": HEALTH_USER, "comment": HEALTH_COMMENT}
    own = record(token="c0", devices=(bus(0),), sid=500, **check)
    place_lock(box.node().store, bus(0), own)
    box.proc.shepherd(500, box.root)
    begun = clock()

    def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(checks, "time", SimpleNamespace(sleep=sleep, time=time.time))
    want = ClaimRequest(4)
    with pytest.raises(Refusal) as told:
        claim_devices(box.node(), record(token="", devices=()), want, judging(box.node()), soon())
    assert (told.value.kind, round(clock() - begun)) == (BUSY, want.patience)
