# SPDX-License-Identifier: Apache-2.0
"""The Slurm lab does what its users rely on, and the host is afterwards as it was."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.labs.common.processes import children_of, command_of
from tests.labs.slurm.config import Gres, Setup
from tests.labs.slurm.gpulock import Gpulock, installed
from tests.labs.slurm.journal import doubles
from tests.labs.slurm.lab import ENDED, JobId, Slurm
from tests.labs.slurm.releases import FORGETS
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab

Host = dict[str, object]

_SETUP = Setup(gpus=4)
# Writes the environment of any hook to a file named after context, job and node.
_DUMP = """#!/bin/sh
/usr/bin/env >"{folder}/$SLURM_SCRIPT_CONTEXT.$SLURM_JOB_ID.$SLURMD_NODENAME"
"""
_CONTEXT = {"Prolog": "prolog_slurmd", "Epilog": "epilog_slurmd", "TaskProlog": "prolog_task"}


@pytest.fixture(scope="module")
def host_before() -> Host:
    """Look at the host without the lab."""
    return _host()


@pytest.fixture(scope="module")
def lab(host_before: Host) -> Iterator[Slurm]:
    """Bring up a lab of this module's own: it is taken down and up again in its tests."""
    assert host_before
    # Not below pytest's temporary folder, which only its user may enter.
    folder = f"/tmp/gpulock-lab-slurm-itself-{os.getpid()}"
    with Slurm(_SETUP, nodes=2, names="own", lab=folder) as slurm:
        yield slurm


@pytest.fixture
def own(lab: Slurm) -> Iterator[Slurm]:
    """Give a test the lab, with its logs where the test fails, and without what it left."""
    if lab.setup != _SETUP:
        lab.reconfigure(**vars(_SETUP))
    written = lab.watch_logs()
    yield lab
    print(written())
    lab.recover()


def _host() -> Host:
    """Look at what a lab could change on the host."""
    return {
        "mounts": Path("/proc/self/mountinfo").read_text(),
        "links": sorted(os.listdir("/sys/class/net")),
        "host name": os.uname().nodename,
        **{name: Path("/etc", name).read_bytes() for name in ("passwd", "group", "hosts")},
        **{folder: sorted(os.listdir(folder)) for folder in ("/etc", "/var/lib", "/run")},
        "munge": sorted(map(str, Path("/run").glob("munge*"))),
    }


def _hooks(own: Slurm) -> dict[str, str | Path]:
    folder = own.lab / "dumps"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o1777)
    program = own.lab / "dump"
    program.write_text(_DUMP.format(folder=folder))
    program.chmod(0o755)
    return dict.fromkeys(_CONTEXT, program)


def _dumped(own: Slurm, hook: str, job: JobId, node: str) -> dict[str, str]:
    lines = (own.lab / "dumps" / f"{_CONTEXT[hook]}.{job}.{node}").read_text().splitlines()
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


# --- jobs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", ["slalice", "slbob"])
def test_a_batch_job_runs_on_its_node_as_its_owner(own: Slurm, user: str) -> None:
    job = own.submit(user, "-w", own.nodes[1], script="hostname; id -un; echo $COLOUR\n", env=_BLUE)
    assert own.wait_settled(job) == "COMPLETED"
    assert own.said(job).split() == [own.nodes[1], user, "blue"]


_BLUE = {"COLOUR": "blue"}


def test_srun_runs_a_task_on_every_node(own: Slurm) -> None:
    done = own.srun("slbob", "-N2", "hostname")
    assert (done.returncode, sorted(done.stdout.split())) == (0, list(own.nodes))
    assert own.srun("slbob", "sh", "-c", "exit 7").returncode == 7


