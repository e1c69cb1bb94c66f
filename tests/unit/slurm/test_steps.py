# SPDX-License-Identifier: Apache-2.0
"""What of a Slurm job is on a node: step daemons, cgroups, processes left."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulock.alloc.process_scan import ProcessScan
from gpulock.slurm import steps
from gpulock.slurm.call import parse_stepd_title
from gpulock.slurm.steps import SlurmSteps
from tests.support.slurm_site import OTHER_UID, ROOT, UID, Site, freezer, slurm_record


def found(site: Site, scan: ProcessScan | None = None) -> tuple[SlurmSteps, ProcessScan]:
    node = site.node()
    return SlurmSteps(node.settings), scan or ProcessScan(node.proc)


def left(site: Site, **changes: object) -> str:
    """Return what is left of job 12 once its steps are over."""
    return site.processes(**changes).reason()


def owned(site: Site, *pids: int, **changes: object) -> list[int]:
    """Return which of these processes are of job 12."""
    sight, scan = found(site)
    return [pid for pid in pids if sight.owns(pid, slurm_record(**changes), scan)]


@pytest.mark.parametrize(
    ("cmdline", "expected"),
    [
        (b"slurmstepd: [12.batch]", ("12", "batch")),
        (b"slurmstepd: [12.extern]      \0\0", ("12", "extern")),
        (b"slurmstepd: [12.0+1]", ("12", "0+1")),
        (b"/usr/sbin/slurmstepd\0", ("", "")),
        (b"slurmstepd: [12]", ("", "")),
        (b"slurmstepd: [-1.0]", ("", "")),
        ("slurmstepd: [1².0]".encode(), ("", "")),
        (b"slurmstepd: [12.0", ("", "")),
        (b"x\0slurmstepd: [12.0]", ("", "")),
        (b"\xff\xfe", ("", "")),
    ],
)
def test_a_title_names_job_and_step(cmdline: bytes, expected: tuple[str, str]) -> None:
    assert parse_stepd_title(cmdline) == expected


@pytest.mark.parametrize("words", ["/usr/sbin/slurmstepd\x00infinity", "slurmstepd\x00getenv\x000"])
def test_what_slurmd_starts_for_itself_is_no_step_and_none_that_is_starting(
    site: Site, words: str
) -> None:
    site.process(700, "slurmstepd", words, ROOT)
    sight, scan = found(site)
    assert sight.daemons(scan) == {}
    site.process(700, "slurmstepd", "/usr/sbin/slurmstepd\x00x", ROOT)
    sight, scan = found(site)
    assert [*sight.daemons(scan)] == [""]


def test_what_left_its_parents_is_recognised_by_environment_or_cgroup(site: Site) -> None:
    site.stepd(700, "12.extern", uid=0)
    site.left_by(900)
    site.process(901, "python", ppid=900)
    site.process(902, "python")
    site.process(903, "su", uids=(UID, 0, 0, 0), ppid=900)
    assert owned(site, 700, 900, 901, 902, 903) == [700, 900, 901, 903]
    assert owned(site, 900, job_id="13") == []
    assert owned(site, 900, job_id="13", het_leader="12") == [900]
    site.cgroup(f"{freezer()}/step_0", 700, 902)
    (site.proc.root / "902/cgroup").write_text(f"4:freezer:/slurm/uid_{UID}/job_12/step_0\n")
    assert owned(site, 900, 901, 902) == [902], "a job's own cgroup tells, where it is there"


def test_roots_process_proves_nothing_by_its_environment(site: Site) -> None:
    site.process(900, "python", uid=ROOT)
    site.started_with(900, SLURM_JOB_ID="12", SLURMD_NODENAME="n1")
    assert owned(site, 900) == []


@pytest.mark.parametrize(
    ("uids", "exe"),
    [
        ((UID,) * 4, "/usr/sbin/slurmstepd"),
        ((UID, 0, 0, 0), "/usr/sbin/slurmstepd"),
        ((0, UID, 0, UID), "/usr/bin/at"),
        ((0, 0, UID, 0), "/usr/bin/at"),
    ],
)
def test_what_a_user_calls_slurmstepd_is_no_step_daemon(
    site: Site, uids: tuple[int, ...], exe: str
) -> None:
    """The child that becomes a task has slurmstepd's title too, and any user can take it."""
    site.set(SIMULATION="")
    site.stepd(700, "12.extern", uids=uids, exe=exe)
    site.stepd(701, "", uids=uids, exe=exe)
    assert (site.processes().daemons, site.processes(True).reason()) == ({}, "")
    sight, scan = found(site)
    assert sight.daemons(scan) == {}


