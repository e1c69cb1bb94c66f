# SPDX-License-Identifier: Apache-2.0
"""slurmd as a service of a real systemd, on cgroup version 2: `make lab ROOT=sid`.

Debian's own units, `Delegate=yes` among them. slurmd asks systemd for the scope of its jobs by
D-Bus, and from 25.11 on in a slice of the site's (`CgroupSlice`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.labs.common.installed import waiting_for
from tests.labs.slurm.releases import HAS_SLICE, HAS_SLUIDS, STARTS_ANEW
from tests.labs.systemd.gpulock import Package, booted_node
from tests.labs.systemd.slurm_node import HOME, SLICE, SLURMD, Kind, SlurmNode
from tests.labs.systemd.users_manager import (
    assert_left_with_its_gpu,
    cgroup_of,
    child_of,
    leaving_with_its_gpu,
)
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
KINDS = (Kind("isolation", "cgroup"), Kind("constrain", "off"))
SCOPE = "slurmstepd.scope"


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def booted(
    request: pytest.FixtureRequest, package: Package, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmNode]:
    with booted_node(package, "unified") as node:
        slurm = SlurmNode(node, request.param)
        slurm.up(tmp_path_factory.mktemp("slurm"))
        yield slurm


@pytest.fixture
def slurm(booted: SlurmNode) -> Iterator[SlurmNode]:
    """Give a test a node without jobs or locks."""
    yield booted
    booted.clear()
    wait_until(lambda: not booted.node.locks(), why="all devices to be free")


@pytest.fixture(params=["path", "bare name"])
def renamed(request: pytest.FixtureRequest, slurm: SlurmNode) -> Iterator[str]:
    """Start slurmd in a way; return what its process is named after a reconfigure."""
    if request.param == "path":
        yield "slurmd"
        return
    slurm.start_by_bare_name()
    yield "slurmd-wlm" if slurm.release >= STARTS_ANEW else "slurmd"
    slurm.start_as_installed()


def is_running(slurm: SlurmNode, pid: int) -> bool:
    """Return whether a process is there, by its number on the machine."""
    return slurm.run("kill", "-0", str(pid), check=False).returncode == 0


def is_reaped(slurm: SlurmNode, job: str) -> bool:
    """Let the reaper free what it can; return whether a job holds nothing."""
    slurm.node.gpulock("reap")
    return not slurm.held_by(job)


def test_doctor_finds_no_fault_and_each_step_opens_the_gpus_of_its_mask_alone(
    slurm: SlurmNode,
) -> None:
    seen = slurm.node.gpulock("doctor", check=False)
    assert "x " not in [line[:2] for line in seen.splitlines()], seen
    assert "nothing to change" in slurm.node.gpulock("install", "slurm")
    show = f"echo mask=${{CUDA_VISIBLE_DEVICES-unset}}.\n{slurm.probe}\necho over"
    none = slurm.wait_said(slurm.submit(show), "over")
    assert ("mask=.\n" in none, slurm.opens(none)) == (True, set())
    probe = f"echo mask=$CUDA_VISIBLE_DEVICES uuids=$GPULOCK_DEVICES\n{slurm.probe}"
    left = f"setsid sh -c '{slurm.probe}; echo over'"
    slurm.machine.write("/srv/step.sh", probe)
    job = slurm.submit(
        f"{probe}\necho srun\nsrun sh /srv/step.sh\necho left\n({left} &)\n{waiting_for('go')}",
        "--gres=gpu:2",
    )
    said = slurm.wait_said(job, "over")
    own = slurm.held_by(job)
    locks = slurm.node.locks().items()
    uuids = {one.uuid_of(name) for name, one in locks if one.job_id == job}
    assert len(own) == 2
    batch, _, rest = said.partition("srun\n")
    step, _, child = rest.partition("left\n")
    assert [slurm.opens(part) for part in (batch, step, child)] == [own] * 3
    for part in (batch, step):
        mask, named = re.findall(r"(?:mask|uuids)=(\S+)", part)
        assert set(named.split(",")) == uuids
        assert mask in (named, "0,1")  # what it opens is counted from 0
    slurm.touch("go")
    assert slurm.wait_over(job) == "COMPLETED"
    slurm.wait_free(job)


def test_a_jobs_cgroup_is_in_the_scope_that_systemd_made(slurm: SlurmNode) -> None:
    job = slurm.submit(f"echo child=$$\n{waiting_for('go')}", "--gres=gpu:1")
    path = cgroup_of(slurm.machine, child_of(slurm.wait_said(job, "child=")))
    top, scope, name, *_ = path.removeprefix("/").split("/")
    assert top == (SLICE if slurm.release >= HAS_SLICE else "system.slice")
    assert scope.endswith(SCOPE)
    assert slurm.machine.show(scope, "ActiveState") == "active"
    assert slurm.machine.show(scope, "Slice") == top
    assert (name == f"job_{job}") == (slurm.release < HAS_SLUIDS)
    service = cgroup_of(slurm.machine, slurm.node.main_pid(SLURMD))
    assert service.startswith(f"/system.slice/{SLURMD}")
    slurm.touch("go")


def test_a_child_that_leaves_its_job_ends_with_it_and_keeps_no_lock(slurm: SlurmNode) -> None:
    text = "setsid env -i sleep 600 &\necho child=$!\n"
    job = slurm.submit(text, "--gres=gpu:1")
    pid = child_of(slurm.wait_said(job, "child="))
    assert slurm.wait_over(job) == "COMPLETED"
    slurm.wait_free(job)
    assert not is_running(slurm, pid)


def test_a_job_lives_on_while_slurmd_is_started_again(slurm: SlurmNode) -> None:
    """Its locks and its cgroup stay; what it opens does, too, and a new job gets other GPUs.

    So it does when systemd reads its units again, and sets a property of slurmd's.
    """
    text = f"echo child=$$\n{waiting_for('again')}{slurm.probe}\necho over\n{waiting_for('go')}"
    job = slurm.submit(text, "--gres=gpu:3")
    pid = child_of(slurm.wait_said(job, "child="))
    own, group = slurm.held_by(job), cgroup_of(slurm.machine, pid)
    assert len(own) == 3
    slurm.run("systemctl", "daemon-reload")
    slurm.run("systemctl", "set-property", "--runtime", SLURMD, "CPUWeight=200")
    for words in (("restart",), ("kill", "--signal=KILL"), ("stop",)):
        slurm.run("systemctl", *words, SLURMD)
        slurm.node.gpulock("reap")
        assert (slurm.held_by(job), cgroup_of(slurm.machine, pid)) == (own, group)
        slurm.restart(SLURMD)
        other = slurm.submit(f"{slurm.probe}\necho over\n{waiting_for('go')}", "--gres=gpu:1")
        opened = slurm.opens(slurm.wait_said(other, "over"))
        assert (slurm.held_by(other), len(opened), opened & own) == (opened, 1, set())
        slurm.run("scancel", other)
        slurm.wait_free(other)
    slurm.touch("again")
    assert slurm.opens(slurm.wait_said(job, "over")) == own
    slurm.touch("go")
    assert slurm.wait_over(job) == "COMPLETED"
    slurm.wait_free(job)
    slurm.node.gpulock("doctor")


def name_of(slurm: SlurmNode, pid: int) -> str:
    """Return what the kernel names a process, by its number on the machine."""
    return slurm.run("cat", f"/proc/{pid}/comm").stdout.strip()


def test_jobs_have_their_gpus_and_doctor_sees_slurmd_after_a_reconfigure(
    slurm: SlurmNode, renamed: str
) -> None:
    text = f"echo child=$$\n{waiting_for('again')}{slurm.probe}\necho over\n"
    job = slurm.submit(text, "--gres=gpu:3")
    slurm.wait_said(job, "child=")
    own = slurm.held_by(job)
    assert len(own) == 3
    assert name_of(slurm, slurm.node.main_pid(SLURMD)) == "slurmd"
    pid = slurm.reconfigure()
    assert name_of(slurm, pid) == renamed
    assert "ok slurmd\n" in slurm.node.gpulock("doctor", "--all")
    other = slurm.submit(f"{slurm.probe}\necho over\n{waiting_for('go')}", "--gres=gpu:2")
    opened = slurm.opens(slurm.wait_said(other, "over"))
    assert (slurm.held_by(other), len(opened), opened & own) == (opened, 2, set())
    slurm.touch("again")
    assert slurm.opens(slurm.wait_said(job, "over")) == own
    slurm.touch("go")
    for one in (job, other):
        assert slurm.wait_over(one) == "COMPLETED"
        slurm.wait_free(one)


def test_a_job_that_is_killed_with_its_step_daemons_is_reaped_after_a_reconfigure(
    slurm: SlurmNode, renamed: str
) -> None:
    """Without a word of slurmctld's: that slurmd runs here says that no hook is hidden from us."""
    assert name_of(slurm, slurm.reconfigure()) == renamed
    job = slurm.submit(f"echo child=$$\n{waiting_for('go')}", "--gres=gpu:1")
    pid = child_of(slurm.wait_said(job, "child="))
    slurm.node.gpulock("reap")  # sees its steps
    assert len(slurm.held_by(job)) == 1
    slurm.run("systemctl", "stop", "slurmctld")
    slurm.run("pkill", "-KILL", "-f", f"^slurmstepd: \\[{job}\\.")
    slurm.run("kill", "-KILL", str(pid))
    wait_until(
        lambda: is_reaped(slurm, job),
        why=lambda: "the reaper to free it\n" + slurm.node.gpulock("reap", "--dry-run"),
    )
    slurm.run("systemctl", "start", "slurmctld")
    wait_until(slurm.state, why="slurmctld to answer")
    slurm.forget_killed_jobs()


