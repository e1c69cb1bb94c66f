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
from gpulock.store import grants
from gpulock.store.gate import Gate
from gpulock.store.owner import HEALTH_COMMENT, HEALTH_USER
from tests.support.claims import ask, never, refused
from tests.support.clock import VirtualClock
from tests.support.faults import Failing, disk_full
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


def test_a_claim_that_fails_where_its_gate_was_replaced_says_that(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: object) -> None:
        (box.records / "gate").unlink()
        raise OSError(2, "no such folder")

    monkeypatch.setattr(grants, "make_claim", lose)
    assert "was replaced meanwhile" in refused(box).why
