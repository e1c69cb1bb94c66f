# SPDX-License-Identifier: Apache-2.0
"""What a hostile user of a real Slurm tried: each test says what, and what stopped it."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from gpulock.install.slurm.wanted import SUBMIT_SCRIPT
from tests.labs.common.device_nodes import opened
from tests.labs.common.hostile_jobs import STEERING, environ_bytes
from tests.labs.common.installed import gate_file, script
from tests.labs.common.processes import command_of
from tests.labs.slurm import evil as slurm_evil
from tests.labs.slurm.confined import EVERY, Site
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.jobs import SHOW_MASK, notes, started
from tests.labs.slurm.modes import NODE, SLURM_CONF, by_gpulock
from tests.labs.slurm.releases import ENDS_LOGIN_FILES, HOLDS_FAILED_LOGINS
from tests.support.wait import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.attack]
USER, OTHER = "slalice", "slbob"
CONTROL = {"nvidiactl"}


@contextmanager
def login_file(gpus: Gpulock, text: str) -> Generator[None]:
    """Give the user a login file, which slurmd runs for `--get-user-env` and `--export=NAME`."""
    place = gpus.slurm.users[USER].home / ".bash_profile"
    place.write_text(text)
    try:
        yield
    finally:
        place.unlink()


# --- ISOLATION=cgroup: what runs as the user outside of the job's cgroup --------------------------


@pytest.mark.parametrize("asked", [["--gres=gpu:1"], []], ids=["gpu", "none"])
@pytest.mark.parametrize("words", [["--get-user-env"], ["--export=NONE"], ["--export=A=1"]])
def test_a_login_file_that_slurmd_runs_opens_no_gpu(
    site: Site, words: list[str], asked: list[str]
) -> None:
    """Tried: a child of the login file, in a session of its own, opens every GPU and stays.

    Stopped by: slurmd's own cgroup, to which the Prolog moved it, opens no GPU to a user.
    """
    seen, go = gate_file(site.gpus, "seen"), gate_file(site.gpus, "go")
    probe = (
        f"{site.probe} >{seen}.part; mv {seen}.part {seen}; until [ -e {go} ]; do sleep 0.1; done"
    )
    child = f"setsid sh -c '{probe}; {site.probe} >{go}.seen; echo over >>{go}.seen'"
    text = f"{child} </dev/null >/dev/null 2>&1 &\nuntil [ -e {seen} ]; do sleep 0.1; done\n"
    after = gate_file(site.gpus, "go.seen")
    with login_file(site.gpus, text):
        job = site.submit(*asked, *words, text="true\n")
        assert site.slurm.wait_done(job) == "COMPLETED"
    assert opened(seen.read_text()) == {"ENXIO": CONTROL, "EPERM": set(EVERY)}
    if site.slurm.release >= ENDS_LOGIN_FILES:
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        wait_until(
            lambda: not any(str(go) in command_of(p) for p in pids), why="the child to be ended"
        )
        assert site.left() == []
        return
    go.touch()  # the job is over, its child is not
    wait_until(
        lambda: after.exists() and "over" in after.read_text(), why="the child to look again"
    )
    assert opened(after.read_text()) == {"ENXIO": CONTROL, "EPERM": set(EVERY)}
    assert site.left() == []


def test_a_slurmd_that_was_started_again_is_closed_before_it_runs_a_login_file(site: Site) -> None:
    """Tried: the same as soon as slurmd was started again, in its service's own cgroup.

    Stopped by: a job's Prolog comes before its login file, and closes the new slurmd.
    """
    seen = gate_file(site.gpus, "seen")
    with login_file(site.gpus, f"{site.probe} >{seen}\n"):
        for _ in range(2):
            seen.unlink(missing_ok=True)
            job = site.submit("--gres=gpu:1", "--get-user-env", text="true\n")
            assert site.slurm.wait_settled(job) == "COMPLETED"
            assert opened(seen.read_text()) == {"ENXIO": CONTROL, "EPERM": set(EVERY)}
            site.slurm.stop_slurmd(NODE)
            site.slurm.start_slurmd(NODE)
            site.service.take_in(site.slurm.slurmd_pid(NODE))
    assert site.left() == []


def test_a_file_that_slurmd_opens_for_a_user_is_no_gpu(site: Site) -> None:
    """Tried: `sbcast --force FILE /dev/nvidiaN`, which slurmd opens in the user's name and holds.

    Stopped by: slurmd's own cgroup, as above; the kernel asks for the real user of the open.
    """
    tried = " ".join(f"sbcast --force /etc/hostname {site.dev}/{name};" for name in sorted(EVERY))
    job = site.submit(text=f"{tried}\n")
    assert site.slurm.wait_done(job) != ""
    log = (site.slurm.lab / f"log/{NODE}.log").read_text(errors="replace")
    for name in EVERY:
        assert f"can't open `{site.dev}/{name}` code {errno.EPERM}:" in log
    assert f"can't open `{site.dev}/nvidia0` code {errno.ENXIO}:" not in log


def test_a_gpu_as_a_jobs_input_or_output_is_not_opened(site: Site) -> None:
    """Tried: `sbatch -o /dev/nvidiaN`, `-i`, `-e`, `srun -o`: a step daemon opens them as the user.

    Stopped by: the step daemon opens them after its PAM session, which closed its cgroup.
    """
    device = f"{site.dev}/nvidia3"  # of four, and the job gets the first
    for words in (
        ["-o", device],
        ["-e", device],
        ["-i", device],
        ["--open-mode=append", "-o", device],
    ):
        job = site.submit("--gres=gpu:1", *words, text=f"srun -o {device} true\n")
        site.slurm.wait_done(job)
    log = (site.slurm.lab / f"log/{NODE}.log").read_text(errors="replace")
    said = [line for line in log.splitlines() if device in line and "Could not open" in line]
    assert len(said) >= 4
    assert all("Operation not permitted" in line for line in said)


def test_a_users_own_task_prolog_and_epilog_open_the_jobs_gpus_alone(site: Site) -> None:
    """Tried: `srun --task-prolog` and `--task-epilog`, which the step daemon runs as the user.

    Stopped by: the PAM session is opened before the first and closed after the last of them.
    """
    home = site.slurm.users[USER].home
    program = script(site.gpus, "own", f"#!/bin/sh\n{site.probe} >{home}/own.$1\n")
    names = ("prolog", "epilog")
    for name in names:
        (home / f"own.{name}").unlink(missing_ok=True)
        script(site.gpus, name, f"#!/bin/sh\nexec {program} {name}\n")
    hooks = [f"--task-{name}={program.parent / name}" for name in names]
    done = site.slurm.srun(USER, "-w", NODE, "--gres=gpu:1", *hooks, "true")
    assert done.returncode == 0, done.stderr
    for name in names:
        seen = opened((home / f"own.{name}").read_text())
        assert (len(seen["ENXIO"] - CONTROL), len(seen["EPERM"])) == (1, len(EVERY) - 1)


# --- default settings: what a job brings along ----------------------------------------------------


@pytest.mark.parametrize("kind", STEERING)
def test_no_variable_of_a_job_fails_a_hook(slurm_gpus: Gpulock, kind: str) -> None:
    """Tried: variables of loader, libc, shell, Python and locale, sizes up to sbatch's limits.

    Stopped by: slurmd makes the environment of Prolog and Epilog anew, without the job's. In the
    TaskProlog, which has it, they cost the user's own task.
    """
    by_gpulock(slurm_gpus, extra=SLURM_CONF)
    slurm = slurm_gpus.slurm
    brought = slurm.users[USER].home / "export"
    brought.write_bytes(environ_bytes(STEERING[kind]))
    words = ["-w", NODE, "--gres=gpu:1", "--no-requeue", f"--export-file={brought}"]
    job = slurm.submit(USER, *words, script="#!/bin/cat /proc/self/environ\n")
    slurm.wait_done(job)
    honest_job_runs(slurm_gpus)


@pytest.mark.parametrize(("count", "size"), [(1, 200_000), (40, 100_000)], ids=["one", "many"])
def test_variables_of_spank_that_no_prolog_can_start_with_reach_no_node(
    slurm_gpus: Gpulock, count: int, size: int
) -> None:
    """Tried: a plugin of the user's own sbatch sets job-control variables of 200 kB, or of 4 MB.

    execve(2) of Prolog and Epilog then fails (E2BIG), whatever they are, and the node drains.
    Stopped by: the job_submit.lua that `gpulock install slurm` names. Slurm alone does not.
    """
    (slurm_gpus.slurm.lab / "etc/job_submit.lua").write_text(SUBMIT_SCRIPT.read_text())
    by_gpulock(slurm_gpus, extra={**SLURM_CONF, "JobSubmitPlugins": "lua"})
    env = slurm_evil.spank_plugin(slurm_gpus, USER, slurm_evil.kit(slurm_gpus), count, size)
    command = ["sbatch", "-w", NODE, "--wrap=true"]
    done = slurm_gpus.slurm.run_as(USER, command, env=env)
    assert done.returncode != 0
    assert "too large for a Prolog" in done.stderr
    honest_job_runs(slurm_gpus)


def test_variables_of_spank_neither_steer_nor_inform_a_hook(slurm_gpus: Gpulock) -> None:
    """Tried: job-control variables LD_PRELOAD, SLURM_JOB_GPUS, names with a newline, bad UTF-8.

    Stopped by: Slurm puts SPANK_ before each name, and the hooks read no such name.
    """
    by_gpulock(slurm_gpus, extra=SLURM_CONF)
    evil = slurm_evil.kit(slurm_gpus)
    env = slurm_evil.spank_plugin(slurm_gpus, USER, evil, 20, 5_000)
    job = slurm_gpus.slurm.submit(USER, "-w", NODE, "--gres=gpu:1", script=SHOW_MASK, env=env)
    assert slurm_gpus.slurm.wait_settled(job) == "COMPLETED"
    assert "mask=0." in slurm_gpus.slurm.said(job)
    assert evil.ran(0) == ""
    honest_job_runs(slurm_gpus)


LOGINS: Final[dict[str, str]] = {
    "fails": "exit 1\n",
    "kills its group": "kill -9 0\n",
    "closes its output": "exec >&- 2>&-\n",
    "says much": "yes export CUDA_VISIBLE_DEVICES=0,1,2,3 | head -c 3000000\n",
    "forges its end": (
        "echo XXXXSLURMSTARTPARSINGHEREXXXX; echo SLURM_JOB_ID=1; echo SLURM_JOB_GPUS=0,1,2,3\n"
        "echo CUDA_VISIBLE_DEVICES=0,1,2,3; echo XXXXSLURMSTOPPARSINGHEREXXXXX\n"
    ),
    "leaves a child": "setsid sleep 20 >&- 2>&- <&- &\n",
}
UNREAD: Final = ("fails", "kills its group", "closes its output", "says much")


@pytest.mark.parametrize("login", LOGINS)
def test_no_login_file_fails_a_hook_or_forges_a_mask(slurm_gpus: Gpulock, login: str) -> None:
    """Tried: a login file that fails, dies, hides its output or forges slurmd's reading of it.

    Stopped by: slurmd reads it after the Prolog and without it; the mask is set behind it.
    """
    by_gpulock(slurm_gpus, extra=SLURM_CONF)
    slurm = slurm_gpus.slurm
    with login_file(slurm_gpus, LOGINS[login]):
        words = ["-w", NODE, "--gres=gpu:1", "--no-requeue", "--get-user-env"]
        job = slurm.submit(USER, *words, script=SHOW_MASK)
        state = slurm.wait_done(job)
    if slurm.release >= HOLDS_FAILED_LOGINS and login in UNREAD:
        assert (state, slurm.said(job)) == ("CANCELLED", "")
    else:
        assert state == "COMPLETED"
        assert "mask=0." in slurm.said(job)
    honest_job_runs(slurm_gpus)


def test_a_device_that_slurmd_holds_for_a_user_keeps_no_other_users_gpu(
    slurm_gpus: Gpulock,
) -> None:
    """Tried: `sbcast` to a GPU that another user's job has, stopped when slurmd has it open.

    Stopped by: a lock is held by its owner's processes alone, and slurmd is root's.
    """
    by_gpulock(slurm_gpus, extra=SLURM_CONF)
    slurm = slurm_gpus.slurm
    victim = started(slurm_gpus, NODE, "--gres=gpu:1")
    device = slurm_gpus.device(NODE, int(slurm_gpus.record_of(NODE, victim).minors[0]))
    device.chmod(0o666)
    text = f"truncate -s 200M big\nsbcast --force --size=4k big {device}\nexec sleep 600\n"
    slurm.submit(OTHER, "-w", NODE, script=text)
    fds = Path(f"/proc/{slurm.slurmd_pid(NODE)}/fd")
    wait_until(
        lambda: any(os.path.realpath(fd).endswith(device.name) for fd in fds.iterdir()),
        why="slurmd to open the device",
    )
    slurm.run_as(OTHER, ["pkill", "-STOP", "-x", "sbcast"], machine=NODE)
    slurm.scancel(victim)
    slurm.wait_settled(victim)
    assert any(os.path.realpath(fd).endswith(device.name) for fd in fds.iterdir())
    assert slurm_gpus.locks(NODE) == {}


def honest_job_runs(gpus: Gpulock) -> None:
    """Expect that a job of another user gets every GPU of the node, which is in service."""
    slurm = gpus.slurm
    job = slurm.submit(OTHER, "-w", NODE, "--gres=gpu:4", script=SHOW_MASK)
    assert slurm.wait_settled(job) == "COMPLETED", slurm.node_state(NODE)
    assert slurm.said(job).count(",") == 3
    assert not slurm.is_out(NODE), slurm.node_state(NODE)
    assert (gpus.locks(NODE), notes(gpus, NODE)) == ({}, [])