def test_a_step_daemon_that_ends_meanwhile_may_be_of_any_job(site: Site) -> None:
    """What it started since is in no list."""
    site.stepd(700, "12.extern")
    sight, scan = found(site)
    scan.statuses()
    (site.proc.root / "700/cmdline").unlink()
    assert sight.daemons(scan) == {"": {700: ""}}


def test_step_daemons_do_not_count_once_slurmd_runs_the_epilog(site: Site) -> None:
    """One of that id is then another node's on the same machine."""
    site.stepd(700, "12.extern")
    assert left(site) == ""


@pytest.mark.parametrize("name", ["srun", "salloc", "sbatch"])
def test_a_client_that_waits_for_its_job_to_be_gone_is_not(site: Site, name: str) -> None:
    site.process(900, name)
    site.started_with(900, SLURM_JOB_ID="12", SLURMD_NODENAME="n1")
    assert left(site) == ""


def test_where_the_job_has_its_cgroup_that_alone_says_who_is_left(site: Site) -> None:
    """Any process of the user's can be started with that environment, at any time."""
    site.left_by(900)
    assert site.processes().unmarked
    site.cgroup("freezer/slurm")
    assert "900" in left(site)  # a newer Slurm may name the job's own folder otherwise
    assert not site.processes().unmarked
    site.cgroup(f"{freezer()}/step_0")
    assert left(site) == ""
    site.cgroup(f"{freezer()}/step_0", 901)
    assert "901" in left(site)


def test_so_is_one_of_a_component_with_the_leaders_id(site: Site) -> None:
    site.left_by(900, 11)
    assert left(site) == ""
    assert "900" in left(site, het_leader="11")


@pytest.mark.parametrize(
    ("job", "slurmd", "uid"),
    [(13, "n1", UID), (123, "n1", UID), (12, "n2", UID), (12, "n", UID), (12, "n1", OTHER_UID)],
)
def test_a_process_of_another_job_node_or_user_is_not(
    site: Site, job: int, slurmd: str, uid: int
) -> None:
    site.left_by(900, job, slurmd, uid)
    assert left(site) == ""


def test_a_hook_is_not_what_a_job_of_roots_left(site: Site) -> None:
    site.hook(900)
    site.hook(901, SLURM_SCRIPT_CONTEXT="epilog_slurmd")
    assert left(site, uid=ROOT) == ""


@pytest.mark.parametrize("name", ["slurmd", "slurmd-wlm"])
def test_the_slurmd_above_a_prolog_is_the_one_that_is_closed(site: Site, name: str) -> None:
    """Debian's has its program's name after `scontrol reconfigure`."""
    for pid in (700, 701):
        site.proc.add(pid, name, ppid=pid - 1, uids=(0, 0, 0, 0), exe="/usr/sbin/slurmd-wlm")
    site.proc.add(800, "slurmd", ppid=1, uids=(UID, UID, UID, UID))
    site.proc.add(801, "slurmd", ppid=701, uids=(0, 0, 0, 0), exe="/usr/bin/sh")
    site.proc.add(900, "python3", ppid=801, uids=(0, 0, 0, 0))
    assert steps.find_slurmds_above(site.node(), 900) == [701]
    site.proc.add(900, "python3", ppid=1, uids=(0, 0, 0, 0))  # PrologFlags=RunInJob
    assert sorted(steps.find_slurmds_above(site.node(), 900)) == [700, 701]


