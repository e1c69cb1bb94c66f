# SPDX-License-Identifier: Apache-2.0
"""A job of a real scheduler whose daemon is a service of a real systemd, over its reload.

    python -m tests.labs.isolation.isolation_reload sge|slurm FOLDER

It runs as root on a machine of tests.labs.systemd.machine, and prints what it saw as JSON.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from gpulock.install.hooks import HookPaths
from gpulock.isolation.tree import is_launcher_cgroup
from tests.labs.both.sge_site import SgeSite
from tests.labs.both.site import Site
from tests.labs.both.slurm_site import SlurmSite
from tests.labs.common.device_nodes import PROBE, TREES, make_nodes, programs
from tests.labs.common.installed import script
from tests.labs.common.processes import running
from tests.labs.sge import gpulock as on_sge
from tests.labs.sge.lab import GridEngine, JobId
from tests.labs.slurm import gpulock as on_slurm
from tests.labs.slurm.config import Setup
from tests.labs.slurm.confined import PAM, WITH_PAM
from tests.labs.slurm.lab import Slurm
from tests.labs.slurm.modes import by_gpulock
from tests.support.wait import wait_until

SCOPE: Final = "gpulock-lab.scope"
OURS: Final = re.compile("gpulock-[0-9]")
MANAGER: Final = (
    "org.freedesktop.systemd1 /org/freedesktop/systemd1 org.freedesktop.systemd1.Manager"
)


def serve(pid: int) -> None:
    """Give a daemon that runs to systemd, as a unit of its own whose cgroup is delegated."""
    unit = f"ssa(sv)a(sa(sv)) {SCOPE} fail 2 PIDs au 1 {pid} Delegate b true 0"
    _run("busctl", "call", *MANAGER.split(), "StartTransientUnit", *unit.split())
    place = Path(f"/proc/{pid}/cgroup")
    wait_until(lambda: SCOPE in place.read_text(), why="the daemon to be systemd's")


def groups() -> list[str]:
    """Return the jobs' cgroups, wherever they are."""
    walks = (walk for one in TREES for walk in os.walk(one.top))  # past what goes meanwhile
    found = [f"{top}/{name}" for top, names, _ in walks for name in names if OURS.match(name)]
    return [path for path in found if not is_launcher_cgroup(path)]


def look(site: Site, dev: Path, step: str) -> dict[str, object]:
    """Let a job open devices before and after a reload: script, step, a child that left it."""
    probe = f"/usr/bin/python3 -IS {script(site.gpus, 'probe.py', PROBE)} {dev}"
    reloaded, until_reloaded = site.waiting("reloaded")
    go, until_go = site.waiting("go")
    seen, until_seen = site.waiting("child")
    looks = f"{until_reloaded}{probe} >{seen}.new\nmv {seen}.new {seen}\n"
    child = script(site.gpus, "child.sh", looks)
    text = f"(setsid sh -c 'bash {child} &' &)\n{probe}\necho first\n{until_reloaded}{until_seen}"
    text += f"cat {seen}\necho child\n{probe}\necho script\n{step} {probe}\necho over\n{until_go}"
    job = site.submit(2, text)
    first = site.wait_said(job, "first")
    own = site.device_nodes(job)
    _run("systemctl", "daemon-reload")
    _run("systemctl", "set-property", "--runtime", SCOPE, "CPUWeight=200")
    reloaded.touch()
    child_saw, _, rest = site.wait_said(job, "over").partition("first\n")[2].partition("child\n")
    inside = groups()
    go.touch()
    site.wait_over(job)
    return {
        "own": sorted(own),
        "seen": [first, child_saw, *rest.split("script\n")],
        "groups": inside,
        "left": groups(),
        "locks": len(site.locks()),
    }


@contextmanager
def grid_engine(folder: Path, dev: Path) -> Generator[Site]:
    """Bring Grid Engine up below a folder, its execd as a service."""
    sge = GridEngine(folder / "lab")
    sge.up()
    try:
        site = SgeSite(on_sge.installed(sge))
        site.gpus.prepare()
        site.configure(ISOLATION="cgroup", SYS_ROOT="/sys", DEV_ROOT=str(dev))
        serve(sge.execd_pid(site.node))
        yield site
        job = JobId(site.start(0))
        shepherd = sge.shepherd_pid(job)
        _run("systemctl", "stop", SCOPE)
        assert not running(shepherd), "the service was stopped, and a job goes on"
    finally:
        sge.down()


@contextmanager
def slurm(folder: Path, dev: Path) -> Generator[Site]:
    """Bring Slurm up below a folder, its slurmd as a service."""
    with Slurm(Setup(gpus=SlurmSite.count), nodes=1, lab=folder / "lab") as lab:
        site = SlurmSite(on_slurm.installed(lab))
        by_gpulock(site.gpus, extra=WITH_PAM)
        hook = HookPaths(lab.lab / "hooks").folder / "prolog/slurm-session"
        lab.path_in(site.node, "/etc/pam.d/slurm").write_text(PAM.format(hook=hook))
        site.configure(ISOLATION="cgroup", SYS_ROOT="/sys", DEV_ROOT=str(dev))
        serve(lab.slurmd_pid(site.node))
        yield site


def main(scheduler: str, folder: Path) -> int:
    """Bring a scheduler up, look, and take it down."""
    before = programs()
    dev = folder / "nodes"
    make_nodes(dev, 8)
    brought_up, step = {"sge": (grid_engine, ""), "slurm": (slurm, "srun")}[scheduler]
    with brought_up(folder, dev) as site:
        told = {**look(site, dev, step), "programs": len(programs() - before)}
    print(json.dumps(told))
    return 0


def _run(*words: str) -> None:
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, timeout=120)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
