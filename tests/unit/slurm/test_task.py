# SPDX-License-Identifier: Apache-2.0
"""The TaskProlog: the very lines that a task gets in each mode, and in doubt none."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from gpulock.job import environment
from gpulock.slurm import note, task
from tests.support.faults import fail_at, raising
from tests.support.locks import retire_lock
from tests.support.slurm_site import OTHER_UID, RUN, STEPD, UID, row
from tests.support.slurm_tasks import TWINS, TaskSite, stopped
from tests.support.trees import bus

OURS = {"SLURM_DEVICE_SELECTION": "gpulock"}
OPTIONAL = {*environment.OPTIONAL_VARIABLES}


@pytest.fixture
def site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> TaskSite:
    return TaskSite(tmp_path, monkeypatch, capfd)


def test_the_lines_where_gpulock_chooses(site: TaskSite) -> None:
    site.set(**OURS)
    site.prolog(12, "2,3")
    site.prolog(13, "1")
    site.stepd(STEPD, "13.0", UID)
    told = site.run(SLURM_STEP_GPUS="1", CUDA_VISIBLE_DEVICES="1", NVIDIA_VISIBLE_DEVICES="all")
    own = {
        "CUDA_VISIBLE_DEVICES": "2",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NVIDIA_VISIBLE_DEVICES": "GPU-00000002-aaaa",
        "GPULOCK_DEVICES": "GPU-00000002-aaaa",
        "GPU_DEVICE_ORDINAL": "2",
    }
    assert told.exported == {f"{twin}{name}": own[name] for twin in ("", *TWINS) for name in own}
    assert (told.code, told.printed) == (RUN, [])
    assert told.unset == OPTIONAL  # no CDI_DIR is set


def test_a_run_does_not_start_by_the_note_of_the_run_before(site: TaskSite) -> None:
    """Its Prolog could neither read the settings nor have the job given back."""
    site.prolog(12, "2,3", SLURM_JOB_RESTART_COUNT="1")
    for count in ("1", "0", "-1", "two", "9" * 30):
        assert site.run(SLURM_RESTART_COUNT=count).code == RUN, count
    sentence = stopped(site.run(SLURM_RESTART_COUNT="2"))
    assert "the claim here is of the job's run 1, and this is run 2" in sentence


@pytest.mark.parametrize("gpus", [False, True])
def test_the_mps_of_another_grant_is_unset_and_a_users_own_stands(
    site: TaskSite, *, gpus: bool
) -> None:
    site.set(**OURS)
    mps_dir = site.node().settings.mps_dir
    if gpus:
        site.prolog(12, "2,3")
        site.prolog(13, "1")
        site.stepd(STEPD, "13.0", UID)
    stale = {
        "CUDA_MPS_PIPE_DIRECTORY": f"{mps_dir}/0000-8a-00.0/pipe",
        "CUDA_MPS_LOG_DIRECTORY": f"{mps_dir}/0000-8a-00.0/log",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=8000M",
    }
    told = site.run(**stale, **{f"{TWINS[0]}{name}": value for name, value in stale.items()})
    names = {f"{twin}{name}" for twin in ("", TWINS[0]) for name in stale}
    assert told.unset >= names
    assert not told.exported.keys() & names
    told = site.run(**{**stale, "CUDA_MPS_PIPE_DIRECTORY": "/tmp/x", "CUDA_MPS_LOG_DIRECTORY": "/"})
    assert not told.unset & names


def test_the_lines_where_slurm_chooses(site: TaskSite) -> None:
    site.prolog(12, "1,3")
    told = site.run(CUDA_VISIBLE_DEVICES="1,3", SLURM_STEP_GPUS="1,3", GPU_DEVICE_ORDINAL="1,3")
    uuids = "GPU-00000001-aaaa,GPU-00000003-aaaa"
    own = {
        "CUDA_VISIBLE_DEVICES": "1,3",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NVIDIA_VISIBLE_DEVICES": uuids,
        "GPULOCK_DEVICES": uuids,
    }
    assert told.exported == {f"{twin}{name}": own[name] for twin in ("", *TWINS) for name in own}
    ordinals = {f"{twin}GPU_DEVICE_ORDINAL" for twin in TWINS}
    assert told.unset == ordinals | OPTIONAL  # no CDI_DIR is set
    assert (told.code, told.printed) == (RUN, [])


def test_a_step_is_told_the_names_of_the_devices_that_it_may_open(site: TaskSite) -> None:
    """Root may open all that has a node, so one that leads nowhere stands for a denied one."""
    site.set(CDI_DIR="/run/cdi")
    site.prolog(12, "1,3")
    (site.dev / "nvidia1").unlink(missing_ok=True)
    (site.dev / "nvidia1").symlink_to(site.dev / "denied")
    told = site.run(CUDA_VISIBLE_DEVICES="0", SLURM_STEP_GPUS="3", SLURM_GPUS_ON_NODE="1")
    assert told.mask == "0"
    assert told.exported["GPULOCK_DEVICES"] == "GPU-00000003-aaaa"
    assert told.exported["NVIDIA_VISIBLE_DEVICES"] == "GPU-00000003-aaaa"
    assert told.exported["GPULOCK_CDI"] == f"--device=gpulock.io/gpu={bus(3)}"


@pytest.mark.parametrize(("allowed", "count"), [(os.R_OK | os.W_OK, 1), (os.R_OK, 0), (os.W_OK, 0)])
def test_a_device_is_open_to_a_task_that_may_read_it_and_write_it(
    site: TaskSite, monkeypatch: pytest.MonkeyPatch, allowed: int, count: int
) -> None:
    (site.dev / "nvidia0").touch()
    monkeypatch.setattr(os, "access", lambda _, asked: asked & allowed == asked)
    devices = site.node().devices()[:1]
    assert len(task.probe_devices(str(site.dev), devices)[0]) == count


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES])
def test_a_task_that_may_open_no_locked_device_starts_only_where_modes_keep_it_out(
    site: TaskSite, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A device cgroup says EPERM: it has opened another device, which is not locked."""
    site.prolog(12, "1")
    (site.dev / "nvidia1").unlink(missing_ok=True)
    (site.dev / "nvidia1").symlink_to(site.dev / "denied")
    fail_at(monkeypatch, "open", "dev/nvidia1", OSError(number, os.strerror(number)))
    environ = {"CUDA_VISIBLE_DEVICES": "0", "SLURM_STEP_GPUS": "1", "SLURM_GPUS_ON_NODE": "1"}
    told = site.run(**environ)
    if number == errno.EPERM:
        assert "other GPUs than are locked" in stopped(told)
    else:
        assert (told.code, told.mask) == (RUN, "0")
        assert "GPULOCK_DEVICES" in told.unset


