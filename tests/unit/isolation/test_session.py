# SPDX-License-Identifier: Apache-2.0
"""The PAM session of a Slurm step: whose step it is, what it may open, and what a failure does."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from gpulock.errors import BROKEN, Refusal
from gpulock.isolation import job
from gpulock.isolation.tree import cgroup_name
from gpulock.node.context import Node
from gpulock.slurm import session, steps, task
from tests.support.faults import raising
from tests.support.locks import retire_lock
from tests.support.slurm_site import NODE_BROKEN, RUN, STEPD, UID, Site, row
from tests.support.trees import bus

OPEN = {"PAM_TYPE": "open_session", "PAM_USER": "alice", "PAM_SERVICE": "slurm"}
CLOSE = {**OPEN, "PAM_TYPE": "close_session"}


class Kernel:
    """What the session asked for: (label, minors) of each step confined, labels of those freed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.confined: list[tuple[str, list[int]]] = []
        self.freed: list[str] = []
        self.refusal: Refusal | None = None
        patch.setattr(job, "begin_job_isolation", self.begin)
        patch.setattr(job, "end_job_isolation", self.end)

    def begin(self, node: Node, isolated: job.IsolatedJob, granted: list[object]) -> None:
        del node
        if self.refusal:
            raise self.refusal
        assert (isolated.pid, isolated.start) == (STEPD, 1000)
        self.confined.append((isolated.label, [getattr(d, "minor", -1) for d in granted]))

    def end(self, node: Node, prefix: str, isolated: job.IsolatedJob) -> str:
        del node, prefix
        self.freed.append(isolated.label)
        return ""


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path)
    monkeypatch.setattr(os, "getppid", lambda: STEPD)
    made.prolog()
    made.set(ISOLATION="cgroup")
    made.stepd(STEPD, "12.0")
    return made


def run(site: Site, environ: dict[str, str] = OPEN) -> int:
    return session.main(environ, site.config())


@pytest.mark.parametrize("step", ["0", "batch", "interactive", "extern"])
def test_a_step_is_confined_to_what_its_job_was_granted(
    site: Site, kernel: Kernel, step: str
) -> None:
    site.stepd(STEPD, f"12.{step}")

    assert run(site) == 0
    assert kernel.confined == [(f"12.{step}", [0, 1])]
    site.set(ISOLATION="off")
    assert run(site) == 0
    assert len(kernel.confined) == 1


def test_the_minors_are_the_locks_and_not_the_positions(
    tmp_path: Path, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path)
    site.shuffled()
    monkeypatch.setattr(os, "getppid", lambda: STEPD)
    assert site.prolog(12, "0,1") == RUN
    site.set(ISOLATION="cgroup")
    site.stepd(STEPD, "12.0")

    assert run(site) == 0
    held = [int(site.holder(n).minor_of(bus(n))) for n in range(4) if bus(n) in site.locks()]
    assert sorted(kernel.confined[0][1]) == sorted(held)


def test_each_step_of_a_job_with_places_is_confined_to_their_card(
    tmp_path: Path, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path)
    site.set(SLURM_SHARDS="share")
    site.map("0", "1", "2", "3", shared="shard")
    monkeypatch.setattr(os, "getppid", lambda: STEPD)
    site.answers(*[row(number, Gres="gres:shard:1") for number in (12, 13)])
    for number in (12, 13):
        assert site.prolog(number, "3") == RUN
    site.set(ISOLATION="cgroup")
    for step in ("12.0", "13.batch"):
        site.stepd(STEPD, step)
        assert run(site) == 0

    assert kernel.confined == [("12.0", [3]), ("13.batch", [3])]
    assert site.locks() == [f"{bus(3)}.share{n}" for n in (1, 2)]


def test_a_fault_at_the_end_puts_no_finished_job_back(
    site: Site, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "end_job_isolation", raising(MemoryError))
    site.stepd(STEPD, "12.batch")
    site.answers(row(12))
    assert run(site, CLOSE) == 1
    assert (kernel.freed, site.drained()) == ([], [])
    assert not [call for call in site.calls() if "requeue" in call]


@pytest.mark.parametrize(("job", "user"), [("13", "alice"), ("14", "alice"), ("12", "mallory")])
def test_a_job_without_a_grant_of_its_own_opens_none(
    site: Site, kernel: Kernel, job: str, user: str
) -> None:
    """It asked for none, the Prolog left no word of it, or its id was another user's."""
    site.set(ISOLATION="off")
    site.prolog(13, None)
    site.set(ISOLATION="cgroup")
    site.stepd(STEPD, f"{job}.0")

    assert run(site, {**OPEN, "PAM_USER": user}) == 0
    assert kernel.confined == [(f"{job}.0", [])]


