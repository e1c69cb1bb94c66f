# SPDX-License-Identifier: Apache-2.0
"""The shepherd above a hook: found, checked, and not talked into anything."""

from __future__ import annotations

import os

import pytest

from gpulock.errors import BROKEN, INVALID_REQUEST, UNKNOWN, Refusal
from gpulock.node.procfs import Proc, ProcessStatus
from gpulock.sge import spool
from gpulock.sge.hook import SgeHookCall, find_spool
from tests.support.clock import replace_clock
from tests.support.faults import refusal
from tests.support.jobs import SHEPHERD, Site, child_of, gpus

ME = os.geteuid()


def kind(site: Site, pid: int = SHEPHERD) -> str:
    return refusal(lambda: site.above(pid)).kind


@pytest.mark.parametrize(
    ("name", "uids"),
    [("bash", (ME,) * 4), ("sge_shepherd2", (ME,) * 4), ("sge_shepherd", (ME + 1, ME, ME, ME))],
)
def test_what_only_looks_like_a_shepherd_is_none(
    site: Site, name: str, uids: tuple[int, ...]
) -> None:
    job = site.run()
    site.proc.add(SHEPHERD, name, uids=uids, cwd=job.folder)
    assert kind(site) == BROKEN


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777])
def test_a_directory_others_may_write_is_refused(site: Site, mode: int) -> None:
    site.run().folder.chmod(mode)
    assert kind(site) == BROKEN


ROOT, OTHER = ME + 1, ME + 2  # of the shepherds below; the directory is ours


class Moments(Proc):
    """A /proc whose shepherd has other uids each time that its status is read; the last stay."""

    def __init__(self, site: Site, *moments: tuple[int, ...]) -> None:
        super().__init__(str(site.proc.root))
        self.moments = [*moments]
        self.reads = 0

    def status(self, pid: int) -> ProcessStatus:
        found = super().status(pid)
        found.uids = self.moments[min(self.reads, len(self.moments) - 1)]
        self.reads += 1
        return found


def opened(proc: Proc) -> str:
    """Return the kind of the refusal of a shepherd, nothing where its spool is opened."""
    try:
        os.close(spool.open_shepherd_spool(proc, SHEPHERD, ROOT).fd)
    except Refusal as refusal:
        return refusal.kind
    return ""


@pytest.mark.parametrize(
    ("moments", "kind"),
    [
        ([*[(ROOT,) * 4] * 20, (ROOT, ME, ME, ME)], ""),
        ([(ROOT,) * 4], UNKNOWN),
        ([(ROOT, OTHER, OTHER, OTHER)], BROKEN),
    ],
)
def test_a_shepherd_that_is_root_for_a_moment_is_asked_again_for_five_seconds(
    site: Site, monkeypatch: pytest.MonkeyPatch, moments: list[tuple[int, ...]], kind: str
) -> None:
    """It writes a line of its trace as root alone, just after it started a hook."""
    clock = replace_clock(monkeypatch)
    monkeypatch.setattr(spool, "OWNER_PAUSE", 0.1)
    site.run()
    assert opened(Moments(site, *moments)) == kind
    assert clock.slept == pytest.approx(5.0 if kind else 2.0, abs=0.2)


def test_a_shepherd_that_ends_between_the_two_reads_is_unknown(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pid is another process's when its start time is read again."""
    job = site.run()
    real = os.readlink

    def replace(path: str) -> str:
        found = real(path)
        if path.endswith("/cwd"):
            site.proc.shepherd(SHEPHERD, job.folder, start=1001, uid=ME)
        return found

    monkeypatch.setattr(os, "readlink", replace)
    assert kind(site) == UNKNOWN


@pytest.mark.parametrize(
    "line", ["job_id=13", "ja_task_id=9", "job_owner=root", "queue=x", "host_slots=9", "pe=none"]
)
def test_a_line_that_a_jobs_argument_made_is_a_forgery(site: Site, line: str) -> None:
    site.run(gpus(1), command=("/bin/echo", f"x\n{line}\ny"))
    assert kind(site) == INVALID_REQUEST


@pytest.mark.parametrize("value", ["", "-1", "1.5", "²", "٣", "1_0", " 12", "1" * 31, "9" * 5000])
def test_a_number_that_is_none_is_unknown(site: Site, value: str) -> None:
    job = site.run()
    config = job.folder / "config"
    config.write_text(config.read_text().replace("job_id=12\n", f"job_id={value}\n"))
    assert refusal(site.above).kind == UNKNOWN


@pytest.mark.parametrize("how", ["gone", "fifo", "link"])
def test_a_config_that_is_none_is_unknown(site: Site, how: str) -> None:
    config = site.run().folder / "config"
    real = config.rename(config.with_name("real"))
    if how == "fifo":
        os.mkfifo(config)
    elif how == "link":
        config.symlink_to(real.name)
    assert kind(site) == UNKNOWN


@pytest.mark.parametrize(
    ("job_id", "task_id", "same"),
    [
        ("12", "0", True),
        ("12", "undefined", True),
        ("12", "1", True),
        ("12", "2", False),
        ("123", "0", False),
        ("12", "²", False),
    ],
)
def test_execds_own_words_must_name_the_same_job_and_task(
    site: Site, monkeypatch: pytest.MonkeyPatch, job_id: str, task_id: str, same: bool
) -> None:
    site.run()
    child_of(monkeypatch, site)
    site.settings["SIMULATION"] = str(site.root / "marker")  # its shepherd is the tester's own
    call = SgeHookCall(["hook", str(SHEPHERD)], {"JOB_ID": job_id, "SGE_TASK_ID": task_id})
    if same:
        assert find_spool(site.node(), call).job == "12"
        return
    assert refusal(lambda: find_spool(site.node(), call)).kind == INVALID_REQUEST


@pytest.mark.parametrize("lead", ["", " ", "=", " = "])
def test_what_the_shepherd_skips_before_a_key_is_skipped(lead: str) -> None:
    """strtok(3) takes `=add_grp_id=1` for `add_grp_id=1`."""
    assert spool.parse_shepherd_config(f"x=y\n{lead}add_grp_id=1\n") == {"add_grp_id": ["1"]}


def test_a_line_too_long_for_the_shepherd_is_read_in_pieces_as_it_does() -> None:
    text = "job_name=".ljust(spool.LINE_LIMIT, "x") + "add_grp_id=1\n"
    assert spool.parse_shepherd_config(text) == {"add_grp_id": ["1"]}
