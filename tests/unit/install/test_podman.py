# SPDX-License-Identifier: Apache-2.0
"""podman's hook gives a container the job's mask."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gpulock.install.container_hooks import (
    PODMAN_HOOK,
    PODMAN_HOOKS,
    PODMAN_PROGRAM,
)
from gpulock.install.files import find_share_folder

SOURCE = find_share_folder() / "prolog/podman"
IMAGE = {"PATH": "/bin", "NVIDIA_VISIBLE_DEVICES": "all", "GPULOCK_DEVICES": "x"}
JOB = {
    "CUDA_VISIBLE_DEVICES": "0,1",
    "NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2",
    "GPULOCK_DEVICES": "GPU-1,GPU-2",
}
IDLE = {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void", "GPULOCK_DEVICES": ""}
MASK = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "GPULOCK_DEVICES")
UUIDS = "GPU-1,GPU-2"


def call(config: str, **job: str) -> subprocess.CompletedProcess[str]:
    """Call the hook as podman does: as its child, with nothing in the environment but the job's."""
    command = [sys.executable, "-IS", str(SOURCE / PODMAN_PROGRAM)]
    podman = ["/bin/sh", "-c", '"$@"; exit $?', "podman", *command]
    return subprocess.run(
        podman, input=config, env=job, capture_output=True, text=True, timeout=20, check=False
    )


def environ_of(own: dict[str, str], **job: str) -> dict[str, str]:
    """Return the container's environment after the hook."""
    pairs = [f"{name}={value}" for name, value in own.items()]
    config = {"ociVersion": "1.0.2", "process": {"env": pairs, "cwd": "/"}}
    done = call(json.dumps(config), **job)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    pairs = found["process"].pop("env")
    assert found == {"ociVersion": "1.0.2", "process": {"cwd": "/"}}
    assert len({pair.partition("=")[0] for pair in pairs}) == len(pairs)
    return dict(pair.split("=", 1) for pair in pairs)


def test_the_jobs_gpus_take_the_place_of_the_images() -> None:
    """By UUID: an index of the job is another GPU in a container that has the job's alone."""
    assert environ_of(IMAGE, **JOB) == {"PATH": "/bin", **dict.fromkeys(MASK, UUIDS)}


def test_a_share_gives_its_mps_unless_the_user_chose_another() -> None:
    mps = {
        "CUDA_MPS_PIPE_DIRECTORY": "/var/lib/gpulock-mps/0000-01-00.0/pipe",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2000M",
    }
    assert environ_of(IMAGE, **JOB, **mps) == {"PATH": "/bin", **dict.fromkeys(MASK, UUIDS), **mps}
    chosen = {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mine"}
    assert environ_of(chosen, **JOB, **mps) == {**dict.fromkeys(MASK, UUIDS), **mps, **chosen}


def test_a_job_without_gpus_gives_an_empty_mask() -> None:
    found = environ_of(IMAGE, **IDLE)
    assert [found[name] for name in MASK] == ["", "void", ""]
    found = environ_of({}, **IDLE)
    assert [found[name] for name in MASK] == ["", "void", ""]


def test_outside_of_a_job_nothing_is_changed() -> None:
    assert environ_of(IMAGE) == IMAGE


def test_a_share_that_the_user_chose_stands_and_more_than_the_jobs_does_not() -> None:
    chosen = {"CUDA_VISIBLE_DEVICES": "1", "NVIDIA_VISIBLE_DEVICES": "GPU-2"}
    assert environ_of(chosen, **JOB) == {**chosen, "GPULOCK_DEVICES": UUIDS}
    for more in ("GPU-2,GPU-3", "0", "", "GPU-1,all", ","):
        found = environ_of({"NVIDIA_VISIBLE_DEVICES": more}, **JOB)
        assert found["NVIDIA_VISIBLE_DEVICES"] == UUIDS, more


def test_what_a_spec_gives_itself_is_not_given_by_nvidias_hook_as_well() -> None:
    found = environ_of({"NVIDIA_VISIBLE_DEVICES": "void"}, **JOB)
    assert [found[name] for name in MASK] == [UUIDS, "void", UUIDS]


def test_a_task_whose_gpus_cannot_be_told_gets_none_by_nvidias_hook() -> None:
    found = environ_of(IMAGE, CUDA_VISIBLE_DEVICES="0")
    assert found["NVIDIA_VISIBLE_DEVICES"] == "void"


@pytest.mark.parametrize("config", ["", "[]", '{"process": null}'])
def test_what_it_does_not_understand_starts_no_container(config: str) -> None:
    done = call(config, **JOB)
    assert (done.returncode != 0, done.stdout) == (True, "")


def test_podman_finds_the_program_by_the_hook() -> None:
    hook = json.loads((SOURCE / PODMAN_HOOK).read_text())
    assert hook["hook"] == {"path": str(PODMAN_HOOKS / PODMAN_PROGRAM)}
    assert (hook["stages"], hook["when"]) == (["precreate"], {"always": True})