def test_an_allocation_without_a_command_has_an_extern_step_alone(own: Slurm) -> None:
    words = ("-J", "idle", "-w", own.nodes[0], "--kill-command=TERM", "sleep", "600")
    with own.start("slalice", "salloc", *words) as salloc:
        queued = ["squeue", "-h", "-n", "idle", "-o", "%A"]
        found = wait_until(
            lambda: own.run_in(own.master, queued).stdout or None, why="the allocation"
        )
        job = JobId(int(found))
        own.wait_steps(job, "extern")
        assert [step.name for step in own.steps(job)] == ["extern"]
        assert own.job_processes(job) == []
        # that of 26.05 starts its command though the job was cancelled just before
        wait_until(
            lambda: [one for one in children_of(salloc.pid) if command_of(one) == "sleep 600"],
            why="salloc's command",
        )
        own.scancel(job)
        assert salloc.wait(60) != 0


def test_salloc_runs_a_command_here_and_its_steps_on_the_node(own: Slurm) -> None:
    done = own.salloc("slalice", "-w", own.nodes[1], "sh", "-c", "hostname; srun hostname")
    assert done.stdout.split() == [own.master, own.nodes[1]]


def test_the_tasks_of_an_array_are_jobs_of_their_own(own: Slurm) -> None:
    array = own.submit("slalice", "-a", "1-3", script="echo $SLURM_ARRAY_TASK_ID\n")
    own.wait_done(array)  # the last task to start has the array's own id
    tasks = own.tasks(array)
    assert sorted(tasks) == [1, 2, 3]
    for task, job in tasks.items():
        assert own.wait_settled(job) == "COMPLETED"
        assert own.said(job) == f"{task}\n"


def test_a_heterogeneous_job_has_a_prolog_for_every_component(own: Slurm) -> None:
    own.reconfigure(hooks=_hooks(own))
    first, second = own.nodes
    words = (f"-w{first}", "--gres=gpu:1", ":", f"-w{second}", "--gres=gpu:2")
    job = own.submit("slalice", *words, script="srun --het-group=0,1 hostname\n")
    assert own.wait_settled(job) == "COMPLETED"
    assert sorted(own.said(job).split()) == [first, second]
    component = _dumped(own, "Prolog", JobId(job + 1), second)
    assert (component["SLURM_HET_JOB_ID"], component["SLURM_JOB_GPUS"]) == (str(job), "0,1")
    assert _dumped(own, "TaskProlog", job, second)["SLURM_STEP_GPUS"] == "0,1"


def test_steps_and_processes_of_a_running_job_are_found(own: Slurm) -> None:
    lines = "(setsid sleep 600 &)\nsrun --overlap sleep 600\n"
    job = own.submit("slalice", "-w", own.nodes[0], script=lines)
    own.wait_running(job)
    own.wait_steps(job, "batch", "extern", "0")
    assert {step.node for step in own.steps(job)} == {own.nodes[0]}
    assert own.steps(job, own.nodes[1]) == []
    wait_until(  # srun's has a whole path
        lambda: "sleep 600" in map(command_of, own.job_processes(job)), why="the child to sleep"
    )
    own.scancel(job)
    assert own.wait_done(job) == "CANCELLED"
    own.wait_stepless(job)
    left = own.job_processes(job)  # linuxproc knows descendants only
    assert [Path(f"/proc/{pid}/comm").read_text() for pid in left] == ["sleep\n"]
    os.kill(left[0], 9)


def test_a_job_is_suspended_resumed_and_requeued(own: Slurm) -> None:
    job = own.submit("slalice", script="exec sleep 600\n")
    own.wait_running(job)
    own.suspend(job)
    own.wait_state(job, "SUSPENDED")
    own.resume(job)
    own.wait_state(job, "RUNNING")
    own.requeue(job)
    own.begin(job)
    own.wait_running(job)
    assert own.job(job)["Restarts"] == "1"
    own.wait_steps(job, "batch", "extern")


def test_a_job_that_begins_again_at_once_has_no_prolog_on_22_05_alone(own: Slurm) -> None:
    own.reconfigure(hooks=_hooks(own))
    newer = own.release >= FORGETS
    steps = wait_until(lambda: _second_steps(own, newer), why="a job's second run")
    assert steps == (["batch", "extern"] if newer else ["batch"])


