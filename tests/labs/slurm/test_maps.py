# SPDX-License-Identifier: Apache-2.0
"""Other exporters read which Slurm job has which GPU in files of their own formats."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from typing import Any, Final

import pytest

from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.jobs import impatient, occupied, started, wait_requeued
from tests.labs.slurm.lab import JobId
from tests.labs.slurm.modes import NODE, SLURM_CONF, Mode, by_gpulock, by_slurm
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
BOTH = pytest.mark.parametrize("mode", [by_gpulock, by_slurm], scope="module")
DCGM, GPUSTAT = "/run/dcgm-job-map", "/run/gpustat"
KEYS: Final = {"JOB_MAP_DIR": DCGM, "GPUSTAT_DIR": GPUSTAT}
EXTRA = {**SLURM_CONF, "KillWait": "1"}
ALICE = 27011


def prepare(gpus: Gpulock, mode: Mode, more: Mapping[str, str] | None = None, **setup: Any) -> None:
    """Set a node up with empty folders for the files."""
    mode(gpus, {**KEYS, **(more or {})}, extra=EXTRA, **setup)
    for folder in (DCGM, GPUSTAT):
        place = gpus.slurm.path_in(NODE, folder)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(mode=0o755)


def files(gpus: Gpulock, folder: str) -> dict[str, str]:
    """Return what stands in the files of a folder, by name."""
    place = gpus.slurm.path_in(NODE, folder)
    found: dict[str, str] = {}
    for name in sorted(os.listdir(place)):
        with contextlib.suppress(FileNotFoundError):  # renamed over meanwhile
            found[name] = (place / name).read_text()
    return found


def uuids(gpus: Gpulock, *indexes: int) -> list[str]:
    """Return the UUIDs of devices."""
    return [gpus.status(NODE)["gpus"][index]["uuid"] for index in indexes]


def gpustat(gpus: Gpulock, *held: tuple[int, JobId, int]) -> dict[str, str]:
    """Return what Princeton's exporter is to read of (index, job, uid)."""
    found: dict[str, str] = {}
    for index, job, uid in held:
        for name in (str(index), *uuids(gpus, index)):
            found[name] = f"{job} {uid}\n"
    return found


def done(gpus: Gpulock, *jobs: JobId) -> None:
    """Cancel jobs and wait for their Epilogs."""
    gpus.slurm.scancel(*jobs)
    for job in jobs:
        gpus.slurm.wait_done(job)


@BOTH
def test_files_name_the_job_while_it_holds_and_an_empty_one_is_renamed_over_at_its_end(
    slurm_gpus: Gpulock, mode: Mode
) -> None:
    prepare(slurm_gpus, mode)
    first = started(slurm_gpus, NODE, "--gres=gpu:2")
    second = slurm_gpus.slurm.submit("slbob", "-w", NODE, "--gres=gpu:1", script="exec sleep 600\n")
    slurm_gpus.slurm.wait_running(second)
    dcgm = {"0": f"{first}\n", "1": f"{first}\n", "2": f"{second}\n"}
    assert files(slurm_gpus, DCGM) == dcgm
    holders = [(0, first, ALICE), (1, first, ALICE), (2, second, 27012)]
    assert files(slurm_gpus, GPUSTAT) == gpustat(slurm_gpus, *holders)
    place = slurm_gpus.slurm.path_in(NODE, DCGM)
    for folder in (DCGM, GPUSTAT):
        modes = [p.stat().st_mode & 0o777 for p in slurm_gpus.slurm.path_in(NODE, folder).iterdir()]
        assert set(modes) == {0o644}  # the exporters are no root
    with (place / "0").open() as before:
        done(slurm_gpus, first)
        assert before.read() == f"{first}\n"  # not emptied in place
        assert os.fstat(before.fileno()).st_ino != (place / "0").stat().st_ino
    assert files(slurm_gpus, DCGM) == {**dcgm, "0": "", "1": ""}
    assert files(slurm_gpus, GPUSTAT) == gpustat(slurm_gpus, holders[2])
    third = started(slurm_gpus, NODE, "--gres=gpu:3")
    assert files(slurm_gpus, DCGM) == {**dict.fromkeys("013", f"{third}\n"), "2": dcgm["2"]}
    done(slurm_gpus, second, third)
    assert files(slurm_gpus, DCGM) == dict.fromkeys("0123", "")
    assert files(slurm_gpus, GPUSTAT) == {}


