# SPDX-License-Identifier: Apache-2.0
"""Steps in containers of pyxis (a stand-in) get their step's GPUs, by gpulock's SPANK plugin."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from gpulock.install.items import Remainder
from gpulock.install.slurm.slurm_conf import SlurmConf
from gpulock.install.slurm.spank import PlugStack
from tests.labs.common.installed import variables
from tests.labs.slurm.enroot import SOURCES, cli_calls
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.jobs import occupied, wait_requeued
from tests.labs.slurm.modes import NODE, Mode, by_gpulock, by_slurm, wait_said
from tests.labs.slurm.pyxis import Pyxis, with_pyxis
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
BOTH = pytest.mark.parametrize("mode", [by_gpulock, by_slurm])
MASKS = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "GPULOCK_DEVICES")


@pytest.fixture
def pyxis(slurm_gpus: Gpulock) -> Iterator[Pyxis]:
    with with_pyxis(slurm_gpus, by_slurm, SLURM_WAIT="0.2") as made:
        yield made


def uuids(gpus: Gpulock, *indexes: int) -> str:
    rows = gpus.status(NODE)["gpus"]
    return ",".join(rows[index]["uuid"] for index in indexes)


def lines_left(pyxis: Pyxis) -> Remainder | None:
    """Return what plugstack.conf lacks."""
    conf = SlurmConf({"plugstackconfig": str(pyxis.plugstack)})
    return PlugStack(conf, None).remainder(pyxis.plugin, pyxis.hook)


def ran(done: subprocess.CompletedProcess[str]) -> bool:
    """Return whether the command of a step has run."""
    return "ran here" in done.stdout


RAN = ("echo", "ran here")


def test_without_the_plugin_a_step_in_a_container_does_not_start(slurm_gpus: Gpulock) -> None:
    """TaskProlog runs inside of it, where none of gpulock's files are."""
    with with_pyxis(slurm_gpus, by_slurm, task_prolog=True) as pyxis:
        pyxis.stack(f"required {pyxis.pyxis}")
        done = pyxis.inside("-w", NODE, "--gres=gpu:1", command=RAN)
        assert (ran(done), done.returncode != 0) == (False, True), done
        assert ran(slurm_gpus.slurm.srun("slalice", "-w", NODE, "--gres=gpu:1", *RAN))
        assert lines_left(pyxis)


