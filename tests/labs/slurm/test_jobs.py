# SPDX-License-Identifier: Apache-2.0
"""Ordinary jobs of a real Slurm get GPUs that no other job has, by either selection."""

from __future__ import annotations

import pytest

from tests.labs.common.installed import reap, variables
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.jobs import held, wait_requeued
from tests.labs.slurm.modes import NODE, Mode, by_gpulock, by_slurm, run, wait_said, write_map

pytestmark = pytest.mark.lab
BOTH = pytest.mark.parametrize("mode", [by_gpulock, by_slurm], scope="module")
STEP = "sh -c 'echo $SLURMD_NODENAME.$SLURM_PROCID=$CUDA_VISIBLE_DEVICES'"


@BOTH
@pytest.mark.parametrize(
    ("request_", "count"),
    [
        (["--gres=gpu:3"], 3),
        (["--gpus=2"], 2),
        (["--gpus-per-node=4"], 4),
        (["-n2", "--gpus-per-task=1"], 2),
        (["--gres=gpu"], 1),
    ],
)
def test_every_way_to_ask_counts_the_same(
    slurm_gpus: Gpulock, mode: Mode, request_: list[str], count: int
) -> None:
    mode(slurm_gpus)
    seen = run(slurm_gpus, "-N1", "-w", NODE, *request_)
    assert len(seen["CUDA_VISIBLE_DEVICES"].split(",")) == count
    assert len(seen["GPULOCK_DEVICES"].split(",")) == count


@pytest.mark.short
@BOTH
def test_srun_salloc_and_an_interactive_step_have_their_mask(
    slurm_gpus: Gpulock, mode: Mode
) -> None:
    mode(slurm_gpus)
    slurm = slurm_gpus.slurm
    show = ["sh", "-c", "echo mask=$CUDA_VISIBLE_DEVICES"]
    assert "mask=0,1" in slurm.srun("slalice", "--gres=gpu:2", "-w", NODE, *show).stdout
    done = slurm.salloc("slalice", "--gres=gpu:2", "-w", NODE, "srun", *show)
    assert "mask=0,1" in done.stdout, done
    ask = ["srun", "--interactive", "--gres=gpu:2", *show]
    assert "mask=0,1" in slurm.salloc("slalice", "--gres=gpu:2", "-w", NODE, *ask).stdout
    slurm_gpus.wait_free()


@pytest.mark.short
@BOTH
def test_each_node_of_a_job_has_its_own_locks(slurm_gpus: Gpulock, mode: Mode) -> None:
    mode(slurm_gpus)
    slurm = slurm_gpus.slurm
    other = slurm.submit("slbob", "--gres=gpu:1", "-w", "slnode2", script="exec sleep 600\n")
    slurm.wait_running(other)
    script = f"srun {STEP}\necho both\nexec sleep 600\n"
    job = slurm.submit("slalice", "-N2", "--gres=gpu:2", "-w", "slnode[1-2]", script=script)
    seen = variables(wait_said(slurm_gpus, job, "both\n"))
    for rank, node in enumerate(("slnode1", "slnode2")):
        assert seen[f"{node}.{rank}"].split(",") == held(slurm_gpus, job, node)
    assert held(slurm_gpus, job, "slnode2") != held(slurm_gpus, job, "slnode1")
    slurm.scancel(job)
    slurm.wait_settled(job)
    assert not any(slurm_gpus.held_by(job).values())
    slurm.scancel(other)


@pytest.mark.short
@BOTH
def test_a_heterogeneous_job_has_its_components_locks(slurm_gpus: Gpulock, mode: Mode) -> None:
    mode(slurm_gpus)
    slurm = slurm_gpus.slurm
    parts = ["--gres=gpu:1", "-w", "slnode1", ":", "--gres=gpu:3", "-w", "slnode2"]
    job = slurm.submit("slalice", *parts, script=f"srun --het-group=0,1 {STEP}\n")
    slurm.wait_done(job)
    seen = variables(slurm.said(job))
    assert len(seen["slnode1.0"].split(",")) == 1
    assert len(seen["slnode2.1"].split(",")) == 3
    slurm_gpus.wait_free()


