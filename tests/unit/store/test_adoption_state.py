# SPDX-License-Identifier: Apache-2.0
"""A STATE_DIR without room fails no job, and no device is granted twice for it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.daemon.reconcile.reconcile import ReconcileReport, reconcile_locks
from gpulock.errors import Refusal
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.store import adoption_state, boot, claim_records
from gpulock.store.owner import Owner
from gpulock.workstation.process_claims import claim_for_process
from tests.support.slurm_site import NODE_BROKEN, ROOT, RUN, SILENT, Site
from tests.support.trees import OTHER_BOOT, bus, record, soon


class Disk:
    """STATE_DIR's disk: while it is full nothing new is made there, and renames go on."""

    def __init__(self, site: Site, patch: pytest.MonkeyPatch) -> None:
        self._state = str(site.state)
        self.code = errno.ENOSPC
        self.full = True
        for name, is_new in (("open", is_created), ("mkdir", always), ("link", always)):
            patch.setattr(os, name, self._limited(name, is_new))

    def _limited(
        self, name: str, is_new: Callable[[tuple[object, ...]], bool]
    ) -> Callable[..., object]:
        real = getattr(os, name)

        def call(*arguments: object, **more: object) -> object:
            path = str(arguments[-1 if name == "link" else 0])
            new = path.startswith(f"{self._state}/") and is_new(arguments)
            if self.full and new and not os.path.lexists(path):
                raise OSError(self.code, os.strerror(self.code), path)
            return real(*arguments, **more)

        return call


def is_created(arguments: tuple[object, ...]) -> bool:
    flags = arguments[1]
    return isinstance(flags, int) and bool(flags & os.O_CREAT)


