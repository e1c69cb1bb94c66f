# SPDX-License-Identifier: Apache-2.0
"""Who is whose on a node that Slurm shares: daemons without parents, programs of slurmd's."""

from __future__ import annotations

import pytest

from gpulock.daemon.reconcile.reconcile import reconcile_locks
from gpulock.deadline import Deadline
from gpulock.schedulers.liveness import make_liveness_judge
from tests.support.slurm_site import ROOT, RUN, UID, Site
from tests.support.trees import bus

OTHER = UID + 1
SCOPE = "system.slice/slurmstepd.scope"


def acts(site: Site) -> list[str]:
    node = site.node()
    return [
        outcome.act
        for outcome in reconcile_locks(node, make_liveness_judge(node), Deadline(5)).outcomes
    ]


@pytest.mark.parametrize("program", ["infinity", "getenv"])
def test_a_program_of_slurmds_own_is_no_step_that_starts(site: Site, program: str) -> None:
    site.prolog()
    site.fails("slurm_load_jobs error: Invalid job id specified")
    site.process(700, "slurmstepd", f"/usr/sbin/slurmstepd\0{program}", ROOT)
    assert acts(site) == ["freed", "freed"]


def test_a_step_that_starts_still_counts(site: Site) -> None:
    site.prolog()
    site.fails("slurm_load_jobs error: Invalid job id specified")
    site.process(700, "slurmstepd", "/usr/sbin/slurmstepd", ROOT)
    assert acts(site) == ["held", "held"]


@pytest.mark.parametrize("by_cgroup", [True, False])
def test_a_daemon_of_another_living_job_does_not_keep_a_lock(site: Site, by_cgroup: bool) -> None:
    site.prolog(20, "0", SLURM_JOB_UID=str(OTHER))
    site.prolog(21, "1")
    nodes = {9: site.dev / "nvidia0", 10: site.dev / "nvidia1"}
    site.process(900, "ray", uid=OTHER, fds=nodes)
    if by_cgroup:
        site.cgroup(f"{SCOPE}/job_20/step_batch/user/task_0", 900)
    else:
        site.started_with(900, SLURM_JOB_ID="20", SLURMD_NODENAME="n1")
    site.epilog(21, "1")
    assert site.locks() == [bus(0)]
    assert site.prolog(22, "1") == RUN
    assert site.granted(22) == [bus(1)]


def test_a_daemon_of_the_job_itself_does(site: Site) -> None:
    site.prolog(21, "1")
    site.process(900, "ray", fds={10: site.dev / "nvidia1"})
    site.cgroup(f"{SCOPE}/job_21/step_batch", 900)
    site.epilog(21, "1")
    assert site.locks() == [bus(1)]


def test_a_device_that_slurm_gave_and_another_job_holds_is_named(site: Site) -> None:
    site.set(SLURM_WAIT="0.01")
    site.prolog(21, "1")
    site.process(900, "python", fds={10: site.dev / "nvidia1"})
    site.epilog(21, "1")
    site.prolog(22, "1")
    said = site.refused(22)
    assert "not free: 1: job 21, which has ended, but not its processes" in said
    assert "gpulock why 1" in said