def test_names_of_devices_are_left_out_where_they_cannot_be_told(site: TaskSite) -> None:
    site.set(CDI_DIR="/run/cdi")
    site.prolog(12, "1,3")
    told = site.run(
        CUDA_VISIBLE_DEVICES="0", SLURM_STEP_GPUS="3", NVIDIA_VISIBLE_DEVICES="all", GPULOCK_CDI="x"
    )
    assert told.mask == "0"
    kept = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    assert {*told.exported} == {f"{twin}{name}" for twin in ("", *TWINS) for name in kept}
    names = ("NVIDIA_VISIBLE_DEVICES", "GPULOCK_DEVICES")
    wanted = {f"{twin}{name}" for twin in ("", *TWINS) for name in names}
    assert told.unset == {*wanted, *[f"{twin}GPU_DEVICE_ORDINAL" for twin in TWINS], *OPTIONAL}


@pytest.mark.parametrize("keys", [{}, OURS])
def test_a_job_without_gpus_gets_an_empty_mask(site: TaskSite, keys: dict[str, str]) -> None:
    site.set(**keys)
    site.prolog(12, None)
    told = site.run(CUDA_VISIBLE_DEVICES="0,1,2,3", NVIDIA_VISIBLE_DEVICES="all")
    assert (told.code, told.mask, told.exported["NVIDIA_VISIBLE_DEVICES"]) == (RUN, "", "void")


