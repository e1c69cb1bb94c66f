# SPDX-License-Identifier: Apache-2.0
"""The login script gives a qlogin its job's variables, evaluates nothing, and starts nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gpulock.install.sge.texts import login_script_text
from gpulock.job.environment import BIND_LISTS, CONTAINER_PREFIXES, grant_variable_names
from gpulock.job.mps import MEMORY_LIMIT, PERCENTAGE, PIPE_DIRECTORY
from gpulock.sge.prolog import EXTRA_MASK_NAMES

SHELLS = [shell for shell in ("sh", "dash", "bash", "ksh") if shutil.which(shell)]
ROOT = os.geteuid() == 0
OURS = 3_999_999 if ROOT else (*os.getgroups(), -1)[0]


def job(spool: Path, name: str, gid: int, environment: str | None) -> Path:
    folder = spool / "active_jobs" / name
    folder.mkdir(parents=True)
    (folder / "addgrpid").write_text(f"{gid}\n")
    if environment is not None:
        (folder / "environment").write_text(environment)
    return folder


def login(
    spool: Path, shell: str = "sh", gid_range: str = "4000000-4000001", **env: str
) -> dict[str, str]:
    """Return the variables that a login shell exports once it has read the script."""
    script = spool / "gpulock.sh"
    script.write_text(login_script_text(str(spool), gid_range))
    done = subprocess.run(
        [shell, "-euc", f". {script}; exec /usr/bin/env -0"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
        extra_groups=[OURS] if ROOT else None,
    )
    pairs = dict(item.split("=", 1) for item in done.stdout.split("\0") if item)
    return {k: v for k, v in pairs.items() if k not in ("PWD", "SHLVL", "_", "OLDPWD")}


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    assert OURS >= 0, "who runs this has no supplementary group: usermod --append --groups"
    return tmp_path


@pytest.mark.parametrize("shell", SHELLS)
def test_a_login_outside_any_job_gets_nothing(spool: Path, shell: str) -> None:
    job(spool, "1.1", 4_000_000, "CUDA_VISIBLE_DEVICES=0\n")

    assert login(spool, shell) == {}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_login_of_a_job_gets_its_variables_and_no_others(spool: Path, shell: str) -> None:
    job(spool, "1.1", 4_000_000, "CUDA_VISIBLE_DEVICES=7\n")
    job(spool, "2.1", OURS, "PATH=/evil\nCUDA_VISIBLE_DEVICES=0,1\nSGE_GPU=0,1\nLD_PRELOAD=/x\n")

    assert login(spool, shell) == {"CUDA_VISIBLE_DEVICES": "0,1", "SGE_GPU": "0,1"}


def test_nothing_in_a_value_is_evaluated(spool: Path) -> None:
    planted = f"$(touch {spool}/hacked)`touch {spool}/hacked`;touch {spool}/hacked"
    job(spool, "2.1", OURS, f"SGE_GPU={planted}\nSGE_GPU;touch {spool}/hacked=1\n")

    assert login(spool) == {"SGE_GPU": planted}
    assert not (spool / "hacked").exists()


def test_every_variable_a_job_may_get_is_exported(spool: Path) -> None:
    of_mps = {
        f"{twin}{name}"
        for twin in ("", *CONTAINER_PREFIXES)
        for name in (PIPE_DIRECTORY, PERCENTAGE, MEMORY_LIMIT)
    }
    names = sorted({*grant_variable_names(EXTRA_MASK_NAMES), *BIND_LISTS, *of_mps})
    job(spool, "2.1", OURS, "".join(f"{name}=x\n" for name in names))

    assert sorted(login(spool)) == names


def test_a_slave_tasks_folder_is_found_as_well(spool: Path) -> None:
    (spool / "active_jobs/2.1").mkdir(parents=True)
    job(spool, "2.1/1.node1", OURS, "CUDA_VISIBLE_DEVICES=3\n")

    assert login(spool) == {"CUDA_VISIBLE_DEVICES": "3"}


def test_of_two_folders_with_one_group_the_newer_is_the_job(spool: Path) -> None:
    for name, mask, seconds in (("9.1", "1", 100), ("10.1", "2", 200), ("8.1", "3", 50)):
        folder = job(spool, name, OURS, f"CUDA_VISIBLE_DEVICES={mask}\n")
        os.utime(folder / "addgrpid", (seconds, seconds))

    assert login(spool) == {"CUDA_VISIBLE_DEVICES": "2"}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_job_that_cannot_be_read_masks_everything(spool: Path, shell: str) -> None:
    job(spool, "2.1", OURS, None)

    assert login(spool, shell) == {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}


def test_a_group_of_grid_engines_without_a_job_masks_everything(spool: Path) -> None:
    found = login(spool, gid_range=f"4000000-4000001,{OURS}")

    assert found == {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}


def test_a_shell_inside_a_job_is_left_alone(spool: Path) -> None:
    job(spool, "2.1", OURS, "CUDA_VISIBLE_DEVICES=0,1\n")
    env = {"GPULOCK_DEVICES": "", "CUDA_VISIBLE_DEVICES": "1"}

    assert login(spool, **env) == env
