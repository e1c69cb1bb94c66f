# SPDX-License-Identifier: Apache-2.0
"""Hooks of enroot and podman give a container the job's mask."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpulock.install.files import find_share_folder
from gpulock.install.hooks import CONTAINERS, PODMAN_PROGRAM
from gpulock.install.versions import CURRENT, FOLDER

PROLOG = find_share_folder() / "prolog"
MASK = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "GPULOCK_DEVICES")
UUIDS = "GPU-1,GPU-2"
IMAGE = {"PATH": "/bin", "NVIDIA_VISIBLE_DEVICES": "all", "GPULOCK_DEVICES": "x"}
JOB = {"CUDA_VISIBLE_DEVICES": "0,1", **dict.fromkeys(MASK[1:], UUIDS)}
IDLE = {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void", "GPULOCK_DEVICES": ""}
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
MPS = {
    PIPES: "/var/lib/gpulock-mps/0000-01-00.0/pipe",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2000M",
}


def call_podmans(config: str, **job: str) -> subprocess.CompletedProcess[str]:
    """Call the hook as podman does: as its child, with nothing in the environment but the job's."""
    command = [sys.executable, "-IS", str(PROLOG / PODMAN_PROGRAM)]
    podman = ["/bin/sh", "-c", '"$@"; exit $?', "podman", *command]
    return subprocess.run(
        podman, input=config, env=job, capture_output=True, text=True, timeout=20, check=False
    )


def under_podman(own: dict[str, str], **job: str) -> dict[str, str]:
    """Return the container's environment after podman's hook."""
    pairs = [f"{name}={value}" for name, value in own.items()]
    config = {"ociVersion": "1.0.2", "process": {"env": pairs, "cwd": "/"}}
    done = call_podmans(json.dumps(config), **job)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    pairs = found["process"].pop("env")
    assert found == {"ociVersion": "1.0.2", "process": {"cwd": "/"}}
    assert len({pair.partition("=")[0] for pair in pairs}) == len(pairs)
    return dict(pair.split("=", 1) for pair in pairs)


def under_enroot(folder: Path, own: dict[str, str], **job: str) -> dict[str, str]:
    """Return the container's environment after enroot's hook."""
    path = folder / "environ"
    path.write_text("".join(f"{name}={value}\n" for name, value in own.items()))
    env = {"PATH": "/usr/bin:/bin", "ENROOT_ENVIRON": str(path), **job}
    subprocess.run([PROLOG / CONTAINERS[0]], env=env, check=True, timeout=20)
    lines = path.read_text().splitlines()
    assert len({line.partition("=")[0] for line in lines}) == len(lines)
    return dict(line.split("=", 1) for line in lines)


def test_the_jobs_mask_takes_the_place_of_the_images(tmp_path: Path) -> None:
    """podman's by UUID: an index of the job is another GPU where the job's alone are counted."""
    by_uuid = dict.fromkeys(MASK, UUIDS)
    assert under_podman(IMAGE, **JOB) == {"PATH": "/bin", **by_uuid}
    assert under_podman(IMAGE, **JOB, **MPS) == {"PATH": "/bin", **by_uuid, **MPS}
    more = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **MPS}
    assert under_enroot(tmp_path, IMAGE, **JOB, **more) == {"PATH": "/bin", **JOB, **more}
    image = {PIPES: "/of/the/image"}
    assert under_enroot(tmp_path, image, **JOB) == {**JOB, **image}, "the job has no MPS"
    assert under_enroot(tmp_path, image, **JOB, **MPS) == {**JOB, **MPS}
    assert under_podman(image, **JOB, **MPS)[PIPES] == image[PIPES], "podman's may be the user's"
    for image in (IMAGE, {}):  # a job without GPUs
        assert under_podman(image, **IDLE).items() >= IDLE.items()
        assert under_enroot(tmp_path, image, **IDLE).items() >= IDLE.items()


def test_outside_of_a_job_and_under_pyxis_nothing_is_changed(tmp_path: Path) -> None:
    assert under_podman(IMAGE) == under_enroot(tmp_path, IMAGE) == IMAGE
    assert under_enroot(tmp_path, IMAGE, **JOB, PYXIS_VERSION="0.24.0") == IMAGE


def test_a_share_that_the_user_chose_stands_and_more_than_the_jobs_does_not() -> None:
    chosen = {"CUDA_VISIBLE_DEVICES": "1", "NVIDIA_VISIBLE_DEVICES": "GPU-2"}
    assert under_podman(chosen, **JOB) == {**chosen, "GPULOCK_DEVICES": UUIDS}
    found = under_podman({"NVIDIA_VISIBLE_DEVICES": "void"}, **JOB)  # a spec gives them itself
    assert [found[name] for name in MASK] == [UUIDS, "void", UUIDS]
    untold = under_podman(IMAGE, CUDA_VISIBLE_DEVICES="0")
    assert untold["NVIDIA_VISIBLE_DEVICES"] == "void"
    for more in ("GPU-2,GPU-3", "0", "", "GPU-1,all", ","):
        found = under_podman({"NVIDIA_VISIBLE_DEVICES": more}, **JOB)
        assert found["NVIDIA_VISIBLE_DEVICES"] == UUIDS, more


@pytest.mark.parametrize("config", ["", "[]", '{"process": null}'])
def test_what_it_does_not_understand_starts_no_container(config: str) -> None:
    done = call_podmans(config, **JOB)
    assert (done.returncode != 0, done.stdout) == (True, "")


def test_podman_finds_the_program_by_the_hook() -> None:
    hook = json.loads((PROLOG / CONTAINERS[1]).read_text())
    assert hook["hook"] == {"path": str(FOLDER / CURRENT / PODMAN_PROGRAM)}
    assert (hook["stages"], hook["when"]) == (["precreate"], {"always": True})
