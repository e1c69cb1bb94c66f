# SPDX-License-Identifier: Apache-2.0
"""enroot's hook gives a container the job's mask, and an installer puts it there where asked."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpulock.install import planner, uninstall
from gpulock.install.change import FilePlace
from gpulock.install.container_hooks import (
    ENROOT_HOOK,
)
from gpulock.install.hooks import InstallError, find_share_folder
from gpulock.install.planner import (
    NodePlanner,
)
from tests.support.install_site import assert_kept_for_the_last_scheduler

HOOK = find_share_folder() / "prolog/enroot" / ENROOT_HOOK
IMAGE = "PATH=/bin\nCUDA_VISIBLE_DEVICES=9\nNVIDIA_VISIBLE_DEVICES=all\nGPULOCK_DEVICES=x\n"
JOB = {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def environ_of(folder: Path, **job: str) -> list[str]:
    """Return the container's environment after the hook, where the image set IMAGE."""
    path = folder / "environ"
    path.write_text(IMAGE)
    env = {"PATH": "/usr/bin:/bin", "ENROOT_ENVIRON": str(path), **job}
    subprocess.run([HOOK], env=env, check=True, timeout=20)
    return path.read_text().splitlines()


def test_the_jobs_mask_takes_the_place_of_the_images(tmp_path: Path) -> None:
    found = environ_of(tmp_path, **JOB, NVIDIA_VISIBLE_DEVICES="GPU-1,GPU-2")
    pairs = {f"{name}={value}" for name, value in JOB.items()}
    assert {*found} == {"PATH=/bin", *pairs, "NVIDIA_VISIBLE_DEVICES=GPU-1,GPU-2"}
    assert len(found) == 4


MPS = {
    "CUDA_MPS_PIPE_DIRECTORY": "/var/lib/gpulock-mps/0000-01-00.0/pipe",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2000M",
}


def test_a_share_gives_its_mps_and_another_job_leaves_that_to_the_image(tmp_path: Path) -> None:
    found = environ_of(tmp_path, **JOB, **MPS)
    assert {name: value for name, _, value in (line.partition("=") for line in found)} == {
        "PATH": "/bin",
        **JOB,
        **MPS,
    }
    path = tmp_path / "environ"
    path.write_text("CUDA_MPS_PIPE_DIRECTORY=/of/the/image\n")
    env = {"PATH": "/usr/bin:/bin", "ENROOT_ENVIRON": str(path), **JOB}
    subprocess.run([HOOK], env=env, check=True, timeout=20)
    assert "CUDA_MPS_PIPE_DIRECTORY=/of/the/image" in path.read_text().splitlines()
    subprocess.run([HOOK], env={**env, **MPS}, check=True, timeout=20)
    pipes = [line for line in path.read_text().splitlines() if "PIPE_DIRECTORY" in line]
    assert pipes == [f"CUDA_MPS_PIPE_DIRECTORY={MPS['CUDA_MPS_PIPE_DIRECTORY']}"]


def test_a_job_without_gpus_gives_an_empty_mask(tmp_path: Path) -> None:
    empty = {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void", "GPULOCK_DEVICES": ""}
    found = environ_of(tmp_path, **empty)
    assert {*found} == {"PATH=/bin", *[f"{name}={value}" for name, value in empty.items()]}


def test_outside_of_a_job_and_under_pyxis_nothing_is_changed(tmp_path: Path) -> None:
    assert environ_of(tmp_path) == IMAGE.splitlines()
    assert environ_of(tmp_path, **JOB, PYXIS_VERSION="0.24.0") == IMAGE.splitlines()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return enroot's folder of hooks, which is not there yet."""
    for module in (planner, uninstall):
        monkeypatch.setattr(module, "ENROOT_HOOKS", tmp_path / "hooks.d")
    return tmp_path / "hooks.d"


def plan(config: Path, asked: bool) -> NodePlanner:
    config.write_text(f"STATE_DIR={config.parent}/state\n")
    made = NodePlanner(config, "slurm")
    made.add_enroot(asked)
    return made


def test_it_is_offered_put_there_where_asked_and_kept(tmp_path: Path, folder: Path) -> None:
    config = tmp_path / "gpulock.conf"
    assert (plan(config, False).plan_.notes, plan(config, False).plan_.changes) == ([], [])
    with pytest.raises(InstallError, match=r"hooks\.d: --enroot puts a hook there"):
        plan(config, True)
    folder.mkdir()
    assert "--enroot" in "".join(plan(config, False).plan_.notes)
    plan(config, True).plan_.apply(lambda _: None)
    hook = folder / ENROOT_HOOK
    assert hook.read_bytes() == HOOK.read_bytes()
    assert hook.stat().st_mode & 0o777 == 0o755
    again = plan(config, False).plan_
    assert (again.changes, again.notes) == ([], [])
    hook.write_text("older\n")
    assert [change.what for change in plan(config, False).plan_.changes] == [f"file {hook}"]


def test_it_stays_as_long_as_one_scheduler_is_installed(tmp_path: Path, folder: Path) -> None:
    assert_kept_for_the_last_scheduler(tmp_path, FilePlace(folder / ENROOT_HOOK, 0o755))
