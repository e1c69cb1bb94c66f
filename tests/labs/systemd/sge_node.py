# SPDX-License-Identifier: Apache-2.0
"""A node whose Grid Engine is systemd's: qmaster and execd as services, `gpulock install sge`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from tests.labs.sge import config, install
from tests.labs.systemd.gpulock import OPT
from tests.labs.systemd.slurm_node import (
    HOME,
    HOST,
    USER,
    SchedulerNode,
    add_user_and_address,
)
from tests.support.wait import wait_until

ROOT: Final = "/srv/sge"  # the cell, its spool, and the programs' folders
ENV: Final = {"SGE_ROOT": f"{ROOT}/root", "SGE_CELL": config.CELL}
VARIABLES: Final = [f"{name}={value}" for name, value in ENV.items()]
QUEUE: Final = "gpu.q"
DAEMONS: Final = ("sge_qmaster", "sge_execd")
_UNIT: Final = """\
[Service]
Type=forking
Delegate=yes
KillMode=process
Environment={variables}
ExecStart={program}
"""


class SgeNode(SchedulerNode):
    """The machine of a `Node` with Grid Engine on it."""

    def up(self, scratch: Path) -> None:
        """Start Grid Engine without hooks, and install gpulock for its queue."""
        add_user_and_address(self.machine)
        self.run("sh", "-c", "cat >>/etc/services", stdin=config.SERVICES)
        self._lay_out(scratch / "sge")
        for name in DAEMONS:
            text = _UNIT.format(variables=" ".join(VARIABLES), program=install.PROGRAMS / name)
            self.machine.write(f"/etc/systemd/system/{name}.service", text)
        self.run("systemctl", "daemon-reload")
        self.start("sge_qmaster", "qconf", "-sh")
        queue = config.queue(QUEUE, [HOST], 8, 0)
        self.load("-Aq", config.edited(self.client("qconf", "-sq"), queue))
        self.load("-Msconf", config.edited(self.client("qconf", "-ssconf"), config.SCHEDULER))
        self.start(
            "sge_execd", "sh", "-c", f"qstat -f -q {QUEUE} | grep -q '{QUEUE}.* lx-amd64 *$'"
        )
        self.node.configure(
            SYS_ROOT="/sys", ISOLATION="cgroup", SGE_COMPLEXES=" ".join(config.COMPLEXES), **ENV
        )
        self.client(f"{OPT}/bin/gpulock", "install", "sge", "--cluster", "--queue", QUEUE)
        self.client(f"{OPT}/bin/gpulock", "install", "sge")

    def _lay_out(self, made: Path) -> None:
        """Write the cell as the lab of Grid Engine does, with the paths of this machine."""
        config.write_root(made, HOST)
        config.write_spool(made, HOST, [HOST])
        with (made / "root" / config.CELL / "common/local_conf" / HOST).open("a") as conf:
            conf.write("execd_params ENABLE_ADDGRP_KILL=false\n")  # it ends nothing that is left
        (made / "spool" / HOST).mkdir()
        shutil.copytree(made, self.machine.path(ROOT), symlinks=True)
        self.run("sh", "-c", f"grep -rlF {made} {ROOT} | xargs sed -i 's|{made}|{ROOT}|g'")
        self.run("chown", "-R", f"{install.ADMIN}:", ROOT)

    def start(self, name: str, *sign: str) -> None:
        """Start a daemon, and wait until a command says that it serves."""
        self.run("systemctl", "start", name)
        wait_until(
            lambda: self.run("env", *VARIABLES, *sign, check=False).returncode == 0,
            why=f"{name} to serve",
        )

    def client(self, *words: str, check: bool = True) -> str:
        """Run a program as root with Grid Engine's variables; return what it printed."""
        return self.run("env", *VARIABLES, *words, check=check).stdout

    def load(self, option: str, text: str) -> None:
        """Have qconf read an object from a file."""
        self.machine.write("/srv/object", text)
        self.client("qconf", option, "/srv/object")

    # --- jobs ---------------------------------------------------------------------------------

    def submit(self, text: str, *words: str) -> str:
        """Submit a job of the user's; return its id."""
        line = ["runuser", "-u", USER, "--", "env", "-C", HOME, *VARIABLES]
        asked = ["qsub", "-terse", "-cwd", "-j", "y", "-o", f"{HOME}/$JOB_ID.out", *words]
        return self.run(*line, *asked, stdin=f"#!/bin/bash\n{text}\n").stdout.strip()

    def wait_over(self, job: str) -> None:
        """Wait until a job and its epilog are over."""
        wait_until(
            lambda: self.run("env", *VARIABLES, "qstat", "-j", job, check=False).returncode != 0,
            why=f"job {job} to end",
        )

    def logs(self) -> str:
        """Return the last words of the daemons, of the user's jobs and of the queue."""
        files = f"{ROOT}/spool/*/messages {HOME}/*.out"
        said = self.run("sh", "-c", f"tail -n 25 {files}", check=False).stdout
        return said + self.client("qstat", "-f", "-explain", "aAE", "-u", "*", check=False)
