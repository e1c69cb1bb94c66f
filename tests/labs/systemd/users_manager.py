# SPDX-License-Identifier: Apache-2.0
"""A job's process that leaves by the user's own systemd, with its GPU open by another path."""

from __future__ import annotations

from tests.labs.common.installed import waiting_for
from tests.labs.systemd.machine import Machine
from tests.labs.systemd.slurm_node import HOME, UID

UNIT = f"user@{UID}.service"
# A mere place (O_PATH), for want of a driver.
_KEEP = """\
import os, subprocess, sys, time
open("alias", "w").close()
subprocess.run(["mount", "--bind", f"/dev/{sys.argv[1]}", "alias"], check=True)
opened = os.open("alias", os.O_PATH)
print(os.readlink(f"/proc/self/fd/{opened}"), flush=True)
open("kept", "w").close()
time.sleep(600)
"""


def leaving_with_its_gpu(machine: Machine) -> str:
    """Return a job's script: it reads the GPU's name in `card`, prints child=PID, and ends.

    The child is below the user's manager by then, and has the GPU open.
    """
    machine.run("systemctl", "start", UNIT)
    machine.write("/srv/keep.py", _KEEP)
    own = f"env -i PATH=$PATH XDG_RUNTIME_DIR=/run/user/{UID}"
    leave = f"setsid {own} systemd-run --user --scope --quiet"  # a shepherd ends the job's group
    keep = "unshare -Urm /usr/bin/python3 -IS /srv/keep.py $(cat card)"
    left = f"{leave} {keep} >keep.out 2>&1 </dev/null &\necho child=$!\n"
    return f"{waiting_for('card')}{left}{waiting_for('kept')}"


def child_of(said: str) -> int:
    """Return the process that a job has named."""
    return int(said.partition("child=")[2].split()[0])


def cgroup_of(machine: Machine, pid: int) -> str:
    """Return the cgroup of a process, by its number on the machine."""
    lines = machine.run("cat", f"/proc/{pid}/cgroup").stdout.splitlines()
    return next(line for line in lines if line.startswith("0::")).removeprefix("0::")


def assert_left_with_its_gpu(machine: Machine, pid: int) -> None:
    """Assert that the user's manager has the process, and that its file shows no GPU by name."""
    assert f"/{UNIT}/" in cgroup_of(machine, pid)
    assert "nvidia" not in machine.path(f"{HOME}/keep.out").read_text()
