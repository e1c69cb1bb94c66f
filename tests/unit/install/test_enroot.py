# SPDX-License-Identifier: Apache-2.0
"""enroot's hook gives a container the job's mask."""

from __future__ import annotations

import subprocess
from pathlib import Path

from gpulock.install.container_hooks import ENROOT_HOOK
from gpulock.install.files import find_share_folder

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