def test_tasks_of_an_array_and_components_stand_by_their_own_numbers(slurm_gpus: Gpulock) -> None:
    """Princeton's exporter reads the id as a number: `12_3` would not be one."""
    prepare(slurm_gpus, by_gpulock)
    slurm = slurm_gpus.slurm
    words = ("--array=5-6", "-w", NODE, "--gres=gpu:1")
    array = slurm.submit("slalice", *words, script="exec sleep 600\n")
    slurm.wait_running(array)
    tasks = slurm.tasks(array)
    for task in tasks.values():
        slurm.wait_running(task)
    assert set(files(slurm_gpus, DCGM).values()) == {f"{task}\n" for task in tasks.values()}
    assert set(files(slurm_gpus, GPUSTAT).values()) == {f"{t} {ALICE}\n" for t in tasks.values()}
    slurm.clear_jobs()
    parts = ("--gres=gpu:1", "-w", "slnode2", ":", "--gres=gpu:1", "-w", NODE)
    leader = slurm.submit("slalice", *parts, script="exec sleep 600\n")
    wait_until(  # its leader may run before the Prolog on the other node is over
        lambda: {*files(slurm_gpus, DCGM).values()} - {""} == {f"{leader + 1}\n"},
        why=lambda: f"the component's file\n{str(files(slurm_gpus, DCGM)) + slurm.logs()}",
    )
    slurm.scancel(leader)


def test_slurms_position_is_told_as_the_index_of_its_card(slurm_gpus: Gpulock) -> None:
    prepare(slurm_gpus, by_slurm, order={NODE: (3, 1, 0, 2)})
    job = started(slurm_gpus, NODE, "--gres=gpu:1")
    (record,) = slurm_gpus.locks(NODE).values()
    assert record.minors == ("3",)
    rows = slurm_gpus.status(NODE)["gpus"]
    (index,) = [row["index"] for row in rows if row["held"]]
    assert files(slurm_gpus, DCGM) == {str(index): f"{job}\n"}
    assert files(slurm_gpus, GPUSTAT) == gpustat(slurm_gpus, (index, job, ALICE))


def test_a_refused_job_and_folders_that_cannot_be_written_change_no_file_and_no_job(
    slurm_gpus: Gpulock,
) -> None:
    prepare(slurm_gpus, by_gpulock)
    with occupied(slurm_gpus, NODE, 0, 1, 2, 3) as pid, impatient(slurm_gpus, NODE):
        before = files(slurm_gpus, DCGM)
        job = slurm_gpus.slurm.submit("slalice", "-w", NODE, "--gres=gpu:1")
        wait_requeued(slurm_gpus, job)
        assert files(slurm_gpus, DCGM) == before
        assert str(job) not in "".join(before.values()) + str(pid)
    for folder in (DCGM, GPUSTAT):
        shutil.rmtree(slurm_gpus.slurm.path_in(NODE, folder))
    slurm_gpus.slurm.path_in(NODE, GPUSTAT).write_text("")  # no folder at all
    served = slurm_gpus.slurm.submit("slalice", "-w", NODE, "--gres=gpu:1")
    try:
        assert slurm_gpus.slurm.wait_done(served) == "COMPLETED"
    finally:
        slurm_gpus.slurm.path_in(NODE, GPUSTAT).unlink()
    assert slurm_gpus.locks(NODE) == {}
