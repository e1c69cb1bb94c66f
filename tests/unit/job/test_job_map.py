# SPDX-License-Identifier: Apache-2.0
"""Files that tell other exporters whose a GPU is: in their own forms, and never a job's trouble."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulock.daemon.reconcile.reconcile import reconcile_locks
from gpulock.deadline import Deadline
from gpulock.job import job_map
from gpulock.node.devices import place_device
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.sge import epilog, prolog
from gpulock.store.gate import Gate
from gpulock.store.owner import Owner
from tests.support.driver_reads import observe_driver_reads
from tests.support.jobs import Site as SgeSite
from tests.support.jobs import child_of, gpus
from tests.support.slurm_site import RUN, UID, Site, slurm_record
from tests.support.trees import Box, bus, record, soon


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A node with both folders."""
    made = Site(tmp_path)
    for key, name in (("JOB_MAP_DIR", "dcgm"), ("GPUSTAT_DIR", "gpustat")):
        (tmp_path / name).mkdir()
        made.set(**{key: str(tmp_path / name)})
    return made


def dcgm(site: Site) -> dict[str, str]:
    return texts(site.root / "dcgm")


def gpustat(site: Site) -> dict[str, str]:
    return texts(site.root / "gpustat")


def texts(folder: Path) -> dict[str, str]:
    """Return what stands in each file; no half written one may be there."""
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def test_the_job_of_each_gpu_stands_in_a_file_by_index(site: Site) -> None:
    site.shuffled()
    site.prolog(12, "1,3")  # indexes 2 and 1
    assert dcgm(site) == {"1": "12\n", "2": "12\n"}
    text = f"12 {UID}\n"
    uuids = {"GPU-00000000-aaaa": text, "GPU-00000001-aaaa": text}
    assert gpustat(site) == {"1": text, "2": text, **uuids}


def test_files_can_be_read_by_any_exporter(site: Site) -> None:
    site.prolog(12, "1")
    for path in (site.root / "dcgm/1", site.root / "gpustat/1"):
        assert path.stat().st_mode & 0o777 == 0o644


def test_only_the_folder_that_is_set_is_written(tmp_path: Path) -> None:
    for key in ("JOB_MAP_DIR", "GPUSTAT_DIR"):
        root = tmp_path / key
        folder = root / "files"
        folder.mkdir(parents=True)
        site = Site(root)
        site.set(**{key: str(folder)})
        site.prolog(12, "1")
        assert len(list(folder.iterdir())) == (1 if key == "JOB_MAP_DIR" else 2)


def test_gpustat_files_are_removed_whatever_dcgm_exporters_are(site: Site) -> None:
    site.set(JOB_MAP_DIR="")
    site.prolog(12, "0")
    site.epilog(12)
    assert gpustat(site) == {}


def test_only_the_device_that_is_freed_is_emptied(site: Site) -> None:
    site.prolog(12, "0,1")
    site.process(900, "python", fds={9: site.dev / "nvidia1"})
    site.epilog(12)
    assert dcgm(site) == {"0": "", "1": "12\n"}


def test_the_file_of_another_job_is_not_touched(site: Site) -> None:
    site.prolog(12, "0")
    (site.root / "dcgm/0").write_text("13\n")
    (site.root / "gpustat/0").write_text(f"13 {UID}\n")
    site.epilog(12)
    assert (dcgm(site), gpustat(site)) == ({"0": "13\n"}, {"0": f"13 {UID}\n"})


def test_the_next_job_takes_the_place_of_the_one_before(site: Site) -> None:
    site.prolog(12, "0")
    site.epilog(12)
    site.prolog(13, "0")
    assert dcgm(site) == {"0": "13\n"}
    site.epilog(12)
    assert dcgm(site) == {"0": "13\n"}


def test_an_instance_is_named_by_card_and_gpu_instance(site: Site) -> None:
    site.mig()
    site.map("0.gi1.ci0", "0.gi2.ci0", "1")
    site.prolog(12, "1,2")
    assert dcgm(site) == {"0.2": "12\n", "1": "12\n"}
    assert set(gpustat(site)) == {"0.2", "MIG-2", "1", "GPU-00000001-aaaa"}
    site.epilog(12)
    assert dcgm(site) == {"0.2": "", "1": ""}


def test_a_uuid_that_is_no_file_name_or_not_known_has_no_file(site: Site) -> None:
    (site.root / "gpustat/GPU-x").mkdir()
    site.gpu(bus(0), 0, "GPU-????????-????")
    site.gpu(bus(1), 1, "GPU-x/../../evil")
    site.prolog(12, "0,1")
    (site.root / "gpustat/GPU-x").rmdir()
    assert set(gpustat(site)) == {"0", "1"}
    assert not (site.root / "evil").exists()


