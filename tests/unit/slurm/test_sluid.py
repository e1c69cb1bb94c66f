# SPDX-License-Identifier: Apache-2.0
"""The job's cgroup of version 2 by the name and at the place that newer Slurm gives it.

26.05 names it by the job's SLUID, 25.11 may have it in another slice, and in a container PID 1 is
not at the root (docs/facts/slurm.md, cgroups of a job). What is not found is not empty.
"""

from __future__ import annotations

import os
import shutil

import pytest

from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.procfs import Proc
from gpulock.slurm.steps import is_slurm_job_process
from tests.support.slurm_site import OTHER_UID, UID, Site, slurm_record
from tests.support.trees import bus

SLUID, OTHER = "s5K1QWERTY0123", "s5K1QWERTY0124"
SCOPE = "system.slice/slurmstepd.scope"
TOLD = {"SLURM_JOB_SLUID": SLUID}
CONTAINER = "/docker.slice/docker-1.scope"


def left(site: Site, sluid: str = "") -> str:
    """Return what is left of job 12, whose Prolog was told a SLUID."""
    return site.processes(sluid=sluid).reason()


def hidden(site: Site, path: str, *uids: int) -> None:
    """Let a process be in a cgroup that says nothing of its job in its environment."""
    site.process(900, "sleep", uids=uids or (UID,) * 4)
    (site.proc.root / "900/cgroup").write_text(f"0::/{path}\n")


def nested(site: Site, path: str) -> None:
    """Let PID 1 be in a cgroup."""
    site.process(1, "init", uid=0)
    (site.proc.root / "1/cgroup").write_text(f"0::{path}/init.scope\n")


@pytest.mark.parametrize("scope", ["slurmstepd.scope", "n1_slurmstepd.scope"])
@pytest.mark.parametrize("slice_", ["system.slice", "slurm.slice"])
@pytest.mark.parametrize("name", [SLUID, "job_12"])
@pytest.mark.parametrize("base", ["", CONTAINER, "/docker-1.scope"])
def test_a_process_in_the_jobs_cgroup_is_left(
    site: Site, scope: str, slice_: str, name: str, base: str
) -> None:
    nested(site, CONTAINER)
    site.cgroup(f"{base}/{slice_}/{scope}/{name}/step_0/user/task_0".lstrip("/"), 900)
    assert left(site, SLUID) == "process 900 is in the job's cgroup"


@pytest.mark.parametrize("name", [OTHER, "job_13", "system"])
def test_one_in_another_jobs_is_not(site: Site, name: str) -> None:
    site.cgroup(f"{SCOPE}/{name}/step_0", 900)
    hidden(site, f"{SCOPE}/{name}/step_0")
    assert left(site, SLUID) == ""


def test_the_prolog_keeps_the_sluid_and_the_epilog_finds_who_hides(site: Site) -> None:
    """`env -i setsid sleep`, the step daemons killed: 26.05 had its lock released."""
    site.prolog(**TOLD)
    assert site.holder(0).sluid == SLUID
    site.process(900, "sleep")
    folder = site.cgroup(f"{SCOPE}/{SLUID}/step_batch/user/task_0", 900)
    site.epilog(**TOLD)
    assert site.locks() == [bus(0), bus(1)]
    assert site.holder(0).draining == 1
    shutil.rmtree(folder)
    site.epilog(**TOLD)
    assert site.locks() == []


@pytest.mark.parametrize("told", ["", "../../../user.slice", "a/b", "s" * 300, "s\n"])
def test_a_text_that_is_no_name_is_not_kept(site: Site, told: str) -> None:
    site.prolog(SLURM_JOB_SLUID=told)
    assert site.holder(0).sluid == ""


def test_without_its_sluid_a_job_may_be_whichever_of_its_users_runs(site: Site) -> None:
    """A record that an earlier gpulock made, or whose slurmd was replaced meanwhile."""
    hidden(site, f"{SCOPE}/{SLUID}/step_0/user/task_0")
    assert "of which job is not known" in left(site)
    hidden(site, f"{SCOPE}/{SLUID}/step_0/user/task_0", UID, 0, 0, 0)
    assert "of which job is not known" in left(site)
    hidden(site, f"{SCOPE}/{SLUID}/step_0/user/task_0", *[OTHER_UID] * 4)
    assert left(site) == ""
    hidden(site, f"{SCOPE}/system")
    assert left(site) == ""


@pytest.mark.parametrize(
    "path",
    [
        f"{SCOPE}/{SLUID}/step_0/user",
        f"deep/a.slice/a-b.slice/n1_slurmstepd.scope/{SLUID}/step_0",
        f"{SCOPE}/job_12/step_0",
        f"elsewhere/slurm/uid_{UID}/job_12/step_0",
    ],
)
def test_where_no_folder_is_found_the_kernels_word_of_a_process_counts(
    site: Site, path: str
) -> None:
    """As with CgroupMountpoint, or a slice within a slice."""
    hidden(site, path)
    assert left(site, SLUID) == "process 900 is in the job's cgroup"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"{SCOPE}/{SLUID}/step_0/user/task_0", True),
        (f"{SCOPE}/job_12/step_0", True),
        (f"slurm.slice/n1_slurmstepd.scope/{SLUID}/step_0", True),
        (f"{CONTAINER[1:]}/{SCOPE}/{SLUID}/step_0", True),
        (f"{SCOPE}/{OTHER}/step_0", False),
        (f"{SCOPE}/job_123/step_0", False),
        (f"user.slice/user-1000.slice/user@1000.service/a.slice/slurmstepd.scope/{SLUID}/x", False),
    ],
)
def test_a_process_is_of_the_job_where_only_root_makes_the_scope(
    site: Site, path: str, expected: bool
) -> None:
    """A user's own systemd gives its user a folder, below which the user names what is there."""
    nested(site, CONTAINER)
    hidden(site, path)
    tree = ProcessScan(Proc(str(site.proc.root)))
    assert is_slurm_job_process(900, slurm_record(sluid=SLUID), tree) is expected


def test_slices_that_cannot_be_listed_are_not_empty(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.cgroup(f"{SCOPE}/{SLUID}/step_0", 900)
    top, real = f"{site.sys}/fs/cgroup", os.listdir

    def listed(path: str) -> list[str]:
        if path == top:
            raise PermissionError(13, "denied", path)
        return real(path)

    monkeypatch.setattr(os, "listdir", listed)
    assert left(site, SLUID) == "process 900 is in the job's cgroup"
