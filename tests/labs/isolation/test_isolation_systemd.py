# SPDX-License-Identifier: Apache-2.0
"""A job's cgroup below a service of a real systemd, with cgroups of both versions and of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.labs.common.device_nodes import PROBE, make_nodes, opened, programs
from tests.labs.systemd.machine import Machine
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
REPOSITORY = Path(__file__).resolve().parents[3]
INSIDE, DEV, SEEN = "/opt/checkout", "/opt/dev", "/run/seen"
PYTHON = "/usr/bin/python3"
ALL = {f"nvidia{n}" for n in range(4)}
OWN = {"ENXIO": {"nvidia1", "nvidiactl"}, "EPERM": ALL - {"nvidia1"}}
EVERY = {"ENXIO": ALL | {"nvidiactl"}}
UNIT = "sgeexecd.service"
# The daemon is what a shepherd is: the job descends from it.
SERVICE = f"""[Service]
ExecStart=/bin/sh -c 'setsid sh -c "while :; do {PYTHON} -IS /opt/dev.py {DEV} >{SEEN}.new; \
mv {SEEN}.new {SEEN}; done" & wait'
Delegate=yes
"""
CONFINE = f"""
import sys
sys.path[:0] = ["{INSIDE}"]
from gpulock.node.devices import Device
from gpulock.isolation import job, tree
from gpulock.node.context import Node
from gpulock.node.settings import Settings
node = Node(Settings({{"DEV_ROOT": "{DEV}"}}))
device = Device("0000:02:00.0", 1)
device.minor = 1
pid = int(sys.argv[1])
top = tree.find_cgroup_top("/sys")
who = job.IsolatedJob("7.1", pid, node.proc.start(pid))
job.begin_job_isolation(node, who, [device])
print(tree.process_cgroup_folder(top, node.proc, pid))
for child in open(f"/proc/{{pid}}/task/{{pid}}/children").read().split():
    tree.move_to_cgroup(int(child), tree.process_cgroup_folder(top, node.proc, pid))
"""


@pytest.fixture(params=["hybrid", "unified"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machine]:
    """Boot a machine with device nodes, and a daemon below which a job runs."""
    made = Machine(request.param, binds={REPOSITORY: INSIDE})
    made.up()
    try:
        make_nodes(made.path(DEV), 4)
        made.write("/opt/dev.py", PROBE)
        made.write(f"/run/systemd/system/{UNIT}", SERVICE)
        made.run("systemctl", "daemon-reload")
        made.run("systemctl", "start", UNIT)
        yield made
    finally:
        made.down()


def job_opens(machine: Machine) -> dict[str, set[str]]:
    """Return what the job may open from now on, by error."""
    place = machine.path(SEEN)
    machine.run("rm", "-f", SEEN)
    wait_until(place.exists, why="the job to look")
    machine.run("rm", "-f", SEEN)  # of a look that may have begun before
    wait_until(place.exists, why="the job to look again")
    return opened(place.read_text())


def confined(machine: Machine) -> list[str]:
    """Confine the job to nvidia1; return its cgroups."""
    pid = machine.show(UNIT, "MainPID")
    return machine.run(PYTHON, "-IS", "-c", CONFINE, pid).stdout.split()


def remove(machine: Machine, folder: str) -> None:
    """Remove a cgroup, once the last of it has left."""
    wait_until(
        lambda: machine.run("rmdir", folder, check=False).returncode == 0,
        why=f"{folder} to be empty",
    )


def test_a_reload_opens_nothing_and_to_stop_the_service_stops_the_job(machine: Machine) -> None:
    before = programs()
    assert job_opens(machine) == EVERY
    folders = confined(machine)
    assert all(f"/{UNIT}/gpulock-7.1-" in folder for folder in folders)
    assert job_opens(machine) == OWN
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "set-property", "--runtime", UNIT, "CPUWeight=200")
    machine.run("systemctl", "set-property", "--runtime", UNIT, "DeviceAllow=/dev/null rw")
    assert job_opens(machine)["EPERM"] >= ALL - {"nvidia1"}

    machine.run("systemctl", "stop", UNIT)

    assert machine.run("pgrep", "-f", "/opt/dev.py", check=False).stdout == ""
    left = [f for f in folders if machine.run("test", "-d", f, check=False).returncode == 0]
    for folder in left:  # systemd removes the groups of the tree it keeps; the reaper the others
        remove(machine, folder)
    machine.run("systemctl", "stop", "user.slice", check=False)
    assert len(programs() - before) <= 1  # user.slice's own
