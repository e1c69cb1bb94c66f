# SPDX-License-Identifier: Apache-2.0
"""Other exporters find which Slurm job has which GPU, in their own files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.labs.slurm_gpulock import Gpulock
from tests.labs.slurm_lab import JobId
from tests.labs.slurm_modes import NODE, by_gpulock, by_slurm

pytestmark = pytest.mark.lab
FOLDERS = {"JOB_MAP_DIR": "/run/gpulock/dcgm", "GPUSTAT_DIR": "/run/gpulock/gpustat"}


def folders(gpus: Gpulock) -> tuple[Path, Path]:
    """Make the folders of both exporters on a node."""
    found = [gpus.slurm.path_in(NODE, folder) for folder in FOLDERS.values()]
    for folder in found:
        folder.mkdir()
    return found[0], found[1]


def contents(folder: Path) -> dict[str, str]:
    """Return the text of every file in a folder."""
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def running(gpus: Gpulock, *args: str) -> JobId:
    """Start a job and wait until it runs."""
    job = gpus.slurm.submit("slalice", "-w", NODE, *args, script="sleep 60\n")
    gpus.slurm.wait_running(job)
    return job


def test_both_exporters_find_the_job_and_its_end(slurm_gpus: Gpulock) -> None:
    by_gpulock(slurm_gpus, FOLDERS)
    dcgm, gpustat = folders(slurm_gpus)
    slurm = slurm_gpus.slurm
    job = running(slurm_gpus, "--gres=gpu:2")
    uid = slurm.users["slalice"].uid
    uuids = [g["uuid"] for g in slurm_gpus.status(NODE)["gpus"][:2]]
    assert contents(dcgm) == {"0": f"{job}\n", "1": f"{job}\n"}
    assert contents(gpustat) == {name: f"{job} {uid}\n" for name in ("0", "1", *uuids)}
    slurm.scancel(job)
    slurm.wait_done(job)
    assert contents(dcgm) == {"0": "", "1": ""}
    assert contents(gpustat) == {}


def test_the_file_is_named_by_the_card_not_by_slurms_position(slurm_gpus: Gpulock) -> None:
    by_slurm(slurm_gpus, {**FOLDERS, "JOB_MAP_RELEASE": "unlink"}, order={NODE: (3, 1, 0, 2)})
    dcgm, _ = folders(slurm_gpus)
    job = running(slurm_gpus, "--gres=gpu:1")
    assert contents(dcgm) == {"3": f"{job}\n"}
    slurm_gpus.slurm.scancel(job)
    slurm_gpus.slurm.wait_done(job)
    assert contents(dcgm) == {}


def test_a_folder_that_cannot_be_written_stops_no_job(slurm_gpus: Gpulock) -> None:
    by_gpulock(slurm_gpus, {"JOB_MAP_DIR": "/proc/nowhere", "GPUSTAT_DIR": "/dev/null/x"})
    job = running(slurm_gpus, "--gres=gpu:1")
    slurm_gpus.slurm.scancel(job)
    slurm_gpus.slurm.wait_done(job)
    slurm_gpus.wait_free()