@pytest.mark.short
@BOTH
def test_a_step_in_a_container_has_its_own_gpus_whatever_the_image_says(
    slurm_gpus: Gpulock, mode: Mode
) -> None:
    with with_pyxis(slurm_gpus, mode) as pyxis:
        assert not lines_left(pyxis)
        slurm = slurm_gpus.slurm
        hold = "env | grep ^GPULOCK_DEVICES\nexec sleep 600\n"
        first = slurm.submit("slbob", "--gres=gpu:1", "-w", NODE, script=hold)
        wait_said(slurm_gpus, first, "GPULOCK_DEVICES")
        taken = variables(slurm.said(first))["GPULOCK_DEVICES"]
        cli_calls(slurm)
        seen = variables((done := pyxis.inside("-w", NODE, "--gres=gpu:2")).stdout)
        mask, nvidia, own = [seen.get(name, "") for name in MASKS]
        indexes = [int(index) for index in mask.split(",")]
        assert len(indexes) == 2, done
        assert nvidia == own == uuids(slurm_gpus, *indexes)
        assert taken not in own
        assert seen["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        none = variables(pyxis.inside("-w", NODE).stdout)
        assert [none.get(name) for name in MASKS] == ["", "void", ""]
        outside = slurm.srun("slalice", "-w", NODE, "--gres=gpu:1", "env")
        assert variables(outside.stdout)["GPULOCK_DEVICES"] not in ("", taken)
        looks = pyxis.inside("-w", NODE, command=("ls", str(pyxis.hook)))
        assert "No such file" in looks.stderr, "the container is the host"
        if SOURCES:  # of the step with two GPUs; one with none says `void`
            assert [f"--device={own} " in call for call in cli_calls(slurm)] == [True]


def test_steps_beside_each_other_and_their_tasks_have_each_their_own(slurm_gpus: Gpulock) -> None:
    with with_pyxis(slurm_gpus, by_gpulock) as pyxis:
        show = f"--container-image={pyxis.image} sh -c 'echo t$SLURM_PROCID=$GPULOCK_DEVICES'"
        script = f"srun -n2 --gpus-per-task=1 {show}\nsrun -n1 --gres=none {show}\n"
        job = slurm_gpus.slurm.submit("slalice", "-n2", "--gres=gpu:2", "-w", NODE, script=script)
        slurm_gpus.slurm.wait_done(job)
        # beside what srun says where a step has to wait
        said = [line for line in slurm_gpus.slurm.said(job).splitlines() if line[:1] == "t"]
        assert sorted(said[:2]) == [f"t{n}={uuids(slurm_gpus, n)}" for n in (0, 1)]
        assert said[2:] == ["t0="]


def test_shard_jobs_in_containers_are_told_the_card_that_they_share(slurm_gpus: Gpulock) -> None:
    def shared(gpus: Gpulock, keys: Mapping[str, str] | None = None, **setup: Any) -> None:
        by_slurm(gpus, keys, **setup, shares={"shard": 8})

    with with_pyxis(slurm_gpus, shared, SLURM_SHARDS="share", SLURM_WAIT="0.2") as pyxis:
        slurm, words = slurm_gpus.slurm, ("-w", NODE, "--gres=shard:1")
        hold = "env | grep ^GPULOCK_DEVICES\nexec sleep 600\n"
        first = slurm.submit("slbob", *words, script=hold)
        wait_said(slurm_gpus, first, "GPULOCK_DEVICES")
        seen = variables((done := pyxis.inside(*words)).stdout)
        assert [seen.get(name) for name in MASKS] == ["0", *[uuids(slurm_gpus, 0)] * 2], done
        assert variables(slurm.said(first))["GPULOCK_DEVICES"] == uuids(slurm_gpus, 0)
        none = variables(pyxis.inside("-w", NODE).stdout)
        assert [none.get(name) for name in MASKS] == ["", "void", ""]
        with occupied(slurm_gpus, NODE, 1, 2, 3):
            whole = pyxis.inside("-w", NODE, "--gres=gpu:1", command=RAN)
            assert (ran(whole), whole.returncode != 0) == (False, True), whole
            again = pyxis.inside(*words, command=RAN)
            assert ran(again), again
        slurm.scancel(first)
        slurm.wait_settled(first)
        assert not [lock for lock in slurm_gpus.locks(NODE).values() if lock.job_id == str(first)]
    with with_pyxis(slurm_gpus, shared, SLURM_SHARDS="refuse") as pyxis:
        refused = pyxis.inside(*words, command=RAN)
        assert (ran(refused), refused.returncode != 0) == (False, True), refused
        assert "a part of a GPU (gres/shard)" in refused.stdout + refused.stderr


@pytest.mark.short
def test_a_refused_job_runs_nothing_in_a_container_or_outside(pyxis: Pyxis) -> None:
    slurm = pyxis.gpus.slurm
    with occupied(pyxis.gpus, NODE, 0, 1, 2, 3):
        batch = slurm.submit("slalice", "-w", NODE, "--gres=gpu:1", script="echo ran here\n")
        wait_requeued(pyxis.gpus, batch)
        assert "ran here" not in slurm.said(batch)
        assert "gpulock: " in slurm.said(batch)
        slurm.scancel(batch)
        done = pyxis.inside("-w", NODE, "--gres=gpu:1", command=RAN)
        assert (ran(done), done.returncode != 0) == (False, True), done
    assert "DRAIN" not in slurm.node_state(NODE)[0]


def test_what_a_user_mounts_or_exports_changes_nothing(pyxis: Pyxis) -> None:
    """TaskProlog's own path may be mounted over, and its loader is not the user's to lead."""
    slurm, home = pyxis.gpus.slurm, pyxis.gpus.slurm.users["slalice"].home
    fake = home / "fake"
    fake.write_text("#!/bin/sh\nexit 0\n")
    fake.chmod(0o755)
    pyxis.make_place(pyxis.hook)
    library, source = home / "liar.so", home / "liar.c"
    source.write_text(
        "#include <unistd.h>\n__attribute__((constructor)) void f(void) { _exit(0); }"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    lies = {
        "SLURM_STEP_GPUS": "3",
        "SLURM_LOCALID": "7",
        "CUDA_VISIBLE_DEVICES": "3",
        "GPULOCK_DEVICES": "all",
        "LD_PRELOAD": str(library),
        "APPTAINER_BINDPATH": "x" * 100_000,
    }
    mounts = f"--container-mounts={fake}:{pyxis.hook}"
    with occupied(pyxis.gpus, NODE, 0, 1, 2, 3):
        lying = {name: value for name, value in lies.items() if name != "LD_PRELOAD"}
        export = f"--export=ALL,LD_PRELOAD={library}"  # srun itself would end
        for words in ((mounts,), (mounts, export), (export,)):
            done = pyxis.inside("-w", NODE, "--gres=gpu:1", *words, command=RAN, env=lying)
            assert (ran(done), done.returncode != 0) == (False, True), done
    done = pyxis.inside("-w", NODE, "--gres=gpu:1", mounts, env=lying)
    seen = variables(done.stdout)
    assert [seen.get(name) for name in MASKS] == ["0", *[uuids(pyxis.gpus, 0)] * 2], done.stderr
    assert seen["APPTAINER_BINDPATH"] == lies["APPTAINER_BINDPATH"]
    assert "DRAIN" not in slurm.node_state(NODE)[0]


@pytest.mark.parametrize("missing", ["the first line", "the hook", "the plugin"])
def test_where_a_part_is_missing_no_task_starts(pyxis: Pyxis, missing: str) -> None:
    """Without a plugin that is required Slurm drains the node, as without the file of a Prolog."""
    slurm = pyxis.gpus.slurm
    part = {"the hook": pyxis.hook, "the plugin": pyxis.plugin}.get(missing)
    script = "echo ran here\n"
    held = slurm.submit("slalice", "-w", NODE, "-H", "--gres=gpu:1", script=script)
    away = pyxis.gpus.slurm.lab / "away"  # sbatch, too, needs the plugin
    if part:
        part.rename(away)
    else:
        pyxis.stack(*pyxis.lines[1:])
    slurm.scontrol("release", str(held))
    if missing == "the plugin":
        wait_until(lambda: "DRAIN" in slurm.node_state(NODE)[0], why="a drained node")
        slurm.scancel(held)
    slurm.wait_settled(held)
    assert "DRAIN" not in slurm.node_state(NODE)[0] or missing == "the plugin"
    assert "ran here" not in slurm.said(held)
    if part:
        away.rename(part)
    pyxis.stack(*pyxis.lines)
    slurm.recover()
    assert ran(pyxis.inside("-w", NODE, "--gres=gpu:1", command=RAN))


def test_a_node_without_gpus_and_its_steps_are_not_disturbed(slurm_gpus: Gpulock) -> None:
    def no_gpus(gpus: Gpulock, keys: Mapping[str, str] | None = None, **setup: Any) -> None:
        by_gpulock(gpus, keys, **{**setup, "gres": "none"})

    with with_pyxis(slurm_gpus, no_gpus) as pyxis:
        slurm_gpus.configure(NODE, EXPECTED_GPUS="0")
        for command in (RAN, ("sh", "-c", "echo ran here; env")):
            assert ran(pyxis.inside("-w", NODE, command=command))
            assert ran(slurm_gpus.slurm.srun("slalice", "-w", NODE, *command))
