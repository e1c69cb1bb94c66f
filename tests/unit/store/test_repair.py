# SPDX-License-Identifier: Apache-2.0
"""Records and locks agree again once somebody has the gate, whatever was removed of either."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulock.errors import UNKNOWN, Refusal
from gpulock.store import grants
from gpulock.store.boot import finish_earlier_claims
from gpulock.store.locks import Lock, LockStore
from gpulock.store.owner import Owner, encode_owner
from gpulock.store.repair import repair_locks
from tests.support.faults import raising, refusal
from tests.support.trees import BOOT, bus, record

TOKEN = "feedfacefeedface"
TWO = record(devices=(bus(0), bus(1)))
OTHER = record(token="cafe", job_id="13", devices=(bus(2),))


@pytest.fixture
def store(store: LockStore) -> LockStore:
    grants.make_claim(store, TWO)
    grants.make_claim(store, OTHER)
    return store


def holders(held: dict[str, Lock]) -> dict[str, str]:
    return {name: lock.owner.token for name, lock in held.items() if lock.owner}


def refused(store: LockStore) -> Refusal:
    return refusal(lambda: repair_locks(store, BOOT))


def repaired(store: LockStore) -> tuple[dict[str, str], dict[str, set[str]]]:
    """Repair as a reconcile does; return who holds what, and what was put back."""
    back: dict[str, Owner] = {}
    held = holders(repair_locks(store, BOOT, back))
    return held, {one.token: set(one.devices) for one in back.values()}


ALL = {bus(0): TOKEN, bus(1): TOKEN, bus(2): "cafe"}


def assert_whole(store: LockStore) -> None:
    assert repaired(store) == (ALL, {})
    for name, token in ALL.items():
        text = Path(store.locks_dir, name, "owner").read_text()
        assert text == store.read_record(token)


@pytest.mark.parametrize("text", [None, "", "gpulock-owner 2\n", "garbage"])
def test_an_owner_that_is_lost_or_spoilt_is_written_again(
    store: LockStore, text: str | None
) -> None:
    owner = Path(store.locks_dir, bus(0), "owner")
    owner.unlink()
    if text is not None:
        owner.write_text(text)
    assert holders(repair_locks(store, BOOT)) == ALL, "by its record"
    assert repaired(store) == (ALL, {} if text else {TOKEN: {bus(0)}})
    assert_whole(store)


@pytest.mark.parametrize("how", ["folder", "record", "garbage", "cut short", "zeros"])
def test_a_record_that_is_lost_or_spoilt_is_written_back(store: LockStore, how: str) -> None:
    folder = Path(store.claims_dir, TOKEN)
    if how == "folder":
        shutil.rmtree(folder)
    elif how == "record":
        (folder / "record").unlink()
    else:
        text = (folder / "record").read_text()
        spoilt = {"cut short": text[:-1], "zeros": text.replace("user=alice", "user=al\0\0\0")}
        (folder / "record").write_text(spoilt.get(how, "gpulock-owner 2\n"))
    held, back = repaired(store)
    assert (held, TOKEN in back) == (ALL, True)
    assert_whole(store)


@pytest.mark.parametrize("killed_at", ["create", "write"])
def test_a_lock_without_owner_or_record_goes(store: LockStore, killed_at: str) -> None:
    os.mkdir(f"{store.locks_dir}/{bus(3)}")
    if killed_at == "write":
        Path(store.locks_dir, bus(3), "owner").touch()
    assert holders(repair_locks(store, BOOT)) == ALL
    assert bus(3) not in os.listdir(store.locks_dir)


def test_a_link_in_the_place_of_a_lock_goes_and_the_lock_it_leads_to_stays_whole(
    store: LockStore,
) -> None:
    Path(store.locks_dir, bus(3)).symlink_to(bus(2))
    repaired(store)
    assert sorted(os.listdir(store.locks_dir)) == [*ALL]
    assert Path(store.locks_dir, bus(2), "owner").exists()


@pytest.mark.parametrize("text", ["garbage", "gpulock-owner 2\n"])
def test_a_lock_that_cannot_be_understood_and_no_record_names_is_held(
    store: LockStore, text: str
) -> None:
    folder = Path(store.locks_dir, bus(3))
    folder.mkdir()
    (folder / "owner").write_text(text)
    found = repair_locks(store, BOOT)[bus(3)]
    assert (found.fault != "", found.owner) == (True, None)


def test_a_record_without_any_copy_that_cannot_be_read_stops_all_claims(store: LockStore) -> None:
    """Nobody knows which devices it names."""
    for name in TWO.devices:
        shutil.rmtree(f"{store.locks_dir}/{name}")
    Path(store.claims_dir, TOKEN, "record").write_text("garbage")
    told = refused(store)
    assert told.kind == UNKNOWN
    assert f"remove {store.claims_dir}/{TOKEN} if no job is left" in told.do


def test_a_record_in_the_folder_of_another_claim_is_no_claim(store: LockStore) -> None:
    os.rename(f"{store.claims_dir}/cafe", f"{store.claims_dir}/beef")
    assert "claim beef" in refused(store).why


def test_a_claim_that_was_killed_while_it_was_made_is_whole_or_gone(store: LockStore) -> None:
    half = record(token="half", job_id="14", devices=(bus(3), bus(4)))
    grants.make_claim(store, half)
    shutil.rmtree(f"{store.locks_dir}/{bus(4)}")
    os.unlink(f"{store.locks_dir}/{bus(3)}/owner")
    os.mkdir(f"{store.claims_dir}/empty")
    whole = {**ALL, bus(3): "half", bus(4): "half"}
    assert holders(repair_locks(store, BOOT)) == whole
    shutil.copytree(f"{store.claims_dir}/half", f"{store.claims_dir}/.other.1.0123456789ab")
    assert holders(repair_locks(store, BOOT)) == whole, "also where no lock is amiss"
    assert sorted(os.listdir(store.claims_dir)) == sorted(["cafe", "half", TOKEN])


def test_two_records_that_name_one_device_both_hold_it_until_both_are_over(
    store: LockStore,
) -> None:
    """Only root can bring that about."""
    both = record(token="both", job_id="15", devices=(bus(2), bus(3)))
    grants.write_record_folder(store, "both", b"")
    text = encode_owner(both).encode()
    Path(store.claims_dir, "both", "record").write_bytes(text)
    first = holders(repair_locks(store, BOOT))
    assert first[bus(3)] == "both"
    holder = first[bus(2)]
    other = OTHER if holder == "cafe" else both
    grants.release_devices(store, holder, other.devices, "epilog", BOOT)
    assert holders(repair_locks(store, BOOT))[bus(2)] == ({"cafe", "both"} - {holder}).pop()


def test_a_record_that_stops_every_claim_is_named_with_its_reason(store: LockStore) -> None:
    for token in ("copied", "garbage", "folder", "none"):
        os.mkdir(f"{store.claims_dir}/{token}")
    Path(store.claims_dir, "copied/record").write_text("garbage")
    Path(store.claims_dir, "garbage/record").write_text("garbage")
    os.mkdir(f"{store.claims_dir}/folder/record")
    for token, device in (("copied", bus(5)), ("folder", bus(6))):
        os.mkdir(f"{store.locks_dir}/{device}")
        text = encode_owner(record(token=token, devices=(device,)))
        Path(store.locks_dir, device, "owner").write_text(text)
    unreadable: dict[str, str] = {}
    store.read_all_locks(unreadable)
    assert sorted(unreadable) == ["folder", "garbage"]


def test_a_record_that_the_disk_cannot_read_is_a_fault_and_no_claim_is_over(
    store: LockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LockStore, "read_record", raising(OSError(5, "input/output error")))
    assert "cannot be made to agree" in refused(store).why
    with pytest.raises(OSError, match="input/output error"):
        finish_earlier_claims(store, BOOT)
    assert sorted(os.listdir(store.claims_dir)) == sorted([TOKEN, "cafe"])


def make_record_folder(place: Path) -> None:
    (place / "record").mkdir(parents=True)


def make_record_link(place: Path) -> None:
    place.mkdir()
    (place / "record").symlink_to("/dev/null")


@pytest.mark.parametrize(
    "make",
    [Path.touch, lambda place: place.symlink_to(place), make_record_folder, make_record_link],
)
def test_what_is_no_claim_among_the_claims_is_named_and_stops_no_queue(
    store: LockStore, make: Callable[[Path], object]
) -> None:
    """An editor's, or a note of root's. A boot takes it away."""
    note = Path(store.claims_dir, "note")
    make(note)
    told = refused(store)
    assert (told.kind, told.do) == (UNKNOWN, f"rm -r {note}")
    finish_earlier_claims(store, BOOT)
    assert not os.path.lexists(note)
