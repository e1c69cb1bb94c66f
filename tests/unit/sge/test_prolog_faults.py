# SPDX-License-Identifier: Apache-2.0
"""The prolog when something is wrong: never unmasked, nothing kept by a job that does not start."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path

import pytest

from gpulock.errors import INVALID_REQUEST, UNKNOWN, Refusal
from gpulock.hooks import frame
from gpulock.node.procfs import Proc
from gpulock.sge import claim, environment_file, epilog, hook, prolog, request, site_hook, spool
from tests.support.faults import NO_PROCESS, fail_at, faulty_settings, raising, refusal
from tests.support.jobs import SHEPHERD, Site, gpus
from tests.support.packed_job import NOT_CONSUMABLE
from tests.support.trees import BOOT, bus

RUN, QUEUE_ERROR, REQUEUE, JOB_ERROR = 0, 1, 99, 100
FALSE_JOB = {"JOB_ID": "13", "SGE_TASK_ID": "0", "QUEUE": "gpu.q"}


@pytest.mark.parametrize("fault", ["file", "garbage", "flag", "lost"])
def test_what_cannot_be_found_out_is_requeued_and_never_unmasked(site: Site, fault: str) -> None:
    job = site.run(gpus(1, consumable=NOT_CONSUMABLE if fault == "flag" else 1))
    if fault == "file":
        job.job_file.unlink()
    elif fault == "garbage":
        job.job_file.write_bytes(b"\0" * 100)
    elif fault == "lost":
        (site.state / "boot_id").write_text(BOOT)
    assert site.prolog(job, SGE_BINARIES=str(site.root)) == REQUEUE
    assert site.locks() == []


def test_unknowns_of_several_jobs_and_users_are_a_broken_node(site: Site) -> None:
    site.settings["SGE_BINARIES"] = str(site.root)
    site.prolog(site.run(gpus(1), job_id=1))
    codes: list[int] = []
    for number, user in ((13, "alice"), (14, "alice"), (15, "bob"), (16, "bob")):
        job = site.run(gpus(1), job_id=number, owner=user)
        job.job_file.unlink()
        codes.append(site.prolog(job))
    assert codes == [REQUEUE, REQUEUE, QUEUE_ERROR, QUEUE_ERROR]


@pytest.mark.parametrize(
    ("environ", "kind"),
    [(b"A=b\0GPULOCK_LAUNCHER=1\0", ""), (b"A=b\0", INVALID_REQUEST), (None, UNKNOWN)],
)
def test_a_shepherd_that_cannot_be_read_just_now_puts_no_parallel_job_in_error(
    site: Site, environ: bytes | None, kind: str
) -> None:
    """The mark in its environment says who started it: what is not read is not known."""
    site.run(gpus(1), pe="smp")
    file = site.proc.root / str(site.pid) / "environ"
    if environ is None:
        file.unlink()
    else:
        file.write_bytes(environ)
    node, found = site.node(), site.above()
    node.settings.isolation = "cgroup"
    said = ""
    try:
        prolog.check_host_count(node, found, None)
    except Refusal as refusal:
        said = refusal.kind
    assert said == kind


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(
            (b"job_owner=", b"owner="),
            (b"host_slots=", b"slots="),
            (b"ja_task_id=0", b"ja_task_id=x"),
        ),
        (b"\x10\x02\0\0", b"\x10\x03\0\0"),  # of the packed job
    ],
)
def test_an_unknown_grid_engine_makes_jobs_wait_and_stops_no_queue(
    site: Site, old: bytes, new: bytes
) -> None:
    """Three jobs of two owners were a broken node, and its queue went to error."""
    site.prolog(site.run(gpus(1), job_id=1))
    for number, user in enumerate(("alice", "bob", "carol", "alice", "bob"), 13):
        job = site.run(gpus(1), job_id=number, owner=user, pe="smp")
        path = job.folder / "config" if b"=" in old else job.job_file
        assert old in path.read_bytes()
        path.write_bytes(path.read_bytes().replace(old, new, 1))
        assert site.prolog(job) == REQUEUE


@pytest.mark.parametrize(
    ("plant", "limited", "code"),
    [
        ("no driver", False, QUEUE_ERROR),
        ("no driver", True, JOB_ERROR),
        ("no descriptor", False, REQUEUE),
        ("no descriptor", True, JOB_ERROR),
        ("unforeseen", True, JOB_ERROR),
        ("no room", True, REQUEUE),
        ("too few", True, REQUEUE),
    ],
)
def test_what_goes_wrong_under_the_jobs_own_limits_is_the_jobs_and_stops_no_queue(
    site: Site, monkeypatch: pytest.MonkeyPatch, plant: str, limited: bool, code: int
) -> None:
    """drop-env says that it could not lift them; a full disk and a busy node are nobody's."""
    if plant == "too few":
        assert site.prolog(site.run(gpus(4), job_id=1)) == RUN
    before = site.locks()
    job = site.run(gpus(1), pid=501)
    faults = {
        "no descriptor": OSError(errno.EMFILE, "too many open files"),
        "unforeseen": KeyError("x"),
        "no room": OSError(errno.ENOSPC, "no space left"),
    }
    if plant == "no driver":
        shutil.rmtree(site.driver)
    elif plant in faults:
        monkeypatch.setattr(environment_file, "rewrite_env_text", raising(faults[plant]))
    environ = {**site.environ(job), **({"GPULOCK_LIMITED": "1"} if limited else {})}
    assert prolog.main(["sge", str(site.pid)], environ, site.config()) == code
    assert site.locks() == before


