# SPDX-License-Identifier: Apache-2.0
"""`gpulock forget-locks`: the way out where the records of a boot's claims were lost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gpulock.alloc.environs import CLAIM
from gpulock.alloc.process_scan import ProcessScan
from gpulock.cli.admin import forget
from tests.support.cli_site import Site
from tests.support.trees import Box

TRUE = ("run", "-n", "1", "--", "/bin/true")


@pytest.fixture
def lost(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Give a node that has granted in this boot, and whose records are gone."""
    # other tests start some of their own
    monkeypatch.setattr(forget, "list_job_processes", lambda *_: iter(()))
    assert site.run(*TRUE).returncode == 0
    lose_records(site)
    return site


def lose_records(site: Site) -> None:
    """Remove the records, as an accident does."""
    shutil.rmtree(f"{site.files.lock_dir}.claims")


def test_a_free_device_is_not_offered_while_nothing_is_granted(lost: Site) -> None:
    said = lost.words("why", "2")
    assert "granted to nobody: the records of this boot's claims were lost" in said
    assert "forget-locks when no job is left" in said and "COMMAND" not in said


def test_a_node_whose_records_were_lost_grants_again_once_told(lost: Site) -> None:
    refused = lost.run(*TRUE)
    assert refused.returncode != 0
    assert "run gpulock" in refused.stderr and "forget-locks" in refused.stderr

    result = lost.call("forget-locks")

    assert (result.exit_code, result.stderr) == (0, "")
    assert "may be granted again" in result.stdout
    assert lost.run(*TRUE).returncode == 0


def test_a_node_that_has_its_records_forgets_nothing(site: Site) -> None:
    assert site.run(*TRUE).returncode == 0
    result = site.call("forget-locks")
    assert result.exit_code != 0 and "no records were lost" in result.stderr


def test_while_a_process_has_a_gpu_open_nothing_is_forgotten_but_by_force(
    lost: Site,
) -> None:
    with lost.opened(3) as user:
        result = lost.call("forget-locks")
        assert result.exit_code != 0 and f"has {lost.id(3)} open" in result.stderr
        assert lost.run(*TRUE).returncode != 0

        assert lost.call("forget-locks", "--force").exit_code == 0
        user.kill()
    assert lost.run(*TRUE).returncode == 0


@pytest.mark.parametrize(
    ("name", "cmdline", "runs"),
    [
        ("sge_shepherd", "sge_shepherd-12 -bg", True),
        ("slurmstepd", "slurmstepd: [12.batch]", True),
        ("slurmstepd", "/usr/sbin/slurmstepd", False),
        ("bash", "bash", False),
    ],
)
def test_a_shepherd_or_step_daemon_is_a_job(
    tmp_path: Path, name: str, cmdline: str, runs: bool
) -> None:
    box = Box(tmp_path)
    box.proc.add(700, name)
    (box.proc.root / "700" / "cmdline").write_text(f"{cmdline}\0")
    told = [f"process 700 ({name}) runs a job"] if runs else []
    assert list(forget.list_remaining_users(box.node())) == told


@pytest.mark.parametrize(
    ("environ", "by"),
    [
        (f"{CLAIM}=0123456789abcdef", "gpulock run"),
        ("SLURM_JOB_ID=12\0SLURMD_NODENAME=n1", "job 12"),
        ("SLURM_JOB_ID=\x1b[1m\0SLURMD_NODENAME=n1", "a job"),
        ("SLURM_JOB_ID=12\0SLURMD_NODENAME=n1\0SLURM_SCRIPT_CONTEXT=epilog_slurmd", ""),
        ("HOME=/root", ""),
    ],
)
def test_what_a_job_started_is_a_job_though_it_has_no_gpu_open(
    tmp_path: Path, environ: str, by: str
) -> None:
    box = Box(tmp_path)
    box.proc.add(700, "python3")
    (box.proc.root / "700" / "environ").write_text(f"{environ}\0")
    told = [f"process 700 (python3) was started by {by}"] if by else []
    node = box.node()
    assert list(forget.list_job_processes(node, ProcessScan(node.proc))) == told


def test_a_driver_that_cannot_be_read_is_a_doubt_and_one_that_is_not_loaded_is_none(
    tmp_path: Path,
) -> None:
    box = Box(tmp_path)
    shutil.rmtree(box.driver / "gpus")
    assert list(forget.list_remaining_users(box.node())) == []
    (box.driver / "gpus").touch()
    (told,) = forget.list_remaining_users(box.node())
    assert "driver/gpus" in told


def test_a_lock_whose_copy_is_left_and_whose_owner_lives_is_not_forgotten(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forget, "list_job_processes", lambda *_: iter(()))
    site.hold(2)
    lose_records(site)

    result = site.call("forget-locks")

    assert result.exit_code != 0
    assert f"{site.id(2)} is held by job 12 of alice" in result.stderr
    assert (site.files.lock_dir / "locks" / site.id(2)).is_dir()


@pytest.mark.root
def test_where_lock_dir_is_gone_the_owner_of_the_records_may_change_them(site: Site) -> None:
    site.hold(2)
    shutil.rmtree(site.files.lock_dir)
    assert "freed by" in site.call("why", "2").stdout
    os.chown(f"{site.files.lock_dir}.claims", 1001, 1001)
    result = site.call("release", "2", "--force", "--reason", "x")
    assert result.exit_code != 0 and "belongs to uid 1001" in result.stderr
