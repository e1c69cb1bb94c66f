# SPDX-License-Identifier: Apache-2.0
"""How a job's isolation begins and ends, and what a reconcile removes of it and opens again."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gpulock.daemon.reconcile.reconcile import ReconcileReport, reconcile_locks
from gpulock.errors import BROKEN, UNKNOWN, Refusal
from gpulock.isolation import bpf, job, sessions, tree
from gpulock.isolation.job import IsolatedJob, end_job_isolation, prepare_slurm_isolation
from gpulock.isolation.policy import CLOSE_ALL_GPUS
from gpulock.isolation.tree import MARK, cgroup_name
from tests.support.claims import ask
from tests.support.faults import raising
from tests.support.trees import Box, judge_of, soon

JOB, OTHER = cgroup_name("12.1", 500, 1000), cgroup_name("13.1", 501, 1000)


class Cell(Box):
    """A Box with cgroups of jobs below a service."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.cgroups = root / "sys/fs/cgroup"
        service = self.cgroups / "system.slice/sgeexecd.service"
        for name in (JOB, OTHER, "other", "gpulock-x"):
            (service / name).mkdir(parents=True)
        for name in ("cgroup.procs", "cgroup.controllers"):
            (self.cgroups / name).touch()
        self.proc.add(500, "sge_shepherd", start=1000)
        ask(self, 1)
        self.mark.write_text(f"\n{service}\n\n{service}.of-yesterday\n")

    @property
    def mark(self) -> Path:
        """What says that there is something to look after."""
        return self.records / MARK

    def reconcile(self, isolation: str = "cgroup", *, dry_run: bool = False) -> ReconcileReport:
        """Reconcile once."""
        self.settings["ISOLATION"] = isolation
        node = self.node()
        return reconcile_locks(node, judge_of(node), soon(), dry_run)

    def run_epilog(self, below: int) -> None:
        """Let this process be an epilog in the job's cgroup."""
        self.settings["ISOLATION"] = "cgroup"
        for pid in (500, self.proc.add(os.getpid(), "python3", ppid=below)):
            path = f"/system.slice/sgeexecd.service/{JOB}"
            (self.proc.root / str(pid) / "cgroup").write_text(f"0::{path}\n")

    def jobs(self) -> set[str]:
        """Return the names of the jobs' cgroups."""
        return {path.name for path in self.cgroups.rglob("gpulock-*-*")}


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    return Cell(tmp_path)


@pytest.fixture
def closing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What becomes of logins."""
    told: list[str] = []

    monkeypatch.setattr(sessions, "close_login_cgroups", lambda *_: told.append("close"))
    monkeypatch.setattr(sessions, "reopen_cgroups", lambda _: told.append("open"))
    return told


def test_a_job_whose_process_is_gone_loses_its_cgroup_and_no_other_does(cell: Cell) -> None:
    assert cell.reconcile().fault == ""
    assert cell.jobs() == {JOB}
    assert cell.mark.exists()


def test_an_epilog_removes_what_tasks_of_its_job_left_that_are_over(cell: Cell) -> None:
    """A task of `qrsh -inherit` has no epilog."""
    service = cell.cgroups / "system.slice/sgeexecd.service"
    running, over = cgroup_name("12.1", 600, 1000), cgroup_name("12.1", 601, 1000)
    for name in (running, over):
        (service / name).mkdir()
    (service / "cgroup.procs").touch()
    cell.proc.add(600, "sge_shepherd", start=1000)
    cell.run_epilog(below=500)

    assert end_job_isolation(cell.node(), "12.1-", IsolatedJob("12.1", 500, 1000)) == ""

    assert cell.jobs() == {running, OTHER}


def test_what_is_left_of_a_job_is_in_its_own_cgroup_and_in_those_of_tasks_that_are_over(
    cell: Cell,
) -> None:
    cell.proc.add(600, "sge_shepherd", start=1000)
    tasks = ("12.1", 500), ("12.1", 600), ("12.1", 601), ("12.10", 602)
    for number, (label, pid) in enumerate(tasks, 700):
        folder = cell.cgroups / "system.slice/sgeexecd.service" / cgroup_name(label, pid, 1000)
        folder.mkdir(exist_ok=True)
        (folder / "cgroup.procs").write_text(f"0\n{number}\n")  # 0: of another pid namespace
    inner = cell.cgroups / "system.slice/sgeexecd.service" / JOB / "inner"
    inner.mkdir()
    (inner / "cgroup.procs").write_text("710\n")
    assert job.confined_pids(cell.node(), "12.1", 500) == [700, 702, 710]
    cell.proc.remove(600)
    assert job.confined_pids(cell.node(), "12.1", 500) == [700, 701, 702, 710]


def test_an_epilog_whose_launcher_ends_meanwhile_takes_its_jobs_cgroup_away(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell.run_epilog(below=500)
    monkeypatch.setattr(tree, "move_to_cgroup", raising(ProcessLookupError()))

    assert end_job_isolation(cell.node(), "12.1-", IsolatedJob("12.1", 500, 1000)) == ""

    assert cell.jobs() == {OTHER}


def test_who_still_lives_in_the_cgroup_of_a_job_that_is_over_opens_no_gpu(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of an epilog is out of there by then."""
    closed: list[tuple[str, bytes]] = []
    moved: list[tuple[int, str]] = []
    monkeypatch.setattr(bpf, "attach_device_program", lambda *call: closed.append(call))
    monkeypatch.setattr(tree, "move_to_cgroup", lambda *call: moved.append(call))
    monkeypatch.setattr("os.rmdir", raising(OSError(errno.EBUSY, "Device or resource busy")))
    cell.run_epilog(below=cell.proc.add(600, "sh", ppid=500))

    job.remove_step_cgroups(cell.node(), "gpulock-13.")
    assert end_job_isolation(cell.node(), "12.1-", IsolatedJob("12.1", 500, 1000)) == ""

    service = cell.cgroups / "system.slice/sgeexecd.service"
    program = bpf.assemble_device_program(CLOSE_ALL_GPUS)
    assert closed == [(f"{service}/{name}", program) for name in (OTHER, JOB)]
    assert moved == [(pid, str(service)) for pid in (os.getpid(), 600, 500)]


