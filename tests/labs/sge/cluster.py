# SPDX-License-Identifier: Apache-2.0
"""The lab's machines and daemons: how they come up, stop, and go without a trace."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.labs.common.cluster import Machines
from tests.labs.sge import config
from tests.labs.sge.install import ADMIN, INSTALLATION, PROGRAMS
from tests.labs.sge.machines import PATH, connect, end_processes
from tests.support.evidence import unwatch, watch
from tests.support.wait import LabError, wait_exit, wait_until

DEFAULT_LAB: Final = "/tmp/gpulock-lab-sge"
MASTER: Final = "glmaster"
NODES: Final = ("glnode1", "glnode2", "glnode3")
USERS: Final = {"glalice": 27001, "glbob": 27002}


class Cluster(Machines):
    """A qmaster's machine and three nodes, the daemons on them, and two ordinary users."""

    def __init__(self) -> None:
        super().__init__(DEFAULT_LAB, (MASTER, *NODES), USERS)
        self.env = {"SGE_ROOT": str(self.lab / "root"), "SGE_CELL": config.CELL}

    # --- the lab itself -----------------------------------------------------------------------

    def up(self) -> None:
        """Bring the lab up."""
        self.lay_out()
        watch(self)
        machines, users = list(self.machines.values()), list(self.users.values())
        for machine in machines:
            machine.boot(users, machines, config.SERVICES, INSTALLATION.hidden)
        connect(machines[0], machines[1:])
        self.start_qmaster()
        template = self.client("qconf", "-sq").stdout
        for sequence, (name, slots) in enumerate(config.QUEUES.items()):
            queue = config.queue(name, NODES, slots, sequence)
            self.load("-Aq", name, config.edited(template, queue))
        scheduler = self.client("qconf", "-ssconf").stdout
        self.load("-Msconf", "scheduler", config.edited(scheduler, config.SCHEDULER))
        self.start_execds(NODES)

    def down(self) -> None:
        """End every process of the lab, and with them its namespaces; remove its folder."""
        unwatch(self)
        end_processes(self.lab)
        shutil.rmtree(self.lab)

    def client(
        self, program: str, *args: str, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a client program as root on the master."""
        done = self.run_in(MASTER, [str(PROGRAMS / program), *args])
        if check and done.returncode != 0:
            raise LabError(f"{program} {' '.join(args)} failed: {done.stdout}{done.stderr}")
        return done

    def load(self, option: str, name: str, text: str) -> None:
        """Have qconf read an object from a file, whose name matters to `-Mconf`."""
        folder = self.lab / "conf"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        self.client("qconf", option, str(folder / name))

    # --- daemons ------------------------------------------------------------------------------

    def qmaster_pid(self) -> int:
        """The running qmaster of this lab, or 0."""
        return self.daemon_pid(self.lab / "spool/qmaster/qmaster.pid", "sge_qmaster")

    def execd_pid(self, node: str) -> int:
        """The running execd of a node, or 0."""
        return self.daemon_pid(self.lab / "spool" / node / "execd.pid", "sge_execd")

    def start_qmaster(self) -> None:
        """Start qmaster and wait until it answers."""
        # Jobs inherit the whole environment of execd: it gets Grid Engine's two variables, a PATH.
        self.client("sge_qmaster")
        wait_until(
            lambda: self.client("qconf", "-sh", check=False).returncode == 0,
            why="qmaster to answer",
        )

    def stop_qmaster(self, *, kill: bool = False) -> None:
        """End qmaster; jobs and execds live on."""
        self.end_daemon(self.qmaster_pid(), "qmaster", kill)

    def start_execd(self, node: str) -> None:
        """Start a node's execd and wait until qmaster has it and its queues are open."""
        self.start_execds([node])

    def start_execds(self, nodes: Sequence[str]) -> None:
        """Start the execds of nodes, all at once, and wait as `start_execd` does."""
        before = {node: self._registrations(node) for node in nodes}
        # execd returns after two seconds, whatever it does: all at once.
        starting = [
            subprocess.Popen(
                [*self.machines[node].enter(), str(PROGRAMS / "sge_execd")],
                env={"PATH": PATH, **self.env},
                stdin=subprocess.DEVNULL,
            )
            for node in nodes
        ]
        wait_until(
            lambda: all(self._registrations(node) > before[node] for node in nodes),
            why=f"execd on {' '.join(nodes)} to register",
        )
        wait_until(  # it registers first, and says who it is then
            lambda: all(map(self.execd_pid, nodes)),
            why=f"execd on {' '.join(nodes)} to write its pid",
        )
        wait_until(
            lambda: not any(map(self._unheard, nodes)),
            why=f"the queues of {' '.join(nodes)} to open",
        )
        for process in starting:
            wait_exit(process, why="execd to be in the background")

    def stop_execd(self, node: str, *, kill: bool = False) -> None:
        """End a node's execd, by SIGKILL if asked; its shepherds and jobs live on."""
        self.end_daemon(self.execd_pid(node), f"execd on {node}", kill)

    def messages(self, daemon: str, lines: int = 20) -> str:
        """Return the last lines of a daemon's log: `qmaster`, or a node's name for its execd."""
        try:
            text = (self.lab / "spool" / daemon / "messages").read_text(errors="replace")
        except FileNotFoundError:
            return f"({daemon} has written no messages)"
        return "\n".join(text.splitlines()[-lines:])

    def log_files(self) -> list[Path]:
        """Return what the daemons write, gpulockd too, and accounting: it grows with every job."""
        accounting = self.lab / "root" / config.CELL / "common/accounting"
        messages = sorted(self.lab.glob("spool/*/messages"))
        return [*messages, accounting, *sorted(self.lab.glob("*.log"))]

    def evidence(self) -> dict[str, str]:
        """Return what Grid Engine says of queues and jobs, who holds what, what jobs printed."""
        commands = ("qstat -f -explain aAE -u *", "qstat -j *")
        said = self.asked(*(f"{PROGRAMS}/{one}" for one in commands))
        return {
            "qstat": "\n".join(said.values()),
            "locks": self.lock_owners(),
            "printed": self.last_outputs(),
        }

    def _registrations(self, node: str) -> int:
        log = self.lab / "spool/qmaster/messages"
        return log.read_text(errors="replace").count(f"|execd on {node} registered\n")

    def _unheard(self, node: str) -> bool:
        lines = self.client("qstat", "-f", "-q", f"*@{node}", check=False).stdout.splitlines()
        states = [line.split()[5:] for line in lines if "@" in line]
        return not states or any("u" in state[0] for state in states if state)

    def lay_out(self) -> None:
        """Make the scratch folder: a cell, spool folders, homes."""
        self.lab.mkdir(mode=0o755, parents=True)
        config.write_root(self.lab, MASTER)
        config.write_spool(self.lab, MASTER, NODES)
        for node in NODES:
            (self.lab / "spool" / node).mkdir()
            INSTALLATION.link_programs(self.machines[node].folder / "bin")
        for tree in (self.lab / "spool", self.lab / "root" / config.CELL):
            _give(tree, ADMIN)
        self.make_homes()


def _give(tree: Path, user: str) -> None:
    """Change the owner of a whole tree."""
    for folder, _, files in os.walk(tree):
        for name in ("", *files):
            shutil.chown(Path(folder, name), user, user)
