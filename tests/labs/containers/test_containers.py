# SPDX-License-Identifier: Apache-2.0
"""What a job's GPUs are in Apptainer and podman; a job of a scheduler: labs/both/test_isolation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.job.environment import BIND_LISTS, CONTAINER_PREFIXES, grant_variables
from gpulock.node.settings_file import read_settings
from tests.labs.containers.job import add_driver
from tests.labs.containers.lab import Node, booted_node

pytestmark = pytest.mark.lab
SHOW = "env; echo; ls /dev /dev/nvidia-caps 2>/dev/null; cat /nvbin/nvidia-smi /nvlib/libcuda.so.1"
CLEAN = ("--cleanenv", "--containall", "--compat")
ALLOWED = "No such device or address"  # ENXIO: there is no driver
ABSENT, REFUSED = "No such file or directory", "Operation not permitted"


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """Give a node of eight cards whose minors are not their indexes."""
    with booted_node("dgx-h200") as made:
        yield made


def told(text: str) -> dict[str, str]:
    """Return the environment that SHOW printed."""
    lines = text.partition("\n\n")[0].splitlines()
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def visible(job: dict[str, str]) -> dict[str, str]:
    """Return what a container must find of a job's variables."""
    names = [
        name.removeprefix(CONTAINER_PREFIXES[0])
        for name in job
        if name.startswith(CONTAINER_PREFIXES[0])
    ]
    assert "CUDA_VISIBLE_DEVICES" in names
    return {name: job[name] for name in names}


@pytest.mark.parametrize("flag", CLEAN)
def test_the_names_of_singularity_alone_are_as_good_and_a_users_own_are_overwritten(
    node: Node, flag: str
) -> None:
    users = {f"{twin}CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7" for twin in CONTAINER_PREFIXES}
    job = node.job(2, **users)
    left = {name: value for name, value in job.items() if not name.startswith("APPTAINER")}
    assert set(left) < set(job)
    done = node.apptainer(SHOW, left, flag)

    assert (done.returncode, done.stdout.splitlines()[-2:]) == (0, [node.version] * 2), done.stderr
    assert told(done.stdout).items() >= visible(job).items()
    assert told(done.stdout)["CUDA_VISIBLE_DEVICES"] == job["GPULOCK_DEVICES"] != ""


@pytest.mark.parametrize("name", [*BIND_LISTS, "APPTAINER_BIND", "SINGULARITY_BIND"])
def test_a_users_own_binds_stay(node: Node, name: str) -> None:
    own = node.folder / "own"
    own.mkdir(exist_ok=True)
    (own / "file").write_text("mine\n")
    job = node.job(1, **{name: f"{own}:/mine:ro"})
    done = node.apptainer(f"cat /mine/file; {SHOW}", job, "--containall")

    assert done.stdout.splitlines()[0] == "mine", done.stderr
    assert done.stdout.splitlines()[-2:] == [node.version] * 2


@pytest.mark.parametrize(
    "binds",
    [
        "{sets}/1.2.3/bin:/nvbin,{sets}/1.2.3/lib:/nvlib",  # of a job of another node
        *("/tmp/../tmp:/a:rw,,", "/tmp:/a\n", ",,/tmp:/b:ro", "/tmp:/a," * 50, "/tmp:/ä"),
    ],
)
def test_strange_binds_of_a_user_hide_none_of_ours(node: Node, binds: str) -> None:
    sets = Path(node.settings.driver_dir)
    add_driver(sets, "1.2.3")
    job = node.job(1, **dict.fromkeys(BIND_LISTS, binds.format(sets=sets)))
    done = node.apptainer(SHOW, job, "--containall")

    assert done.stdout.splitlines()[-2:] == [node.version] * 2, done.stderr


def test_a_program_without_gpus_sees_an_empty_mask_and_not_none(node: Node) -> None:
    job = dict(grant_variables([], node.settings))
    for flags in ((), ("--cleanenv",), ("--containall",)):
        assert told(node.apptainer(SHOW, job, *flags).stdout)["CUDA_VISIBLE_DEVICES"] == ""


def opens(*paths: str) -> str:
    """Return a script that tells of each node whether it can be opened."""
    return "; ".join(f'echo "opened {path}: $(cat {path} 2>&1)"' for path in paths)


