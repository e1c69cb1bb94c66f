# SPDX-License-Identifier: Apache-2.0
"""podman's hook gives a container the job's mask, and an installer puts it there where asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpulock.install import planner, uninstall
from gpulock.install.change import FilePlace
from gpulock.install.container_hooks import (
    PODMAN_HOOK,
    PODMAN_HOOKS,
    PODMAN_PROGRAM,
)
from gpulock.install.hooks import (
    InstallError,
    find_share_folder,
    real_interpreter,
)
from gpulock.install.planner import (
    NodePlanner,
)
from tests.support.install_site import assert_kept_for_the_last_scheduler

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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return podman's folder of hooks, which is not there yet."""
    made = tmp_path / "containers/oci/hooks.d"
    for module in (planner, uninstall):
        monkeypatch.setattr(module, "PODMAN_HOOKS", made)
    return made


def plan(config: Path, asked: bool) -> NodePlanner:
    config.write_text(f"STATE_DIR={config.parent}/state\n")
    made = NodePlanner(config, "slurm")
    made.add_podman(asked, sys.executable)
    return made


def test_it_is_offered_put_there_where_asked_and_kept(tmp_path: Path, folder: Path) -> None:
    config = tmp_path / "gpulock.conf"
    assert (plan(config, False).plan_.notes, plan(config, False).plan_.changes) == ([], [])
    with pytest.raises(InstallError, match="--podman puts a hook there"):
        plan(config, True)
    folder.parents[1].mkdir()
    assert "--podman" in "".join(plan(config, False).plan_.notes)
    plan(config, True).plan_.apply(lambda _: None)
    program = folder / PODMAN_PROGRAM
    first, _, rest = program.read_text().partition("\n")
    assert first == f"#!{real_interpreter()} -IS"
    assert rest == (SOURCE / PODMAN_PROGRAM).read_text().partition("\n")[2]
    assert program.stat().st_mode & 0o777 == 0o755
    assert (folder / PODMAN_HOOK).read_bytes() == (SOURCE / PODMAN_HOOK).read_bytes()
    again = plan(config, False).plan_
    assert (again.changes, again.notes) == ([], [])
    program.write_text("older\n")
    assert [change.what for change in plan(config, False).plan_.changes] == [f"file {program}"]


def test_it_stays_as_long_as_one_scheduler_is_installed(tmp_path: Path, folder: Path) -> None:
    places = [FilePlace(folder / PODMAN_PROGRAM, 0o755), FilePlace(folder / PODMAN_HOOK)]
    assert_kept_for_the_last_scheduler(tmp_path, *places)