def test_a_refused_job_is_told_why_and_ends_as_its_note_says(site: TaskSite) -> None:
    site.prolog(12, "x")
    assert stopped(site.run()) == site.note().refused
    site.map("0", "1", "2", "3", shared="shard")
    site.answers(row(12, Gres="gres:shard:1"))
    site.prolog(12, "0")
    assert "invalid request" in stopped(site.run(), 1)


# --- in doubt the task is stopped -----------------------------------------------------------------


@pytest.mark.parametrize(
    "evidence",
    [{"SLURM_GPUS_ON_NODE": "2"}, {"SLURM_STEP_GPUS": "0,1"}, {"SLURM_GPUS_ON_NODE": ""}],
)
def test_without_a_note_a_job_that_slurm_gave_gpus_is_stopped(
    site: TaskSite, evidence: dict[str, str]
) -> None:
    assert "no claim" in stopped(site.run(**evidence))
    assert not site.lock.exists()


@pytest.mark.parametrize("keys", [{}, OURS])
def test_without_a_note_and_without_evidence_the_task_sees_nothing(
    site: TaskSite, keys: dict[str, str]
) -> None:
    site.set(**keys)
    told = site.run(CUDA_VISIBLE_DEVICES="0", SLURM_JOB_GPUS="0")
    assert (told.code, told.mask) == (RUN, "")


def test_the_note_of_another_user_is_not_this_jobs(site: TaskSite) -> None:
    """The id was given again, and the Prolog of this job never ran (docs/facts/slurm.md)."""
    site.prolog(12, "0,1", SLURM_JOB_UID=str(OTHER_UID))
    assert site.run().mask == ""
    stopped(site.run(SLURM_GPUS_ON_NODE="2"))


def test_a_claim_without_a_record_stops_the_task(site: TaskSite) -> None:
    site.prolog()
    record = site.records / "claims" / site.note().token / "record"
    record.write_text("")
    assert "GPU 0" in stopped(site.run(CUDA_VISIBLE_DEVICES="0,1"))
    record.unlink()
    assert "its claim is over" in stopped(site.run(CUDA_VISIBLE_DEVICES="0,1"))


def test_without_settings_and_with_a_folder_for_a_note_no_task_starts(site: TaskSite) -> None:
    (site.records / "tasks/n1.12").mkdir(parents=True)
    assert "not a regular file" in stopped(site.run())
    site.set(SLURM_WAIT="soon")
    assert "SLURM_WAIT must be a number of seconds" in stopped(site.run())


@pytest.mark.parametrize("number", [0, 1])
def test_a_device_that_is_not_the_claims_any_more_stops_the_task(
    site: TaskSite, number: int
) -> None:
    site.prolog()
    retire_lock(site.node().store, site.node().store.read(bus(number)), "its job ended")
    assert f"GPU {number}" in stopped(site.run(CUDA_VISIBLE_DEVICES="0,1"))


def test_a_lock_that_was_removed_stops_no_task_of_its_claim(site: TaskSite) -> None:
    """Nobody else gets the device: its record stands, and the next claim makes the lock again."""
    site.prolog()
    shutil.rmtree(site.lock)
    assert site.run(CUDA_VISIBLE_DEVICES="0,1").mask == "0,1"
    assert site.prolog(13, "0") == RUN
    site.refused(13)
    assert site.locks() == [bus(0), bus(1)]


