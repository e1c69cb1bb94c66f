# SPDX-License-Identifier: Apache-2.0
"""Where the hooks of Grid Engine confine and free a job, and what becomes of one that cannot be."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpulock.alloc import reaper
from gpulock.alloc.liveness import Judge
from gpulock.alloc.process_scan import ProcessScan
from gpulock.errors import BROKEN, UNKNOWN, Refusal
from gpulock.isolation import job, tree
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.sge import claim, epilog, prolog, slave, verdict
from gpulock.sge.members import SgeMembers
from gpulock.store.verdicts import DEAD, Verdict
from tests.support.execd import SpooledJob
from tests.support.jobs import SHEPHERD, Site, child_of, gpus
from tests.support.packed_job import ResourceRequest
from tests.support.trees import bus

if TYPE_CHECKING:
    from gpulock.alloc.liveness import LivenessRule

RUN, QUEUE_ERROR, REQUEUE, JOB_ERROR = 0, 1, 99, 100
CGROUP = {"ISOLATION": "cgroup"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path)
    child_of(monkeypatch, made)
    return made


class Kernel:
    """What the hooks asked for: (label, pid, minors) of each job, in order."""

    def __init__(self, site: Site, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, int, list[int]]] = []
        self.refusal: Refusal | None = None
        self.ends: list[tuple[str, list[str]]] = []
        self.says = ""
        self._site = site
        patch.setattr(job, "begin_job_isolation", self.begin)
        patch.setattr(job, "end_job_isolation", self.end)

    def begin(self, node: Node, isolated: job.IsolatedJob, granted: list[object]) -> None:
        del node
        self.asked.append(
            (isolated.label, isolated.pid, [getattr(d, "minor", -1) for d in granted])
        )
        if self.refusal:
            raise self.refusal

    def end(self, node: Node, prefix: str, isolated: job.IsolatedJob) -> str:
        del node, prefix
        self.ends.append((isolated.label, self._site.locks()))
        return self.says


@pytest.fixture
def kernel(site: Site, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(site, monkeypatch)


def start(site: Site, spooled: SpooledJob, **keys: str) -> int:
    argv = ["sge", str(site.pid)]
    return prolog.main(argv, site.environ(spooled), site.config(**keys))


def stop(site: Site, spooled: SpooledJob, **keys: str) -> int:
    argv = ["sge", str(site.pid)]
    return epilog.main(argv, site.environ(spooled), site.config(**keys))


def test_without_isolation_nothing_of_it_is_loaded(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("gpulock.isolation")]:
        monkeypatch.delitem(sys.modules, name)
    spooled = site.run(gpus(1))

    assert start(site, spooled) == stop(site, spooled) == RUN

    assert [name for name in sys.modules if name.startswith("gpulock.isolation")] == []


def test_what_confines_a_job_is_loaded_before_its_claim(
    site: Site, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A library that cannot be read any more kept the claim until the reaper came."""
    for name in [name for name in sys.modules if name.startswith("gpulock.isolation")]:
        monkeypatch.delitem(sys.modules, name)

    def claims(*_: object) -> None:
        loaded = "gpulock.isolation.job" in sys.modules
        raise Refusal(UNKNOWN, f"confinement is loaded: {loaded}", "nothing to do")

    monkeypatch.setattr(claim, "claim_devices", claims)
    assert start(site, site.run(gpus(2)), **CGROUP) == REQUEUE
    assert "confinement is loaded: True" in capfd.readouterr().err


SHARES = {"SGE_COMPLEXES": "gpu gpu_share=share", "SHARES": "3:4"}


def test_each_job_with_a_place_is_confined_to_its_card_and_freed_alone(
    site: Site, kernel: Kernel
) -> None:
    jobs = [site.run(gpus(n, "gpu_share"), pid=SHEPHERD + n, job_id=12 + n) for n in (1, 2)]
    for number, spooled in enumerate(jobs, 1):
        site.pid = SHEPHERD + number
        assert start(site, spooled, **CGROUP, **SHARES) == RUN
    places = [f"{bus(3)}.share{n}" for n in (1, 2, 3)]
    assert kernel.asked == [("13.1", SHEPHERD + 1, [3]), ("14.1", SHEPHERD + 2, [3, 3])]
    assert site.locks() == places

    site.pid = SHEPHERD + 1
    assert stop(site, jobs[0], **CGROUP, **SHARES) == RUN

    assert kernel.ends == [("13.1", places)]
    assert site.locks() == places[1:]


FIRST, SECOND = 600, 601
HOSTS = (("node", 2), ("other", 2))


