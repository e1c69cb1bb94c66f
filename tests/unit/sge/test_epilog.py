# SPDX-License-Identifier: Apache-2.0
"""The epilog: frees its own run, and ends with 0 whatever happens."""

from __future__ import annotations

import os

import pytest

from gpulock.sge import claim, epilog, hook, site_hook, spool
from tests.support.execd import SpooledJob
from tests.support.faults import disk_full
from tests.support.jobs import SHEPHERD, Site, gpus
from tests.support.trees import OTHER_BOOT


def start(site: Site, job: SpooledJob) -> None:
    assert site.prolog(job) == 0


def end(site: Site, job: SpooledJob) -> None:
    assert epilog.main(["sge", str(site.pid)], site.environ(job), site.config()) == 0


def test_an_epilog_that_does_not_know_its_locks_says_so(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    def note(_: object, sentence: str, error: bool, **__: object) -> None:
        lines.append(sentence) if error else None

    monkeypatch.setattr(epilog, "log_hook_line", note)
    job = site.run(gpus(2))
    start(site, job)
    site.settings["SGE_CELL"] = "another"
    end(site, job)
    assert lines == [
        "job 12: it was granted GPUs, and no lock here is known as its own: gpulock why 12"
    ]
    lines.clear()
    end(site, site.run(job_id=13, pid=501))  # which was granted none
    assert (lines, len(site.locks())) == ([], 2)


def test_what_environment_and_files_of_the_job_say_does_not_matter(site: Site) -> None:
    first = site.run(gpus(2))
    start(site, first)
    other = site.run(job_id=13, pid=501)
    for name in ("environment", spool.RECORD):
        (other.folder / name).write_bytes((first.folder / name).read_bytes())
    end(site, other)
    assert len(site.locks()) == 2


def test_settings_a_shepherd_or_a_driver_that_are_not_there_end_with_0(site: Site) -> None:
    job = site.run(gpus(2))
    start(site, job)
    gone = str(site.root / "gone")
    assert epilog.main(["sge", str(site.pid)], site.environ(job), gone) == hook.DONE
    assert epilog.main(["sge"], {}, site.config()) == hook.DONE
    site.proc.remove(SHEPHERD)
    end(site, job)
    assert len(site.locks()) == 2


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("", "0"),
        ("0\n", "0"),
        ("25\n", "25"),
        ("7\n", "30"),  # every queue of the host would be in error
        ("  8\n0\n", "30"),
        ("+30", "30"),
        ("\udcff\n", "30"),
        ("1" * 100_000, "30"),
    ],
)
def test_a_job_that_ran_stops_no_queue_by_its_exit_status(
    site: Site, written: str, told: str
) -> None:
    job = site.run(gpus(2))
    start(site, job)
    status = job.folder / "exit_status"
    status.write_bytes(written.encode("utf-8", "surrogateescape"))
    (job.folder / "job_pid").touch()
    with status.open("a") as held:
        end(site, job)
        held.write("7\n")  # the owner's descriptor leads nowhere by now

    assert status.read_text() == f"{told}\n"
    assert site.locks() == []


def test_what_a_prolog_that_failed_left_as_exit_status_stays(site: Site) -> None:
    job = site.run(gpus(2))
    start(site, job)
    (job.folder / "exit_status").write_text("8\n")

    end(site, job)

    assert (job.folder / "exit_status").read_text() == "8\n"


@pytest.mark.root
def test_the_exit_status_is_the_shepherds_own_again(site: Site) -> None:
    job = site.run(gpus(2))
    for name in ("job_pid", "exit_status"):
        (job.folder / name).write_text("0")
    found = site.above()
    found.uid = 104
    epilog.secure_exit_status(found)
    status = job.folder / "exit_status"
    assert status.stat().st_uid == 104
    status.unlink()
    status.symlink_to("what its owner says later")
    epilog.secure_exit_status(found)
    assert (status.is_symlink(), status.read_text()) == (False, "30\n")


@pytest.mark.parametrize("code", [0, 1, 137])
def test_the_sites_epilog_runs_while_the_gpus_are_locked_and_its_exit_code_counts(
    site: Site, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    job, held = site.run(gpus(2)), list[int]()
    start(site, job)

    def run(call: hook.SgeHookCall, _environ: object) -> int:
        assert call.site == ["alice", "/site/epi", "a b"]
        held.append(len(site.locks()))
        return code

    monkeypatch.setattr(site_hook, "run_site_epilog", run)
    words = ["sge", str(site.pid), "alice", "/site/epi", "a b"]

    assert epilog.main(words, site.environ(job), site.config()) == code
    assert (held, site.locks()) == ([2], [])


@pytest.mark.parametrize(
    "other",
    [
        {"task_id": "2"},
        {"pid": SHEPHERD + 1},
        {"start": 999},
        {"boot_id": OTHER_BOOT},
    ],
)
def test_a_lock_is_this_runs_by_all_that_names_it(site: Site, other: dict[str, object]) -> None:
    site.run(gpus(1))
    node, found = site.node(), site.above()
    matches = epilog.match_sge_run(node, found)
    mine = claim.make_sge_owner(node, found, os.geteuid())
    assert matches(mine)
    assert not matches(mine.copy(**other))


def test_an_exit_status_that_cannot_be_secured_keeps_no_device(
    site: Site, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job = site.run(gpus(1))
    start(site, job)
    monkeypatch.setattr(epilog, "secure_exit_status", disk_full)
    end(site, job)
    assert site.locks() == []
    assert "exit_status: [Errno 28] No space left on device" in capfd.readouterr().err
