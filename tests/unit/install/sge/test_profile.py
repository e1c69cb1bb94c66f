# SPDX-License-Identifier: Apache-2.0
"""The login script gives a qlogin its job's variables, evaluates nothing, and starts nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpulock.install.sge.login import (
    login_script_items,
    login_script_text,
)
from gpulock.job.environment import BIND_LISTS, CONTAINER_PREFIXES, grant_variable_names
from gpulock.job.mps import MEMORY_LIMIT, PERCENTAGE, PIPE_DIRECTORY
from gpulock.sge.claim import EXTRA_MASK_NAMES

LIKE_CSH = ("tcsh", "bsd-csh")
SHELLS = [one for one in ("sh", "dash", "bash", "ksh", "zsh", *LIKE_CSH) if shutil.which(one)]
OF_SHELLS = frozenset(
    (
        *("PWD", "SHLVL", "_", "OLDPWD", "PATH", "HOME", "LOGNAME", "USER", "NLSPATH", "HOSTTYPE"),
        *("VENDOR", "OSTYPE", "MACHTYPE", "GROUP", "HOST", "TERM", "SHELL"),
    )
)
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
    return shown_by(run_script(spool, shell, gid_range, **env).stdout)


def run_script(
    spool: Path, shell: str = "sh", gid_range: str = "4000000-4000001", **env: str
) -> subprocess.CompletedProcess[str]:
    """Have a shell read its script, and print its environment."""
    script = spool / "gpulock.sh"
    script.write_text(login_script_text(str(spool), gid_range))
    words = ["-euc", f". {script}; exec /usr/bin/env -0"]
    if shell in LIKE_CSH:
        script.with_suffix(".csh").write_text(login_script_items(script)[1].text or "")
        words = ["-fc", f"source {script.with_suffix('.csh')}; exec /usr/bin/env -0"]
    return subprocess.run(
        [shell, *words],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
        extra_groups=[OURS] if ROOT else None,
    )


def shown_by(environ: str) -> dict[str, str]:
    """Return the variables that are not a shell's own."""
    pairs = dict(item.split("=", 1) for item in environ.split("\0") if item)
    return {name: value for name, value in pairs.items() if name not in OF_SHELLS}


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    assert OURS >= 0, "who runs this has no supplementary group: usermod --append --groups"
    return tmp_path


@pytest.mark.parametrize("shell", SHELLS)
def test_a_login_outside_any_job_gets_nothing(spool: Path, shell: str) -> None:
    job(spool, "1.1", 4_000_000, "CUDA_VISIBLE_DEVICES=0\n")

    assert login(spool, shell) == {}


FLAGS = "--device nvidia.com/gpu=0  --device nvidia.com/gpu=3:1"  # of several words
CDI = f"GPULOCK_CDI={FLAGS}\nNVIDIA_VISIBLE_DEVICES=\n"
EVIL = "PATH=/evil\nCUDA_VISIBLE_DEVICES=0,1\nSGE_GPU=0,1\nLD_PRELOAD=/x\n"
IN_JOB = {"GPULOCK_DEVICES": "", "CUDA_VISIBLE_DEVICES": "1"}  # a shell inside a job stays as it is


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("folder", "environment", "env", "seen"),
    [
        ("2.1", EVIL, {}, {"CUDA_VISIBLE_DEVICES": "0,1", "SGE_GPU": "0,1"}),
        ("2.1", CDI, {}, {"GPULOCK_CDI": FLAGS, "NVIDIA_VISIBLE_DEVICES": ""}),
        ("2.1/1.node1", "CUDA_VISIBLE_DEVICES=3\n", {}, {"CUDA_VISIBLE_DEVICES": "3"}),
        ("2.1", "CUDA_VISIBLE_DEVICES=0,1\n", IN_JOB, IN_JOB),
    ],
)
def test_a_login_of_a_job_gets_its_variables_and_no_others(
    spool: Path, folder: str, environment: str, env: dict[str, str], seen: dict[str, str],
    shell: str,
) -> None:  # fmt: skip
    job(spool, "1.1", 4_000_000, "CUDA_VISIBLE_DEVICES=7\n")
    job(spool, folder, OURS, environment)
    for name, seconds in (("9.1", 100), ("8.1", 50)):  # older folders with the same group
        os.utime(job(spool, name, OURS, "SGE_GPU=6\n") / "addgrpid", (seconds, seconds))

    assert login(spool, shell, **env) == seen