def _second_steps(own: Slurm, prolog: bool) -> list[str] | None:
    """Return the steps of a job that began again at once, with its Prolog or without.

    None where it was refused, or where that was otherwise.
    """
    job = own.submit("slalice", script="exec sleep 600\n")
    own.wait_running(job)
    dump = own.lab / f"dumps/prolog_slurmd.{job}.{own.job(job)['BatchHost']}"
    own.requeue(job)
    own.wait_state(job, "PENDING")
    own.wait_stepless(job)
    dump.unlink()
    own.begin(job, at_once=True)
    wait_until(
        lambda: own.state(job) in ENDED or own.job_processes(job) != [], why="the second run"
    )
    found = sorted(step.name for step in own.steps(job))
    own.scancel(job)
    own.wait_done(job)
    return found if found and dump.exists() == prolog else None


# --- what Slurm tells hooks -----------------------------------------------------------------------


@pytest.mark.short
@pytest.mark.parametrize(
    ("gres", "words", "gpus", "visible"),
    [
        ("slurm", "--gres=gpu:2", "0,1", "0,1"),
        ("gpulock", "--gres=gpu:2", "0,1", None),
        ("count", "--gres=gpux:2", None, None),
        ("none", "-n1", None, None),
    ],
)
def test_hooks_see_the_variables_of_their_mode(
    own: Slurm, gres: Gres, words: str, gpus: str | None, visible: str | None
) -> None:
    own.reconfigure(gres=gres, hooks=_hooks(own))
    job = own.submit("slalice", "-w", own.nodes[0], words)
    assert own.wait_done(job) == "COMPLETED"
    for hook in _CONTEXT:
        seen = _dumped(own, hook, job, own.nodes[0])
        assert seen["SLURM_JOB_ID"] == str(job)
        assert seen["SLURM_JOB_UID"] == str(own.users["slalice"].uid)
        assert (seen.get("SLURM_JOB_GPUS"), seen.get("CUDA_VISIBLE_DEVICES")) == (gpus, visible)
        assert ("PATH" in seen) == (hook == "TaskProlog")
    assert _dumped(own, "Prolog", job, own.nodes[0])["SLURM_JOB_RESTART_COUNT"] == "0"


def test_a_task_prolog_sets_what_the_job_sees(own: Slurm) -> None:
    program = own.lab / "task-prolog"
    program.write_text("#!/bin/sh\necho export CUDA_VISIBLE_DEVICES=7\n")
    program.chmod(0o755)
    own.reconfigure(hooks={"TaskProlog": program})
    job = own.submit("slalice", "--gres=gpu:1", script="echo $CUDA_VISIBLE_DEVICES\n")
    own.wait_settled(job)
    assert own.said(job) == "7\n"


def test_devices_have_the_order_and_types_asked_for(own: Slurm) -> None:
    first, second = own.nodes
    own.reconfigure(order={first: (3, 1, 0, 2)}, types={0: "a", 1: "b", 2: "b", 3: "a"})
    shown = own.run_in(first, ["slurmd", "-G"], env=own.slurmd_env()).stderr
    assert re.findall(r"Type=(\w) .*nvidia(\d)", shown) == [
        *(("a", "3"), ("a", "0")),  # by type, then as in gres.conf
        *(("b", "1"), ("b", "2")),
    ]
    done = own.srun("slbob", "-w", second, "--gres=gpu:b:1", "printenv", "CUDA_VISIBLE_DEVICES")
    assert done.stdout == "2\n"  # a position: those of type a are 0 and 1


def test_constrained_devices_can_be_opened_by_their_job_only(own: Slurm) -> None:
    own.reconfigure(proctrack="cgroup", constrain_devices=True)
    tries = "".join(f": <{own.device(own.nodes[0], minor)}\n" for minor in range(2))
    job = own.submit("slalice", "-w", own.nodes[0], "--gres=gpu:1", script=tries)
    own.wait_done(job)
    first, second = own.said(job).splitlines()
    assert "No such device" in first  # allowed, but there is no driver
    assert "not permitted" in second


# --- faults ---------------------------------------------------------------------------------------