@pytest.mark.parametrize("name", ["slurmd", "slurmd-wlm"])
def test_only_roots_slurmd_is_slurmd(site: Site, name: str) -> None:
    sight, scan = found(site)
    assert not sight.is_slurmd_seen(scan)
    site.process(60, name, uid=UID)
    assert not sight.is_slurmd_seen(found(site)[1])
    site.process(60, name, uid=ROOT)
    assert sight.is_slurmd_seen(found(site)[1])


def test_a_step_daemon_that_has_the_users_effective_uid_for_a_moment_is_one(site: Site) -> None:
    """slurmstepd opens the user's files so (_drop_privileges of its mgr.c)."""
    site.set(SIMULATION="")
    site.stepd(700, "12.extern", 0)
    uids = (0, UID, 0, UID)
    site.proc.add(701, "slurmstepd", uids=uids)
    (site.proc.root / "701/cmdline").write_bytes(b"slurmstepd: [12.batch]\0")
    assert sorted(site.processes().daemons) == [700, 701]


# --- a job's cgroup: a process in it is left of the job, and what cannot be read is not empty -----

V2 = "system.slice/slurmstepd.scope/job_12"


@pytest.mark.parametrize("step", ["", "/step_extern", "/step_0", "/step_batch/task_0", "/a/b/c/d"])
@pytest.mark.parametrize("part", ["freezer", "devices", "memory", "cpuset"])
@pytest.mark.parametrize("top", ["slurm", "slurm_n1"])
def test_a_process_in_the_jobs_cgroup_is_left(site: Site, part: str, top: str, step: str) -> None:
    site.process(900, "sleep")
    site.cgroup(f"{part}/{top}/uid_{UID}/job_12{step}", 900)
    assert "900" in left(site)
    assert "900" in site.processes(True).reason()


@pytest.mark.parametrize(
    "path",
    [
        freezer(123),
        freezer(12, OTHER_UID),
        freezer(12, UID, "n2"),
        "system.slice/n2_slurmstepd.scope/job_12",
    ],
)
def test_another_jobs_cgroup_is_not_this_jobs(site: Site, path: str) -> None:
    site.cgroup(path, 900)
    assert left(site) == ""


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


def no_file(folder: Path) -> None:
    (folder / "cgroup.procs").unlink()
    (folder / "cgroup.procs").mkdir()


def garbage(folder: Path) -> None:
    (folder / "cgroup.procs").write_text("900\nx\n")


@pytest.mark.parametrize("path", [freezer(), V2])
@pytest.mark.parametrize("spoil", [no_folder, no_file, garbage])
def test_a_cgroup_that_cannot_be_read_is_not_empty(
    site: Site, path: str, spoil: Callable[[Path], None]
) -> None:
    spoil(site.cgroup(path))
    assert left(site) != ""


def test_a_cgroup_that_goes_while_it_is_read_holds_nobody(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = site.cgroup(f"{freezer()}/step_0", 900)
    real = os.listdir

    def late(path: str) -> list[str]:
        names = real(path)
        if path == str(inner):
            shutil.rmtree(inner)
        return names

    monkeypatch.setattr(os, "listdir", late)
    assert left(site) == ""


@pytest.mark.parametrize("words", ["sleep\x00100000000", "/usr/bin/sleep\x00infinity"])
def test_the_extern_steps_own_placeholder_is_nobodys(site: Site, words: str) -> None:
    """It outlives a step daemon that was killed."""
    site.process(900, "sleep", words, ROOT)
    site.cgroup(f"{freezer()}/step_extern", 900)
    assert left(site) == ""
    site.process(901, "python")
    site.cgroup(f"{freezer()}/step_0", 901)
    assert "901" in left(site)


@pytest.mark.parametrize(
    ("words", "uid"),
    [
        ("sleep\x00100000000", UID),
        ("sleep\x00100000000\x001", ROOT),
        ("bash\x00infinity", ROOT),
    ],
)
def test_what_looks_like_the_placeholder_is_somebody(site: Site, words: str, uid: int) -> None:
    site.process(900, "sleep", words, uid)
    site.cgroup(f"{freezer()}/step_extern", 900)
    assert "900" in left(site)