def answers(text: str) -> list[str]:
    """Return what `opens` told, in its order."""
    return [line.rpartition(": ")[2] for line in text.splitlines() if line.startswith("opened ")]


def minors_of(node: Node, job: dict[str, str]) -> tuple[list[int], int]:
    """Return the minors of a job's cards, and one of another card."""
    machine = node.site.files.machine
    own = job["GPULOCK_DEVICES"].split(",")
    mine = [gpu.minor for gpu in machine.gpus if machine.uuid(gpu) in own]
    return mine, next(gpu.minor for gpu in machine.gpus if gpu.minor not in mine)


def test_podman_gives_a_job_its_own_cards_by_the_names_it_was_told(node: Node) -> None:
    job = node.job(2)
    (first, second), other = minors_of(node, job)
    look = opens(f"/dev/nvidia{first}", f"/dev/nvidia{second}", f"/dev/nvidia{other}", "/tmp/made")
    script = f"{SHOW}; mknod /tmp/made c 195 {other}; {look}"
    done = node.podman(script, job, *job["GPULOCK_CDI"].split(), "--cap-add", "MKNOD", as_root=True)

    shown = [line for line in done.stdout.splitlines() if line.startswith("nvidia")]
    own = {f"nvidia{first}", f"nvidia{second}"}
    assert set(shown) == own | {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"}, done.stderr
    assert answers(done.stdout) == [ALLOWED, ALLOWED, ABSENT, REFUSED]
    assert f"\n{node.version}\n{node.version}\n" in done.stdout
    seen = told(done.stdout)
    assert seen["NVIDIA_VISIBLE_DEVICES"] == "void"  # the spec's, which NVIDIA's own hook obeys
    assert seen["CUDA_VISIBLE_DEVICES"] == job["GPULOCK_DEVICES"]  # by gpulock's hook


def test_podman_knows_a_card_by_its_lock_id_alone_and_gives_none_where_none_is_asked_for(
    node: Node,
) -> None:
    gpu = node.site.files.machine.gpus[3]
    done = node.podman("ls /dev", {}, "--device", f"gpulock.io/gpu={gpu.bus}")
    assert f"nvidia{gpu.minor}\n" in done.stdout, done.stderr
    for name in ("all", "3", "GPU-x"):
        done = node.podman("ls /dev", {}, "--device", f"gpulock.io/gpu={name}")
        assert (done.returncode != 0, "unresolvable CDI device" in done.stderr) == (True, True)
    job = dict(grant_variables([], read_settings(node.site.config)))
    done = node.podman("ls /dev", job, *job["GPULOCK_CDI"].split())
    assert (done.returncode, "nvidia" in done.stdout) == (0, False)


def test_podmans_hook_gives_a_container_the_jobs_mask(node: Node) -> None:
    job = node.job(2)
    image = ("-e", "NVIDIA_VISIBLE_DEVICES=all", "-e", "GPULOCK_DEVICES=x")
    done = node.podman("env", job, *image)
    names = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "GPULOCK_DEVICES")
    assert [told(done.stdout).get(name) for name in names] == [job["GPULOCK_DEVICES"]] * 3, done
    idle = dict(grant_variables([], read_settings(node.site.config)))
    done = node.podman("env", idle, *image)
    assert [told(done.stdout).get(name) for name in names] == ["", "void", ""], done
    done = node.podman("env", {}, *image)
    assert [told(done.stdout).get(name) for name in names] == [None, "all", "x"], done


def test_podman_gives_an_instance_with_its_own_access_nodes() -> None:
    with booted_node("a100-mig") as node:
        gpu = node.site.files.machine.gpus[0]
        name = f"{gpu.bus}.{gpu.mig[1].name}"
        done = node.podman("ls /dev /dev/nvidia-caps", {}, "--device", f"gpulock.io/gpu={name}")

    shown = [line for line in done.stdout.splitlines() if line.startswith("nvidia")]
    access = [line for line in shown if line.startswith("nvidia-cap") and line[-1].isdigit()]
    assert (f"nvidia{gpu.minor}" in shown, len(access)) == (True, 2), done.stderr