def test_a_failing_prolog_drains_its_node_until_it_is_resumed(own: Slurm) -> None:
    own.reconfigure(hooks={"Prolog": "/bin/false"})
    job = own.submit("slalice", "-w", own.nodes[0])
    assert own.wait_node(own.nodes[0], "DRAIN") == "Prolog error"
    own.wait_state(job, "PENDING")
    own.scancel(job)
    own.reconfigure(hooks={})
    own.resume_node(own.nodes[0])
    assert own.srun("slalice", "-w", own.nodes[0], "true").returncode == 0


def test_a_job_outlives_its_daemons(own: Slurm) -> None:
    own.reconfigure(extra={"MessageTimeout": "5"})  # a client gives up after twice that
    node = own.nodes[0]
    job = own.submit("slalice", "-w", node, script="exec sleep 600\n")
    own.wait_running(job)
    before = own.job_processes(job)
    own.stop_slurmd(node, kill=True)
    own.stop_slurmctld()
    down = own.run_as("slbob", ["squeue"])
    assert (down.returncode, "Unable to contact slurm controller" in down.stderr) == (1, True)
    own.start_slurmd(node)
    own.start_slurmctld()
    assert own.state(job) == "RUNNING"
    assert own.job_processes(job) == before
    own.scancel(job)
    assert own.wait_done(job) == "CANCELLED"


def test_a_node_that_lost_its_spool_works_again(own: Slurm) -> None:
    node = own.nodes[1]
    own.stop_slurmd(node)
    own.start_slurmd(node, wipe=True)
    assert own.srun("slalice", "-w", node, "true").returncode == 0


# --- gpulock on it --------------------------------------------------------------------------------


@pytest.fixture
def gpus(own: Slurm) -> Gpulock:
    """Install gpulock on the lab's nodes."""
    found = installed(own)
    found.prepare()
    return found


def test_a_node_has_settings_devices_and_locks_of_its_own(gpus: Gpulock) -> None:
    first, second = gpus.slurm.nodes
    assert gpus.command(first, "reserve", "0", "--reason", "test").returncode == 0
    states = [gpu["state"] for gpu in gpus.status(first)["gpus"]]
    assert states == ["held", "free", "free", "free"]
    assert [gpu["state"] for gpu in gpus.status(second)["gpus"]] == ["free"] * 4
    assert [record.node for record in gpus.locks(first).values()] == [first]
    assert gpus.locks(second) == {}
    gpus.prepare()
    assert gpus.locks(first) == {}


def test_jobs_say_themselves_which_devices_they_had(gpus: Gpulock) -> None:
    gpus.prepare(hooks={}, gres="slurm")
    jobs = [
        gpus.slurm.submit("slbob", "--gres=gpu:2", script=gpus.journal.around("sleep 0.5"))
        for _ in range(3)
    ]
    for job in jobs:
        gpus.slurm.wait_done(job)
    holds = gpus.journal.holds()
    assert sorted(hold.job for hold in holds) == sorted(jobs)
    assert {len(hold.devices) for hold in holds} == {2}
    assert doubles(holds) == []
    assert len(doubles([*holds, *holds])) == 3


# --- the host -------------------------------------------------------------------------------------


def test_down_ends_what_jobs_left_and_the_host_is_as_before(own: Slurm, host_before: Host) -> None:
    job = own.submit("slalice", script="setsid sleep 600 & sleep 600\n")
    own.wait_running(job)
    assert _host() == host_before  # the lab is no more than processes, cgroups and its folder
    assert own.left_behind() != []
    own.down()
    assert own.left_behind() == []
    assert _host() == host_before
    own.up()


def test_down_ends_an_up_that_was_cut_short(own: Slurm) -> None:
    # One machine without daemons is what an `up` killed after its first steps leaves.
    own.down()
    own.lay_out()
    head = own.machines[own.master]
    head.boot([], [head], "")
    (head.folder / "pid").unlink()
    assert own.left_behind() != []
    own.down()
    assert own.left_behind() == []
    own.up()
    assert own.srun("slbob", "-N2", "hostname").returncode == 0