def test_what_hides_in_the_jobs_cgroup_keeps_its_lock(slurm: SlurmNode) -> None:
    """Its step daemons killed, no word of its environment left: the cgroup alone tells."""
    text = f"setsid env -i sleep 600 &\necho child=$!\n{waiting_for('go')}"
    job = slurm.submit(text, "--gres=gpu:1")
    pid = child_of(slurm.wait_said(job, "child="))
    own = slurm.held_by(job)
    slurm.run("pkill", "-KILL", "-f", f"^slurmstepd: \\[{job}\\.")
    slurm.forget_killed_jobs()
    slurm.node.gpulock("reap")
    assert (is_running(slurm, pid), slurm.held_by(job)) == (True, own)
    slurm.run("kill", "-KILL", str(pid))
    slurm.touch("go")
    wait_until(lambda: is_reaped(slurm, job), why="the reaper to free it")


@pytest.mark.attack
def test_a_gpu_that_is_open_below_the_users_own_manager_stays_locked(slurm: SlurmNode) -> None:
    """Tried: `systemd-run --user --scope` takes a process with its GPU out of the job's cgroup; the
    node is bound to a file of the user's.

    Stopped by: an empty cgroup ends no question, and each open file is asked for its device.
    """
    job = slurm.submit(leaving_with_its_gpu(slurm.machine), "--gres=gpu:1")
    (card,) = wait_until(lambda: slurm.held_by(job), why="a GPU for the job")
    slurm.machine.write(f"{HOME}/card", card)
    pid = child_of(slurm.wait_said(job, "child="))
    assert slurm.wait_over(job) == "COMPLETED"
    assert_left_with_its_gpu(slurm.machine, pid)
    assert not is_reaped(slurm, job)
    assert slurm.held_by(job) == {card}
    slurm.run("kill", "-KILL", str(pid))
    wait_until(lambda: is_reaped(slurm, job), why="the GPU to be free")
