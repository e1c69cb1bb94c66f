# SPDX-License-Identifier: Apache-2.0
"""PrologFlags=RunInJob: hooks run below the extern step daemon, in the job's own cgroup."""

from __future__ import annotations

import os

import pytest

from gpulock.hooks import cleanup
from gpulock.hooks.cleanup import LeftoverProcess
from gpulock.slurm import prolog
from tests.support.slurm_site import NODE_BROKEN, OTHER_UID, ROOT, RUN, UID, Site, freezer
from tests.support.trees import bus

STEPD, SCRIPT = 700, 710  # the extern step daemon and the site's script, above this process
V2 = "system.slice/slurmstepd.scope/job_12"


def in_job(site: Site, title: str = "12.extern", uid: int = ROOT, name: str = "slurmstepd") -> int:
    """Let this process be a hook's, below a script of the site's, below a step daemon."""
    site.process(STEPD, name, f"slurmstepd: [{title}]      ", uid, start=1)
    site.process(SCRIPT, "site-epilog", uid=ROOT, ppid=STEPD, start=100)
    site.process(os.getpid(), "python3", uid=ROOT, ppid=SCRIPT, start=101)
    return os.getpid()


@pytest.mark.parametrize(
    "path",
    [f"{V2}/step_extern/slurm", f"{freezer()}/step_extern", f"memory/slurm/uid_{UID}/job_12"],
)
def test_what_runs_the_epilog_in_the_jobs_cgroup_keeps_no_lock(site: Site, path: str) -> None:
    site.prolog()
    me = in_job(site)
    site.cgroup(path, STEPD, SCRIPT, me)
    site.epilog()
    assert site.locks() == []


@pytest.mark.parametrize("path", [f"{V2}/step_0/user/task_0", f"{freezer()}/step_0"])
def test_what_the_job_left_beside_it_does(site: Site, path: str) -> None:
    site.prolog()
    me = in_job(site)
    site.cgroup(f"{V2}/step_extern/slurm", STEPD, SCRIPT, me)
    site.process(900, "sleep")
    site.cgroup(path, 900)
    site.epilog()
    assert site.locks() == [bus(0), bus(1)]


@pytest.mark.parametrize("title", ["12.batch", "12.0"])
def test_nor_does_a_daemon_of_another_step_that_ends_meanwhile(site: Site, title: str) -> None:
    """24.11 does not wait for it, as slurmd does for any."""
    site.prolog()
    site.cgroup(f"{V2}/step_extern/slurm", STEPD, SCRIPT, in_job(site))
    site.cgroup(f"{V2}/step_batch/slurm", site.stepd(701, title))
    site.epilog()
    assert site.locks() == []


@pytest.mark.parametrize(("title", "uid"), [("13.batch", ROOT), ("12.batch", OTHER_UID)])
def test_what_is_no_daemon_of_the_jobs_does(site: Site, title: str, uid: int) -> None:
    site.prolog()
    site.cgroup(f"{V2}/step_extern/slurm", STEPD, SCRIPT, in_job(site))
    site.cgroup(f"{V2}/step_batch/slurm", site.stepd(701, title, uid))
    site.epilog()
    assert site.locks() == [bus(0), bus(1)]


@pytest.mark.parametrize("title", ["12.batch", "13.extern"])
def test_what_is_above_a_hook_that_no_extern_step_runs_is_left(site: Site, title: str) -> None:
    """A shell of root's in the job, as of pam_slurm_adopt, is in use of the job's cgroup."""
    site.prolog()
    site.cgroup(f"{V2}/step_extern/slurm", in_job(site, title))
    site.epilog()
    assert site.locks() == [bus(0), bus(1)]


def test_the_next_run_of_a_job_takes_what_an_earlier_one_drained(site: Site) -> None:
    """Its own extern step daemon has the same job id, and is there before its Prolog."""
    site.prolog()
    site.process(900, "python", fds={9: site.dev / "nvidia0"})
    site.epilog(SLURM_JOB_RESTART_COUNT="1")
    site.proc.remove(900)
    site.cgroup(f"{V2}/step_extern/slurm", STEPD, SCRIPT, in_job(site))
    assert site.prolog(SLURM_JOB_RESTART_COUNT="1") == RUN
    assert site.granted() == [bus(0), bus(1)]


def test_another_step_daemon_of_the_job_keeps_what_is_drained(site: Site) -> None:
    site.set(SLURM_WAIT="0.01")
    site.prolog()
    site.process(900, "python", fds={9: site.dev / "nvidia0"})
    site.epilog(SLURM_JOB_RESTART_COUNT="1")
    site.proc.remove(900)
    in_job(site)
    site.stepd(701, "12.0")
    site.prolog(SLURM_JOB_RESTART_COUNT="1")
    assert "step daemon 701 of the job runs" in site.refused()


def test_an_epilog_that_ends_leftovers_spares_its_own_step_daemon(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.set(LEFTOVER_PROCESSES="kill")
    ended: list[int] = []

    def signal(_node: object, found: list[LeftoverProcess], _number: int) -> list[str]:
        ended.extend([left.pid for left in found])
        return []

    monkeypatch.setattr(cleanup, "signal_leftovers", signal)
    site.prolog()
    me = in_job(site)
    site.process(900, "sleep")
    folder = site.cgroup(f"{V2}/step_0/user", 900)
    site.cgroup(f"{V2}/step_extern/slurm", STEPD, SCRIPT, me)

    def wait(*_: object) -> None:
        (folder / "cgroup.procs").write_text("")

    monkeypatch.setattr(cleanup, "wait_for_leftovers", wait)
    site.epilog()
    assert (ended, site.locks()) == ([900], [])


@pytest.mark.root
@pytest.mark.parametrize(("uid", "code"), [(UID, RUN), (OTHER_UID, NODE_BROKEN)])
def test_a_prolog_that_runs_as_the_jobs_user_takes_no_node_out_of_service(
    site: Site, monkeypatch: pytest.MonkeyPatch, uid: int, code: int
) -> None:
    """24.11's step daemon may start a hook while it has dropped its privileges."""
    path = site.config(SIMULATION="")
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert prolog.main(site.environ(), path) == code
    assert (site.locks(), site.notes()) == ([], [])