def test_logins_are_closed_before_the_first_job_and_opened_when_that_is_given_up(
    cell: Cell, closing: list[str]
) -> None:
    """Who opens a card before any job came keeps it open: the kernel asks at open(2)."""
    cell.mark.unlink()

    for isolation in ("cgroup", "off", "off"):
        assert cell.reconcile(isolation).fault == ""

    assert closing == ["close", "open"]
    assert not cell.mark.exists()


def test_a_site_that_gave_isolation_up_has_its_logins_and_slurmds_opened(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(bpf, "detach_device_programs", opened.append)
    launcher = cell.cgroups / "system.slice/sgeexecd.service" / f"{tree.LAUNCHER}500-1000"
    for folder in (cell.cgroups / "user.slice", launcher):
        folder.mkdir()

    assert cell.reconcile("off").fault == ""

    assert opened == [str(cell.cgroups / "user.slice"), str(launcher)]


def test_a_site_that_gave_isolation_up_is_looked_after_until_the_last_job_is_over(
    cell: Cell,
) -> None:
    cell.reconcile("off")
    assert (cell.jobs(), cell.mark.exists()) == ({JOB}, True)

    cell.proc.remove(500)
    cell.reconcile("off")
    assert (cell.jobs(), cell.mark.exists()) == (set(), False)


def test_a_cgroup_that_cannot_be_removed_is_told_and_harms_nothing_else(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.rmdir", raising(PermissionError(1, "Operation not permitted")))

    report = cell.reconcile()

    assert report.fault.startswith("isolation: ")
    assert [outcome.act for outcome in report.outcomes] == ["held"]


@pytest.mark.parametrize(("isolation", "told"), [("cgroup", True), ("off", False)])
def test_a_node_without_cgroups_is_a_fault_only_where_they_are_wanted(
    cell: Cell, isolation: str, told: bool
) -> None:
    (cell.cgroups / "cgroup.controllers").unlink()

    assert bool(cell.reconcile(isolation).fault) is told


# --- how a job's isolation begins and ends --------------------------------------------------------

OF_JOB = IsolatedJob("12.1", 500, 1000)


@pytest.fixture
def box(tmp_path: Path) -> Box:
    """Give a node with cgroups."""
    made = Box(tmp_path, ISOLATION="cgroup")
    cgroups = tmp_path / "sys/fs/cgroup"
    cgroups.mkdir(parents=True)
    for name in ("cgroup.procs", "cgroup.controllers"):
        (cgroups / name).touch()
    return made


@pytest.mark.parametrize(
    "fault", [Refusal(BROKEN, "no cgroups", "mount them"), OSError("no cgroups")]
)
def test_an_end_that_fails_says_why(
    box: Box, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    monkeypatch.setattr(job, "end_confinement", raising(fault))
    monkeypatch.setattr(job, "remove_step_cgroups", raising(fault))

    assert end_job_isolation(box.node(), "12-", OF_JOB) == "no cgroups"
    assert end_job_isolation(box.node(), "12.") == "no cgroups"


@pytest.mark.parametrize(
    ("fault", "kind", "why"),
    [
        (ProcessLookupError("700"), UNKNOWN, "slurmd ended meanwhile: 700"),
        (PermissionError("bpf"), BROKEN, "slurmd cannot be closed: bpf"),
    ],
)
def test_a_slurmd_that_cannot_be_closed_starts_no_job(
    box: Box, monkeypatch: pytest.MonkeyPatch, fault: OSError, kind: str, why: str
) -> None:
    monkeypatch.setattr(sessions, "close_launcher", raising(fault))

    with pytest.raises(Refusal, match=why) as refused:
        prepare_slurm_isolation(box.node(), [700])

    assert refused.value.kind == kind
