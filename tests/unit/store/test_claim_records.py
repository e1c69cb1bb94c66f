# SPDX-License-Identifier: Apache-2.0
"""Records for adoption: one a claim, and gone with the claim's last lock, by any process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.alloc.release import release_locks
from gpulock.store import claim_records, owner
from tests.support.slurm_site import Site, slurm_record
from tests.support.trees import bus, judge_of, record, soon


def kept(state: Path, token: str = "feedfacefeedface") -> tuple[str, ...]:
    """Return the devices in a record, none where there is no record."""
    path = state / "runs" / token
    return owner.parse_owner(path.read_text()).devices if path.exists() else ()


def test_a_record_is_kept_as_it_is_and_read_by_root_and_others(tmp_path: Path) -> None:
    one = slurm_record(devices=(bus(0), bus(1)), positions="0,1", het_leader="11")
    old = os.umask(0o022)
    try:
        claim_records.write_claim_record(str(tmp_path), one)
    finally:
        os.umask(old)
    path = tmp_path / "runs" / one.token
    assert owner.parse_owner(path.read_text()).__dict__ == one.__dict__
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o644, 0o755)


def test_a_record_that_is_kept_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    claim_records.write_claim_record(str(tmp_path), slurm_record())
    claim_records.write_claim_record(str(tmp_path), slurm_record(devices=(bus(3),)))
    assert kept(tmp_path) == (bus(3),)
    assert os.listdir(tmp_path / "runs") == ["feedfacefeedface"]


@pytest.mark.parametrize("spoil", ["file", "missing"])
def test_a_record_that_cannot_be_kept_is_an_error(tmp_path: Path, spoil: str) -> None:
    state = tmp_path / "state"
    if spoil == "file":
        state.mkdir()
        (state / "runs").touch()
    else:
        state.touch()
    with pytest.raises(OSError):
        claim_records.write_claim_record(str(state), slurm_record())


def test_a_device_that_is_freed_is_adopted_no_more_and_the_last_takes_the_record(
    tmp_path: Path,
) -> None:
    one = slurm_record(devices=(bus(0), bus(1)))
    claim_records.write_claim_record(str(tmp_path), one)
    claim_records.drop_device_from_record(str(tmp_path), one, bus(0))
    assert kept(tmp_path) == (bus(1),)
    claim_records.drop_device_from_record(str(tmp_path), one, bus(1))
    assert os.listdir(tmp_path / "runs") == []
    claim_records.drop_device_from_record(str(tmp_path), one, bus(1))


def test_another_claims_record_stays(tmp_path: Path) -> None:
    claim_records.write_claim_record(str(tmp_path), slurm_record(token="a", devices=(bus(0),)))
    claim_records.write_claim_record(str(tmp_path), slurm_record(token="b", devices=(bus(0),)))
    claim_records.drop_device_from_record(str(tmp_path), slurm_record(token="a"), bus(0))
    assert os.listdir(tmp_path / "runs") == ["b"]


def test_a_record_that_cannot_be_read_goes(tmp_path: Path) -> None:
    one = slurm_record(devices=(bus(0), bus(1)))
    claim_records.write_claim_record(str(tmp_path), one)
    (tmp_path / "runs" / one.token).write_text("garbage")
    claim_records.drop_device_from_record(str(tmp_path), one, bus(0))
    assert os.listdir(tmp_path / "runs") == []


def test_a_state_dir_without_records_is_no_error(tmp_path: Path) -> None:
    claim_records.drop_device_from_record(str(tmp_path), slurm_record(), bus(0))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("scheduler", ["slurm", "process", "sge"])
def test_freeing_a_lock_removes_it_from_its_record(tmp_path: Path, scheduler: str) -> None:
    site = Site(tmp_path)
    site.prolog(99, "3")
    one = record(scheduler=scheduler, devices=(bus(0), bus(1)), node=site.node().name)
    claim_records.write_claim_record(str(site.state), one)
    for number in (0, 1):
        site.node().store.make(bus(number), one.copy(minor=str(number)))
    node = site.node()
    site.process(900, "python", uid=one.uid, fds={9: site.dev / "nvidia1"})
    release_locks(node, lambda found: found.token == one.token, judge_of(node), soon(), "test")
    expected = (bus(1),) if scheduler != "sge" else (bus(0), bus(1))
    assert (kept(site.state), bus(1) in site.locks()) == (expected, True)