@pytest.fixture
def tasks(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Let a slave task's hook become root, as execd lets it."""
    monkeypatch.setattr(os, "setresuid", lambda *_: None)  # pyright: ignore
    return site


def start_task(site: Site, pid: int, **keys: str) -> int:
    return slave.main(["slave", str(pid)], {}, site.config(**CGROUP, **keys))


def test_a_slave_task_that_cannot_be_confined_does_not_start(tasks: Site, kernel: Kernel) -> None:
    kernel.refusal = Refusal(BROKEN, "no cgroups", "mount them")
    spooled = tasks.spool(gpus(1), pe="mpi", hosts=HOSTS)
    tasks.task(spooled, FIRST)

    assert start_task(tasks, FIRST, SGE_SLAVE_TASKS="yes") == 1
    assert tasks.locks() == []


# --- a parallel job, on its first host ------------------------------------------------------------


ONE_HOST = (("node", 4),)


def launched(
    site: Site, *resources: ResourceRequest, by: bytes, hosts: tuple[tuple[str, int], ...] = HOSTS
) -> SpooledJob:
    """Spool a parallel job whose shepherd was started with this in its environment."""
    spooled = site.run(*resources, pe="mpi", hosts=hosts)
    (site.proc.root / str(SHEPHERD) / "environ").write_bytes(b"SGE_ROOT=/sge\0" + by + b"\0")
    return spooled


@pytest.mark.parametrize("hosts", [HOSTS, ONE_HOST])
@pytest.mark.parametrize("asked", [(), (gpus(1),)])
@pytest.mark.parametrize(
    ("by", "code"), [(b"GPULOCK_LAUNCHER=1", RUN), (b"XGPULOCK_LAUNCHER=1", JOB_ERROR)]
)
def test_a_parallel_job_starts_where_shepherd_cmd_confines_its_tasks(
    site: Site,
    kernel: Kernel,
    asked: tuple[ResourceRequest, ...],
    by: bytes,
    code: int,
    hosts: tuple[tuple[str, int], ...],
) -> None:
    spooled = launched(site, *asked, by=by, hosts=hosts)

    assert start(site, spooled, SGE_SLAVE_TASKS="yes", **CGROUP) == code
    assert bool(kernel.asked) is (code == RUN)
    assert bool(site.locks()) is (code == RUN and bool(asked))


def test_a_line_that_somebody_was_killed_in_spoils_none_of_ours(site: Site) -> None:
    store = site.node().store
    tree.note_cgroup_folders(store, [])
    (site.records / tree.MARK).write_text("\n/a/")

    for _ in range(2):  # each job notes its own: the file must not grow with them
        tree.note_cgroup_folders(store, ["/a/b"])

    assert tree.read_cgroup_folders(store) == ["/a/", "/a/b"]
    assert (site.records / tree.MARK).read_text().count("/a/b") == 1


def leave_behind(site: Site, pid: int) -> None:
    """Let a process be in the job's cgroup that has nothing else of the job's."""
    outer = site.root / "cgroup"
    inner = outer / tree.cgroup_name("12.1", SHEPHERD, 1000)
    inner.mkdir(parents=True)
    (inner / "cgroup.procs").write_text(f"{pid}\n")
    tree.note_cgroup_folders(site.node().store, [str(outer)])
    site.proc.add(pid, "sheds")


def test_what_is_left_in_the_jobs_cgroup_keeps_its_lock_until_it_is_gone(
    site: Site, kernel: Kernel
) -> None:
    """Of a rootless container: it shed the group, and no descriptor shows what it has mapped."""
    spooled = site.run(gpus(1))
    assert start(site, spooled, **CGROUP) == RUN
    leave_behind(site, 700)
    assert stop(site, spooled, **CGROUP) == RUN
    assert len(kernel.ends) == len(site.locks()) == 1
    node = Node(Settings({**site.settings, **CGROUP}))
    (lock,) = node.store.read_all_locks().values()
    for judges in (
        make_liveness_judge(node),
        verdict.make_sge_judge(node),
    ):  # gpulockd's, and a claim's
        assert judges.job_processes(lock).reason() == "process 700 is in the job's cgroup"
    dead: dict[str, LivenessRule] = {"sge": lambda lock, *_: Verdict(DEAD, f"{lock}: gone")}
    sure = Judge(node.boot_id, ProcessScan(node.proc), dead, {"sge": SgeMembers(node)})
    (outcome,) = reaper.Reaper(node, sure, [], {lock.id: lock}).finish([lock])
    assert (outcome.act, outcome.verdict.state) == (reaper.HELD, DEAD)
    assert "process 700 is in the job's cgroup" in outcome.reason
    procs = next((site.root / "cgroup").glob("*/cgroup.procs"))
    procs.unlink()
    procs.mkdir()
    assert "cannot be read" in make_liveness_judge(node).job_processes(lock).reason()
    procs.rmdir()  # of a cgroup that is gone
    assert stop(site, spooled, **CGROUP) == RUN
    assert site.locks() == []


MOVED = "enable_systemd=1\nsystemd_slice=ocs7544-jobs.slice\nsystemd_scope=ocs7544.12.scope\n"
BY_SYSTEMD = (MOVED, "use_systemd=yes\n")


def add_to_config(spooled: SpooledJob, lines: str) -> None:
    with (spooled.folder / "config").open("a") as file:
        file.write(lines)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize(
    ("lines", "code"),
    [
        *[(one, JOB_ERROR) for one in BY_SYSTEMD],
        ("enable_systemd=0\n", RUN),
        ("use_systemd=no\n", RUN),
    ],
)
def test_a_job_that_systemd_moves_out_of_its_cgroup_is_refused(
    site: Site, kernel: Kernel, lines: str, code: int, count: int
) -> None:
    """It would open every GPU; the queue stays in service, for the job is not at fault."""
    spooled = site.run(gpus(count))
    add_to_config(spooled, lines)

    assert start(site, spooled, **CGROUP) == code
    assert (len(kernel.asked), len(site.locks())) == ((1, count) if code == RUN else (0, 0))


@pytest.mark.parametrize("lines", BY_SYSTEMD)
def test_a_slave_task_that_systemd_moves_out_of_its_cgroup_does_not_start(
    tasks: Site, kernel: Kernel, lines: str
) -> None:
    spooled = tasks.spool(gpus(1), pe="mpi", hosts=HOSTS)
    add_to_config(spooled, lines)
    tasks.task(spooled, FIRST)

    assert start_task(tasks, FIRST, SGE_SLAVE_TASKS="yes") == 1
    assert (kernel.asked, tasks.locks()) == ([], [])
