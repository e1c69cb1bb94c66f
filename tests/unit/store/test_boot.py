# SPDX-License-Identifier: Apache-2.0
"""The boot rule: locks are of one boot, and must not be lost within it."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from gpulock.errors import BROKEN, UNKNOWN, Refusal
from gpulock.store import atomic, boot, grants, quarantine
from gpulock.store.locks import LockStore
from tests.support.faults import disk_full, plant_link, raising
from tests.support.locks import place_lock
from tests.support.trees import BOOT, NAME, OTHER_BOOT, bus, record


class Place:
    """A LOCK_DIR and a STATE_DIR."""

    def __init__(self, root: Path) -> None:
        self.lock, self.records, self.state = root / "run", root / "run.claims", root / "state"
        for folder in (self.lock, self.records, self.state):
            folder.mkdir()
        self.store = LockStore(str(self.lock))

    def lose_records(self) -> None:
        shutil.rmtree(self.records)
        self.records.mkdir()

    def ready(self, boot_id: str = BOOT) -> None:
        boot.prepare_boot(self.store, str(self.state), boot_id, NAME)

    def refusal(self, boot_id: str = BOOT) -> Refusal:
        with pytest.raises(Refusal) as caught:
            self.ready(boot_id)
        return caught.value

    def ids(self) -> tuple[str, str]:
        return self.store.boot_id(), (self.state / "boot_id").read_text().strip()

    def reserve(self, number: int, text: str = "by=root\nreason=fan\nat=5\n") -> None:
        (self.state / quarantine.FOLDER).mkdir(exist_ok=True)
        (self.state / quarantine.FOLDER / f"{bus(number)}{quarantine.RESERVE}").write_text(text)

    def holder(self, number: int) -> str:
        found = self.store.read(bus(number)).owner
        return found.scheduler if found else "nobody"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize("state", ["empty", "missing"])
def test_the_first_claim_of_a_boot_makes_ready(place: Place, state: str) -> None:
    if state == "missing":
        place.state.rmdir()
    place.ready()
    assert place.ids() == (BOOT, BOOT)
    assert sorted(os.listdir(place.state)) == ["boot_id", "quarantine"]
    assert sorted(os.listdir(place.records)) == ["boot_id", "claims", "finished"]
    assert os.listdir(place.lock) == ["locks"]


def test_after_a_reboot_it_is_made_ready_again(place: Place) -> None:
    place.ready(OTHER_BOOT)
    (place.lock / "events").write_text("1.0 claim granted 0 alice:12\n")  # of one boot
    place.ready()
    assert place.ids() == (BOOT, BOOT)
    assert os.listdir(place.lock) == ["locks"]
    shutil.rmtree(place.lock)
    place.lock.mkdir()
    place.lose_records()
    place.ready("00000000-0000-4000-8000-000000000003")


def test_claims_on_folders_that_outlived_a_boot_are_finished(place: Place) -> None:
    place.ready(OTHER_BOOT)
    place_lock(place.store, bus(0), record(boot_id=OTHER_BOOT))
    place_lock(place.store, bus(1), record(boot_id=OTHER_BOOT, scheduler="admin", token="a"))
    (place.records / "claims/empty").mkdir()
    (place.records / "claims/.cut.1.0123456789ab").mkdir()
    place.ready()
    assert place.ids() == (BOOT, BOOT)
    assert os.listdir(place.records / "claims") == []
    assert os.listdir(place.records / "finished") == [record().token]
    assert os.listdir(place.lock / "locks") == []


def test_records_that_are_lost_stop_every_grant_until_their_locks_are_forgotten(
    place: Place,
) -> None:
    place.ready()
    place_lock(place.store, bus(0), record())
    place.lose_records()
    refusal = place.refusal()
    assert (refusal.kind, "forget-locks" in refusal.do) == (UNKNOWN, True)
    assert refusal.why.endswith(f"were lost: {place.records}/boot_id is gone")
    assert (place.store.boot_id(), place.holder(0)) == ("", "sge")
    boot.begin_boot(place.store, str(place.state), BOOT, NAME)
    assert (place.ids(), place.holder(0)) == ((BOOT, BOOT), "nobody")


@pytest.mark.parametrize("where", ["records", "state"])
def test_a_first_claim_of_a_boot_that_is_killed_closes_no_node(
    place: Place, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    real, last = atomic.replace_file, f"{getattr(place, where)}/boot_id"

    def replace(path: str, data: bytes, durable: bool = False) -> None:
        if path == last:
            raise KeyboardInterrupt
        real(path, data, durable=durable)

    place.reserve(0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(atomic, "replace_file", replace)
        place.ready()
    place.ready()
    assert (place.store.boot_id(), place.holder(0)) == (BOOT, "admin")


def test_who_says_that_no_job_is_left_keeps_what_has_a_record(place: Place) -> None:
    place.ready()
    place_lock(place.store, bus(0), record())
    (place.records / "boot_id").unlink()
    assert place.refusal().kind == UNKNOWN
    boot.begin_boot(place.store, str(place.state), BOOT, NAME)
    assert place.holder(0) == "sge"


@pytest.mark.parametrize("name", ["", "\0" * 37, BOOT[:12], f"{BOOT}0\n", "x" * 36, "unknown"])
def test_a_boot_id_in_state_that_is_garbage_may_have_been_this_one(place: Place, name: str) -> None:
    place.ready()
    place.lose_records()
    (place.state / "boot_id").write_text(name)
    refusal = place.refusal()
    assert (refusal.kind, "reboot" in refusal.do) == (UNKNOWN, False), "the next is refused as well"
    assert refusal.why.endswith(f"may be lost: {place.state}/boot_id is garbage")
    assert place.store.boot_id() == ""


def test_folders_that_cannot_be_written_are_told(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "replace_file", disk_full)
        assert "state cannot be written" in place.refusal().why
    monkeypatch.setattr(atomic, "mkdir_if_missing", disk_full)
    shutil.rmtree(place.records / "claims")
    assert "state cannot be written" in place.refusal().why


def test_a_file_system_that_cannot_be_seen_is_unknown(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boot, "file_system_type", raising(PermissionError(13, "denied")))
    assert place.refusal().kind == UNKNOWN


def test_a_boot_id_in_state_that_cannot_be_read_is_unknown(place: Place) -> None:
    os.mkfifo(place.state / "boot_id")
    assert place.refusal().kind == UNKNOWN


def test_a_reserve_takes_over_the_lock_of_a_job_that_died_with_the_last_boot(place: Place) -> None:
    place.reserve(0)
    place_lock(place.store, bus(0), record(boot_id=OTHER_BOOT))
    place.ready()
    assert place.holder(0) == "admin"


@pytest.mark.parametrize("text", ["", "garbage", "at=soon\n", "by=x\ry\nreason=z\n"])
def test_a_reserve_whose_note_is_garbage_still_counts(place: Place, text: str) -> None:
    place.reserve(0, text)
    place.ready()
    assert place.holder(0) == "admin"


def on(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Let LOCK_DIR be on another kind of file system, as /proc/self/mountinfo tells it."""
    real = atomic.read_text

    def fake(path: str, limit: int = atomic.LIMIT, dir_fd: int | None = None) -> str:
        if path.endswith("/mountinfo"):
            return (
                "21 1 0:5 / / rw - ext4 /dev/vda rw\n"
                "771 1 0:8 / /other rw - fuse.other x rw\n"
                f"77 21 0:9 / /mnt/a\\040-\\040b rw,relatime shared:3 master:1 - {kind} server rw\n"
            )
        if "/fdinfo/" in path:
            return "pos:\t0\nflags:\t02100000\nmnt_id:\t77\nino:\t2\n"
        return real(path, limit, dir_fd)

    monkeypatch.setattr(atomic, "read_text", fake)