@pytest.mark.parametrize("shell", SHELLS)
def test_nothing_in_a_value_is_evaluated(spool: Path, shell: str) -> None:
    """bsd-csh runs what stands in backquotes in a variable: it gets such a value empty."""
    planted = f"$(touch {spool}/hacked)`touch {spool}/hacked`;touch {spool}/hacked !x * {{a,b}} $x"
    job(spool, "2.1", OURS, f"SGE_GPU={planted}\nSGE_GPU;touch {spool}/hacked=1\n")

    assert login(spool, shell) == {"SGE_GPU": "" if shell in LIKE_CSH else planted}
    assert not (spool / "hacked").exists()


@pytest.mark.parametrize("shell", SHELLS)
def test_every_variable_a_job_may_get_is_exported(spool: Path, shell: str) -> None:
    of_mps = {
        f"{twin}{name}"
        for twin in ("", *CONTAINER_PREFIXES)
        for name in (PIPE_DIRECTORY, PERCENTAGE, MEMORY_LIMIT)
    }
    names = sorted({*grant_variable_names(EXTRA_MASK_NAMES), *BIND_LISTS, *of_mps})
    job(spool, "2.1", OURS, "".join(f"{name}=x\n" for name in names))

    assert sorted(login(spool, shell)) == names


NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_job_that_cannot_be_read_masks_everything_and_the_user_is_told(
    spool: Path, shell: str
) -> None:
    job(spool, "2.1", OURS, None)

    done = run_script(spool, shell)

    assert shown_by(done.stdout) == NO_GPU
    assert "it has no GPU" in done.stderr
    shutil.rmtree(spool / "active_jobs")  # a group of Grid Engine's without a job
    assert login(spool, shell, gid_range=f"4000000-4000001,{OURS}") == NO_GPU


# --- who reads it --------------------------------------------------------------------------------


def test_debians_csh_has_a_folder_of_its_own_and_no_other_system_gets_one(tmp_path: Path) -> None:
    profile = tmp_path / "etc/profile.d/gpulock.sh"
    folder = tmp_path / "etc/csh/login.d"
    everywhere = [f"file {path}" for path in (profile, profile.with_suffix(".csh"))]
    of_sh, of_csh = login_script_items(profile)
    assert [of_sh.title, of_csh.title] == everywhere
    assert f"/bin/sh {profile}`" in (of_csh.text or "")
    folder.mkdir(parents=True)
    of_debian = [*everywhere, f"file {folder}/gpulock.csh"]
    assert [item.title for item in login_script_items(profile)] == of_debian


IN_ETC = """
set -e
mount -t tmpfs tmpfs /etc/profile.d
cp "$1"/gpulock.* /etc/profile.d
if [ -d /etc/csh/login.d ]; then
    mount -t tmpfs tmpfs /etc/csh/login.d
    cp "$1/gpulock.csh" /etc/csh/login.d
fi
if [ -f /etc/zsh/zprofile ]; then
    echo "$2" >"$1/zprofile"
    mount --bind "$1/zprofile" /etc/zsh/zprofile
fi
shift 2
exec "$@"
"""
LOGINS = [one for one in ("bash", "zsh", "tcsh") if shutil.which(one)]


@pytest.mark.root
@pytest.mark.parametrize("shell", LOGINS)
@pytest.mark.parametrize("options", [(), ("-i",)], ids=["login", "interactive"])
def test_a_login_comes_to_its_mask_by_the_start_files_of_this_machine(
    spool: Path, shell: str, options: tuple[str, ...]
) -> None:
    """A shell that a `-` begins the name of is a login shell: so starts the one of a qlogin."""
    job(spool, "2.1", OURS, "CUDA_VISIBLE_DEVICES=0,1\nGPULOCK_DEVICES=0 1\n")
    profile = Path("/etc/profile.d/gpulock.sh")
    (spool / "gpulock.sh").write_text(login_script_text(str(spool), "1-2"))
    (spool / "gpulock.csh").write_text(login_script_items(profile)[1].text or "")
    start = f"import os, sys; os.execv(sys.argv[1], ['-{shell}', *sys.argv[2:]])"
    program = str(shutil.which(shell))
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", IN_ETC, "sh"]
    advice = f"source {profile}"  # docs/grid-engine.md: zsh on Debian
    done = subprocess.run(
        [*words, str(spool), advice, sys.executable, "-c", start, program, *options],
        input="/usr/bin/env -0\n",
        env={"HOME": str(spool), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "TERM": "dumb"},
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
        extra_groups=[OURS],
    )
    assert "CUDA_VISIBLE_DEVICES=0,1\0" in done.stdout
    assert "GPULOCK_DEVICES=0 1\0" in done.stdout