def test_a_claim_that_is_undone_leaves_no_job_in_any_file(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = job_map.write_job_map

    def then_fail(*arguments: object) -> None:
        real(*arguments)  # type: ignore[arg-type]
        raise MemoryError

    monkeypatch.setattr(job_map, "write_job_map", then_fail)
    assert site.prolog(12, "0,1") == RUN
    assert "MemoryError" in site.refused(12, "unknown")
    assert site.locks() == []
    assert (set(dcgm(site).values()), gpustat(site)) == ({""}, {})


def gone(folder: Path) -> None:
    shutil.rmtree(folder)


def a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


def in_the_way(folder: Path) -> None:
    for name in ("0", "1", "GPU-00000000-aaaa"):
        (folder / name).mkdir()


def links(folder: Path) -> None:
    (folder.parent / "victim").write_text("precious")
    for name in ("0", "1", "GPU-00000000-aaaa"):
        (folder / name).symlink_to(folder.parent / "victim")


@pytest.mark.parametrize("spoil", [gone, a_file, in_the_way, links])
@pytest.mark.parametrize("name", ["dcgm", "gpustat"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_cannot_be_written_stops_no_claim_and_no_release(
    site: Site, spoil: Callable[[Path], None], name: str, when: str
) -> None:
    if when == "before":
        spoil(site.root / name)
    assert site.prolog() == RUN
    if when == "after":
        gone(site.root / name)
        if spoil is not gone:
            (site.root / name).mkdir()
            spoil(site.root / name)
    site.epilog()
    assert (site.locks(), site.claims()) == ([], [])
    if spoil is links:
        assert (site.root / "victim").read_text() == "precious"


def test_a_full_disk_stops_no_claim(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.rename

    def full(source: str, target: str, **more: int | None) -> None:
        if "/dcgm/" in target:
            raise OSError(28, "no space")
        real(source, target, **more)

    monkeypatch.setattr(os, "rename", full)
    assert site.prolog() == RUN
    assert (dcgm(site), len(gpustat(site))) == ({}, 4)


def test_a_card_that_is_gone_at_the_release_stops_it_not(site: Site) -> None:
    site.prolog(12, "0,1")
    shutil.rmtree(site.driver / "gpus" / bus(0))
    site.epilog(12)
    assert site.locks() == []
    shutil.rmtree(site.driver)
    site.prolog(13, None)


def test_a_job_of_grid_engines_is_told_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "dcgm"
    folder.mkdir()
    site = SgeSite(tmp_path, JOB_MAP_DIR=str(folder))
    child_of(monkeypatch, site)
    job = site.run(gpus(2), task_id=3)
    assert prolog.main(["sge", str(site.pid)], site.environ(job), site.config()) == 0
    assert texts(folder) == {"0": "12.3\n", "1": "12.3\n"}
    epilog.main(["sge", str(site.pid)], site.environ(job), site.config())
    assert texts(folder) == {"0": "", "1": ""}


@pytest.fixture
def driver_reads(site: Site, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    return observe_driver_reads(site.records, monkeypatch)


def test_no_driver_is_read_with_the_gate_held(site: Site, driver_reads: list[bool]) -> None:
    """Such a read may never return, and nobody gets through the gate then."""
    site.prolog(12, "0,1")
    site.epilog(12)
    assert dcgm(site) == {"0": "", "1": ""}
    assert len(driver_reads) > 2
    assert True not in driver_reads


def test_no_driver_is_read_with_the_gate_held_for_a_share(
    site: Site, driver_reads: list[bool]
) -> None:
    site.set(SHARES="0:4", SLURM_DEVICE_SELECTION="gpulock", SLURM_GRES="gpu gpux")
    assert site.requested(12, "gpu:share:1") == RUN
    assert dcgm(site) == {"0": "12\n"}
    site.epilog(12, None)
    assert dcgm(site) == {"0": ""}
    assert driver_reads
    assert True not in driver_reads


def test_no_driver_is_read_with_the_gate_held_for_what_a_reconcile_frees(
    site: Site, driver_reads: list[bool]
) -> None:
    site.prolog(12, "0")
    site.left_by(900)
    site.epilog(12)
    assert dcgm(site) == {"0": "12\n"}
    site.proc.remove(900)
    driver_reads.clear()
    node = site.node()
    reconcile_locks(node, make_liveness_judge(node), soon())
    assert dcgm(site) == {"0": ""}
    assert driver_reads
    assert True not in driver_reads


@pytest.mark.parametrize(
    ("changes", "job"),
    [
        ({"scheduler": "slurm"}, "12"),
        ({"scheduler": "process", "job_id": "4711"}, "pid 4711"),
        ({"scheduler": "admin"}, "reserve"),
    ],
)
def test_a_job_is_named_as_people_do(site: Site, changes: dict[str, object], job: str) -> None:
    record: Owner = slurm_record(**changes)
    job_map.write_job_map(site.node(), record, site.node().devices()[:1], soon())
    assert dcgm(site) == {"0": f"{job}\n"}


def test_a_gate_that_stays_shut_stops_no_claim_of_a_share(tmp_path: Path) -> None:
    node = Box(tmp_path, JOB_MAP_DIR=str(tmp_path / "dcgm")).node()
    node.store.check(make=True)
    place = place_device(node.devices()[0], f"{bus(0)}.share1", 4)
    with Gate(node.store, soon()):
        job_map.write_job_map(node, record(), [place], Deadline(0.0))