@pytest.mark.parametrize(
    "what", ["its device is another's", "its note", "two nodes", "name", "uid", "saved", "title"]
)
def test_what_is_not_sure_stops_the_step(
    site: Site, kernel: Kernel, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its note cannot be read, two nodes on one machine run it, or its parent is no step daemon."""
    store, note = site.node().store, site.records / "tasks/n1.12"
    if what == "its device is another's":
        retire_lock(store, store.read(bus(1)), "its job ended")
    elif what == "its note":
        note.write_text("nonsense\n")
    elif what == "two nodes":
        note.with_name("n2.12").write_text(note.read_text())
    elif what == "name":
        site.process(STEPD, "sshd", "slurmstepd: [12.0]", os.geteuid())
    elif what == "uid":
        site.stepd(STEPD, "12.0", UID)
    elif what == "saved":
        site.stepd(STEPD, "12.0", uids=(os.geteuid(), os.geteuid(), UID, os.geteuid()))
    else:
        site.process(STEPD, "slurmstepd", "slurmstepd infinity", os.geteuid())

    assert run(site) == 1
    assert kernel.confined == []
    said = capfd.readouterr().err
    assert said.startswith("gpulock: step ") and said.count("\n") == 1
    assert ("no step daemon" in said) is (what in ("name", "uid", "saved", "title"))


def test_a_lock_that_was_removed_stops_no_step_of_its_claim(site: Site, kernel: Kernel) -> None:
    shutil.rmtree(site.lock)

    assert run(site) == 0
    assert kernel.confined == [("12.0", [0, 1])]


@pytest.mark.parametrize("policy", ["stop", "requeue"])
def test_a_step_that_cannot_be_confined_does_not_start_and_drains_the_node(
    site: Site, kernel: Kernel, policy: str
) -> None:
    site.set(ON_BROKEN=policy)
    kernel.refusal = Refusal(BROKEN, "no cgroups", "mount them")

    assert run(site) == 1
    assert ["no cgroups" in reason for reason in site.drained()] == [True] * (policy == "stop")
    assert not [call for call in site.calls() if "requeue" in call]


def test_a_script_that_cannot_be_confined_is_put_back(site: Site, kernel: Kernel) -> None:
    """To slurmctld a batch step without a session is done: COMPLETED, with exit code 0."""
    kernel.refusal = Refusal(BROKEN, "no cgroups", "mount them")
    site.stepd(STEPD, "12.batch")
    site.answers(row(12))

    assert run(site) == 1
    assert ["scontrol", "requeue", "12"] in site.calls()


@pytest.mark.parametrize(
    ("path", "mark", "code"),
    [
        ("/scope/job_12/step_0/user/task_0", cgroup_name("12.0", STEPD, 1000), 0),
        ("/scope/job_12/step_0/user/task_0", cgroup_name("13.0", STEPD, 1000), 213),
        ("/scope/job_12/step_1/user/task_0", cgroup_name("12.0", STEPD, 1000), 213),
        ("/scope/system", cgroup_name("12.0", STEPD, 1000), 213),
    ],
)
def test_a_task_that_slurm_has_moved_starts_where_a_session_marked_its_step(
    site: Site, monkeypatch: pytest.MonkeyPatch, path: str, mark: str, code: int
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: UID)
    own = site.proc.root / str(os.getpid())
    own.mkdir()
    (own / "cgroup").write_text(f"0::{path}\n")

    def marked(folder: str, name: str) -> bytes:
        if (folder, name) != (f"{step}/scope/job_12/step_0", "user.gpulock"):
            raise OSError(errno.ENODATA, "no mark")
        return mark.encode()

    step = f"{site.settings['SYS_ROOT']}/fs/cgroup"
    monkeypatch.setattr(os, "getxattr", marked)
    assert site.task() == code


def test_the_mark_that_a_task_looks_for_is_the_one_that_a_session_sets() -> None:
    assert task.STEP_MARK == job.STEP_MARK


def test_a_prolog_refuses_what_this_node_cannot_do_for_its_steps(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.set(ISOLATION="cgroup")

    assert site.prolog() == NODE_BROKEN
    assert site.locks() == []
    assert "no cgroup version 2" in site.drained()[0]


@pytest.mark.parametrize("gpus", ["0,1", None])
def test_a_prolog_closes_slurmd_before_each_job_whether_it_asks_for_gpus_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: str | None
) -> None:
    site, closed = Site(tmp_path), list[list[int]]()
    monkeypatch.setattr(steps, "find_slurmds_above", lambda *_: [900])
    monkeypatch.setattr(job, "prepare_slurm_isolation", lambda _, pids: closed.append(pids))
    site.set(ISOLATION="cgroup")

    assert site.prolog(12, gpus) == RUN
    assert closed == [[900]]
