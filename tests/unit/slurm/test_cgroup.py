# SPDX-License-Identifier: Apache-2.0
"""A job's cgroup: a process in it is left of the job, and what cannot be read is not empty."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulock.alloc.job_processes import find_job_processes
from gpulock.slurm.steps import SlurmSteps
from tests.support.slurm_site import OTHER_UID, ROOT, UID, Site, freezer, scan_of, slurm_lock

V2 = "system.slice/slurmstepd.scope/job_12"


def left(site: Site) -> str:
    """Return what is left of job 12 once its steps are over."""
    steps = SlurmSteps(site.node().settings)
    return find_job_processes(slurm_lock(), scan_of(site), steps.add_members).reason()


def left_or_step(site: Site) -> str:
    steps = SlurmSteps(site.node().settings)
    return find_job_processes(slurm_lock(), scan_of(site), steps.add_members_and_steps).reason()


@pytest.mark.parametrize("step", ["", "/step_extern", "/step_0", "/step_batch/task_0", "/a/b/c/d"])
@pytest.mark.parametrize("part", ["freezer", "devices", "memory", "cpuset"])
@pytest.mark.parametrize("top", ["slurm", "slurm_n1"])
def test_a_process_in_the_jobs_cgroup_is_left(site: Site, part: str, top: str, step: str) -> None:
    site.process(900, "sleep")
    site.cgroup(f"{part}/{top}/uid_{UID}/job_12{step}", 900)
    assert "900" in left(site)
    assert "900" in left_or_step(site)


@pytest.mark.parametrize(
    "path",
    [
        freezer(13),
        freezer(123),
        freezer(12, OTHER_UID),
        freezer(12, UID, "n2"),
        "system.slice/slurmstepd.scope/job_1",
        "system.slice/n2_slurmstepd.scope/job_12",
        f"blkio/slurm/uid_{UID}/job_12",
    ],
)
def test_another_jobs_cgroup_is_not_this_jobs(site: Site, path: str) -> None:
    site.cgroup(path, 900)
    assert left(site) == ""


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


def no_file(folder: Path) -> None:
    (folder / "cgroup.procs").unlink()
    (folder / "cgroup.procs").mkdir()


def garbage(folder: Path) -> None:
    (folder / "cgroup.procs").write_text("900\nx\n")


@pytest.mark.parametrize("path", [freezer(), V2])
@pytest.mark.parametrize("spoil", [no_folder, no_file, garbage])
def test_a_cgroup_that_cannot_be_read_is_not_empty(
    site: Site, path: str, spoil: Callable[[Path], None]
) -> None:
    spoil(site.cgroup(path))
    assert left(site) != ""


def test_a_cgroup_that_goes_while_it_is_read_holds_nobody(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = site.cgroup(f"{freezer()}/step_0", 900)
    real = os.listdir

    def late(path: str) -> list[str]:
        names = real(path)
        if path == str(inner):
            shutil.rmtree(inner)
        return names

    monkeypatch.setattr(os, "listdir", late)
    assert left(site) == ""


@pytest.mark.parametrize("words", ["sleep\x00100000000", "/usr/bin/sleep\x00infinity"])
def test_the_extern_steps_own_placeholder_is_nobodys(site: Site, words: str) -> None:
    """It outlives a step daemon that was killed."""
    site.process(900, "sleep", words, ROOT)
    site.cgroup(f"{freezer()}/step_extern", 900)
    assert left(site) == ""
    site.process(901, "python")
    site.cgroup(f"{freezer()}/step_0", 901)
    assert "901" in left(site)


@pytest.mark.parametrize(
    ("words", "uid"),
    [
        ("sleep\x00100000000", UID),
        ("sleep\x001000", ROOT),
        ("sleep\x00100000000\x001", ROOT),
        ("bash\x00infinity", ROOT),
        ("", ROOT),
    ],
)
def test_what_looks_like_the_placeholder_is_somebody(site: Site, words: str, uid: int) -> None:
    site.process(900, "sleep", words, uid)
    site.cgroup(f"{freezer()}/step_extern", 900)
    assert "900" in left(site)