@pytest.mark.parametrize(
    "title", ["bash", "", "slurmstepd: [x.0]", "slurmstepd: [12]", "slurmstepd: [²2.0]", None]
)
def test_without_a_title_the_job_is_slurmstepds_own_word(site: TaskSite, title: str | None) -> None:
    site.prolog()
    if title is None:
        site.proc.remove(STEPD)
    else:
        site.process(STEPD, "slurmstepd", title)
    assert site.run(SLURM_STEP_ID="0", CUDA_VISIBLE_DEVICES="1").mask == "1"
    site.set(**OURS)
    assert site.run(SLURM_STEP_ID="0", SLURM_STEP_GPUS="1").mask == "1"
    assert site.run(SLURM_STEP_GPUS="1").mask == "0,1"


@pytest.mark.parametrize(
    "environ",
    [{"SLURM_JOB_ID": "../12"}, {"SLURM_JOB_ID": "1" * 30}, {"SLURM_JOB_ID": "12\nexport A=b"}],
)
def test_who_is_not_called_as_a_task_prolog_stops(site: TaskSite, environ: dict[str, str]) -> None:
    site.prolog()
    site.process(STEPD, "bash", "bash")
    stopped(site.run(**environ))


BINDS = "/d/535.5.1/bin:/nvbin,/d/535.5.1/lib:/nvlib"


def with_binds(site: TaskSite) -> None:
    site.prolog()
    own = site.note()
    own.binds = BINDS
    note.write_task_note(site.node().store, own)


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        ("", BINDS),
        (f"/a,{BINDS}", f"/a,{BINDS}"),
        ("/ä b", f"/ä b,{BINDS}"),
        ("/a\nexport LD_PRELOAD=/evil.so", BINDS),
        ("\udcff", BINDS),
        ("/a\u2028unset PATH", BINDS),
    ],
)
def test_the_drivers_files_are_appended_to_the_users_own_binds(
    site: TaskSite, old: str, expected: str
) -> None:
    with_binds(site)
    told = site.run(CUDA_VISIBLE_DEVICES="0", APPTAINER_BINDPATH=old, SINGULARITY_BINDPATH=old)
    assert told.exported["APPTAINER_BINDPATH"] == expected
    assert told.exported["SINGULARITY_BINDPATH"] == expected
    assert "LD_PRELOAD" not in told.exported


HOSTILE = ["a\nexport LD_PRELOAD=/evil.so\n", "\nunset PATH", "\nprint x", "\r\0\x1b", "\udcff"]


TOLD = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "APPTAINER_BINDPATH",
    "SLURM_STEP_GPUS",
    "SLURM_JOB_GPUS",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURMD_NODENAME",
    "SLURM_GPUS_ON_NODE",
)


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("mode", ["slurm", "gpulock", "none", "title"])
def test_no_value_of_the_users_becomes_a_line_of_ours(
    site: TaskSite, mode: str, value: str
) -> None:
    site.set(SLURM_DEVICE_SELECTION="gpulock" if mode == "gpulock" else "slurm")
    if mode != "none":
        with_binds(site)
    if mode == "title":
        site.process(STEPD, "bash", "bash")
    for name in TOLD:
        told = site.run(**{"CUDA_VISIBLE_DEVICES": "0", "SLURM_STEP_ID": "0", name: value})
        assert "LD_PRELOAD" not in told.exported and "PATH" not in told.unset, name
        assert "x" not in told.printed, name
        assert (told.code == RUN) is (not told.printed), name


@pytest.mark.parametrize("fault", [KeyError("a"), OSError(5, "io\nexport A=b"), MemoryError()])
def test_a_fault_nobody_foresaw_stops_the_task(
    site: TaskSite, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    monkeypatch.setattr(note, "find_task_note", raising(fault))
    assert type(fault).__name__ in stopped(site.run())


def test_a_request_that_is_refused_the_next_time_too_is_not_tried_again(site: TaskSite) -> None:
    """Of several types of GPU the Prolog is told one: an srun job began anew with 213."""
    site.prolog(12, "0")
    said = stopped(site.run(SLURM_GPUS_ON_NODE="2", SLURM_STEP_GPUS="0,1"), 1)
    assert "one type of GPU" in said
