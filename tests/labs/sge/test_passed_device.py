# SPDX-License-Identifier: Apache-2.0
"""A GPU that a job passes on: open files outlive a job, and keep its lock, by whatever path.

The nodes have no driver, so nobody opens one for good: a process holds a mere place (O_PATH), which
the kernel shows as it shows an open one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.isolation import tree
from tests.labs.common.device_nodes import TOP
from tests.labs.common.installed import gate_file, reap, script
from tests.labs.sge.confined import NODE, Site, isolated
from tests.labs.sge.gpulock import Gpulock
from tests.labs.sge.jobs import carriers, end_carriers, on, sparing_execd, wait_said, waiting_for
from tests.labs.sge.lab import JobId
from tests.support.wait import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.attack]
OTHER = "glbob"
# send: opens the one GPU that this job may open (the others say EPERM), perhaps by another path,
# and passes it on. keep: waits for it and keeps it until a file is there.
PROGRAM = """\
import array, errno, os, socket, subprocess, sys, time
act, place, rest = sys.argv[1], sys.argv[2], sys.argv[3:]
if act == "keep":
    server = socket.socket(socket.AF_UNIX)
    server.bind(place)
    server.listen()
    open(place + ".ready", "w").close()
    peer, _ = server.accept()
    _, ancillary, *_ = peer.recvmsg(16, socket.CMSG_SPACE(4))
    kept = array.array("i", ancillary[0][2])[0]
    print("keeps", os.readlink(f"/proc/self/fd/{kept}"), flush=True)
    open(place + ".kept", "w").close()
    while not os.path.exists(rest[0]):
        time.sleep(0.05)
    sys.exit()
folder, alias = rest
for name in sorted(os.listdir(folder)):
    try:
        os.close(os.open(f"{folder}/{name}", os.O_RDWR))
    except OSError as fault:
        if fault.errno == errno.ENXIO and name != "nvidiactl":
            path = f"{folder}/{name}"
if alias:
    open(alias, "w").close()
    subprocess.run(["mount", "--bind", path, alias], check=True)
    path = alias
opened = os.open(path, os.O_PATH)
client = socket.socket(socket.AF_UNIX)
client.connect(place)
client.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [opened]))])
"""


@pytest.fixture
def site(gpus: Gpulock) -> Iterator[Site]:
    with isolated(gpus) as made:
        yield made
    for name in ("end", "socket.ready", "socket.kept", "socket", "alias"):
        (home(gpus) / name).unlink(missing_ok=True)


@pytest.fixture
def sparing(gpus: Gpulock) -> Iterator[Site]:
    """Let the node's execd end nothing that a job leaves behind."""
    with sparing_execd(gpus, NODE), isolated(gpus) as made:
        yield made


def home(gpus: Gpulock) -> Path:
    """Return the home of the user who passes a GPU on."""
    return gpus.sge.users["glalice"].home


def program(site: Site, *words: str) -> str:
    """Return a command line that runs the program above."""
    path = script(site.gpus, "pass.py", PROGRAM)
    return " ".join(["/usr/bin/python3", "-IS", str(path), *words])


def keep(site: Site) -> str:
    """Return a command that waits for a GPU and keeps it until `end` is there."""
    return program(site, "keep", str(home(site.gpus) / "socket"), str(home(site.gpus) / "end"))


def send(site: Site, alias: str = "''") -> str:
    """Return a command that passes the job's GPU on."""
    return program(site, "send", str(home(site.gpus) / "socket"), str(site.dev), alias)


def wait_file(site: Site, name: str) -> None:
    """Wait until a file is in the user's home."""
    path = home(site.gpus) / name
    wait_until(
        path.exists, why=lambda: f"{name} to be there\n{sorted(home(site.gpus).iterdir())!s}"
    )


def assert_kept_until(site: Site, job: JobId, card: str, end: Path) -> None:
    """Assert that a job's GPU is nobody else's until the one that has it open ends."""
    site.gpus.sge.wait_settled(job)
    assert "freed" not in {act for act, _ in reap(site.gpus, NODE).acts()}
    assert site.own(job) == {card}
    others = site.gpus.sge.submit(OTHER, *on(NODE, "-l", "gpu=2"), stdin="exec sleep 600\n")
    site.gpus.sge.wait_running(others)
    assert card not in site.own(others)
    end.touch()
    wait_until(lambda: reap(site.gpus, NODE) and not site.own(job), why="the GPU to be free")


def test_a_gpu_that_was_passed_to_another_job_of_its_user_stays_locked(site: Site) -> None:
    """Tried: a job passes its open GPU by a socket to another job of the same user, and ends.

    Stopped by: with ISOLATION another claim excuses its own card alone.
    """
    end = gate_file(site.gpus, "end")
    second = site.submit("-l", "gpu=1", script=f"{keep(site)}\n")
    wait_file(site, "socket.ready")
    go = gate_file(site.gpus, "go")
    first = site.submit("-l", "gpu=1", script=f"{waiting_for(go)}{send(site)}\n")
    site.gpus.sge.wait_running(first)
    (card,) = site.own(first)
    go.touch()
    wait_file(site, "socket.kept")
    assert_kept_until(site, first, card, end)
    site.gpus.sge.wait_done(second)


def test_a_gpu_that_was_opened_by_another_path_stays_locked(site: Site) -> None:
    """Tried: `unshare -Urm`, the node bound to a file of the user's, opened, and passed to the
    user's own login, which is of no claim.

    Stopped by: each open file of the owner's is asked for its device number, whatever its path.
    """
    end = gate_file(site.gpus, "end")
    log = home(site.gpus) / "login.log"
    login = f"setsid {keep(site)} >{log} 2>&1 </dev/null &"
    site.gpus.sge.run_as("glalice", ["sh", "-c", login], machine=NODE)
    wait_file(site, "socket.ready")
    go = gate_file(site.gpus, "go")
    alias = home(site.gpus) / "alias"
    sender = f"unshare -Urm {send(site, str(alias))}"
    job = site.submit("-l", "gpu=1", script=f"{waiting_for(go)}{sender}\n")
    site.gpus.sge.wait_running(job)
    (card,) = site.own(job)
    go.touch()
    wait_file(site, "socket.kept")
    assert "nvidia" not in log.read_text()
    assert_kept_until(site, job, card, end)


def test_a_process_that_was_moved_out_of_its_jobs_cgroup_keeps_the_lock(sparing: Site) -> None:
    """Tried: a user's own manager has systemd move a job's process out of its cgroup, as
    `systemd-run --user --scope` does; the job's cgroup is empty then.

    Stopped by: an empty cgroup ends no question: the process carries the job's group.
    """
    go = gate_file(sparing.gpus, "go")
    text = f"setsid sleep 600 >/dev/null 2>&1 &\necho child=$!\n{waiting_for(go)}"
    job = sparing.submit("-l", "gpu=1", script=text)
    wait_said(sparing.gpus, job, "child=")
    (card,) = sparing.own(job)
    group = sparing.gpus.record_of(NODE, job).add_grp_id
    for pid in carriers(group):
        with contextlib.suppress(ProcessLookupError):  # one by which the job's shell waits
            tree.move_to_cgroup(pid, TOP)
    go.touch()
    sparing.gpus.sge.wait_done(job)
    reaped = reap(sparing.gpus, NODE)
    assert f"carries the job's group {group}" in reaped.reasons()
    assert sparing.own(job) == {card}
    end_carriers(group)
    wait_until(lambda: reap(sparing.gpus, NODE) and not sparing.own(job), why="the GPU to be free")