def always(_: tuple[object, ...]) -> bool:
    return True


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A node in a boot in which something was claimed already."""
    made = Site(tmp_path)
    made.process(60, "slurmd", uid=ROOT)
    for job in (12, 13):
        made.stepd(690 + job, f"{job}.extern")
    made.fails(SILENT)
    assert made.prolog(11, "3") == RUN
    made.epilog(11)
    return made


@pytest.fixture
def disk(site: Site, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(site, monkeypatch)


def marks(site: Site) -> list[str]:
    return sorted(path.name for path in site.state.glob("runs.*"))


def again(site: Site) -> ReconcileReport:
    node = site.node()
    return reconcile_locks(node, make_liveness_judge(node), soon())


def test_a_slurm_job_starts_and_the_log_says_what_is_lost(
    site: Site, disk: Disk, capfd: pytest.CaptureFixture[str]
) -> None:
    assert site.prolog(12, "0,1") == RUN
    assert site.granted() == [bus(0), bus(1)]
    assert (site.runs(), marks(site), site.drained()) == ([], ["runs.partial"], [])
    assert "No space left on device: the claim has no record there" in capfd.readouterr().err
    site.epilog(12)
    assert site.locks() == []


def test_so_does_a_process_whose_user_is_told(site: Site, disk: Disk) -> None:
    node = site.node()
    own = record(scheduler="process", pid=60, start=1000, job_id="60")
    grant = claim_for_process(node, own, ClaimRequest(1), soon())
    assert "No space left" in grant.fault
    assert (site.locks(), marks(site)) == ([grant.devices[0].id], ["runs.partial"])


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO])
def test_a_disk_that_failed_is_a_broken_node(site: Site, disk: Disk, code: int) -> None:
    disk.code = code
    assert site.prolog(12, "0,1") == NODE_BROKEN
    assert (site.locks(), marks(site)) == ([], ["runs.whole"])


def test_where_it_cannot_be_noted_that_a_record_is_missing_the_job_does_not_start(
    site: Site, disk: Disk
) -> None:
    (site.state / "runs.whole").unlink()
    assert site.prolog(12, "0,1") == RUN
    site.refused(12, "unknown")
    assert site.locks() == []


def test_a_lock_directory_that_is_lost_meanwhile_is_not_filled_again_by_halves(
    site: Site, disk: Disk
) -> None:
    site.prolog(12, "0,1")
    disk.full = False
    shutil.rmtree(site.lock)
    for _ in range(2):
        with pytest.raises(Refusal) as caught:
            again(site)
        assert "runs.partial when no job is left" in caught.value.do
    assert site.prolog(14, "0") == RUN
    site.refused(14, "unknown")
    (site.state / "runs.partial").unlink()
    assert again(site).adopted == []


def test_a_reconcile_writes_the_records_that_are_missing_once_there_is_room(
    site: Site, disk: Disk
) -> None:
    site.prolog(12, "0,1")
    again(site)
    assert (site.runs(), marks(site)) == ([], ["runs.mending"])
    site.prolog(13, "2")
    assert marks(site) == ["runs.partial"]
    disk.full = False
    again(site)
    assert (len(site.runs()), marks(site)) == (2, ["runs.whole"])
    held = {name: site.node().store.read(name).owner for name in site.locks()}
    shutil.rmtree(site.lock)
    assert len(again(site).adopted) == 2
    for name, own in held.items():
        found = site.node().store.read(name).owner
        assert found is not None and own is not None
        assert found.__dict__ == own.__dict__


def test_a_boot_that_an_earlier_version_began_is_whole_after_a_reconcile(
    site: Site, disk: Disk
) -> None:
    (site.state / "runs.whole").unlink()
    again(site)
    assert marks(site) == []
    disk.full = False
    again(site)
    assert marks(site) == ["runs.whole"]


def test_a_claim_that_finds_no_room_while_records_are_written_is_not_forgotten(
    site: Site, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.prolog(12, "0,1")
    disk.full = False
    real = claim_records.write_claim_record

    def keep(state_dir: str, own: Owner) -> str:
        adoption_state.mark_record_missing(state_dir)
        return real(state_dir, own)

    monkeypatch.setattr(claim_records, "write_claim_record", keep)
    again(site)
    assert marks(site) == ["runs.partial"]


@pytest.mark.parametrize("noted", [True, False])
def test_a_device_that_is_freed_without_room_is_not_half_of_a_record(
    site: Site, monkeypatch: pytest.MonkeyPatch, noted: bool
) -> None:
    site.prolog(12, "0,1")
    if not noted:
        (site.state / "runs.whole").unlink()
    disk = Disk(site, monkeypatch)
    held = site.node().store.read(bus(0)).owner
    assert held is not None
    claim_records.drop_device_from_record(str(site.state), held, bus(0))
    assert (site.runs(), marks(site)) == (([], ["runs.partial"]) if noted else ([held.token], []))
    disk.full = False
    again(site)
    assert (site.runs(), marks(site)) == ([held.token], ["runs.whole"])


@pytest.mark.parametrize("mark", ["runs.whole", "runs.partial", "runs.mending"])
def test_a_boot_begins_on_a_full_disk_and_all_its_claims_have_records(
    site: Site, disk: Disk, mark: str
) -> None:
    (site.state / "runs.whole").rename(site.state / mark)
    shutil.rmtree(site.lock)
    site.proc.boot(OTHER_BOOT)
    assert site.prolog(12, "0") == RUN
    assert boot.read_state_boot_id(str(site.state)) == OTHER_BOOT
    assert site.granted() == [bus(0)]
    assert marks(site) == ["runs.partial"]


@pytest.mark.parametrize("mark", ["runs.whole", "runs.partial", "runs.mending"])
def test_what_was_missing_in_an_earlier_boot_is_not_missing_in_this_one(
    site: Site, mark: str
) -> None:
    (site.state / "runs.whole").rename(site.state / mark)
    adoption_state.begin_adoption_state(str(site.state))
    assert marks(site) == ["runs.whole"]


def test_a_first_boot_on_a_full_disk_grants_nothing_and_breaks_no_node(
    site: Site, disk: Disk
) -> None:
    (site.state / "boot_id").unlink()
    (site.state / "runs.whole").unlink()
    shutil.rmtree(site.lock)
    assert site.prolog(12, "0") == RUN
    site.refused(12, "unknown")
    (site.state / "boot_id").write_text(OTHER_BOOT)  # without the end of a line: shorter
    assert site.prolog(12, "0") == RUN
    site.refused(12, "unknown")
    assert (site.state / "boot_id").read_text() == OTHER_BOOT
