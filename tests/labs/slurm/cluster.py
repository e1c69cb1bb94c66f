# SPDX-License-Identifier: Apache-2.0
"""The Slurm lab's machines and daemons: how they come up, stop, and go without a trace.

The machines are those of the Grid Engine lab: network, host name and mounts of their own on one
kernel with one /proc. So each node has its own /run/gpulock, /etc/gpulock and users under one
slurm.conf, and nothing listens on the host's own network.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from typing_extensions import Self

from tests.labs.common.cluster import Machines
from tests.labs.common.processes import remove_cgroups
from tests.labs.sge.machines import connect, end_processes
from tests.labs.slurm import config
from tests.labs.slurm.config import UNIFIED, Setup
from tests.labs.slurm.preloaded import preloaded
from tests.labs.slurm.processes import groups, own_group
from tests.support.evidence import unwatch, watch
from tests.support.wait import LabError, wait_until

DEFAULT_LAB: Final = "/tmp/gpulock-lab-slurm"
USERS: Final = {"slalice": 27011, "slbob": 27012}
SLURMD: Final = ("slurmd",)
_REGISTERED: Final = "_handle_node_reg_resp: slurmctld sent back"  # in slurmd's log, at debug
_LD_SO_PRELOAD: Final = Path("/etc/ld.so.preload")  # of the private root
_OUT: Final = {"DRAIN", "DOWN", "FAIL", "INVALID_REG"}  # words of a node that takes no jobs
_FIELD: Final = re.compile(r"(\S+?)=(.*?)(?=\s+[\w/:]+=|\s*$)")


class Cluster(Machines):
    """Munged and slurmctld on the head machine, a slurmd on each node, as `setup` says.

    `unheard`: slurmctld was started since all nodes have registered, and may not know their GPUs.
    """

    unheard = False

    def __init__(self, setup: Setup, *, nodes: int = 1) -> None:
        self.setup = setup
        self.nodes = tuple(f"slnode{number}" for number in range(1, nodes + 1))
        super().__init__(DEFAULT_LAB, ("slmaster", *self.nodes), USERS)
        self.env = {"SLURM_CONF": str(self.lab / "etc/slurm.conf")}

    @functools.cached_property
    def release(self) -> tuple[int, int]:
        """Return the release of Slurm, such as `(22, 5)`."""
        said = self.run_in(self.master, ["slurmctld", "-V"]).stdout  # slurm-wlm 22.05.8
        year, month, *_ = said.split()[-1].split(".")
        return int(year), int(month)

    # --- the lab itself -----------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> None:
        """Bring the lab up anew."""
        self.lay_out()
        watch(self)
        if UNIFIED:  # `slurmd -G` of the installer's believes it as well
            _LD_SO_PRELOAD.write_text(f"{preloaded(Path('/srv'), 'unified')}\n")
        machines = list(self.machines.values())
        for machine in machines:
            machine.boot(list(self.users.values()), machines, "")
        connect(machines[0], machines[1:])
        self._start_munged()
        self._start_all()

    def down(self) -> None:
        """End every process of the lab, and with them its namespaces; remove what it made."""
        unwatch(self)
        end_processes(self.lab)
        remove_cgroups(lambda: groups(self.nodes))
        shutil.rmtree(self.lab)

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

    def reconfigure(self, **changes: Any) -> None:
        """Change fields of the setup and start Slurm anew with them; jobs live on."""
        self.setup = dataclasses.replace(self.setup, **changes)
        # A job on its way out keeps slurmd and slurmctld waiting for each other, half a minute.
        wait_until(lambda: self.queue("-h", "-t", "CG") == "", why="jobs to be completed")
        self.stop_slurmctld()
        for node in self.nodes:
            self.stop_slurmd(node)
        self._start_all()

    # --- daemons ------------------------------------------------------------------------------

    def slurmctld_pid(self) -> int:
        """The running slurmctld of this lab, or 0."""
        return self.daemon_pid(self.lab / "state/slurmctld.pid", "slurmctld")

    def slurmd_pid(self, node: str) -> int:
        """The running slurmd of a node, or 0."""
        return self.daemon_pid(self.lab / f"spool/{node}.pid", "slurmd")

    def start_slurmctld(self, *options: str) -> None:
        """Start slurmctld and wait until it answers; `-c` forgets its state."""
        self.unheard = True  # slurmctld asks its nodes in its own time, up to eight seconds later
        self._start(
            self.master, "slurmctld", *options, env={"LD_PRELOAD": preloaded(self.lab, "haste")}
        )
        wait_until(
            lambda: "is UP" in self.run_in(self.master, ["scontrol", "ping"]).stdout,
            why="slurmctld to answer",
        )

    def bring_back_slurmctld(self) -> None:
        """Start it; before a node has registered again it has no GPUs to give to a job there."""
        before = {node: self._registrations(node) for node in self.nodes}
        self.start_slurmctld()
        self._wait_registered(before)
        self.unheard = False

    def stop_slurmctld(self, *, kill: bool = False) -> None:
        """End slurmctld; slurmds and jobs live on.

        By SIGKILL, if asked, it forgets what it has not saved, such as the start of a last job.
        """
        self.end_daemon(self.slurmctld_pid(), "slurmctld", kill)

    def start_slurmd(
        self, node: str, *, wipe: bool = False, command: Sequence[str] = SLURMD
    ) -> None:
        """Start a node's slurmd, on an empty spool if asked; wait until slurmctld has it.

        `command` starts it in another way than by its name alone.
        """
        if wipe:
            shutil.rmtree(self.lab / "spool" / node)
            (self.lab / "spool" / node).mkdir()
        before = self._registrations(node)
        self._start_slurmd(node, command)
        if self.slurmctld_pid():
            self._wait_registered({node: before})
        else:
            wait_until(lambda: self.slurmd_pid(node) > 0, why=f"slurmd on {node} to run")

    def stop_slurmd(self, node: str, *, kill: bool = False) -> None:
        """End a node's slurmd, by SIGKILL if asked; its steps and jobs live on."""
        self.end_daemon(self.slurmd_pid(node), f"slurmd on {node}", kill)

    def hear_out(self, node: str) -> None:
        """Start a node's slurmd anew: the one that ends has told slurmctld all that it had to.

        Of a Prolog that failed it tells when the job is long requeued, its Epilog over (22.05,
        `_rpc_prolog`): slurmctld would drain a node that was resumed meanwhile.
        """
        self.stop_slurmd(node)
        self.start_slurmd(node)

    def restart_slurmds(self) -> None:
        """Start every slurmd anew: it registers at once."""
        before: dict[str, int] = {}
        for node in self.nodes:
            self.stop_slurmd(node)
            before[node] = self._registrations(node)  # slurmctld may have asked the old one
            self._start_slurmd(node)
        self._wait_registered(before)
        self.unheard = False

    # --- nodes --------------------------------------------------------------------------------

    def scontrol(self, *args: str, check: bool = True) -> str:
        """Run scontrol as root on the head machine; return what it printed."""
        done = self.run_in(self.master, ["scontrol", *args])
        if check and done.returncode != 0:
            raise LabError(f"scontrol {' '.join(args)} failed: {done.stdout}{done.stderr}")
        return done.stdout

    def queue(self, *options: str) -> str | None:
        """Return what squeue prints, None where slurmctld is too busy to answer."""
        done = self.run_in(self.master, ["squeue", *options])
        return done.stdout if done.returncode == 0 else None

    def node_state(self, node: str) -> tuple[str, str]:
        """Return a node's state and the reason set for it: `("IDLE+DRAIN", "Prolog error")`."""
        shown = fields(self.scontrol("show", "node", "-o", node))
        return shown["State"], shown.get("Reason", "").rpartition(" [")[0]

    def node_words(self, node: str) -> set[str]:
        """Return the words of a node's state, but whether the backfill scheduler plans a job on it.

        That one (PLANNED) stays for a round of it after the job.
        """
        return {*self.node_state(node)[0].rstrip("*").split("+")} - {"PLANNED"}

    def is_out(self, node: str) -> bool:
        """Say whether a node is drained or down."""
        return bool(_OUT & self.node_words(node))

    def wait_node(self, node: str, word: str) -> str:
        """Wait until a node's state has a word, such as DRAIN; return the reason."""
        wait_until(lambda: word in self.node_words(node), why=f"{node} to be {word}")
        return self.node_state(node)[1]

    def resume_node(self, node: str) -> None:
        """Put a drained or failed node back to work, unless it has come back by itself."""
        self.scontrol("update", f"nodename={node}", "state=resume", check=False)
        wait_until(lambda: not self.is_out(node), why=f"{node} to be back")

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

    # --- inner --------------------------------------------------------------------------------

    def _start_munged(self) -> None:
        folder = self.lab / "munge"
        names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
        places = [f"--{option}={folder}/{name}" for option, name in names.items()]
        self._start(self.master, "munged", *places, f"--seed-file={folder}/seed")

    def _start_all(self) -> None:
        self.write_etc()
        before = {node: self._registrations(node) for node in self.nodes}
        self.start_slurmctld()
        for node in self.nodes:
            self._start_slurmd(node)
        self._wait_registered(before)
        self.unheard = False

    def _start_slurmd(self, node: str, command: Sequence[str] = SLURMD) -> None:
        if UNIFIED:
            enter = 'echo 0 >"$0/cgroup.procs" && exec "$@"'
            command = ["sh", "-c", enter, str(own_group(node)), *command]
        self._start(node, *command)

    def _start(
        self, machine: str, program: str, *options: str, env: Mapping[str, str] | None = None
    ) -> None:
        done = self.run_in(machine, [program, *options], env=env)
        if done.returncode != 0:
            raise LabError(f"{program} on {machine} failed: {done.stdout}{done.stderr}")

    def _registrations(self, node: str) -> int:
        try:
            return (self.lab / f"log/{node}.log").read_text(errors="replace").count(_REGISTERED)
        except FileNotFoundError:
            return 0

    def _wait_registered(self, before: Mapping[str, int]) -> None:
        wait_until(
            lambda: all(self._registrations(node) > count for node, count in before.items()),
            why=f"slurmd on {' '.join(before)} to register",
        )


def fields(line: str) -> dict[str, str]:
    """Return what scontrol shows of a job or node in one line."""
    return dict(_FIELD.findall(line))
