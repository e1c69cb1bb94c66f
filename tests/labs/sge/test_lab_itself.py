# SPDX-License-Identifier: Apache-2.0
"""The Grid Engine lab does what its users rely on, and the host is afterwards as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.labs.sge.cluster import MASTER, NODES
from tests.labs.sge.lab import GridEngine, main

pytestmark = pytest.mark.lab

_MPI_JOB = """#!/bin/bash
for host in $(cut -d' ' -f1 "$PE_HOSTFILE"); do
    qrsh -inherit "$host" hostname &
done
wait
"""


Host = dict[str, object]


@pytest.fixture(scope="module")
def host_before() -> Host:
    """Look at the host without the lab."""
    return _host()


@pytest.fixture(scope="module")
def own(host_before: Host) -> Iterator[GridEngine]:
    """Bring up a lab of this module's own: it is taken down and up again in its tests."""
    assert host_before
    # Not below pytest's temporary folder, which only its user may enter.
    lab = GridEngine(f"/tmp/gpulock-lab-sge-itself-{os.getpid()}")
    lab.up()
    try:
        yield lab
    finally:
        lab.down()


def _host() -> Host:
    """Look at what a lab could change on the host."""
    return {
        "mounts": Path("/proc/self/mountinfo").read_text(),
        "links": sorted(os.listdir("/sys/class/net")),
        "host name": os.uname().nodename,
        **{name: Path("/etc", name).read_bytes() for name in ("passwd", "group", "hosts")},
        **{folder: sorted(os.listdir(folder)) for folder in ("/etc", "/var/lib", "/run")},
    }


@pytest.mark.parametrize("node", NODES)
def test_a_job_runs_on_each_node_as_its_owner(own: GridEngine, node: str) -> None:
    args = ("-q", f"gpu.q@{node}", "-l", "gpu=2", "-o", f"out.{node}", "-j", "y")
    job = own.submit("glalice", *args, stdin="hostname; id -un\n")
    own.wait_done(job)
    record = own.acct(job)
    assert (record["hostname"], record["failed"]) == (node, "0")
    assert (own.users["glalice"].home / f"out.{node}").read_text() == f"{node}\nglalice\n"


def test_a_parallel_job_starts_tasks_on_every_node(own: GridEngine) -> None:
    home = own.users["glbob"].home
    (home / "mpi.sh").write_text(_MPI_JOB)
    job = own.submit("glbob", "-pe", "mpi", "6", "-o", "mpi.out", "-j", "y", "mpi.sh")
    own.wait_settled(job)
    assert sorted((home / "mpi.out").read_text().split()) == sorted(NODES)


def test_a_user_submits_from_a_node_with_an_environment_of_their_own(own: GridEngine) -> None:
    args = ("-V", "-S", "/bin/sh", "-o", "env.out", "-j", "y")
    script = "echo $COLOUR $SGE_O_HOST\n"
    job = own.submit("glbob", *args, stdin=script, env={"COLOUR": "blue"}, node="glnode3")
    own.wait_settled(job)
    assert (own.users["glbob"].home / "env.out").read_text() == "blue glnode3\n"


def test_a_running_job_has_a_spool_folder_and_a_shepherd_until_it_is_deleted(
    own: GridEngine,
) -> None:
    job = own.submit("glalice", "-q", "*@glnode2", "-o", "/dev/null", "-b", "y", "sleep", "600")
    own.wait_running(job)
    shepherd = Path(f"/proc/{own.shepherd_pid(job)}")
    assert own.spool_dir(job).parts[-3] == "glnode2"
    assert (shepherd / "comm").read_text() == "sge_shepherd\n"
    assert os.readlink(shepherd / "cwd") == str(own.spool_dir(job))
    own.qdel(str(job))
    own.wait_settled(job)
    assert not shepherd.exists()


def test_hooks_complexes_and_host_values_are_set_and_taken_back(own: GridEngine) -> None:
    own.set_hooks("root@/bin/false", "NONE", queues=["cpu.q"])
    own.set_complex("colour colour INT <= YES YES 0 0")
    own.set_exechost("glnode1", "gpu=8,gpuj=8,slots=16,colour=1")
    args = ("-q", "cpu.q", "-l", "colour=1", "-o", "/dev/null", "-j", "y")
    job = own.submit("glalice", *args, "-b", "y", "true")
    own.wait_queue("glnode1", "E", queue="cpu.q")
    own.set_hooks("NONE", "NONE", queues=["cpu.q"])
    own.clear_queue_errors()
    own.qdel(str(job))  # its node would be refused it for two load reports
    own.wait_settled(job)
    assert own.queue_states("cpu.q") == dict.fromkeys(NODES, "")
    own.set_exechost("glnode1", "gpu=8,gpuj=8,slots=16")


def test_a_node_has_folders_and_names_of_its_own(own: GridEngine) -> None:
    own.run_in("glnode1", ["touch", "/run/gpulock/x", "/var/lib/gpulock/y", "/etc/gpulock/z"])
    assert own.path_in("glnode1", "/run/gpulock/x").exists()
    assert own.path_in("glnode1", "/etc/gpulock/z").exists()
    assert not own.path_in("glnode2", "/run/gpulock/x").exists()
    assert not own.path_in("glnode2", "/var/lib/gpulock/y").exists()
    assert own.run_as("glbob", ["hostname"], machine="glnode3").stdout == "glnode3\n"


def test_a_job_outlives_its_daemons(own: GridEngine) -> None:
    job = own.submit("glalice", "-q", "gpu.q@glnode1", "-o", "/dev/null", "-b", "y", "sleep", "600")
    own.wait_running(job)
    own.stop_execd("glnode1", kill=True)
    own.stop_qmaster()
    assert Path(f"/proc/{own.shepherd_pid(job)}").exists()
    own.start_qmaster()
    own.start_execd("glnode1")
    # Not deleted here: a restarted execd looks after jobs it did not start only once a minute.
    assert own.state(job) == "r"


def test_down_ends_what_a_job_left_and_the_host_is_as_before(
    own: GridEngine, host_before: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    job = own.submit("glalice", "-o", "/dev/null", stdin="setsid sleep 600 & sleep 600\n")
    own.wait_running(job)
    assert _host() == host_before  # the lab is no more than processes and its folder
    assert main(["--lab", str(own.lab), "down"]) == 0
    assert capsys.readouterr().out == "down, nothing left behind\n"
    assert own.left_behind() == []
    assert _host() == host_before


def test_down_ends_an_up_that_was_cut_short(own: GridEngine) -> None:
    # One machine without daemons is what an `up` killed after its first steps leaves.
    own.down()
    own.lay_out()
    first = own.machines[MASTER]
    first.boot([], [first], "")
    (first.folder / "pid").unlink()
    assert not own.is_up()
    assert own.left_behind() != []
    own.down()
    assert own.left_behind() == []


def test_up_after_down_gives_a_working_lab_again(own: GridEngine) -> None:
    own.up()
    assert own.queue_states() == dict.fromkeys(NODES, "")
    job = own.submit("glbob", "-o", "/dev/null", "-j", "y", "-b", "y", "true")
    own.wait_settled(job)
    assert own.acct(job)["failed"] == "0"


def test_up_again_changes_nothing(own: GridEngine) -> None:
    before = own.qmaster_pid(), own.machines[MASTER].pid
    assert "was up" in own.up()
    assert (own.qmaster_pid(), own.machines[MASTER].pid) == before
