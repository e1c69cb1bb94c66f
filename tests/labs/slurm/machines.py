# SPDX-License-Identifier: Apache-2.0
"""The Slurm lab's machines, users and scratch folder.

The machines are those of the Grid Engine lab: network, host name and mounts of their own on one
kernel with one /proc. So each node has its own /run/gpulock, /etc/gpulock and users under one
slurm.conf, and nothing listens on the host's own network.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Final

from tests.labs.common.cluster import Machines
from tests.labs.sge.machines import Machine, User
from tests.labs.slurm import config
from tests.labs.slurm.config import Setup

DEFAULT_LAB: Final = "/tmp/gpulock-lab-slurm"
USERS: Final = {"slalice": 27011, "slbob": 27012}


class SlurmMachines(Machines):
    """A head machine and up to four nodes, two ordinary users, and what Slurm is to be told."""

    def __init__(self, setup: Setup, *, nodes: int = 1) -> None:
        self.lab = Path(DEFAULT_LAB)
        self.setup = setup
        self.master = "slmaster"
        self.nodes = tuple(f"slnode{number}" for number in range(1, nodes + 1))
        self.machines = {
            name: Machine(name, number, self.lab)
            for number, name in enumerate((self.master, *self.nodes), 1)
        }
        self.users = {
            name: User(name, uid, self.lab / "home" / name) for name, uid in USERS.items()
        }
        self.env = {"SLURM_CONF": str(self.lab / "etc/slurm.conf")}

    def lay_out(self) -> None:
        """Make the scratch folder: a key, devices, spool folders, homes."""
        self.lab.mkdir(mode=0o755, parents=True)
        for folder in ("etc", "log", "munge", "state", "spool"):
            (self.lab / folder).mkdir(mode=0o755)
        key = self.lab / "munge/key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        for folder in ("log", "state"):
            shutil.chown(self.lab / folder, "slurm", "slurm")
        for node in self.nodes:
            (self.lab / "spool" / node).mkdir()
        self.make_homes()

    def write_etc(self) -> None:
        """Write Slurm's configuration and make the device files it names."""
        addresses = {name: self.machines[name].address for name in self.nodes}
        master = (self.master, self.machines[self.master].address)
        for name, text in config.files(self.lab, self.setup, master, addresses).items():
            (self.lab / "etc" / name).write_text(text)
        for node in self.nodes:
            for minor in self.setup.minors(node):
                place = config.device(self.lab, node, minor)
                place.parent.mkdir(parents=True, exist_ok=True)
                if not place.exists():
                    os.mknod(place, stat.S_IFCHR, os.makedev(config.MAJOR, minor))
                    place.chmod(0o666)

    # --- logs ---------------------------------------------------------------------------------

    def log_files(self) -> list[Path]:
        """Return what the daemons write, gpulockd too."""
        return [*sorted(self.lab.glob("log/*.log")), *sorted(self.lab.glob("*.log"))]

    def evidence(self) -> dict[str, str]:
        """Return what Slurm says of queue, jobs and nodes, who holds what, what jobs printed."""
        said = self.asked("squeue --all", "sinfo -N -l", "scontrol show job", "scontrol show node")
        return {
            "squeue": "\n".join([*said.values()][:2]),
            "scontrol": "\n".join([*said.values()][2:]),
            "locks": self.lock_owners(),
            "printed": self.last_outputs(),
        }