def test_a_fault_that_cannot_even_be_counted_stops_no_queue(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Descriptors or memory may be short for the module as well that counts refusals."""
    monkeypatch.setitem(sys.modules, "gpulock.alloc.streaks", None)
    monkeypatch.setattr(environment_file, "rewrite_env_text", raising(KeyError("x")))
    assert site.prolog(site.run(gpus(1))) == REQUEUE
    assert site.locks() == []


@pytest.mark.parametrize("place", ["environment", "record"])
def test_a_job_that_cannot_be_told_keeps_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    job, before = site.run(gpus(2)), ""
    if place == "environment":
        (job.folder / "environment").unlink()
    else:
        (job.folder / spool.RECORD).mkdir()
        before = (job.folder / "environment").read_text()
    gone = place == "environment"  # with the job, perhaps
    assert site.prolog(job) == (REQUEUE if gone else QUEUE_ERROR)
    assert site.locks() == []
    assert not (job.folder / spool.RECORD).is_file()
    assert gone or (job.folder / "environment").read_text() == before


def test_a_job_whose_shepherd_dies_meanwhile_keeps_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = site.run(gpus(2))
    real = os.mkdir

    def last_lock(path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        real(path, mode, dir_fd=dir_fd)
        if path.endswith(bus(1)):
            site.proc.remove(SHEPHERD)

    monkeypatch.setattr(os, "mkdir", last_lock)
    assert site.prolog(job) == REQUEUE
    assert site.locks() == []


@pytest.mark.parametrize(
    "where", [(environment_file, "rewrite_env_text"), (request, "read_sge_job_gpus")]
)
def test_a_fault_nobody_foresaw_that_jobs_of_several_owners_meet_is_the_nodes(
    site: Site, monkeypatch: pytest.MonkeyPatch, where: tuple[object, str]
) -> None:
    """Before its grant, or after: then the grant is undone."""
    site.prolog(site.run(gpus(1), job_id=1))
    monkeypatch.setattr(*where, raising(MemoryError()))
    codes: list[int] = []
    for number, user in ((13, "alice"), (14, "alice"), (15, "alice"), (16, "bob"), (17, "eve")):
        codes.append(site.prolog(site.run(gpus(1), job_id=number, owner=user)))
    assert codes == [REQUEUE, REQUEUE, REQUEUE, QUEUE_ERROR, QUEUE_ERROR]


@pytest.mark.parametrize(("kind", "last"), [(UNKNOWN, QUEUE_ERROR), (INVALID_REQUEST, JOB_ERROR)])
def test_a_site_prolog_that_cannot_follow_a_grant_is_a_refusal_like_any_other(
    site: Site, monkeypatch: pytest.MonkeyPatch, kind: str, last: int
) -> None:
    """Where those of several owners cannot start, the node is broken."""
    held = list[int]()

    def become(call: hook.SgeHookCall, _environ: object) -> Refusal:
        assert call.site[1:] == ["root@/site/pro", "a b"]
        held.append(len(site.locks()))
        return Refusal(kind, "its user is not known", "see getent passwd")

    monkeypatch.setattr(site_hook, "become_site_prolog", become)
    codes: list[int] = []
    for number, owner in enumerate(("alice", "alice", "bob")):
        job = site.run(gpus(1), job_id=20 + number, owner=owner)
        codes.append(site.prolog(job, owner, "root@/site/pro", "a b"))

    assert codes == [REQUEUE if kind == UNKNOWN else JOB_ERROR] * 2 + [last]
    assert held == [1, 2, 3]


def test_a_hook_that_its_shepherd_did_not_start_does_nothing(site: Site) -> None:
    job = site.run(gpus(1))
    site.proc.shepherd(600, job.folder, uid=os.geteuid())
    assert prolog.main(["sge", "600"], site.environ(job), site.config()) == QUEUE_ERROR
    assert not site.lock.exists()


def test_a_hook_for_another_job_than_the_shepherds_does_nothing(site: Site) -> None:
    site.run(gpus(1))
    assert prolog.main(["sge", str(SHEPHERD)], FALSE_JOB, site.config()) == JOB_ERROR


@pytest.mark.parametrize(
    "keys",
    [{"EXPECTED_GPUS": "many"}, {"SGE_ROOT": "/opt/\0"}, {"mode": "664"}, {}],
)
def test_settings_that_are_wrong_stop_no_queue_and_start_nothing(
    site: Site, keys: dict[str, str]
) -> None:
    """Pushed to a cluster one waiting job would stop queue after queue."""
    job = site.run(gpus(1))
    path = str(site.root / "gone")
    if "mode" in keys:
        path = site.config()
        os.chmod(path, int(keys["mode"], 8))
    elif keys:
        path = site.config(**keys)
    assert prolog.main(["sge", str(site.pid)], site.environ(job), path) == REQUEUE


def test_what_is_told_never_spoils_the_exit_code(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, "write", "/2", BrokenPipeError(32, "broken pipe"))
    assert site.prolog(site.run(gpus(99))) == JOB_ERROR
    assert hook.DONE == RUN


def test_a_prolog_that_fails_when_it_is_run_again_takes_nothing_from_the_job(site: Site) -> None:
    """The first one's grant stands: what it told the job is in use perhaps."""
    job = site.run(gpus(2), task_id=2)
    assert site.prolog(job) == RUN
    (job.folder / "environment").unlink()
    assert site.prolog(job) == REQUEUE
    assert site.locks() == [bus(0), bus(1)]


def test_a_claim_that_is_undone_takes_nothing_from_another_task_of_the_job(site: Site) -> None:
    assert site.prolog(site.run(gpus(1), task_id=1)) == RUN
    job = site.run(gpus(1), task_id=2, pid=501)
    (job.folder / "environment").unlink()
    assert site.prolog(job) == REQUEUE
    assert site.locks() == [bus(0)]


def test_a_shepherd_that_cannot_be_seen_any_more_is_taken_for_dead(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.run(gpus(1))
    found = site.above()
    claim.check_shepherd_alive(site.node(), found)
    monkeypatch.setattr(Proc, "running", raising(PermissionError(13, "denied")))
    assert refusal(lambda: claim.check_shepherd_alive(site.node(), found)).kind == UNKNOWN


@pytest.mark.parametrize(
    ("line", "group", "code"),
    [
        ("use_systemd=yes", 65400, JOB_ERROR),  # of 8.1.10, whose processes carry no group
        ("enable_systemd=1", 0, JOB_ERROR),  # Open Cluster Scheduler, as it is installed
        ("enable_systemd=1", 65400, RUN),  # with ENABLE_ADDGRP_KILL=true
    ],
)
def test_a_gpu_job_that_systemd_starts_without_a_group_is_refused(
    site: Site, line: str, group: int, code: int
) -> None:
    """Nothing would tell its processes: a lock would go while the job lives."""
    job = site.run(gpus(1))
    config = job.folder / "config"
    text = config.read_text().replace("add_grp_id=0", f"add_grp_id={group}")
    config.write_text(f"{text}{line}\n")
    assert site.prolog(job) == code
    assert len(site.locks()) == (code == RUN)


@pytest.mark.root
@pytest.mark.parametrize(("job", "lines"), [(hook.TRIAL_JOB, 0), ("12", 4), ("", 4), ("self", 4)])
def test_a_hook_that_is_tried_without_a_job_writes_nothing_to_syslog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, lines: int
) -> None:
    """JOB_ID is execd's own number, whatever the job's owner sets."""
    told: list[tuple[object, ...]] = []

    monkeypatch.setattr(frame, "log_to_system", lambda *words: told.append(words))
    config = faulty_settings(tmp_path)
    environ = {"JOB_ID": job, "GPULOCK_JOB": hook.TRIAL_JOB, "SGE_TASK_ID": hook.TRIAL_JOB}
    assert prolog.main(["sge", NO_PROCESS], environ, config) != RUN
    assert epilog.main(["sge", NO_PROCESS], environ, config) == hook.DONE
    assert len(told) == lines


def test_a_job_whose_gpus_count_in_a_complex_that_is_not_known_hears_why_it_gets_none(
    site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    """SGE_COMPLEXES was misspelt: jobs ran with an empty mask, and nobody heard why."""
    assert site.prolog(site.run(gpus(2)), SGE_COMPLEXES="gups") == RUN
    assert "asks for gpu, which is not in SGE_COMPLEXES" in capfd.readouterr().err
    assert site.prolog(site.run(gpus(2, "slots_of_disk"), job_id=13)) == RUN
    assert site.prolog(site.run(gpus(0), job_id=14)) == RUN
    assert capfd.readouterr().err == ""