@pytest.mark.short
@BOTH
def test_a_step_sees_what_it_asked_for(slurm_gpus: Gpulock, mode: Mode) -> None:
    mode(slurm_gpus)
    home = slurm_gpus.slurm.users["slalice"].home
    script = (
        f"rm -f {home}/a {home}/b\n"
        f"srun -n1 --gres=gpu:1 {STEP}\nsrun -n1 --gres=gpu:none {STEP}\n"
        "srun -n1 --gres=none sh -c 'echo none=$CUDA_VISIBLE_DEVICES.'\n"
        f"(srun {beside('a', 'b')} & srun {beside('b', 'a')}; wait)\n"
    )
    seen = run(slurm_gpus, "-n2", "--gres=gpu:2", "-w", NODE, script=script)
    assert seen[f"{NODE}.0"] == "0"
    assert seen["none"] == "."
    assert {seen["a"], seen["b"]} == {"0", "1"}


def beside(name: str, other: str) -> str:
    """Return the words of a step of one GPU that ends when there is another one beside it."""
    wait = f"touch {name}; until [ -e {other} ]; do sleep 0.1; done"
    return f"-n1 --gres=gpu:1 --exact sh -c 'echo {name}=$CUDA_VISIBLE_DEVICES; {wait}'"


@pytest.mark.short
@BOTH
def test_a_requeued_job_holds_again_and_a_suspended_one_still_does(
    slurm_gpus: Gpulock, mode: Mode
) -> None:
    """Slurm tells its tasks which run it is, whatever the user's environment says."""
    mode(slurm_gpus)
    slurm = slurm_gpus.slurm
    told = 'echo "run=$SLURM_RESTART_COUNT"; srun sh -c \'echo "step=$SLURM_RESTART_COUNT"\'\n'
    words = ("--requeue", "--gres=gpu:2", "-w", NODE)
    lie = {"SLURM_RESTART_COUNT": "0"}
    job = slurm.submit("slalice", *words, script=f"{told}exec sleep 600\n", env=lie)
    slurm.wait_running(job)
    slurm.scontrol("requeue", str(job))
    slurm.begin(job)
    assert "run=1\n" in wait_said(slurm_gpus, job, "step=1")
    assert {lock.restart for lock in slurm_gpus.locks(NODE).values()} == {1}
    slurm.scontrol("suspend", str(job))
    reap(slurm_gpus, NODE)
    assert len(held(slurm_gpus, job, NODE)) == 2
    slurm.scontrol("resume", str(job))
    slurm.scancel(job)
    slurm.wait_done(job)
    slurm_gpus.wait_free()


def test_no_task_starts_on_a_card_that_a_stale_map_did_not_lock(slurm_gpus: Gpulock) -> None:
    """slurmd's list follows the types of `Gres=`, and gres.conf stays as it was."""
    slurm = slurm_gpus.slurm
    confined = {"proctrack": "cgroup", "constrain_devices": True}
    keys = {"DEV_ROOT": str(slurm.device(NODE, 0).parent)}
    by_slurm(slurm_gpus, keys, types={0: "a", 1: "a", 2: "b", 3: "b"}, **confined)
    conf = slurm.lab / "etc/slurm.conf"
    before = conf.read_text()
    conf.write_text(before.replace("gpu:a:2,gpu:b:2", "gpu:b:2,gpu:a:2"))
    assert conf.read_text() != before
    slurm.stop_slurmctld()
    slurm.start_slurmctld()
    slurm.restart_slurmds()
    job = slurm.submit("slalice", "--gres=gpu:a:1", "-w", NODE, script="echo ran\n")
    wait_requeued(slurm_gpus, job)
    assert "Slurm opened other GPUs than are locked" in slurm.said(job)
    assert "ran" not in slurm.said(job)
    slurm.scancel(job)
    write_map(slurm_gpus, NODE, (2, 3, 0, 1))  # as `install slurm` does
    job = slurm.submit("slalice", "--gres=gpu:a:1", "-w", NODE, script="echo ran\n")
    assert (slurm.wait_done(job), "ran" in slurm.said(job)) == ("COMPLETED", True)
    slurm.reconfigure()
