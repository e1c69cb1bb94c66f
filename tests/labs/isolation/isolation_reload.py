# SPDX-License-Identifier: Apache-2.0
"""A job of a real Grid Engine whose execd is a service of a real systemd, over its reload.

    python -m tests.labs.isolation.isolation_reload FOLDER

It runs as root on a machine of tests.labs.systemd.machine, and prints what it saw as JSON.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.labs.common.device_nodes import PROBE, TREES, make_nodes, programs
from tests.labs.common.processes import command_of, running
from tests.labs.sge import jobs
from tests.labs.sge.cluster import NODES
from tests.labs.sge.gpulock import GPUS, Gpulock, installed
from tests.labs.sge.lab import GridEngine, JobId
from tests.support.wait import wait_until

NODE: Final = NODES[0]
SCOPE: Final = "gpulock-execd.scope"
OURS: Final = re.compile("gpulock-[0-9]")
MANAGER: Final = (
    "org.freedesktop.systemd1 /org/freedesktop/systemd1 org.freedesktop.systemd1.Manager"
)


def serve(pid: int, scope: str = SCOPE) -> None:
    """Give a daemon that runs to systemd, as a unit of its own whose cgroup is delegated."""
    unit = f"ssa(sv)a(sa(sv)) {scope} fail 2 PIDs au 1 {pid} Delegate b true 0"
    _run("busctl", "call", *MANAGER.split(), "StartTransientUnit", *unit.split())
    place = Path(f"/proc/{pid}/cgroup")
    wait_until(lambda: scope in place.read_text(), why="the daemon to be systemd's")


def groups() -> list[str]:
    """Return the jobs' cgroups, wherever they are."""
    walks = (walk for one in TREES for walk in os.walk(one.top))  # past what goes meanwhile
    return [f"{top}/{name}" for top, names, _ in walks for name in names if OURS.match(name)]


def look(gpus: Gpulock, dev: Path) -> dict[str, object]:
    """Let a job open devices before and after a reload, itself and by a child that left it."""
    probe = f"/usr/bin/python3 -IS {jobs.script(gpus, 'probe.py', PROBE)} {dev}"
    reloaded, go = (jobs.gate_file(gpus, name) for name in ("reloaded", "go"))
    wait, last = jobs.waiting_for(reloaded), jobs.waiting_for(go)
    leave = jobs.gate_file(gpus, "leave")
    looks = f"{wait}{probe}\necho child\n{jobs.waiting_for(leave)}"
    child = jobs.script(gpus, "child.sh", looks)
    text = f"(setsid sh -c 'sh {child} &' &)\n{probe}\necho first\n{wait}"
    text += f"until grep -q child $SGE_STDOUT_PATH; do sleep 0.1; done\n{probe}\necho over\n{last}"
    job = gpus.sge.submit("glalice", *jobs.on(NODE, "-l", "gpu=2"), stdin=text)
    first = jobs.wait_said(gpus, job, "first")
    own = [f"nvidia{record.minor}" for record in gpus.locks(NODE).values()]
    _run("systemctl", "daemon-reload")
    _run("systemctl", "set-property", "--runtime", SCOPE, "CPUWeight=200")
    reloaded.touch()
    rest = jobs.wait_said(gpus, job, "over").partition("first\n")[2]
    inside = groups()
    gid = jobs.group_of(gpus, NODE, job)
    leave.touch()
    wait_until(
        lambda: not any(str(child) in command_of(pid) for pid in jobs.carriers(gid)),
        why="the child to end",
    )
    go.touch()
    gpus.sge.wait_done(job)
    return {"own": own, "seen": [first, *rest.split("child\n")], "groups": inside}


def stop(gpus: Gpulock) -> bool:
    """Stop the service while a job runs; return whether that is over with it."""
    job: JobId = gpus.sge.submit("glalice", *jobs.on(NODE), stdin="sleep 300\n")
    gpus.sge.wait_running(job)
    shepherd = gpus.sge.shepherd_pid(job)
    _run("systemctl", "stop", SCOPE)
    return not running(shepherd)


def main(arguments: list[str]) -> int:
    """Bring Grid Engine up below a folder, look, and take it down."""
    folder = Path(arguments[0])
    before = programs()
    sge = GridEngine(folder / "sge")
    sge.up()
    try:
        gpus = installed(sge)
        gpus.prepare()
        dev = folder / "nodes"
        make_nodes(dev, GPUS)
        gpus.configure(NODE, ISOLATION="cgroup", SYS_ROOT="/sys", DEV_ROOT=str(dev))
        serve(sge.execd_pid(NODE))
        told = look(gpus, dev)
        left = {"left": groups(), "programs": len(programs() - before)}
        print(json.dumps({**told, **left, "stopped": stop(gpus)}))
    finally:
        sge.down()
    return 0


def _run(*words: str) -> None:
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, timeout=120)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
