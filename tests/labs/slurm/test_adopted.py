# SPDX-License-Identifier: Apache-2.0
"""A session by ssh that pam_slurm_adopt puts into its job: the job's GPUs, and the job's end."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.labs.common.device_nodes import PROBE, opened
from tests.labs.common.installed import gate_file, reap, script, waiting_for
from tests.labs.common.processes import end
from tests.labs.slurm.config import UNIFIED
from tests.labs.slurm.confined import EVERY, confined_site
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.jobs import kill_steps, started
from tests.labs.slurm.modes import NODE, by_slurm, wait_said
from tests.support.wait import wait_exit

pytestmark = pytest.mark.lab
# What sshd does of PAM before it becomes the user: the name and the uid, then a command.
SSHD: Final = """
import ctypes, os, sys
user, uid, *command = sys.argv[1:]
pam = ctypes.CDLL("libpam.so.0", ctypes.RTLD_GLOBAL)  # its modules look for it
handle = ctypes.c_void_p()
talk = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, *[ctypes.c_void_p] * 3)(lambda *_: 19)
conv = (ctypes.c_void_p * 2)(ctypes.cast(talk, ctypes.c_void_p), None)
assert pam.pam_start(b"sshd", user.encode(), conv, ctypes.byref(handle)) == 0
if pam.pam_acct_mgmt(handle, 0):
    sys.exit("denied")
os.setgroups([])
os.setgid(int(uid))
os.setuid(int(uid))
os.execve(command[0], command, {"PATH": "/usr/bin:/bin"})
"""
STACK: Final = f"account required pam_slurm_adopt.so nodename={NODE} action_adopt_failure=deny\n"
KEPT: Final = {"proctrack": "cgroup", "constrain_devices": True}
KEYS: Final = {"SYS_ROOT": "/sys"}


@pytest.fixture
def sshd(slurm_gpus: Gpulock) -> Iterator[Gpulock]:
    """Give a test a node whose sshd has pam_slurm_adopt."""
    stack = slurm_gpus.slurm.path_in(NODE, "/etc/pam.d/sshd")
    before = stack.read_bytes() if stack.exists() else b""
    stack.write_text(STACK)
    yield slurm_gpus
    stack.write_bytes(before)


@contextlib.contextmanager
def session(gpus: Gpulock, user: str, commands: str) -> Generator[subprocess.Popen[str]]:
    """Let a user come to the node by ssh and run shell commands; nothing of it is left behind.

    Of the job's environment it has nothing: only its cgroup says whose it is.
    """
    machine, uid = gpus.slurm.machines[NODE], gpus.slurm.users[user].uid
    program = [*machine.enter(), "/usr/bin/python3", "-IS", str(script(gpus, "sshd.py", SSHD))]
    with subprocess.Popen(
        [*program, user, str(uid), "/bin/bash", "-c", commands],
        env={"PATH": "/usr/bin:/bin", **gpus.slurm.env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as shell:
        try:
            yield shell
        finally:
            shell.kill()


def opened_in(gpus: Gpulock, user: str, dev: Path) -> dict[str, set[str]]:
    """Return error -> names of nodes, of what a session finds when it opens each of them."""
    probe = script(gpus, "probe.py", PROBE)
    with session(gpus, user, f"exec /usr/bin/python3 -IS {probe} {dev}") as shell:
        text, _ = shell.communicate()
    return opened(text) or {text.strip(): set()}


def test_a_session_opens_the_gpus_of_its_job_alone(sshd: Gpulock) -> None:
    """Also of one that asked for none, and who has no job does not come in."""
    by_slurm(sshd, KEYS, **KEPT)
    dev = sshd.slurm.device(NODE, 0).parent
    assert opened_in(sshd, "slalice", dev) == {"denied": set()}
    other = sshd.slurm.submit("slbob", "-w", NODE, script="exec sleep 600\n")
    sshd.slurm.wait_running(other)
    job = started(sshd, NODE, "--gres=gpu:2")
    own = {f"nvidia{one.minor_of(name)}" for name, one in sshd.locks(NODE).items()}
    assert len(own) == len(sshd.held_by(job)[NODE]) == 2
    for user, mine in (("slalice", own), ("slbob", set[str]())):
        seen = opened_in(sshd, user, dev)
        assert {name for name in EVERY if name in seen.get("ENXIO", ())} == mine
        assert {name for name in EVERY if name not in seen["EPERM"]} == mine


def test_a_session_ends_with_its_job_and_keeps_no_lock(sshd: Gpulock) -> None:
    by_slurm(sshd, KEYS, **KEPT)
    job = started(sshd, NODE, "--gres=gpu:1")
    with session(sshd, "slalice", "trap '' TERM HUP; echo in; sleep 600; sleep 600") as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "in\n"
        assert f"{shell.pid} (bash)" in sshd.command(NODE, "why", str(job)).stdout
        sshd.slurm.scancel(job)
        assert wait_exit(shell, why="the session to end") == -9
        sshd.slurm.wait_done(job)
    assert (sshd.locks(NODE), sshd.slurm.is_out(NODE)) == ({}, False)


def test_what_is_left_of_a_session_keeps_the_locks_of_its_job(sshd: Gpulock) -> None:
    """Nothing else of the job lives, nobody is there to end it, and it has no GPU open."""
    by_slurm(sshd, KEYS, **KEPT)
    job = started(sshd, NODE, "--gres=gpu:1")
    with session(sshd, "slalice", "echo in; exec sleep 600") as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "in\n"
        end(kill_steps(sshd, job, NODE))
        sshd.slurm.scancel(job)
        sshd.slurm.wait_settled(job)
        assert reap(sshd, NODE).acts() == [("held", "alive")]
        end([shell.pid])
        assert reap(sshd, NODE).acts() == [("freed", "dead")]


if UNIFIED:  # of version 1 a session is in no cgroup that ISOLATION has closed for its job

    @pytest.mark.short
    def test_a_session_does_so_by_isolation_once_a_step_has_begun(sshd: Gpulock) -> None:
        with confined_site(sshd, proctrack="cgroup") as site:
            go = gate_file(sshd, "go")
            job = site.submit("--gres=gpu:2", text=f"echo begun\n{waiting_for(go)}")
            wait_said(sshd, job, "begun")
            own = site.own(job)
            assert len(own) == 2
            seen = opened_in(sshd, "slalice", site.dev)
            assert seen == {"ENXIO": own | {"nvidiactl"}, "EPERM": EVERY - own}
            go.touch()
            site.slurm.wait_done(job)
