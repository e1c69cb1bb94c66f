# SPDX-License-Identifier: Apache-2.0
"""A user who takes all processes of a node stops no queue: what stands between answers for a hook.

Grid Engine reads its exit code, and a dash that cannot fork ends with 2.
"""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.install.hooks import HookPaths, render_hooks
from tests.support.trees import public_place

pytestmark = pytest.mark.slow
NOBODY = 65534  # what limits processes does not limit root's
JOB = ("12", "0", "gpu.q")
RECORDED = Path(__file__).parents[2] / "support/data/sge-8.1.9/array.config"
AGAIN, DELETED = 25, 100  # docs/facts/grid-engine.md, exit_status and shepherd_cmd
# bash tries again for 15 s
BASH = pytest.param("/bin/bash", marks=pytest.mark.giant)
SHELLS = pytest.mark.parametrize("shell", ["/bin/dash", BASH])


@pytest.fixture(scope="module")
def hooks() -> Iterator[HookPaths]:
    """Return hooks that every user reaches."""
    with public_place() as folder:
        (folder / "shepherd").symlink_to("/bin/true")
        config = folder / "gpulock.conf"
        config.write_text(f"SGE_SHEPHERD={folder}/shepherd\n")
        yield render_hooks(folder / "hooks", config)


@pytest.fixture
def job_dir() -> Iterator[Path]:
    """Return the folder of a job, where shepherd_cmd may write."""
    with public_place() as folder:
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        yield folder


def run_without_forks(*words: object, cwd: Path = Path("/")) -> subprocess.CompletedProcess[str]:
    """Run a script for which every fork fails, with a limit that it may not lift."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    return subprocess.run(
        [str(word) for word in words],
        env={},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        user=NOBODY if os.geteuid() == 0 else None,
        group=NOBODY if os.geteuid() == 0 else None,
        preexec_fn=limit,
    )


@pytest.mark.parametrize("site", [(), ("root", "/bin/true")])
@pytest.mark.parametrize(("kind", "code"), [("prolog", 99), ("epilog", 0)])
def test_a_job_whose_prolog_cannot_start_waits_and_a_finished_one_is_over(
    hooks: HookPaths, kind: str, code: int, site: tuple[str, ...]
) -> None:
    done = run_without_forks(hooks.drop_env, hooks.folder / kind / "sge", *JOB, *site)

    assert done.returncode == code
    assert "job 12: no process can be started here now" in done.stderr


@SHELLS
def test_a_job_whose_shepherd_cannot_be_prepared_goes_back_to_its_queue(
    hooks: HookPaths, job_dir: Path, shell: str
) -> None:
    """Without an exit_status execd puts every queue of the host in error. The fork is for OCS."""
    ocs = [line for line in RECORDED.read_text().splitlines() if "enable_windomacc" not in line]
    (job_dir / "config").write_text("\n".join([*ocs, ""]))
    (job_dir / "environment").write_text("A=b\n")

    done = run_without_forks(shell, "-p", hooks.folder / "prolog/sge_shepherd", cwd=job_dir)

    assert done.returncode == AGAIN
    assert (job_dir / "exit_status").read_text() == f"{AGAIN}\n"
    assert "no process can be started" in (job_dir / "error").read_text()


@SHELLS
def test_a_slave_task_whose_hook_cannot_start_deletes_its_job(
    hooks: HookPaths, job_dir: Path, shell: str
) -> None:
    """Else the client of the task waits for ever."""
    task = job_dir / "active_jobs/12.1/1.host"
    task.mkdir(parents=True)
    task.chmod(0o777)
    (task / "config").write_text(RECORDED.read_text())

    done = run_without_forks(shell, "-p", hooks.folder / "prolog/sge_shepherd", cwd=task)

    assert done.returncode == DELETED
    assert (task / "exit_status").read_text() == f"{DELETED}\n"