@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "xfs", "btrfs"])
def test_local_file_systems_are_good(
    place: Place, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    on(monkeypatch, kind)
    place.ready()
    assert boot.file_system_type(str(place.lock)) == kind


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "lustre", "fuse.sshfs", "beegfs", "9p"])
def test_a_lock_directory_on_the_network_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    on(monkeypatch, kind)
    found = place.refusal()
    assert (found.kind, kind in found.why) == (BROKEN, True)
    assert place.store.boot_id() == ""


def test_a_lock_directory_below_no_mount_is_refused_with_what_to_do(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a chroot that is no mount point the table of mounts does not have its root."""
    on(monkeypatch, "tmpfs")
    real = atomic.read_text

    def unlisted(path: str, limit: int = atomic.LIMIT, dir_fd: int | None = None) -> str:
        return "mnt_id:\t99\n" if "/fdinfo/" in path else real(path, limit, dir_fd)

    monkeypatch.setattr(atomic, "read_text", unlisted)
    found = place.refusal()
    assert (found.kind, "as in a chroot" in found.why) == (BROKEN, True)
    assert "bind the chroot's root to itself" in found.do
    assert place.store.boot_id() == ""


@pytest.mark.parametrize("end", ["\f", "\r", "\x85", "\u2028"])
def test_a_path_that_a_user_mounts_at_is_no_line_of_the_table(
    place: Place, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    on(monkeypatch, "tmpfs")
    real = atomic.read_text

    def mounted(path: str, limit: int = atomic.LIMIT, dir_fd: int | None = None) -> str:
        by_user = f"9 1 0:9 / /a{end}{end}77\u2003b rw - fuse.x y rw\n"
        return (by_user if path.endswith("/mountinfo") else "") + real(path, limit, dir_fd)

    monkeypatch.setattr(atomic, "read_text", mounted)
    assert boot.file_system_type(str(place.lock)) == "tmpfs"


def test_a_lock_directory_that_cannot_be_made_is_a_broken_node(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as caught:
        LockStore(str(tmp_path / "gone/run")).check(make=True)
    assert caught.value.kind == BROKEN
    LockStore(str(tmp_path / "run")).check(make=True)
    assert (tmp_path / "run").is_dir()


@pytest.mark.parametrize(
    ("before", "number"),
    [(f"{OTHER_BOOT}{OTHER_BOOT}\n", errno.ENOSPC), (f"{OTHER_BOOT}\n", errno.EIO)],
)
def test_only_on_a_full_disk_a_boot_id_of_the_same_length_is_written_over(
    place: Place, monkeypatch: pytest.MonkeyPatch, before: str, number: int
) -> None:
    path = place.state / "boot_id"
    path.write_text(before)
    monkeypatch.setattr(atomic, "replace_file", raising(OSError(number, "it fails")))
    with pytest.raises(OSError, match="it fails") as caught:
        boot.write_boot_id(str(path), f"{BOOT}\n".encode())
    assert (caught.value.errno, path.read_text()) == (number, before)


def test_on_a_full_disk_the_boot_id_of_an_earlier_boot_is_written_over_and_no_link_followed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = place.state / "boot_id", f"{BOOT}\n".encode()
    path.write_text(f"{OTHER_BOOT}\n")
    monkeypatch.setattr(atomic, "replace_file", disk_full)
    boot.write_boot_id(str(path), data)
    assert path.read_bytes() == data
    plant_link(path)
    with pytest.raises(OSError, match="symbolic links"):
        boot.write_boot_id(str(path), data)


def test_a_new_boot_keeps_the_newest_lines_that_the_history_is_owed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grants, "OWED_CAP", 2)
    for number in range(3):
        (place.state / grants.OWED / f"t{number}").mkdir(parents=True)
        os.utime(place.state / grants.OWED / f"t{number}", (number, number))
    place.ready()
    assert sorted(os.listdir(place.state / grants.OWED)) == ["t1", "t2"]


def test_the_boot_id_is_on_the_disk_before_there_is_a_claim(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut one that is garbage would close the node."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    boot.write_boot_id(str(place.state / "boot_id"), f"{BOOT}\n".encode())
    assert len(synced) == 2  # the file, and the folder that has its name
