# SPDX-License-Identifier: Apache-2.0
"""A node whose Slurm is systemd's: munge, slurmctld and slurmd as Debian's own units, cgroups of 2.

`gpulock install` puts the hooks there, and what it prints goes into slurm.conf as it stands.
"""

from __future__ import annotations

import functools
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.labs.common.device_nodes import PROBE, opened
from tests.labs.slurm.config import SLURM, first_job
from tests.labs.slurm.preloaded import preloaded
from tests.labs.slurm.releases import HAS_SLICE, STARTS_ANEW
from tests.labs.systemd.gpulock import GPUS, Node
from tests.support.wait import LabError, wait_until

HOST: Final = "gpulock-lab"  # of boot.sh
ADDRESS: Final = "192.0.2.1"  # of no network (RFC 5737)
USER: Final = "lab-alice"
UID: Final = 27011
HOME: Final = f"/srv/{USER}"
SLICE: Final = "gpulab.slice"
SLURMD: Final = "slurmd.service"
DAEMONS: Final = ("munge", "slurmctld", "slurmd")
STATE: Final = "/srv/slurm"  # of slurmctld's and slurmd's own
_PROBE: Final = "/srv/probe.py"
_CONF: Final = {
    **SLURM,
    "SlurmctldHost": HOST,
    "StateSaveLocation": f"{STATE}/state",
    "SlurmdSpoolDir": f"{STATE}/spool",
    "SlurmctldLogFile": f"{STATE}/log/slurmctld",
    "SlurmdLogFile": f"{STATE}/log/slurmd",
    "ProctrackType": "proctrack/cgroup",
    "TaskPlugin": "task/cgroup",
    "GresTypes": "gpu",
    "SchedulerParameters": f"{SLURM['SchedulerParameters']},nohold_on_prolog_fail",
    "NodeName": f"{HOST} CPUs=32 RealMemory=1000 Gres=gpu:{GPUS}",
    "PartitionName": "main Nodes=ALL Default=YES MaxTime=INFINITE",
}
_PAM: Final = """account required pam_permit.so
session required pam_exec.so quiet /usr/lib/gpulock/hooks/current/prolog/slurm-session
"""
_ADVICE: Final = re.compile(r"    ([A-Z]\w+=.*?)(?:  #.*)?$", re.MULTILINE)  # of `install slurm`


@dataclass(frozen=True)
class Kind:
    """A way to run the node: who keeps jobs to their GPUs."""

    name: str
    isolation: str

    @property
    def constrains(self) -> bool:
        """Return whether Slurm itself closes devices."""
        return self.isolation == "off"


