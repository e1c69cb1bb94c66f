# SPDX-License-Identifier: Apache-2.0
"""What a job's owner can set changes nothing but his own job."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Generator

import pytest

from tests.labs.sge_evil import Evil, kit
from tests.labs.sge_wait import until
from tests.labs.slurm_gpulock import Gpulock
from tests.labs.slurm_lab import JobId
from tests.labs.slurm_modes import NODE, Mode, by_gpulock, by_slurm, variables, wait_said

pytestmark = pytest.mark.lab
BOTH = pytest.mark.parametrize("mode", [by_gpulock, by_slurm])
NAMES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "GPULOCK_DEVICES")
TWINS = ("", "APPTAINERENV_", "SINGULARITYENV_")
# not `env | grep`: a value with newlines looks like other variables there
MASK = "".join(f'echo "{twin}{name}=${twin}{name}"\n' for twin in TWINS for name in NAMES)
SHOW = "echo shown=$CUDA_VISIBLE_DEVICES.\n"


def forged(evil: Evil) -> dict[str, str]:
    """Return an environment that says everything about the job, and all of it wrong."""
    return {
        **{
            k: v for k, v in {**evil.plain(), **evil.odd()}.items() if "\n" not in k and k != "PATH"
        },
        "SLURM_JOB_ID": "1",
        "SLURM_JOBID": "1",
        "SLURM_JOB_UID": "0",
        "SLURM_JOB_GPUS": "0,1,2,3",
        "SLURM_STEP_GPUS": "0,1,2,3",
        "SLURM_STEP_ID": "77",
        "SLURM_LOCALID": "3",
        "SLURM_GTIDS": "0,1,2,3",
        "SLURM_GPUS_ON_NODE": "0",
        "SLURM_HET_JOB_ID": "1",
        "SLURM_JOB_RESTART_COUNT": "99",
        "SLURMD_NODENAME": "evil",
        "SLURM_CLUSTER_NAME": "evil",
        "SLURM_JOB_COMMENT": "gres:gpu:4",
        "SLURM_SCRIPT_CONTEXT": "prolog_slurmd",
    }


@BOTH
def test_nothing_of_a_jobs_environment_is_run_or_believed_by_root(
    slurm_gpus: Gpulock, mode: Mode
) -> None:
    mode(slurm_gpus)
    slurm = slurm_gpus.slurm
    evil = kit(slurm.lab)
    script = f"{MASK}srun -n1 bash -c 'echo step=$CUDA_VISIBLE_DEVICES'\n"
    args = ["--gres=gpu:2", "-w", NODE, "--export=ALL", "--hold"]
    job = slurm.submit("slalice", *args, script=script, env=forged(evil))
    evil.log.write_text("")  # the lab itself enters its machines as root, with that environment
    slurm.scontrol("release", str(job))
    slurm.wait_done(job)
    seen = variables(slurm.said(job))
    assert evil.log.read_text(), "the kit does not work"
    assert evil.as_root() == []
    assert seen["CUDA_VISIBLE_DEVICES"] == seen["step"] == "0,1"
    for name in NAMES:
        assert seen[f"APPTAINERENV_{name}"] == seen[f"SINGULARITYENV_{name}"] == seen[name]
    slurm_gpus.wait_free()
    assert slurm.node_state(NODE)[0] == "IDLE"


@BOTH
def test_a_job_without_gpus_forges_no_mask(slurm_gpus: Gpulock, mode: Mode) -> None:
    mode(slurm_gpus)
    slurm = slurm_gpus.slurm
    other = slurm.submit("slbob", "--gres=gpu:2", "-w", NODE, script="sleep 60\n")
    slurm.wait_running(other)
    told = {"SLURM_JOB_ID": str(other), "SLURM_JOB_GPUS": "0,1", "SLURM_STEP_GPUS": "0,1"}
    lines = "".join(f"export {name}={value}\n" for name, value in told.items())
    script = f"{SHOW}{lines}unset SLURM_JOB_ID\nsrun --jobid=$MINE -n1 bash -c '{SHOW.strip()}'\n"
    job = slurm.submit(
        "slalice", "-w", NODE, script=f"MINE=$SLURM_JOB_ID\n{script}", env={**told, "A": "b"}
    )
    slurm.wait_done(job)
    assert slurm.said(job).splitlines() == ["shown=.", "shown=."]
    slurm.scancel(other)


def test_text_that_looks_like_slurms_own_changes_no_verdict(slurm_gpus: Gpulock) -> None:
    by_gpulock(slurm_gpus)
    slurm = slurm_gpus.slurm
    name = "x\n12 27011 COMPLETED\n   JobState=COMPLETED UserId=root(0)"
    args = ["-J", name, f"--comment={name}", "--gres=gpu:1", "-w", NODE]
    job = slurm.submit("slalice", *args, script="sleep 60\n")
    slurm.wait_running(job)
    for step in slurm.steps(job):
        os.kill(step.pid, signal.SIGKILL)
    for _ in range(2):
        slurm_gpus.reconcile(NODE)
    assert len(slurm_gpus.locks(NODE)) == 1  # slurmctld says RUNNING
    for pid in slurm.job_processes(job):
        os.kill(pid, signal.SIGKILL)
    slurm.scancel(job)
    slurm.wait_done(job)
    slurm_gpus.reconcile(NODE)
    slurm_gpus.wait_free()


@BOTH
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_a_user_who_kills_his_task_prolog_has_no_task(
    slurm_gpus: Gpulock, mode: Mode, sign: signal.Signals
) -> None:
    mode(slurm_gpus)
    slurm = slurm_gpus.slurm
    job = slurm.submit("slalice", "--gres=gpu:1", "-w", NODE, script="srun sleep 1\nsleep 60\n")
    slurm.wait_running(job)
    with hunter("slurm-task", slurm.users["slalice"].uid, sign) as hunted:
        shown = slurm.srun("slalice", "--gres=gpu:1", "-w", NODE, "echo", "ran")
    if hunted:
        assert "ran" not in shown.stdout
        assert shown.returncode != 0
    slurm.scancel(job)


@contextlib.contextmanager
def hunter(name: str, uid: int, sign: signal.Signals) -> Generator[list[str]]:
    """Kill every process of a user whose command names `name`, as soon as it is there."""
    found: list[str] = []
    hunt = subprocess.Popen(
        ["/bin/sh", "-c", f"while :; do pkill -{sign.value} -U {uid} -f {name} && echo hit; done"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield found
    finally:
        hunt.kill()
        found += hunt.communicate()[0].splitlines()


def test_a_look_alike_of_a_step_daemon_neither_keeps_nor_frees_a_lock(
    slurm_gpus: Gpulock,
) -> None:
    by_gpulock(slurm_gpus)
    slurm = slurm_gpus.slurm
    job = slurm.submit("slalice", "--gres=gpu:1", "-w", NODE, script="sleep 60\n")
    slurm.wait_running(job)
    titled = f"exec -a 'slurmstepd: [{job}.extern]' /lab/slurmstepd 100"
    copy = slurm.lab / "slurmstepd"
    shutil.copy("/bin/sleep", copy)
    copy.chmod(0o755)
    fake = slurm.start("slbob", "bash", "-c", titled.replace("/lab", str(slurm.lab)))
    try:
        until(lambda: pgrep(f"slurmstepd: .{job}.extern"), what="the look-alike to run")
        slurm.scancel(job)
        slurm.wait_done(job)
        slurm_gpus.wait_free(seconds=5)
    finally:
        fake.kill()
        fake.communicate()


def pgrep(pattern: str) -> bool:
    """Return whether a process has such a command line."""
    return (
        subprocess.run(["pgrep", "-f", pattern], capture_output=True, check=False).returncode == 0
    )


def test_nobody_but_root_writes_what_tasks_are_told(slurm_gpus: Gpulock) -> None:
    by_gpulock(slurm_gpus)
    slurm = slurm_gpus.slurm
    tries = [
        "echo x >/run/gpulock/tasks/$SLURMD_NODENAME.$SLURM_JOB_ID",
        "rm -f /run/gpulock/tasks/*",
        "mv /run/gpulock/tasks /run/gpulock/t",
        "mkdir /run/gpulock/locks/x",
        "exec 9<>/run/gpulock/gate",
        "cat /run/gpulock/gate",
    ]
    lines = "".join(f"({one}) 2>/dev/null && echo could {n}\n" for n, one in enumerate(tries))
    job = slurm.submit("slalice", "--gres=gpu:1", "-w", NODE, script=f"{lines}echo over\n")
    assert wait_said(slurm_gpus, job, "over").splitlines() == ["over"]
    wait_over(slurm_gpus, job)


def wait_over(gpus: Gpulock, job: JobId) -> None:
    """Wait for the end of a job and of its locks."""
    gpus.slurm.wait_done(job)
    gpus.wait_free()
