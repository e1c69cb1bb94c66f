# SPDX-License-Identifier: Apache-2.0
"""The prolog: the right exit code for each situation, and nothing kept by a job that does not start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gpulock import owner, quarantine
from gpulock.sge import envfile, hook, prolog, request
from gpulock.simulate.execd import SpooledJob
from gpulock.simulate.packed_job import NOT_CONSUMABLE, PER_JOB
from tests.unit.jobs import SHEPHERD, Site, child_of, gpus, variables
from tests.unit.trees import BOOT, bus

RUN, QUEUE_ERROR, REQUEUE, JOB_ERROR = 0, 1, 99, 100
FALSE_JOB = {"JOB_ID": "13", "SGE_TASK_ID": "0", "QUEUE": "gpu.q"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path)
    child_of(monkeypatch, made)
    return made


def start(site: Site, job: SpooledJob, *more: str, **keys: str) -> int:
    argv = ["sge", str(site.pid), *more]
    return prolog.main(argv, site.environ(job), site.config(**keys))


def test_a_job_gets_what_it_asked_for(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    job = site.run(gpus(2))
    assert start(site, job) == RUN
    assert site.locks() == [bus(0), bus(1)]
    found = variables(job.folder)
    assert found["CUDA_VISIBLE_DEVICES"] == found["SGE_GPU"] == "0,1"
    assert found["JOB_ID"] == "12"
    assert capfd.readouterr().out == ""


def test_the_record_in_the_spool_is_that_of_the_lock(site: Site) -> None:
    job = site.run(gpus(1), owner="alice", queue="gpu.q")
    start(site, job)
    kept = owner.parse((job.folder / prolog.RECORD).read_text())
    lock = site.node().store.read(bus(0)).owner
    assert lock is not None
    assert (kept.token, kept.key()) == (lock.token, lock.key())
    assert (lock.user, lock.queue, lock.pid) == ("alice", "gpu.q", SHEPHERD)
    assert (lock.spool_dir, lock.boot_id) == (str(job.folder), BOOT)


def test_a_job_that_asked_for_none_is_masked_and_locks_nothing(site: Site) -> None:
    job = site.run(variables=(("CUDA_VISIBLE_DEVICES", "0"), ("SGE_GPU", "0")))
    assert start(site, job) == RUN
    found = variables(job.folder)
    assert (found["CUDA_VISIBLE_DEVICES"], found["SGE_GPU"]) == ("", "")
    assert found["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert not site.lock.exists()


def test_a_job_that_asked_for_none_needs_no_driver(site: Site) -> None:
    shutil.rmtree(site.driver)
    assert start(site, site.run(gpus(0))) == RUN


def test_a_job_that_asked_for_none_is_left_alone_where_that_is_configured(site: Site) -> None:
    job = site.run(variables=(("CUDA_VISIBLE_DEVICES", "0"),))
    before = (job.folder / "environment").read_bytes()
    assert start(site, job, HIDE_UNREQUESTED="no") == RUN
    assert (job.folder / "environment").read_bytes() == before


def test_what_the_user_set_is_overwritten(site: Site) -> None:
    mine = (("CUDA_VISIBLE_DEVICES", "3"), ("APPTAINERENV_CUDA_VISIBLE_DEVICES", "3"))
    job = site.run(gpus(1), variables=(*mine, ("SINGULARITYENV_NVIDIA_VISIBLE_DEVICES", "all")))
    start(site, job)
    found = variables(job.folder)
    assert "3" not in {found[name] for name, _ in mine}
    assert found["SINGULARITYENV_NVIDIA_VISIBLE_DEVICES"] != "all"


def test_the_prolog_run_twice_gives_the_same(site: Site) -> None:
    job = site.run(gpus(2))
    assert start(site, job) == RUN
    before = variables(job.folder)
    token = (job.folder / prolog.RECORD).read_text()
    assert start(site, job) == RUN
    assert variables(job.folder) == before
    assert (job.folder / prolog.RECORD).read_text() == token


@pytest.mark.parametrize(("key", "code"), [("requeue", REQUEUE), ("error", JOB_ERROR)])
def test_too_few_free_is_what_the_site_says(
    site: Site, key: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    start(site, site.run(gpus(3)))
    job = site.run(gpus(2), job_id=13, pid=501)
    assert start(site, job, ON_BUSY=key) == code
    told = capfd.readouterr().err
    assert told.startswith("gpulock: job 13: busy: ")
    assert told.count("\n") == 1 and "job 12" in told
    assert len(site.locks()) == 3


@pytest.mark.parametrize(("key", "code"), [("stop", QUEUE_ERROR), ("requeue", REQUEUE)])
@pytest.mark.parametrize("fault", ["driver", "expected", "lock_dir", "state_dir", "driver_set"])
def test_a_broken_node_is_what_the_site_says(site: Site, key: str, code: int, fault: str) -> None:
    job = site.run(gpus(2))
    keys = {"ON_BROKEN": key}
    if fault == "driver":
        shutil.rmtree(site.driver)
    elif fault == "expected":
        keys["GPUS"] = "8"
        job = site.run(gpus(8), job_id=13)
    elif fault == "lock_dir":
        site.lock.mkdir()
        site.lock.chmod(0o777)
    elif fault == "state_dir":
        shutil.rmtree(site.state)
    else:
        keys["DRIVER_DIR"] = str(site.root)
    assert start(site, job, **keys) == code
    assert site.locks() == []


@pytest.mark.parametrize("asked", [gpus(1.5), gpus(-1), gpus(5), gpus(10**6), gpus(float("nan"))])
def test_a_request_that_makes_no_sense_is_the_jobs_error(site: Site, asked: object) -> None:
    job = site.run(asked)  # type: ignore[arg-type]
    assert start(site, job, GPUS="4") == JOB_ERROR
    assert site.locks() == []


def test_gpus_asked_for_on_several_hosts_need_a_site_that_gives_them_there(site: Site) -> None:
    job = site.run(gpus(1), pe="mpi", hosts=(("node", 1), ("other", 1)))
    assert start(site, job) == JOB_ERROR
    assert start(site, job, SGE_SLAVE_TASKS="yes") == RUN


def test_a_per_job_request_on_several_hosts_is_taken_here(site: Site) -> None:
    asked = gpus(1, consumable=PER_JOB)
    assert start(site, site.run(asked, pe="mpi", hosts=(("node", 2), ("other", 2)))) == RUN
    assert site.locks() == [bus(0)]


@pytest.mark.parametrize("fault", ["file", "garbage", "flag", "lost"])
def test_what_cannot_be_found_out_is_requeued_and_never_unmasked(site: Site, fault: str) -> None:
    job = site.run(gpus(1, consumable=NOT_CONSUMABLE if fault == "flag" else 1))
    if fault == "file":
        job.job_file.unlink()
    elif fault == "garbage":
        job.job_file.write_bytes(b"\0" * 100)
    elif fault == "lost":
        (site.state / "boot_id").write_text(BOOT)
    assert start(site, job, SGE_BINARIES=str(site.root)) == REQUEUE
    assert site.locks() == []


def test_unknowns_of_several_jobs_and_users_are_a_broken_node(site: Site) -> None:
    site.settings["SGE_BINARIES"] = str(site.root)
    start(site, site.run(gpus(1), job_id=1))
    codes: list[int] = []
    for number, user in ((13, "alice"), (14, "alice"), (15, "bob"), (16, "bob")):
        job = site.run(gpus(1), job_id=number, owner=user)
        job.job_file.unlink()
        codes.append(start(site, job))
    assert codes == [REQUEUE, REQUEUE, QUEUE_ERROR, QUEUE_ERROR]


def test_one_user_alone_stops_no_queue(site: Site) -> None:
    start(site, site.run(gpus(1), job_id=1))
    for number in range(20, 30):
        job = site.run(gpus(1), job_id=number, owner="mallory")
        job.job_file.write_bytes(b"")
        assert start(site, job) == REQUEUE


def test_in_uuid_mode_an_unread_uuid_is_could_not_find_out_and_locks_nothing(site: Site) -> None:
    for number in range(4):
        site.gpu(bus(number), number, "GPU-????????-????")
    assert start(site, site.run(gpus(1)), VISIBLE_DEVICES="uuid") == REQUEUE
    assert site.locks() == []


@pytest.mark.parametrize("place", ["environment", "record"])
def test_a_job_that_cannot_be_told_keeps_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    job = site.run(gpus(2))
    if place == "environment":
        (job.folder / "environment").unlink()
    else:
        (job.folder / prolog.RECORD).mkdir()
    assert start(site, job) == QUEUE_ERROR
    assert site.locks() == []


def test_a_job_whose_shepherd_dies_meanwhile_keeps_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = site.run(gpus(2))
    real = os.mkdir

    def last_lock(path: str, mode: int = 0o777) -> None:
        real(path, mode)
        if path.endswith(bus(1)):
            site.proc.remove(SHEPHERD)

    monkeypatch.setattr(os, "mkdir", last_lock)
    assert start(site, job) == REQUEUE
    assert site.locks() == []


def test_a_fault_nobody_foresaw_is_a_broken_node_that_says_where(
    site: Site, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job = site.run(gpus(1))

    def bug(*_: object) -> None:
        raise KeyError("x\ny")

    monkeypatch.setattr(envfile, "change", bug)
    assert start(site, job) == QUEUE_ERROR
    told = capfd.readouterr().err
    assert ("KeyError" in told, "test_sge_prolog.py:" in told, told.count("\n")) == (True, True, 1)
    assert site.locks() == []


def test_a_fault_under_the_jobs_own_limits_is_blamed_on_the_job(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = site.run(gpus(1))

    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(request, "asked", no_memory)
    assert start(site, job) == QUEUE_ERROR
    assert start(site, job, "--limited") == JOB_ERROR


def test_a_hook_that_its_shepherd_did_not_start_does_nothing(site: Site) -> None:
    job = site.run(gpus(1))
    site.proc.shepherd(600, job.folder, uid=os.geteuid())
    assert prolog.main(["sge", "600"], site.environ(job), site.config()) == QUEUE_ERROR
    assert not site.lock.exists()


def test_a_launcher_may_stand_between(site: Site) -> None:
    job = site.run(gpus(1))
    site.proc.add(501, "launch", ppid=SHEPHERD)
    site.pid = 501
    assert prolog.main(["sge", str(SHEPHERD)], site.environ(job), site.config()) == RUN


def test_a_hook_for_another_job_than_the_shepherds_does_nothing(site: Site) -> None:
    site.run(gpus(1))
    assert prolog.main(["sge", str(SHEPHERD)], FALSE_JOB, site.config()) == JOB_ERROR


def test_a_job_with_forged_lines_does_not_start(site: Site) -> None:
    job = site.run(gpus(1), command=("/bin/echo", "x\nhost_slots=4\n"))
    assert start(site, job) == JOB_ERROR


def test_settings_that_are_wrong_stop_the_queue(site: Site) -> None:
    job = site.run(gpus(1))
    path = site.config(GPUS="many")
    assert prolog.main(["sge", str(site.pid)], site.environ(job), path) == QUEUE_ERROR
    gone = str(site.root / "gone")
    assert prolog.main(["sge", str(site.pid)], site.environ(job), gone) == QUEUE_ERROR


def test_only_root_or_a_simulations_user_runs_a_hook(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = site.run(gpus(1))
    uid = os.geteuid() or 1000
    path = site.config(SIMULATION="")
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert prolog.main(["sge", str(site.pid)], site.environ(job), path) == QUEUE_ERROR


def test_a_quarantined_device_is_not_given(site: Site) -> None:
    start(site, site.run(gpus(1)))
    quarantine.put(str(site.state), quarantine.QUARANTINE, bus(1), "root", "ECC")
    job = site.run(gpus(1), job_id=13, pid=501)
    start(site, job)
    assert variables(job.folder)["CUDA_VISIBLE_DEVICES"] == "2"


@pytest.mark.parametrize("word", ["", "x", "-5", "500x"])
def test_without_a_shepherd_named_the_parent_is_it(site: Site, word: str) -> None:
    job = site.run(gpus(1))
    assert prolog.main(["sge", word], site.environ(job), site.config()) == RUN


@pytest.mark.xfail(strict=True, raises=ValueError, reason="finding 28: read outside the handler")
def test_a_shepherd_that_is_a_strange_number_is_not_a_crash(site: Site) -> None:
    job = site.run(gpus(1))
    assert prolog.main(["sge", "²"], site.environ(job), site.config()) in (RUN, QUEUE_ERROR)


def test_what_is_told_never_spoils_the_exit_code(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def closed(fd: int, data: bytes) -> int:
        if fd == 2:
            raise BrokenPipeError(32, "broken pipe")
        return real(fd, data)

    monkeypatch.setattr(os, "write", closed)
    assert start(site, site.run(gpus(99))) == JOB_ERROR
    assert hook.DONE == RUN