class SlurmNode:
    """The machine of a `Node` with Slurm on it."""

    def __init__(self, node: Node, kind: Kind) -> None:
        self.node = node
        self.machine = node.machine
        self.run = node.machine.run
        self.kind = kind

    # --- up -----------------------------------------------------------------------------------

    def up(self, lab: Path) -> None:
        """Start Slurm without hooks, install gpulock, and start Slurm with what that asks for."""
        self.run("useradd", "-m", "-d", HOME, "-u", str(UID), USER)
        # getaddrinfo(AI_ADDRCONFIG) finds no family where each address is a loopback's.
        self.run("ip", "address", "add", f"{ADDRESS}/32", "dev", "lo")
        self.machine.write("/etc/hosts", f"127.0.0.1 localhost\n{ADDRESS} {HOST}\n")
        for name in ("state", "spool", "log"):
            self.run("install", "-d", "-o", "slurm", f"{STATE}/{name}")
        self.run("mungekey", "--create")  # as munge's postinst does
        self.run("chown", "-R", "munge:", "/etc/munge", "/var/lib/munge", "/var/log/munge")
        self.machine.write(_PROBE, PROBE)
        self._show_one_hierarchy(lab)
        self.configure()
        self.run("systemctl", "daemon-reload")
        self.restart(*DAEMONS)
        self.node.gpulock("install", "systemd")
        printed = self.node.gpulock("install", "slurm", check=False)  # slurm.conf lacks lines
        self.configure(*_ADVICE.findall(printed.partition("Into slurm.conf")[2]))
        if not self.kind.constrains:
            self.machine.write("/etc/pam.d/slurm", _PAM)
        self.restart("slurmctld", "slurmd")
        self.node.gpulock("install", "slurm")  # gres.conf was written anew: compare the map at once

    def configure(self, *advice: str) -> None:
        """Write gpulock's settings, and Slurm's files with these lines of slurm.conf."""
        self.node.configure(SYS_ROOT="/sys", ISOLATION=self.kind.isolation)
        own = [
            line for line in advice if not line.startswith(("SchedulerParameters", "PrologFlags"))
        ]
        lines = [f"{key}={value}" for key, value in _CONF.items()]
        text = "\n".join(
            [f"FirstJobId={first_job(self.machine.lab)}", "PrologFlags=Contain", *own, *lines]
        )
        gres = [f"Name=gpu File=/dev/nvidia{minor}" for minor in range(GPUS)]
        constrain = "yes" if self.kind.constrains else "no"
        cgroup = ["CgroupPlugin=cgroup/v2", f"ConstrainDevices={constrain}"]
        cgroup += [f"CgroupSlice={SLICE}"] if self.release >= HAS_SLICE else []
        for name, lines in (
            ("slurm", [text]),
            ("gres", ["AutoDetect=off", *gres]),
            ("cgroup", cgroup),
        ):
            self.machine.write(f"/etc/slurm/{name}.conf", "\n".join([*lines, ""]))

    @functools.cached_property
    def release(self) -> tuple[int, int]:
        """Return the release of Slurm, such as `(22, 5)`."""
        year, month, *_ = self.run("slurmctld", "-V").stdout.split()[-1].split(".")
        return int(year), int(month)

    def restart(self, *units: str) -> None:
        """Start services anew, and wait until the node takes jobs."""
        self.run("systemctl", "restart", *units)
        self.wait_idle()

    def start_by_bare_name(self) -> None:
        """Have systemd start slurmd without its path, as a shell would, until `start_as_installed`.

        At a reconfigure such a slurmd finds its program by /proc/self/exe: Debian's `slurmd-wlm`.
        """
        options = "--systemd" if self.release >= STARTS_ANEW else "-D -s"  # as in Debian's unit
        self.node.drop_in(SLURMD, "ExecStart=", f"ExecStart=@/usr/sbin/slurmd slurmd {options}")
        self.run("systemctl", "daemon-reload")
        self.restart(SLURMD)

    def start_as_installed(self) -> None:
        """Have systemd start slurmd by Debian's own unit again."""
        self.run("rm", "-r", f"/etc/systemd/system/{SLURMD}.d")
        self.run("systemctl", "daemon-reload")
        self.restart(SLURMD)

    def reconfigure(self) -> int:
        """Reconfigure Slurm, and wait until it takes jobs; return the process of slurmd's then."""
        before = self.node.main_pid(SLURMD)
        self.run("scontrol", "reconfigure")
        if self.release >= STARTS_ANEW:
            wait_until(
                lambda: self.node.main_pid(SLURMD) not in (0, before),
                why="slurmd to start itself anew",
            )
        self.wait_idle()
        return self.node.main_pid(SLURMD)

    def wait_idle(self) -> None:
        """Wait until slurmctld has heard of slurmd."""
        wait_until(lambda: self.state() in ("idle", "mixed"), why="the node to take jobs")

    def state(self) -> str:
        """Return the node's state; one that does not answer has a star."""
        return self.run("sinfo", "-h", "-o", "%T", check=False).stdout.strip()

    def _show_one_hierarchy(self, lab: Path) -> None:
        """Hide hierarchies of version 1, which the kernel names though none is mounted here."""
        named = Path("/proc/self/cgroup").read_text().splitlines()
        if any(not line.startswith("0::") for line in named):
            made = Path(preloaded(lab, "unified"))
            inside = f"/srv/{made.name}"
            self.machine.path(inside).write_bytes(made.read_bytes())
            self.machine.path(inside).chmod(0o755)
            self.machine.write("/etc/ld.so.preload", f"{inside}\n")

    # --- jobs ---------------------------------------------------------------------------------

    @property
    def probe(self) -> str:
        """Return the command that opens every GPU's device node, and says what came of it."""
        return f"/usr/bin/python3 -IS {_PROBE} /dev | grep nvidia"

    def submit(self, text: str, *words: str) -> str:
        """Submit a batch job of the user's; return its id."""
        asked = " ".join(map(shlex.quote, words))
        submit = f"cd {HOME} && exec sbatch --parsable -o %j.out {asked}"
        line = ["runuser", "-u", USER, "--", "sh", "-c", submit]
        return self.run(*line, stdin=f"#!/bin/bash\n{text}\n").stdout.strip()

    def touch(self, name: str) -> None:
        """Make a file in the user's home, for which a job waits."""
        self.machine.path(f"{HOME}/{name}").touch()

    def said(self, job: str) -> str:
        """Return what a job has printed."""
        try:
            return self.machine.path(f"{HOME}/{job}.out").read_text()
        except FileNotFoundError:
            return ""

    def wait_said(self, job: str, word: str) -> str:
        """Wait until a job has printed a word; return all it has printed."""
        return wait_until(
            lambda: said if word in (said := self.said(job)) else None,
            why=f"job {job} to print {word}",
        )

    def held_by(self, job: str) -> set[str]:
        """Return the device nodes of the GPUs that a job holds."""
        locks = self.node.locks().items()
        return {f"nvidia{one.minor_of(name)}" for name, one in locks if one.job_id == job}

    def shown(self, job: str) -> str:
        """Return what scontrol shows of a job."""
        return self.run("scontrol", "show", "job", "-o", job, check=False).stdout

    def wait_over(self, job: str) -> str:
        """Wait until a job and its Epilog are over; return its state."""
        done = wait_until(
            lambda: (
                found
                if (found := re.search(r"JobState=(COMPLETED|FAILED|CANCELLED)", self.shown(job)))
                else None
            ),
            why=f"job {job} to end",
        )
        return done[1]

    def wait_free(self, job: str) -> None:
        """Wait until a job holds nothing."""
        wait_until(lambda: not self.held_by(job), why=f"the GPUs of job {job}")

    def opens(self, text: str) -> set[str]:
        """Return the GPUs that a probe could open; raise LabError where it said anything odd."""
        seen = opened(text)
        every = {f"nvidia{minor}" for minor in range(GPUS)}
        may = seen.get("ENXIO", set()) & every
        if seen.get("EPERM", set()) != every - may:
            raise LabError(f"neither opened nor denied: {seen}")
        return may

    def forget_killed_jobs(self) -> None:
        """Have slurmctld give up jobs whose step daemons were killed: no Epilog would end them."""
        self.run("scontrol", "update", f"nodename={HOST}", "state=down", "reason=lab")
        # where slurmd has said meanwhile that it is there, the node is back already
        self.run("scontrol", "update", f"nodename={HOST}", "state=resume", check=False)

    def clear(self) -> None:
        """End every job, whatever became of its daemons, and leave a node that takes jobs."""
        self.run("systemctl", "start", "slurmctld", "slurmd")
        self.run("scancel", "-u", USER)
        wait_until(
            lambda: not self.run("squeue", "-h", "--all", check=False).stdout,
            why="the queue to be empty",
        )
        if self.state() not in ("idle", "mixed"):
            self.run("scontrol", "update", f"nodename={HOST}", "state=resume", check=False)
            self.wait_idle()
        self.run("sh", "-c", f"rm -f {HOME}/*")
