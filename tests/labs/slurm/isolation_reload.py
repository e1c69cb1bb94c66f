# SPDX-License-Identifier: Apache-2.0
"""A job of a real Slurm whose slurmd is a service of a real systemd, over its reload.

    python -m tests.labs.slurm.isolation_reload FOLDER

It runs as root on a machine of tests.labs.systemd.machine, and prints what it saw as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

from gpulock.install.hooks import HookPaths
from gpulock.isolation.tree import is_launcher_cgroup
from tests.labs.common.device_nodes import PROBE, make_nodes, programs
from tests.labs.isolation.isolation_reload import groups, serve
from tests.labs.slurm import jobs
from tests.labs.slurm.config import Setup
from tests.labs.slurm.gpulock import Gpulock, installed
from tests.labs.slurm.lab import Slurm
from tests.labs.slurm.modes import NODE, SLURM_CONF, by_gpulock, settings, wait_said

GPUS: Final = 4
SCOPE: Final = "gpulock-slurmd.scope"
PAM: Final = "account required pam_permit.so\nsession required pam_exec.so {hook}\n"


def look(gpus: Gpulock, dev: Path) -> dict[str, object]:
    """Let a job open devices before and after a reload: script, step, a child that left it."""
    probe = f"/usr/bin/python3 -IS {jobs.script(gpus, 'probe.py', PROBE)} {dev}"
    reloaded, go = (jobs.gate_file(gpus, name) for name in ("reloaded", "go"))
    wait, last = jobs.waiting_for(reloaded), jobs.waiting_for(go)
    seen = jobs.gate_file(gpus, "child")
    child = jobs.script(gpus, "child.sh", f"{wait}{probe} >{seen}.new\nmv {seen}.new {seen}\n")
    text = f"(setsid sh -c 'bash {child} &' &)\n{probe}\necho first\n{wait}"
    text += f"{jobs.waiting_for(seen)}cat {seen}\necho child\n{probe}\necho script\n"
    job = gpus.slurm.submit(
        "slalice", "-w", NODE, "--gres=gpu:2", script=f"{text}srun {probe}\necho over\n{last}"
    )
    first = wait_said(gpus, job, "first")
    own = [f"nvidia{record.minor}" for record in gpus.locks(NODE).values()]
    for words in (("daemon-reload",), ("set-property", "--runtime", SCOPE, "CPUWeight=200")):
        subprocess.run(["systemctl", *words], check=True, stdout=subprocess.DEVNULL, timeout=120)
    reloaded.touch()
    rest = wait_said(gpus, job, "over").partition("first\n")[2]
    inside = groups()
    go.touch()
    ended = gpus.slurm.wait_done(job)
    child_saw, _, more = rest.partition("child\n")
    return {
        "own": own,
        "seen": [first, child_saw, *more.split("script\n")],
        "groups": inside,
        "ended": ended,
    }


def main(arguments: list[str]) -> int:
    """Bring Slurm up below a folder, look, and take it down."""
    folder = Path(arguments[0])
    before = programs()
    with Slurm(Setup(gpus=GPUS), nodes=1, lab=str(folder / "slurm")) as slurm:
        gpus = installed(slurm)
        by_gpulock(gpus, extra={**SLURM_CONF, "UsePAM": "1"})
        hook = HookPaths(slurm.lab / "hooks").folder / "prolog/slurm-session"
        slurm.path_in(NODE, "/etc/pam.d/slurm").write_text(PAM.format(hook=hook))
        dev = folder / "nodes"
        make_nodes(dev, GPUS)
        keys = {"ISOLATION": "cgroup", "SYS_ROOT": "/sys", "DEV_ROOT": str(dev)}
        gpus.configure(NODE, **settings(gpus, SLURM_DEVICE_SELECTION="gpulock", **keys))
        serve(slurm.slurmd_pid(NODE), SCOPE)
        told = look(gpus, dev)
        mine = [path for path in groups() if not is_launcher_cgroup(path)]  # slurmd's own stays
        left = {"left": mine, "programs": len(programs() - before)}
        print(json.dumps({**told, **left, "locks": len(gpus.locks(NODE))}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
