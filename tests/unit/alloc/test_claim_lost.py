# SPDX-License-Identifier: Apache-2.0
"""No claim is granted while locks are lost; nor one whose LOCK_DIR is lost under it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulock.alloc import claim
from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.claim import claim_devices
from gpulock.alloc.reaper import Reaper
from gpulock.alloc.release import release_locks
from gpulock.daemon.reconcile.reconcile import reconcile_locks
from gpulock.errors import UNKNOWN, Refusal
from gpulock.store import atomic
from gpulock.store.counters import ClaimCounters
from gpulock.store.gate import Gate
from gpulock.store.locks import Lock
from tests.support.claims import ask, empty_all, empty_one, holder, ids, lose_one, never, refused
from tests.support.faults import disk_full
from tests.support.trees import OTHER_BOOT, Box, bus, judge_of, record, soon


@pytest.mark.parametrize("lose", [shutil.rmtree, empty_all, lose_one, empty_one])
def test_nothing_is_granted_while_a_lock_is_lost(box: Box, lose: Callable[[Path], None]) -> None:
    ask(box)
    lose(box.lock / "locks")
    found = refused(box, 1, job_id="13", pid=501)
    assert found.kind == UNKNOWN
    assert refused(box, 1).kind == UNKNOWN  # nor does the same run get others


def test_a_claim_without_its_lost_lock_names_the_device_and_what_to_do(box: Box) -> None:
    ask(box)
    lose_one(box.lock / "locks")
    found = refused(box, 1, job_id="13", pid=501)
    assert bus(1) in found.why
    assert "gpulock reap" in found.do


def test_where_nobody_can_tell_what_is_lost_nothing_is_granted(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(box)
    lose_one(box.lock / "locks")
    real = os.listdir

    def listdir(path: str) -> list[str]:
        if path.startswith("/proc/self/fd/") and path.count("/") == 4:
            raise OSError(5, "Input/output error")
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    assert refused(box, 1, job_id="13", pid=501).kind == UNKNOWN


def lose_lock_dir(box: Box) -> None:
    """Lose LOCK_DIR; another one stands there, in which another job has the first device."""
    box.lock.rename(box.root / "gone")
    (box.state / "boot_id").write_text(OTHER_BOOT)  # so that it begins as at the first of a boot
    ask(box, 1, job_id="99", pid=599)


def test_a_claim_goes_on_in_the_lock_dir_that_it_began_in(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another LOCK_DIR stands there by the time it writes its owner record: that is not its own."""
    ask(box, 1, job_id="1", pid=598)  # the first claim of the boot
    real = os.mkdir
    lost: list[str] = []

    def mkdir(path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        real(path, mode, dir_fd=dir_fd)
        if path.endswith(bus(1)) and not lost:
            lost.append(path)
            lose_lock_dir(box)
            real(f"{box.lock}/locks/{bus(1)}")

    monkeypatch.setattr(os, "mkdir", mkdir)
    found = refused(box, 1, job_id="13", pid=501)
    assert (found.kind, lost) == (UNKNOWN, [f"locks/{bus(1)}"]), found.why
    assert holder(box, 0).job_id == "99"
    assert list((box.lock / "locks" / bus(1)).iterdir()) == []


def test_a_claim_whose_gate_was_replaced_is_refused_and_undone(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def link(*paths: str, **about: int | None) -> None:
        real(*paths, **about)  # type: ignore[arg-type]
        (box.lock / "gate").unlink(missing_ok=True)

    monkeypatch.setattr(os, "link", link)
    assert refused(box).kind == UNKNOWN
    assert box.locks() == []
    assert [name for name in os.listdir(box.lock) if name.startswith("grant.")] == []


def test_a_command_that_failed_in_a_lost_lock_dir_tells_its_own_error(box: Box) -> None:
    ask(box)
    node = box.node()
    with pytest.raises(ZeroDivisionError), Gate(node.store, soon()):
        box.lock.rename(box.root / "gone")
        raise ZeroDivisionError
    assert node.store.root == node.store.path


def test_the_gate_leaves_no_descriptor_open(box: Box) -> None:
    ask(box)
    before = os.listdir("/proc/self/fd")
    ask(box)
    with pytest.raises(Refusal), Gate(box.node().store, soon()):
        box.lock.rename(box.root / "gone")
    with pytest.raises(Refusal), Gate(box.node().store, soon()):
        pytest.fail("it is not there")
    assert os.listdir("/proc/self/fd") == before


def test_a_grant_stands_as_long_as_its_locks_do(box: Box) -> None:
    node = box.node()
    grant = claim_devices(node, record(token="", devices=()), ClaimRequest(2), never, soon())
    node.store.check_token(grant.owner.devices, grant.owner.token)
    assert ids(grant) == [bus(0), bus(1)]


@pytest.mark.parametrize("lose", [shutil.rmtree, empty_all, lose_one, empty_one])
def test_a_grant_whose_lock_is_lost_before_its_record_was_kept_is_none(
    box: Box, lose: Callable[[Path], None]
) -> None:
    node = box.node()
    grant = claim_devices(node, record(token="", devices=()), ClaimRequest(2), never, soon())
    lose(box.lock / "locks")
    with pytest.raises(Refusal) as caught:
        node.store.check_token(grant.owner.devices, grant.owner.token)
    assert caught.value.kind == UNKNOWN


def test_a_grant_whose_device_is_anothers_by_now_is_none(box: Box) -> None:
    node = box.node()
    grant = claim_devices(node, record(token="", devices=()), ClaimRequest(2), never, soon())
    lose_lock_dir_and_adopt_nobody(box)
    ask(box, 2, job_id="99", pid=599)
    with pytest.raises(Refusal):
        node.store.check_token(grant.owner.devices, grant.owner.token)


def lose_lock_dir_and_adopt_nobody(box: Box) -> None:
    shutil.rmtree(box.lock)
    shutil.rmtree(box.state)
    box.state.mkdir()


def test_a_release_in_flight_frees_nothing_in_another_lock_dir_and_says_so(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was adopted there meanwhile: that lock is of the same claim, but nobody judged it."""
    grant = ask(box, 1)
    real = os.rename

    def rename(*paths: str, **about: int | None) -> None:
        if paths[1].startswith("released/"):
            shutil.copytree(box.lock, box.root / "copy")
            real(box.lock, box.root / "gone")
            real(box.root / "copy", box.lock)
        real(*paths, **about)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rename", rename)
    box.proc.remove(500)
    node = box.node()
    with pytest.raises(Refusal, match="replaced"):
        release_locks(node, lambda o: o.token == grant.owner.token, judge_of(node), soon(), "test")
    assert box.locks() == [bus(0)]


@pytest.mark.parametrize("disk_is_full", [False, True])
def test_a_claim_that_meets_a_lost_lock_leaves_it_to_be_put_back(
    box: Box, monkeypatch: pytest.MonkeyPatch, disk_is_full: bool
) -> None:
    """Its lock is removed after the claim has looked for lost ones, and seen that all are held."""
    box.proc.shepherd(500, box.root)
    token = ask(box, 4).owner.token

    def lose(reaper: Reaper, held: dict[str, Lock], totals: ClaimCounters) -> None:
        del reaper, held, totals
        shutil.rmtree(box.lock / "locks" / bus(1))
        if disk_is_full:
            monkeypatch.setattr(atomic, "replace_file", disk_full)

    monkeypatch.setattr(claim, "reap_held_locks", lose)
    assert "a lock cannot be written" in refused(box, 1, job_id="13", pid=501).why
    monkeypatch.undo()
    assert bus(1) not in box.locks()
    reconcile_locks(box.node(), judge_of(box.node()), soon())
    assert holder(box, 1).token == token
